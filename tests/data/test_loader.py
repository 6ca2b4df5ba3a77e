"""Tests that each sample is read once and in order, even if the number of ranks changes."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megatron.adaptive.data.loader import Microbatch, MicrobatchLoader
from megatron.adaptive.errors import DataError
from megatron.adaptive.schedule.document_rows import Batching

from ..multiprocess.launch import has_ended, wait_until

# Workers need only milliseconds to read samples, so this timeout is never reached.
pytestmark = pytest.mark.timeout(60)

LENGTH = 5


class Numbered:
    """Dataset in which each sample contains only its index."""

    def __init__(self, size: int, with_mask: bool = False) -> None:
        self._size = size
        self._with_mask = with_mask
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self._size:
            raise IndexError(index)
        self.reads.append(index)
        sample: dict[str, Any] = {
            "dataset_id": np.int16(0),
            "tokens": torch.full((LENGTH,), index),
            "labels": torch.full((LENGTH,), index + 1),
            "loss_mask": torch.ones(LENGTH),
            "position_ids": torch.arange(LENGTH),
        }
        if self._with_mask:
            sample["attention_mask"] = torch.triu(torch.ones(1, LENGTH, LENGTH), 1) > 0
        return sample


def _loader(dataset: Any, **changes: Any) -> MicrobatchLoader:
    batching = Batching(
        micro_batch_size=changes.pop("micro_batch_size", 2), replicas=changes.pop("dp_size", 1)
    )
    settings: dict[str, Any] = {"consumed_samples": 0, "dp_rank": 0, **changes}
    return MicrobatchLoader(dataset, batching=batching, **settings)


def _numbers(microbatch: Microbatch) -> list[int]:
    return microbatch["tokens"][:, 0].tolist()


@pytest.fixture(params=[0, 2])
def workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_two_ranks_share_each_block_as_megatron_does(workers: int) -> None:
    drawn = []
    for rank in (0, 1):
        loader = _loader(Numbered(12), dp_rank=rank, dp_size=2, num_workers=workers)
        drawn.append([_numbers(microbatch) for microbatch in loader.step(3)])
        loader.close()
    assert drawn == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]


def test_a_resumed_run_continues_where_it_stopped(workers: int) -> None:
    whole = _loader(Numbered(40), num_workers=workers)
    expected = [_numbers(microbatch) for _ in range(5) for microbatch in whole.step(4)]
    whole.close()
    first = _loader(Numbered(40), num_workers=workers)
    drawn = [_numbers(microbatch) for _ in range(2) for microbatch in first.step(4)]
    consumed = first.consumed_samples
    first.close()
    second = _loader(Numbered(40), consumed_samples=consumed, num_workers=workers)
    drawn += [_numbers(microbatch) for _ in range(3) for microbatch in second.step(4)]
    second.close()
    assert drawn == expected


def test_a_changing_shape_neither_loses_nor_repeats_a_sample() -> None:
    dataset = Numbered(200)
    consumed, seen = 0, []
    # Each tuple contains the data-parallel size, the microbatch size, and the number of
    # microbatches in each step. In the first tuple, the batch size increases. The other tuples
    # change the number of ranks and the microbatch size.
    for dp_size, micro_batch_size, steps in ((2, 1, (2, 4, 8)), (4, 2, (3, 3)), (3, 5, (1, 2))):
        loaders = [
            _loader(
                dataset,
                consumed_samples=consumed,
                micro_batch_size=micro_batch_size,
                dp_rank=rank,
                dp_size=dp_size,
            )
            for rank in range(dp_size)
        ]
        for count in steps:
            step = [_numbers(part) for loader in loaders for part in loader.step(count)]
            new = sorted(number for part in step for number in part)
            # The global batch must contain the next samples in order, but any rank may read any of
            # them.
            assert new == list(range(consumed, consumed + count * micro_batch_size * dp_size))
            seen += new
            consumed += len(new)
            assert {loader.consumed_samples for loader in loaders} == {consumed}
    assert seen == list(range(121))


def test_microbatches_are_read_in_any_order_and_kept(workers: int) -> None:
    loader = _loader(Numbered(20), num_workers=workers)
    step = loader.step(4)
    assert len(step) == 4
    assert _numbers(step[2]) == [4, 5]
    assert _numbers(step[0]) == [0, 1]
    assert step[2] is step[2]
    with pytest.raises(IndexError, match=r"outside 0\.\.3"):
        step[4]
    loader.close()


def test_what_a_step_leaves_unread_is_passed_over(workers: int) -> None:
    loader = _loader(Numbered(40), num_workers=workers)
    old = loader.step(4)
    assert _numbers(old[1]) == [2, 3]
    loader.step(3)
    assert _numbers(loader.step(2)[1]) == [16, 17]
    assert _numbers(old[1]) == [2, 3]
    with pytest.raises(RuntimeError, match="earlier step"):
        old[2]
    loader.close()


def test_without_workers_nothing_is_read_before_it_is_needed() -> None:
    dataset = Numbered(20)
    step = _loader(dataset).step(4)
    assert dataset.reads == []
    assert _numbers(step[1]) == [2, 3]
    assert dataset.reads == [0, 1, 2, 3]


def test_every_read_is_reported_with_its_time(workers: int) -> None:
    reads: list[tuple[int, int, int]] = []
    loader = _loader(Numbered(20), num_workers=workers, on_read=lambda *read: reads.append(read))
    step = loader.step(3)
    assert _numbers(step[1]) == [2, 3]
    assert _numbers(step[1]) == [2, 3]
    loader.close()
    assert [index for index, _, _ in reads] == [0, 1]
    assert all(start_ns < end_ns for _, start_ns, end_ns in reads)


def test_shapes_and_types(workers: int) -> None:
    loader = _loader(Numbered(4, with_mask=True), num_workers=workers)
    batch = loader.step(2)[1]
    loader.close()
    assert {key: (tuple(value.shape), value.dtype) for key, value in batch.items()} == {
        "tokens": ((2, LENGTH), torch.int64),
        "labels": ((2, LENGTH), torch.int64),
        "loss_mask": ((2, LENGTH), torch.float32),
        "position_ids": ((2, LENGTH), torch.int64),
        "attention_mask": ((2, 1, LENGTH, LENGTH), torch.bool),
    }
    assert batch["labels"][0].tolist() == [3] * LENGTH
    assert "attention_mask" not in _loader(Numbered(4)).step(1)[0]


def test_the_end_of_the_data_is_an_error_before_the_step(workers: int) -> None:
    loader = _loader(Numbered(11), num_workers=workers)
    loader.step(3)
    with pytest.raises(DataError, match=r"ends after 11 samples, but this step needs .* 6 to 11"):
        loader.step(3)
    assert [_numbers(part) for part in loader.step(2)] == [[6, 7], [8, 9]]
    loader.close()
    with pytest.raises(DataError, match="ends after 4 samples"):
        _loader(Numbered(4), consumed_samples=9).step(1)


class PidOf(Numbered):
    """Dataset in which each sample contains the ID of the process that reads it."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": torch.tensor([os.getpid()])}


def test_workers_survive_the_signals_that_stop_a_trainer() -> None:
    loader = _loader(PidOf(400), num_workers=1)
    pid = _numbers(loader.step(1)[0])[0]
    assert pid != os.getpid()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert _numbers(loader.step(100)[99]) == [pid, pid]
    loader.close()


class NeverRead(Numbered):
    """Dataset whose samples take longer to read than any test."""

    def __init__(self, size: int, pids: Path) -> None:
        super().__init__(size)
        self._pids = pids

    def __getitem__(self, index: int) -> dict[str, Any]:
        (self._pids / str(os.getpid())).touch()
        time.sleep(600)
        raise AssertionError("this sample must never be read completely")


def test_workers_end_when_their_rank_is_killed(tmp_path: Path) -> None:
    """Checks that workers exit after their rank was killed, so that its connections are closed."""
    rank = os.fork()
    if rank == 0:
        loader = _loader(NeverRead(400, tmp_path), num_workers=2)
        loader.step(1)[0]
        os._exit(0)
    wait_until(
        lambda: len([*tmp_path.iterdir()]) == 2, lambda: "no worker has started to read", 30.0
    )
    workers = [psutil.Process(int(path.name)) for path in tmp_path.iterdir()]
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    try:
        for worker in workers:
            wait_until(partial(has_ended, worker), partial(str, worker), 30.0)
    finally:
        for worker in workers:
            if not has_ended(worker):
                worker.kill()
