"""What a manager makes of the end of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.adaptive.elastic.job import Epoch, EpochProgress, end_epochs, epoch_folder
from megatron.adaptive.elastic.launching import JobSpec, Running
from megatron.adaptive.elastic.manager import Manager
from megatron.adaptive.elastic.shapes import Shape
from megatron.adaptive.pipeline.progress import is_over


def ended(status: int) -> Running:
    """An epoch of one rank that ended by itself."""
    shape = Shape(tensor=1, pipeline=1, data=1, partition=(1,), micro_batch=1, flags=())
    epoch = Epoch(number=1, shape="one", processes=1, nodes=("a",), reason="start")
    fault = f"rank 0 on a ended with status {status}"
    where, statuses = {"1/0": "a"}, {"1/0": status}
    return Running(
        epoch=epoch, shape=shape, folder=Path(), where=where, statuses=statuses, fault=fault
    )


def test_only_what_never_worked_ends_the_job_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network that was cut while a later epoch started looked like a wrong flag."""
    spec = JobSpec(script=Path("x.py"), arguments=(), checkpoints=tmp_path, max_restarts=2)
    manager = Manager(spec, lambda arguments, slots: None)
    manager._before = EpochProgress()
    assert manager._judge(ended(2)) == (2, "")
    manager._failures = 0
    manager._before = EpochProgress(first_ns=1, saved_ns=2)
    running = ended(1)
    assert manager._judge(running) == (None, running.fault)
    manager._before = EpochProgress()
    assert manager._judge(running) == (None, running.fault)
    assert manager._judge(running) == (1, "")
    assert "3 failures without a checkpoint between them" in capsys.readouterr().err


def test_epochs_of_every_manager_are_over_before_the_next(tmp_path: Path) -> None:
    folders = [epoch_folder(tmp_path, number, secret) for number, secret in ((1, "a"), (2, "b"))]
    for folder in folders:
        folder.mkdir()
    end_epochs(tmp_path)
    assert all(is_over(str(folder)) for folder in folders)
