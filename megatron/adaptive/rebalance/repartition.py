"""``--repartition auto``: gives layers of a slow rank to others, where measured times say it pays.

Every ``--repartition-interval`` iterations all ranks report their measurements, the first rank
finds the partition that would be fastest, and all ranks move to it together if it promises enough::

    steps since the last look ──> loads of ranks and stages ──> quickest partition, simulated
    half of them, other half  ──> must promise it too            (planner/choose_partition.py)

A move that does not keep half of its promise doubles what the next one must promise.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron.adaptive.checkpoint.folder import CheckpointFolder
from megatron.adaptive.checkpoint.megatron_state import mesh_shape
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.engine.stages import ForwardBackward
from megatron.adaptive.errors import CheckpointError, ScheduleError
from megatron.adaptive.gpt.initialize import TrainingJob
from megatron.adaptive.gpt.setup import Run
from megatron.adaptive.planner.choose_partition import (
    Loads,
    Partition,
    PartitionMove,
    Times,
    propose,
    simulated_step,
    travelling,
)
from megatron.adaptive.profiling.free_memory import KEPT_FREE
from megatron.adaptive.profiling.pipeline_times import LayerShare, Sample
from megatron.adaptive.rebalance.auto_schedule import held_bytes, memory_of
from megatron.adaptive.rebalance.move_stages import with_schedule
from megatron.adaptive.rebalance.time_limit import LIMIT_S, result_within
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.stage_placement import Placement

KINDS = (ActionKind.F, ActionKind.B, ActionKind.W)
_WARM_UP = 1
_MOST_STEPS = 32
_LEAST_STEPS = 3
_SLOW = 1.05
_FITS = 32
_LEAST_S = 1e-12

Lanes = dict[tuple[ActionKind, int], float]
"""Median nanoseconds of an action of a kind, by chunk."""


@dataclass(frozen=True, kw_only=True)
class StepMeasurements:
    """Holds what a rank measured in the steps since the last decision.

    Attributes:
        pp_rank: its position in the pipeline.
        steps: what its actions took, by step.
        spans_s: how long each step took it.
        shares: which part of a forward its layers take, by chunk.
        free_bytes, kept_bytes, held_bytes: see ``auto.memory_of``.
        layer_bytes: what each layer holds, by chunk. Layers that hold as much are of one kind;
            empty where all are.
        parts: which part of a chunk's layers each takes, by chunk; empty where they are alike.
    """

    pp_rank: int
    steps: tuple[Lanes, ...]
    spans_s: tuple[float, ...]
    shares: tuple[float, ...]
    free_bytes: int = 0
    kept_bytes: tuple[int, ...] = ()
    held_bytes: tuple[int, ...] = ()
    layer_bytes: tuple[tuple[int, ...], ...] = ()
    parts: tuple[tuple[float, ...], ...] = ()

    def layers_in(self, chunk: int, count: int) -> Iterator[tuple[int, float]]:
        """Yields the bytes and the part of the time of each of a chunk's layers."""
        sizes = self.layer_bytes[chunk] if self.layer_bytes else (0,) * count
        parts = self.parts[chunk] if self.parts else ()
        return zip(sizes, parts or (1 / max(1, count),) * count, strict=True)


@dataclass(frozen=True, kw_only=True)
class Move(PartitionMove):
    """Holds the partition that all ranks take after this step.

    Attributes:
        why: for the log.
        before_s: the step as it was measured before.
    """

    why: str
    before_s: float


def resume_partition(job: TrainingJob) -> TrainingJob:
    """Takes the partition that the job had when the checkpoint to load was written. Collective.

    Only under ``--repartition auto``, and where the checkpoint is of a pipeline of this shape. One
    that cannot be read is reported where it is loaded.
    """
    config = job.config
    if config.schedule.repartition == "off" or config.checkpoint.load is None:
        return job
    saved = job.from_first(_saved_partition(config) if job.is_first else None)
    return job if saved is None else with_schedule(job, partition=saved)


def _saved_partition(config: TrainerConfig) -> tuple[int, ...] | None:
    folder = CheckpointFolder(str(config.checkpoint.load))
    iteration = config.checkpoint.ckpt_step
    try:
        iteration = folder.latest() if iteration is None else iteration
        if iteration is None:
            return None
        _, manifest = folder.open(iteration, trust=config.checkpoint.trust_checkpoint)
    except CheckpointError:
        return None
    now, then = mesh_shape(config), manifest["shape"]
    saved = manifest["config"].get("schedule", {}).get("partition")
    alike = all(now[axis] == then.get(axis) for axis in ("pipeline", "chunks"))
    if saved is None or not alike or sum(saved) != config.model.num_layers:
        return None
    return tuple(saved)


class Repartitioner:
    """Measures the steps of a run and decides when layers move; every rank has one."""

    def __init__(self, run: Run, message: Callable[[str], None]) -> None:
        settings = run.job.config.schedule
        self._message = message
        self._interval = settings.repartition_interval
        self._gain = settings.repartition_gain
        self._steps: deque[tuple[Lanes, float]] = deque(maxlen=_MOST_STEPS)
        self._skip = _WARM_UP
        self._since = 0
        self._promise: Move | None = None
        self._share: LayerShare | None = None
        self.adopt(run)

    def adopt(self, run: Run) -> None:
        """Measures a run that was built anew from here on."""
        self._run, self._partition = run, run.job.config.layers_per_stage
        self._layer_bytes = _layer_bytes(run)
        self._share = _layer_share(run, self._layer_bytes)
        self._forget()

    def close(self) -> None:
        """Measures no more, and drops the run, until another one is adopted."""
        assert self._share is not None
        self._share.close()
        self._share = None
        del self._run

    def gather_loads(self, num_microbatches: int) -> list[Loads]:
        """Returns the loads in the steps since the last look, and in both halves. Collective."""
        return self._loads(self._run.job.gather(self._measurements()), num_microbatches)

    def _forget(self) -> None:
        self._steps.clear()
        self._since = 0
        assert self._share is not None
        self._share.begin()

    def after_step(self, times: RankTimes, num_microbatches: int) -> Move | None:
        """Adds a training step; every interval, decides. Collective then.

        Returns:
            The move to make before the next step, on all ranks alike.
        """
        if self._skip:
            self._skip -= 1
            self._forget()
            return None
        self._since += 1
        sample = Sample(pp_rank=0)
        sample.add(times.actions)
        medians = {lane: statistics.median(values) for lane, values in sample.durations_ns.items()}
        self._steps.append((medians, times.span_s))
        if self._since < self._interval:
            return None
        measured = self._run.job.gather(self._measurements())
        move, step_s, is_late = self._run.job.on_first(
            lambda: self._decide(measured, num_microbatches)
        )
        if is_late:
            self._message(
                f"  repartition: layers stay, as no partition was simulated within {LIMIT_S:g} s"
            )
        self._compare(step_s)
        self._forget()
        return None if move is None or move.gain < self._gain else move

    def moved(self, move: Move, run: Run, seconds: float) -> None:
        """Reports a move and goes on after it."""
        before = format_partition(self._partition)
        layers = travelling(self._partition, move.partition, run.placement)
        self._message(
            f"  repartition: {before} -> {format_partition(move.partition)}: {move.why}; a step of "
            f"{move.before_s * 1e3:.4g} ms shall take {move.gain:.1%} less; {layers} layer"
            f"{'s' * (layers != 1)} moved in {seconds:.3f} s"
        )
        self._promise = move
        self._skip = _WARM_UP
        self.adopt(run)

    def _compare(self, step_s: float) -> None:
        """Reports what the first steps after a move gained, against what it promised."""
        promise, self._promise = self._promise, None
        if promise is None:
            return
        gained = 1 - step_s / promise.before_s
        self._message(
            f"  repartition: a step takes {step_s * 1e3:.4g} ms, {gained:.1%} less than before "
            f"({promise.gain:.1%} was simulated)"
        )
        settings = self._run.job.config.schedule
        kept = gained >= promise.gain / 2
        self._gain = settings.repartition_gain if kept else 2 * self._gain

    def _measurements(self) -> StepMeasurements:
        assert self._share is not None
        run, runs = self._run, self._run.forward_backward
        assert isinstance(runs, ForwardBackward)
        free, kept, held = memory_of(run.job, runs, run.chunks)
        chunks = range(run.placement.num_chunks)
        return StepMeasurements(
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            steps=tuple(lanes for lanes, _ in self._steps),
            spans_s=tuple(span for _, span in self._steps),
            shares=tuple(self._share.share(chunk) for chunk in chunks),
            free_bytes=free,
            kept_bytes=kept,
            held_bytes=held,
            layer_bytes=self._layer_bytes,
            parts=tuple(map(self._share.parts, chunks)),
        )

    def _decide(
        self, measured: Sequence[StepMeasurements], num_microbatches: int
    ) -> tuple[Move | None, float, bool]:
        """Returns a move that pays, the measured step time in s, and whether time ran out."""
        run = self._run
        assert isinstance(run.forward_backward, ForwardBackward)
        candidate = run.forward_backward.orders.candidate(num_microbatches)
        gain = self._gain
        count = min(len(one.steps) for one in measured)
        span_s = statistics.median(
            max(one.spans_s[step] for one in measured) for step in range(count)
        )
        if count < _LEAST_STEPS:
            return None, span_s, False

        whole, *halves = self._loads(measured, num_microbatches)

        def promises(loads: Loads, partition: Partition) -> bool:
            step_s = simulated_step(loads, candidate, num_microbatches)
            return step_s(partition) <= step_s(loads.partition) * (1 - gain)

        def proposal() -> tuple[PartitionMove | None, bool]:
            try:
                step_s = simulated_step(whole, candidate, num_microbatches)
                found = propose(whole, step_s, gain)
            except ScheduleError:  # the order cannot be simulated for this many microbatches
                return None, False
            if found is None or not all(promises(half, found.partition) for half in halves):
                return None, False  # the move would pay in only a part of the steps
            return found, False

        late: tuple[PartitionMove | None, bool] = (None, True)
        found, is_late = result_within(LIMIT_S, proposal, late)
        if found is None:
            return None, span_s, is_late
        return Move(**vars(found), why=_reason(whole), before_s=span_s), span_s, False

    def _loads(self, measured: Sequence[StepMeasurements], num_microbatches: int) -> list[Loads]:
        run = self._run
        assert isinstance(run.forward_backward, ForwardBackward)
        candidate = run.forward_backward.orders.candidate(num_microbatches)
        half = min(len(one.steps) for one in measured) // 2
        return [
            loads_of(
                measured,
                run.placement,
                run.job.config.layers_per_stage,
                units=candidate.cap or default_cap(run.placement, num_microbatches),
                steps=steps,
            )
            for steps in (slice(None), slice(half), slice(half, None))
        ]


def _layer_bytes(run: Run) -> tuple[tuple[int, ...], ...]:
    blocks = (unwrap_model(model).decoder for model in run.chunks)
    return tuple(tuple(map(held_bytes, block.layers)) for block in blocks)


def _layer_share(run: Run, layer_bytes: Sequence[Sequence[int]]) -> LayerShare:
    """Measures chunks that hold more than layers, and each layer of those with several kinds."""
    chunks = [(chunk, unwrap_model(model)) for chunk, model in enumerate(run.chunks)]
    unlike = {
        chunk: model.decoder.layers for chunk, model in chunks if len(set(layer_bytes[chunk])) > 1
    }
    models = {
        chunk: (model, model.decoder)
        for chunk, model in chunks
        if model.pre_process or model.post_process or model.mtp_process or chunk in unlike
    }
    return LayerShare(models, run.job.accelerator.clock(), unlike)


def loads_of(
    measured: Sequence[StepMeasurements],
    placement: Placement,
    partition: Sequence[int],
    *,
    units: float,
    steps: slice = slice(None),
) -> Loads:
    """Works out what a layer takes on each rank, and what stages take beside their layers.

    Of several replicas the slowest counts, for the others wait for it. A rank without layers is
    taken for one like the middle one of the others.

    Args:
        measured: by every rank of the job.
        placement: where stages live.
        partition: layers of each stage.
        units: microbatches that a rank keeps at a time.
        steps: those that count.
    """
    stages, ranks = placement.num_stages, placement.num_ranks
    takes: list[Times] = [(0.0, 0.0, 0.0)] * stages
    shares, layers = [1.0] * stages, list[list[tuple[int, float]]]([[]] * stages)
    for own in measured:
        for chunk in range(placement.num_chunks):
            stage = placement.stage_of(own.pp_rank, chunk)
            typical = _typical(own.steps[steps], chunk)
            if not layers[stage] or sum(typical) > sum(takes[stage]):
                takes[stage], shares[stage] = typical, own.shares[chunk]
                layers[stage] = [*own.layers_in(chunk, partition[stage])]
    sizes = [size for stage in layers for size, _ in stage]
    numbers = {size: kind for kind, size in enumerate(sorted({*sizes} or {0}))}
    kinds = tuple(numbers[size] for size in sizes)
    sums, counts = np.zeros((ranks, len(numbers), 3)), np.zeros((ranks, len(numbers)))
    for stage in range(stages):
        rank = placement.locate(stage)[0]
        for size, part in layers[stage]:
            sums[rank, numbers[size]] += np.array(takes[stage]) * shares[stage] * part
            counts[rank, numbers[size]] += 1
    most, relative = [math.inf] * ranks, [(1.0,) * len(numbers)] * ranks
    for own in measured:
        limit, wanted = _most_layers(own, placement, partition, units, sorted(numbers))
        if limit < most[own.pp_rank]:
            most[own.pp_rank], relative[own.pp_rank] = limit, wanted
    beside = []
    for stage in range(stages):
        rest = 1.0 - shares[stage] if partition[stage] else 1.0
        forward, backward, weight = takes[stage]
        beside.append((forward * rest, backward * rest, weight * rest))
    return Loads(
        placement=placement,
        partition=tuple(partition),
        layer_s=_all_times(sums, counts),
        beside_s=tuple(beside),
        most_layers=tuple(most),
        kinds=kinds,
        sizes=tuple(relative),
    )


def _all_times(sums: Any, counts: Any) -> tuple[tuple[Times, ...], ...]:
    """Returns what a layer of each kind takes on each rank, also where none was measured.

    A kind has a time and a rank a slowness, whose products come near what was measured. A rank
    whose kinds no other has is taken for a usual one.

    Args:
        sums: seconds of the layers measured, ``[ranks, kinds, 3]``.
        counts: of them, ``[ranks, kinds]``.
    """
    ranks, kinds = counts.shape
    means = sums / np.maximum(counts, 1)[:, :, None]
    whole, every = means.sum(axis=2), np.arange(kinds)
    slowness = np.ones(ranks)

    def middle() -> Any:
        """Returns the usual rank of those that have each kind."""
        usual = np.where(counts > 0, whole / slowness[:, None], np.inf)
        has = np.maximum((counts > 0).sum(axis=0) - 1, 0)
        return np.argsort(usual, axis=0, kind="stable")[has // 2, every]

    for _ in range(_FITS):
        source = middle()
        usual = np.maximum(whole[source, every] / slowness[source], _LEAST_S)
        ratios = (whole / usual * counts).sum(axis=1)
        measured = counts.sum(axis=1)
        found = np.where(measured > 0, ratios / np.maximum(measured, 1), 1.0)
        slowness = np.maximum(found, _LEAST_S)
    source = np.where(counts > 0, np.arange(ranks)[:, None], middle())
    factor = slowness[:, None] / slowness[source]
    times = means[source, every] * factor[:, :, None]
    return tuple(tuple(map(tuple, kinds)) for kinds in times.tolist())


def _typical(steps: Sequence[Lanes], chunk: int) -> Times:
    """Returns a chunk's median seconds of forward, backward and weight gradients."""
    found = []
    for kind in KINDS:
        values = [lanes[kind, chunk] for lanes in steps if (kind, chunk) in lanes]
        found.append(statistics.median(values) / 1e9 if values else 0.0)
    return found[0], found[1], found[2]


def _most_layers(
    own: StepMeasurements,
    placement: Placement,
    partition: Sequence[int],
    units: float,
    kinds: Sequence[int],
) -> tuple[float, tuple[float, ...]]:
    """Returns the layers that a rank's memory allows; never fewer than it has.

    Args:
        own: of the rank.
        placement, partition, units: as in :func:`loads_of`.
        kinds: bytes that a layer of each kind holds.

    Returns:
        Their number, counted in the mean layer of the rank, and the size of each kind in those.
    """
    chunks = range(placement.num_chunks)
    counts = [partition[placement.stage_of(own.pp_rank, chunk)] for chunk in chunks]
    layers = sum(counts)
    if not layers or not own.kept_bytes:
        return math.inf, (1.0,) * len(kinds)
    kept = sum(own.kept_bytes) * units
    room = own.free_bytes * (1 - KEPT_FREE) - kept
    each = max(1.0, (kept + sum(own.held_bytes)) / layers)
    here = [size for chunk in chunks for size, _ in own.layers_in(chunk, counts[chunk])]
    sizes = tuple(1 + (size - statistics.fmean(here)) / each for size in kinds)
    return layers + max(0, math.floor(room / each)), sizes


def _reason(loads: Loads) -> str:
    """Names the ranks that are slow, in one clause."""
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
    return f"rank {busiest} has {paces[busiest] / max(middle, 1e-9) - 1:.0%} more to do than others"
