"""Tests which actions the run-time rules choose in small examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron.adaptive.schedule import runtime_rules
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.policy import RulePolicy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement

from .conftest import actions, run

F = ActionKind.F


def state(
    kind: str = "v", *, rank: int = 1, cap: float | None = None, pieces: int = 2
) -> RankState:
    """Returns the state of ``rank`` of three ranks with two chunks each, without any inputs yet.

    ``kind`` is the kind of placement, ``cap`` limits activations, and a weight gradient has
    ``pieces`` actions.
    """
    placement = Placement(num_ranks=3, num_chunks=2, kind=kind)  # type: ignore[arg-type]
    return RankState(
        placement=placement, rank=rank, num_microbatches=6, cap=cap, weight_pieces=pieces
    )


def pick(rule: Callable[..., int], s: RankState) -> str:
    return str(RulePolicy("rule", rule).pick(s))


def arrive(s: RankState, *names: str) -> None:
    for action in actions(" ".join(names)):
        s.arrive(action.kind, action.chunk, action.microbatch)


def test_adaptive_alternates_and_fills_with_weight_gradients() -> None:
    s = state()
    arrive(s, "F0-0", "F0-1", "F0-2", "B0-0", "B0-1")
    assert pick(runtime_rules.ready_first, s) == "F0-0"
    run(s, "F0-0")
    assert pick(runtime_rules.ready_first, s) == "B0-0"
    run(s, "B0-0")
    assert pick(runtime_rules.ready_first, s) == "F0-1"
    run(s, "F0-1", "B0-1", "F0-2")
    assert pick(runtime_rules.ready_first, s) == "W0-0"
    run(s, "W0-0")
    assert pick(runtime_rules.ready_first, s) == "W0-0.1"
    # The last action before the weight gradients was F, so the next action must be B.
    arrive(s, "B0-2", "F0-3")
    assert pick(runtime_rules.ready_first, s) == "B0-2"


def test_adaptive_takes_the_deepest_backward() -> None:
    s = state()
    arrive(s, "F0-0", "F1-0", "B0-0", "B1-0")
    run(s, "F0-0", "F1-0")
    assert pick(runtime_rules.ready_first, s) == "B1-0"


def test_adaptive_takes_forwards_in_groups_in_a_loop() -> None:
    s = state("loop")
    arrive(s, "F0-0", "F0-1", "F1-0")
    run(s, "F0-0")
    assert pick(runtime_rules.ready_first, s) == "F0-1"


def test_adaptive_takes_the_longest_way_in_a_v() -> None:
    s = state()  # This rank runs the stages 1 and 4.
    arrive(s, "F1-0", *(f"F0-{index}" for index in range(5)))
    # F1-0 and F0-3 have equally long paths to the end of the step. Such a tie goes to the action of
    # the later chunk.
    for expected in ("F0-0", "F0-1", "F0-2", "F1-0"):
        assert pick(runtime_rules.ready_first, s) == expected
        run(s, expected)
    arrive(s, "B1-0", *(f"B0-{index}" for index in range(3)))
    assert pick(runtime_rules.ready_first, s) == "B1-0"


def test_adaptive_heeds_the_cap_and_waits_when_nothing_is_left() -> None:
    s = state(cap=1.0, pieces=0)
    arrive(s, "F0-0", "F0-1")
    run(s, "F0-0")
    assert pick(runtime_rules.ready_first, s) == "None"
    arrive(s, "F1-0")
    assert pick(runtime_rules.ready_first, s) == "F1-0"


def test_depth_first_goes_back_first_and_then_deep() -> None:
    s = state("loop")
    arrive(s, "F0-0", "F0-1", "B0-0")
    assert pick(runtime_rules.depth_first, s) == "F0-0"
    run(s, "F0-0")
    arrive(s, "F1-0")
    assert pick(runtime_rules.depth_first, s) == "B0-0"
    run(s, "B0-0")
    assert pick(runtime_rules.depth_first, s) == "F1-0"


def test_breadth_first_takes_every_microbatch_of_a_chunk() -> None:
    s = state("loop")
    arrive(s, "F0-0", "F0-1", "F1-0", "B1-0")
    run(s, "F0-0")
    assert pick(runtime_rules.breadth_first, s) == "F0-1"
    run(s, "F0-1")
    assert pick(runtime_rules.breadth_first, s) == "F1-0"
    run(s, "F1-0")
    assert pick(runtime_rules.breadth_first, s) == "B1-0"
    run(s, "B1-0")
    assert pick(runtime_rules.breadth_first, s) == "W1-0"


@pytest.mark.parametrize("rule", [runtime_rules.depth_first, runtime_rules.breadth_first])
def test_the_greedy_rules_heed_a_cap(rule: Callable[..., int]) -> None:
    s = state("loop", cap=1.0, pieces=0)
    arrive(s, "F0-0", "F0-1")
    run(s, "F0-0")
    assert pick(rule, s) == "None"
    free = state("loop", pieces=0)
    arrive(free, "F0-0", "F0-1")
    run(free, "F0-0")
    assert pick(rule, free) == "F0-1"


def test_hinted_overtakes_only_where_the_remaining_hint_fits() -> None:
    # The hint is the order F0-0 F0-1 B0-0 B0-1 F1-0 and so on. It contains codes of actions for two
    # chunks without weight gradients.
    hint = (0, 0 + 6, 2, 2 + 6, 1, 3)
    placement = Placement(num_ranks=3, num_chunks=2)

    def situation(cap: float) -> RankState:
        s = RankState(placement=placement, rank=1, num_microbatches=2, cap=cap)
        arrive(s, "F0-0", "F1-0")
        run(s, "F0-0")
        return s  # F0-1 is next in the hint, but only F1-0 has received its input.

    assert RulePolicy("hinted", runtime_rules.hinted, hint).pick(situation(1.5)) == Action(F, 1, 0)
    # According to the hint, F0-1 follows. If F1-0 ran first, the rank would store three chunks,
    # which exceeds a cap of 1.
    assert RulePolicy("hinted", runtime_rules.hinted, hint).pick(situation(1.0)) is None
