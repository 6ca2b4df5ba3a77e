"""Breadth-first: the table of its docstring, its memory, its closed form, what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import breadth_first, gpipe
from megatron.adaptive.schedule.memory import peak_units
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.render import render_schedule
from megatron.adaptive.schedule.simulate import StageTimes, simulate
from megatron.adaptive.schedule.validate import validate

TABLE = """\
    rank 0 | F0-0 F0-1 F0-2 F1-0 F1-1 F1-2 B1-0 B1-1 B1-2 B0-0 B0-1 B0-2
    rank 1 | F0-0 F0-1 F0-2 F1-0 F1-1 F1-2 B1-0 B1-1 B1-2 B0-0 B0-1 B0-2
"""


def test_table() -> None:
    schedule = breadth_first.make(Placement(num_ranks=2, num_chunks=2), 3)
    assert render_schedule(schedule).split() == TABLE.split()
    assert breadth_first.__doc__ is not None
    assert TABLE in breadth_first.__doc__


@given(ranks=st.integers(1, 5), chunks=st.integers(2, 4), microbatches=st.integers(1, 9))
def test_valid_and_holds_everything(ranks: int, chunks: int, microbatches: int) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=chunks)
    schedule = breadth_first.make(placement, microbatches)
    validate(schedule, cap=microbatches)
    assert schedule.orders == gpipe.make(placement, microbatches).orders
    assert peak_units(schedule) == pytest.approx([microbatches] * ranks)


@given(
    ranks=st.integers(1, 5),
    chunks=st.integers(2, 4),
    more=st.integers(0, 6),
    forward=st.integers(1, 9),
    backward=st.integers(1, 9),
)
def test_idle_time_is_that_of_interleaved(
    ranks: int, chunks: int, more: int, forward: int, backward: int
) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=chunks)
    microbatches = ranks + more
    result = simulate(
        placement,
        microbatches,
        [Follow(order) for order in breadth_first.make(placement, microbatches).orders],
        StageTimes.equal(placement.num_stages, forward_s=forward, backward_s=backward),
    )
    assert result.makespan_s == (microbatches * chunks + ranks - 1) * (forward + backward)


@pytest.mark.parametrize(
    ("placement", "microbatches", "message"),
    [
        (Placement(num_ranks=2, num_chunks=1), 4, "loop placement with 1 chunk.*choose gpipe"),
        (Placement(num_ranks=2, num_chunks=2, kind="v"), 4, "got a v placement"),
        (Placement(num_ranks=2, num_chunks=2), 0, "0 microbatches"),
    ],
)
def test_refusals(placement: Placement, microbatches: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        breadth_first.make(placement, microbatches)
    assert "\n" not in str(caught.value)
