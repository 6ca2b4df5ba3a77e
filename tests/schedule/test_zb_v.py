"""ZB-V: the table of its docstring, torch's order, 1F1B's memory, no idle time but the ramp."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import zb_v
from megatron.adaptive.schedule.memory import peak_units
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.render import render_schedule
from megatron.adaptive.schedule.simulate import SimResult, StageTimes, simulate
from megatron.adaptive.schedule.validate import validate

TABLE = """\
  rank 0 | F0-0 F0-1 F0-2 F1-0 B1-0 W1-0 F1-1 B1-1 W1-1 B0-0 W0-0 F1-2 B1-2 W1-2 B0-1 W0-1 B0-2 W0-2
  rank 1 | F0-0 F1-0 F0-1 F1-1 B1-0 W1-0 F0-2 B0-0 W0-0 F1-2 B1-1 W1-1 B0-1 B1-2 B0-2 W0-1 W1-2 W0-2
"""


def v_of_two(ranks: int) -> Placement:
    return Placement(num_ranks=ranks, num_chunks=2, kind="v")


def simulated(
    ranks: int, microbatches: int, forward: float, backward: float, weight: float
) -> SimResult:
    placement = v_of_two(ranks)
    schedule = zb_v.make(placement, microbatches)
    times = StageTimes.equal(2 * ranks, forward_s=forward, backward_s=backward, weight_s=weight)
    policies = [Follow(order) for order in schedule.orders]
    return simulate(placement, microbatches, policies, times, weight_pieces=1)


def test_table() -> None:
    schedule = zb_v.make(v_of_two(2), 3)
    assert render_schedule(schedule).split() == TABLE.split()
    assert zb_v.__doc__ is not None
    assert TABLE in zb_v.__doc__


@given(ranks=st.integers(1, 7), microbatches=st.integers(1, 20))
def test_valid_and_within_the_memory_of_1f1b(ranks: int, microbatches: int) -> None:
    schedule = zb_v.make(v_of_two(ranks), microbatches)
    validate(schedule, cap=ranks)
    if microbatches >= 2 * ranks - 1:
        assert peak_units(schedule) == (ranks,) * ranks


@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 24))
def test_equal_times_leave_nothing_but_the_ramp(ranks: int, microbatches: int) -> None:
    result = simulated(ranks, microbatches, 1, 1, 1)
    few = max(0, 3 * ranks - 2 * microbatches - 1)
    assert result.makespan_s == 6 * microbatches + ranks - 1 + few
    if not few:
        # A parallelogram: no rank waits once it has begun.
        for rank, (starts, ends) in enumerate(zip(result.starts_ps, result.ends_ps, strict=True)):
            assert starts[0] == rank * 10**12
            assert ends[-1] - starts[0] <= (6 * microbatches + ranks - 1) * 10**12


@given(ranks=st.integers(2, 6), rounds=st.integers(2, 4), half=st.integers(1, 9), data=st.data())
def test_shorter_weight_gradients_still_leave_nothing_but_the_ramp(
    ranks: int, rounds: int, half: int, data: st.DataObject
) -> None:
    """Down to half of a forward, where F and B are equal."""
    whole, weight = 2 * half, data.draw(st.integers(half, 2 * half))
    microbatches = rounds * ranks
    result = simulated(ranks, microbatches, whole, whole, weight)
    assert result.makespan_s == 2 * microbatches * (2 * whole + weight) + (ranks - 1) * whole


@pytest.mark.parametrize(
    ("placement", "microbatches", "message"),
    [
        (Placement(num_ranks=2, num_chunks=2), 4, "zb-v got a loop placement with 2 chunk.*v of 2"),
        (Placement(num_ranks=2, num_chunks=3, kind="v"), 4, "a v placement with 3 chunk"),
        (v_of_two(2), 0, "0 microbatches"),
    ],
)
def test_refusals(placement: Placement, microbatches: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        zb_v.make(placement, microbatches)
    assert "\n" not in str(caught.value)
