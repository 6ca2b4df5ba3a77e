"""ZB-H1: the table of its docstring, 1F1B's memory, the paper's closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import one_f_one_b, zb_h1
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.memory import peak_units
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.render import render_schedule
from megatron.adaptive.schedule.simulate import SimResult, StageTimes, simulate
from megatron.adaptive.schedule.validate import validate

TABLE = """\
  rank 0 | F0-0 F0-1 F0-2 F0-3 B0-0 W0-0 F0-4 B0-1 W0-1 F0-5 B0-2 W0-2 B0-3 W0-3 B0-4 W0-4 B0-5 W0-5
  rank 1 | F0-0 F0-1 F0-2 B0-0 F0-3 B0-1 W0-0 F0-4 B0-2 W0-1 F0-5 B0-3 W0-2 B0-4 W0-3 B0-5 W0-4 W0-5
  rank 2 | F0-0 F0-1 B0-0 F0-2 B0-1 F0-3 B0-2 W0-0 F0-4 B0-3 W0-1 F0-5 B0-4 W0-2 B0-5 W0-3 W0-4 W0-5
  rank 3 | F0-0 B0-0 F0-1 B0-1 F0-2 B0-2 F0-3 B0-3 W0-0 F0-4 B0-4 W0-1 F0-5 B0-5 W0-2 W0-3 W0-4 W0-5
"""


def simulated(
    ranks: int, microbatches: int, forward: float, backward: float, weight: float
) -> SimResult:
    placement = Placement(num_ranks=ranks, num_chunks=1)
    schedule = zb_h1.make(placement, microbatches)
    times = StageTimes.equal(ranks, forward_s=forward, backward_s=backward, weight_s=weight)
    policies = [Follow(order) for order in schedule.orders]
    return simulate(placement, microbatches, policies, times, weight_pieces=1)


def test_table() -> None:
    schedule = zb_h1.make(Placement(num_ranks=4, num_chunks=1), 6)
    assert render_schedule(schedule).split() == TABLE.split()
    assert zb_h1.__doc__ is not None
    assert TABLE in zb_h1.__doc__


@given(ranks=st.integers(1, 7), microbatches=st.integers(1, 15))
def test_valid_and_within_the_memory_of_1f1b(ranks: int, microbatches: int) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=1)
    schedule = zb_h1.make(placement, microbatches)
    validate(schedule, cap=ranks)
    assert schedule.weight_pieces == 1
    assert peak_units(schedule) == (min(ranks, microbatches),) * ranks
    plain = one_f_one_b.make(placement, microbatches)
    # Where nothing is kept for the weight gradients, it is 1F1B's rank by rank.
    assert peak_units(schedule, kept_fraction=0.0) == peak_units(plain)
    without = [
        tuple(action for action in order if action.kind is not ActionKind.W)
        for order in schedule.orders
    ]
    assert tuple(without) == plain.orders


@given(
    ranks=st.integers(1, 6),
    more=st.integers(0, 12),
    forward=st.integers(1, 9),
    backward=st.integers(1, 9),
    weight=st.integers(0, 9),
)
def test_makespan_is_the_closed_form(
    ranks: int, more: int, forward: int, backward: int, weight: int
) -> None:
    microbatches = ranks + more
    result = simulated(ranks, microbatches, forward, backward, weight)
    idle = (ranks - 1) * (forward + backward - min(forward, backward, weight))
    assert result.makespan_s == microbatches * (forward + backward + weight) + idle
    assert result.peak_units == (ranks,) * ranks


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 2), (4, 4), (4, 9), (8, 32)])
def test_equal_times_leave_a_third_of_the_idle_time_of_1f1b(ranks: int, microbatches: int) -> None:
    assert simulated(ranks, microbatches, 1, 1, 1).makespan_s == 3 * microbatches + ranks - 1


@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 6))
def test_few_microbatches_cost_one_forward_each_that_is_missing(
    ranks: int, microbatches: int
) -> None:
    expected = 3 * microbatches + ranks - 1 + max(0, ranks - microbatches)
    assert simulated(ranks, microbatches, 1, 1, 1).makespan_s == expected


def test_refusals() -> None:
    with pytest.raises(ScheduleError, match="zb-h1 got 2 chunks.*choose zb-v or v-half"):
        zb_h1.make(Placement(num_ranks=2, num_chunks=2), 4)
    with pytest.raises(ScheduleError, match="0 microbatches"):
        zb_h1.make(Placement(num_ranks=2, num_chunks=1), 0)
