"""Bounds the distance of ``adaptive`` from a lower bound when durations scatter."""

from __future__ import annotations

import pytest

from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.registry import make_policies
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.workload import Jitter, StageTimes, Workload, draw


def lower_bound_ps(placement: Placement, workload: Workload) -> int:
    """Each rank does all its work after the first microbatch has come to its first stage."""
    forward = workload.durations_ps[0, :, 0]
    total = workload.durations_ps.sum(axis=(0, 2))
    bounds = []
    for rank in range(placement.num_ranks):
        stages = [placement.stage_of(rank, chunk) for chunk in range(placement.num_chunks)]
        head = int(forward[: min(stages)].sum())
        bounds.append(head + int(total[stages].sum()))
    return max(bounds)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.2, 0.3])
def test_within_five_percent_of_the_bound(ranks: int, sigma: float) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=2, kind="v")
    times = StageTimes.equal(2 * ranks, forward_s=1.0, backward_s=1.0, weight_s=1.0)
    for microbatches in (2 * ranks, 3 * ranks, 4 * ranks):
        policies = make_policies("adaptive", placement, microbatches)
        for seed in range(10):
            jitter = Jitter(seed=seed, action_sigma=sigma)
            workload = draw(placement, microbatches, times, jitter=jitter)
            result = simulate(
                placement,
                microbatches,
                policies,
                workload,
                cap=2.0 * ranks,
                weight_pieces=4,
                compiled=True,
            )
            ratio = result.makespan_s * 1e12 / lower_bound_ps(placement, workload)
            assert 1 - 1e-9 <= ratio <= 1.05, (microbatches, seed)
