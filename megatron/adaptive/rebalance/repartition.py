"""Implements ``--repartition auto``: moves layers off a slow rank if that makes steps faster.

Every ``--repartition-interval`` iterations, rank 0 gathers the measurements of all ranks. It
simulates steps with other partitions (numbers of layers per stage) and finds the fastest one. If
the predicted gain is large enough, all ranks change to that partition at the same time::

    steps of the interval    ──> loads of ranks and stages ──> fastest partition, simulated
    each half of these steps ──> must predict the gain too     (planner/choose_partition.py)

If a move gains less than half of what was predicted, the gain required for the next one is doubled.
If it gains nothing, for it was decided on noise, the layers go back.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron.adaptive.checkpoint.folder import CheckpointFolder
from megatron.adaptive.checkpoint.megatron_state import mesh_shape
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.sequence_slices import SliceCut
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.engine.stages import ForwardBackward
from megatron.adaptive.errors import CheckpointError, ScheduleError
from megatron.adaptive.gpt.initialize import TrainingJob
from megatron.adaptive.gpt.setup import Run, payload_shape
from megatron.adaptive.planner.choose_partition import (
    Decision,
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
from megatron.adaptive.rebalance.auto_schedule import Tuner, held_bytes, memory_of
from megatron.adaptive.rebalance.move_stages import with_schedule
from megatron.adaptive.rebalance.time_limit import LIMIT_S, result_within
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.choose_slices import SliceTrial
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.stage_placement import Placement

KINDS = (ActionKind.F, ActionKind.B, ActionKind.W)
_WARM_UP = 1
_MOST_STEPS = 32
_LEAST_STEPS = 3
_JUDGED_STEPS = 8
"""Number of steps after which a move that ``auto`` made, or one that follows it, is checked."""
_SLOW = 1.05
_FITS = 32
_LEAST_S = 1e-12
_PAYS = 0.01
"""Minimum fraction of the step time that a move must have saved, or the layers go back."""

Lanes = dict[tuple[ActionKind, int], float]
"""Maps (kind of action, chunk) to the median duration of a rank's actions in a step, in ns."""


@dataclass(frozen=True, kw_only=True)
class StepMeasurements:
    """Holds what a rank has measured since the last decision.

    Attributes:
        pp_rank: Pipeline rank.
        steps: Median durations of the rank's actions, one ``Lanes`` per step.
        spans_s: Duration of each of these steps in seconds.
        shares: Fraction of a forward pass that the chunk's layers take, without embedding and loss;
            one per chunk.
        free_bytes: Size of the memory that is free for activations, in bytes.
        kept_bytes: Size in bytes of the activations that a microbatch keeps, per chunk.
        held_bytes: Size in bytes of weights, gradients and optimizer state, per chunk.
        layer_bytes: Size in bytes of each layer, per chunk. Layers of equal size count as the same
            kind of layer. Empty if all layers of the model have the same size.
        parts: Fraction of the layers' total time that each layer takes, per chunk; empty if all
            layers are equal.
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
        """Yields (size in bytes, fraction of the layers' total time) of each layer in a chunk.

        Args:
            chunk: Index of the chunk on this rank.
            count: Number of layers in the chunk.
        """
        sizes = self.layer_bytes[chunk] if self.layer_bytes else (0,) * count
        parts = self.parts[chunk] if self.parts else ()
        return zip(sizes, parts or (1 / max(1, count),) * count, strict=True)


@dataclass(frozen=True, kw_only=True)
class Move(PartitionMove):
    """Describes a move of layers between ranks, which takes place before the next step.

    Attributes:
        why: Reason for the move, printed in the log.
        before_s: Measured step time before the move, in seconds.
        former: Partition before the move.
        is_return: Whether the move takes back the one before, which gained nothing.
    """

    why: str
    before_s: float
    former: Partition
    is_return: bool = False


def resume_partition(job: TrainingJob) -> TrainingJob:
    """Returns the job with the partition of the checkpoint that it loads. Collective.

    The job is returned unchanged without ``--repartition auto``, without a checkpoint to load, or
    if the checkpoint has another number of pipeline ranks, chunks or layers. A checkpoint that
    cannot be read is ignored here, because loading it later reports the error.
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
    shape = mesh_shape(config)
    saved_shape = manifest["shape"]
    saved = manifest["config"].get("schedule", {}).get("partition")
    alike = all(shape[axis] == saved_shape.get(axis) for axis in ("pipeline", "chunks"))
    if saved is None or not alike or sum(saved) != config.model.num_layers:
        return None
    return tuple(saved)


class Repartitioner:
    """Measures the steps of a run, and decides when to move layers between ranks.

    Every rank has a repartitioner, because measuring and deciding are collective.

    Args:
        run: Run whose steps are measured.
        message: Function that writes a line to the log.
    """

    def __init__(self, run: Run, message: Callable[[str], None]) -> None:
        settings = run.job.config.schedule
        self._message = message
        self._may_move = settings.repartition != "off"
        self._interval = settings.repartition_interval
        self._gain = settings.repartition_gain
        self._steps: deque[tuple[Lanes, float]] = deque(maxlen=_MOST_STEPS)
        self._since = 0
        self._promise: Move | None = None
        self._share: LayerShare | None = None
        self.adopt(run)

    def adopt(self, run: Run) -> None:
        """Starts to measure a run that has just been built, or built again after a move."""
        self._run = run
        self._skip = _WARM_UP
        self._partition = run.job.config.layers_per_stage
        self._layer_bytes = _layer_bytes(run)
        self._share = _layer_share(run, self._layer_bytes)
        self._forget()

    def close(self) -> None:
        """Stops measuring, and drops all references to the run so that its memory can be freed.

        A later call of :meth:`adopt` starts measuring again.
        """
        assert self._share is not None
        self._share.close()
        self._share = None
        del self._run

    def gather_loads(self, num_microbatches: int) -> list[Loads]:
        """Gathers the measurements of all ranks and computes their loads. Collective.

        Returns:
            Three loads: over all steps since the last decision, over their first half, and over
            their second half.
        """
        return self._loads(self._run.job.gather(self._measurements()), num_microbatches)

    @property
    def is_needed(self) -> bool:
        """Returns whether layers may move later, or a move is still to be judged."""
        return self._may_move or self._promise is not None

    def promise_of(self, decision: Decision) -> Move | None:
        """Returns the move of layers that ``auto`` has decided on, to compare it later. Collective.

        Args:
            decision: Decision, equal on all ranks.

        Returns:
            Move with the measured step time before it; ``None`` if layers stay, or if nothing was
            simulated without a move.
        """
        if decision.partition is None or decision.present_s is None or decision.step_s is None:
            return None
        spans_s = self._run.job.gather(tuple(span_s for _, span_s in self._steps))
        return Move(
            partition=decision.partition,
            present_s=decision.present_s,
            step_s=decision.step_s,
            why="auto",
            before_s=_step_s(spans_s),
            former=self._partition,
        )

    def expect(self, promise: Move, run: Run) -> None:
        """Starts to measure a run that ``auto`` has built again, to check its move of layers.

        What slowed a rank in the first steps may have passed since. Then layers move again, and
        each move is checked, until a check moves nothing.

        Args:
            promise: Move that was made.
            run: Run that was built.
        """
        self._promise = promise
        self.adopt(run)

    def _forget(self) -> None:
        self._steps.clear()
        self._since = 0
        assert self._share is not None
        self._share.begin()

    def after_step(self, times: RankTimes, num_microbatches: int) -> Move | None:
        """Adds the times of a training step; at the end of an interval, decides about a move.

        At the end of an interval, the call is collective over all ranks.

        Args:
            times: Durations of this rank's actions in the step, and of the step itself.
            num_microbatches: Number of microbatches per step.

        Returns:
            Move to make before the next step, equal on all ranks; ``None`` if layers stay.
        """
        if self._skip:
            self._skip -= 1
            self._forget()
            return None
        self._since += 1
        sample = Sample(pp_rank=0)
        sample.add(times.actions, self._run.job.config.constant_slices)
        medians = {lane: statistics.median(values) for lane, values in sample.durations_ns.items()}
        self._steps.append((medians, times.span_s))
        if not self.is_needed or self._since < (
            self._interval if self._may_move else _JUDGED_STEPS
        ):
            return None
        measured = self._run.job.gather(self._measurements())
        move, step_s, is_late = self._run.job.on_first(
            lambda: self._decide(measured, num_microbatches)
        )
        if is_late:
            self._message(
                f"  repartition: layers stay, as no partition was simulated within {LIMIT_S:g} s"
            )
        way_back = self._compare(step_s)
        self._forget()
        return way_back if move is None or move.gain < self._gain else move

    def moved(self, move: Move, run: Run, seconds: float) -> None:
        """Logs a move that was made, and starts to measure the run with its new partition.

        Args:
            move: Move that was made.
            run: Run that was built for the new partition.
            seconds: Duration of the move in seconds.
        """
        before = format_partition(self._partition)
        layers = travelling(self._partition, move.partition, run.placement)
        predicted = (
            ""
            if move.is_return
            else f"predicted step: {move.gain:.1%} shorter than {move.before_s * 1e3:.4g} ms; "
        )
        self._message(
            f"  repartition: {before} -> {format_partition(move.partition)}: {move.why}; "
            f"{predicted}{layers} layer{'s' * (layers != 1)} moved in {seconds:.3f} s"
        )
        self._promise = None if move.is_return else move
        self.adopt(run)

    def _compare(self, step_s: float) -> Move | None:
        """After a move, logs the measured and the predicted gain, and sets the gain required next.

        Args:
            step_s: Step time in seconds, measured since the move.

        Returns:
            Move that takes it back; ``None`` without a move, or if it made steps faster.
        """
        promise, self._promise = self._promise, None
        if promise is None:
            return None
        gained = 1 - step_s / promise.before_s
        self._message(
            f"  repartition: a step takes {step_s * 1e3:.4g} ms, {gained:.1%} less than before "
            f"({promise.gain:.1%} was predicted)"
        )
        settings = self._run.job.config.schedule
        kept = gained >= promise.gain / 2
        self._gain = settings.repartition_gain if kept else 2 * self._gain
        if gained >= _PAYS:
            return None
        return Move(
            partition=promise.former,
            present_s=step_s,
            step_s=promise.before_s,
            why="the last move gained nothing",
            before_s=step_s,
            former=promise.partition,
            is_return=True,
        )

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
        """Decides, on rank 0, whether to move layers.

        Returns:
            Layer move to make (``None`` for none), measured step time in seconds, and whether the
            search exceeded its time limit.
        """
        run = self._run
        assert isinstance(run.forward_backward, ForwardBackward)
        candidate = run.forward_backward.orders.candidate(num_microbatches)
        gain = self._gain
        count = min(len(of_rank.steps) for of_rank in measured)
        span_s = _step_s([of_rank.spans_s for of_rank in measured])
        if count < _LEAST_STEPS:
            return None, span_s, False

        whole, *halves = self._loads(measured, num_microbatches)

        def promises(loads: Loads, partition: Partition) -> bool:
            step_s = simulated_step(loads, candidate, num_microbatches)
            return step_s(partition) <= step_s(loads.partition) * (1 - gain)

        def proposal() -> tuple[PartitionMove | None, bool]:
            try:
                step_s = simulated_step(whole, candidate, num_microbatches)
                proposed = propose(whole, step_s, gain)
            except ScheduleError:
                # The schedule cannot be simulated for this number of microbatches, so no gain can
                # be predicted.
                return None, False
            if proposed is None or not all(promises(half, proposed.partition) for half in halves):
                # A half of the steps shows no such gain, so the slowness may be temporary.
                return None, False
            return proposed, False

        late: tuple[PartitionMove | None, bool] = (None, True)
        proposed, is_late = result_within(LIMIT_S, proposal, late)
        if proposed is None:
            return None, span_s, is_late
        move = Move(
            **vars(proposed),
            why=_reason(whole),
            before_s=span_s,
            former=run.job.config.layers_per_stage,
        )
        return move, span_s, False

    def _loads(self, measured: Sequence[StepMeasurements], num_microbatches: int) -> list[Loads]:
        run = self._run
        assert isinstance(run.forward_backward, ForwardBackward)
        candidate = run.forward_backward.orders.candidate(num_microbatches)
        half = min(len(of_rank.steps) for of_rank in measured) // 2
        return [
            loads_of(
                measured,
                run.placement,
                run.job.config.layers_per_stage,
                units=candidate.cap
                or default_cap(run.placement, num_microbatches, candidate.num_slices),
                steps=steps,
            )
            for steps in (slice(None), slice(half), slice(half, None))
        ]


def _step_s(spans_s: Sequence[Sequence[float]]) -> float:
    """Returns the median time in seconds of a step, which lasts as long as on its slowest rank.

    Args:
        spans_s: Time of each step in seconds, by rank.
    """
    count = min(map(len, spans_s))
    return statistics.median(max(spans[step] for spans in spans_s) for step in range(count))


def _layer_bytes(run: Run) -> tuple[tuple[int, ...], ...]:
    blocks = (unwrap_model(model).decoder for model in run.chunks)
    return tuple(tuple(map(held_bytes, block.layers)) for block in blocks)


def _layer_share(run: Run, layer_bytes: Sequence[Sequence[int]]) -> LayerShare:
    """Starts to measure the fraction of a forward pass that the layers of each chunk take.

    Chunks with an embedding or a loss are measured, because in all others the fraction is 1. Chunks
    whose layers differ in size are also measured, layer by layer.
    """
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
    """Computes the time of a layer on each rank, and that of embedding and loss on each stage.

    Of several data-parallel replicas, the slowest is used, because the others wait for it. A rank
    without layers is assumed to be as fast as the median rank.

    Args:
        measured: Measurements of each rank of the job.
        placement: Assignment of stages to ranks and chunks.
        partition: Number of layers per stage.
        units: Number of microbatches whose activations a rank holds at the same time.
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
            sums[rank, numbers[size]] += np.array(stage.times_s) * stage.share * part
            counts[rank, numbers[size]] += 1
    most = [math.inf] * ranks
    relative = [(1.0,) * len(numbers)] * ranks
    for of_rank in measured:
        limit, kind_sizes = _most_layers(of_rank, placement, partition, units, sorted(numbers))
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
    """Holds the times of a stage on its slowest data-parallel replica.

    Attributes:
        times_s: Median time in seconds of the forward, backward and separate weight-gradient pass.
        share: Fraction of a forward pass that the stage's layers take, without embedding and loss.
        layers: (Size in bytes, fraction of the layers' total time) of each layer.
    """

    times_s: Times = (0.0, 0.0, 0.0)
    share: float = 1.0
    layers: tuple[tuple[int, float], ...] = ()


def _slowest_replicas(
    measured: Sequence[StepMeasurements],
    placement: Placement,
    partition: Sequence[int],
    steps: slice,
) -> list[_Stage]:
    """Returns for each stage the times on the slowest of the data-parallel ranks that run it."""
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
    """Estimates the time of each kind of layer on each rank, also for kinds not measured there.

    Layers of the same size are one kind. The model is: time = (time of the kind) x (slowness of the
    rank). A rank that shares no kind of layer with another rank is assumed to have slowness 1.

    Args:
        sums: Total time in seconds of the measured layers, ``[ranks, kinds, 3]``; the last axis is
            forward, backward and weight-gradient pass.
        counts: Number of measured layers, ``[ranks, kinds]``.

    Returns:
        Time in seconds of forward, backward and weight-gradient pass, by rank and kind of layer.
    """
    ranks, kinds = counts.shape
    means = sums / np.maximum(counts, 1)[:, :, None]
    whole = means.sum(axis=2)
    every = np.arange(kinds)
    slowness = np.ones(ranks)

    def middle() -> Any:
        """Returns, per kind of layer, the rank with the median time among ranks that have it."""
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
    """Returns a chunk's median time in seconds for forward, backward and weight-gradient pass."""
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
    kinds: Sequence[int],
) -> tuple[float, tuple[float, ...]]:
    """Returns the number of layers that fit into a rank's memory, at least the current number.

    Args:
        measured: Measurements of the rank.
        placement: Assignment of stages to ranks and chunks.
        partition: Number of layers per stage.
        units: Number of microbatches whose activations a rank holds at the same time.
        kinds: Size in bytes of a layer, per kind of layer.

    Returns:
        Number of layers of the rank's mean layer size, and for each kind of layer its size as a
        multiple of that mean.
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
    sizes = tuple(1 + (size - statistics.fmean(present)) / mean_bytes for size in kinds)
    return layers + max(0, math.floor(room / mean_bytes)), sizes


def _reason(loads: Loads) -> str:
    """Returns a clause for the log that names the slow ranks, or else the rank with most work."""
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


def make_tuner(
    run: Run,
    layers: Repartitioner | None,
    say: Callable[[str], None],
    *,
    numbers: Sequence[int] = (),
    trial: SliceTrial | None = None,
    only_pace: bool = False,
) -> Tuner:
    """Returns the tuner of a run that the trainer has built.

    Args:
        run: Run to measure.
        layers: Object that measures the layers, ``None`` if neither stages nor layers may move.
        say: Function that writes a line to the log.
        numbers: Numbers of slices to choose from; empty to keep the present number.
        trial: Times measured earlier with another number of slices; ``None`` if there are none.
        only_pace: Whether the schedule stays, and gets only the measured relative times.
    """
    config = run.job.config
    settings = config.schedule
    may_cut = settings.partition is None or settings.repartition != "off"
    engine = run.forward_backward
    assert isinstance(engine, ForwardBackward)
    group = parallel_state.get_pipeline_model_parallel_group()
    return Tuner(
        job=run.job,
        pp_ranks=dist.get_process_group_ranks(group),
        chunks=run.chunks,
        forward_backward=engine,
        transport=None if run.wiring is None else run.wiring.transport,
        payload_shape=payload_shape(config),
        payload_dtype=run.core.pipeline_dtype,
        loads=None if layers is None else layers.gather_loads,
        gain=settings.repartition_gain if may_cut else None,
        cap=settings.activation_cap,
        can_turn=settings.pipeline_placement is None,
        timeout_s=settings.pipeline_timeout_s,
        attention_share=config.attention_share,
        slice_cut=cast(SliceCut, settings.slice_cut),
        numbers=numbers,
        trial=trial,
        only_pace=only_pace,
        say=say,
    )
