"""The vocabulary: equality and the shared table."""

from __future__ import annotations

from megatron.adaptive.schedule.action import Action, ActionKind, action_table


def test_equal_fields_are_equal_and_hash_alike() -> None:
    action = Action(ActionKind.B, 1, 2)
    twin = Action(ActionKind("B"), 1, 2)
    assert action == twin
    assert hash(action) == hash(twin)
    assert len({action, twin, Action(ActionKind.F, 1, 2), Action(ActionKind.B, 0, 2)}) == 3
    assert action != Action(ActionKind.B, 1, 3)
    assert action != "B1-2"


def test_table_holds_every_action_once_and_is_shared() -> None:
    table = action_table(ActionKind.W, 2, 2, 2)
    assert [[str(action) for action in row] for row in table] == [
        ["W0-0", "W0-0.1", "W0-1", "W0-1.1"],
        ["W1-0", "W1-0.1", "W1-1", "W1-1.1"],
    ]
    assert action_table(ActionKind.W, 2, 2, 2) is table
