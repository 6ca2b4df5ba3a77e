"""Simulates recorded microbatches under a different schedule, or on other replicas.

A recorded duration is split into three factors: the usual duration of the stage (the median over
replicas), the slowdown of the rank relative to its peers, and a remaining factor, which comes from
the length of the microbatch or from chance. If a stage is split in two, each half is assumed to
take half as long. The factor of a rank is assumed to be the same for all work, and the factor of a
microbatch is assumed to be the same on all replicas.

Under a run-time scheduling rule, the order of actions depends on the durations, so the rule is also
simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from megatron.adaptive.config.schedule_specs import PlacementKind
from megatron.adaptive.schedule.action import SliceCounts, each_count, mean_slices
from megatron.adaptive.schedule.catalog import Candidate, make_candidate
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.microbatch_assignment import deal
from megatron.adaptive.schedule.numba_kernels import saves_time
from megatron.adaptive.schedule.policy import rule_of
from megatron.adaptive.schedule.rank_state import whole_sizes
from megatron.adaptive.schedule.workload import PS_PER_S, Workload, order_by_cost
from megatron.adaptive.trace.span_columns import Ints
from megatron.adaptive.trace.trace_format import TraceHeader
from megatron.adaptive.trace.whatif.operations import (
    BACKWARD,
    BACKWARD_COMM,
    FORWARD,
    FORWARD_COMM,
    NS_PER_S,
    WEIGHT,
    Floats,
    Operations,
    StepSlices,
    whole,
)

Counts: TypeAlias = tuple[int, ...]
"""Number of slices of each microbatch in a step."""

RULE_STEPS = 3
"""Maximum number of steps to simulate under the run's scheduling rule."""
MOST_PIPELINES = 256
"""Maximum number of pipelines (steps times replicas) to simulate under a rule.

At least one step is simulated, even if it has more pipelines.
"""
ALIKE = 0.1
"""Maximum relative difference between simulated and recorded step time to use a simulation.

The simulation uses the recorded durations. The difference is larger if the run had a different
limit on activation memory than the simulated rule, or if the trace's spans do not cover the whole
step.
"""


@dataclass(frozen=True)
class OtherSchedule:
    """Describes a schedule under which a recorded step is simulated.

    Attributes:
        name: Name of the schedule: ``1f1b``, ``seq-1f1b`` or ``adaptive``.
        chunks: Number of chunks per rank. With ``adaptive``, two chunks are placed in a V shape
            (from the first to the last rank, and back). With one chunk, the backward pass is not
            split.
        is_dealt: Whether to assign each microbatch to the replica that would finish it first, and
            to order a replica's microbatches to suit its pipeline. If False, microbatches stay on
            the replica that ran them.
        slices: Number of slices of equal duration into which each recorded microbatch is split.
            Splitting is assumed to have no cost.
        pieces: Number of pieces into which each weight-gradient action (W) is split, if the
            schedule splits the backward pass.
    """

    name: str
    chunks: int = 2
    is_dealt: bool = False
    slices: int = 1
    pieces: int = 1


@dataclass(frozen=True)
class RecordedTimes:
    """Contains the forward and backward times of the microbatches of a run with one stage per rank.

    Attributes:
        steps: Maps each iteration to one array per replica, ``[2, stages, microbatches]``, with the
            times in seconds of the forward pass and of the backward pass (B and W together). If
            microbatches are split, the last axis contains the slices of all microbatches.
        transfer_s: Median transfer time of a message in seconds.
        work: Computing cost of each stage in any unit; empty if unknown. If there are fewer than
            three replicas, these costs are needed to distinguish a slow rank from a stage with more
            work.
        slices: Function that returns the number of slices of each recorded microbatch for an
            iteration and a replica. It returns 1 if microbatches are not split.
    """

    steps: Mapping[int, tuple[Floats, ...]]
    transfer_s: float
    work: tuple[float, ...] = ()
    slices: StepSlices = whole

    @cached_property
    def is_cut(self) -> bool:
        """Whether any recorded microbatch is split into several slices."""
        return any(max(counts) > 1 for counts in self._all_counts)

    @cached_property
    def is_unequal(self) -> bool:
        """Whether the microbatches of a step have different numbers of slices."""
        return any(len(set(counts)) > 1 for counts in self._all_counts)

    @property
    def _all_counts(self) -> Iterator[Counts]:
        for iteration, replicas in self.steps.items():
            for replica in range(len(replicas)):
                yield self.counts(iteration, replica)

    def counts(self, iteration: int, replica: int) -> Counts:
        """Returns the number of slices of each microbatch in one step of ``replica``."""
        items = self.steps[iteration][replica].shape[2]
        return counts_of(items, self.slices(iteration, replica))

    @cached_property
    def stage_s(self) -> Floats:
        """Usual time of F and B per stage in seconds, ``[2, stages]``.

        Each replica's times are averaged over steps and microbatches. The usual time is the median
        of these means.
        """
        stage: Floats = np.median(self._means, axis=0)
        return stage

    @cached_property
    def rank_factor(self) -> Floats:
        """Time of each rank divided by the usual time of its peers, ``[replicas, stages]``.

        The peers of a rank are the ranks with the same stage in other replicas.
        """
        rank_s = self._means.sum(axis=1)
        stage = self.stage_s.sum(axis=0)
        if len(rank_s) < 3 and len(self.work) == len(stage) and min(self.work) > 0:
            stage = np.array(self.work) * np.median(rank_s / self.work)
        factor: Floats = rank_s / stage
        return factor

    @cached_property
    def _means(self) -> Floats:
        replicas = range(len(next(iter(self.steps.values()))))
        return np.array(
            [np.concatenate([s[r] for s in self.steps.values()], 2).mean(axis=2) for r in replicas]
        )

    def usual_part(self, iteration: int, replica: int) -> Floats:
        """Returns the durations that ``replica`` would have in ``iteration`` at the usual speed.

        The durations are in seconds, ``[2, stages, microbatches]``.
        """
        part: Floats = self.steps[iteration][replica] / self.rank_factor[replica][:, None]
        return part

    def step_s(self, iteration: int, schedule: OtherSchedule) -> float:
        """Simulates ``iteration``, and returns the time of its slowest replica in seconds.

        Args:
            iteration: Iteration to simulate.
            schedule: Schedule to simulate.
        """
        pieces = schedule.pieces if schedule.chunks > 1 else 0
        slices = schedule.slices
        replicas = range(len(self.steps[iteration]))
        parts = [self.usual_part(iteration, replica) for replica in replicas]
        counts = [self.counts(iteration, replica) for replica in replicas]
        if schedule.is_dealt:
            parts, counts = self._dealt(np.concatenate(parts, axis=2), sum(counts, ()))
        parts = [np.repeat(part, slices, axis=2) / slices for part in parts]
        counts = [tuple(slices * count for count in of_replica) for of_replica in counts]
        actions = sum(part[0].size for part in parts) * (4 + 2 * pieces)
        times_s = []
        for replica, (part, of_replica) in enumerate(zip(parts, counts, strict=True)):
            candidate = candidate_for(
                schedule.name, part.shape[1], schedule.chunks, of_replica, pieces
            )
            factor = self.rank_factor[replica]
            times_s.append(self._pipeline_s(part, factor, candidate, of_replica, slices, actions))
        return max(times_s)

    def _dealt(self, durations_s: Floats, counts: Counts) -> tuple[list[Floats], list[Counts]]:
        """Assigns each microbatch, longest first, to the replica that would finish it first.

        Args:
            durations_s: Time in seconds that each slice of all replicas would take on ranks of
                usual speed, ``[2, stages, slices]``.
            counts: Number of slices of each microbatch. All slices of a microbatch are assigned to
                the same replica.

        Returns:
            Durations of the slices assigned to each replica, and number of slices of each
            microbatch assigned to it.
        """
        of_slices = durations_s
        ends = np.cumsum(counts)
        begins = ends - counts
        durations_s = np.stack(
            [of_slices[:, :, a:b].sum(axis=2) for a, b in zip(begins, ends, strict=True)], axis=2
        )
        # A replica is only as fast as its slowest rank, so use the cost of each microbatch on that
        # rank.
        slowest = [
            int(np.argmax(durations_s.sum(axis=(0, 2)) * factor)) for factor in self.rank_factor
        ]
        costs = [
            durations_s[:, stage].sum(axis=0) * self.rank_factor[replica, stage]
            for replica, stage in enumerate(slowest)
        ]
        work = durations_s.sum(axis=(0, 1))
        stages = durations_s.shape[1]
        dealt, dealt_counts = [], []
        for share in map(list, deal([cost.tolist() for cost in costs])):
            # Small differences in cost are noise, so change the order only if the costs differ
            # clearly.
            if np.std(work[share]) > 0.05 * np.mean(work[share]):
                share = [share[index] for index in order_by_cost(work[share].tolist(), stages)]
            slices = [item for m in share for item in range(begins[m], ends[m])]
            dealt.append(of_slices[:, :, slices])
            dealt_counts.append(tuple(counts[m] for m in share))
        return dealt, dealt_counts

    def _pipeline_s(
        self,
        durations_s: Floats,
        factor: Floats,
        candidate: Candidate,
        counts: Counts,
        slices: int,
        actions: int,
    ) -> float:
        """Simulates the pipeline of one replica, and returns its step time in seconds.

        ``durations_s`` contains the durations in seconds on ranks of usual speed, and ``factor``
        contains the slowdown of each rank. ``counts`` contains the number of slices of each
        microbatch. ``slices`` is the number of slices into which the recorded messages are split.
        ``actions`` is the number of actions on all replicas.
        """
        ranks, count = durations_s.shape[1:]
        placement = candidate.placement
        cut = placement.num_stages // ranks
        rank_of = [placement.locate(stage)[0] for stage in range(placement.num_stages)]
        stage_durations = np.repeat(durations_s, cut, axis=1) / cut * factor[rank_of][:, None]
        forward, backward = stage_durations
        split = np.stack([forward, backward / 2, backward / 2])
        delay = round(self.transfer_s / slices * PS_PER_S)
        delays = np.zeros((2, placement.num_stages, count), dtype=np.int64)
        for stage in range(placement.num_stages - 1):
            if rank_of[stage] != rank_of[stage + 1]:
                delays[0, stage] = delays[1, stage + 1] = delay
        return simulated_s(candidate, split, delays, counts, actions)


def counts_of(num_items: int, slices: SliceCounts) -> Counts:
    """Returns the number of slices of each microbatch in a step as a tuple, even if all are equal.

    Args:
        num_items: Total number of slices of all microbatches.
        slices: Number of slices of each microbatch, as in the trace.
    """
    return each_count(num_items // slices, slices) if isinstance(slices, int) else slices


def candidate_for(
    name: str,
    num_ranks: int,
    num_chunks: int,
    counts: Counts,
    pieces: int,
    kind: PlacementKind | None = None,
) -> Candidate:
    """Returns a schedule for the slices of a step, with the default limit on activation memory.

    Args:
        name: Name of the schedule or rule.
        num_ranks: Number of ranks in the pipeline.
        num_chunks: Number of chunks per rank.
        counts: Number of slices of each microbatch.
        pieces: Number of W actions per weight gradient, or 0 if the backward pass is not split.
        kind: Placement of stages, or ``None`` for the default.
    """
    is_equal = len(set(counts)) == 1
    candidate = make_candidate(
        name,
        num_ranks,
        num_chunks,
        len(counts),
        placement_kind=kind,
        weight_pieces=pieces,
        num_slices=counts[0] if is_equal else 1,
    )
    if is_equal or candidate.cap is None:
        return candidate
    # Raise the limit to the size of the largest microbatch, as the executor does in a real step.
    cap = default_cap(candidate.placement, len(counts), mean_slices(counts))
    return replace(candidate, cap=max(cap, *whole_sizes([1.0] * sum(counts), counts)))


def simulated_s(
    candidate: Candidate,
    durations_s: Floats,
    delays_ps: Ints,
    counts: Counts,
    actions: int,
    sizes: tuple[float, ...] = (),
) -> float:
    """Simulates a step, and returns its time in seconds.

    Args:
        candidate: Schedule of the step.
        durations_s: ``[3, stages, slices]``, times of F, B and W in seconds.
        delays_ps: ``[2, stages, slices]``, times of the messages after F and B in picoseconds.
        counts: Number of slices of each microbatch.
        actions: Total number of actions in all simulated steps.
        sizes: Activation memory of each slice relative to the mean slice; empty if all are equal.
    """
    ranks = candidate.placement.num_ranks
    slices: SliceCounts = counts[0] if len(set(counts)) == 1 else counts
    work = Workload(
        durations_ps=np.rint(durations_s * PS_PER_S).astype(np.int64),
        delays_ps=delays_ps,
        occupancy_ps=np.zeros((ranks, ranks), dtype=np.int64),
        num_slices=slices,
        sizes=sizes,
    )
    policies = candidate.policies(work.num_microbatches, slices)
    if sizes and candidate.cap is not None:
        # Raise the limit so that every microbatch can start, as the executor does in a real step.
        candidate = replace(candidate, cap=max(candidate.cap, *whole_sizes(sizes, slices)))
    shared = rule_of(policies)
    compiled = shared is not None and saves_time(shared[0], actions)
    return candidate.simulate(work, compiled=compiled, policies=policies).makespan_s


class RuleReplay:
    """Simulates the last recorded steps under ``adaptive``, the run's scheduling rule.

    If durations change, the rule chooses a different order of actions, so the rule itself is
    simulated. The recorded steps are simulated once. After a change, only the affected replicas are
    simulated again.

    Args:
        header: Trace header of any rank, which contains the settings of the run.
        ops: Recorded operations. Only the last :data:`RULE_STEPS` iterations are simulated.
    """

    def __init__(self, header: TraceHeader, ops: Operations) -> None:
        self._header, self._ops = header, ops

    def saved_s(self, then_s: Floats, *, slices: int = 1) -> float | None:
        """Returns how many seconds a step would save if its operations took ``then_s``.

        Args:
            then_s: Duration of each operation after the change, in seconds, ``[operations]``.
            slices: Number of slices of equal duration into which each recorded microbatch is split
                by the change.

        Returns:
            Mean time saved per step, or ``None`` if the recorded steps cannot be simulated. This
            happens if the schedule is not ``adaptive``, if there is only one stage, if a rank's
            actions are missing, or if a simulated step time differs from the recorded one by more
            than :data:`ALIKE`.
        """
        if self._recorded is None:
            return None
        saved = []
        for replicas in self._recorded:
            then = []
            for replica in replicas:
                rows = replica.rows
                is_changed = slices > 1 or (then_s[rows] != self._ops.duration_s[rows]).any()
                step = recorded_step(self._ops, rows, then_s) if is_changed else None
                if is_changed and step is None:
                    return None
                then.append(step.simulated_s(self._header, slices) if step else replica.step_s)
            saved.append(max(replica.step_s for replica in replicas) - max(then))
        return float(np.mean(saved))

    @cached_property
    def _recorded(self) -> list[list[_RecordedReplica]] | None:
        """Recorded steps of all replicas, or ``None`` if they cannot be simulated."""
        if self._header.schedule != "adaptive" or self._ops.where.num_stages == 1:
            return None
        recorded = []
        for rows_of in _rows_by_replica(self._ops, self._last()).values():
            replicas = []
            for rows in rows_of:
                computes = rows[self._ops.kind[rows] <= WEIGHT]
                step = recorded_step(self._ops, rows, self._ops.duration_s)
                if not len(computes) or step is None:
                    return None
                step_s = step.simulated_s(self._header)
                span_s = _span_s(self._ops, computes)
                if abs(step_s - span_s) > ALIKE * span_s:
                    return None
                replicas.append(_RecordedReplica(rows, step_s))
            recorded.append(replicas)
        return recorded

    def _last(self) -> Ints:
        """Returns the indices of the last iterations of the run. Only these are simulated."""
        iterations: Ints = np.unique(self._ops.iteration)[-steps_at_most(self._ops, RULE_STEPS) :]
        return iterations


@dataclass(frozen=True, eq=False)
class _RecordedReplica:
    """Contains one replica's part of a recorded step.

    Attributes:
        rows: Indices of the step's operations.
        step_s: Time of the step in seconds, simulated with the recorded durations.
    """

    rows: Ints
    step_s: float


def steps_at_most(ops: Operations, most: int) -> int:
    """Returns the number of steps to simulate, between 1 and ``most``.

    Each step has one pipeline per replica. The number of steps is limited so that at most
    :data:`MOST_PIPELINES` pipelines are simulated.
    """
    replicas = int(ops.where.replica.max()) + 1
    return max(1, min(most, MOST_PIPELINES // replicas))


def _rows_by_replica(ops: Operations, iterations: Ints) -> dict[int, list[Ints]]:
    """Returns the indices of each replica's operations in ``iterations``.

    Args:
        ops: Recorded operations.
        iterations: Numbers of the iterations in ascending order.

    Returns:
        Indices in ascending order, by iteration and then by replica.
    """
    replicas = int(ops.where.replica.max()) + 1
    rows = np.flatnonzero(np.isin(ops.iteration, iterations))
    cell = np.searchsorted(iterations, ops.iteration[rows]) * replicas
    cell += ops.where.replica[ops.worker[rows]]
    rows = rows[np.argsort(cell, kind="stable")]
    sizes = np.bincount(cell, minlength=len(iterations) * replicas)
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    return {
        iteration: parts[index * replicas : (index + 1) * replicas]
        for index, iteration in enumerate(iterations.tolist())
    }


def _span_s(ops: Operations, computes: Ints) -> float:
    """Returns the time in seconds from the start of the first to the end of the last computation.

    ``computes`` contains the rows of the computations.
    """
    return float((ops.end_ns[computes].max() - ops.start_ns[computes].min()) / NS_PER_S)


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """Contains the times of one replica's step.

    Attributes:
        durations_s: ``[3, stages, microbatches]``, times of F, B and W in seconds.
        delays_ps: ``[2, stages, microbatches]``, times of the messages after F and B in
            picoseconds.
        pieces: Number of W actions of a microbatch in a stage, or 0 if backward passes are not
            split.
        slices: Number of slices of each microbatch. If microbatches are split, the last axis of
            both arrays contains the slices of all microbatches.
        frozen_stages: Number of leading stages that run no backward passes.
        sizes: Activation memory of each microbatch in bytes; empty if all are equal or unknown.
    """

    durations_s: Floats
    delays_ps: Ints
    pieces: int
    slices: SliceCounts = 1
    frozen_stages: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def costs_s(self) -> list[float]:
        """Total time in seconds that each microbatch takes over all stages and kinds of action."""
        return [float(cost) for cost in self.durations_s.sum(axis=(0, 1))]

    def with_microbatches(self, order: Sequence[int]) -> RecordedStep:
        """Returns a step that runs the microbatches listed in ``order``, in that order."""
        return replace(
            self,
            durations_s=self.durations_s[:, :, order],
            delays_ps=self.delays_ps[:, :, order],
            slices=1,
            sizes=tuple(self.sizes[index] for index in order) if self.sizes else (),
        )

    def simulated_s(self, header: TraceHeader, slices: int = 1) -> float:
        """Simulates the step under the run's schedule, and returns its time in seconds.

        Args:
            header: Trace header of any rank, which contains the settings of the run.
            slices: Number of slices of equal duration into which each microbatch is split.
        """
        counts = counts_of(self.durations_s.shape[2], self.slices)
        counts = tuple(slices * count for count in counts)
        durations = np.repeat(self.durations_s / slices, slices, axis=2)
        delays = np.repeat(self.delays_ps // slices, slices, axis=2)
        candidate = candidate_for(
            header.schedule,
            header.num_ranks,
            header.num_chunks,
            counts,
            self.pieces,
            "v" if header.placement == "v" else "loop",
        )
        candidate = replace(candidate, frozen_stages=self.frozen_stages)
        actions = durations[0].size * (2 + self.pieces)
        mean = sum(self.sizes) / max(1, len(self.sizes))
        sizes = tuple(size / mean for size in self.sizes for _ in range(slices))
        return simulated_s(candidate, durations, delays, counts, actions, sizes)


def recorded_step(ops: Operations, rows: Ints, times_s: Floats) -> RecordedStep | None:
    """Returns the times of one replica's step, or ``None`` if actions are missing.

    Args:
        ops: Recorded operations.
        rows: Indices of the step's operations.
        times_s: Duration of each operation in seconds, ``[operations]``.
    """
    kind = ops.kind[rows]
    stage = ops.stage[rows]
    microbatch = ops.microbatch[rows]
    shape = (3, ops.where.num_stages, int(microbatch.max(initial=0)) + 1)
    work = kind <= WEIGHT
    if shape[1] * shape[2] > int(work.sum()):
        return None  # The number of a microbatch may be huge if a file is damaged.
    durations = np.zeros(shape)
    counts = np.zeros(shape, dtype=np.int64)
    cell = kind[work], stage[work], microbatch[work]
    np.add.at(durations, cell, times_s[rows[work]])
    np.add.at(counts, cell, 1)
    pieces = int(counts[2].max())
    # Leading stages without B are frozen: no gradient flows through them.
    frozen = int((counts[1].sum(axis=1) > 0).argmax())
    counts[1, :frozen] = 1
    # Stages whose parameters are all frozen have no W.
    if (counts[:2] != 1).any() or not np.isin(counts[2], (0, pieces)).all():
        return None
    delays = np.zeros((2, *shape[1:]), dtype=np.int64)
    for direction, message_kind in enumerate((FORWARD_COMM, BACKWARD_COMM)):
        came = kind == message_kind
        source = stage[came] + (-1, 1)[direction]
        delays[direction, source, microbatch[came]] = np.rint(times_s[rows[came]] * PS_PER_S)
    slices = _slices_of(ops, rows)
    if sum(counts_of(shape[2], slices)) != shape[2]:
        return None
    sizes = _sizes_of(ops, rows)
    if slices != 1 or len(sizes) != shape[2] or min(sizes) < 1:
        sizes = ()
    return RecordedStep(durations, delays, pieces, slices, frozen, sizes)


def _slices_of(ops: Operations, rows: Ints) -> SliceCounts:
    """Returns the number of slices of each microbatch in the step that contains ``rows``."""
    if not len(rows):
        return 1
    replica = int(ops.where.replica[ops.worker[rows[0]]])
    return ops.where.slices(int(ops.iteration[rows[0]]), replica)


def _sizes_of(ops: Operations, rows: Ints) -> tuple[int, ...]:
    """Returns the activation bytes of each microbatch in the step that contains ``rows``."""
    if not len(rows):
        return ()
    replica = int(ops.where.replica[ops.worker[rows[0]]])
    return ops.where.sizes(int(ops.iteration[rows[0]]), replica)


def recorded_replicas(ops: Operations, iteration: int) -> list[tuple[RecordedStep, float]] | None:
    """Returns each replica's step in ``iteration``, with the recorded step time in seconds.

    Args:
        ops: Recorded operations.
        iteration: Iteration number.

    Returns:
        List of pairs (step, step time), one per replica, or ``None`` if actions are missing.
    """
    replicas = []
    for rows in _rows_by_replica(ops, np.array([iteration]))[iteration]:
        computes = rows[ops.kind[rows] <= WEIGHT]
        step = recorded_step(ops, rows, ops.duration_s)
        if not len(computes) or step is None:
            return None
        replicas.append((step, _span_s(ops, computes)))
    return replicas


def recorded_times(
    parts: Sequence[Operations], work: tuple[float, ...] = ()
) -> RecordedTimes | None:
    """Returns the time that each microbatch took in each stage.

    Args:
        parts: Operations of the iterations, with one entry per group of iterations read together.
        work: Computing cost of each stage in any unit; empty if unknown.

    Returns:
        Times of the steps in which every rank ran each microbatch of its replica. ``None`` if there
        are no such steps, or if ranks have several stages.
    """
    where = parts[0].where
    if where.stages.shape[1] > 1:
        return None
    steps: dict[int, tuple[Floats, ...]] = {}
    transfers = []
    for ops in parts:
        transfers.append(ops.duration_s[np.isin(ops.kind, (FORWARD_COMM, BACKWARD_COMM))])
        for iteration, rows_of in _rows_by_replica(ops, np.unique(ops.iteration)).items():
            durations = _step_durations(ops, rows_of)
            if durations is not None:
                steps[iteration] = durations
    transfers_s = np.concatenate(transfers)
    transfer_s = float(np.median(transfers_s)) if len(transfers_s) else 0.0
    return RecordedTimes(steps, transfer_s, work, where.slices) if steps else None


def _step_durations(ops: Operations, rows_of: Sequence[Ints]) -> tuple[Floats, ...] | None:
    """Returns the times in seconds of each replica's passes, ``[2, stages, microbatches]``.

    The first axis contains the time of F, and the total time of B and W. Returns ``None`` if
    actions are missing.

    Args:
        ops: Recorded operations.
        rows_of: Indices of each replica's operations in the step.
    """
    durations = []
    for rows in rows_of:
        part = rows[np.isin(ops.kind[rows], (FORWARD, BACKWARD, WEIGHT))]
        if not len(part):
            return None
        shape = (2, ops.where.num_stages, int(ops.microbatch[part].max()) + 1)
        if shape[1] * shape[2] > len(part):
            return None
        cell = (np.where(ops.kind[part] == FORWARD, 0, 1), ops.stage[part], ops.microbatch[part])
        times = np.zeros(shape)
        np.add.at(times, cell, ops.duration_s[part])
        if (times <= 0).any() or sum(counts_of(shape[2], _slices_of(ops, part))) != shape[2]:
            return None
        durations.append(times)
    return tuple(durations)
