"""Following a list: position from the state, waiting, and lists that cannot be."""

from __future__ import annotations

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.state import RankState

F, B = ActionKind.F, ActionKind.B


def make_state(ranks: int = 2, rank: int = 0, cap: float | None = None) -> RankState:
    return RankState(
        placement=Placement(num_ranks=ranks, num_chunks=1),
        rank=rank,
        num_microbatches=2,
        cap=cap,
    )


def run(state: RankState, *actions: Action) -> None:
    for action in actions:
        state.start(action)
        state.finish(action)


ORDER = (Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(B, 0, 1))


def test_waits_for_the_next_action_even_if_others_are_ready() -> None:
    policy = Follow((Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)))
    state = make_state()
    run(state, Action(F, 0, 0))
    assert state.ready() == (Action(F, 0, 1),)
    assert policy.pick(state) is None
    state.arrive(B, 0, 0)
    assert policy.pick(state) == Action(B, 0, 0)


def test_one_object_serves_several_steps() -> None:
    policy = Follow(ORDER, "mine")
    assert policy.name == "mine"
    for _ in range(2):
        state = make_state(ranks=1)
        for expected in ORDER:
            assert policy.pick(state) == expected
            assert policy.pick(state) == expected, "picking changes nothing"
            run(state, expected)
        assert policy.pick(state) is None


def test_a_running_action_is_not_picked_again() -> None:
    policy = Follow(ORDER)
    state = make_state()
    state.start(Action(F, 0, 0))
    assert policy.pick(state) == Action(F, 0, 1)


def test_the_cap_is_not_looked_at() -> None:
    state = make_state(cap=1.0)
    run(state, Action(F, 0, 0))
    assert Follow(ORDER).pick(state) == Action(F, 0, 1)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((Action(F, 0, 1),), "position 0 of bad lists F0-1: F0-0 comes before it"),
        ((Action(B, 0, 0),), "position 0 of bad lists B0-0: its own forward F0-0"),
        ((Action(F, 1, 0),), "lists F1-0: there is no such action"),
        ((Action(ActionKind.W, 0, 0),), "this step has no W"),
        ((), "ends after 0 of 4 actions"),
    ],
)
def test_impossible_lists_are_refused(order: tuple[Action, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Follow(order, "bad").pick(make_state())


def test_a_doubled_action_is_refused() -> None:
    state = make_state()
    run(state, Action(F, 0, 0))
    with pytest.raises(
        ScheduleError, match="position 1 of twice lists F0-0: it was started before"
    ):
        Follow((Action(F, 0, 0), Action(F, 0, 0)), "twice").pick(state)
