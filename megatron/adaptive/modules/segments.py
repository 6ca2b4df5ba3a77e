"""Measures each segment (part of a model between two cut points) as if it were a stage.

Segments are moved to the device one after another, so the device needs memory for only one of
them::

    segment 0 ──message──> segment 1 ──message──> ...      each forward pass feeds the next
       │                      │
       F, full B              F, full B                    gradients are random: only sizes matter
       F, input B, weight B   F, input B, weight B         if the backward pass is split

``profiling.action_timing`` times each segment as a
:class:`~megatron.adaptive.modules.program.ProgramStages`, so the times include packing the
messages. Parameters and buffers on the ``meta`` device get random values while their segment runs.
If the model has such tensors, segments that make the same calls are measured only once. This module
also checks that a recorded forward pass gives the same loss as the model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron.adaptive.engine.executor import ActivationMeter
from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.cutting import (
    StagePlan,
    signature_of,
    slice_tape,
    unchecked_slices,
    uses_of,
)
from megatron.adaptive.modules.fake_recording import is_on_meta
from megatron.adaptive.modules.program import ProgramStages, StageProgram
from megatron.adaptive.modules.random_key import RandomKey
from megatron.adaptive.modules.recompute import recomputed_ranges
from megatron.adaptive.modules.recorder import undisturbed
from megatron.adaptive.modules.recording import (
    Forward,
    Forwards,
    SampledModel,
    copies_of,
    host_random_state,
    mode_of,
)
from megatron.adaptive.modules.tape import Tape, makes_same_calls
from megatron.adaptive.profiling.action_timing import WARM_UP, time_call, time_microbatches

# Maximum number of parameter elements with which an optimizer step is timed.
_MOST_NUMBERS = 1 << 22
_OPTIMIZER_STEPS = 4
# Largest random value for tensors on the meta device. Small values avoid overflows.
_LARGEST_RANDOM = 0.02
# Number of random numbers that are drawn for a large tensor, and repeated to fill it.
_RANDOM_NUMBERS = 1 << 16
# Maximum relative difference between two losses that count as equal. The order of summation may
# differ, so the losses may differ slightly. The second value is for 16-bit dtypes.
_TOLERANCE = 1e-4
_TOLERANCE_OF_HALVES = 3e-2

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class SegmentSample:
    """Contains the costs of a segment for one microbatch size. Times are medians.

    Attributes:
        segment: Index of the segment in the order of the forward pass.
        micro_batch: Number of samples per microbatch.
        forward_s: Time of a forward pass, in seconds.
        backward_s: Time of a backward pass that computes all gradients, in seconds.
        split_s: Times in seconds of the two parts of a split backward pass (gradients of inputs,
            and gradients of weights); ``None`` if the split pass was not measured.
        output_bytes: Size in bytes of the message that the segment sends to the next segment.
        kept_bytes: Size in bytes of the activations that are kept until the backward pass.
        workspace_bytes: Size in bytes of the temporary memory that the segment needs; 0 on a CPU,
            where it is not measured.
        parameters: Number of elements in all parameters of the segment.
        frozen_parameters: Number of elements in the segment's frozen parameters.
        durations_s: All measured times in seconds: a row of forward passes, and a row of backward
            passes.
        is_estimated: Whether all costs were estimated from other microbatch sizes.
        is_split_estimated: Whether only the times of the split backward pass were estimated.
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
    frozen_parameters: int
    durations_s: tuple[tuple[float, ...], ...]
    is_estimated: bool = False
    is_split_estimated: bool = False

    @property
    def seconds(self) -> float:
        """Returns the time of a forward and an unsplit backward pass, in seconds."""
        return self.forward_s + self.backward_s


def interpolated(
    smaller: Sequence[SegmentSample], larger: Sequence[SegmentSample]
) -> list[SegmentSample]:
    """Returns estimates for the powers of two between two measured microbatch sizes.

    The interpolation is linear, because the cost of a microbatch is the sum of a fixed cost and a
    cost per sample.

    Args:
        smaller: Measurements of all segments for the smaller microbatch size.
        larger: Measurements of the same segments for the larger microbatch size.
    """
    first, last = smaller[0].micro_batch, larger[0].micro_batch
    sizes = [
        size for size in (2**power for power in range(last.bit_length())) if first < size < last
    ]
    return [_between(a, b, size) for size in sizes for a, b in zip(smaller, larger, strict=True)]


def with_split_like(measured: SegmentSample, sample: SegmentSample) -> SegmentSample:
    """Returns ``sample`` with times of the split backward pass, estimated from ``measured``.

    ``measured`` describes the same segment for a different microbatch size. The estimate assumes
    that the ratio of split to unsplit times is the same for both sizes.
    """
    if measured.split_s is None or sample.split_s is not None:
        return sample
    ratio = sample.backward_s / measured.backward_s if measured.backward_s else 1.0
    inputs_s, weights_s = measured.split_s
    split_s = ratio * inputs_s, ratio * weights_s
    return replace(sample, split_s=split_s, is_split_estimated=True)


def _between(smaller: SegmentSample, larger: SegmentSample, size: int) -> SegmentSample:
    share = (size - smaller.micro_batch) / (larger.micro_batch - smaller.micro_batch)

    def mean(a: float, b: float) -> float:
        return a + share * (b - a)

    halves = None
    if smaller.split_s is not None and larger.split_s is not None:
        (inputs, weights), (more_inputs, more_weights) = smaller.split_s, larger.split_s
        halves = mean(inputs, more_inputs), mean(weights, more_weights)
    return replace(
        larger,
        micro_batch=size,
        forward_s=mean(smaller.forward_s, larger.forward_s),
        backward_s=mean(smaller.backward_s, larger.backward_s),
        split_s=halves,
        output_bytes=round(mean(smaller.output_bytes, larger.output_bytes)),
        kept_bytes=round(mean(smaller.kept_bytes, larger.kept_bytes)),
        workspace_bytes=round(mean(smaller.workspace_bytes, larger.workspace_bytes)),
        durations_s=(),
        is_estimated=True,
    )


def measure_segments(
    forward: SampledModel,
    tape: Tape,
    batch: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    split: bool,
    repeats: int,
    enough_s: float = math.inf,
) -> list[SegmentSample]:
    """Measures all segments with one microbatch, without changing the model's gradients.

    Args:
        forward: Model with all its parameters, on any device. Parameters on the ``meta`` device get
            random values. Calls that its setting ``recompute`` selects are recomputed.
        tape: Forward pass in training mode, recorded with a microbatch of this size.
        batch: Tensors of the microbatch, keyed by name.
        device: Device on which segments run.
        split: Whether to also measure the split backward pass.
        repeats: Maximum number of timed repetitions after the warm-up.
        enough_s: Duration in seconds. Segments that take at least this long are measured only once.

    Raises:
        torch.OutOfMemoryError: If a segment does not fit in the device's memory.
    """
    plans = unchecked_slices(tape)
    recomputed = recomputed_ranges(tape, forward.recompute)
    tensors = tensors_of(forward.model)
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    # Some entries may be scalars, which have no batch dimension. Skip them.
    size = next((len(tensor) for tensor in inputs.values() if tensor.dim()), 1)
    message: torch.Tensor | None = None
    samples: list[SegmentSample] = []
    measured: dict[Any, tuple[SegmentSample, torch.Tensor]] = {}
    on_meta = is_on_meta(forward.model)
    with torch.enable_grad(), undisturbed(forward.model, device):
        for segment, plan in enumerate(plans):
            is_recomputed = any(calls.start in plan.calls for calls in recomputed)
            signature = (signature_of(tape, plan), is_recomputed) if on_meta else segment
            if signature in measured:
                sample, message = measured[signature]
                samples.append(replace(sample, segment=segment))
                continue
            held = _held(tape, plan, tensors, device)
            program = StageProgram(tape, plan, held, device, recomputed)
            measure = partial(
                _time, program, inputs, held, message, repeats=repeats, enough_s=enough_s
            )
            sample, output = _sample(program, held, device, measure, split=split, long_s=enough_s)
            samples.append(replace(sample, segment=segment, micro_batch=size))
            message = output
            measured[signature] = samples[-1], output
    return samples


def _sample(
    program: StageProgram,
    held: Mapping[str, torch.Tensor],
    device: torch.device,
    measure: Callable[..., tuple[list[list[float]], torch.Tensor, int]],
    *,
    split: bool,
    long_s: float,
) -> tuple[SegmentSample, torch.Tensor]:
    """Measures the segment ``program``, and returns its costs and output.

    The function ``measure`` runs the segment and returns its times. ``held`` contains the segment's
    parameters and buffers. If the unsplit passes take at least ``long_s`` seconds, they also serve
    as the warm-up for the split passes.

    In the returned costs, the segment index is 0 and the microbatch size is 1. The caller must
    replace both.
    """
    before = _reset_peak_bytes(device)
    halves = None
    try:
        rows, output, kept = measure(split=False)
        peak = _peak_bytes(device)
        if split:
            # Do not clear the gradients of the unsplit passes, because most microbatches of a step
            # also add to existing gradients.
            is_long = rows[0][-1] + rows[1][-1] >= long_s
            both, _, _ = measure(split=True, warm_up=0 if is_long else WARM_UP)
            halves = (statistics.median(both[1]), statistics.median(both[2]))
    finally:
        for tensor in held.values():
            tensor.grad = None
    sample = SegmentSample(
        segment=0,
        micro_batch=1,
        forward_s=statistics.median(rows[0]),
        backward_s=statistics.median(rows[1]),
        split_s=halves,
        output_bytes=program.next_forward.nbytes if program.plan.sent else 0,
        kept_bytes=kept,
        workspace_bytes=max(0, peak - before - kept),
        parameters=_num_parameters(held.values()),
        frozen_parameters=_num_parameters(
            tensor for tensor in held.values() if not tensor.requires_grad
        ),
        durations_s=(tuple(rows[0]), tuple(rows[1])),
    )
    return sample, output


def _reset_peak_bytes(device: torch.device) -> int:
    """Resets the peak memory statistics of a device, and returns its allocated memory in bytes.

    Returns 0 on a CPU.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak_bytes(device: torch.device) -> int:
    """Returns the peak memory in bytes since the last reset, or 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _num_parameters(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors if isinstance(tensor, torch.nn.Parameter))


def _held(
    tape: Tape, plan: StagePlan, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers of a segment on ``device``, keyed by name.

    ``plan`` is the plan of the segment. Parameters share memory with the model's parameters if
    these are on the same device. Buffers are copied, because running the segment may change them.
    Tensors on the ``meta`` device get random values.
    """
    names = {*plan.parameters, *plan.buffers}
    for number in (*plan.sent, tape.loss):
        if tape.values[number].source in ("parameter", "buffer"):
            names.add(tape.values[number].name)
    held: dict[str, torch.Tensor] = {}
    for name in names:
        tensor = tensors[name]
        if tensor.is_meta:
            values = torch.zeros_like(tensor, device=device)
            if values.is_floating_point():
                _fill_with_random(values)
        else:
            values = tensor.detach().to(device)
        if isinstance(tensor, torch.nn.Parameter):
            held[name] = torch.nn.Parameter(values, requires_grad=tensor.requires_grad)
        elif tensor.is_meta:
            held[name] = values
        else:
            held[name] = tensor.detach().to(device, copy=True)
    return held


def _fill_with_random(values: torch.Tensor) -> None:
    """Fills ``values`` with random numbers, which repeat in a large tensor.

    Copying the same numbers is several times faster than drawing all of them.
    """
    if not values.is_contiguous() or values.numel() <= _RANDOM_NUMBERS:
        values.uniform_(0, _LARGEST_RANDOM)
        return
    flat = values.view(-1)
    drawn = torch.empty_like(flat[:_RANDOM_NUMBERS]).uniform_(0, _LARGEST_RANDOM)
    for part in flat.split(_RANDOM_NUMBERS):
        part.copy_(drawn[: len(part)])


def _time(
    program: StageProgram,
    inputs: Mapping[str, torch.Tensor],
    held: Mapping[str, torch.Tensor],
    message: torch.Tensor | None,
    *,
    split: bool,
    repeats: int,
    enough_s: float,
    warm_up: int = WARM_UP,
) -> tuple[list[list[float]], torch.Tensor, int]:
    """Runs a segment repeatedly, and returns its times, output and activation size.

    Each forward pass receives the batch entries ``inputs`` and the ``message`` of the previous
    segment. A segment that takes at least ``enough_s`` seconds is timed once instead of ``repeats``
    times.

    The times are given in seconds, as one list each for forward passes, backward passes and, if
    ``split`` is true, weight-gradient passes. The activation size is in bytes.
    """
    meter = ActivationMeter()
    device = program.device
    stages = ProgramStages(
        programs=[[program]] * (WARM_UP + repeats),
        microbatches=[inputs] * (WARM_UP + repeats),
        random=RandomKey(0, device),
        held=held,
        device=device,
        meters=[meter] * (WARM_UP + repeats),
        stores=[WeightGradientStore()] if split else None,
    )
    gradient = None
    if program.plan.sent:
        layout = program.next_backward
        gradients = [torch.randn(part.shape, dtype=part.dtype) for part in layout.parts]
        gradient = layout.pack(gradients, torch.device("cpu")).to(device)
    rows, output = time_microbatches(
        stages,
        received=lambda: message,
        gradient=lambda: gradient,
        device=device,
        repeats=repeats,
        split=split,
        enough_s=enough_s,
        warm_up=warm_up,
    )
    assert output is not None
    return rows, output.detach(), meter.bytes_of(0)


def tied_parameters(tape: Tape, tensors: Mapping[str, torch.Tensor]) -> tuple[int, tuple[int, ...]]:
    """Returns the number of elements in shared parameters, and the range of segments that use them.

    A parameter is shared if several segments use it. The range consists of the first and the last
    such segment, and is an empty tuple if no parameter is shared. ``tape`` is the recorded forward
    pass, and ``tensors`` contains the parameters, keyed by name.
    """
    shared = {name: used for name, used in uses_of(tape).items() if len(used) > 1}
    ends = [end for segments in shared.values() for end in (min(segments), max(segments))]
    count = sum(tensors[name].numel() for name in shared)
    return count, (min(ends), max(ends)) if ends else ()


def optimizer_seconds(
    model: torch.nn.Module, device: torch.device, make: MakeOptimizer | None
) -> float:
    """Returns the time of an optimizer step per parameter element, in seconds.

    The optimizer updates new parameters with the same shapes as some of the model's parameters. Not
    all parameters are used, because a large model may not fit in memory.

    Args:
        model: Model whose parameter shapes are used. It is not changed.
        device: Device on which the optimizer runs.
        make: Function that creates an optimizer from a list of parameters; ``None`` uses AdamW.
    """
    chosen: list[torch.nn.Parameter] = []
    total = 0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        if total + parameter.numel() <= _MOST_NUMBERS:
            chosen.append(torch.nn.Parameter(torch.zeros_like(parameter, device=device)))
            # Copy attributes set by the model's code, because some optimizers read them.
            vars(chosen[-1]).update(vars(parameter))
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
    """Returns the parameters and buffers of ``model``, keyed by name.

    The key of a tensor with several names is its first name.
    """
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def check_replay(forward: Forward, forwards: Forwards, other: Mapping[str, torch.Tensor]) -> None:
    """Checks that the recordings and the model give the same loss for another microbatch.

    The losses differ if Python code of the model uses values of the sample batch in a way that the
    recorder cannot detect. The recording in training mode is checked only if its calls differ from
    those of the recording in evaluation mode. Recordings that draw random numbers are not checked.

    Args:
        forward: Model with all its parameters.
        forwards: Forward passes of the model, recorded in training and evaluation mode.
        other: Microbatch that was not used for the recording, on the model's device.

    Raises:
        ConfigError: If the loss of a recording differs from the loss of the model.
    """
    _check_mode(forward, forwards.evaluation, other, training=False)
    training = forwards.tapes.get("training")
    if training is not None and not makes_same_calls(training, forwards.evaluation):
        _check_mode(forward, training, other, training=True)


def _check_mode(
    forward: Forward, tape: Tape, other: Mapping[str, torch.Tensor], *, training: bool
) -> None:
    """Compares the losses of ``tape`` and of the model for the microbatch ``other``.

    ``training`` must be true if ``tape`` was recorded in training mode. See :func:`check_replay`.
    """
    if tape.is_random:
        return
    held = tensors_of(forward.model)
    device = forward.device
    (plan,) = slice_tape(tape, (tape.num_segments,))
    program = StageProgram(tape, plan, held, device)
    # Restore the buffers after each run, because both the recording and the model may change them,
    # but must start with the same values.
    with torch.no_grad(), undisturbed(forward.model, device):
        _, replayed = program.forward(other, [], random=lambda call: None)
    before = host_random_state()
    with (
        torch.set_grad_enabled(training),
        undisturbed(forward.model, device),
        mode_of(forward.model, training=training),
        forward.under_autocast(),
    ):
        expected = float(forward(copies_of(other)).detach())
    if host_random_state() != before:
        # The losses cannot be compared, because the model draws random numbers with Python or
        # numpy, which slicing="record" allows.
        return
    assert replayed is not None
    halves = forward.autocast is not None or any(
        tensor.dtype.itemsize < 4 for tensor in held.values() if tensor.is_floating_point()
    )
    tolerance = _TOLERANCE_OF_HALVES if halves else _TOLERANCE
    if abs(float(replayed) - expected) > tolerance * max(1.0, abs(expected)):
        mode = "training" if training else "evaluation"
        raise ConfigError(
            f"the recording gives a loss of {float(replayed):g} for a second microbatch, but the "
            f"model gives {expected:g} in {mode}, because its forward pass keeps values of the "
            "sample_batch in Python objects instead of tensors; use operations on tensors there, "
            'or try slicing="export"'
        )
