"""Tests that checkpoints after the first reuse its plan, with the same content as a new plan."""

from __future__ import annotations

import io
import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.adaptive.checkpoint.folder import CheckpointFolder
from megatron.adaptive.checkpoint.writer import ShardWriter, write_file

Make = Callable[..., Any]
FLAGS: list[dict[str, str | None]] = [
    {},
    {"swiglu": None},
    {"fp16": None, "swiglu": None},
    {"use_distributed_optimizer": None},
    {"no_save_optim": None, "no_save_rng": None},
]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets an entry when the parts of a checkpoint are divided among ranks."""
    planned: list[str] = []
    share_out = ShardWriter._share_out

    def counted(*arguments: Any) -> None:
        planned.append("planned")
        share_out(*arguments)

    monkeypatch.setattr(ShardWriter, "_share_out", counted)
    return planned


@pytest.fixture(autouse=True)
def _random_states() -> Iterator[None]:
    """Restores the states of the random generators after each test."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def contents(folder: Path, iteration: int) -> dict[str, bytes]:
    """Returns the content of each file of checkpoint ``iteration`` in ``folder``, by file name."""
    path = CheckpointFolder(folder).complete_path(iteration)
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_full_disk_leaves_no_view_of_a_buffer_behind() -> None:
    """Checks that an error keeps no view of a buffer, because this would crash Python 3.12.1."""
    with pytest.raises(OSError, match="No space left on device") as failure:
        write_file(Path("/dev/full"), [torch.ones(1000)], {})
    cause = failure.value.__context__
    assert cause is not None
    held = [
        value
        for frame, _ in traceback.walk_tb(cause.__traceback__)
        for value in frame.f_locals.values()
        if isinstance(value, io.BytesIO)
    ]
    assert held
    for buffer in held:
        buffer.seek(0, io.SEEK_END)
        buffer.write(bytes(1 << 20))  # The buffer can grow only if there is no view of it.


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_later_checkpoint_is_that_of_a_run_which_saves_for_the_first_time(
    make: Make, worker: Any, tmp_path: Path, plans: list[str], flags: dict[str, str | None]
) -> None:
    run = make(save=tmp_path / "often", **flags)
    for iteration in range(1, 4):
        run.step()
        if iteration == 2:
            run.checkpoints.save(worker.progress(iteration), behind=True)
        else:
            run.checkpoints.save(worker.progress(iteration))
    assert plans == ["planned"]
    once = make(save=tmp_path / "once", **flags)
    once.step(3)
    once.checkpoints.save(worker.progress(3))
    often, expected = (contents(tmp_path / name, 3) for name in ("often", "once"))
    assert often.keys() == expected.keys()
    # These two files contain the path of --save, which differs between the runs.
    for name in expected.keys() - {"manifest.json", "common.pt"}:
        assert often[name] == expected[name], name
    if "no_save_optim" not in flags:
        resumed = make(load=tmp_path / "often", **flags)
        assert resumed.checkpoints.load() == worker.progress(3)
        worker.require_equal(resumed.state(), run.state(), "resumed")


def test_random_states_of_another_length_are_found(
    make: Make, worker: Any, tmp_path: Path, plans: list[str]
) -> None:
    run = make(save=tmp_path)
    run.checkpoints.save(worker.progress(1))
    # The generator keeps a second value for the next call, which makes its state longer.
    random.gauss(0, 1)
    expected = random.getstate(), torch.get_rng_state()
    run.checkpoints.save(worker.progress(2))
    assert plans == ["planned"]
    random.seed(1)
    torch.manual_seed(1)
    make(load=tmp_path).checkpoints.load()
    assert random.getstate() == expected[0]
    assert torch.equal(torch.get_rng_state(), expected[1])


def test_state_that_came_to_lie_elsewhere_is_found(
    make: Make, worker: Any, tmp_path: Path, plans: list[str]
) -> None:
    """Checks that tensors that were replaced, as in loading, are saved with their new content."""
    run = make(save=tmp_path)
    run.step(2)
    run.checkpoints.save(worker.progress(1))
    for parameter, held in run.optimizer.chained_optimizers[0].optimizer.state.items():
        held["exp_avg"] = torch.full_like(parameter, 0.5)
    run.checkpoints.save(worker.progress(2))
    expected = run.state()
    run.step()
    run.checkpoints.save(worker.progress(3))
    assert plans == ["planned"]
    resumed = make(load=tmp_path, ckpt_step=2)
    resumed.checkpoints.load()
    worker.require_equal(resumed.state(), expected, "resumed")
    resumed = make(load=tmp_path)
    resumed.checkpoints.load()
    worker.require_equal(resumed.state(), run.state(), "resumed later")


def test_a_failed_checkpoint_does_not_spoil_the_next(
    make: Make, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.adaptive.checkpoint import writer
    from megatron.adaptive.errors import CheckpointError

    run = make(save=tmp_path)
    for first in (True, False):
        if not first:
            run.checkpoints.save(worker.progress(1))
            run.step()

        def full(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(writer, "_compact", full)
            with pytest.raises(CheckpointError, match="No space left"):
                run.checkpoints.save(worker.progress(2))
        assert not CheckpointFolder(tmp_path).partial_path(2).exists()
    run.checkpoints.save(worker.progress(3))
    resumed = make(load=tmp_path)
    assert resumed.checkpoints.load() == worker.progress(3)
    worker.require_equal(resumed.state(), run.state(), "resumed")
