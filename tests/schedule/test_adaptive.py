"""Tests that steps with the schedule ``adaptive`` are short, with and without random delays."""

from __future__ import annotations

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import runtime_rules
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.catalog import make_policies
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.policy import Policy, RulePolicy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.simulate import SimResult, simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import Link, StageProfile, StageTimes, Workload, draw

ADAPTIVE = RulePolicy("adaptive", runtime_rules.ready_first)


class FlatCap:
    """Variant of ``adaptive`` that does not reserve memory for later chunks."""

    name = "flat"

    def pick(self, state: RankState) -> Action | None:
        unit = 1 / state.placement.num_chunks
        for action in state.ready():
            if action.kind is ActionKind.B or state.in_flight + unit <= (state.cap or 0):
                return action
        return None


def step(policy: Policy, ranks: int, chunks: int, microbatches: int, cap: float) -> SimResult:
    placement = Placement(num_ranks=ranks, num_chunks=chunks)
    return simulate(
        placement,
        microbatches,
        [policy] * ranks,
        StageTimes.equal(placement.num_stages, forward_s=1, backward_s=2),
        cap=cap,
    )


def test_a_flat_cap_deadlocks_where_the_graded_does_not() -> None:
    """Checks that chunk 0 causes a deadlock if it may use up the memory that chunk 1 needs."""
    with pytest.raises(
        ScheduleError, match=r"deadlock.*rank 0 waits for .*memory for F1-0 \(holds 1, cap 1\)"
    ):
        step(FlatCap(), ranks=2, chunks=2, microbatches=4, cap=1.0)
    result = step(ADAPTIVE, ranks=2, chunks=2, microbatches=4, cap=1.0)
    assert max(result.peak_units) == 1.0


@pytest.mark.parametrize("latency", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_quiet_pipeline_is_never_slower_than_the_best_static_schedule(
    chunks: int, ranks: int, latency: float
) -> None:
    """Checks that ``adaptive`` is at least as fast as the best static schedule without delays."""
    placement = Placement(num_ranks=ranks, num_chunks=chunks)
    static = "1f1b" if chunks == 1 else "interleaved"
    for rounds in (1, 2, 4):
        microbatches = rounds * ranks
        for backward in (1.0, 2.0):
            times = StageTimes.equal(placement.num_stages, forward_s=1.0, backward_s=backward)
            best = simulate(
                placement,
                microbatches,
                make_policies(static, placement, microbatches),
                StageProfile(times=times, link=Link(latency_s=latency)),
            )
            adaptive = simulate(
                placement,
                microbatches,
                make_policies("adaptive", placement, microbatches),
                StageProfile(times=times, link=Link(latency_s=latency)),
                cap=default_cap(placement, microbatches),
            )
            assert adaptive.makespan_s <= best.makespan_s, (microbatches, backward)


@pytest.mark.parametrize(("chunks", "gain"), [(1, 0.95), (2, 1.0)])
def test_jitter_is_absorbed(chunks: int, gain: float) -> None:
    """Checks that ``adaptive`` is faster than a static schedule if actions take random times."""
    placement = Placement(num_ranks=4, num_chunks=chunks)
    times = StageTimes.equal(placement.num_stages, forward_s=1.0, backward_s=2.0)
    static = "1f1b" if chunks == 1 else "interleaved"

    def total_s(name: str, cap: float | None) -> float:
        return sum(
            simulate(
                placement,
                16,
                make_policies(name, placement, 16),
                StageProfile(times=times, link=Link(latency_s=0.05), action_sigma=0.3),
                seed=seed,
                cap=cap,
            ).makespan_s
            for seed in range(8)
        )

    assert total_s("adaptive", default_cap(placement, 16)) < gain * total_s(static, None)


def lower_bound_ps(placement: Placement, workload: Workload) -> int:
    """Returns a lower bound on the step time of ``workload`` in picoseconds."""
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
            workload = draw(placement, microbatches, times, seed=seed, action_sigma=sigma)
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
