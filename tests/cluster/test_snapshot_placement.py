"""Tests which copies in memory are used after nodes are lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megatron.adaptive.cluster.membership import Node
from megatron.adaptive.cluster.snapshot_placement import SnapshotSource, buddies, newest


def held(
    node: str, rank: int, *steps: int, kind: str = "own", generation: int = 1
) -> dict[str, Any]:
    snapshot = {"node": node, "file": node, "run": "run", "rank": rank, "generation": generation}
    return {**snapshot, "kind": kind, "steps": steps, "has_common": True}


def need(*ranks: int, is_sent: bool = False) -> dict[str, Any]:
    return {"ranks": ranks, "is_sent": is_sent}


def newest_of(
    held: Sequence[Mapping[str, Any]], needs: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
) -> SnapshotSource:
    stores = [
        {**snapshot, "needs": needs[snapshot["run"], snapshot["generation"]]} for snapshot in held
    ]
    return newest([(store["node"], [store]) for store in stores])


def test_the_newest_step_that_is_whole_is_taken() -> None:
    needs = {("run", 1): [need(0, is_sent=True), need(1, is_sent=True), need(0, 1)]}
    first, other = held("a", 0, 6, 7), held("b", 1, 6, 7)
    chosen = newest_of([first, other], needs)
    assert (chosen.step, chosen.seen, chosen.why) == (7, 7, "")
    assert chosen.parts == ({**first, "needs": [0, 2]}, {**other, "needs": [1]})
    # The node of rank 1 is lost. Its partner node has a copy of the state after the previous step.
    sent = held("a", 1, 5, 6, kind="sent")
    chosen = newest_of([first, sent], needs)
    assert (chosen.step, chosen.seen) == (6, 7)
    assert chosen.parts == ({**first, "needs": [0, 2]}, {**sent, "needs": [1]})
    # The copy on the partner node contains only a part of the state.
    chosen = newest_of([sent], {("run", 1): [need(1)]})
    assert chosen.step == 0
    chosen = newest_of([first], needs)
    assert (chosen.step, chosen.seen) == (0, 7)
    assert chosen.why == "no copy of the state of rank 1 is left"
    assert newest([]).why == "no remaining node has copies"


def test_what_was_copied_before_a_move_counts_until_there_is_more() -> None:
    needs = {("run", 1): [need(0), need(1)], ("run", 2): [need(0), need(1)]}
    before = [held("a", 0, 3, 4), held("b", 1, 3, 4)]
    after = [held("a", 0, 5, generation=2), held("b", 1, generation=2)]
    assert newest_of(before + after, needs).step == 4


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("mmm", ["b", "c", "a"]), ("mmn", ["c", "c", "a"]), ("mno", ["b", "c", "a"]), ("m", [None])],
)
def test_the_buddy_is_the_next_node_on_another_machine(
    hosts: str, expected: list[str | None]
) -> None:
    nodes = [Node(name=name, host=host) for name, host in zip("abc", hosts, strict=False)]
    assert list(buddies(nodes).values()) == expected
