"""Tests the example programs by running them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.planner import profile_file

from ..multiprocess.launch import forking, run_forked
from .ranks import EXAMPLES

pytestmark = pytest.mark.multiprocess

LIMIT_S = 200


def alone(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_forked([str(EXAMPLES / "mlp.py"), *flags], folder=folder, limit_s=LIMIT_S)


@pytest.mark.long
def test_an_example_trains_on_two_processes(tmp_path: Path) -> None:
    command = ["-m", "megatron.adaptive", "job", "launch", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "mlp.py"), "--steps", "6", "--schedule", "zb-v"]
    command += ["--save", str(tmp_path), "--write-profile", str(tmp_path / "profile.json")]
    done = subprocess.run(
        [sys.executable, *command],
        env=forking(),  # The launcher is forked from a server, but its ranks are not.
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The command line sets no sizes, so the planner must choose all sizes.
    assert "plan: " in done.stdout
    assert profile_file.load(tmp_path / "profile.json")["model"]["name"] == "Mlp"
    losses = [float(printed) for printed in re.findall(r"step \d: loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert "segments per stage" in done.stdout
    evaluated = re.findall(r"evaluation: loss ([0-9.]+)", done.stdout)
    loaded = alone(tmp_path, "--steps", "1", "--micro-batch-size", "2", "--load", str(tmp_path))
    assert loaded.returncode == 0, loaded.stderr
    # The model has no dropout, so the first loss after loading equals the loss of the last
    # evaluation.
    assert re.findall(r"step (\d): loss ([0-9.]+)", loaded.stdout) == [("7", evaluated[0])]


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    done = alone(tmp_path, "--micro-batch-size", "3")
    assert done.returncode == 2
    assert "error: a batch of 16 samples cannot be divided" in done.stderr
    assert "Traceback" not in done.stderr
