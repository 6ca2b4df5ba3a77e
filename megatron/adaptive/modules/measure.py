"""Measures what each segment costs, and holds the tape against the model."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.cutting import slice_tape
from megatron.adaptive.modules.program import StageProgram
from megatron.adaptive.modules.recording import Forward, Forwards, Tape, undisturbed

__all__ = ["check_replay", "now", "segment_seconds", "tensors_of"]

_REPEATS = 3
# Of two runs of the same operations, which may add up in another order.
_TOLERANCE, _TOLERANCE_OF_HALVES = 1e-4, 3e-2


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their first name."""
    return {
        **dict(model.named_buffers()),
        **dict(model.named_parameters()),
    }


def segment_seconds(
    forward: Forward, tape: Tape, sample: Mapping[str, torch.Tensor]
) -> list[float]:
    """Return the seconds that forward and backward of each segment take on a microbatch.

    The least of three runs. Gradients that the parameters have are lost.

    Args:
        forward: the model, wholly there.
        tape: its forward in training.
        sample: a microbatch on the model's device.
    """
    device = forward.device
    plans = slice_tape(tape, (1,) * tape.num_segments)
    held = tensors_of(forward.model)
    programs = [
        StageProgram(tape, plan, held, device, is_last=plan is plans[-1], autocast=forward.autocast)
        for plan in plans
    ]
    best = [float("inf")] * len(programs)
    with torch.enable_grad(), undisturbed(forward.model, device):
        for _ in range(_REPEATS):
            for segment, seconds in enumerate(_run_once(programs, sample, device)):
                best[segment] = min(best[segment], seconds)
            forward.model.zero_grad(set_to_none=True)
    return best


def _run_once(
    programs: list[StageProgram], sample: Mapping[str, torch.Tensor], device: torch.device
) -> list[float]:
    seconds = []
    given: list[torch.Tensor] = []
    passed = []
    loss: torch.Tensor | None = None
    for program in programs:
        start = now(device)
        leaves = program.require_gradients(given)
        given, loss = program.forward(sample, leaves, random=lambda call: None)
        passed.append((leaves, program.differentiated(given)))
        seconds.append(now(device) - start)
    gradients: list[torch.Tensor | None] = []
    for segment in range(len(programs) - 1, -1, -1):
        start = now(device)
        leaves, sent = passed.pop()
        if not sent and loss is not None and loss.requires_grad:
            sent, gradients = [loss], [None]
        pairs = [
            (one, torch.zeros_like(one) if gradient is None and one.dim() else gradient)
            for one, gradient in zip(sent, gradients, strict=False)
        ]
        if pairs:
            torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
        loss = None
        gradients = programs[segment].gradients_of(leaves)
        seconds[segment] += now(device) - start
    return seconds


def now(device: torch.device) -> float:
    """Return the seconds of a clock at which all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def check_replay(forward: Forward, forwards: Forwards, other: Mapping[str, torch.Tensor]) -> None:
    """Hold the replay of another microbatch than the recorded one against the model itself.

    Finds what Python computed of the sample's values behind torch's back.

    Args:
        forward: the model, wholly there.
        forwards: its tapes.
        other: a microbatch that was not recorded, on the model's device.

    Raises:
        ConfigError: the losses differ.
    """
    tape = forwards.evaluation
    if tape.is_random:
        return
    held = tensors_of(forward.model)
    device = forward.device
    (plan,) = slice_tape(tape, (tape.num_segments,))
    program = StageProgram(tape, plan, held, device, is_last=True, autocast=forward.autocast)
    modes = [(module, module.training) for module in forward.model.modules()]
    with torch.no_grad(), undisturbed(forward.model, device):
        _, replayed = program.forward(other, [], random=lambda call: None)
        forward.model.eval()
        try:
            with forward.under_autocast():
                expected = float(forward(other))
        finally:
            for module, mode in modes:
                module.training = mode
    assert replayed is not None
    halves = forward.autocast is not None or any(
        one.dtype.itemsize < 4 for one in held.values() if one.is_floating_point()
    )
    tolerance = _TOLERANCE_OF_HALVES if halves else _TOLERANCE
    if abs(float(replayed) - expected) > tolerance * max(1.0, abs(expected)):
        raise ConfigError(
            f"the recorded forward gives a loss of {float(replayed):g} for a second microbatch, "
            f"the model itself {expected:g}: its forward keeps something of the sample's values "
            'outside of tensors; compute with tensors there, or try slicing="export"'
        )
