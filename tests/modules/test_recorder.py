"""Tests the recording of forward passes, and which forward passes are rejected."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import CutPoint, Pipeline
from megatron.adaptive.modules.cutting import slice_tape
from megatron.adaptive.modules.program import StageProgram
from megatron.adaptive.modules.recordings import BufferUse, CutForwards
from megatron.adaptive.modules.segments import check_replay
from megatron.adaptive.modules.tape import Call, Tape, Value
from megatron.adaptive.schedule.stage_placement import Placement

from .ranks import Case, assert_same

Body = Callable[["Model", torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Model with three layers and two cut points, whose forward pass is the function ``body``."""

    def __init__(self, body: Body, cuts: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(cuts))
        self.register_buffer("table", torch.arange(4.0))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x).square().mean()


def case_of(body: Body, slicing: str = "auto", cuts: int = 2) -> Case:
    torch.manual_seed(1)
    return Case(Model(body, cuts), {"x": torch.randn(6, 4)}, 2, slicing=slicing)


def check(case: Case, schedule: str = "1f1b") -> None:
    losses, gradients = case.expected()
    staged_losses, staged = case.run(schedule, case.forwards.training.num_segments)
    assert staged_losses == pytest.approx(losses, rel=1e-6)
    assert_same(staged, gradients, 1e-6)


def plain(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = model.cuts[0](model.first(x))
    return model.last(model.cuts[1](model.middle(x).tanh()))


def in_place(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = x.mul_(2)  # This line must not change the user's batch.
    x = model.cuts[0](model.first(x))
    x += 1
    x[:, 0] = 3
    y = model.cuts[1](model.middle(x).relu_())
    return model.last(y) + x


def several(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Runs ``model`` on ``x``, and sends tensors of two dtypes across the first cut.

    Only the last stage uses one of these tensors.
    """
    left, right = model.first(x).chunk(2, dim=-1)
    kept = (x > 0).to(torch.float64) * right.double().mean()
    left, right = model.cuts[0](left, right)
    x = model.middle(torch.cat([right, left], dim=-1))
    x = model.cuts[1](x)
    return model.last(x) * kept.float()


class Straight(torch.autograd.Function):
    """Rounds values in the forward pass, and passes gradients on unchanged."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def custom(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = model.cuts[0](Straight.apply(model.first(x)))
    return model.last(model.cuts[1](model.middle(x)))


def recomputed(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = torch.utils.checkpoint.checkpoint(model.first, x, use_reentrant=False)
    x = torch.utils.checkpoint.checkpoint(model.middle, model.cuts[0](x), use_reentrant=True)
    return model.last(model.cuts[1](x))


def without_gradient(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = model.cuts[0](model.first(x))
    with torch.no_grad():
        scale = model.middle(x).abs().mean()
    return model.last(model.cuts[1](x)) / scale + model.middle(x)


def buffers(model: Model, x: torch.Tensor) -> torch.Tensor:
    places = (model.table * torch.ones(4)).cumsum(0)
    x = model.cuts[0](model.first(x) + places)
    return model.last(model.cuts[1](model.middle(x) * places)) + places


@pytest.mark.parametrize("slicing", ["record", "export"])
@pytest.mark.parametrize("body", [plain, several, without_gradient, buffers])
def test_stages_give_what_the_model_gives(body: Body, slicing: str) -> None:
    case = case_of(body, slicing)
    assert case.forwards.way == slicing
    check(case)


@pytest.mark.parametrize("body", [custom, recomputed])
def test_custom_functions_keep_their_gradient(body: Body) -> None:
    check(case_of(body))


def test_changes_in_place_stay_within_their_stage() -> None:
    case = case_of(in_place)
    before = case.batch["x"].clone()
    check(case)
    torch.testing.assert_close(case.batch["x"], before, rtol=0, atol=0)


def positions_of(body: Body, border: int) -> list[tuple[int, ...]]:
    """Returns the shapes of the tensors that a model sends across the cut ``border``.

    The function ``body`` is the forward pass of the model.
    """
    tape = case_of(body).forwards.training
    plans = slice_tape(tape, (1, 1, 1))
    return [tape.values[number].shape for number in plans[border].sent]


def test_only_what_is_needed_crosses() -> None:
    assert positions_of(plain, 0) == [(2, 4)]
    # Each stage computes the positions again instead of receiving the values.
    assert positions_of(buffers, 0) == [(2, 4)]
    assert sorted(positions_of(several, 0)) == [(2, 2), (2, 2), (2, 4)]
    assert sorted(positions_of(several, 1)) == [(2, 4), (2, 4)]


def test_recording_leaves_no_trace() -> None:
    def noisy(model: Model, x: torch.Tensor) -> torch.Tensor:
        model.table.add_(1)
        return plain(model, F.dropout(x, 0.5, model.training))

    torch.manual_seed(3)
    model = Model(noisy)
    batch = {"x": torch.randn(2, 4)}
    state = torch.get_rng_state()
    Case(model, batch, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.table.tolist() == [0, 1, 2, 3]
    assert model.training


def twice(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model.last(model.cuts[0](model.middle(model.cuts[0](model.first(x)))))


def skipped(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = model.cuts[0](model.first(x))
    return model.last(model.cuts[1](x) if x.shape[0] > 2 else x)


def by_value(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = model.cuts[0](model.first(x))
    return model.last(model.cuts[1](x) if x.sum() > -1000 else x)


def by_number(model: Model, x: torch.Tensor) -> torch.Tensor:
    return plain(model, x) * x.sum().item()


def by_memory(model: Model, x: torch.Tensor) -> torch.Tensor:
    return plain(model, x) * float(numpy.from_dlpack(x).sum())


def by_derivative(model: Model, x: torch.Tensor) -> torch.Tensor:
    return plain(model, x) * torch.func.grad(lambda row: row.square().sum())(x)


def by_chance(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = model.cuts[0](model.first(x))
    return model.last(model.cuts[1](x) if torch.rand(()) < 2 else x)


def by_mode(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = model.cuts[0](model.first(x)) if model.training else model.first(x)
    return model.last(model.cuts[1](x))


def by_order(model: Model, x: torch.Tensor) -> torch.Tensor:
    first, second = model.cuts if model.training else reversed(list(model.cuts))
    return model.last(second(model.middle(first(model.first(x)))))


def unregistered(model: Model, x: torch.Tensor) -> torch.Tensor:
    return plain(model, CutPoint()(x))


HIDDEN = torch.ones(4, requires_grad=True)


def hidden(model: Model, x: torch.Tensor) -> torch.Tensor:
    return plain(model, x * HIDDEN)


def seen_elsewhere(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    view = x[:, :2]
    x = model.cuts[0](x)
    x.add_(1)
    return model.last(model.cuts[1](model.middle(x))) + view.sum()


def moving_table(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.table += x.detach().mean(0)
    return plain(model, x) * model.table


@pytest.mark.parametrize(
    ("body", "phrases"),
    [
        (twice, ["cuts.0", "called twice", "test_recorder.py"]),
        (skipped, ["cuts.1", "not called", "control flow"]),
        (by_number, ["test_recorder.py", "by_number", "item", "exported module also reads values"]),
        (by_memory, ["test_recorder.py", "by_memory", "__dlpack__"]),
        (by_derivative, ["test_recorder.py", "torch.func", "only vmap"]),
        (by_value, ["test_recorder.py", "by_value", "values of a tensor", "__bool__"]),
        (by_chance, ["test_recorder.py", "by_chance", "values of a tensor"]),
        (by_mode, ["cuts.0", "not called"]),
        (by_order, ["cuts.0, cuts.1", "cuts.1, cuts.0"]),
        (unregistered, ["test_recorder.py", "not a module of the model"]),
        (hidden, ["test_recorder.py", "hidden", "[4]", "not a parameter"]),
        (seen_elsewhere, ["in place", "stage 1"]),
        (moving_table, ["buffer table", "stage 0", "stage 2"]),
    ],
)
# torch.export prints a warning before it fails, so ignore this warning.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_cut_is_named(body: Body, phrases: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        slice_tape(case_of(body).forwards.training, (1, 1, 1))
    said = str(refusal.value)
    assert "\n" not in said
    for word in phrases:
        assert word in said, said


def kept_state(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.table = model.table + x.mean(0).detach()
    return plain(model, x)


def kept_outside(model: Model, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "mean"):
        model.mean = torch.zeros(4)
    shifted = x - model.mean
    model.mean = 0.5 * model.mean + x.mean(0)
    return plain(model, shifted)


def kept_in_place(model: Model, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "mean"):
        model.mean = torch.zeros(4)
        return plain(model, x)
    model.mean.add_(x.mean(0))
    return plain(model, x - model.mean)


def counting(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.table.add_(1)
    return plain(model, x) / model.table.max().item()


def hooked(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = plain(model, x)
    if x.requires_grad:
        x.register_hook(lambda gradient: -gradient)
    return x


def drawn_elsewhere(model: Model, x: torch.Tensor) -> torch.Tensor:
    return plain(model, x + torch.rand(4, generator=torch.Generator()))


def part_of_parameter(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.first.weight[0].mul_(0.5)
    return plain(model, x)


def kept_in_an_array(model: Model, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "sums"):
        model.sums = numpy.zeros(4, numpy.float32)
        return plain(model, x)
    return plain(model, x + torch.as_tensor(model.sums).add_(1.0))


def changed_through_another(model: Model, x: torch.Tensor) -> torch.Tensor:
    values = numpy.zeros(4, numpy.float32)
    first, second = torch.from_numpy(values), torch.from_numpy(values)
    shifted = x + second
    first.add_(1.0)
    return plain(model, shifted + second)


@pytest.mark.parametrize(
    ("body", "phrases"),
    [
        (kept_in_an_array, ["changes sums", "not a buffer", "register_buffer"]),
        (changed_through_another, ["changes a tensor of shape [4]", "shares memory"]),
        (kept_state, ["assigns another tensor to table", "copy_"]),
        (kept_outside, ["assigns another tensor to mean", "buffer"]),
        (kept_in_place, ["changes mean", "not a buffer", "register_buffer"]),
        (counting, ["test_recorder.py", "counting", "buffer table", "forward pass changes"]),
        (hooked, ["test_recorder.py", "hooked", "gradient hook"]),
        (drawn_elsewhere, ["test_recorder.py", "drawn_elsewhere", "its own generator"]),
        (part_of_parameter, ["test_recorder.py", "changes parameter first.weight"]),
    ],
)
# torch.export prints a warning before it fails, so ignore this warning.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_recording_would_lose_is_named(body: Body, phrases: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        case_of(body)
    said = str(refusal.value)
    assert "\n" not in said
    for word in phrases:
        assert word in said, said


def test_a_hook_on_the_backward_pass_of_a_module_is_named() -> None:
    model = Model(plain)
    model.middle.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(ConfigError, match="middle has a backward hook"):
        Case(model, {"x": torch.randn(2, 4)}, 2)


def grown(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Replaces the buffer ``table`` of positions by a longer buffer if it has too few entries."""
    if len(model.table) < 6:
        model.register_buffer("table", torch.arange(6.0))
    return plain(model, x + model.table[:4])


def cut_off(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Detaches the output of the first layer in place. The batch itself still gets gradients."""
    x = x.requires_grad_()
    y = model.first(x) * 1
    return model.last(model.cuts[1](model.middle(model.cuts[0](y.detach_() + x))))


@pytest.mark.parametrize("body", [grown, cut_off])
def test_changes_of_tensors_that_keep_their_values_are_replayed(body: Body) -> None:
    case = case_of(body)
    check(case)
    assert len(case.model.table) == 4


HOST_MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "as_tensor": lambda: torch.as_tensor(numpy.zeros(4, numpy.float32)),
    "asarray": lambda: torch.asarray(memoryview(array.array("f", [0.0] * 4))),
    "bytes": lambda: torch.asarray(bytearray(16)).view(torch.float32),
    "from_numpy": lambda: torch.from_numpy(numpy.zeros(4, numpy.float32)),
    "frombuffer": lambda: torch.frombuffer(bytearray(16), dtype=torch.float32),
    "list": lambda: torch.tensor([0.0] * 4),
}


@pytest.mark.parametrize("kind", HOST_MEMORY)
def test_memory_of_python_objects_is_new_for_each_microbatch(kind: str) -> None:
    def body(model: Model, x: torch.Tensor) -> torch.Tensor:
        x = model.cuts[0](model.first(x))
        scale = HOST_MEMORY[kind]()
        if model.training:
            scale.add_(1.0)
            scale[:2].mul_(3.0)
        x = model.cuts[1](model.middle(x) * (scale + 1))
        shift = HOST_MEMORY[kind]()
        shift[1:].sub_(2.0)
        return model.last(x * shift)

    case = case_of(body)
    check(case)
    check(case)
    check_replay(case.forward, case.forwards, case.microbatch(1))


def test_an_array_that_a_call_changes_is_recorded_as_it_was() -> None:
    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weights: numpy.ndarray) -> torch.Tensor:
            weights *= 2
            return x * torch.tensor(weights)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            return gradient * 2, None

    def body(model: Model, x: torch.Tensor) -> torch.Tensor:
        x = Doubling.apply(model.first(x), numpy.ones(4, numpy.float32))
        return model.last(model.cuts[1](model.middle(model.cuts[0](x))))

    check(case_of(body))


def test_a_view_of_the_batch_may_be_changed() -> None:
    def body(model: Model, x: torch.Tensor) -> torch.Tensor:
        x[:, 0].mul_(2)  # This line must not change the user's batch.
        return model.last(model.cuts[1](model.middle(model.cuts[0](model.first(x)))))

    case = case_of(body)
    before = case.batch["x"].clone()
    check(case)
    torch.testing.assert_close(case.batch["x"], before, rtol=0, atol=0)


def test_constants_that_do_not_change_are_not_copied() -> None:
    constant = torch.ones(4)
    case = case_of(lambda model, x: plain(model, x * constant))
    values = case.forwards.training.values
    assert [value.tensor for value in values if value.source == "constant"] == [constant]


def test_values_may_be_taken_as_the_samples() -> None:
    check(case_of(by_value, "record"))


def looking(model: Model, x: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_exporting() and bool(x.isnan().any()):
        raise AssertionError
    return plain(model, x)


def looking_at_random(model: Model, x: torch.Tensor) -> torch.Tensor:
    return looking(model, F.dropout(x, 0.5, model.training))


def test_values_that_are_not_read_in_an_export_do_not_matter() -> None:
    case = case_of(looking)
    assert case.forwards.way == "trace"
    assert not torch.compiler.is_exporting()
    check(case)


def test_random_numbers_of_models_with_own_cut_points_stay_those_of_an_export() -> None:
    assert case_of(looking_at_random).forwards.way == "export"
    model = Model(looking_at_random)
    for cut_point in model.cuts:
        cut_point.is_optional = True
    assert Case(model, {"x": torch.randn(2, 4)}, 2).forwards.way == "trace"


def mapping(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Maps functions over rows with vmap.

    The functions capture a tensor of the batch and a tensor with a gradient.
    """
    is_large = x.abs() > 0.5
    rows, columns = torch.arange(len(x)), torch.arange(4)
    with TransformGetItemToIndex():
        pairs = torch.vmap(lambda row, column: is_large[row, column], (None, 0))
        mask = torch.vmap(pairs, (0, None))(rows, columns)
    x = plain(model, x * mask)
    y = model.middle(x)
    return torch.vmap(lambda row, scale: scale * torch.dot(row, y[0]))(y, rows) + x.sum()


def test_mapped_functions_follow_the_microbatch() -> None:
    case = case_of(mapping)
    assert case.forwards.way == "record"
    assert [call.function.__name__ for call in case.forwards.training.calls].count("vmap") == 2
    check(case)


def test_values_that_torch_only_checks_may_be_read() -> None:
    def checking(model: Model, x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x.isfinite())
        return plain(model, x)

    case = case_of(checking)
    assert case.forwards.way == "record"
    check(case)


@pytest.mark.parametrize(
    ("loss", "phrases"),
    [
        (lambda output, batch: output.expand(3), ["got [3]", "scalar"]),
        (lambda output, batch: 1.5, ["got float"]),
        (lambda output, batch: torch.zeros((), dtype=torch.int64), ["scalar"]),
    ],
)
def test_the_loss_is_a_scalar(loss: Any, phrases: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        Case(Model(plain), {"x": torch.randn(2, 4)}, 2, loss=loss)
    for word in phrases:
        assert word in str(refusal.value)


def test_a_cut_point_after_a_module() -> None:
    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layers(x).square().mean()}

    model = Foreign()
    for layer in model.layers[:2]:
        CutPoint.after(layer)
    for slicing in ("record", "export"):
        case = Case(model, {"x": torch.randn(4, 4)}, 2, slicing=slicing)
        assert case.forwards.training.cuts == ["layers.0.cut_point", "layers.1.cut_point"]
        check(case, "zb-h1")


def measuring(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Centers the input in evaluation, and updates the center from the output in training."""
    if not model.training:
        x = x - model.table
    y = plain(model, x)
    if model.training:
        with torch.no_grad():
            model.table.lerp_(y.detach().mean(0), 0.5)
    return y


def changing_last(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = plain(model, x)
    model.table.add_(1)
    return y


def using_first(model: Model, x: torch.Tensor) -> torch.Tensor:
    return plain(model, x + model.table)


def test_a_buffer_that_changes_belongs_to_one_rank_in_all_recordings() -> None:
    """Checks that two ranks cannot use a changing buffer, because each rank has its own copy."""
    cut = CutForwards.of(case_of(measuring).forwards, (1, 1, 1))
    with pytest.raises(ConfigError, match="changes buffer table, .* ranks 0 and 2 .* evaluation"):
        BufferUse(placement=Placement(num_ranks=3, num_chunks=1)).add(cut)
    # If a single rank has all stages, the stages share the buffer.
    BufferUse(placement=Placement(num_ranks=1, num_chunks=3)).add(cut)


def test_a_buffer_that_changes_belongs_to_one_rank_in_later_recordings() -> None:
    model = Model(plain)
    use = BufferUse(placement=Placement(num_ranks=3, num_chunks=1))
    cuts = []
    for body in (changing_last, using_first):
        model.body = body
        forwards = Case(model, {"x": torch.randn(2, 4)}, 2).forwards
        cuts.append(CutForwards.of(forwards, (1, 1, 1)))
    use.add(cuts[0])
    with pytest.raises(ConfigError, match="ranks 0 and 2 .* other microbatches"):
        use.add(cuts[1])


class Changing(nn.Module):
    """Model with settings that the user may change, and with a counter that the model changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.0)
        self.cut = CutPoint()
        self.temperature, self.epoch, self.count = 1.0, 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = self.drop(self.cut(self.first(x))) / self.temperature
        if not self.drop.training:
            x = x.tanh()
        return self.last(x).square().mean()


CHANGES: dict[str, tuple[Callable[[Changing], Any], str]] = {
    "temperature": (
        lambda model: setattr(model, "temperature", 2.0),
        "temperature is 2.0, but was 1.0 when the Pipeline was created",
    ),
    "dropout": (lambda model: setattr(model.drop, "p", 0.5), "drop.p is 0.5, but was 0.0"),
    "mode": (lambda model: model.drop.eval(), "drop.training is False, but was True"),
    "hook": (
        lambda model: model.first.register_forward_hook(lambda module, args, out: out * 2),
        "the forward hooks of first differ from those when the Pipeline was created",
    ),
    "one of two": (
        lambda model: vars(model).update(epoch=4, temperature=2.0),
        "temperature is 2.0, but was 1.0",
    ),
    "nothing": (lambda model: None, ""),
    "modes": (lambda model: model.eval(), ""),
    "unused": (lambda model: setattr(model, "epoch", 4), ""),
    "counted": (lambda model: setattr(model, "count", 9), ""),
    "watching": (
        lambda model: model.first.register_forward_hook(lambda module, args, out: None),
        "",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changes_of_modules_after_the_start_are_named(kind: str) -> None:
    def batch(length: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(4, length, 8)}

    change, message = CHANGES[kind]
    model = Changing()
    with Pipeline(model, batch(3), micro_batch_size=2) as pipeline:
        pipeline.step(batch(3))
        pipeline.step(batch(4))
        change(model)
        attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
        pipeline.step(batch(4))
        if not message:
            pipeline.step(batch(5))
            pipeline.step(batch(6))
            pipeline.eval(batch(7))
            return
        with pytest.raises(ConfigError) as refusal:
            pipeline.step(batch(5))
        said = str(refusal.value)
        assert message in said
        assert "\n" not in said
        attributes[""]["count"] = model.count
        assert {name: vars(module) for name, module in model.named_modules()} == attributes


GPU_0, GPU_3 = torch.device("cuda", 0), torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("recorded", "device", "expected"),
    [
        (GPU_0, GPU_3, [GPU_3, GPU_3, "cuda:3", "cuda:3", "cpu"]),
        (GPU_3, GPU_3, [GPU_3, GPU_3, "cuda:3", "cuda:3", "cpu"]),
        (torch.device("cpu"), GPU_3, [GPU_0, torch.device("cuda"), "cuda:0", "cuda", "cuda:3"]),
    ],
)
def test_calls_use_the_gpu_of_their_stage(
    recorded: torch.device, device: torch.device, expected: list[Any]
) -> None:
    """Checks that calls recorded on a GPU use the GPU on which their stage runs.

    A rank may have recorded the model on GPU 0 or on its own GPU. A stage on GPU 3 must not put
    tensors on GPU 0.
    """
    seen: list[Any] = []

    def collect(*devices: Any, device: Any) -> torch.Tensor:
        seen.extend((*devices, device))
        return torch.zeros(())

    call = Call(
        function=collect,
        args=(GPU_0, torch.device("cuda"), "cuda:0", "cuda", "cpu"),
        kwargs={"device": 0},
        reads=(),
        outputs=((0, ()),),
        changes=(),
        segment=0,
        is_random=False,
        with_grad=True,
        autocast=None,
    )
    values = [Value(shape=(), dtype=torch.float32, requires_grad=False, made_by=0)]
    tape = Tape(values=values, calls=[call], loss=0, device=recorded)
    (plan,) = slice_tape(tape, (1,))
    StageProgram(tape, plan, {}, device).forward({}, [], random=lambda call: None)
    assert seen == [*expected, device]
