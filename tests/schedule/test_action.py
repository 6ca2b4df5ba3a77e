"""The vocabulary: text, equality, order and the shared table."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.adaptive.schedule.action import Action, ActionKind, action_table


def test_text_names_kind_chunk_and_microbatch() -> None:
    assert str(Action(ActionKind.F, 0, 3)) == "F0-3"
    assert f"{Action(ActionKind.W, 2, 11)}" == "W2-11"
    assert f"{ActionKind.B}" == "B"


def test_equal_fields_are_equal_and_hash_alike() -> None:
    action = Action(ActionKind.B, 1, 2)
    twin = Action(ActionKind("B"), 1, 2)
    assert action == twin
    assert hash(action) == hash(twin)
    assert len({action, twin, Action(ActionKind.F, 1, 2), Action(ActionKind.B, 0, 2)}) == 3
    assert action != Action(ActionKind.B, 1, 3)
    assert action != "B1-2"


def test_actions_sort_by_kind_then_chunk_then_microbatch() -> None:
    f01, f10, b12 = (
        Action(ActionKind.F, 0, 1),
        Action(ActionKind.F, 1, 0),
        Action(ActionKind.B, 1, 2),
    )
    assert sorted([f10, f01, b12]) == [b12, f01, f10]


def test_actions_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Action(ActionKind.F, 0, 0).chunk = 1  # type: ignore[misc]


def test_table_holds_every_action_once_and_is_shared() -> None:
    table = action_table(ActionKind.F, 2, 3)
    assert [str(action) for row in table for action in row] == [
        "F0-0", "F0-1", "F0-2", "F1-0", "F1-1", "F1-2",
    ]  # fmt: skip
    assert action_table(ActionKind.F, 2, 3) is table
