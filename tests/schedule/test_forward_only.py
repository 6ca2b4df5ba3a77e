"""Evaluation order: the table of its docstring, no deadlock for any shape, no memory held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.schedule import forward_only
from megatron.adaptive.schedule.memory import peak_units
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.render import render_schedule
from megatron.adaptive.schedule.simulate import StageTimes, simulate
from megatron.adaptive.schedule.validate import validate

TABLE = """\
    rank 0 | F0-0 F0-1 F1-0 F1-1 F0-2 F1-2
    rank 1 | F0-0 F0-1 F1-0 F1-1 F0-2 F1-2
"""


def test_table() -> None:
    schedule = forward_only.make(Placement(num_ranks=2, num_chunks=2), 3)
    assert render_schedule(schedule).split() == TABLE.split()
    assert schedule.forward_only
    assert forward_only.__doc__ is not None
    assert TABLE in forward_only.__doc__


@given(
    ranks=st.integers(1, 5),
    chunks=st.integers(1, 4),
    microbatches=st.integers(1, 9),
    kind=st.sampled_from(["loop", "v"]),
)
def test_valid_for_every_shape(ranks: int, chunks: int, microbatches: int, kind: str) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=chunks, kind=kind)  # type: ignore[arg-type]
    schedule = forward_only.make(placement, microbatches)
    validate(schedule)
    assert peak_units(schedule) == (0.0,) * ranks


def test_a_full_loop_is_busy_but_for_filling_it() -> None:
    placement = Placement(num_ranks=4, num_chunks=2)
    schedule = forward_only.make(placement, 8)
    result = simulate(
        placement,
        8,
        [Follow(order) for order in schedule.orders],
        StageTimes.equal(8, forward_s=1.0, backward_s=0.0),
        forward_only=True,
    )
    assert result.makespan_s == 8 * 2 + 3
    assert result.peak_units == (0.0,) * 4
