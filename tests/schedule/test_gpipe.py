"""GPipe: the tables of its docstring, its memory and its closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.schedule import gpipe
from megatron.adaptive.schedule.memory import peak_units
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.render import render_schedule
from megatron.adaptive.schedule.simulate import StageTimes, simulate
from megatron.adaptive.schedule.validate import validate

TABLE = """\
    rank 0 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3
    rank 1 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3
    rank 2 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3
"""
TWO_CHUNKS = """\
    rank 0 | F0-0 F0-1 F1-0 F1-1 B1-0 B1-1 B0-0 B0-1
    rank 1 | F0-0 F0-1 F1-0 F1-1 B1-0 B1-1 B0-0 B0-1
"""


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches", "table"), [(3, 1, 4, TABLE), (2, 2, 2, TWO_CHUNKS)]
)
def test_table(ranks: int, chunks: int, microbatches: int, table: str) -> None:
    schedule = gpipe.make(Placement(num_ranks=ranks, num_chunks=chunks), microbatches)
    assert render_schedule(schedule).split() == table.split()
    assert gpipe.__doc__ is not None
    assert table in gpipe.__doc__


@given(
    ranks=st.integers(1, 5),
    chunks=st.integers(1, 3),
    microbatches=st.integers(1, 8),
    kind=st.sampled_from(["loop", "v"]),
)
def test_valid_and_holds_everything(ranks: int, chunks: int, microbatches: int, kind: str) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=chunks, kind=kind)  # type: ignore[arg-type]
    schedule = gpipe.make(placement, microbatches)
    validate(schedule, cap=microbatches)
    assert peak_units(schedule) == pytest.approx([microbatches] * ranks)


@given(ranks=st.integers(1, 5), microbatches=st.integers(1, 10))
def test_makespan_is_the_closed_form(ranks: int, microbatches: int) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=1)
    result = simulate(
        placement,
        microbatches,
        [Follow(order) for order in gpipe.make(placement, microbatches).orders],
        StageTimes.equal(ranks, forward_s=3.0, backward_s=5.0),
    )
    assert result.makespan_s == (microbatches + ranks - 1) * 8.0
