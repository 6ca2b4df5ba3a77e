"""Tests that later checkpoints reuse the save plan of the first, with the same content."""

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

from megatron.adaptive.checkpoint import writer
from megatron.adaptive.checkpoint.checksums import sum_of
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
    """Returns the content of each file in checkpoint ``iteration``, keyed by file name."""
    path = CheckpointFolder(folder).complete_path(iteration)
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("count", [1000, 1 << 22])
def test_a_full_disk_leaves_no_view_of_memory_behind(count: int) -> None:
    """Checks that the error names its cause, and keeps no view of memory that torch may free."""
    with pytest.raises(OSError, match="No space left on device") as failure:
        write_file(Path("/dev/full"), [torch.ones(count)], {})
    cause = failure.value.__context__
    assert isinstance(cause, OSError)
    held = [
        value
        for frame, _ in traceback.walk_tb(cause.__traceback__)
        for value in frame.f_locals.values()
    ]
    assert any(isinstance(value, torch.Tensor) for value in held)
    assert not any(isinstance(value, memoryview) for value in held)


class Recording:
    """Wraps a file, and records the size of each write.

    Args:
        file: File to write to.
        sizes: List to which the sizes in bytes are appended.
    """

    def __init__(self, file: Any, sizes: list[int]) -> None:
        self.file, self.sizes = file, sizes

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: Any) -> int:
        self.sizes.append(len(data))
        return int(self.file.write(data))


def test_a_large_tensor_is_written_in_pieces_and_never_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a save in the background does not stop the training thread.

    A copy of a whole tensor to a buffer holds the GIL for as long as it takes.
    """
    sizes: list[int] = []
    monkeypatch.setattr(writer, "_buffered", lambda value: pytest.fail("copied to a buffer"))
    path, opened = tmp_path / "file", Path.open

    def recorded(self: Path, *args: Any, **more: Any) -> Any:
        file = opened(self, *args, **more)
        # Other threads of the process that runs the tests write files of their own.
        return Recording(file, sizes) if self == path else file

    monkeypatch.setattr(Path, "open", recorded)
    tensor = torch.arange(5 << 20, dtype=torch.int32)
    ((_, length, _, _),), _ = write_file(path, [tensor], {})
    assert max(sizes) == 4 << 20
    assert len(sizes) == 7  # The head, five pieces and the end, each in one write.
    assert sum(sizes) == length


@pytest.mark.parametrize("count", [0, 1, 100, (1 << 14) - 1, 1 << 14, 1 << 21])
def test_a_tensor_is_written_as_torch_saves_it(tmp_path: Path, count: int) -> None:
    """Checks the bytes of the file, and the position of the raw bytes, for several sizes."""
    tensors = [torch.randn(count), torch.randn(count + 1)[1:], torch.randn(count).bfloat16()]
    heads: dict[Any, int] = {}
    places, sums = write_file(tmp_path / "file", tensors, heads)
    content = (tmp_path / "file").read_bytes()
    assert sums == sum_of(content)
    for tensor, entry in zip(tensors, places, strict=True):
        begin, length, raw, size = entry
        saved = io.BytesIO()
        torch.save(tensor.clone(), saved)
        assert content[begin : begin + length] == saved.getvalue()
        assert content[raw : raw + size] == bytes(tensor.clone().view(torch.uint8).numpy())
        saved.seek(0)
        reader: Any = torch._C.PyTorchFileReader(saved)  # type: ignore[call-arg]
        assert raw - begin == reader.get_record_offset("data/0")


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
