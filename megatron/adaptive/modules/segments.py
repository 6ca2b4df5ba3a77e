"""Measures every segment between two cut points as if it were a stage.

One segment after the other is put on the device, so that the whole model need not fit there::

    segment 0 ──message──> segment 1 ──message──> ...      forwards pass their messages on
       │                      │
       F, B whole             F, B whole                   gradients are random: only sizes matter
       F, B by inputs, W      F, B by inputs, W            if backwards are split

``profiling.action_timing`` times a :class:`~megatron.adaptive.modules.program.ProgramStages` for
each segment, which also packs messages. This file also compares the recorded forward with the model
itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatron.adaptive.engine.executor import ActivationMeter
from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.cutting import StagePlan, slice_tape, uses_of
from megatron.adaptive.modules.program import ProgramStages, RandomKey, StageProgram
from megatron.adaptive.modules.recording import Forward, Forwards, Tape, mode_of, undisturbed
from megatron.adaptive.profiling.action_timing import WARM_UP, time_call, time_microbatches

# An optimizer step is measured with at most this many numbers.
_MOST_NUMBERS = 1 << 24
_OPTIMIZER_STEPS = 4
# Two runs of the same operations may sum in different orders.
_TOLERANCE = 1e-4
_TOLERANCE_OF_HALVES = 3e-2

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class SegmentSample:
    """Contains the costs of a segment for one size of microbatch; seconds are medians.

    Attributes:
        segment: Number of the segment in the order of the forward.
        micro_batch: Number of samples of the microbatch.
        forward_s: Duration of a forward, in seconds.
        backward_s: Duration of a whole backward, in seconds.
        split_s: Durations of a backward by inputs and of its weight gradients, in seconds;
            ``None`` if backwards are not split.
        output_bytes: Size of the message after the segment.
        kept_bytes: Memory kept from forward to backward, without parameters.
        workspace_bytes: Further memory while the segment runs; 0 on a CPU, where it is not counted.
        parameters: Number of elements of its parameters, trained and frozen.
        durations_s: All measured durations, a row of forwards and a row of backwards.
    """

    segment: int
    micro_batch: int
    forward_s: float
    backward_s: float
    split_s: tuple[float, float] | None
    output_bytes: int
    kept_bytes: int
    workspace_bytes: int
    parameters: int
    durations_s: tuple[tuple[float, ...], ...]

    @property
    def seconds(self) -> float:
        """Returns the duration of a forward and a whole backward."""
        return self.forward_s + self.backward_s


def measure_segments(
    forward: Forward,
    tape: Tape,
    batch: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    split: bool,
    repeats: int,
) -> list[SegmentSample]:
    """Measures all segments with one microbatch; gradients of the model do not change.

    Args:
        forward: Model with all its parameters, on any device.
        tape: Forward in training, recorded with a microbatch of this size.
        batch: Microbatch.
        device: Device on which segments run.
        split: Whether to measure split backwards too.
        repeats: Number of measured runs after the warmup.

    Raises:
        torch.OutOfMemoryError: If a segment does not fit.
    """
    plans = slice_tape(tape, (1,) * tape.num_segments)
    tensors = tensors_of(forward.model)
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    size = len(next(iter(inputs.values())))
    message: torch.Tensor | None = None
    samples = []
    with torch.enable_grad(), undisturbed(forward.model, device):
        for segment, plan in enumerate(plans):
            held = _held(tape, plan, tensors, device)
            program = StageProgram(tape, plan, held, device)
            before = _reset_peak_bytes(device)
            rows, output, kept = _time(
                program, inputs, held, message, device, split=False, repeats=repeats
            )
            peak = _peak_bytes(device)
            halves = None
            if split:
                both, _, _ = _time(
                    program, inputs, held, message, device, split=True, repeats=repeats
                )
                halves = (statistics.median(both[1]), statistics.median(both[2]))
            samples.append(
                SegmentSample(
                    segment=segment,
                    micro_batch=size,
                    forward_s=statistics.median(rows[0]),
                    backward_s=statistics.median(rows[1]),
                    split_s=halves,
                    output_bytes=program.next_forward.nbytes if plan.sent else 0,
                    kept_bytes=kept,
                    workspace_bytes=max(0, peak - before - kept),
                    parameters=_num_parameters(held),
                    durations_s=(tuple(rows[0]), tuple(rows[1])),
                )
            )
            message = output
    return samples


def _reset_peak_bytes(device: torch.device) -> int:
    """Resets the peak of memory and returns the memory in use, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak_bytes(device: torch.device) -> int:
    """Returns the peak of memory since the reset, 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _num_parameters(held: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in held.values() if isinstance(tensor, torch.nn.Parameter))


def _held(
    tape: Tape, plan: StagePlan, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers of a segment on the device.

    Parameters share memory with the model if it is on the device; buffers are copied.
    """
    names = {*plan.parameters, *plan.buffers}
    for number in (*plan.sent, tape.loss):
        if tape.values[number].source in ("parameter", "buffer"):
            names.add(tape.values[number].name)
    held: dict[str, torch.Tensor] = {}
    for name in names:
        tensor = tensors[name]
        if isinstance(tensor, torch.nn.Parameter):
            moved = tensor.detach().to(device)
            held[name] = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
        else:
            held[name] = tensor.detach().to(device, copy=True)
    return held


def _time(
    program: StageProgram,
    inputs: Mapping[str, torch.Tensor],
    held: Mapping[str, torch.Tensor],
    message: torch.Tensor | None,
    device: torch.device,
    *,
    split: bool,
    repeats: int,
) -> tuple[list[list[float]], torch.Tensor, int]:
    """Returns durations of F, B and W of a segment, its message, and the bytes that it keeps."""
    meter = ActivationMeter()
    stages = ProgramStages(
        programs=[program],
        microbatches=[inputs] * (WARM_UP + repeats),
        random=RandomKey(0, 0, device),
        held=held,
        device=device,
        meter=meter,
        stores=[WeightGradientStore()] if split else None,
    )
    gradient = None
    if program.plan.sent:
        layout = program.next_backward
        gradients = [torch.randn(part.shape, dtype=part.dtype) for part in layout.parts]
        gradient = layout.pack(gradients, torch.device("cpu")).to(device)
    try:
        rows, output = time_microbatches(
            stages,
            received=lambda: message,
            gradient=lambda: gradient,
            device=device,
            repeats=repeats,
            split=split,
        )
    finally:
        for tensor in held.values():
            tensor.grad = None
    assert output is not None
    return rows, output.detach(), meter.bytes_of(0)


def tied_parameters(tape: Tape, tensors: Mapping[str, torch.Tensor]) -> tuple[int, tuple[int, ...]]:
    """Returns the number of shared elements, and the first and last segments that share them."""
    shared = {name: used for name, used in uses_of(tape).items() if len(used) > 1}
    ends = [end for segments in shared.values() for end in (min(segments), max(segments))]
    count = sum(tensors[name].numel() for name in shared)
    return count, (min(ends), max(ends)) if ends else ()


def optimizer_seconds(
    model: torch.nn.Module, device: torch.device, make: MakeOptimizer | None
) -> float:
    """Returns the seconds of an optimizer step per element, measured with some parameters.

    Args:
        model: Model, whose shapes are used; it is not changed.
        device: Device on which the optimizer runs.
        make: Function that makes an optimizer; AdamW if ``None``.
    """
    chosen: list[torch.nn.Parameter] = []
    total = 0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        if total + parameter.numel() <= _MOST_NUMBERS:
            chosen.append(torch.nn.Parameter(torch.zeros_like(parameter, device=device)))
            total += parameter.numel()
    if not trained:
        return 0.0
    if not chosen:
        total = _MOST_NUMBERS
        chosen.append(torch.nn.Parameter(torch.zeros(total, device=device)))
    for parameter in chosen:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(chosen) if make is None else make(chosen)
    return time_call(optimizer.step, device, _OPTIMIZER_STEPS) / total


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by their first names."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def check_replay(forward: Forward, forwards: Forwards, other: Mapping[str, torch.Tensor]) -> None:
    """Compares a replay of the tape on another microbatch with the model itself.

    They differ if Python code of the model used values of the sample that torch did not see.

    Args:
        forward: Model with all its parameters.
        forwards: Tapes of the model.
        other: Microbatch that was not recorded, on the model's device.

    Raises:
        ConfigError: If the losses differ.
    """
    tape = forwards.evaluation
    if tape.is_random:
        return
    held = tensors_of(forward.model)
    device = forward.device
    (plan,) = slice_tape(tape, (tape.num_segments,))
    program = StageProgram(tape, plan, held, device)
    with torch.no_grad(), undisturbed(forward.model, device):
        _, replayed = program.forward(other, [], random=lambda call: None)
        with mode_of(forward.model, training=False), forward.under_autocast():
            expected = float(forward(other))
    assert replayed is not None
    halves = forward.autocast is not None or any(
        tensor.dtype.itemsize < 4 for tensor in held.values() if tensor.is_floating_point()
    )
    tolerance = _TOLERANCE_OF_HALVES if halves else _TOLERANCE
    if abs(float(replayed) - expected) > tolerance * max(1.0, abs(expected)):
        raise ConfigError(
            f"the recorded forward gives a loss of {float(replayed):g} for a second microbatch, "
            f"the model itself {expected:g}: its forward keeps something of the sample's values "
            'outside of tensors; compute with tensors there, or try slicing="export"'
        )
