"""Tests that errors about invalid schedules name the rank and the action, and show a diagram."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.catalog import make_schedule, placement_for
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.validate import render_schedule, validate

from .conftest import actions

ONE_CHUNK = Placement(num_ranks=2, num_chunks=1)


def schedule_of(*rows: str, placement: Placement = ONE_CHUNK, microbatches: int = 2) -> Schedule:
    return Schedule(
        name="mine",
        placement=placement,
        num_microbatches=microbatches,
        orders=tuple(map(actions, rows)),
    )


GOOD = "F0-0 B0-0 F0-1 B0-1"
SPLIT = "F0-0 B0-0 W0-0 F0-1 B0-1 W0-1"
HALVES = "F0-0 B0-0 W0-0 F0-1 B0-1 W0-0.1 W0-1 W0-1.1"


@pytest.mark.parametrize(
    ("rows", "first_line", "marked"),
    [
        (
            ("F0-0 F0-1 B0-0 B0-1", "F0-0 B0-0 F0-1"),
            "rank 1, position 3: the order ends before B0-1: list each action once",
            "rank 1 | F0-0 B0-0 F0-1 [missing]",
        ),
        (
            ("F0-0", GOOD),
            "rank 0, position 1: the order ends before F0-1 and B0-0: list each action once",
            "rank 0 | F0-0 [missing]",
        ),
        (
            (GOOD, "F0-0 B0-0 F0-0 F0-1 B0-1"),
            "rank 1, position 2: F0-0 cannot be here: it has already started",
            "rank 1 | F0-0 B0-0 [F0-0] F0-1 B0-1",
        ),
        (
            ("F0-0 F0-1 B0-1 B0-0", GOOD),
            "rank 0, position 2: B0-1 cannot be here: B0-0 comes before it",
            "rank 0 | F0-0 F0-1 [B0-1] B0-0",
        ),
        (
            ("F0-0 B0-0 B0-1 F0-1", GOOD),
            "rank 0, position 2: B0-1 cannot be here: its own forward F0-1 has not finished",
            "rank 0 | F0-0 B0-0 [B0-1] F0-1",
        ),
        (
            (SPLIT, GOOD),
            "rank 1, position 4: the order ends before W0-0: list each action once",
            "rank 1 | F0-0 B0-0 F0-1 B0-1 [missing]",
        ),
        (
            (SPLIT, "F0-0 B0-0 F0-1 B0-1 W0-1 W0-0"),
            "rank 1, position 4: W0-1 cannot be here: W0-0 comes before it",
            "rank 1 | F0-0 B0-0 F0-1 B0-1 [W0-1] W0-0",
        ),
        (
            (HALVES, "F0-0 B0-0 W0-0 W0-0.1 F0-1 B0-1 W0-1"),
            "rank 1, position 7: the order ends before W0-1.1: list each action once",
            "rank 1 | ... B0-0 W0-0 W0-0.1 F0-1 B0-1 W0-1 [missing]",
        ),
        (
            (HALVES, "F0-0 B0-0 W0-0.1 W0-0 F0-1 B0-1 W0-1 W0-1.1"),
            "rank 1, position 2: W0-0.1 cannot be here: W0-0 comes before it",
            "rank 1 | F0-0 B0-0 [W0-0.1] W0-0 F0-1 B0-1 W0-1 W0-1.1",
        ),
    ],
)
def test_broken_orders(rows: tuple[str, ...], first_line: str, marked: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule_of(*rows))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"schedule mine, {first_line}")
    assert [" ".join(line.split()) for line in lines[1:]].count(marked) == 1
    assert len(lines) == 1 + 2


def test_ranks_that_wait_for_each_other() -> None:
    """Checks the error about two ranks that wait for each other's forward passes."""
    placement = Placement(num_ranks=2, num_chunks=2)
    schedule = schedule_of(
        "F0-0 F1-0 B1-0 B0-0", "F0-0 F1-0 B1-0 B0-0", placement=placement, microbatches=1
    )
    validate(schedule)
    circle = schedule_of(
        "F0-0 F1-0 B1-0 B0-0", "F1-0 F0-0 B1-0 B0-0", placement=placement, microbatches=1
    )
    with pytest.raises(ScheduleError) as caught:
        validate(circle)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "schedule mine, rank 1, position 0: deadlock: F1-0 never starts: its input from rank 0"
        " (stage 2) has not arrived"
    )
    assert "[F1-0]" in lines[2]


def test_a_rank_can_wait_for_itself() -> None:
    placement = Placement(num_ranks=1, num_chunks=2)
    with pytest.raises(ScheduleError, match="deadlock: F1-0 never starts: its input from rank 0"):
        validate(schedule_of("F1-0 F0-0 B1-0 B0-0", placement=placement, microbatches=1))


def test_only_the_columns_around_the_cell_are_drawn() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    good = make_schedule("gpipe", placement, 40)
    broken = (*good.orders[0][:50], good.orders[0][49], *good.orders[0][50:])
    with pytest.raises(ScheduleError) as caught:
        validate(replace(good, orders=(broken, good.orders[1])))
    lines = str(caught.value).splitlines()
    assert (
        lines[0]
        == "schedule gpipe, rank 0, position 50: B0-9 cannot be here: it has already started"
    )
    assert lines[1].split()[3] == "..."
    assert lines[1].split()[-1] == "..."
    assert "[B0-9]" in lines[1]
    assert max(map(len, lines[1:])) < 140


def test_an_empty_schedule_misses_its_forwards() -> None:
    with pytest.raises(ScheduleError, match="an order for each of the 2 ranks, got 1"):
        validate(schedule_of(GOOD))
    with pytest.raises(ScheduleError, match="rank 0, position 0: the order ends before F0-0: list"):
        validate(schedule_of("", ""))


@given(
    name=st.sampled_from(["gpipe", "interleaved", "forward-only", "zb-h1", "zb-v", "v-half"]),
    ranks=st.integers(1, 4),
    rounds=st.integers(2, 3),
    damage=st.sampled_from(["drop", "double"]),
    seed=st.integers(0, 10**6),
)
def test_any_dropped_or_doubled_action_is_found(
    name: str, ranks: int, rounds: int, damage: str, seed: int
) -> None:
    schedule = make_schedule(name, placement_for(name, ranks, 2), ranks * rounds)
    rng = random.Random(seed)
    rank = rng.randrange(ranks)
    order = list(schedule.orders[rank])
    position = rng.randrange(len(order))
    if damage == "drop":
        del order[position]
    else:
        order.insert(rng.randrange(len(order) + 1), order[position])
    orders = list(schedule.orders)
    orders[rank] = tuple(order)
    with pytest.raises(ScheduleError, match=f"rank {rank}, position "):
        validate(replace(schedule, orders=tuple(orders)))


def test_a_picture() -> None:
    assert render_schedule(make_schedule("1f1b", ONE_CHUNK, 2)) == (
        "rank 0 | F0-0 F0-1 B0-0 B0-1\n"
        "rank 1 | F0-0 B0-0 F0-1 B0-1"
    )  # fmt: skip


def test_marked_cell_and_wide_numbers_stay_aligned() -> None:
    schedule = make_schedule("gpipe", Placement(num_ranks=11, num_chunks=1), 6)
    lines = render_schedule(schedule, mark=(10, 9)).splitlines()
    assert (
        lines[0] == "rank  0 | ...    F0-3   F0-4   F0-5   B0-0   B0-1   B0-2   B0-3   B0-4   B0-5"
    )
    assert lines[10] == (
        "rank 10 | ...    F0-3   F0-4   F0-5   B0-0   B0-1   B0-2   [B0-3] B0-4   B0-5"
    )


def test_weight_gradients_and_their_pieces() -> None:
    order = actions("F0-0 F0-1 B0-0 W0-0 W0-0.1 B0-1 W0-1 W0-1.1")
    placement = Placement(num_ranks=1, num_chunks=1)
    schedule = Schedule(name="mine", placement=placement, num_microbatches=2, orders=(order,))
    assert render_schedule(schedule) == (
        "rank 0 | F0-0   F0-1   B0-0   W0-0   W0-0.1 B0-1   W0-1   W0-1.1"
    )


def test_empty_schedule_has_rows() -> None:
    schedule = make_schedule("1f1b", ONE_CHUNK, 1)
    empty = type(schedule)(name="empty", placement=ONE_CHUNK, num_microbatches=1, orders=((), ()))
    assert render_schedule(empty) == "rank 0 |\nrank 1 |"
