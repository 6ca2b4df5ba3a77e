"""Measures every piece between two cut points as a stage of its own would run it.

One piece after the other is put on the device, so that the whole model need not fit there::

    segment 0 ──message──> segment 1 ──message──> ...      forwards hand on what crosses the cut
       │                      │
       F, B whole             F, B whole                   gradients are made up: their sizes count
       F, B by inputs, W      F, B by inputs, W            where backwards are split

What runs is :class:`~megatron.adaptive.modules.program.ProgramStages`, messages packed and all;
``profiling.action_timing`` runs and times it. Also holds the recorded forward against the model
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

_MOST_NUMBERS = 1 << 24  # of parameters that an optimizer step is measured with
_OPTIMIZER_STEPS = 4
# Of two runs of the same operations, which may add up in another order.
_TOLERANCE, _TOLERANCE_OF_HALVES = 1e-4, 3e-2

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class SegmentSample:
    """Holds what one piece takes with one size of microbatch; seconds are medians.

    Attributes:
        segment: its number in the order of the forward.
        micro_batch: samples.
        forward_s: of a forward.
        backward_s: of a whole backward.
        split_s: of a backward by inputs and of its weight gradients; ``None`` where backwards are
            not split.
        output_bytes: of the message behind it.
        kept_bytes: kept from forward to backward, beside parameters.
        workspace_bytes: held beyond that while it runs; 0 on a device without such a count.
        parameters: numbers that it trains or only holds.
        durations_s: all that were taken, a row for forwards, one for backwards.
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
        """Forward and whole backward."""
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
    """Measures all pieces with one microbatch; gradients of the model stay as they are.

    Args:
        forward: the model, wholly there, on any device.
        tape: its forward in training, recorded with a microbatch of this size.
        batch: the microbatch.
        device: where pieces run.
        split: measure backwards in two halves as well.
        repeats: runs that count, after those that warm up.

    Raises:
        torch.OutOfMemoryError: a piece does not fit.
    """
    plans = slice_tape(tape, (1,) * tape.num_segments)
    tensors = tensors_of(forward.model)
    inputs = {name: one.to(device) for name, one in batch.items()}
    size = len(next(iter(inputs.values())))
    message: torch.Tensor | None = None
    samples = []
    with torch.enable_grad(), undisturbed(forward.model, device):
        for segment, plan in enumerate(plans):
            held = _held(tape, plan, tensors, device)
            program = StageProgram(tape, plan, held, device)
            before = peak = 0  # not counted on a CPU
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            rows, output, kept = _time(
                program, inputs, held, message, device, split=False, repeats=repeats
            )
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device)
            halves = None
            if split:
                both, _, _ = _time(
                    program, inputs, held, message, device, split=True, repeats=repeats
                )
                halves = (statistics.median(both[1]), statistics.median(both[2]))
            parameters = [one for one in held.values() if isinstance(one, torch.nn.Parameter)]
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
                    parameters=sum(one.numel() for one in parameters),
                    durations_s=(tuple(rows[0]), tuple(rows[1])),
                )
            )
            message = output
    return samples


def _held(
    tape: Tape, plan: StagePlan, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Gives a piece its parameters, sharing memory where they are there, and copied buffers."""
    names = {*plan.parameters, *plan.buffers}
    for number in (*plan.sent, tape.loss):
        if tape.values[number].source in ("parameter", "buffer"):
            names.add(tape.values[number].name)
    held: dict[str, torch.Tensor] = {}
    for name in names:
        one = tensors[name]
        if isinstance(one, torch.nn.Parameter):
            moved = one.detach().to(device)
            held[name] = torch.nn.Parameter(moved, requires_grad=one.requires_grad)
        else:
            held[name] = one.detach().to(device, copy=True)
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
    """Returns durations of F, B and W of one piece, the message behind it, and bytes kept."""
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
        made_up = [torch.randn(shape, dtype=dtype) for _, _, shape, dtype in layout.places]
        gradient = layout.pack(made_up, torch.device("cpu")).to(device)
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
        for one in held.values():
            one.grad = None
    assert output is not None
    return rows, output.detach(), meter.bytes_of(0)


def tied_parameters(tape: Tape, tensors: Mapping[str, torch.Tensor]) -> tuple[int, tuple[int, ...]]:
    """Returns how many numbers several pieces share, and the first and the last of these pieces."""
    shared = {name: used for name, used in uses_of(tape).items() if len(used) > 1}
    ends = [end for segments in shared.values() for end in (min(segments), max(segments))]
    count = sum(tensors[name].numel() for name in shared)
    return count, (min(ends), max(ends)) if ends else ()


def optimizer_seconds(
    model: torch.nn.Module, device: torch.device, make: MakeOptimizer | None
) -> float:
    """Returns the seconds of an optimizer step for each parameter, from some of the model's.

    Args:
        model: whose shapes are taken; it is not changed.
        device: where the optimizer runs.
        make: makes one; AdamW where ``None``.
    """
    chosen: list[torch.nn.Parameter] = []
    total = 0
    trained = [one for one in model.parameters() if one.requires_grad]
    for one in trained:
        if total + one.numel() <= _MOST_NUMBERS:
            chosen.append(torch.nn.Parameter(torch.zeros_like(one, device=device)))
            total += one.numel()
    if not trained:
        return 0.0
    if not chosen:
        total = _MOST_NUMBERS
        chosen.append(torch.nn.Parameter(torch.zeros(total, device=device)))
    for made in chosen:
        made.grad = torch.zeros_like(made)
    optimizer = torch.optim.AdamW(chosen) if make is None else make(chosen)
    return time_call(optimizer.step, device, _OPTIMIZER_STEPS) / total


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by their first name."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def check_replay(forward: Forward, forwards: Forwards, other: Mapping[str, torch.Tensor]) -> None:
    """Compares the replay of another microbatch than the recorded one with the model itself.

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
    program = StageProgram(tape, plan, held, device)
    with torch.no_grad(), undisturbed(forward.model, device):
        _, replayed = program.forward(other, [], random=lambda call: None)
        with mode_of(forward.model, training=False), forward.under_autocast():
            expected = float(forward(other))
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
