"""Tests policies that follow a list of actions, and the reasons they record for their choices."""

from __future__ import annotations

import pytest

from megatron.adaptive.config.schedule_specs import schedule_spec
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import runtime_rules
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.catalog import (
    make_policies,
    placement_for,
    policy_names,
    schedule_names,
    splits_backward,
)
from megatron.adaptive.schedule.policy import Follow, RulePolicy, codes_of, reasons_of
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageProfile, StageTimes
from megatron.adaptive.trace.trace_format import REASONS

from .conftest import run

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W


def make_state(ranks: int = 2, rank: int = 0, cap: float | None = None) -> RankState:
    return RankState(
        placement=Placement(num_ranks=ranks, num_chunks=1), rank=rank, num_microbatches=2, cap=cap
    )


ORDER = (Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(B, 0, 1))


def test_waits_for_the_next_action_even_if_others_are_ready() -> None:
    policy = Follow((Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)))
    state = make_state()
    run(state, Action(F, 0, 0))
    assert state.ready() == (Action(F, 0, 1),)
    assert policy.pick(state) is None
    state.arrive(B, 0, 0)
    assert policy.pick(state) == Action(B, 0, 0)


def test_the_cap_is_not_looked_at() -> None:
    state = make_state(cap=1.0)
    run(state, Action(F, 0, 0))
    assert Follow(ORDER).pick(state) == Action(F, 0, 1)


@pytest.mark.parametrize(
    "order", [(Action(B, 0, 0),), (Action(F, 1, 0),), (Action(ActionKind.W, 0, 0),), ()]
)
def test_an_impossible_list_stands_still(order: tuple[Action, ...]) -> None:
    assert Follow(order).pick(make_state()) is None


def test_a_doubled_action_is_refused() -> None:
    with pytest.raises(ScheduleError, match="lists F0-0 after a later action"):
        Follow((Action(F, 0, 0), Action(F, 0, 0)))


def words_of(name: str, placement: Placement, pieces: int = 0) -> list[list[str]]:
    policies = make_policies(name, placement, 6, weight_pieces=pieces)
    times = StageTimes.equal(placement.num_stages, forward_s=1, backward_s=1, weight_s=1)
    profile = StageProfile(times=times, action_sigma=0.5)
    result = simulate(placement, 6, policies, profile, weight_pieces=pieces, seed=4)
    return [
        reasons_of(policy, codes.tolist(), placement.num_chunks)
        for policy, codes in zip(policies, result.codes, strict=True)
    ]


@pytest.mark.parametrize("name", policy_names())
def test_every_word_is_one_of_the_trace(name: str) -> None:
    chunks = 1 if schedule_spec(name).chunks == "one" else 2
    kind = placement_for(name, 3, chunks).kind if name in schedule_names() else "loop"
    placement = Placement(num_ranks=3, num_chunks=chunks, kind=kind)
    pieces = int(splits_backward(name))
    for row in words_of(name, placement, pieces):
        assert len(row) == 6 * chunks * (2 + pieces)
        assert set(row) <= set(REASONS) - {""}


def test_an_undisturbed_hint_is_followed_and_a_late_input_is_overtaken() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    policy = make_policies("hinted", placement, 3, weight_pieces=2)[1]
    assert isinstance(policy, RulePolicy)
    order = [code % 3 for code in policy.hint]
    assert reasons_of(policy, order, 1) == ["hint"] * len(order)
    # Swap the first weight gradient with the action before it. Only the weight gradient then
    # deviates from the hint.
    first = order.index(2)
    moved = [*order[: first - 1], 2, order[first - 1], *order[first + 1 :]]
    expected = ["hint"] * len(order)
    expected[first - 1] = "filler"
    assert reasons_of(policy, moved, 1) == expected


def test_overtaking_is_told_from_filling() -> None:
    hint = codes_of([Action(F, 0, 0), Action(F, 1, 0), Action(B, 1, 0), Action(B, 0, 0)], 2)
    policy = RulePolicy("hinted", runtime_rules.hinted, hint)
    assert reasons_of(policy, [0, 3, 1, 2], 2) == ["hint", "overtake", "hint", "hint"]


def test_words_of_the_rules() -> None:
    placement = Placement(num_ranks=2, num_chunks=2)
    (first, *_) = make_policies("adaptive", placement, 2)
    assert reasons_of(first, [0, 1, 2, 5], 2) == ["turn", "turn", "deepest", "filler"]
    (first, *_) = make_policies("bfc", placement, 2)
    assert reasons_of(first, [0, 2], 2) == ["broadest", "deepest"]
    assert reasons_of(Follow((), "mine"), [0, 0], 1) == ["order", "order"]
