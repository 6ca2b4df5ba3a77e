"""Recorded times of microbatches under another schedule, and dealt over replicas.

A recorded duration is split into what the stage takes (the median of its replicas), how many times
as long its rank takes, and the rest, which is the microbatch's own: its length, and chance. Stages
cut in two take half each; a rank keeps its factor whatever it works on, a microbatch its own part
on any replica.

Under a run-time rule the order itself follows from the times: with others it is chosen anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron.adaptive.schedule.catalog import Candidate, make_candidate
from megatron.adaptive.schedule.microbatch_assignment import deal
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
)

RULE_STEPS = 3
"""So many steps are replayed under the run's own rule."""
ALIKE = 0.1
"""A replay with recorded times is off by no more than this part of the recorded step, else the
rule had another cap, or other times than those of the spans count."""
MANY_ACTIONS = 60_000
"""So many are simulated by compiled code, which takes a second to start."""


@dataclass(frozen=True)
class RecordedTimes:
    """Seconds of forwards and backwards of some steps, of pipelines with a stage per rank.

    Attributes:
        steps: by iteration and replica, ``[2, stages, microbatches]``, forward and whole backward.
        transfer_s: median transfer of a message.
        work: what the stages should take, in any unit; empty where nobody says it; parts a slow
            rank from a stage with more to do where there are too few replicas to compare with.
    """

    steps: Mapping[int, tuple[Floats, ...]]
    transfer_s: float
    work: tuple[float, ...] = ()

    @cached_property
    def stage_s(self) -> Floats:
        """``[2, stages]``: median over replicas of the mean over steps and microbatches."""
        stage: Floats = np.median(self._means, axis=0)
        return stage

    @cached_property
    def rank_factor(self) -> Floats:
        """``[replicas, stages]``: how many times as long each rank takes as its siblings."""
        takes, stage = self._means.sum(axis=1), self.stage_s.sum(axis=0)
        if len(takes) < 3 and len(self.work) == len(stage) and min(self.work) > 0:
            stage = np.array(self.work) * np.median(takes / self.work)
        factor: Floats = takes / stage
        return factor

    @cached_property
    def _means(self) -> Floats:
        replicas = range(len(next(iter(self.steps.values()))))
        return np.array(
            [np.concatenate([s[r] for s in self.steps.values()], 2).mean(axis=2) for r in replicas]
        )

    def own_part(self, iteration: int, replica: int) -> Floats:
        """``[2, stages, microbatches]``: what a rank as fast as its siblings would have taken."""
        own: Floats = self.steps[iteration][replica] / self.rank_factor[replica][:, None]
        return own

    def step_s(
        self, iteration: int, schedule: str, *, dealt: bool, pieces: int = 1, chunks: int = 2
    ) -> float:
        """Simulates a step; it takes as long as its slowest replica.

        Args:
            iteration: of those recorded.
            schedule: ``1f1b`` or ``adaptive``.
            dealt: microbatches go to the replica that is done with them first, else where they
                were; those of a replica then come in the order that suits a pipeline.
            pieces: parts of each weight gradient where the schedule splits backwards.
            chunks: per rank of ``adaptive``, two of them in a V; with one, backwards are whole.
        """
        pieces = pieces if chunks > 1 else 0
        replicas = len(self.steps[iteration])
        own = [self.own_part(iteration, replica) for replica in range(replicas)]
        if dealt:
            own = self._dealt(np.concatenate(own, axis=2))
        actions = sum(part[0].size for part in own) * (4 + 2 * pieces)
        return max(
            self._pipeline_s(part, self.rank_factor[replica], schedule, pieces, chunks, actions)
            for replica, part in enumerate(own)
        )

    def _dealt(self, own: Floats) -> list[Floats]:
        """Deals the longest first, each to the replica that is then done first."""
        # Its slowest rank is what a replica is as fast as.
        slowest = [int(np.argmax(own.sum(axis=(0, 2)) * factor)) for factor in self.rank_factor]
        costs = [own[:, q].sum(axis=0) * self.rank_factor[r, q] for r, q in enumerate(slowest)]
        work, stages = own.sum(axis=(0, 1)), own.shape[1]
        dealt = []
        for mine in map(list, deal([cost.tolist() for cost in costs])):
            # Draws of chance are no lengths: only clearly unequal ones are put in another order.
            if np.std(work[mine]) > 0.05 * np.mean(work[mine]):
                mine = [mine[place] for place in order_by_cost(work[mine].tolist(), stages)]
            dealt.append(own[:, :, mine])
        return dealt

    def _pipeline_s(
        self, own: Floats, factor: Floats, schedule: str, pieces: int, chunks: int, actions: int
    ) -> float:
        ranks, count = own.shape[1:]
        candidate = make_candidate(schedule, ranks, chunks, count, weight_pieces=pieces)
        place = candidate.placement
        cut = place.num_stages // ranks
        rank_of = [place.locate(stage)[0] for stage in range(place.num_stages)]
        parts = np.repeat(own, cut, axis=1) / cut * factor[rank_of][:, None]
        forward, backward = parts
        durations = np.stack([forward, backward / 2, backward / 2])
        delay = round(self.transfer_s * PS_PER_S)
        delays = np.zeros((2, place.num_stages, count), dtype=np.int64)
        for stage in range(place.num_stages - 1):
            if rank_of[stage] != rank_of[stage + 1]:
                delays[0, stage] = delays[1, stage + 1] = delay
        return _simulated_s(candidate, durations, delays, actions)


def _simulated_s(candidate: Candidate, durations_s: Floats, delays_ps: Ints, actions: int) -> float:
    ranks = candidate.placement.num_ranks
    work = Workload(
        durations_ps=np.rint(durations_s * PS_PER_S).astype(np.int64),
        delays_ps=delays_ps,
        occupancy_ps=np.zeros((ranks, ranks), dtype=np.int64),
    )
    return candidate.simulate(work, compiled=actions > MANY_ACTIONS).makespan_s


def rule_saves_s(
    header: TraceHeader, ops: Operations, then_s: Floats, iterations: Sequence[int]
) -> float | None:
    """Returns what a step takes less with other times, the rule ``adaptive`` choosing anew.

    Args:
        header: of any rank.
        ops: recorded operations.
        then_s: ``[operations]``, the other times.
        iterations: some of those that ``ops`` has, the last few of which are replayed.

    Returns:
        Seconds, the mean over steps; ``None`` under another schedule, where a rank lacks actions,
        or where the replay with recorded times is not :data:`ALIKE` the recorded step.
    """
    if header.schedule != "adaptive" or ops.where.num_stages == 1:
        return None
    saved = []
    for iteration in iterations[-RULE_STEPS:]:
        both: list[tuple[float, float]] = []
        for replica in range(int(ops.where.replica.max()) + 1):
            mine = ops.where.replica[ops.worker] == replica
            rows = np.flatnonzero(mine & (ops.iteration == iteration))
            computes = rows[ops.kind[rows] <= WEIGHT]
            times = [_replayed_s(header, ops, rows, s) for s in (ops.duration_s, then_s)]
            if not len(computes) or times[0] is None or times[1] is None:
                return None
            span_s = (ops.end_ns[computes].max() - ops.start_ns[computes].min()) / NS_PER_S
            if abs(times[0] - span_s) > ALIKE * span_s:
                return None
            both.append((times[0], times[1]))
        saved.append(max(now for now, _ in both) - max(then for _, then in both))
    return float(np.mean(saved))


def _replayed_s(header: TraceHeader, ops: Operations, rows: Ints, times_s: Floats) -> float | None:
    """Simulates a replica's step in an order of its rule; ``None`` where actions are missing."""
    kind, stage, microbatch = ops.kind[rows], ops.stage[rows], ops.microbatch[rows]
    shape = (3, ops.where.num_stages, int(microbatch.max(initial=0)) + 1)
    durations, counts = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    work = kind <= WEIGHT
    at = kind[work], stage[work], microbatch[work]
    np.add.at(durations, at, times_s[rows[work]])
    np.add.at(counts, at, 1)
    pieces = int(counts[2].max())
    if (counts[:2] != 1).any() or (counts[2] != pieces).any():
        return None
    delays = np.zeros((2, *shape[1:]), dtype=np.int64)
    for way, of in enumerate((FORWARD_COMM, BACKWARD_COMM)):
        came = kind == of
        source = stage[came] + (-1, 1)[way]
        delays[way, source, microbatch[came]] = np.rint(times_s[rows[came]] * PS_PER_S)
    candidate = make_candidate(
        header.schedule,
        header.num_ranks,
        header.num_chunks,
        shape[2],
        placement_kind="v" if header.placement == "v" else "loop",
        weight_pieces=pieces,
    )
    return _simulated_s(candidate, durations, delays, int(counts.sum()))


def recorded_times(
    parts: Sequence[Operations], work: tuple[float, ...] = ()
) -> RecordedTimes | None:
    """Collects the times of microbatches.

    Args:
        parts: all operations.
        work: see :class:`RecordedTimes`.

    Returns:
        Those of the steps in which every rank has each microbatch of its replica; ``None`` without
        such a step, or where ranks hold several stages.
    """
    where = parts[0].where
    if where.stages.shape[1] > 1:
        return None
    steps: dict[int, tuple[Floats, ...]] = {}
    transfers = []
    for ops in parts:
        transfers.append(ops.duration_s[np.isin(ops.kind, (FORWARD_COMM, BACKWARD_COMM))])
        computes = np.isin(ops.kind, (FORWARD, BACKWARD, WEIGHT))
        for iteration in np.unique(ops.iteration).tolist():
            rows = np.flatnonzero(computes & (ops.iteration == iteration))
            found = _step(ops, rows, int(where.replica.max()) + 1)
            if found is not None:
                steps[iteration] = found
    known = np.concatenate(transfers)
    transfer_s = float(np.median(known)) if len(known) else 0.0
    return RecordedTimes(steps, transfer_s, work) if steps else None


def _step(ops: Operations, rows: Ints, replicas: int) -> tuple[Floats, ...] | None:
    found = []
    replica = ops.where.replica[ops.worker[rows]]
    for number in range(replicas):
        mine = rows[replica == number]
        if not len(mine):
            return None
        shape = (2, ops.where.num_stages, int(ops.microbatch[mine].max()) + 1)
        place = (np.where(ops.kind[mine] == FORWARD, 0, 1), ops.stage[mine], ops.microbatch[mine])
        times = np.zeros(shape)
        np.add.at(times, place, ops.duration_s[mine])
        if (times <= 0).any():
            return None
        found.append(times)
    return tuple(found)
