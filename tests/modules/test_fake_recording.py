"""Checks that a model on the meta device is recorded like the same model with weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import CutPoint, Pipeline, Profiler
from megatron.adaptive.modules.assembly import _names_to_keep
from megatron.adaptive.modules.cutting import keep_only, slice_tape
from megatron.adaptive.modules.recording import Forward, Forwards
from megatron.adaptive.modules.recordings import CutForwards
from megatron.adaptive.modules.tape import Tape
from megatron.adaptive.schedule.stage_placement import Placement

from .models import SHARED, Knotty, Tower, knotty, make_batch
from .ranks import CPU, Case, assert_same
from .test_recorder import (
    Body,
    Model,
    buffers,
    case_of,
    check,
    custom,
    in_place,
    plain,
    recomputed,
    several,
    without_gradient,
)


def on_meta(model: torch.nn.Module, *, buffers_too: bool = False) -> torch.nn.Module:
    """Moves the parameters of ``model`` to the meta device in place, and returns ``model``.

    Tied parameters stay tied. Buffers are also moved if ``buffers_too`` is true.
    """
    names = [] if buffers_too else [name for name, _ in model.named_buffers()]
    keep_only(model, names, CPU)
    return model


def ids_in(model: torch.nn.Module) -> dict[str, int]:
    """Returns the ``id()`` of each tensor of ``model``, keyed by the tensor's name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: id(tensor) for name, tensor in named}


def facts(tape: Tape) -> list[Any]:
    """Returns the values and calls that ``tape`` recorded, without the addresses of tensors."""
    values = [
        (value.shape, value.dtype, value.requires_grad, value.source, value.name, value.varies)
        for value in tape.values
    ]
    calls = [
        (call.function, call.reads, call.outputs, call.changes, call.segment, call.is_random)
        for call in tape.calls
    ]
    return [values, calls, tape.cuts, tape.aliases]


@pytest.mark.parametrize(
    "body", [plain, several, custom, recomputed, without_gradient, buffers, in_place]
)
def test_the_tape_is_the_one_of_the_model_with_weights(body: Body) -> None:
    case = case_of(body)
    model = on_meta(Model(body))
    fake = Forwards.of(Forward(model), case.microbatch(0), "auto")
    for fake_tape, real_tape in (
        (fake.training, case.forwards.training),
        (fake.evaluation, case.forwards.evaluation),
    ):
        assert str(facts(fake_tape)) == str(facts(real_tape))
        assert slice_tape(fake_tape, (1, 1, 1)) == slice_tape(real_tape, (1, 1, 1))
    assert all(parameter.is_meta for parameter in model.parameters())
    case.forwards = fake
    check(case)


def test_an_export_needs_no_weights() -> None:
    case = case_of(several, "export")
    case.forwards = Forwards.of(Forward(on_meta(Model(several))), case.microbatch(0), "export")
    assert case.forwards.way == "export"
    check(case)


def test_random_calls_are_found_without_random_numbers() -> None:
    def noisy(model: Model, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.5, model.training) + torch.rand(4)
        whole = F.scaled_dot_product_attention(x[None], x[None], x[None])
        dropped = F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1)
        return plain(model, (whole + dropped)[0])

    state = torch.get_rng_state()
    forwards = Forwards.of(Forward(on_meta(Model(noisy))), {"x": torch.ones(2, 4)}, "auto")
    assert torch.equal(torch.get_rng_state(), state)
    # The evaluation tape does not contain F.dropout, which returns its argument in evaluation mode.
    for tape, expected in (
        (forwards.training, [True, True, False, True]),
        (forwards.evaluation, [True, False, True]),
    ):
        is_random = [
            call.is_random
            for call in tape.calls
            if call.function in (F.dropout, torch.rand, F.scaled_dot_product_attention)
        ]
        assert is_random == expected


def test_what_does_not_depend_on_weights_has_values() -> None:
    def reading(model: Model, x: torch.Tensor) -> torch.Tensor:
        table = model.table.clone()
        table.view(2, 2).add_(1)
        if int(table.sum()) != 10:
            return x
        rows = (x[:, 0] * 0 + torch.arange(2) > 0).nonzero()[:, 0]
        x = plain(model, x)
        return x + x[rows].sum() * len(rows)

    case = case_of(reading)
    case.forwards = Forwards.of(Forward(on_meta(Model(reading))), case.microbatch(0), "auto")
    check(case)


def test_values_that_depend_on_weights_are_refused() -> None:
    def chosen(model: Model, x: torch.Tensor) -> torch.Tensor:
        x = plain(model, x)
        return x[(x[:, 0] > 0).nonzero()]

    def branching(model: Model, x: torch.Tensor) -> torch.Tensor:
        return plain(model, x) if x.sum() > 0 else x

    batch = {"x": torch.ones(2, 4)}
    with pytest.raises(
        ConfigError, match=r"test_fake_recording.py:\d+ \(chosen\) needs the values"
    ):
        Forwards.of(Forward(on_meta(Model(chosen))), batch, "auto")
    with pytest.raises(ConfigError, match=r"test_fake_recording.py:\d+ \(branching\) reads the"):
        Forwards.of(Forward(on_meta(Model(branching))), batch, "auto")
    # The option "record" permits reading values that depend on the sample, because these exist even
    # without weights.
    forwards = Forwards.of(Forward(on_meta(Model(branching))), batch, "record")
    assert forwards.training.cuts == ["cuts.0", "cuts.1"]


def test_a_tensor_without_values_that_is_no_buffer_is_refused() -> None:
    model = on_meta(Model(lambda model, x: plain(model, x) * model.scale))
    model.scale = torch.ones((), device="meta")  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="neither a parameter nor a buffer of the model"):
        Forwards.of(Forward(model), {"x": torch.ones(2, 4)}, "auto")


def test_a_part_of_a_model_is_recorded_again_with_other_shapes() -> None:
    whole = Case(knotty(), make_batch(4, length=7), 2)
    part = knotty()
    keep_only(part, ["words.weight", "norm.running_mean"], CPU)
    before = ids_in(part)
    for length in (5, 7):
        sample = {name: tensor[:2] for name, tensor in make_batch(4, length=length).items()}
        forwards = Forwards.of(Forward(part), sample, "auto")
    assert ids_in(part) == before
    assert part.head.weight is part.words.weight
    whole.forwards = forwards
    losses, gradients = whole.expected()
    stage_losses, stage_gradients = whole.run("1f1b", 4)
    assert stage_losses == pytest.approx(losses, rel=1e-6)
    assert_same(stage_gradients, gradients)


def test_ranks_keep_the_buffers_that_code_of_the_model_reads() -> None:
    """Checks that all ranks keep the buffers that the model's Python code reads."""

    def sized(model: Model, x: torch.Tensor) -> torch.Tensor:
        return plain(model, x) * int(model.table.max()) * int(model.size)

    model = Model(sized)
    model.register_buffer("size", torch.tensor(3))
    forwards = Forwards.of(Forward(model), {"x": torch.ones(2, 4)}, "auto")
    cut = CutForwards.of(forwards, (1, 1, 1))
    names = _names_to_keep([cut], {}, [], 1, Placement(num_ranks=3, num_chunks=1))
    assert names == {"table", "size"}
    keep_only(model, names, CPU)
    later = Forwards.of(Forward(model), {"x": torch.ones(3, 4)}, "auto")
    assert later.way == forwards.way == "record"


def test_recurrent_layers_keep_their_lists_of_weights() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cut = torch.nn.LSTM(4, 4), CutPoint()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cut(self.first(x)[0]).mean()

    with torch.device("meta"):
        net = Net()
    weights = [id(weight) for weight in net.first._flat_weights]
    Forwards.of(Forward(net), {"x": torch.ones(2, 3, 4)}, "auto")
    assert [id(weight) for weight in net.first._flat_weights] == weights


def test_a_profile_needs_no_weights() -> None:
    with torch.device("meta"):
        model = Tower(layers=4)
    profile = Profiler(model, {"x": torch.ones(2, 16)}, repeats=1, micro_batch_sizes=(2,)).run()
    (part,) = profile.parts
    assert [row.parameters for row in part.samples] == [256] * 4
    assert [row.output_bytes for row in part.samples] == [128, 128, 128, 0]
    # The inner segments make the same calls, so only one of them is measured.
    assert part.samples[1].durations_s == part.samples[2].durations_s
    assert part.samples[0].durations_s != part.samples[1].durations_s
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_pipeline_asks_for_values() -> None:
    with torch.device("meta"):
        model = Knotty()
    batch = make_batch(4)
    with pytest.raises(ConfigError, match=r"words\.weight of the model is on the meta device"):
        Pipeline(model, batch, shared_weights=SHARED, micro_batch_size=2)

    def forgetful(tensors: Any) -> None:
        for name, tensor in tensors.items():
            if name != "mixer.bias":
                tensor.fill_(1)

    with pytest.raises(ConfigError, match=r"initialize did not fill mixer\.bias of shape \[8\]"):
        Pipeline(model, batch, shared_weights=SHARED, micro_batch_size=2, initialize=forgetful)
    with pytest.raises(ConfigError, match=r"initialize would not be called, because no parameter"):
        Pipeline(knotty(), batch, micro_batch_size=2, initialize=forgetful)
