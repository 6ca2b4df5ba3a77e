"""Tests that collectives work in the same way while they are measured."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import device_collectives
from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.engine.collective_meter import MOST_KEPT, CollectiveMeter
from tests.device_tensor import on_device

LIMIT = datetime.timedelta(seconds=30)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Yields a process group that contains only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_wait_takes_its_time_limit_by_name(group: dist.ProcessGroup) -> None:
    meter = CollectiveMeter({"tensor": group}, CpuClock())
    meter.begin(1, is_traced=True)
    try:
        values = torch.arange(4.0)
        result = torch.zeros(4)
        # For the first collective, gloo returns a future, which records its end. For the second
        # collective, there is no future.
        dist.all_reduce(values, group=group, async_op=True).wait(timeout=LIMIT)
        dist.reduce_scatter_tensor(result, values, group=group, async_op=True).wait(timeout=LIMIT)
        assert result.tolist() == values.tolist()
        (row,) = meter.rows()
    finally:
        meter.close()
    assert row.operations == ("all-reduce", "reduce-scatter")
    assert row.totals[1][0] == 1
    assert 1 in [number for number, *_ in row.kept]


def test_over_many_steps_all_collectives_are_kept(group: dist.ProcessGroup) -> None:
    meter = CollectiveMeter({"tensor": group}, CpuClock())
    count, steps = 4 * MOST_KEPT, 24
    times_kept = [0] * count
    for iteration in range(steps):
        meter.begin(iteration, is_traced=True)
        for _ in range(count):
            dist.all_reduce(torch.ones(2), group=group)
        (row,) = meter.rows()
        assert len(row.kept) == MOST_KEPT
        for number, *_ in row.kept:
            times_kept[number] += 1
    assert sum(times_kept) == steps * MOST_KEPT
    assert min(times_kept) >= 2
    assert max(times_kept) <= 10


def test_steps_of_two_models_may_overlap(group: dist.ProcessGroup) -> None:
    before = dist.ProcessGroup.allreduce
    meters = [CollectiveMeter({kind: group}, CpuClock()) for kind in ("tensor", "data")]
    for meter in meters:
        meter.begin(1, is_traced=True)
        dist.all_reduce(torch.ones(2), group=group)
    # The meter that began first also ends first, while the other meter is active. This happens if
    # the steps of two models overlap, such as an actor and a critic.
    assert [row.totals[0][0] for row in meters[0].rows()] == [2]
    dist.all_reduce(torch.ones(2), group=group)
    assert [row.totals[0][0] for row in meters[1].rows()] == [2]
    assert dist.ProcessGroup.allreduce is before


class CountingClock(CpuClock):
    """Replaces the clock of a GPU, and counts how often a time is recorded.

    Attributes:
        marks: Number of recorded times.
    """

    def __init__(self) -> None:
        self.marks = 0

    def mark(self) -> int:
        self.marks += 1
        return super().mark()


@pytest.fixture
def meter(group: dist.ProcessGroup) -> Iterator[CollectiveMeter]:
    """Yields a meter of the process group, which measures a step and has a ``CountingClock``."""
    made = CollectiveMeter({"data": group}, CountingClock())
    made.begin(1, is_traced=True)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces collectives with those that are used if several ranks share a GPU."""
    for name in device_collectives.TREATMENTS:
        # monkeypatch restores the attribute that it has set, so set each attribute to itself.
        if name in vars(dist.ProcessGroup):
            monkeypatch.setattr(dist.ProcessGroup, name, vars(dist.ProcessGroup)[name])
    device_collectives.install()
    # Simulate two ranks, because collectives of a single rank would not call gloo.
    monkeypatch.setattr(dist.ProcessGroup, "size", lambda self: 2)


def _await(condition: Callable[[], bool]) -> None:
    """Waits until ``condition`` returns True."""
    end_s = time.monotonic() + LIMIT.total_seconds()
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_a_thread_of_gloo_records_no_mark_on_the_gpu(
    group: dist.ProcessGroup, meter: CollectiveMeter
) -> None:
    """Checks that the caller's thread records the end of a gloo collective with GPU tensors.

    Threads of gloo do not use the caller's stream.
    """
    work = dist.all_reduce(on_device(torch.ones(4)), group=group, async_op=True)
    _await(work.is_completed)
    # Give the thread of gloo time to run a callback after it has marked the work as complete.
    time.sleep(0.05)
    assert meter._clock.marks == 1
    work.wait()
    assert meter._clock.marks == 2
    (row,) = meter.rows()
    assert len(row.kept) == 1


def test_a_callback_of_nccl_records_the_end(
    group: dist.ProcessGroup, meter: CollectiveMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = SimpleNamespace(name=lambda: "nccl")
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda self, device: nccl)
    work = dist.all_reduce(on_device(torch.ones(4)), group=group, async_op=True)
    _await(lambda: meter._clock.marks == 2)
    work.wait()
    assert meter._clock.marks == 2


@pytest.mark.usefixtures("shared_gpu")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_replaced_collective_is_counted_once(group: dist.ProcessGroup, is_async: bool) -> None:
    """Checks a reduction of several tensors on a shared GPU, which becomes several reductions.

    With ``is_async``, the caller waits later, as in an overlapped reduction of gradients.
    """
    meter = CollectiveMeter({"data": group}, CountingClock())
    meter.begin(1, is_traced=True)
    try:
        options = dist.AllreduceCoalescedOptions()
        if hasattr(options, "asyncOp"):  # Older releases of torch do not have this attribute.
            options.asyncOp = is_async
        tensors = [on_device(torch.ones(size)) for size in (1, 2, 4)]
        group.allreduce_coalesced(tensors, options).wait()
        assert meter._clock.marks == 2
        dist.all_reduce(on_device(torch.ones(4)), group=group)
        (row,) = meter.rows()
    finally:
        meter.close()
    assert row.operations == ("all-reduce",)
    count, _, size_bytes = row.totals[0]
    assert (count, size_bytes) == (2, 4 * (1 + 2 + 4 + 4))
    assert len(row.kept) == 2


@pytest.mark.usefixtures("shared_gpu")
def test_replacing_collectives_keep_the_settings(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the replacements of a collective keep its settings, such as its timeout."""
    settings: list[Any] = []

    def allreduce(self: Any, tensors: Any, options: Any) -> Any:
        settings.append((options.reduceOp, options.timeout, getattr(options, "asyncOp", False)))

    monkeypatch.setattr(dist.ProcessGroup, "allreduce", allreduce)
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.MAX
    options.timeout = LIMIT
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    group.allreduce_coalesced([on_device(torch.ones(2))], options)
    assert settings == [(dist.ReduceOp.MAX, LIMIT, False)]
