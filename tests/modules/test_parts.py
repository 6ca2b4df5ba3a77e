"""Batches, messages, partitions, shared weights and the loss scale, each by itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.batch import BatchShape
from megatron.adaptive.modules.cutting import (
    balanced,
    check_groups,
    check_shared,
    given_partition,
    keep_only,
)
from megatron.adaptive.modules.program import MessageLayout
from megatron.adaptive.modules.recording import Value
from megatron.adaptive.modules.segments import check_replay, measure_segments
from megatron.adaptive.modules.update import LossScale, clip_factor, squared_norm

from .models import SHARED, knotty, make_batch
from .ranks import Case, assert_same

CPU = torch.device("cpu")


def value(shape: tuple[int, ...], dtype: torch.dtype) -> Value:
    return Value(shape=shape, dtype=dtype, requires_grad=False)


def test_a_message_brings_all_tensors() -> None:
    tensors = [
        torch.randn(3, 5).t(),
        torch.rand(7) > 0.5,
        torch.randn(2, 2, dtype=torch.float64),
        torch.tensor(3, dtype=torch.int16),
        torch.randn(0, 4),
        torch.randn(9).to(torch.bfloat16),
    ]
    for count in range(len(tensors) + 1):
        layout = MessageLayout.of([value(tuple(one.shape), one.dtype) for one in tensors[:count]])
        message = layout.pack(tensors[:count], CPU)
        assert message.nbytes == layout.nbytes or count == 1
        for one, other in zip(layout.unpack(message), tensors, strict=False):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_missing_gradients_are_zeros() -> None:
    kinds = [value((2,), torch.float32), value((3,), torch.float32)]
    layout = MessageLayout.of(kinds)
    given = torch.ones(3)
    first, second = layout.unpack(layout.pack([None, given], CPU))
    assert first.tolist() == [0, 0]
    assert second.tolist() == [1, 1, 1]
    assert MessageLayout.of(kinds[:1]).pack([None], CPU).tolist() == [0, 0]


def test_another_shape_than_the_samples_is_refused() -> None:
    layout = MessageLayout.of([value((2,), torch.float32)])
    with pytest.raises(ConfigError, match=r"\[3\].*\[2\].*move the cut point"):
        layout.pack([torch.ones(3)], CPU)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_the_largest_stage_is_as_small_as_possible(num_stages: int) -> None:
    generator = torch.Generator().manual_seed(num_stages)
    for _ in range(20):
        weights = torch.randint(0, 9, (7,), generator=generator).tolist()
        found = balanced(weights, num_stages)
        assert sum(found) == 7
        assert min(found) >= 1

        def largest(partition: Any, weights: list[int] = weights) -> int:
            parts = iter(weights)
            return max(sum(itertools.islice(parts, count)) for count in partition)

        every = (p for p in itertools.product(range(1, 8), repeat=num_stages) if sum(p) == 7)
        assert largest(found) == min(map(largest, every))


def test_partitions_that_do_not_fit_are_refused() -> None:
    assert given_partition("3-4", 7, 2) == (3, 4)
    assert given_partition([1, 6], 7, 2) == (1, 6)
    for wrong in ("3-3", "7", "0-7", (3, 3, 1)):
        with pytest.raises(ConfigError, match="7 segments and 2 stages"):
            given_partition(wrong, 7, 2)
    with pytest.raises(ConfigError, match="0-11-8-8"):
        given_partition("3,4", 7, 2)
    with pytest.raises(ConfigError, match="at least 7 cut points"):
        balanced([1.0] * 7, 8)
    with pytest.raises(ConfigError, match="weight nan of segment 1"):
        balanced([1.0, float("nan")], 2)


@pytest.mark.parametrize(
    ("sample", "size", "words"),
    [
        ([torch.ones(2)], 1, "sample_batch is a list"),
        ({"x": [1.0, 2.0]}, 1, "sample_batch['x'] is a list"),
        ({"x": torch.tensor(1.0)}, 1, "sample_batch['x'] is a scalar"),
        ({"x": torch.ones(2), "y": torch.ones(3)}, 1, "x of 2, y of 3"),
        ({}, 1, "no entries"),
        ({"x": torch.ones(0)}, 1, "x of 0"),
        ({"x": torch.ones(2)}, 4, "2 samples, fewer than micro_batch_size 4"),
        ({"x": torch.ones(2)}, 0, "micro_batch_size 0"),
    ],
)
def test_samples_that_are_none(sample: Any, size: int, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        BatchShape(sample, size)
    assert words in str(refusal.value)


def test_undeclared_shared_weights_are_named_with_all_their_names() -> None:
    tape = Case(knotty(), make_batch(4), 2).forwards.training
    check_shared(tape, SHARED)
    for missing, names in zip(
        SHARED, ("words.weight (also head.weight)", "mixer.weight", "mixer.bias"), strict=True
    ):
        with pytest.raises(ConfigError) as refusal:
            check_shared(tape, [group for group in SHARED if group != missing])
        assert f"parameter {names} is used before and after" in str(refusal.value)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (["words.weight"], "a list of groups"),
        ([["words.wait"]], "'words.wait'"),
        ([["words.weight", "mixer.weight"]], "the model has two"),
    ],
)
def test_groups_that_are_wrong(groups: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_groups(knotty(), groups)


@pytest.mark.parametrize(("schedule", "size"), [("zb-v", 4), ("adaptive", 2), ("1f1b", 4)])
def test_shared_and_skipping_tensors_on_the_executor(schedule: str, size: int) -> None:
    case = Case(knotty(), make_batch(12), 2)
    losses, gradients = case.expected()
    found_losses, found = case.run(schedule, size)
    assert found_losses == pytest.approx(losses, rel=1e-6)
    assert_same(found, gradients, 1e-5)


def test_a_rank_frees_what_it_does_not_keep() -> None:
    model = knotty()
    kept = model.blocks[0].weight
    held = keep_only(model, ["blocks.0.weight", "words.weight", "norm.running_mean"], CPU)
    assert model.blocks[0].weight is kept is held["blocks.0.weight"]
    assert model.head.weight is model.words.weight
    assert model.norm.running_mean is held["norm.running_mean"]
    others = {name for name, one in model.named_parameters() if one.is_meta}
    assert others == {name for name, _ in knotty().named_parameters()} - set(held)
    assert model.mixer.weight.shape == (8, 8)


def test_segments_are_timed() -> None:
    case = Case(knotty(), make_batch(4), 2)
    found = measure_segments(
        case.forward, case.forwards.training, case.microbatch(0), CPU, split=False, repeats=1
    )
    assert len(found) == 9
    assert all(0 < one.seconds < 10 for one in found)
    assert all(one.grad is None for one in case.model.parameters())


class Sly(torch.nn.Module):
    """Computes with numpy behind torch's back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pointer = x.untyped_storage().tolist()[:4]
        return self.layer(x).square().mean() + float(sum(pointer))


def test_values_that_python_kept_are_found() -> None:
    batch = {"x": torch.randint(0, 9, (4, 4)).float()}
    case = Case(Sly(), batch, 2)
    with pytest.raises(ConfigError, match="outside of tensors"):
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


def test_the_norm_is_that_of_all_and_clips() -> None:
    gradients = [torch.full((4,), 2.0), torch.full((9,), 1.0).to(torch.bfloat16)]
    assert float(squared_norm(gradients, CPU)) == pytest.approx(25)
    assert float(squared_norm([], CPU)) == 0
    assert not torch.isfinite(squared_norm([torch.tensor([float("inf")])], CPU))
    assert clip_factor(5.0, 1.0) == pytest.approx(0.2)
    assert clip_factor(0.5, 1.0) == clip_factor(5.0, None) == 1.0
