"""The examples as programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.planner import profile_file

from .ranks import EXAMPLES

pytestmark = pytest.mark.multiprocess

LIMIT_S = 200


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parents[1])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_an_example_trains_on_two_processes(tmp_path: Path) -> None:
    launch = ["-m", "megatron.adaptive", "launch", "--standalone", "--nproc-per-node", "2"]
    done = run(
        *launch, str(EXAMPLES / "mlp.py"), "--steps", "6", "--schedule", "zb-v",
        "--save", str(tmp_path), "--write-profile", str(tmp_path / "profile.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "plan: " in done.stdout  # neither size was given
    assert profile_file.load(tmp_path / "profile.json")["model"]["name"] == "Mlp"
    losses = [float(one) for one in re.findall(r"step \d: loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert "segments per stage" in done.stdout
    evaluated = re.findall(r"evaluation: loss ([0-9.]+)", done.stdout)
    alone = run(
        str(EXAMPLES / "mlp.py"), "--steps", "1", "--micro-batch-size", "2", "--load", str(tmp_path)
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    # The first step on one process has the loss that two evaluated last: nothing is random here.
    assert re.findall(r"step (\d): loss ([0-9.]+)", alone.stdout) == [("7", evaluated[0])]


def test_what_is_wrong_is_one_line() -> None:
    done = run(str(EXAMPLES / "mlp.py"), "--micro-batch-size", "3")
    assert done.returncode == 2
    assert "error: a batch of 16 samples does not divide" in done.stderr
    assert "Traceback" not in done.stderr
