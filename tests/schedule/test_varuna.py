"""Varuna: the table of its docstring, its rules in the simulator, its memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import gpipe, rules, varuna
from megatron.adaptive.schedule.memory import peak_units
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow, RulePolicy
from megatron.adaptive.schedule.render import render_schedule
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.simulate import SimResult, StageTimes, simulate
from megatron.adaptive.schedule.validate import validate

TABLE = """\
    rank 0 | F0-0 F0-1 F0-2 F0-3 F0-4 F0-5 B0-0 B0-1 B0-2 B0-3 B0-4 B0-5
    rank 1 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3 F0-4 F0-5 B0-4 B0-5
    rank 2 | F0-0 B0-0 F0-1 B0-1 F0-2 B0-2 F0-3 B0-3 F0-4 B0-4 F0-5 B0-5
"""


def times(ranks: int) -> StageTimes:
    """Recomputation takes a forward, and the last stage needs none."""
    return StageTimes(
        forward_s=(1.0,) * ranks,
        backward_s=(2.0,) * ranks,
        recompute_s=(1.0,) * (ranks - 1) + (0.0,),
    )


def followed(schedule: Schedule) -> SimResult:
    policies = [Follow(order) for order in schedule.orders]
    ranks = schedule.placement.num_ranks
    return simulate(schedule.placement, schedule.num_microbatches, policies, times(ranks))


def test_table() -> None:
    schedule = varuna.make(Placement(num_ranks=3, num_chunks=1), 6)
    assert render_schedule(schedule).split() == TABLE.split()
    assert varuna.__doc__ is not None
    assert TABLE in varuna.__doc__


@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 20))
def test_the_list_is_what_its_rules_choose_at_run_time(ranks: int, microbatches: int) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=1)
    schedule = varuna.make(placement, microbatches)
    chosen = simulate(
        placement, microbatches, [RulePolicy("rules", rules.depth_first)] * ranks, times(ranks)
    )
    assert chosen.to_schedule("varuna") == schedule
    assert followed(schedule).makespan_s == chosen.makespan_s


@given(ranks=st.integers(1, 7), microbatches=st.integers(1, 40))
def test_valid_and_within_its_memory(ranks: int, microbatches: int) -> None:
    schedule = varuna.make(Placement(num_ranks=ranks, num_chunks=1), microbatches)
    validate(schedule)
    limits = [min(microbatches, max(1, 4 * (ranks - 1 - rank))) for rank in range(ranks)]
    peaks = peak_units(schedule)
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    if microbatches >= 4 * ranks:
        assert peaks == tuple(limits)


@given(ranks=st.integers(1, 7), microbatches=st.integers(1, 30))
def test_never_slower_than_gpipe(ranks: int, microbatches: int) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=1)
    ours = followed(varuna.make(placement, microbatches))
    assert ours.makespan_s <= followed(gpipe.make(placement, microbatches)).makespan_s


def test_refusals() -> None:
    with pytest.raises(ScheduleError, match="varuna got 2 chunks.*interleaved or adaptive"):
        varuna.make(Placement(num_ranks=2, num_chunks=2), 4)
    with pytest.raises(ScheduleError, match="0 microbatches"):
        varuna.make(Placement(num_ranks=2, num_chunks=1), 0)
