"""Tests that starting a pipeline avoids repeated recordings, measurements and waits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megatron.adaptive.modules import CutPoint
from megatron.adaptive.modules.early_samples import helpers_of, is_cheap
from megatron.adaptive.modules.recording import RecordingCache, SampledModel
from megatron.adaptive.modules.recordings import evaluates_alike, record_examples
from megatron.adaptive.modules.segments import _RANDOM_NUMBERS, _fill_with_random

from .models import Tower

WIDTH = 8


class Modes(torch.nn.Module):
    """Model that calls ``body`` between two cut points.

    ``body`` may behave differently in evaluation.
    """

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.cuts = torch.nn.ModuleList(CutPoint() for _ in range(2))
        self.extra = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("total", torch.zeros(()))
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.cuts[0](self.layers[0](x))
        x = self.cuts[1](self.body(self, x, y))
        return self.layers[2](x).square().mean()


def alike(model: Modes, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(model.layers[1](x), 0.5, model.training)


def other_parameter(model: Modes, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model.layers[1](x) if model.training else model.extra(model.layers[1](x))


def parameter_of_another_segment(model: Modes, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model.layers[1 if model.training else 0](x)


def other_input(model: Modes, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model.layers[1](x) + (0.0 if model.training else y)


def changed_buffer(model: Modes, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not model.training:
        model.total.add_(1.0)
    return model.layers[1](x)


def read_buffer(model: Modes, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model.layers[1](x) + (0.0 if model.training else model.total)


def larger_message(model: Modes, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model.layers[1](x if model.training else torch.cat([x, x]))


def host_numbers(model: Modes, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model.layers[1](x) * (1.0 if model.training else random.random())


def error(model: Modes, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not model.training:
        raise ValueError("no evaluation")
    return model.layers[1](x)


def sampled(body: Any) -> SampledModel:
    with torch.device("meta"):
        model = Modes(body)
    batch = {"x": torch.ones(2, WIDTH), "y": torch.ones(2, WIDTH)}
    return SampledModel(model, batch, slicing="record")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (alike, True),
        (other_parameter, False),
        (parameter_of_another_segment, False),
        (other_input, False),
        (changed_buffer, False),
        (read_buffer, False),
        (larger_message, False),
        (host_numbers, False),
        (error, False),
    ],
)
def test_evaluation_is_postponed_only_if_stages_need_nothing_more(
    body: Any, expected: bool
) -> None:
    model = sampled(body)
    (example,) = record_examples(model, [model.sample], modes=("training",))
    assert list(example.forwards.tapes) == ["training"]
    assert evaluates_alike(model, example, RecordingCache()) is expected


def test_an_equal_microbatch_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sampled(alike)
    cache = RecordingCache()
    cache.both(model, dict(model.sample))
    training = cache._kept[0][2]

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("recorded again")

    with monkeypatch.context() as patch:
        patch.setattr("megatron.adaptive.modules.recording.Forwards._taken", refuse)
        copied = {name: tensor.clone() for name, tensor in model.sample.items()}
        (example,) = record_examples(model, [copied], cache, modes=("training",))
        assert example.forwards is training
        assert evaluates_alike(model, example, cache)
    # The cache returns each recording only once, so the model is now recorded again.
    (again,) = record_examples(model, [copied], cache)
    assert again.forwards is not training
    assert sorted(again.forwards.tapes) == ["evaluation", "training"]


def test_a_microbatch_with_other_values_is_recorded_again() -> None:
    model = sampled(alike)
    cache = RecordingCache()
    tape = cache.training(model, model.sample).training
    for other in (
        {**model.sample, "x": torch.zeros(2, WIDTH)},
        {**model.sample, "x": torch.ones(3, WIDTH)},
        {**model.sample, "x": torch.ones(2, WIDTH, dtype=torch.float64)},
        {"x": torch.ones(2, WIDTH)},
    ):
        assert cache.take(other, "training") is None
    assert cache.take(model.sample, "evaluation") is None
    forwards = cache.take(model.sample, "training")
    assert forwards is not None
    assert forwards.training is tape


def test_recordings_with_numbers_of_the_host_are_not_kept() -> None:
    """Checks that a recording is not kept if the model draws random numbers with Python.

    The assembly of the pipeline then records the model itself, and raises an error.
    """
    model = sampled(lambda model, x, y: model.layers[1](x) * random.random())
    cache = RecordingCache()
    cache.training(model, model.sample)
    assert cache.take(model.sample, "training") is None


def node(
    gpu: str = "cpu", machine: str = "a", threads: int = 1, processors: tuple[int, ...] = (0, 1)
) -> dict[str, Any]:
    return {
        "facts": {"gpu": gpu},
        "machine": machine,
        "shares_memory": gpu == "cpu",
        "threads": threads,
        "processors": list(processors),
    }


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node()], {}),
        ([node(), node()], {0: 1}),
        ([node(), node(), node(), node()], {0: 1}),
        ([node(threads=2), node()], {}),
        ([node(processors=(0,)), node(processors=(0,))], {}),
        ([node(processors=(0,)), node(processors=(1,))], {0: 1}),
        ([node(machine="a", threads=2), node(machine="b", threads=2)], {0: 1}),
        ([node(gpu="H200"), node(gpu="H200")], {}),
        ([node(gpu="H200"), node(), node(gpu="H200"), node()], {1: 3}),
    ],
)
def test_ranks_measure_together_if_each_thread_has_a_processor(
    nodes: list[dict[str, Any]], expected: dict[int, int]
) -> None:
    assert helpers_of(nodes) == expected


def test_long_and_large_measurements_wait_for_a_smaller_microbatch() -> None:
    with torch.device("meta"):
        model = Tower(width=64, layers=4)
    sample = {"x": torch.ones(4, 64)}
    tape = RecordingCache().training(SampledModel(model, sample), sample).training
    assert is_cheap(tape, 1e9)
    assert not is_cheap(tape, 1e3)
    with torch.device("meta"):
        wide = Tower(width=100_000, layers=2)
    sample = {"x": torch.ones(8, 100_000)}
    tape = RecordingCache().training(SampledModel(wide, sample), sample).training
    assert not is_cheap(tape, 1e12)


@pytest.mark.parametrize("count", [10, _RANDOM_NUMBERS, 2 * _RANDOM_NUMBERS + 3])
def test_large_tensors_are_filled_with_random_numbers(count: int) -> None:
    values = torch.zeros(count)
    _fill_with_random(values)
    assert bool((values[1:] > 0).any())
    assert values.min() >= 0
    assert values.max() > 0.5 * 0.02
    assert len(values.unique()) > min(count, _RANDOM_NUMBERS) // 2
    turned = torch.zeros(3, count).t()
    _fill_with_random(turned)
    assert float(turned[-1, -1]) > 0
