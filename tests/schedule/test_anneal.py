"""Tests that annealed orders are valid, stay within the activation cap, and are never slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.adaptive.schedule.anneal import improve
from megatron.adaptive.schedule.catalog import ANNEALED, make_candidate, make_policies
from megatron.adaptive.schedule.choose_by_simulation import choose
from megatron.adaptive.schedule.policy import Follow, RulePolicy
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.simulate import SimResult, simulate
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind
from megatron.adaptive.schedule.validate import peak_units, validate
from megatron.adaptive.schedule.workload import Link, StageProfile, StageTimes, Workload, draw


def made(
    placement: Placement, work: Workload, count: int, cap: float, pieces: int, name: str
) -> SimResult:
    policies = make_policies(name, placement, count, cap=cap, weight_pieces=pieces)
    return simulate(placement, count, policies, work, cap=cap, weight_pieces=pieces, compiled=True)


def followed_s(schedule: Schedule, work: Workload) -> float:
    return simulate(
        schedule.placement,
        schedule.num_microbatches,
        [Follow(order) for order in schedule.orders],
        work,
        weight_pieces=schedule.weight_pieces,
        compiled=True,
    ).makespan_s


# The cases cover loop and V placements. One link is slower than the others, and a link can transfer
# only one message at a time.
@pytest.mark.parametrize(
    ("kind", "chunks", "pieces", "cap", "name"),
    [
        ("v", 2, 1, 4.0, "adaptive"),
        ("v", 2, 4, 3.0, "hinted"),
        ("loop", 2, 0, 6.0, "adaptive"),
        ("loop", 1, 1, 4.0, "dfc"),
    ],
)
def test_an_order_gets_no_slower_and_stays_valid(
    kind: PlacementKind, chunks: int, pieces: int, cap: float, name: str
) -> None:
    placement = Placement(num_ranks=4, num_chunks=chunks, kind=kind)
    stages = placement.num_stages
    times = StageTimes(
        forward_s=tuple(1.0 + 0.1 * (stage % 3) for stage in range(stages)),
        backward_s=(1.5,) * stages,
        weight_s=(0.7,) * stages,
    )
    work = draw(
        placement,
        6,
        times,
        link=Link(latency_s=0.2, occupancy_s=0.1),
        links={(1, 2): Link(latency_s=0.6)},
    )
    before = made(placement, work, 6, cap, pieces, name).to_schedule(name)
    after = improve(before, work, cap)
    assert after is not None
    validate(after)
    assert (after.weight_pieces, after.num_microbatches) == (pieces, 6)
    assert max(peak_units(after)) <= cap
    assert followed_s(after, work) < followed_s(before, work)
    assert improve(before, work, cap) == after


def test_it_finds_a_proven_optimum() -> None:
    # This is the case p4-m5-less-weight-l3-cap4 of studies/optimal.json. Its best fixed order is
    # 7.7% slower than the optimum.
    placement = Placement(num_ranks=4, num_chunks=2, kind="v")
    times = StageTimes.equal(8, forward_s=12.0, backward_s=16.0, weight_s=8.0)
    choice = choose(
        StageProfile(times=times, link=Link(latency_s=3.0)),
        placement=placement,
        num_microbatches=5,
        most=4.0,
        splittable=True,
    )
    assert choice.best.name == ANNEALED
    assert choice.best.hint is not None
    assert choice.outcomes[0].mean_s == pytest.approx(442.0)
    assert "auto takes annealed (v, 2 chunks, W in 1, cap 4)" in choice.reason
    assert "best fixed order zb-v" in choice.reason
    # The order is for five microbatches. If a step has another number of microbatches, its actions
    # are chosen at run time.
    for count, kind in ((5, Follow), (6, RulePolicy)):
        policies = make_policies(ANNEALED, placement, count, cap=4.0, hint=choice.best.hint)
        assert {type(policy) for policy in policies} == {kind}


def test_a_long_step_is_left_as_it_is() -> None:
    placement = Placement(num_ranks=4, num_chunks=1)
    work = draw(placement, 1100, StageTimes.equal(4, forward_s=1.0, backward_s=1.0, weight_s=1.0))
    before = made(placement, work, 1100, 4.0, 1, "adaptive").to_schedule("adaptive")
    assert improve(before, work, 4.0) is None


@pytest.mark.parametrize(("slices", "share", "pieces"), [(4, 0.6, 1), (3, 0.0, 4), (2, 0.4, 0)])
def test_an_order_of_slices_gets_faster_within_the_cap(
    slices: int, share: float, pieces: int
) -> None:
    placement = Placement(num_ranks=4, num_chunks=2, kind="v")
    times = StageTimes.equal(8, forward_s=1.0, backward_s=1.0 + share, weight_s=1.0 - share)
    profile = StageProfile(times=times, link=Link(latency_s=0.1), attention_share=share)
    work = draw(placement, 3, profile, num_slices=slices)
    start = make_candidate("adaptive", 4, 2, 3, cap=1.0, weight_pieces=pieces, num_slices=slices)
    ran = start.simulate(work, compiled=True)
    better = improve(ran.to_schedule("adaptive"), work, 1.0)
    assert better is not None
    validate(better)
    assert better.num_slices == slices
    made = replace(start, name=ANNEALED, hint=better)
    followed = made.simulate(work, compiled=True)
    assert followed.makespan_s < 0.98 * ran.makespan_s
    assert max(followed.peak_units) <= 1.0 + 1e-6


def test_auto_follows_an_improved_order_of_slices_if_memory_is_short() -> None:
    placement = Placement(num_ranks=4, num_chunks=2, kind="v")
    times = StageTimes.equal(8, forward_s=1.0, backward_s=1.6, weight_s=0.4)
    profile = StageProfile(times=times, attention_share=0.6)
    choice = choose(
        profile, placement=placement, num_microbatches=4, most=1.0, splittable=True, num_slices=4
    )
    assert choice.best.num_slices == 4
    assert choice.best.hint is not None
    rules = [o for o in choice.outcomes if o.candidate.hint is None]
    assert choice.step_s < 0.95 * min(outcome.mean_s for outcome in rules)
