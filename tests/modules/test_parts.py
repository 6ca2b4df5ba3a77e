"""Tests the parts of ``Pipeline`` separately, such as batches, partitions and the loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import random_key
from megatron.adaptive.modules.batch import BatchShape
from megatron.adaptive.modules.cutting import balanced, check_groups, given_partition, keep_only
from megatron.adaptive.modules.program import MessageLayout
from megatron.adaptive.modules.segments import check_replay, optimizer_seconds
from megatron.adaptive.modules.tape import Value
from megatron.adaptive.modules.update import LossScale

from .models import knotty, make_batch
from .ranks import Case

CPU = torch.device("cpu")


def value(shape: tuple[int, ...], dtype: torch.dtype) -> Value:
    return Value(shape=shape, dtype=dtype, requires_grad=False)


def test_another_shape_than_the_samples_is_refused() -> None:
    layout = MessageLayout.of([value((2,), torch.float32)])
    with pytest.raises(ConfigError, match=r"\[3\].*\[2\].*move the cut point"):
        layout.pack([torch.ones(3)], CPU)


def test_partitions_that_do_not_fit_are_refused() -> None:
    assert given_partition("3-4", 7, 2) == (3, 4)
    assert given_partition([1, 6], 7, 2) == (1, 6)
    for wrong in ("3-3", "7", "0-7", (3, 3, 1)):
        with pytest.raises(ConfigError, match="7 segments and 2 stages"):
            given_partition(wrong, 7, 2)
    assert balanced([1, 1, 5, 1, 1, 1, 2], 3) == (2, 1, 4)
    with pytest.raises(ConfigError, match="0-11-8-8"):
        given_partition("3,4", 7, 2)
    with pytest.raises(ConfigError, match="at least 7 cut points"):
        balanced([1.0] * 7, 8)
    with pytest.raises(ConfigError, match="weight nan of segment 1"):
        balanced([1.0, float("nan")], 2)


@pytest.mark.parametrize(
    ("sample", "size", "message"),
    [
        ([torch.ones(2)], 1, "sample_batch is a list"),
        ({"x": [1.0, 2.0]}, 1, "sample_batch['x'] is a list"),
        ({"x": torch.tensor(1.0)}, 1, "sample_batch['x'] is a scalar"),
        ({"x": torch.ones(2), "y": torch.ones(3)}, 1, "x of 2, y of 3"),
        ({"x": torch.ones(0)}, 1, "x of 0"),
        ({"x": torch.ones(2)}, 4, "2 samples, fewer than micro_batch_size 4"),
        ({"x": torch.ones(2)}, 0, "micro_batch_size must be an integer of at least 1, got 0"),
    ],
)
def test_samples_that_are_none(sample: Any, size: int, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        BatchShape(sample, size)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["words.weight"], "a list of groups"),
        ([["words.wait"]], "'words.wait'"),
        ([["words.weight", "mixer.weight"]], "they are two parameters"),
    ],
)
def test_groups_that_are_wrong(groups: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_groups(knotty(), groups)


def test_a_rank_frees_what_it_does_not_keep() -> None:
    model = knotty()
    kept = model.blocks[0].weight
    held = keep_only(model, ["blocks.0.weight", "words.weight", "norm.running_mean"], CPU)
    assert model.blocks[0].weight is kept is held["blocks.0.weight"]
    assert model.head.weight is model.words.weight
    assert model.norm.running_mean is held["norm.running_mean"]
    others = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert others == {name for name, _ in knotty().named_parameters()} - set(held)
    assert model.mixer.weight.shape == (8, 8)


class Scaled(torch.nn.Parameter):
    """Parameter class whose constructor requires an additional argument."""

    def __new__(cls, values: torch.Tensor, scale: float) -> Scaled:
        parameter: Scaled = torch.Tensor._make_subclass(cls, values, require_grad=True)
        parameter.scale = scale
        return parameter

    scale: float


def test_a_parameter_that_leaves_and_returns_keeps_class_and_attributes() -> None:
    model: Any = knotty()
    model.blocks[0].weight = Scaled(torch.ones(8, 8), 0.5)
    model.blocks[1].weight.no_decay = True
    model.norm.running_mean.note = "kept"
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    for kept, is_meta in ((set(), True), (names, False)):
        keep_only(model, kept, CPU)
        assert model.blocks[0].weight.is_meta is is_meta
        assert type(model.blocks[0].weight) is Scaled
        assert model.blocks[0].weight.requires_grad
        assert model.blocks[0].weight.scale == 0.5
        assert type(model.blocks[1].weight) is torch.nn.Parameter
        assert model.blocks[1].weight.no_decay
        assert model.norm.running_mean.note == "kept"


def test_a_measured_optimizer_can_read_attributes_of_parameters() -> None:
    model: Any = torch.nn.Linear(2, 2)
    model.weight.rate, model.bias.rate = 0.1, 0.2
    rates: list[list[float]] = []

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        rates.append([parameter.rate for parameter in parameters])  # type: ignore[attr-defined]
        return torch.optim.SGD(parameters)

    optimizer_seconds(model, CPU, make)
    assert rates == [[0.1, 0.2]]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_key_seeds_the_generators_of_device_and_cpu(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_device = torch.default_generator if device == "cpu" else torch.Generator()
    monkeypatch.setattr(random_key, "default_generator", lambda device: of_device)
    key = random_key.RandomKey(7, torch.device(device))

    def draw() -> torch.Tensor:
        return torch.stack([torch.rand(4), torch.rand(4, generator=of_device)])

    before = key.states()
    following = draw()
    key.restore(before)
    assert torch.equal(draw(), following)
    drawn = []
    for microbatch in (0, 1, 0):
        key.apply(microbatch, 3)
        drawn.append(draw())
        draw()
    assert torch.equal(drawn[0], drawn[2])
    assert not (drawn[0] == drawn[1]).any()


class Sly(torch.nn.Module):
    """Model that reads values from the storage of a tensor, which torch does not notice."""

    def __init__(self, *, in_evaluation: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.in_evaluation = in_evaluation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().mean()
        if not (self.training or self.in_evaluation):
            return loss
        return loss + float(sum(x.untyped_storage().tolist()[:4]))


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_values_that_python_kept_are_found(mode: str) -> None:
    batch = {"x": torch.randint(0, 9, (4, 4)).float()}
    case = Case(Sly(in_evaluation=mode == "evaluation"), batch, 2)
    with pytest.raises(ConfigError, match=f"in {mode}.*in Python objects"):
        check_replay(case.forward, case.forwards, {"x": torch.full((2, 4), 3.5)})
    sound = Case(knotty(), make_batch(4), 2)
    check_replay(sound.forward, sound.forwards, sound.microbatch(1))


def test_the_loss_scale_falls_at_once_and_grows_slowly() -> None:
    scale = LossScale(scale=8.0, growth_interval=2)
    seen = []
    for overflow in (True, False, False, False, True, True, True, True, False, False):
        scale.update(overflow=overflow)
        seen.append(scale.scale)
    assert seen == [4, 4, 8, 8, 4, 2, 1, 1, 1, 2]
