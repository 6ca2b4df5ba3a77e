"""Tests which rank sends which part of a parameter's state, for random ranges of elements."""

from __future__ import annotations

import itertools
import random

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.rebalance.layer_state import Passage, Table, passages  # noqa: E402

Shares = dict[str, tuple[int, int]]


def table(had: Shares, wants: Shares, replica: int = 0) -> Table:
    """Returns a table of a rank: the elements that it has, and the elements that it needs."""
    return Table(replica=replica, had=had, wants=wants, steps=1.0)


def test_a_layer_goes_from_each_replica_to_its_own() -> None:
    whole = {"a": (0, 10)}
    tables = {
        0: table(whole, {}, replica=0),
        1: table(whole, {}, replica=1),
        2: table({}, whole, replica=0),
        3: table({}, whole, replica=1),
    }
    assert passages(tables) == [Passage(0, 2, "a", 0, 10), Passage(1, 3, "a", 0, 10)]


def test_what_stays_as_it_is_goes_nowhere() -> None:
    assert passages({0: table({"a": (2, 5)}, {"a": (2, 5)})}) == []


def test_tensor_parallel_ranks_keep_to_themselves() -> None:
    tables = {
        rank: table(elements if rank < 2 else {}, elements if rank > 1 else {})
        for rank in range(4)
        for elements in [{f"a of {rank % 2}": (0, 4)}]
    }
    assert {(way.source, way.target) for way in passages(tables)} == {(0, 2), (1, 3)}


def test_shares_are_put_together_from_all_that_have_a_part() -> None:
    """Checks that each rank gets all elements that it needs, even if some ranks have none."""
    for seed in range(30):
        drawn = random.Random(seed)
        size, ranks = drawn.randint(1, 40), drawn.randint(1, 4)

        def cut(size: int = size, ranks: int = ranks, drawn: random.Random = drawn) -> list[Shares]:
            edges = [0, *sorted(drawn.randint(0, size) for _ in range(ranks - 1)), size]
            pairs = list(itertools.pairwise(edges))
            drawn.shuffle(pairs)
            return [{"a": pair if pair[0] < pair[1] else (0, 0)} for pair in pairs]

        senders = drawn.choice(("same", "others"))
        before, after = cut(), cut()
        if senders == "same":
            tables = {r: table(before[r], after[r], r) for r in range(ranks)}
        else:
            tables = {r: table(before[r], {}, r) for r in range(ranks)}
            tables |= {ranks + r: table({}, after[r], r) for r in range(ranks)}
        ways = passages(tables)
        for rank, state in tables.items():
            if not state.wants:
                continue
            low, high = state.wants["a"]
            if state.had.get("a") == (low, high):
                continue
            covered = [
                element
                for way in ways
                if way.target == rank
                for element in range(way.start, way.end)
            ]
            assert sorted(covered) == list(range(low, high))
        for way in ways:
            low, high = tables[way.source].had["a"]
            assert low <= way.start < way.end <= high
