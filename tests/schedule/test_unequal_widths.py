"""Tests pipelines whose stages have different numbers of replicas."""

from __future__ import annotations

import itertools
from statistics import fmean

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.catalog import make_schedule, placement_for
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.schedule.unequal_widths import (
    SCHEDULES,
    Widths,
    chosen,
    default_cap,
    make_policy,
    simulate,
)

SHAPES = [
    *(Widths(sizes) for n in (1, 2, 3) for sizes in itertools.product((1, 2, 3), repeat=n)),
    *map(Widths, [(2, 1, 1, 1), (1, 3, 2, 4), (4, 3, 2, 1), (1, 2, 3, 4), (3, 1, 3, 2)]),
]


def words(order: tuple[object, ...]) -> str:
    return " ".join(str(action).replace("0-", "") for action in order)


def step(
    name: str, widths: Widths, microbatches: int, delay: float = 0.25, cap: float | None = None
) -> SimResult:
    stages = widths.num_stages
    # Simulate a pipeline with layers balanced over ranks: a stage with twice as many ranks has
    # twice the work.
    return simulate(
        name,
        widths,
        microbatches,
        forward_s=[float(size) for size in widths.sizes],
        backward_s=[2.0 * size for size in widths.sizes],
        message_s=[delay] * (stages - 1),
        cap=cap,
    )


def test_a_microbatch_is_handed_to_its_replica() -> None:
    widths = Widths((2, 1, 3))
    assert [widths.place_of(rank) for rank in range(6)] == [
        (0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)
    ]  # fmt: skip
    # Microbatch 4 is the third microbatch of rank 0, the fifth of rank 2, and the second of rank 4.
    assert widths.route(0, 1, 2) == (2, 4)
    assert widths.route(2, 2, 4) == (4, 1)
    assert widths.route(4, 1, 1) == (2, 4)
    assert widths.neighbours_of(2) == (0, 1, 3, 4, 5)
    assert widths.pipeline_of(1) == [1, 2, 4]
    assert [widths.own_microbatches(stage, 6) for stage in range(3)] == [3, 6, 2]


@pytest.mark.parametrize("widths", SHAPES, ids=str)
def test_routes_lead_back_and_neighbours_are_mutual(widths: Widths) -> None:
    for rank in range(widths.num_ranks):
        stage, _ = widths.place_of(rank)
        for other in {stage - 1, stage + 1} & set(range(widths.num_stages)):
            for microbatch in range(widths.own_microbatches(stage, widths.round_size)):
                peer, there = widths.route(rank, other, microbatch)
                assert widths.route(peer, stage, there) == (rank, microbatch)
                assert peer in widths.neighbours_of(rank)
                assert rank in widths.neighbours_of(peer)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_every_step_ends(name: str, rounds: int) -> None:
    for widths in SHAPES:
        result = step(name, widths, rounds * widths.round_size)
        for rank, order in enumerate(result.orders):
            stage, _ = widths.place_of(rank)
            microbatches = widths.own_microbatches(stage, rounds * widths.round_size)
            assert len(order) == 2 * microbatches
            assert result.peak_units[rank] <= microbatches
            if name == "1f1b":
                assert result.peak_units[rank] <= widths.warmup(stage) + 1
            if name == "adaptive":
                assert result.peak_units[rank] <= default_cap(widths, stage, microbatches)


def test_the_least_cap_is_enough() -> None:
    for widths in SHAPES:
        result = step("adaptive", widths, 3 * widths.round_size, cap=1.0)
        assert max(result.peak_units) == 1


def test_orders_of_one_before_two() -> None:
    result = step("1f1b", Widths((1, 2)), 4)
    assert [words(order) for order in result.orders] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 B0 F1 B1",
        "F0 B0 F1 B1",
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_equal_widths_follow_the_usual_order(stages: int) -> None:
    for size in (1, 2, 3):
        widths = Widths((size,) * stages)
        usual = make_schedule("1f1b", placement_for("1f1b", stages, 1), 6)
        result = step("1f1b", widths, 6 * size)
        for rank, order in enumerate(result.orders):
            assert order == usual.orders[widths.place_of(rank)[0]]


def test_wide_stages_keep_a_narrow_one_busy() -> None:
    # The work of a stage is proportional to its number of ranks. Therefore, ranks are idle only
    # while the pipeline fills and drains, which matters less in longer steps.
    for name, sizes in itertools.product(
        SCHEDULES, ((2, 1), (1, 2), (2, 1, 1), (1, 4, 1), (1, 3, 2))
    ):
        widths = Widths(sizes)
        short, long = (step(name, widths, count * widths.round_size, 0.0) for count in (4, 40))
        assert fmean(long.bubble_fraction) < 0.04
        assert fmean(long.bubble_fraction) < fmean(short.bubble_fraction)


def test_bad_widths() -> None:
    with pytest.raises(ScheduleError, match="got 2-0"):
        Widths((2, 0))
    with pytest.raises(
        ScheduleError, match="2 replicas of stage 0 .* cannot divide 3 microbatches"
    ):
        step("1f1b", Widths((2, 1)), 3)
    with pytest.raises(
        ScheduleError, match=r"zb-h1 does not support stages of unequal widths .2-1.; choose"
    ):
        make_policy("zb-h1", Widths((2, 1)), 0, 4)
    with pytest.raises(ScheduleError, match="rank 3 does not exist"):
        Widths((2, 1)).place_of(3)
    assert chosen(None) is None
    assert chosen((2, 2)) is None
    assert chosen((2, 1)) == Widths((2, 1))
