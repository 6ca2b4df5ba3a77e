"""Tests that the GPU check can be rehearsed on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.multiprocess.launch import ROOT, forking


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_a_rehearsal_runs_every_part(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "--rehearse", "--minutes", "14"]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=870, env=forking())
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    page = (tmp_path / "gpu_check.md").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + page
    states = {part["name"]: part["state"] for part in content["parts"]}
    parts = (
        "set-up device ipc equivalence pipeline pp1 pp2 memory resume v transports training others"
    )
    assert set(states) == {*parts.split(), "nccl", "te", "oom"}
    # These parts need a GPU, or a memory limit that can be set only for a GPU.
    assert {name for name, state in states.items() if state == "left out"} == {
        *("transports", "oom", "nccl", "te")
    }
