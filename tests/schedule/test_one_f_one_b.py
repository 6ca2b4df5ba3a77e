"""1F1B: the table of its docstring, its memory and its closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import one_f_one_b
from megatron.adaptive.schedule.memory import peak_units
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.render import render_schedule
from megatron.adaptive.schedule.simulate import StageTimes, simulate
from megatron.adaptive.schedule.validate import validate

TABLE = """\
    rank 0 | F0-0 F0-1 F0-2 F0-3 B0-0 F0-4 B0-1 F0-5 B0-2 B0-3 B0-4 B0-5
    rank 1 | F0-0 F0-1 F0-2 B0-0 F0-3 B0-1 F0-4 B0-2 F0-5 B0-3 B0-4 B0-5
    rank 2 | F0-0 F0-1 B0-0 F0-2 B0-1 F0-3 B0-2 F0-4 B0-3 F0-5 B0-4 B0-5
    rank 3 | F0-0 B0-0 F0-1 B0-1 F0-2 B0-2 F0-3 B0-3 F0-4 B0-4 F0-5 B0-5
"""


def test_table() -> None:
    schedule = one_f_one_b.make(Placement(num_ranks=4, num_chunks=1), 6)
    assert render_schedule(schedule).split() == TABLE.split()
    assert one_f_one_b.__doc__ is not None
    assert TABLE in one_f_one_b.__doc__


@given(ranks=st.integers(1, 7), microbatches=st.integers(1, 12))
def test_valid_and_within_its_memory(ranks: int, microbatches: int) -> None:
    schedule = one_f_one_b.make(Placement(num_ranks=ranks, num_chunks=1), microbatches)
    validate(schedule, cap=ranks)
    assert peak_units(schedule) == tuple(min(ranks - rank, microbatches) for rank in range(ranks))


@given(
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    forward_us=st.integers(1, 50),
    backward_us=st.integers(1, 50),
)
def test_makespan_is_the_closed_form(
    ranks: int, microbatches: int, forward_us: int, backward_us: int
) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=1)
    schedule = one_f_one_b.make(placement, microbatches)
    forward_s, backward_s = forward_us / 1e6, backward_us / 1e6
    result = simulate(
        placement,
        microbatches,
        [Follow(order) for order in schedule.orders],
        StageTimes.equal(ranks, forward_s=forward_s, backward_s=backward_s),
    )
    expected_us = (microbatches + ranks - 1) * (forward_us + backward_us)
    assert result.makespan_s == pytest.approx(expected_us / 1e6, rel=1e-12)
    bubble = (ranks - 1) / (microbatches + ranks - 1)
    assert result.bubble_fraction == pytest.approx([bubble] * ranks)


def test_several_chunks_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"1f1b got 2 chunks.*interleaved or adaptive"):
        one_f_one_b.make(Placement(num_ranks=2, num_chunks=2), 4)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ScheduleError, match="0 microbatches"):
        one_f_one_b.make(Placement(num_ranks=2, num_chunks=1), 0)
