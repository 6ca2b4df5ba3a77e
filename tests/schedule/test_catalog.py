"""Tests the names of schedules, and the error about an unknown name, which lists all names."""

from __future__ import annotations

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.catalog import (
    is_rule,
    make_policies,
    make_schedule,
    placement_for,
    policy_names,
    schedule_names,
    splits_backward,
)
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind


def test_names() -> None:
    static = schedule_names()
    assert set(static) >= {"1f1b", "dualpipe-v", "forward-only", "gpipe", "interleaved", "zb-v"}
    assert "forward-only" not in policy_names()
    rules = set(policy_names()) - set(static)
    assert rules >= {"adaptive", "bfc", "dfc"}
    assert policy_names() == tuple(sorted({*static, *rules} - {"forward-only"}))
    assert all(is_rule(name) and not splits_backward(name) for name in rules)


@pytest.mark.parametrize(
    ("name", "kind", "num_chunks"),
    [
        ("1f1b", "loop", 1),
        ("zb-h1", "loop", 1),
        ("varuna", "loop", 1),
        ("zb-v", "v", 2),
        ("v-half", "v", 2),
        ("dualpipe-v", "v", 2),
        ("combined-1f1b", "loop", 3),
        ("interleaved", "loop", 3),
        ("breadth-first", "loop", 3),
        ("gpipe", "loop", 3),
        ("adaptive", "loop", 3),
    ],
)
def test_placements(name: str, kind: PlacementKind, num_chunks: int) -> None:
    expected = Placement(num_ranks=4, num_chunks=num_chunks, kind=kind)
    assert placement_for(name, 4, 3) == expected


def test_unknown_names_list_the_known_ones() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    fixed = [name for name in schedule_names() if name in policy_names()]
    with pytest.raises(ScheduleError, match=f"'2f2b'.*{', '.join(fixed)}"):
        make_schedule("2f2b", placement, 4)
    for ask in (
        lambda: make_policies("greedy", placement, 4),
        lambda: placement_for("greedy", 2, 1),
        lambda: splits_backward("greedy"),
        lambda: is_rule("greedy"),
    ):
        with pytest.raises(
            ScheduleError, match=f"unknown schedule 'greedy'.*{', '.join(policy_names())}"
        ):
            ask()
    with pytest.raises(ScheduleError, match=r"'auto' works only in the trainer .* choose one of"):
        is_rule("auto")
