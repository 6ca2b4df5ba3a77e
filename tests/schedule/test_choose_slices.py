"""Tests the choice of a number of slices from the measured times of two other numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.choose_by_simulation import ScheduleChoice, choose, pace_of
from megatron.adaptive.schedule.choose_slices import (
    SliceTrial,
    added_s,
    choose_number,
    memory_factor,
    ratio,
    without_slices,
)
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import PS_PER_S, Link, StageProfile, StageTimes, draw

PLACEMENT = Placement(num_ranks=4, num_chunks=2, kind="v")
NUMBERS = (4, 1, 8)


def profile(slice_s: float, share: float = 0.4) -> StageProfile:
    """Returns a profile with unequal stages, in which each extra slice takes ``slice_s`` seconds.

    ``share`` is the share of attention in the time of a forward pass.
    """
    forward = tuple(0.1 + 0.001 * stage for stage in range(8))
    times = StageTimes(forward_s=forward, backward_s=forward, weight_s=forward)
    return StageProfile(times=times, attention_share=share, slice_s=slice_s)


def measured(whole: StageProfile, num_slices: int) -> SliceTrial:
    """Returns the stage times of a microbatch in ``num_slices`` slices, as if they were measured.

    ``whole`` contains the times of an uncut microbatch.
    """
    work = draw(PLACEMENT, 1, whole, num_slices=num_slices)
    forward, backward, weight = (work.durations_ps.sum(axis=2) / PS_PER_S).tolist()
    times = StageTimes(forward_s=tuple(forward), backward_s=tuple(backward), weight_s=tuple(weight))
    return SliceTrial(num_slices=num_slices, times=times)


@pytest.mark.parametrize("slice_s", [0.0, 0.002, 0.01])
def test_two_numbers_of_slices_give_the_times_of_all(slice_s: float) -> None:
    whole = profile(slice_s)
    first, second = (measured(whole, number) for number in (8, 4))
    added = added_s(first, second)
    assert added == pytest.approx(slice_s, abs=1e-9)
    profile_again = without_slices(replace(whole, times=second.times), 4, added)
    for number in (1, 2, 16):
        expected = measured(whole, number).times
        assert measured(profile_again, number).times.forward_s == pytest.approx(expected.forward_s)
        assert measured(profile_again, number).times.backward_s == pytest.approx(
            expected.backward_s
        )
    part = sum(whole.times.forward_s) / sum(second.times.forward_s)
    assert min(part, 1) <= ratio(profile_again.times, second.times) <= 1


def test_noise_never_makes_work_vanish() -> None:
    first, second = measured(profile(0.0), 8), measured(profile(5.0), 4)
    assert added_s(first, second) == 0
    profile_again = without_slices(replace(profile(0.0), times=first.times), 8, 5.0)
    assert min(profile_again.times.forward_s) > 0


def chosen(whole: StageProfile) -> int:
    """Returns the number of slices that is chosen for two microbatches on four ranks.

    ``whole`` contains the times of an uncut microbatch.
    """

    def choose_for(number: int) -> ScheduleChoice:
        return choose(
            whole,
            placement=PLACEMENT,
            num_microbatches=2,
            most=8.0,
            splittable=True,
            quick=True,
            num_slices=number,
        )

    return choose_number(NUMBERS, choose_for, math.inf).num_slices


def test_cheap_slices_are_chosen_and_costly_ones_are_not() -> None:
    cheap, costly = chosen(profile(0.0)), chosen(profile(0.1))
    assert cheap >= 4
    assert costly == 1


def test_numbers_that_do_not_fit_are_left_out() -> None:
    outcome = {4: 2.0, 1: None, 2: 2.01, 8: 1.995}

    class Simulated:
        def __init__(self, step_s: float) -> None:
            self.step_s = step_s

    def choose_for(number: int) -> ScheduleChoice:
        if (step_s := outcome[number]) is None:
            raise ScheduleError("no memory")
        return Simulated(step_s)  # type: ignore[return-value]

    choice = choose_number((4, 1, 2, 8), choose_for, math.inf)
    # Steps with 2, 4 and 8 slices take almost the same time, so the smallest of these numbers is
    # chosen.
    assert choice.num_slices == 2
    assert choice.schedule.step_s == 2.01
    assert (
        choice.text
        == "simulated step times by number of slices: 2: 2,010 ms, 4: 2,000 ms, 8: 1,995 ms"
    )
    assert choose_number((4, 1, 2, 8), choose_for, 0.0).num_slices == 4
    with pytest.raises(ScheduleError, match="no number of slices fits into memory"):
        choose_number((1,), choose_for, math.inf)


def test_a_whole_microbatch_may_keep_more_than_its_slices() -> None:
    assert memory_factor(4, 4) == memory_factor(8, 4) == 1
    assert memory_factor(2, 8) == pytest.approx(1.5 / 1.125)
    assert memory_factor(1, 4) == 2


def test_the_pace_of_slices_has_messages_of_slices() -> None:
    link = Link(latency_s=0.01, occupancy_s=0.04)
    times = StageTimes.equal(8, forward_s=0.1, backward_s=0.2, weight_s=0.05)
    stages = StageProfile(times=times, link=link)
    assert pace_of(stages) == (0.5, 2.0, 0.5)
    assert pace_of(stages, 4) == (0.2, 2.0, 0.5)
