"""Tests which rank sends which part of a parameter's state, and how the parts are sent."""

from __future__ import annotations

import itertools
import random
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import accelerator
from tests.device_tensor import DeviceTensor

accelerator.install()

from megatron.adaptive.rebalance import layer_state  # noqa: E402
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


@pytest.mark.parametrize("on_gpu", [False, True])
def test_layers_are_sent_without_a_second_copy_on_the_gpu(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a rank copies its parts to the host one by one, and waits for the GPU once."""
    sent: dict[int, torch.Tensor] = {}
    waits: list[torch.device] = []
    locked: list[int] = []

    def lock(size_bytes: int, device: torch.device) -> torch.Tensor:
        locked.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    def send(operations: list[Any]) -> list[Any]:
        assert len(waits) == on_gpu
        sent.update({peer: part.clone() for _, part, peer, *_ in operations})
        return []

    def fail(*_: Any) -> None:
        raise AssertionError("torch.cat joined the parts of a message")

    monkeypatch.setattr(torch, "cat", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(layer_state, "locked_memory", lock)
    monkeypatch.setattr(dist, "P2POp", lambda *arguments: arguments)
    monkeypatch.setattr(dist, "batch_isend_irecv", send)
    state = [torch.arange(6.0), torch.arange(6).bfloat16()]
    tensors = [DeviceTensor(tensor) for tensor in state] if on_gpu else state
    old = {"a": layer_state.Share(10, 16, [*tensors])}
    needed = [Passage(0, 1, "a", 10, 12), Passage(0, 1, "a", 14, 16), Passage(0, 2, "a", 13, 14)]
    layer_state.exchange(needed, 0, old, {}, cast(Any, None))
    chosen = {1: [slice(0, 2), slice(4, 6)], 2: [slice(3, 4)]}
    for peer, slices in chosen.items():
        parts = [tensor[part].view(torch.uint8) for part in slices for tensor in state]
        assert sent[peer].tolist() == [byte for part in parts for byte in part.tolist()]
    assert locked == ([24, 6] if on_gpu else [])
    assert len(waits) == on_gpu
