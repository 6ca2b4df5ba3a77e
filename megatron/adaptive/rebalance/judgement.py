"""Decides from measured steps whether layers should move, and whether a move made steps faster.

The trainer and ``Pipeline`` have their own code to measure steps and move layers. Both use the
functions of this module for their decisions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.planner.choose_partition import (
    Loads,
    Partition,
    PartitionMove,
    Times,
    propose,
    simulated_step,
)
from megatron.adaptive.profiling.free_memory import KEPT_FREE
from megatron.adaptive.rebalance.time_limit import LIMIT_S, result_within
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.catalog import Candidate
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.stage_placement import Placement

KINDS = (ActionKind.F, ActionKind.B, ActionKind.W)
MOST_STEPS = 32
"""Maximum number of recent steps whose measurements are kept for the next decision."""
_OPTIMIZER_BYTES = 4 + 12
"""Bytes per parameter in addition to the weight: gradient, 32-bit weight and two moments."""
_LEAST_STEPS = 3
_SLOW = 1.05
_FITS = 32
_LEAST_S = 1e-12
_PAYS = 0.01
"""Minimum fraction of the step time that a move must save. Otherwise the move is undone."""

Lanes = dict[tuple[ActionKind, int], float]
"""Median duration in ns of a rank's actions in a step, keyed by (kind of action, chunk)."""

Part = float | Times
"""Fraction of a stage's time that a layer takes: one value, or a value for each of the forward,
backward and weight-gradient passes.
"""


@dataclass(frozen=True, kw_only=True)
class StepMeasurements:
    """Measurements of a rank since the last decision.

    Attributes:
        pp_rank: Pipeline rank.
        steps: Median durations of the rank's actions, as one ``Lanes`` dict per step.
        spans_s: Duration of each step in ``steps``, in seconds.
        shares: Fraction of the forward time that is spent in the layers, without embedding and
            loss, per chunk.
        free_bytes: Free memory for activations, in bytes.
        kept_bytes: Size of the activations that a microbatch keeps, in bytes, per chunk.
        held_bytes: Size of weights, gradients and optimizer state, in bytes, per chunk.
        layer_bytes: Size of each layer in bytes, per chunk. Layers of equal size are treated as the
            same kind of layer. Empty if all layers of the model have the same size.
        parts: Each layer's fraction of the total time of its chunk's layers, per chunk: either one
            fraction, or one for each of the forward, backward and weight-gradient passes. Empty if
            all layers are equal.
        layer_kept: Size of the activations that a microbatch keeps in each layer, in bytes, per
            chunk. Empty if all layers keep the same amount.
    """

    pp_rank: int
    steps: tuple[Lanes, ...]
    spans_s: tuple[float, ...]
    shares: tuple[float, ...]
    free_bytes: int = 0
    kept_bytes: tuple[int, ...] = ()
    held_bytes: tuple[int, ...] = ()
    layer_bytes: tuple[tuple[int, ...], ...] = ()
    parts: tuple[tuple[Part, ...], ...] = ()
    layer_kept: tuple[tuple[float, ...], ...] = ()

    def layers_in(self, chunk: int, count: int) -> Iterator[tuple[int, Part]]:
        """Yields (size in bytes, fraction of the layers' total time) for each layer in a chunk.

        Args:
            chunk: Index of the chunk on this rank.
            count: Number of layers in the chunk.
        """
        sizes = self.layer_bytes[chunk] if self.layer_bytes else (0,) * count
        parts = self.parts[chunk] if self.parts else ()
        return zip(sizes, parts or (1 / max(1, count),) * count, strict=True)


@dataclass(frozen=True, kw_only=True)
class Move(PartitionMove):
    """Move of layers between ranks before the next step.

    Attributes:
        why: Reason for the move, printed in the log.
        before_s: Measured step time before the move, in seconds.
        former: Partition before the move.
        is_return: Whether the move undoes the previous move because that move gained nothing.
    """

    why: str
    before_s: float
    former: Partition
    is_return: bool = False

    @property
    def prediction(self) -> str:
        """Clause for the log about the predicted gain; empty if the move undoes an earlier move."""
        if self.is_return:
            return ""
        before_ms = number_text(self.before_s * 1e3, 4)
        return f"predicted step: {self.gain:.1%} shorter than {before_ms} ms; "


def trained_bytes(parameter: torch.Tensor) -> int:
    """Returns the size in bytes of ``parameter``.

    The size of a trained parameter includes its gradient and optimizer state.
    """
    return parameter.numel() * (
        parameter.element_size() + _OPTIMIZER_BYTES * parameter.requires_grad
    )


@dataclass(frozen=True, kw_only=True)
class MoveOutcome:
    """Decisions that follow from the measured gain of a move.

    Attributes:
        gain: Minimum predicted gain of the next move, as a fraction of the step time.
        way_back: Move that undoes the previous move, or ``None`` if the layers stay.
    """

    gain: float
    way_back: Move | None


def loads_over(
    measured: Sequence[StepMeasurements],
    candidate: Candidate,
    partition: Partition,
    num_microbatches: int,
) -> list[Loads]:
    """Computes the times of ranks and stages, for all measured steps and for each half of them.

    Args:
        measured: Measurements of all ranks of the job.
        candidate: Schedule of the job, with its placement.
        partition: Number of layers per stage.
        num_microbatches: Number of microbatches per step.
    """
    half = min(len(of_rank.steps) for of_rank in measured) // 2
    return [
        loads_of(
            measured,
            candidate.placement,
            partition,
            units=candidate.cap
            or default_cap(candidate.placement, num_microbatches, candidate.num_slices),
            steps=steps,
        )
        for steps in (slice(None), slice(half), slice(half, None))
    ]


def judge(
    measured: Sequence[StepMeasurements],
    candidate: Candidate,
    partition: Partition,
    num_microbatches: int,
    gain: float,
    *,
    least_layers: int = 0,
    frozen_layers: int = 0,
    limit_s: float = LIMIT_S,
) -> tuple[Move | None, float, bool]:
    """Decides whether to move layers.

    Args:
        measured: Measurements of all ranks of the job.
        candidate: Schedule of the job, with its placement.
        partition: Number of layers per stage.
        num_microbatches: Number of microbatches per step.
        gain: Minimum predicted gain of a move, as a fraction of the step time.
        least_layers: Minimum number of layers of each stage.
        frozen_layers: Number of leading layers through which no gradient flows.
        limit_s: Maximum time of the search in seconds.

    Returns:
        Tuple of three values: move to make or ``None``, measured step time in seconds, and whether
        the search exceeded its time limit.
    """
    count = min(len(of_rank.steps) for of_rank in measured)
    span_s = step_seconds([of_rank.spans_s for of_rank in measured])
    if count < _LEAST_STEPS:
        return None, span_s, False
    whole, *halves = (
        replace(loads, frozen_layers=frozen_layers)
        for loads in loads_over(measured, candidate, partition, num_microbatches)
    )

    def promises(loads: Loads, partition: Partition) -> bool:
        step_s = simulated_step(loads, candidate, num_microbatches)
        return step_s(partition) <= step_s(loads.partition) * (1 - gain)

    def proposal() -> tuple[PartitionMove | None, bool]:
        try:
            step_s = simulated_step(whole, candidate, num_microbatches)
            if least_layers:
                step_s = _with_least(step_s, least_layers)
            proposed = propose(whole, step_s, gain)
        except ScheduleError:
            # The schedule cannot be simulated for this number of microbatches, so no gain can be
            # predicted.
            return None, False
        if proposed is None or not all(promises(half, proposed.partition) for half in halves):
            # Do not move layers if either half of the measured steps predicts less than the
            # required gain, because the slowdown may be temporary.
            return None, False
        return proposed, False

    late: tuple[PartitionMove | None, bool] = (None, True)
    proposed, is_late = result_within(limit_s, proposal, late)
    if proposed is None:
        return None, span_s, is_late
    move = Move(**vars(proposed), why=reason_of(whole), before_s=span_s, former=partition)
    return move, span_s, False


def _with_least(
    step_s: Callable[[Partition], float], least_layers: int
) -> Callable[[Partition], float]:
    """Returns a version of ``step_s`` that is infinite if any stage has too few layers.

    ``least_layers`` is the minimum number of layers of each stage.
    """

    def limited(partition: Partition) -> float:
        return step_s(partition) if min(partition) >= least_layers else math.inf

    return limited


def compare(
    promise: Move,
    step_s: float,
    gain: float,
    least_gain: float,
    message: Callable[[str], None],
    *,
    step: str = "a step",
) -> MoveOutcome:
    """Compares the measured gain of a move with the predicted gain, and logs both.

    Args:
        promise: Move that was made, with its predicted gain.
        step_s: Step time in seconds, measured since the move.
        gain: Minimum predicted gain that the move required, as a fraction of the step time.
        least_gain: Minimum required gain, from the settings.
        message: Function that writes a line to the log.
        step: Description of the measured step for the log line.
    """
    gained = 1 - step_s / promise.before_s
    # A slowdown of less than 0.05% is rounded to 0.0%. Do not log it as "0.0% more".
    is_longer = gained <= -0.0005
    change = f"{abs(gained):.1%} {'more' if is_longer else 'less'}"
    predicted = f"{promise.gain:.1%}{' less' * is_longer}"
    message(
        f"  repartition: {step} takes {number_text(step_s * 1e3, 4)} ms, {change} than before "
        f"({predicted} was predicted)"
    )
    next_gain = least_gain if gained >= promise.gain / 2 else 2 * gain
    if gained >= _PAYS:
        return MoveOutcome(gain=next_gain, way_back=None)
    way_back = Move(
        partition=promise.former,
        present_s=step_s,
        step_s=promise.before_s,
        why="the last move gained nothing",
        before_s=step_s,
        former=promise.partition,
        is_return=True,
    )
    return MoveOutcome(gain=next_gain, way_back=way_back)


def step_seconds(spans_s: Sequence[Sequence[float]]) -> float:
    """Returns the median step time in seconds. The time of a step is that of its slowest rank.

    Args:
        spans_s: Time of each step in seconds, for each rank.
    """
    count = min(map(len, spans_s))
    return statistics.median(max(spans[step] for spans in spans_s) for step in range(count))


def loads_of(
    measured: Sequence[StepMeasurements],
    placement: Placement,
    partition: Sequence[int],
    *,
    units: float,
    steps: slice = slice(None),
) -> Loads:
    """Computes the time of a layer on each rank, and the time of each stage's other work.

    If there are several data-parallel replicas, the slowest replica is used, because all replicas
    wait for it. A rank without layers is assumed to be as fast as the median rank.

    Args:
        measured: Measurements of all ranks of the job.
        placement: Assignment of stages to ranks and chunks.
        partition: Number of layers per stage.
        units: Number of microbatches whose activations a rank keeps at the same time.
        steps: Slice that selects the measured steps to use.
    """
    ranks = placement.num_ranks
    stages = _slowest_replicas(measured, placement, partition, steps)
    sizes = [size for stage in stages for size, _ in stage.layers]
    numbers = {size: kind for kind, size in enumerate(sorted({*sizes} or {0}))}
    kinds = tuple(numbers[size] for size in sizes)
    sums = np.zeros((ranks, len(numbers), 3))
    counts = np.zeros((ranks, len(numbers)))
    for number, stage in enumerate(stages):
        rank = placement.locate(number)[0]
        for size, part in stage.layers:
            sums[rank, numbers[size]] += np.array(stage.times_s) * stage.share * np.array(part)
            counts[rank, numbers[size]] += 1
    most = [math.inf] * ranks
    relative = [(1.0,) * len(numbers)] * ranks
    kept = _kept_bytes(measured)
    for of_rank in measured:
        limit, kind_sizes = _most_layers(
            of_rank, placement, partition, units, {size: kept.get(size) for size in sorted(numbers)}
        )
        if limit < most[of_rank.pp_rank]:
            most[of_rank.pp_rank] = limit
            relative[of_rank.pp_rank] = kind_sizes
    extra_s = []
    for stage, num_layers in zip(stages, partition, strict=True):
        rest = 1.0 - stage.share if num_layers else 1.0
        forward, backward, weight = stage.times_s
        extra_s.append((forward * rest, backward * rest, weight * rest))
    return Loads(
        placement=placement,
        partition=tuple(partition),
        layer_s=_all_times(sums, counts),
        beside_s=tuple(extra_s),
        most_layers=tuple(most),
        kinds=kinds,
        sizes=tuple(relative),
    )


@dataclass(frozen=True)
class _Stage:
    """Times of a stage on its slowest data-parallel replica.

    Attributes:
        times_s: Median times of the forward, backward and separate weight-gradient pass, in
            seconds.
        share: Fraction of a forward pass that the stage's layers take, without embedding and loss.
        layers: (Size in bytes, fraction of the layers' total time) of each layer.
    """

    times_s: Times = (0.0, 0.0, 0.0)
    share: float = 1.0
    layers: tuple[tuple[int, Part], ...] = ()


def _slowest_replicas(
    measured: Sequence[StepMeasurements],
    placement: Placement,
    partition: Sequence[int],
    steps: slice,
) -> list[_Stage]:
    """Returns the times of each stage on the slowest data-parallel rank that runs it.

    ``steps`` selects the measured steps to use. The other parameters are those of :func:`loads_of`.
    """
    stages = [_Stage()] * placement.num_stages
    for of_rank in measured:
        for chunk in range(placement.num_chunks):
            stage = placement.stage_of(of_rank.pp_rank, chunk)
            typical = _typical(of_rank.steps[steps], chunk)
            if not stages[stage].layers or sum(typical) > sum(stages[stage].times_s):
                layers = tuple(of_rank.layers_in(chunk, partition[stage]))
                stages[stage] = _Stage(typical, of_rank.shares[chunk], layers)
    return stages


def _all_times(sums: Any, counts: Any) -> tuple[tuple[Times, ...], ...]:
    """Estimates the time of each kind of layer on each rank.

    The result also contains the kinds that were not measured on a rank. Layers of the same size are
    of the same kind. The estimate is: time = (time of the kind) x (slowness of the rank). A rank
    that has no kind of layer in common with another rank is assumed to have slowness 1.

    Args:
        sums: Total time in seconds of the measured layers, ``[ranks, kinds, 3]``. The last axis is
            forward, backward and weight-gradient pass.
        counts: Number of measured layers, ``[ranks, kinds]``.

    Returns:
        Time in seconds of forward, backward and weight-gradient pass, ``[ranks, kinds, 3]``.
    """
    ranks, kinds = counts.shape
    means = sums / np.maximum(counts, 1)[:, :, None]
    whole = means.sum(axis=2)
    every = np.arange(kinds)
    slowness = np.ones(ranks)

    def middle() -> Any:
        """Returns, for each kind of layer, the rank with the median time for this kind."""
        usual = np.where(counts > 0, whole / slowness[:, None], np.inf)
        has = np.maximum((counts > 0).sum(axis=0) - 1, 0)
        return np.argsort(usual, axis=0, kind="stable")[has // 2, every]

    for _ in range(_FITS):
        source = middle()
        usual = np.maximum(whole[source, every] / slowness[source], _LEAST_S)
        ratios = (whole / usual * counts).sum(axis=1)
        measured = counts.sum(axis=1)
        fitted = np.where(measured > 0, ratios / np.maximum(measured, 1), 1.0)
        slowness = np.maximum(fitted, _LEAST_S)
    source = np.where(counts > 0, np.arange(ranks)[:, None], middle())
    factor = slowness[:, None] / slowness[source]
    times = means[source, every] * factor[:, :, None]
    return tuple(tuple(map(tuple, kinds)) for kinds in times.tolist())


def _typical(steps: Sequence[Lanes], chunk: int) -> Times:
    """Returns the median times of the three passes of ``chunk`` over ``steps``, in seconds.

    The passes are the forward, the backward and the separate weight-gradient pass.
    """
    medians = []
    for kind in KINDS:
        values = [lanes[kind, chunk] for lanes in steps if (kind, chunk) in lanes]
        medians.append(statistics.median(values) / 1e9 if values else 0.0)
    return medians[0], medians[1], medians[2]


def _most_layers(
    measured: StepMeasurements,
    placement: Placement,
    partition: Sequence[int],
    units: float,
    kinds: Mapping[int, float | None],
) -> tuple[float, tuple[float, ...]]:
    """Returns the number of layers that fit into the memory of a rank.

    The number is at least the current number of layers.

    Args:
        measured: Measurements of the rank.
        placement: Assignment of stages to ranks and chunks.
        partition: Number of layers per stage.
        units: Number of microbatches whose activations a rank keeps at the same time.
        kinds: Size in bytes of the activations that a microbatch keeps in a layer, keyed by the
            size of the layer in bytes; ``None`` if it is unknown.

    Returns:
        Number of layers that fit if all have the rank's mean layer size, and the size of each kind
        of layer as a multiple of that mean.
    """
    chunks = range(placement.num_chunks)
    counts = [partition[placement.stage_of(measured.pp_rank, chunk)] for chunk in chunks]
    layers = sum(counts)
    if not layers or not measured.kept_bytes:
        return math.inf, (1.0,) * len(kinds)
    kept = sum(measured.kept_bytes) * units
    room = measured.free_bytes * (1 - KEPT_FREE) - kept
    mean_bytes = max(1.0, (kept + sum(measured.held_bytes)) / layers)
    present = [size for chunk in chunks for size, _ in measured.layers_in(chunk, counts[chunk])]
    # If the activation size of a layer is unknown, assume the mean over the rank's layers.
    usual = kept / layers
    needed = {
        size: size + (usual if each is None else each * units) for size, each in kinds.items()
    }
    mean = statistics.fmean(needed.get(size, size + usual) for size in present)
    sizes = tuple(1 + (each - mean) / mean_bytes for each in needed.values())
    return layers + max(0, math.floor(room / mean_bytes)), sizes


def _kept_bytes(measured: Sequence[StepMeasurements]) -> dict[int, float]:
    """Returns how many bytes of activations a microbatch keeps in a layer, keyed by layer size.

    Each value is the mean over all layers in ``measured`` with the same size.
    """
    sums: dict[int, list[float]] = {}
    for of_rank in measured:
        for sizes, kept in zip(of_rank.layer_bytes, of_rank.layer_kept, strict=False):
            for size, each in zip(sizes, kept, strict=True):
                sums.setdefault(size, []).append(each)
    return {size: statistics.fmean(each) for size, each in sums.items()}


def reason_of(loads: Loads) -> str:
    """Returns a clause for the log that names the slow ranks, or the rank with the most work."""
    slow = [
        f"rank {rank} of the pipeline takes {factor:.2f} times as long for a layer"
        for rank, factor in enumerate(loads.slowness)
        if factor >= _SLOW
    ]
    if slow:
        return " and ".join(slow)
    paces = loads.paces(loads.partition)
    busiest = max(range(len(paces)), key=paces.__getitem__)
    middle = statistics.median(paces)
    return f"rank {busiest} has {paces[busiest] / max(middle, 1e-9) - 1:.0%} more work than others"
