"""Text pictures, exactly."""

from __future__ import annotations

from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.registry import make_schedule
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.validate import render_schedule

from .conftest import actions

PLACEMENT = Placement(num_ranks=2, num_chunks=1)


def test_schedule() -> None:
    assert render_schedule(make_schedule("1f1b", PLACEMENT, 2)) == (
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
    schedule = make_schedule("1f1b", PLACEMENT, 1)
    empty = type(schedule)(name="empty", placement=PLACEMENT, num_microbatches=1, orders=((), ()))
    assert render_schedule(empty) == "rank 0 |\nrank 1 |"
