"""Measures every piece between two cut points as a stage of its own would run it.

One piece after the other is put on the device, so that the whole model need not fit there::

    segment 0 ──message──> segment 1 ──message──> ...      forwards hand on what crosses the cut
       │                      │
       F, B whole             F, B whole                   gradients are made up: their sizes count
       F, B by inputs, W      F, B by inputs, W            where backwards are split

What runs is :class:`~megatron.adaptive.modules.program.ProgramStages`, messages packed and all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.adaptive.engine.executor import ActivationMeter
from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.modules.cutting import StagePlan, slice_tape
from megatron.adaptive.modules.measure import now, tensors_of
from megatron.adaptive.modules.program import MessageLayout, ProgramStages, RandomKey, StageProgram
from megatron.adaptive.modules.recording import Forward, Tape, undisturbed

__all__ = ["SegmentSample", "measure_segments", "optimizer_seconds", "tied_parameters"]

_WARM_UP = 1
_MOST_NUMBERS = 1 << 24  # of parameters that an optimizer step is measured with
_OPTIMIZER_STEPS = 5

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class SegmentSample:
    """One piece with one size of microbatch; seconds are medians.

    Attributes:
        segment: its number in the order of the forward.
        micro_batch: samples.
        forward_s: of a forward.
        backward_s: of a whole backward.
        split_s: of a backward by inputs and of its weight gradients; ``None`` where backwards are
            not split.
        output_bytes: of the message behind it.
        kept_bytes: kept from forward to backward, beside parameters.
        workspace_bytes: held beyond that while it runs; 0 where the device does not tell.
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


def measure_segments(
    forward: Forward,
    tape: Tape,
    batch: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    split: bool,
    repeats: int,
) -> list[SegmentSample]:
    """Measure all pieces with one microbatch; gradients of the model stay as they are.

    Args:
        forward: the model, wholly there, on any device.
        tape: its forward in training, recorded with a microbatch of this size.
        batch: the microbatch.
        device: where pieces run.
        split: measure backwards in two halves as well.
        repeats: runs that count, after one that does not.

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
            program = StageProgram(
                tape, plan, held, device, is_last=plan is plans[-1], autocast=forward.autocast
            )
            bench = _Bench(program, inputs, held, device, repeats)
            rows, message_out, kept, workspace = bench.run(message, split=False)
            halves = None
            if split:
                _, inputs_s, weights_s = map(statistics.median, bench.run(message, split=True)[0])
                halves = (inputs_s, weights_s)
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
                    workspace_bytes=workspace,
                    parameters=sum(one.numel() for one in parameters),
                    durations_s=(tuple(rows[0]), tuple(rows[1])),
                )
            )
            message = message_out
    return samples


def _held(
    tape: Tape, plan: StagePlan, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Give a piece its parameters, which share memory where they are there, and copied buffers."""
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


class _Bench:
    """Runs one piece."""

    def __init__(
        self,
        program: StageProgram,
        inputs: Mapping[str, torch.Tensor],
        held: Mapping[str, torch.Tensor],
        device: torch.device,
        repeats: int,
    ) -> None:
        self._program = program
        self._inputs = inputs
        self._held = held
        self._device = device
        self._count = _WARM_UP + repeats

    def run(
        self, message: torch.Tensor | None, *, split: bool
    ) -> tuple[list[list[float]], torch.Tensor, int, int]:
        """Return durations of F, B and W, the message behind it, and bytes kept and in use."""
        meter, device = ActivationMeter(), self._device
        stages = ProgramStages(
            programs=[self._program],
            microbatches=[self._inputs] * self._count,
            random=RandomKey(0, 0, device),
            held=self._held,
            device=device,
            meter=meter,
            stores=[WeightGradientStore()] if split else None,
        )
        gradient = None
        if self._program.plan.sent:
            gradient = _made_up(self._program.next_backward).to(device)
        rows: list[list[float]] = [[], [], []]
        before, peak = _memory(device), 0
        try:
            for index in range(self._count):
                marks = [now(device)]
                output = stages.forward(0, index, message)
                marks.append(now(device))
                stages.backward(0, index, gradient)
                marks.append(now(device))
                if split:
                    stages.weights(0, index, 0, 1)
                marks.append(now(device))
                if index >= _WARM_UP:
                    for row, begin, end in zip(rows, marks, marks[1:], strict=False):
                        row.append(end - begin)
            peak = _peak(device)
        finally:
            stages.finish()
            for one in self._held.values():
                one.grad = None
        kept = stages.activation_bytes(0)
        return rows, output.detach(), kept, max(0, peak - before - kept)


def _made_up(layout: MessageLayout) -> torch.Tensor:
    """Return a message of gradients."""
    host = torch.device("cpu")
    values = [torch.randn(shape, dtype=dtype) for _, _, shape, dtype in layout.places]
    return layout.pack(values, host)


def _memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def tied_parameters(tape: Tape, tensors: Mapping[str, torch.Tensor]) -> tuple[int, tuple[int, ...]]:
    """Return how many numbers several pieces share, and the first and the last of these pieces.

    Args:
        tape: the forward.
        tensors: the model's, by name.
    """
    uses: dict[str, set[int]] = {}
    for segment, plan in enumerate(slice_tape(tape, (1,) * tape.num_segments)):
        for name in plan.parameters:
            uses.setdefault(name, set()).add(segment)
    shared = {name: segments for name, segments in uses.items() if len(segments) > 1}
    ends = [end for segments in shared.values() for end in (min(segments), max(segments))]
    count = sum(tensors[name].numel() for name in shared)
    return count, (min(ends), max(ends)) if ends else ()


def optimizer_seconds(
    model: torch.nn.Module, device: torch.device, make: MakeOptimizer | None
) -> float:
    """Return the seconds of an optimizer step for each parameter, from some of the model's.

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
    times: Sequence[float] = [_step(optimizer, device) for _ in range(_OPTIMIZER_STEPS)]
    return statistics.median(times[1:]) / total


def _step(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    begin = now(device)
    optimizer.step()
    return now(device) - begin
