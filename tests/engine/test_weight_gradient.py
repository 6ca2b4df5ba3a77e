"""Tests when deferred weight gradients are computed, and how they are divided into pieces."""

from __future__ import annotations

import gc
import weakref
from typing import NamedTuple

import pytest
import torch

from megatron.adaptive.engine.weight_gradient import (
    EmbeddingCall,
    LinearCall,
    WeightGradientStore,
    _Task,
    defer,
    is_deferring,
    piece_sizes,
    uneven_pieces,
)
from megatron.adaptive.errors import ScheduleError

ROWS, WIDTH = 3, 4
TENSOR_BYTES = ROWS * WIDTH * 4


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(WIDTH, WIDTH))


def collect(store: WeightGradientStore, microbatch: int, weights: list[torch.nn.Parameter]) -> None:
    """Applies a layer for each weight, and defers the weight gradients of the backward pass.

    ``store`` collects the gradients, which belong to ``microbatch``.
    """
    hidden = torch.randn(ROWS, WIDTH)
    for parameter in weights:
        hidden = torch.tanh(defer(LinearCall(parameter, None), hidden, store))
    with store.collect(microbatch):
        hidden.sum().backward()


@pytest.mark.parametrize(
    ("costs", "pieces", "sizes"),
    [
        ([1, 1, 1, 1], 1, [4]),
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1], 2, [1, 2]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 9], 2, [3, 1]),
        ([1, 2], 4, [1, 0, 1, 0]),
        ([], 3, [0, 0, 0]),
        ([0, 0], 2, [2, 0]),
    ],
)
def test_pieces_are_balanced(costs: list[float], pieces: int, sizes: list[int]) -> None:
    assert piece_sizes(costs, pieces) == sizes


def test_what_communicates_is_in_the_same_piece_on_ranks_with_other_experts() -> None:
    class Call(NamedTuple):
        cost: float
        sequence_group: object = None

        def flops(self, gradient: object) -> float:
            return self.cost

    def cut(experts: list[float]) -> tuple[list[list[int]], list[float]]:
        calls = [Call(4, "group"), *map(Call, experts), *[Call(4, "group")] * 3]
        units = [[_Task(call, number, None)] for number, call in enumerate(calls)]  # type: ignore[arg-type]
        order, counts = uneven_pieces(units, 4)
        parts = [[order.popleft()[0] for _ in range(count)] for count in counts]
        assert not order
        communicating = [[t.inputs for t in part if t.call.sequence_group] for part in parts]  # type: ignore[attr-defined]
        return communicating, [sum(t.call.flops(None) for t in part) for part in parts]  # type: ignore[arg-type]

    places, costs = cut([0, 0, 0, 8, 8, 0])
    assert places == [[0], [7], [8], [9]]
    assert costs == [4, 12, 4, 12]
    for experts in ([8.0] * 6, [0.0] * 6, [48.0, 0, 0, 0, 0, 0]):
        assert cut(experts)[0] == places
    assert cut([8.0] * 6)[1] == [12, 20, 12, 20]


def test_the_size_of_the_first_microbatch_is_known() -> None:
    store, layers = WeightGradientStore(), [weight() for _ in range(4)]
    assert store.microbatch_bytes == 0
    # Each layer keeps its input and the gradient of its output.
    for number in range(2):
        collect(store, number, layers[: 4 - number])
        assert store.microbatch_bytes == 4 * 2 * TENSOR_BYTES
    for piece in range(3):
        assert store.pending == 2
        store.run(0, piece, 3)
    assert store.pending == 1
    store.run(1, 0, 1)
    assert store.microbatch_bytes == 4 * 2 * TENSOR_BYTES


def test_a_tensor_of_two_layers_counts_once() -> None:
    store, first, second = WeightGradientStore(), weight(), weight()
    hidden = torch.randn(ROWS, WIDTH)
    both = defer(LinearCall(first, None), hidden, store) * defer(
        LinearCall(second, None), hidden, store
    )
    with store.collect(0):
        both.sum().backward()
    assert store.microbatch_bytes == 3 * TENSOR_BYTES


class Watched(LinearCall):
    """Call that can be referenced weakly, so that a test sees when it is freed."""

    __slots__ = ("__weakref__",)


def test_tasks_are_freed_when_they_are_done() -> None:
    store, calls = WeightGradientStore(), [Watched(weight(), None) for _ in range(2)]
    seen = [weakref.ref(call) for call in calls]
    hidden = torch.randn(ROWS, WIDTH)
    for call in calls:
        hidden = defer(call, hidden, store)
    with store.collect(0):
        hidden.sum().backward()
    del hidden, call
    calls.clear()
    gc.collect()
    assert None not in [reference() for reference in seen]
    store.run(0, 0, 2)
    assert [reference() is None for reference in seen] == [
        False,
        True,
    ]  # The weight gradient of the last layer is computed first, so its call is freed first.
    store.run(0, 1, 2)
    assert [reference() is None for reference in seen] == [True, True]


def test_clear_forgets_and_starts_anew() -> None:
    store = WeightGradientStore()
    collect(store, 0, [weight()])
    store.run(0, 0, 2)
    collect(store, 1, [weight()])
    store.clear()
    assert store.pending == 0
    collect(store, 0, [weight()])
    store.run(0, 0, 1)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ((1, 0, 2), "microbatch 1, piece 0 of 2 .* microbatch 0, piece 1 of 2 is due"),
        ((0, 0, 2), "microbatch 0, piece 0 of 2 .* microbatch 0, piece 1 of 2 is due"),
        ((0, 1, 3), "piece 1 of 3 .* piece 1 of 2 is due; request .* ascending order"),
        ((0, 2, 2), "piece 2 of 2 .* ascending order"),
        ((0, -1, 2), "piece -1 of 2 .* ascending order"),
    ],
)
def test_another_piece_is_refused(asked: tuple[int, int, int], text: str) -> None:
    store = WeightGradientStore()
    for number in range(2):
        collect(store, number, [weight(), weight()])
    store.run(0, 0, 2)
    with pytest.raises(ScheduleError, match=text):
        store.run(*asked)
    store.run(0, 1, 2)


def test_backwards_ascend_and_come_before_their_weights() -> None:
    store = WeightGradientStore()
    with pytest.raises(ScheduleError, match="nothing is due; request each piece once, after its"):
        store.run(0, 0, 1)
    with (
        store.collect(0),
        pytest.raises(ScheduleError, match="microbatch 1 was started .*after or within"),
        store.collect(1),
    ):
        pass
    collect(store, 2, [weight()])
    with pytest.raises(ScheduleError, match="of microbatch 1 was started after"):
        collect(store, 1, [weight()])


def test_slices_of_a_microbatch_descend() -> None:
    store = WeightGradientStore()
    store.num_slices = 3
    order = [2, 1, 0, 5, 4, 3]
    for item in order:
        collect(store, item, [weight()])
    for item in order:
        store.run(item, 0, 1)
    assert store.pending == 0
    with pytest.raises(ScheduleError, match=r"of microbatch 1\.1 was started after"):
        collect(store, 4, [weight()])


def test_a_backward_of_the_usual_kind_is_refused() -> None:
    output = defer(LinearCall(weight(), None), torch.randn(ROWS, WIDTH), WeightGradientStore())
    with pytest.raises(ScheduleError, match="must run within WeightGradientStore.collect"):
        output.sum().backward()


def test_a_backward_that_failed_leaves_nothing() -> None:
    store = WeightGradientStore()

    def fail() -> None:
        with store.collect(0):
            defer(LinearCall(weight(), None), torch.randn(ROWS, WIDTH), store).sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert store.pending == 0


def test_who_defers() -> None:
    store, parameter = WeightGradientStore(), weight()
    assert not is_deferring(store, parameter)
    store.active = True
    assert is_deferring(store, parameter)
    with torch.no_grad():
        assert not is_deferring(store, parameter)
    assert not is_deferring(store, parameter * 2)
    assert not is_deferring(store, parameter.requires_grad_(False))


@pytest.mark.parametrize("by_index", [False, True])
def test_an_embedding_keeps_its_place_in_the_graph(by_index: bool) -> None:
    store, tokens = WeightGradientStore(), torch.tensor([[0, 2], [2, 2]])
    table = torch.nn.Parameter(torch.randn(5, WIDTH))
    output = defer(EmbeddingCall(table, by_index=by_index), tokens, store)
    assert torch.equal(output, table[tokens])
    assert output.requires_grad  # The output requires a gradient, although the input tokens do not.
    with store.collect(0):
        output.sum().backward()
    assert table.grad is None
    store.run(0, 0, 1)
    assert table.grad is not None
    assert table.grad[:, 0].tolist() == [1, 0, 3, 0, 0]
