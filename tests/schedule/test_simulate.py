"""Tests the simulation of steps, including latency, random durations and deadlocks."""

from __future__ import annotations

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import runtime_rules
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.catalog import make_policies, make_schedule
from megatron.adaptive.schedule.policy import Follow, RulePolicy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.simulate import SimSpan, simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import Link, StageProfile, StageTimes

F, B = ActionKind.F, ActionKind.B
ADAPTIVE = RulePolicy("adaptive", runtime_rules.ready_first)
TWO_RANKS = Placement(num_ranks=2, num_chunks=1)
TIMES = StageTimes(forward_s=(1.0, 1.5), backward_s=(2.0, 3.0))


def late(times: StageTimes, latency_s: float, **more: float) -> StageProfile:
    return StageProfile(times=times, link=Link(latency_s=latency_s), **more)


def test_one_microbatch_by_hand() -> None:
    result = simulate(TWO_RANKS, 1, [ADAPTIVE] * 2, late(TIMES, 0.25))
    assert result.spans == (
        (SimSpan(Action(F, 0, 0), 0.0, 1.0), SimSpan(Action(B, 0, 0), 6.0, 8.0)),
        (SimSpan(Action(F, 0, 0), 1.25, 2.75), SimSpan(Action(B, 0, 0), 2.75, 5.75)),
    )
    assert result.makespan_s == 8.0
    assert result.bubble_fraction == (1 - 3.0 / 8.0, 1 - 4.5 / 8.0)
    assert result.peak_units == (1.0, 1.0)


def test_hand_over_on_one_rank_takes_no_time() -> None:
    placement = Placement(num_ranks=1, num_chunks=3)
    times = StageTimes.equal(3, forward_s=1.0, backward_s=2.0)
    result = simulate(placement, 2, [ADAPTIVE], late(times, 9.0))
    assert result.makespan_s == 2 * 3 * 3.0
    assert result.bubble_fraction == (0.0,)


def test_moments_that_coincide_do_so_whatever_the_sums() -> None:
    """Checks that sums of durations are exact. Floats would accumulate rounding errors."""
    placement = Placement(num_ranks=4, num_chunks=1)
    times = StageTimes.equal(4, forward_s=0.1, backward_s=0.2)
    result = simulate(placement, 30, make_policies("1f1b", placement, 30), times)
    assert result.makespan_s == 9.9


def test_a_seed_gives_every_policy_the_same_durations() -> None:
    def durations(name: str) -> dict[Action, float]:
        result = simulate(
            TWO_RANKS,
            5,
            make_policies(name, TWO_RANKS, 5),
            late(TIMES, 0.1, action_sigma=0.5, latency_sigma=0.5),
            seed=7,
        )
        return {span.action: span.end_s - span.start_s for span in result.spans[1]}

    assert durations("gpipe") == pytest.approx(durations("adaptive"), abs=1e-9)
    assert len(set(durations("gpipe").values())) == 10


def test_a_deadlock_names_what_each_rank_waits_for() -> None:
    orders = make_schedule("1f1b", TWO_RANKS, 2).orders
    stuck = (Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1))
    gpipe_last = make_schedule("gpipe", TWO_RANKS, 2).orders[1]
    assert simulate(TWO_RANKS, 2, [Follow(orders[0]), Follow(gpipe_last)], TIMES).makespan_s > 0
    with pytest.raises(ScheduleError) as caught:
        simulate(TWO_RANKS, 2, [Follow(stuck), Follow(gpipe_last)], TIMES)
    text = str(caught.value)
    assert text.startswith("deadlock: no rank can continue: rank 0 waits for")
    assert "input of B0-0 from rank 1 (stage 1)" in text
    assert "rank 1 waits for input of F0-1 from rank 0 (stage 0)" in text


class Rogue:
    name = "rogue"

    def pick(self, state: RankState) -> Action | None:
        return Action(B, 0, 0)


def test_a_policy_that_picks_what_is_not_ready_is_named() -> None:
    with pytest.raises(
        ScheduleError, match=r"policy rogue.*rank 0: B0-0 cannot start.*ready: F0-0"
    ):
        simulate(TWO_RANKS, 2, [Rogue(), Rogue()], TIMES)


def test_bad_input() -> None:
    with pytest.raises(ScheduleError, match="latency_s must be .*, got -0.1"):
        simulate(TWO_RANKS, 2, [ADAPTIVE] * 2, late(TIMES, -0.1))
    with pytest.raises(ScheduleError, match="number of policies must be 2, one per rank, got 1"):
        simulate(TWO_RANKS, 2, [ADAPTIVE], TIMES)
