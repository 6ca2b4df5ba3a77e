"""Plain modules as stages: the gradients of one module in one piece, whole or split."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron.adaptive.errors import ConfigError, ScheduleError

from .split_gpt import drive, pairs, with_weights

# isort: split
from megatron.adaptive.engine.meter import ActivationMeter
from megatron.adaptive.engine.module_stages import (
    DeferringEmbedding,
    DeferringLinear,
    ModuleStages,
    defer_linears,
)
from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.schedule.placement import Placement

MICROBATCHES, WIDTH, ROWS, SAMPLES, LENGTH = 3, 8, 20, 4, 6


class Shared(torch.nn.Module):
    """Uses one layer twice, and a weight of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.scale = torch.nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.scale * self.linear(torch.tanh(self.linear(values)))


class Doubled(torch.nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def make_chunks() -> list[torch.nn.Module]:
    """Return three chunks, tokens ``[4, 6] -> [4, 6, 20]``."""
    torch.manual_seed(2)
    norm, linear = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False)
    return [
        torch.nn.Sequential(torch.nn.Embedding(ROWS, WIDTH, padding_idx=3), linear),
        torch.nn.Sequential(norm, Shared(), Doubled(WIDTH, WIDTH), torch.nn.GELU(), Shared()),
        torch.nn.Sequential(torch.nn.Linear(WIDTH, ROWS)),
    ]


def batch(microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(microbatch)
    tokens = torch.randint(0, ROWS, (SAMPLES, LENGTH), generator=numbers)
    return tokens, tokens.roll(1, 1)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def reference(chunks: Sequence[torch.nn.Module]) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and gradients of plain autograd."""
    model = torch.nn.Sequential(*copy.deepcopy(list(chunks)))
    losses = []
    for number in range(MICROBATCHES):
        tokens, target = batch(number)
        value = loss(model(tokens), target)
        losses.append(value.item())
        (value / MICROBATCHES).backward()
    return losses, grads(model)


def grads(*chunks: torch.nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for chunk in chunks for parameter in chunk.parameters()]
    return [gradient for gradient in found if gradient is not None]


def make_stages(chunks: Sequence[torch.nn.Module], **changes: Any) -> ModuleStages:
    given: dict[str, Any] = {
        "chunks": chunks,
        "placement": Placement(num_ranks=1, num_chunks=len(chunks)),
        "pp_rank": 0,
        "num_microbatches": MICROBATCHES,
        "batch": batch,
        "loss": loss,
        **changes,
    }
    return ModuleStages(**given)


@pytest.mark.parametrize("pieces", [0, 1, 2, 5])
@pytest.mark.parametrize("late", [0, 1, MICROBATCHES])
def test_gradients_are_those_of_one_module(late: int, pieces: int) -> None:
    chunks = make_chunks()
    losses, expected = reference(chunks)
    stages = make_stages(chunks, split=pieces > 0)
    order = pairs(3, MICROBATCHES)
    drive(stages, with_weights(order, late=late, pieces=pieces) if pieces else order, 3)
    stages.finish()
    found = grads(*chunks)
    assert len(found) == len(expected) == 14
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    assert [value.item() for value in stages.losses] == losses


def test_steps_add_up() -> None:
    chunks = make_chunks()
    _, once = reference(chunks)
    stores, meter = [WeightGradientStore() for _ in chunks], ActivationMeter()
    order = with_weights(pairs(3, MICROBATCHES), late=1, pieces=2)
    retained = []
    for _ in range(2):
        stages = make_stages(chunks, split=True, stores=stores, meter=meter)
        drive(stages, order, 3)
        retained.append([stages.retained_bytes(chunk) for chunk in range(3)])
        assert stages.activation_bytes(1) == meter.bytes_of(1) > 0
        stages.finish()
    for one, other in zip(grads(*chunks), once, strict=True):
        torch.testing.assert_close(one, 2 * other)
    assert retained[0] == retained[1]
    assert retained[0][2] == SAMPLES * LENGTH * (WIDTH + ROWS) * 4


def test_layers_defer_within_a_step_only() -> None:
    chunks = make_chunks()
    before = [type(module) for chunk in chunks for module in chunk.modules()]
    attributes = [set(module.__dict__) for chunk in chunks for module in chunk.modules()]
    stages = make_stages(chunks, split=True)
    within = [type(module) for chunk in chunks for module in chunk.modules()]
    assert within.count(DeferringLinear) == 4
    assert within.count(DeferringEmbedding) == 1
    assert within.count(Doubled) == 1
    drive(stages, [("F", 0, 0)], 3)
    stages.finish()
    assert [type(module) for chunk in chunks for module in chunk.modules()] == before
    assert [set(m.__dict__) for chunk in chunks for m in chunk.modules()] == attributes


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.Embedding(ROWS, WIDTH, sparse=True),
        torch.nn.Embedding(ROWS, WIDTH, max_norm=1.0),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(WIDTH, WIDTH)),
        Doubled(WIDTH, WIDTH),
    ],
)
def test_layers_that_stay_as_they_are(layer: torch.nn.Module) -> None:
    plain = type(layer)
    with defer_linears(layer, WeightGradientStore()):
        assert type(layer) is plain


def test_without_an_active_store_layers_are_plain() -> None:
    model, store = torch.nn.Linear(WIDTH, WIDTH), WeightGradientStore()
    with defer_linears(model, store):
        model(torch.ones(2, WIDTH)).sum().backward()
        assert model.weight.grad is not None
        store.active = True
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        model.weight.requires_grad_(False)
        model(torch.ones(2, WIDTH)).sum().backward()
    assert store.pending == 0


def test_classes_change_back_after_an_error() -> None:
    model = torch.nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ZeroDivisionError), defer_linears(model, WeightGradientStore()):
        raise ZeroDivisionError
    assert type(model) is torch.nn.Linear


def test_outputs_are_freed_once_they_are_sent() -> None:
    chunks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    stages = make_stages(chunks, batch=lambda _: (torch.ones(1, WIDTH), None))
    output = stages.forward(0, 0, None)
    seen = weakref.ref(output)
    del output
    assert seen() is not None
    stages.release(0, 0)
    assert seen() is None
    stages.backward(0, 0, torch.ones(1, WIDTH))
    assert torch.equal(chunks[0][0].weight.grad, torch.ones(WIDTH, WIDTH))


def test_evaluation_keeps_nothing() -> None:
    chunks = make_chunks()
    losses, _ = reference(chunks)
    stages = make_stages(chunks, split=True, forward_only=True)
    order = [("F", chunk, number) for number in range(MICROBATCHES) for chunk in range(3)]
    drive(stages, order, 3)
    assert [value.item() for value in stages.losses] == losses
    assert not grads(*chunks)
    stages.finish()


def test_a_chunk_without_trainable_parameters() -> None:
    first, *rest = make_chunks()
    first.requires_grad_(False)
    stages = make_stages([first, *rest], split=True)
    drive(stages, with_weights(pairs(3, MICROBATCHES), late=0, pieces=2), 3)
    stages.finish()
    assert not grads(first)
    assert len(grads(*rest)) == 12


def test_whole_backwards_leave_no_weights() -> None:
    stages = make_stages(make_chunks())
    with pytest.raises(ScheduleError, match="chunk 1, microbatch 0 were asked for in a step whose"):
        stages.weights(1, 0, 0, 1)
    assert stages.retained_bytes(1) == 0


def test_one_store_per_chunk() -> None:
    chunks = make_chunks()
    with pytest.raises(ConfigError, match="1 stores .* of 3 chunks; give one per chunk, or none"):
        make_stages(chunks, split=True, stores=[WeightGradientStore()])
    assert type(chunks[2][0]) is torch.nn.Linear
