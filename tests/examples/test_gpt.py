"""Tests that the scripts in ``examples/gpt`` can train a model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..multiprocess.launch import forking

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "gpt"


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "ranks", "losses"),
    [
        ("moe_small.sh", 4, ("lm loss", "load_balancing_loss")),
        ("deepseek_small.sh", 2, ("lm loss", "mtp_1 loss", "seq_load_balancing_loss")),
    ],
)
def test_a_small_mixture_of_experts_trains(
    script: str, ranks: int, losses: tuple[str, ...], tmp_path: Path
) -> None:
    flags = "--train-iters 3 --eval-iters 0 --log-interval 1".split()
    done = subprocess.run(
        ["bash", str(SCRIPTS / script), *flags],
        env={**forking(), "PYTHON": sys.executable, "RUN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    shown = {name: re.findall(rf"\| {name}: (\S+)", done.stdout) for name in losses}
    assert all(len(values) == 3 for values in shown.values()), done.stdout
    main = [float(loss) for loss in shown["lm loss"]]
    assert main[-1] < main[0]
    assert len(list((tmp_path / "traces").glob("trace_rank_*.jsonl"))) == ranks
