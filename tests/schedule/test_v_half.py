"""V-Half: the table of its docstring, half of 1F1B's memory, its idle time, its short cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import v_half
from megatron.adaptive.schedule.memory import peak_units
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.render import render_schedule
from megatron.adaptive.schedule.simulate import StageTimes, simulate
from megatron.adaptive.schedule.validate import validate

TABLE = """\
  rank 0 | F0-0 F0-1 F0-2 F1-0 B1-0 W1-0 F1-1 B1-1 W1-1 B0-0 W0-0 F1-2 B1-2 B0-1 W1-2 W0-1 B0-2 W0-2
  rank 1 | F0-0 F0-1 F1-0 F1-1 B1-0 W1-0 F0-2 B0-0 B1-1 W0-0 W1-1 F1-2 B0-1 B1-2 W0-1 W1-2 B0-2 W0-2
  rank 2 | F0-0 F1-0 F0-1 F1-1 B1-0 B0-0 W1-0 F0-2 W0-0 F1-2 B1-1 B0-1 W1-1 W0-1 B1-2 B0-2 W1-2 W0-2
"""


def v_of_two(ranks: int) -> Placement:
    return Placement(num_ranks=ranks, num_chunks=2, kind="v")


def makespan_s(ranks: int, microbatches: int) -> float:
    placement = v_of_two(ranks)
    schedule = v_half.make(placement, microbatches)
    times = StageTimes.equal(2 * ranks, forward_s=1, backward_s=1, weight_s=1)
    policies = [Follow(order) for order in schedule.orders]
    return simulate(placement, microbatches, policies, times, weight_pieces=1).makespan_s


def test_table() -> None:
    schedule = v_half.make(v_of_two(3), 3)
    assert render_schedule(schedule).split() == TABLE.split()
    assert v_half.__doc__ is not None
    assert TABLE in v_half.__doc__


@settings(max_examples=40)
@given(ranks=st.integers(1, 10), microbatches=st.integers(1, 25))
def test_valid_and_within_its_memory(ranks: int, microbatches: int) -> None:
    schedule = v_half.make(v_of_two(ranks), microbatches)
    most = (ranks + 2) // 2
    validate(schedule, cap=most)
    if microbatches >= ranks:
        assert max(peak_units(schedule)) == most


@pytest.mark.parametrize("ranks", range(1, 13))
def test_idle_time(ranks: int) -> None:
    idle = max(ranks - 1, 6 * -(-ranks // 2) - 7)
    assert idle <= 3 * ranks, "what the paper gives"
    for microbatches in (ranks, ranks + 1, 2 * ranks, 3 * ranks + 2):
        assert makespan_s(ranks, microbatches) == 6 * microbatches + idle


@settings(max_examples=40)
@given(ranks=st.integers(2, 9), more=st.integers(0, 9))
def test_repeating_the_steady_part_is_the_same_as_placing_everything(ranks: int, more: int) -> None:
    placement, microbatches = v_of_two(ranks), ranks + 5 + more
    rows = v_half.squeezed(placement, microbatches)
    assert v_half.make(placement, microbatches).orders == tuple(tuple(r.values()) for r in rows)


@pytest.mark.parametrize(
    ("placement", "microbatches", "message"),
    [
        (Placement(num_ranks=2, num_chunks=2), 4, "v-half got a loop placement with 2 chunk"),
        (Placement(num_ranks=2, num_chunks=1, kind="v"), 4, "a v placement with 1 chunk"),
        (v_of_two(2), 0, "0 microbatches"),
    ],
)
def test_refusals(placement: Placement, microbatches: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        v_half.make(placement, microbatches)
    assert "\n" not in str(caught.value)
