"""The scripts of ``examples/gpt`` train."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "gpt"


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.long
def test_a_small_mixture_of_experts_trains_on_four_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPTS / "moe_small.sh"), "--train-iters", "3", "--eval-iters", "0"],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "RUN_DIR": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert len(list((tmp_path / "traces").glob("trace_rank_*.jsonl"))) == 4
