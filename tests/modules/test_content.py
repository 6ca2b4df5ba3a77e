"""Tests microbatches that differ in shape, for example in text length or number of images."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import CutPoint, Pipeline
from megatron.adaptive.modules.recording import Forward, Forwards

from .families import FAMILIES, IMAGE, skip_older
from .models import SHARED, knotty, make_batch, viewed, viewer

VIEWER: dict[str, Any] = {
    "shared_weights": [["words.weight", "head.weight"]],
    "decisive_entries": ["sizes"],
}
SAMPLE = [viewed(2, 5, 1), viewed(0, 4, 2)]


@pytest.fixture
def opened() -> Iterator[list[Pipeline]]:
    pipelines: list[Pipeline] = []
    yield pipelines
    for pipeline in pipelines:
        pipeline.close()


def expected(
    model: torch.nn.Module, microbatches: list[dict[str, torch.Tensor]], weights: list[float]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns loss and gradients of the whole model for microbatches weighted by ``weights``."""
    loss = sum(
        weight / sum(weights) * model(**part)
        for part, weight in zip(microbatches, weights, strict=True)
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


def require_equal(pipeline: Pipeline, gradients: dict[str, torch.Tensor]) -> None:
    owned = {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}
    assert owned.keys() == gradients.keys()
    for name, gradient in owned.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("split", [False, True])
def test_microbatches_of_any_content_give_what_the_model_gives(
    opened: list[Pipeline], split: bool
) -> None:
    pipeline = Pipeline(viewer(), SAMPLE, split_backward=split, **VIEWER)
    opened.append(pipeline)
    for seed, images in enumerate(([3, 0, 8, 1, 2], [0, 0, 4], [0])):
        step = [viewed(count, 3 + 2 * count, 10 * seed + count) for count in images]
        items = [float(part["ids"].shape[1] - 1) for part in step]
        whole = viewer()
        loss, gradients = expected(whole, step, items)
        assert pipeline.step(step, num_items=items)[0] == pytest.approx(loss, rel=1e-5)
        # After a step without images, the encoder has no gradient, as in the whole model.
        require_equal(pipeline, gradients)
        whole.eval()
        with torch.no_grad():
            plain = sum(float(whole(**part)) for part in step) / len(step)
        assert pipeline.eval(step) == pytest.approx(plain, rel=1e-5)


def test_an_order_by_cost_leaves_the_loss_as_it_is() -> None:
    """Checks that the order of microbatches does not change losses.

    Gradients may differ by rounding errors.
    """
    kinds = [*SAMPLE, viewed(0, 40, 4)]
    step = [kinds[kind] for kind in (2, 0, 1, 2, 1)]
    _, gradients = expected(viewer(), step, [1.0] * 5)
    losses = []
    orders = {}
    for order in ("given", "work", "time"):
        with Pipeline(viewer(), kinds, order=order, **VIEWER) as pipeline:
            for _ in range(4 if order == "time" else 1):
                losses.append(pipeline.step(step)[0])
            require_equal(pipeline, gradients)
            orders[order] = pipeline.last_order
            assert pipeline.eval(step) == pytest.approx(losses[0], rel=1e-5)
            assert bool(pipeline.costs) == (order == "time")
            labels = {label for of_stage in pipeline.costs for label in of_stage}
    assert set(losses) == {losses[0]}
    assert orders["given"] == (0, 1, 2, 3, 4)
    # Cheap microbatches must be first and last. Microbatches of equal cost must keep their order.
    assert orders["work"] == (2, 1, 3, 0, 4)
    assert sorted(orders["time"]) == [0, 1, 2, 3, 4]
    entries = {"ids", "patches", "sizes"}
    assert labels == {*entries, "ids pairs", "sizes pairs", "microbatch"}


class Scorer(torch.nn.Module):
    """Model that returns the mean loss over all rows with a label.

    The inputs are ``x [n, 4]`` and ``y [n] int64``.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
        self.cut = CutPoint()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns the loss for the inputs ``x`` and the labels ``y``."""
        return torch.nn.functional.cross_entropy(self.last(self.cut(self.first(x))), y)


class Mean(Scorer):
    """Model that updates a running mean, but only for microbatches with at least ``least`` rows."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns the loss for the inputs ``x`` and the labels ``y``."""
        if self.training and len(x) >= self.least:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x - self.mean, y)


def test_an_order_by_cost_leaves_running_means_as_they_are(opened: list[Pipeline]) -> None:
    """Checks that cost-based orders are rejected for models that update running means."""
    parts = [{"x": torch.randn(n, 4), "y": torch.arange(n) % 3} for n in (9, 2, 3, 2)]
    rule: Any
    for rule in ("work", "time"):
        message = f"order '{rule}' cannot be used, because .* changes buffer mean.*remove order"
        with pytest.raises(ConfigError, match=message):
            Pipeline(Mean(1), parts[1:], order=rule)
    with Pipeline(Mean(9), parts[1:], order="work") as pipeline:
        with pytest.raises(ConfigError, match="the forward pass changes buffer mean"):
            pipeline.step(parts)
        pipeline.eval(parts)
        assert pipeline.step(parts[1:])[0] > 0
    opened.append(Pipeline(Mean(1), parts))
    opened[0].step(parts)
    with torch.no_grad():
        whole = Mean(1)
        for part in parts:
            whole(**part)
        whole.eval()
        loss = sum(float(whole(**part)) for part in parts) / len(parts)
    assert opened[0].eval(parts) == pytest.approx(loss, rel=1e-5)


def test_an_unknown_order_or_dealing_is_refused() -> None:
    wrong: Any
    for wrong, message in (
        ({"order": "cost"}, "order 'cost' is invalid; choose one of given, work, time"),
        ({"dealing": "given"}, "dealing 'given' is invalid; choose one of turns, work, time"),
    ):
        with pytest.raises(ConfigError, match=message):
            Pipeline(viewer(), SAMPLE, **VIEWER, **wrong)


def test_a_dictionary_of_another_length_is_recorded(opened: list[Pipeline]) -> None:
    pipeline = Pipeline(knotty(), make_batch(4), micro_batch_size=2, shared_weights=SHARED)
    opened.append(pipeline)
    for length in (7, 5, 3):
        batch = make_batch(4, 9, length)
        parts = [{n: t[start : start + 2] for n, t in batch.items()} for start in (0, 2)]
        loss, gradients = expected(knotty(), parts, [1.0, 1.0])
        assert pipeline.step(batch)[0] == pytest.approx(loss, rel=1e-5)
        require_equal(pipeline, gradients)


def test_equal_shapes_with_other_deciding_values_are_another_signature(
    opened: list[Pipeline],
) -> None:
    first = viewed(2, 5, 1)
    first["sizes"] = torch.tensor([1, 3])
    first["patches"] = torch.randn(4, 6)
    second = {**first, "sizes": torch.tensor([3, 1])}
    pipeline = Pipeline(viewer(), [first], **VIEWER)
    opened.append(pipeline)
    losses = [float(viewer()(**part).detach()) for part in (first, second)]
    assert losses[0] != pytest.approx(losses[1])
    assert pipeline.eval([first, second]) == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_recordings_are_bounded_and_reported_once(
    opened: list[Pipeline], capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = Pipeline(viewer(), SAMPLE, max_recordings=2, **VIEWER)
    opened.append(pipeline)
    for _ in range(25):
        pipeline.step([SAMPLE[1]])
    assert capsys.readouterr().out == ""
    for length in (6, 7, 8, 6, 7):
        part = viewed(0, length)
        assert pipeline.step([part])[0] == pytest.approx(float(viewer()(**part).detach()), rel=1e-5)
    late, again = capsys.readouterr().out.splitlines()
    assert late.startswith("step 26: recorded the model in ")
    assert "no earlier microbatch had ids [1, 6]" in late
    assert "more than 2 combinations of shapes; increase max_recordings" in again
    assert len(pipeline._assembly.recordings._kept) == 2


def test_a_late_recording_is_of_the_mode_that_runs(opened: list[Pipeline]) -> None:
    """Checks that a new kind of microbatch is recorded only for training, or only for evaluation.

    The model is recorded in the mode that uses the microbatch.
    """
    modes = []
    model = viewer()
    model.register_forward_pre_hook(lambda module, inputs: modes.append(module.training))
    pipeline = Pipeline(model, SAMPLE, **VIEWER)
    opened.append(pipeline)
    modes.clear()
    trained, evaluated = viewed(2, 6), viewed(1, 7)
    expected_losses = [float(viewer()(**part).detach()) for part in (trained, evaluated)]
    for _ in range(2):
        assert pipeline.step([trained])[0] == pytest.approx(expected_losses[0], rel=1e-5)
        assert pipeline.eval([evaluated]) == pytest.approx(expected_losses[1], rel=1e-5)
    assert modes == [True, False]
    assert pipeline.eval([trained]) == pytest.approx(expected_losses[0], rel=1e-5)
    assert pipeline.step([evaluated])[0] == pytest.approx(expected_losses[1], rel=1e-5)
    assert modes == [True, False, False, True]
    assert pipeline.step([trained, evaluated])[0] == pytest.approx(sum(expected_losses) / 2)
    assert len(modes) == 4


def test_what_the_sample_lacks_is_named(opened: list[Pipeline]) -> None:
    with pytest.raises(ConfigError, match=r"does not call cut point layer_cuts.0"):
        Pipeline(viewer(), [viewed(0, 4)], **VIEWER)
    pipeline = Pipeline(viewer(), SAMPLE, **VIEWER)
    opened.append(pipeline)
    good: Any = viewed(0, 4)
    for batch, message in (
        (good, "sample_batch is a list of microbatches; pass a list"),
        ([], "batch is empty"),
        ([{}], r"batch\[0\] is empty"),
        ([good, good["ids"]], r"batch\[1\] is a Tensor"),
        ([{**good, "patches": None}], r"batch\[0\]\['patches'\] is a NoneType; .* omit entries"),
        ([{"ids": good["ids"].int()}], "torch.int32, but the sample_batch has torch.int64"),
    ):
        with pytest.raises(ConfigError, match=message):
            pipeline.step(batch)
    for items in ([1.0], [-1.0, 1.0], [float("nan"), 1.0], 3, ["x", 1]):
        with pytest.raises(ConfigError, match="num_items .* number for each of the 2 microb"):
            pipeline.step([good, good], num_items=items)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_items must not be 0 for all"):
        pipeline.step([good], num_items=[0])
    for options, message in (
        ({"micro_batch_size": 2}, "remove micro_batch_size"),
        ({"pipeline_size": "auto"}, "pipeline_size to a number"),
        ({"max_recordings": 0}, "max_recordings must be an integer of at least 1, got 0"),
        ({"decisive_entries": "sizes"}, "decisive_entries must be .* 'sizes'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Pipeline(viewer(), SAMPLE, **{**VIEWER, **options})


class Branching(torch.nn.Module):
    """Model that chooses a branch by the value of a batch entry."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.square().mean() if way.item() else y.abs().mean()


def test_values_that_decide_must_be_named(opened: list[Pipeline]) -> None:
    x = torch.randn(2, 4)
    batch: Any = [{"x": x, "way": torch.tensor(0)}, {"x": x, "way": torch.tensor(1)}]
    with pytest.raises(ConfigError, match=r"test_content.py:\d+ .*item.* decisive_entries"):
        Pipeline(Branching(), batch)
    torch.manual_seed(1)
    model = Branching()
    losses = [float(model(**part).detach()) for part in batch]
    opened.append(Pipeline(model, batch[:1], decisive_entries=["way"]))
    assert opened[0].eval(batch) == pytest.approx(sum(losses) / 2, rel=1e-5)


class Looking(torch.nn.Module):
    """Model that reads the values of an optional mask, except while it is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None and not torch.compiler.is_exporting() and bool(mask.all()):
            mask = None
        y = self.layer(x)
        return (y if mask is None else y * mask).square().mean()


def test_later_recordings_are_made_as_that_of_the_sample() -> None:
    """Checks that later recordings first try the method that succeeded for the sample batch."""
    forward = Forward(Looking())
    x = torch.ones(2, 4)
    way = Forwards.of(forward, {"x": x, "mask": x}, "auto").way
    assert way == "trace"
    assert Forwards.of(forward, {"x": x}, "auto").way == "record"
    assert Forwards.of(forward, {"x": x}, "auto", way=way).way == way
    assert Forwards.of(forward, {"x": x}, "auto", way="export").way == "export"


def test_an_entry_that_no_stage_uses_is_told(
    opened: list[Pipeline], capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output

    sample = {**make_batch(4), "weather": torch.ones(4)}
    opened.append(Pipeline(knotty(), sample, micro_batch_size=2, loss=loss))
    assert "no stage uses the batch entry weather" in capsys.readouterr().out


@pytest.mark.parametrize("frozen", [False, True])
def test_a_vision_language_model_of_transformers(opened: list[Pipeline], frozen: bool) -> None:
    """Checks that an unmodified vision-language model of ``transformers`` can be trained.

    The model has no cut points, and reads the values of a mask.
    """
    transformers = pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(
                num_hidden_layers=2, image_size=16, patch_size=8, projection_dim=16, **small
            ),
            text_config=transformers.LlamaConfig(num_hidden_layers=2, vocab_size=64, **small),
            image_token_index=63,
            vision_feature_layer=-1,
        )
    )
    model.model.vision_tower.requires_grad_(not frozen)

    def microbatch(images: int, length: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(images)
        ids = torch.randint(0, 60, (1, length + 4 * images), generator=generator)
        ids[0, : 4 * images] = 63
        part = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        if images:
            part["pixel_values"] = torch.randn(images, 3, 16, 16, generator=generator)
        return part

    step = [microbatch(images, 5 + images) for images in (3, 0, 8)]
    whole = copy.deepcopy(model)
    loss = torch.stack([whole(**part).loss / 3 for part in step]).sum()
    loss.backward()
    opened.append(Pipeline(model, [microbatch(1, 4), microbatch(0, 6)], chunks=2, partition="2-3"))
    assert opened[0].step(step)[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    require_equal(opened[0], {n: p.grad for n, p in whole.named_parameters() if p.grad is not None})
    # The text embedding precedes the vision tower in the model's code, but must run after the
    # frozen segments.
    assert opened[0]._assembly.frozen_segments == 2 * frozen


@pytest.mark.long
def test_a_model_that_looks_for_empty_images(opened: list[Pipeline]) -> None:
    """Checks that the error names the line at which the model reads values of a tensor.

    Also checks that the model can be trained with ``slicing="record"``.
    """
    pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")
    skip_older("smolvlm")
    family = next(family for family in FAMILIES if family.name == "smolvlm")

    def microbatch(images: int, length: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(3, 56, (1, length), generator=generator)
        ids[0, 1 : 1 + images] = IMAGE
        part = {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)}
        if images:
            part["pixel_values"] = torch.randn(1, images, 3, 8, 8, generator=generator)
        return part

    sample = [microbatch(2, 8), microbatch(0, 9)]
    with pytest.raises(ConfigError, match=r"modeling_smolvlm.py:\d+ \(get_image_features\) reads"):
        Pipeline(family.build(4), sample)
    step = [microbatch(images, 10 + images) for images in (3, 0, 1, 2)]
    whole: Any = family.build(4)
    loss = torch.stack([whole(**part).loss / 4 for part in step]).sum()
    loss.backward()
    opened.append(Pipeline(family.build(4), sample, slicing="record"))
    assert opened[0].step(step)[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    require_equal(opened[0], {n: p.grad for n, p in whole.named_parameters() if p.grad is not None})
    # A single stage contains all segments, so the costs of segments need not be measured.
    assert (opened[0].partition, opened[0].weights) == ((5,), ())


def test_a_loop_of_lists_continues_from_a_checkpoint(tmp_path: Path) -> None:
    """Checks that training resumes even if the image encoder has no optimizer state yet."""
    steps = [[viewed(0, 5), viewed(0, 6)], [viewed(2, 5)], [viewed(0, 5), viewed(1, 4)]]

    def run(total: int, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses = []
        with Pipeline(viewer(), SAMPLE, **VIEWER) as pipeline:
            pipeline.set_optimizer(lambda owned: torch.optim.AdamW(owned, lr=0.1))
            for step in pipeline.loop(total, folder=folder):
                losses.append(pipeline.step(pipeline.share(steps[step]))[0])
            return losses, {n: p.detach().clone() for n, p in pipeline.named_parameters()}

    losses, parameters = run(3, tmp_path / "whole")
    parts = [run(total, tmp_path / "parts") for total in (1, 3)]
    assert [*parts[0][0], *parts[1][0]] == losses
    for name, parameter in parts[1][1].items():
        torch.testing.assert_close(parameter, parameters[name], rtol=0, atol=0)


@pytest.mark.parametrize("split", [False, True])
def test_a_microbatch_without_items_adds_nothing(opened: list[Pipeline], split: bool) -> None:
    """Checks that a microbatch without labels is ignored, although its mean loss is NaN."""
    labeled = {"x": torch.randn(2, 4), "y": torch.tensor([0, 2])}
    unlabeled = {"x": torch.randn(2, 4), "y": torch.tensor([-100, -100])}
    loss, gradients = expected(Scorer(), [labeled], [1.0])
    opened.append(Pipeline(Scorer(), [labeled], split_backward=split))
    step: Any = [unlabeled, labeled]
    assert opened[0].eval(step, num_items=[0, 2]) == pytest.approx(loss, rel=1e-5)
    assert opened[0].step(step, num_items=[0, 2])[0] == pytest.approx(loss, rel=1e-5)
    require_equal(opened[0], gradients)


class Doubling(torch.nn.Module):
    """Model that changes an entry of the batch in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Doubles ``x`` in place, and returns the loss for the targets ``y``."""
        return (self.layer(x.mul_(2)) - y).square().mean()


def test_a_recording_leaves_the_microbatch_as_it_is(opened: list[Pipeline]) -> None:
    """Checks that a microbatch of a new length is not changed when the model is recorded for it."""
    x, y = torch.ones(2, 4), torch.zeros(2, 4)
    opened.append(Pipeline(Doubling(), [{"x": x, "y": y}]))
    assert torch.equal(x, torch.ones(2, 4))
    longer = {"x": torch.ones(3, 4), "y": torch.zeros(3, 4)}
    loss = float(Doubling()(torch.ones(3, 4), longer["y"]).detach())
    assert opened[0].step([longer])[0] == pytest.approx(loss, rel=1e-5)
    assert torch.equal(longer["x"], torch.ones(3, 4))


def test_a_tensor_under_two_names_counts_as_two_entries(opened: list[Pipeline]) -> None:
    """Checks that two batch entries stay separate, even if both are the same sample tensor."""
    x = torch.ones(2, 4)
    opened.append(Pipeline(Doubling(), [{"x": x, "y": x}]))
    loss = float(Doubling()(x.clone(), torch.zeros(2, 4)).detach())
    assert opened[0].eval([{"x": x, "y": torch.zeros(2, 4)}]) == pytest.approx(loss, rel=1e-5)


def test_an_entry_may_be_a_scalar(opened: list[Pipeline]) -> None:
    class Scaled(Scorer):
        def forward(self, scale: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x * scale, y)

    part = {"scale": torch.tensor(2.0), "x": torch.randn(2, 4), "y": torch.tensor([0, 2])}
    opened.append(Pipeline(Scaled(), [part]))
    part["scale"] = torch.tensor(3.0)
    loss = float(Scaled()(**part).detach())
    assert opened[0].step([part])[0] == pytest.approx(loss, rel=1e-5)


class Drawing(Scorer):
    """Model that draws random numbers with Python's generator."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns the loss for the inputs ``x`` and the labels ``y``."""
        return super().forward(x * random.random(), y)


def test_random_numbers_without_torch_are_refused(opened: list[Pipeline]) -> None:
    part = {"x": torch.randn(2, 4), "y": torch.tensor([0, 2])}
    with pytest.raises(ConfigError, match=r"with random or numpy.random.*with torch"):
        Pipeline(Drawing(), [part])
    opened.append(Pipeline(Drawing(), [part], slicing="record"))


@pytest.mark.parametrize("split", [False, True])
def test_hooks_on_parameters_run(opened: list[Pipeline], split: bool) -> None:
    """Checks that hooks on parameters run with and without deferred weight gradients."""
    part = {"x": torch.randn(2, 4), "y": torch.tensor([0, 2])}
    whole, model = Scorer(), Scorer()
    opened.append(Pipeline(model, [part], split_backward=split))
    for parameter in (*whole.first.parameters(), *model.first.parameters()):
        parameter.register_hook(lambda gradient: 3 * gradient)
    _, gradients = expected(whole, [part], [1.0])
    opened[0].step([part])
    require_equal(opened[0], gradients)


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_trained_stays_what_was_recorded(opened: list[Pipeline], trained: bool) -> None:
    part = {"x": torch.randn(2, 4), "y": torch.tensor([0, 2])}
    model = Scorer()
    model.first.weight.requires_grad_(not trained)
    opened.append(Pipeline(model, [part]))
    opened[0].step([part])
    model.first.weight.requires_grad_(trained)
    with pytest.raises(
        ConfigError, match=f"requires_grad of first.weight is {trained}.*undo the change"
    ):
        opened[0].step([part])


def test_a_new_length_is_recorded_in_inference_mode(opened: list[Pipeline]) -> None:
    sample = {"x": torch.randn(2, 4), "y": torch.tensor([0, 2])}
    opened.append(Pipeline(Scorer(), [sample]))
    with torch.inference_mode():
        longer = {"x": torch.randn(3, 4), "y": torch.tensor([0, 2, 1])}
        loss = opened[0].eval([longer])
    longer = {name: tensor.clone() for name, tensor in longer.items()}
    step_loss, gradients = expected(Scorer(), [longer], [1.0])
    assert loss == pytest.approx(step_loss, rel=1e-5)
    assert opened[0].step([longer])[0] == pytest.approx(step_loss, rel=1e-5)
    require_equal(opened[0], gradients)
