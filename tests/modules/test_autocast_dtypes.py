"""Tests that recordings on a CPU have the dtypes that autocast would choose on a GPU.

The GPU is simulated: ``current_device`` returns a GPU. Torch's fake tensors on a GPU need no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import CutPoint, autocast_dtypes
from megatron.adaptive.modules.cutting import slice_tape
from megatron.adaptive.modules.program import MessageLayout
from megatron.adaptive.modules.recording import Forward, Forwards
from megatron.adaptive.modules.segments import check_replay
from megatron.adaptive.modules.tape import Tape, Value

from .test_fake_recording import on_meta

GPU = torch.device("cuda", 0)
HALF, SINGLE = torch.bfloat16, torch.float32


class Scale(torch.autograd.Function):
    """Function of a user that requires float32 on a GPU."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]  # torch has no type hints for it
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]  # torch has no type hints for it
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


OPERATIONS = {
    "linear": lambda x: x,
    "gelu": F.gelu,
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "softmax": lambda x: x.softmax(-1),
    "pow": lambda x: x**2,
    "sum": lambda x: x + x.sum(-1, keepdim=True),
    "custom": lambda x: Scale.apply(x),
    # If the model reads a dtype during the recording, it must get the dtype of a run on a GPU.
    "read": lambda x: x.to(F.layer_norm(x, (4,)).dtype),
}


class Model(torch.nn.Module):
    """Model that sends the result of each operation in :data:`OPERATIONS` to the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in OPERATIONS)
        self.cuts = torch.nn.ModuleList(CutPoint() for _ in OPERATIONS)
        self.last = torch.nn.Linear(4, 4)
        self.sent: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sent = []
        for layer, cut, operation in zip(self.layers, self.cuts, OPERATIONS.values(), strict=True):
            x = operation(layer(x))  # type: ignore[no-untyped-call]
            self.sent.append(x.dtype)
            x = cut(x)
        return self.last(x).float().square().mean()


@pytest.fixture
def has_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast_dtypes, "current_device", lambda: GPU)


def sent_dtypes(tape: Tape) -> dict[str, torch.dtype]:
    """Returns the recorded dtypes of the tensors between stages, keyed by operation.

    Each stage except the last ends with one of the operations, and sends its result.
    """
    plans = slice_tape(tape, (1,) * tape.num_segments)
    dtypes = [tape.values[number].dtype for plan in plans[:-1] for number in plan.sent]
    return dict(zip(OPERATIONS, dtypes, strict=True))


def dtypes_on_gpu() -> dict[str, torch.dtype]:
    """Returns the dtype of the result of each operation if the whole model runs on a GPU."""
    model = Model()
    with FakeTensorMode(), torch.no_grad():
        fakes = {
            name: torch.empty(tensor.shape, device=GPU) for name, tensor in model.named_parameters()
        }
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", HALF)
        try:
            torch.func.functional_call(model, fakes, (torch.empty(2, 4, device=GPU),))
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", torch.float16)
    return dict(zip(OPERATIONS, model.sent, strict=True))


@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize("has_weights", [True, False])
def test_recorded_dtypes_are_those_of_the_gpu(has_weights: bool) -> None:
    """Checks that messages between stages have the sizes that the stages on GPUs expect."""
    model = Model() if has_weights else on_meta(Model())
    forward = Forward(model, mixed_precision="bf16")
    expected = dtypes_on_gpu()
    assert {expected["layer_norm"], expected["softmax"], expected["pow"]} == {SINGLE}
    forwards = Forwards.of(forward, {"x": torch.ones(2, 4)}, "record")
    for tape in (forwards.training, forwards.evaluation):
        assert sent_dtypes(tape) == expected
        assert all(call.autocast == HALF for call in tape.calls)
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stages run on a GPU")
def test_recorded_dtypes_are_those_of_the_cpu_if_there_is_no_gpu() -> None:
    forwards = Forwards.of(
        Forward(Model(), mixed_precision="bf16"), {"x": torch.ones(2, 4)}, "record"
    )
    assert sent_dtypes(forwards.training)["layer_norm"] == HALF


@pytest.mark.usefixtures("has_gpu")
def test_a_recording_for_gpus_can_be_checked_on_the_cpu() -> None:
    forward = Forward(Model(), mixed_precision="bf16")
    batch = {"x": torch.ones(2, 4)}
    forwards = Forwards.of(forward, batch, "record")
    check_replay(forward, forwards, batch)


@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_model_may_turn_autocast_off_for_one_of_the_devices(device_type: str) -> None:
    """Checks that a model may turn autocast off for ``cuda``, or for the device of its tensors.

    The tensors are on the CPU while the model is recorded, but on a GPU when the stages run. Both
    forms must turn autocast off for the stages.
    """

    class Exact(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.cut = *(torch.nn.Linear(4, 4) for _ in "ab"), CutPoint()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device_type, enabled=False):
                x = self.cut(self.first(x))
            return self.last(x).float().mean()

    forwards = Forwards.of(
        Forward(Exact(), mixed_precision="bf16"), {"x": torch.ones(2, 4)}, "auto"
    )
    tape = forwards.training
    settings = {
        call.autocast for call in tape.calls if call.function is F.linear and not call.segment
    }
    assert settings == {None}
    assert tape.calls[-1].autocast == HALF
    plans = slice_tape(tape, (1, 1))
    assert [tape.values[number].dtype for number in plans[0].sent] == [SINGLE]


def test_calls_that_fail_on_fakes_keep_their_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast_dtypes, "current_device", lambda: GPU)

    class ByHost(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            assert values.tolist()
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient

    monkeypatch.setitem(OPERATIONS, "custom", lambda x: ByHost.apply(x))
    forwards = Forwards.of(
        Forward(Model(), mixed_precision="bf16"), {"x": torch.ones(2, 4)}, "record"
    )
    recorded = sent_dtypes(forwards.training)
    assert (recorded["layer_norm"], recorded["custom"]) == (SINGLE, HALF)


@pytest.mark.parametrize(
    ("tensor", "phrase"),
    [
        (torch.ones(2), "torch.float32 is sent .* has torch.bfloat16, .* autocast chooses"),
        (torch.ones(3, dtype=HALF), "depends on values of the batch"),
        (torch.ones(2, dtype=torch.int64), "depends on values of the batch"),
    ],
)
def test_the_error_names_autocast_if_only_the_dtype_differs(
    tensor: torch.Tensor, phrase: str
) -> None:
    layout = MessageLayout.of([Value(shape=(2,), dtype=HALF, requires_grad=False)])
    with pytest.raises(ConfigError, match=phrase):
        layout.pack([tensor], torch.device("cpu"))
    layout.pack([torch.ones(2, dtype=HALF)], torch.device("cpu"))
