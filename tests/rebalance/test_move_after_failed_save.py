"""Tests that a run whose layers move continues if a checkpoint cannot be written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.adaptive.checkpoint.folder import CheckpointFolder
from tests.multiprocess.launch import torchrun

from .test_time_limit import FLAGS

SCRIPT = Path(__file__).with_name("move_after_failed_save.py")


@pytest.mark.multiprocess
def test_the_run_goes_on_and_the_next_save_takes_the_place(tmp_path: Path) -> None:
    log, checkpoints = tmp_path / "output.txt", tmp_path / "checkpoints"
    flags = [str(checkpoints), *FLAGS, "--repartition", "auto"]
    flags += ["--save", str(checkpoints), "--save-interval", "1", "--async-save"]
    torchrun(SCRIPT, flags, world_size=2, log=log, limit_s=250)
    text = log.read_text()
    assert "WARNING: the checkpoint of iteration 2 was not written to " in text
    assert "training waits until the checkpoint of iteration 3 is written instead" in text
    assert sorted(CheckpointFolder(checkpoints).steps()) == [1, 3, 4, 5, 6]
    saved = re.findall(r"saved checkpoint from iteration +(\d+) ", text)
    assert [int(step) for step in saved] == [1, 3, 4, 5, 6]
