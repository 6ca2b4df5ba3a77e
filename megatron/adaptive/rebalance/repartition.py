"""Implements ``--repartition auto``: moves layers off a slow rank if this makes steps faster.

Every ``--repartition-interval`` iterations, rank 0 gathers the measurements of all ranks. It
simulates steps with other partitions (numbers of layers per stage) and finds the fastest partition.
If the predicted gain is large enough, all ranks switch to that partition at the same time::

    steps of the interval    ──> loads of ranks and stages ──> fastest partition, simulated
    each half of these steps ──> must also predict the gain    (rebalance/judgement.py)

If a move gains less than half of the predicted gain, the required gain of the next move is doubled.
If a move gains nothing, because the decision was based on noise, the move is undone.

If documents are packed and cut into slices of one length (``--slice-tokens``), steps have different
numbers of slices. All slices have the same number of tokens, so each slice is then measured and
simulated like a microbatch, and step times are scaled to the number of slices of the first step.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

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
from megatron.adaptive.errors import CheckpointError
from megatron.adaptive.gpt.initialize import TrainingJob
from megatron.adaptive.gpt.setup import Run, payload_shape
from megatron.adaptive.planner.choose_partition import Decision, Loads, travelling
from megatron.adaptive.profiling.pipeline_times import LayerShare, Sample
from megatron.adaptive.rebalance.auto_schedule import Tuner, held_bytes, memory_of
from megatron.adaptive.rebalance.judgement import (
    MOST_STEPS,
    Lanes,
    Move,
    StepMeasurements,
    compare,
    judge,
    loads_over,
    step_seconds,
)
from megatron.adaptive.rebalance.move_stages import with_schedule
from megatron.adaptive.rebalance.time_limit import LIMIT_S, limit_of_search
from megatron.adaptive.schedule.action import each_count, item_count
from megatron.adaptive.schedule.catalog import Candidate
from megatron.adaptive.schedule.choose_slices import SliceTrial

_WARM_UP = 1
_JUDGED_STEPS = 8
"""Number of steps before the first check of a move by ``--pipeline-schedule auto``, and between the
first and the second check."""
_MOST_BETWEEN = 128
"""Maximum number of steps between two checks of a move by ``--pipeline-schedule auto``."""


def resume_partition(job: TrainingJob) -> TrainingJob:
    """Returns a copy of ``job`` with the partition of the checkpoint that the job loads.

    The function returns ``job`` unchanged if ``--repartition auto`` is not set, if there is no
    checkpoint, or if the checkpoint has a different number of pipeline ranks, chunks or layers. An
    unreadable checkpoint is ignored here, because loading it later reports the error. All ranks
    must call this function together.
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
        self._steps: deque[tuple[Lanes, float]] = deque(maxlen=MOST_STEPS)
        self._since = 0
        self._promise: Move | None = None
        self._first_partition = run.job.config.layers_per_stage
        self._checks = 0
        self._share: LayerShare | None = None
        self._usual_items = 0
        self._most_slices = 0
        self._slices_per_row = 1.0
        self.adopt(run)

    def adopt(self, run: Run) -> None:
        """Starts to measure ``run``, which has just been built."""
        self._run = run
        self._skip = _WARM_UP
        self._partition = run.job.config.layers_per_stage
        self._checks = 0
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
        """Gathers the measurements of all ranks, and computes the loads of ranks and stages.

        All ranks must call this method together. ``num_microbatches`` is the number of microbatches
        per step.

        Returns:
            Loads over all steps since the last decision, over the first half of these steps, and
            over the second half.
        """
        return self._loads(self._run.job.gather(self._measurements()), num_microbatches)

    @property
    def is_needed(self) -> bool:
        """Returns whether layers may move later.

        If ``--pipeline-schedule auto`` has moved layers, they may move again, because the reason
        for a slow rank may disappear.
        """
        has_moved = self._partition != self._first_partition
        return self._may_move or self._promise is not None or has_moved

    @property
    def _steps_to_check(self) -> int:
        """Returns the number of steps between the last check (or move) and the next check."""
        if self._may_move:
            return self._interval
        # Layers that have not moved for a long time are unlikely to move, so check them less often.
        return min(_JUDGED_STEPS << max(0, self._checks - 1), _MOST_BETWEEN)

    def promise_of(self, decision: Decision) -> Move | None:
        """Returns the move of layers in ``decision``, so that its gain can be checked later.

        All ranks must call this method together.

        Args:
            decision: Decision, equal on all ranks.

        Returns:
            Move, with the step time that was measured before it. The result is ``None`` if layers
            stay, or if no step without a move was simulated.
        """
        if decision.partition is None or decision.present_s is None or decision.step_s is None:
            return None
        spans_s = self._run.job.gather(tuple(span_s for _, span_s in self._steps))
        return Move(
            partition=decision.partition,
            present_s=decision.present_s,
            step_s=decision.step_s,
            why="auto",
            before_s=step_seconds(spans_s),
            former=self._partition,
        )

    def expect(self, promise: Move, run: Run) -> None:
        """Starts to measure the rebuilt ``run``, to check whether moving layers made steps faster.

        A rank that was slow in the first steps may become fast again. Then layers move again, and
        each move is checked. The checks end when the first partition is restored.

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

    def after_step(
        self, times: RankTimes, num_microbatches: int, *, may_decide: bool = True
    ) -> Move | None:
        """Adds the times of a training step, and decides at the end of an interval.

        The call at the end of an interval is collective over all ranks.

        Args:
            times: Durations of this rank's actions in the step, and of the step itself.
            num_microbatches: Number of microbatches per step.
            may_decide: Whether layers may move now. Otherwise, the step is only measured.

        Returns:
            Move to make before the next step, equal on all ranks, or ``None`` if layers stay.
        """
        if self._skip:
            self._skip -= 1
            self._forget()
            return None
        self._since += 1
        sample = Sample(pp_rank=0)
        sample.add(times.actions, self._run.job.config.constant_slices)
        medians = {lane: statistics.median(values) for lane, values in sample.durations_ns.items()}
        self._steps.append((medians, times.span_s * self._step_scale(num_microbatches)))
        if not may_decide or not self.is_needed or self._since < self._steps_to_check:
            return None
        measured = self._run.job.gather(self._measurements())
        move, step_s, is_late = self._run.job.on_first(
            lambda: self._decide(measured, num_microbatches)
        )
        if is_late:
            limit_s = limit_of_search(LIMIT_S, self._run.job.timeout)
            self._message(
                "  repartition: layers stay, because no partition was simulated within "
                f"{limit_s:g} s"
            )
        way_back = self._compare(step_s)
        self._checks += 1
        self._forget()
        return way_back if move is None or move.gain < self._gain else move

    def _step_scale(self, num_microbatches: int) -> float:
        """Returns the factor by which a step's time is scaled for comparison with other steps.

        Args:
            num_microbatches: Number of microbatches of the step.
        """
        config, slices = self._run.job.config, self._run.slices
        if slices is None or config.slice_tokens is None or not config.data.variable_seq_lengths:
            return 1.0
        items = item_count(num_microbatches, slices.count)
        longest = max(each_count(num_microbatches, slices.count), default=0)
        self._most_slices = max(self._most_slices, longest)
        self._usual_items = self._usual_items or items
        self._slices_per_row = items / num_microbatches
        return self._usual_items / items

    def _in_slices(self, candidate: Candidate) -> Candidate:
        """Returns ``candidate``, with slices counted as microbatches if documents are packed.

        If documents are packed, the number of slices varies between steps, so each slice counts as
        a microbatch. Otherwise, ``candidate`` is returned unchanged.
        """
        if not self._usual_items:
            return candidate
        cap = candidate.cap
        if cap is not None:
            # Raise the cap to the number of slices in the longest row of documents, because a rank
            # can always keep the activations of one row.
            cap = max(cap * self._slices_per_row, float(self._most_slices))
        return replace(candidate, cap=cap, num_slices=1)

    def moved(self, move: Move, run: Run, seconds: float) -> None:
        """Logs a move that was made, and starts to measure the new run.

        Args:
            move: Move that was made.
            run: Run that was built for the new partition.
            seconds: Duration of the move in seconds.
        """
        before = format_partition(self._partition)
        layers = travelling(self._partition, move.partition, run.placement)
        self._message(
            f"  repartition: {before} -> {format_partition(move.partition)}: {move.why}; "
            f"{move.prediction}{layers} layer{'s' * (layers != 1)} moved in {seconds:.3f} s"
        )
        self._promise = None if move.is_return else move
        self.adopt(run)

    def _compare(self, step_s: float) -> Move | None:
        """Logs the gain of the last move, and sets the required gain of the next move.

        Args:
            step_s: Step time in seconds, measured since the move.

        Returns:
            Move that undoes the last move, or ``None`` if there was no move or the move made steps
            faster.
        """
        promise, self._promise = self._promise, None
        if promise is None:
            return None
        least_gain = self._run.job.config.schedule.repartition_gain
        outcome = compare(promise, step_s, self._gain, least_gain, self._message)
        self._gain = outcome.gain
        return outcome.way_back

    def _measurements(self) -> StepMeasurements:
        assert self._share is not None
        run, runs = self._run, self._run.forward_backward
        assert isinstance(runs, ForwardBackward)
        free, kept, held = memory_of(run.job, runs, run.chunks)
        kept = tuple(round(nbytes / self._slices_per_row) for nbytes in kept)
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

        ``measured`` contains the measurements of all ranks, and ``num_microbatches`` is the number
        of microbatches per step.

        Returns:
            Tuple of three values: move to make or ``None``, measured step time in seconds, and
            whether the search exceeded its time limit.
        """
        run = self._run
        assert isinstance(run.forward_backward, ForwardBackward)
        candidate = self._in_slices(run.forward_backward.orders.candidate(num_microbatches))
        num_microbatches = self._usual_items or num_microbatches
        partition = run.job.config.layers_per_stage
        limit_s = limit_of_search(LIMIT_S, run.job.timeout)
        return judge(measured, candidate, partition, num_microbatches, self._gain, limit_s=limit_s)

    def _loads(self, measured: Sequence[StepMeasurements], num_microbatches: int) -> list[Loads]:
        run = self._run
        assert isinstance(run.forward_backward, ForwardBackward)
        candidate = run.forward_backward.orders.candidate(num_microbatches)
        return loads_over(measured, candidate, run.job.config.layers_per_stage, num_microbatches)


def _layer_bytes(run: Run) -> tuple[tuple[int, ...], ...]:
    blocks = (unwrap_model(model).decoder for model in run.chunks)
    return tuple(tuple(map(held_bytes, block.layers)) for block in blocks)


def _layer_share(run: Run, layer_bytes: Sequence[Sequence[int]]) -> LayerShare:
    """Starts to measure the fraction of each chunk's forward time that is spent in its layers.

    A chunk without an embedding or a loss is measured only if its layers differ in size
    (``layer_bytes``). Otherwise, its fraction is 1. Layers that differ in size are timed one by
    one.
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


def make_tuner(
    run: Run,
    layers: Repartitioner | None,
    say: Callable[[str], None],
    *,
    numbers: Sequence[int] = (),
    trial: SliceTrial | None = None,
    only_pace: bool = False,
) -> Tuner:
    """Creates a tuner for ``run``, which the trainer has built.

    Args:
        run: Run to measure.
        layers: Object that measures the layers, or ``None`` if neither stages nor layers may move.
        say: Function that writes a line to the log.
        numbers: Numbers of slices to choose from. Empty to keep the current number.
        trial: Earlier measurements with a different number of slices, or ``None``.
        only_pace: Whether to keep the schedule, and to update only its pace with measured values
            (see :class:`Tuner`).
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
