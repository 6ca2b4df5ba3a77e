"""Simulates runs of a ``Pipeline`` with a different order, distribution or partition.

The order of microbatches and their distribution over replicas matter if the microbatches differ in
cost. The partition divides the segments (parts of stages) among the stages. Recorded steps are
simulated under the schedule of the run::

    recorded microbatches ──> assigned to replicas by cost ─┐
                        └───────────────────────────────────┴──> ordered by cost ──> step time
    recorded segments ──> another partition (each stage's time divided among its segments)

The simulation assumes that all ranks are equally fast, as do the settings ``order`` and ``dealing``
of ``Pipeline``. Every microbatch then takes equally long on any replica, and every segment on any
rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.schedule_specs import built_in_schedules
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.microbatch_assignment import deal
from megatron.adaptive.schedule.stage_placement import frozen_stages_of
from megatron.adaptive.schedule.workload import order_by_cost
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.trace_format import TraceHeader
from megatron.adaptive.trace.whatif.advice import PIPELINE
from megatron.adaptive.trace.whatif.operations import Floats, Operations
from megatron.adaptive.trace.whatif.replay import ALIKE, RecordedStep, recorded_replicas

STEPS = 4
"""Maximum number of steps to simulate."""
UNEQUAL = 0.05
"""Minimum relative spread of microbatch costs for simulating other orders and distributions.

Smaller differences are considered noise.
"""
_MOST_SEGMENTS = 1 << 12
"""Maximum number of segments in a run for which better partitions are searched."""
_ROUNDS = 4
"""Maximum number of rounds in the search for a better partition. Each round moves one segment."""
_TEXTS = {"order": "ordered", "dealing": "dealt over replicas"}


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """Describes the settings with which a step is simulated.

    Attributes:
        is_dealt: Whether microbatches are distributed over replicas by cost.
        is_ordered: Whether each replica orders its microbatches by cost.
        partition: Number of segments in each stage; empty to keep the recorded partition.
    """

    is_dealt: bool = False
    is_ordered: bool = False
    partition: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class ContentAnswers:
    """Contains the seconds that a step of a ``Pipeline`` would save with other settings.

    Attributes:
        saved_s: Seconds that a step would save, keyed by (description, settings) of the change.
        note: Reason why nothing could be simulated; empty if the simulation succeeded.
        covers_partitions: Whether other partitions of the segments were also simulated.
    """

    saved_s: dict[tuple[str, str], float]
    note: str = ""
    covers_partitions: bool = False


def content_answers(run: RunTrace, parts: Sequence[Operations]) -> ContentAnswers:
    """Simulates steps of a ``Pipeline`` run with other orders, distributions and partitions.

    Args:
        run: Trace of the run.
        parts: Operations of the steps, with one entry per group of steps read together.
    """
    header = next(iter(run.ranks.values())).header
    if len(header.layers) != parts[0].where.num_stages or sum(header.layers) > _MOST_SEGMENTS:
        # Other partitions cannot be simulated if the current partition is unknown or has too many
        # segments. An empty partition means that none are simulated.
        header = replace(header, layers=())
    steps: list[list[RecordedStep]] = []
    error = 0.0
    iterations = [(ops, int(step)) for ops in parts for step in np.unique(ops.iteration)]
    chosen = np.unique(np.linspace(0, len(iterations) - 1, STEPS).round().astype(int))
    try:
        for ops, iteration in (iterations[index] for index in chosen):
            replicas = recorded_replicas(ops, iteration)
            if replicas is None:
                continue
            errors = [abs(step.simulated_s(header) / span_s - 1) for step, span_s in replicas]
            error = max(error, *errors)
            if max(errors) <= ALIKE:
                steps.append([step for step, _ in replicas])
    except ScheduleError as refusal:
        return ContentAnswers(
            {}, f"changes of order, dealing and partition are not simulated: {refusal}"
        )
    if not steps:
        reason = f"simulated steps differ by {error:.0%} from the recorded ones"
        if not error:
            reason = "the trace lacks F or B actions of some microbatches"
        return ContentAnswers(
            {}, f"changes of order, dealing and partition are not simulated: {reason}"
        )
    simulation = _Simulation(header, steps, _segment_shares(run, header))
    return ContentAnswers(simulation.answers(), covers_partitions=simulation.covers_partitions)


def _segment_shares(run: RunTrace, header: TraceHeader) -> Floats:
    """Returns each segment's fraction of the time of its stage, ``[3, segments]``.

    The rows are F, B and W. The fractions come from measured times of segments, or from the
    estimated work if the trace contains no such times. W is not measured. Its time is divided among
    the segments that have a B, in proportion to their sums of F and B.
    """
    count = sum(header.layers)
    times = np.zeros((3, count))
    for trace in run.ranks.values():
        for iteration in trace.iterations:
            for segment, forward_ns, backward_ns, *_ in trace.layers(iteration):
                if segment < count:
                    times[:, segment] += forward_ns, backward_ns, forward_ns + backward_ns
    if not times[2].all():
        work = header.layer_work if len(header.layer_work) == count else ()
        times[:] = work or [1.0] * count
    times[2, times[1] == 0] = 0.0
    shares = np.zeros_like(times)
    for part in _slices(header.layers):
        totals = times[:, part].sum(axis=1, keepdims=True)
        # If no times were measured, for example for the backward passes of frozen segments, use
        # equal shares.
        equal = np.full_like(times[:, part], 1 / max(1, part.stop - part.start))
        shares[:, part] = np.divide(times[:, part], totals, out=equal, where=totals > 0)
    return shares


def _slices(partition: Sequence[int]) -> list[slice]:
    """Returns the range of segments in each stage of ``partition``."""
    ends = list(itertools.accumulate(partition))
    return [slice(end - size, end) for end, size in zip(ends, partition, strict=True)]


class _Simulation:
    """Simulates recorded steps with other settings.

    Args:
        header: Trace header of any rank.
        steps: Steps of all replicas.
        shares: ``[3, segments]``, each segment's fraction of the F, B and W times of its stage.
    """

    def __init__(
        self, header: TraceHeader, steps: Sequence[Sequence[RecordedStep]], shares: Floats
    ) -> None:
        self._header = header
        self._steps = steps
        spec = built_in_schedules().get(header.schedule)
        is_grouped = spec is not None and spec.groups_microbatches and header.num_chunks > 1
        self._group = header.num_ranks if is_grouped else 1
        per_rank = 0 if spec is None else spec.microbatches_per_rank
        self._least = max(self._group, per_rank * header.num_ranks)
        self._stage_of = np.repeat(np.arange(len(header.layers)), header.layers)
        self._shares = shares

    @property
    def covers_partitions(self) -> bool:
        """Whether the sizes of all stages are known, so that other partitions can be simulated."""
        return bool(self._header.layers) and 0 not in self._header.layers

    def answers(self) -> dict[tuple[str, str], float]:
        """Returns the seconds saved per step, keyed by (description, settings) of each change."""
        header = self._header
        now_s = self._mean_s(Treatment())
        is_unequal = any(map(self._is_unequal, self._steps))
        settings = {
            "order": is_unequal and header.order == "given",
            "dealing": is_unequal and header.dealing == "turns" and len(self._steps[0]) > 1,
        }
        open_settings = [name for name, is_open in settings.items() if is_open]
        # If the run orders its microbatches, it must order them again after each redistribution.
        was_ordered = header.order not in ("", "given")
        partition = self._best_partition()
        saved: dict[tuple[str, str], float] = {}
        for names in _subsets(open_settings):
            for cut in dict.fromkeys(((), partition)):
                if not names and not cut:
                    continue
                treatment = Treatment(
                    is_dealt="dealing" in names,
                    is_ordered="order" in names or (was_ordered and "dealing" in names),
                    partition=cut,
                )
                try:
                    then_s = self._mean_s(treatment)
                except ScheduleError:
                    # The schedule does not support these numbers of microbatches per replica.
                    continue
                saved[_described(names, cut, header.layers)] = now_s - then_s
        return saved

    def _mean_s(self, treatment: Treatment) -> float:
        return float(np.mean([self._step_s(step, treatment) for step in self._steps]))

    def _step_s(self, step: Sequence[RecordedStep], treatment: Treatment) -> float:
        """Simulates a step with the settings ``treatment``, and returns its time in seconds.

        ``step`` contains the steps of all replicas. The result is the time of the slowest replica.
        """
        replicas = list(step)
        if treatment.partition:
            replicas = [self._cut(replica, treatment.partition) for replica in replicas]
        if treatment.is_dealt:
            together = _in_turns(replicas)
            replicas = [
                together.with_microbatches(share)
                for share in deal(
                    [together.costs_s] * len(replicas), group=self._group, least=self._least
                )
            ]
        if treatment.is_ordered:
            ranks = self._header.num_ranks
            replicas = [
                replica.with_microbatches(order_by_cost(replica.costs_s, ranks))
                for replica in replicas
            ]
        return max(replica.simulated_s(self._header) for replica in replicas)

    def _is_unequal(self, step: Sequence[RecordedStep]) -> bool:
        """Returns whether the costs of a step's microbatches differ by more than noise."""
        costs = [cost for replica in step for cost in replica.costs_s]
        return float(np.std(costs)) > UNEQUAL * float(np.mean(costs))

    def _cut(self, step: RecordedStep, partition: Sequence[int]) -> RecordedStep:
        """Returns a copy of ``step`` in which ``partition`` divides the segments into stages."""
        segments = step.durations_s[:, self._stage_of] * self._shares[:, :, None]
        stages = [segments[:, part].sum(axis=1) for part in _slices(partition)]
        # If a trained segment moves to a frozen stage, this stage needs backward passes.
        has_backward = segments[1].any(axis=1)
        frozen_segments = int(has_backward.argmax()) if has_backward.any() else 0
        return replace(
            step,
            durations_s=np.stack(stages, axis=1),
            frozen_stages=frozen_stages_of(partition, frozen_segments),
        )

    def _best_partition(self) -> tuple[int, ...]:
        """Returns the partition with the shortest step time.

        Returns an empty tuple if that is the recorded partition. The search starts from the
        recorded partition or the most even partition, whichever is better. It moves single segments
        as long as this makes the steps shorter.
        """
        recorded = self._header.layers
        stages = len(recorded)
        if not self.covers_partitions or len(self._stage_of) <= stages:
            return ()
        together = _joined([replica for step in self._steps for replica in step])
        kinds_s = together.durations_s.sum(axis=2)
        segments_s = (kinds_s[:, self._stage_of] * self._shares).sum(axis=0)
        even = _even_partition(segments_s, stages)

        def step_s(partition: tuple[int, ...]) -> float:
            return self._mean_s(Treatment(partition=partition))

        best_s, best = min((step_s(start), start) for start in (recorded, even))
        for _ in range(_ROUNDS):
            moved = [(step_s(partition), partition) for partition in _neighbors(best)]
            if not moved or min(moved)[0] >= best_s:
                break
            best_s, best = min(moved)
        return () if best == recorded else best


def _joined(steps: Sequence[RecordedStep]) -> RecordedStep:
    """Returns a step with the microbatches of all ``steps``."""
    sizes = [step.sizes for step in steps]
    return RecordedStep(
        np.concatenate([step.durations_s for step in steps], axis=2),
        np.concatenate([step.delays_ps for step in steps], axis=2),
        max(step.pieces for step in steps),
        frozen_stages=min(step.frozen_stages for step in steps),
        sizes=sum(sizes, ()) if all(sizes) else (),
    )


def _in_turns(replicas: Sequence[RecordedStep]) -> RecordedStep:
    """Returns a step with the microbatches of all replicas, in their order in the whole batch.

    This assumes that the batch was distributed over the replicas round-robin.
    """
    places = [
        (index, replica)
        for replica, step in enumerate(replicas)
        for index in range(step.durations_s.shape[2])
    ]
    return _joined(replicas).with_microbatches(sorted(range(len(places)), key=places.__getitem__))


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [part for size in range(len(names) + 1) for part in itertools.combinations(names, size)]


def _neighbors(partition: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns all partitions that result from moving one segment to a neighboring stage."""
    partitions = []
    for stage in range(len(partition) - 1):
        for step in (1, -1):
            moved = list(partition)
            moved[stage] += step
            moved[stage + 1] -= step
            if min(moved) > 0:
                partitions.append(tuple(moved))
    return partitions


def _even_partition(costs: Floats, stages: int) -> tuple[int, ...]:
    """Returns the partition into ``stages`` stages that minimizes the cost of the costliest stage.

    ``costs`` contains the cost of each segment.
    """
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    count = len(costs)
    largest = np.full((stages + 1, count + 1), np.inf)
    begin = np.zeros((stages + 1, count + 1), dtype=int)
    largest[0, 0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            each = np.maximum(largest[stage - 1, :end], sums[end] - sums[:end])
            begin[stage, end] = int(np.argmin(each))
            largest[stage, end] = each[begin[stage, end]]
    sizes = []
    end = count
    for stage in range(stages, 0, -1):
        sizes.append(end - int(begin[stage, end]))
        end = int(begin[stage, end])
    return tuple(reversed(sizes))


def _described(
    names: Sequence[str], partition: tuple[int, ...], layers: Sequence[int]
) -> tuple[str, str]:
    """Returns two texts: the description of a change, and the new settings.

    ``names`` contains the settings that change to ``"time"``. ``partition`` contains the new
    numbers of segments per stage, or is empty if they do not change. ``layers`` contains the
    recorded numbers.
    """
    texts = [_TEXTS[name] for name in names]
    settings = [f'{name}="time"' for name in names]
    text = f"microbatches {' and '.join(texts)} by cost" if texts else ""
    if partition:
        cut = format_partition(partition)
        text += f"{', and ' if text else ''}partition {cut} instead of {format_partition(layers)}"
        settings.append(f'{PIPELINE.of_partition(cut)} (or repartition="auto")')
    return text, ", ".join(settings)
