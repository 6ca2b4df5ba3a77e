"""Tests that collectives work in the same way while they are measured."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.engine.collective_meter import MOST_KEPT, CollectiveMeter

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
