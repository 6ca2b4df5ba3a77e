"""Splits the time of each collective into the wait for the last member and the transfer.

The members of a process group record when they arrived at a collective and when the collective
finished. All times are converted to the run's common clock. A member waits from its own arrival
until the last member arrives. The remaining time is the transfer::

    member 0   arrives ─────── waits ─────────┬─ transfer ─┐ end
    member 1                          arrives ┴─ transfer ─┘ end

Every member records the total time of all collectives, and the start and end of single collectives.
If there are many collectives, these times are recorded only for a sample, which is the same on all
members. A group is ignored if the trace of any member is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.span_columns import Ints
from megatron.adaptive.trace.trace_format import GroupCollectives

Floats = npt.NDArray[np.floating[Any]]

_NS_PER_MS = 1e6


@dataclass(frozen=True, eq=False, kw_only=True)
class JoinedCollectives:
    """Contains the times that all members of a process group recorded for one kind of collective.

    Attributes:
        kind: Kind of the group, such as ``tensor``.
        operation: Name of the collective, such as ``all-reduce``.
        ranks: Global ranks of the members in ascending order.
        iteration: ``[collectives]``, iteration in which each collective ran.
        start_ns: ``[collectives, members]``, time in ns on the run's clock at which each member
            arrived at the collective.
        end_ns: ``[collectives, members]``, time in ns on the run's clock at which the collective
            finished on each member.
        step_iteration: ``[steps]``, iterations in which all members recorded times.
        step_ns: ``[steps, members]``, total time in ns that each member spent in these collectives
            in each iteration, including collectives without recorded times.
        per_step: Mean number of collectives per iteration, including collectives without recorded
            times.
        total_ns: Total time in ns that a member spends in these collectives per iteration, averaged
            over members and iterations.
        size_bytes: Mean size in bytes of the inputs and results of one collective on one member.
    """

    kind: str
    operation: str
    ranks: tuple[int, ...]
    iteration: Ints
    start_ns: Ints
    end_ns: Ints
    step_iteration: Ints
    step_ns: Ints
    per_step: float
    total_ns: float
    size_bytes: float

    @property
    def last_ns(self) -> Ints:
        """Time in ns at which the last member arrived at each collective, ``[collectives]``."""
        return np.asarray(self.start_ns.max(axis=1))

    @property
    def wait_ns(self) -> Ints:
        """Time in ns from a member's arrival to the last arrival, ``[collectives, members]``."""
        return np.asarray(self.last_ns[:, None] - self.start_ns)

    @property
    def transfer_ns(self) -> Ints:
        """Time in ns from the last arrival to the collective's end, ``[collectives, members]``."""
        return np.asarray(np.maximum(self.end_ns - self.last_ns[:, None], 0))

    @property
    def held_up_ns(self) -> Floats:
        """Time in ns that the group spent waiting only for this member, ``[collectives, members]``.

        The value is 0 for all members except the one that arrived last.
        """
        ordered = np.sort(self.start_ns, axis=1)
        gap_ns = (ordered[:, -1] - ordered[:, -2]).astype(np.float64)
        is_last = np.arange(len(self.ranks)) == self.start_ns.argmax(axis=1)[:, None]
        return np.where(is_last, gap_ns[:, None], 0.0)

    def per_step_ns(self, times_ns: Floats | Ints) -> Floats:
        """Estimates the total time in ns that these collectives take in each iteration.

        The estimate is the mean time of the recorded collectives, multiplied by the mean number of
        collectives per iteration. The result has the shape ``[iterations, ...]``.

        Args:
            times_ns: ``[collectives, ...]``, times in ns of the recorded collectives.
        """
        means = [times_ns[self.iteration == n].mean(axis=0) for n in np.unique(self.iteration)]
        return np.array(means, dtype=np.float64) * self.per_step

    @property
    def name(self) -> str:
        """Name of the collectives for users: the kind of the group and the operation."""
        return f"{self.kind} {self.operation}"


def join_collectives(run: RunTrace, iterations: Iterable[int]) -> list[JoinedCollectives]:
    """Joins the times that the members of each process group recorded for the same collectives.

    All times are on the run's common clock.

    Args:
        run: Trace of the run.
        iterations: Iterations to include.

    Returns:
        List with one object per process group and operation.
    """
    members: dict[tuple[str, int], dict[int, dict[int, GroupCollectives]]] = {}
    for iteration in iterations:
        for rank in sorted(run.ranks):
            for group in run.ranks[rank].collectives(iteration):
                of_group = members.setdefault((group.kind, group.lowest_rank), {})
                of_group.setdefault(iteration, {})[rank] = group
    joined = []
    for (kind, _), by_iteration in sorted(members.items()):
        whole = {
            iteration: by_rank
            for iteration, by_rank in by_iteration.items()
            if all(len(by_rank) == group.size for group in by_rank.values())
        }
        operations = {
            operation
            for by_rank in whole.values()
            for group in by_rank.values()
            for operation in group.operations
        }
        for operation in sorted(operations):
            of_operation = _join(kind, operation, whole)
            if of_operation is not None:
                joined.append(of_operation)
    return joined


def _join(
    kind: str, operation: str, groups: Mapping[int, Mapping[int, GroupCollectives]]
) -> JoinedCollectives | None:
    """Joins the times that the members of one group recorded for one operation.

    Returns ``None`` if there is no collective for which all members recorded times.

    Args:
        kind: Kind of the group, such as ``tensor``.
        operation: Name of the collective, such as ``all-reduce``.
        groups: Collectives of each member of the group, keyed by iteration and then by rank.
    """
    iterations: list[int] = []
    starts: list[list[int]] = []
    ends: list[list[int]] = []
    totals: list[tuple[int, int, int]] = []
    step_ns: list[list[int]] = []
    ranks: Sequence[int] = ()
    for iteration, by_rank in groups.items():
        ranks = sorted(by_rank)
        kept = [_kept(by_rank[rank], operation) for rank in ranks]
        for number in sorted(set.intersection(*map(set, kept))):
            iterations.append(iteration)
            starts.append([times[number][0] for times in kept])
            ends.append([times[number][1] for times in kept])
        of_members = [_total(by_rank[rank], operation) for rank in ranks]
        totals += of_members
        step_ns.append([total_ns for _, total_ns, _ in of_members])
    if not iterations:
        return None
    count, total_ns, size_bytes = np.array(totals, dtype=np.float64).sum(axis=0)
    parts = len(groups) * len(ranks)
    return JoinedCollectives(
        kind=kind,
        operation=operation,
        ranks=tuple(ranks),
        iteration=np.array(iterations, dtype=np.int64),
        start_ns=np.array(starts, dtype=np.int64),
        end_ns=np.array(ends, dtype=np.int64),
        step_iteration=np.array(list(groups), dtype=np.int64),
        step_ns=np.array(step_ns, dtype=np.int64),
        per_step=float(count) / parts,
        total_ns=float(total_ns) / parts,
        size_bytes=float(size_bytes / max(1.0, count)),
    )


def _total(group: GroupCollectives, operation: str) -> tuple[int, int, int]:
    """Returns the count, the total time in ns and the total bytes of one kind of collective.

    ``group`` contains the collectives of one member in one step, and ``operation`` is the name of
    the collectives to select.
    """
    totals = dict(zip(group.operations, group.totals, strict=True))
    return totals.get(operation, (0, 0, 0))


def _kept(group: GroupCollectives, operation: str) -> dict[int, tuple[int, int]]:
    """Returns the recorded start and end in ns of the collectives with the name ``operation``.

    The dict is keyed by the index of the collective in the iteration. Collectives without recorded
    times are omitted.
    """
    return {
        number: (start_ns, end_ns)
        for number, of, start_ns, end_ns in group.kept
        if group.operations[of] == operation
    }


@dataclass(frozen=True, kw_only=True)
class CollectiveFigures:
    """Contains the times of one kind of collective in a step, averaged over groups of one kind.

    Attributes:
        kind: Kind of the groups, such as ``tensor``.
        operation: Name of the collective.
        size: Number of members of the largest group.
        count: Number of collectives per group in the step.
        size_bytes: Mean size in bytes of the inputs and results of one collective on one member.
        wait_ms: Time in ms that a member waited for the last member to arrive.
        transfer_ms: Remaining time in ms that a member spent in these collectives.
        last_rank: Global rank for which the other members of its group waited longest.
        last_ms: Time in ms that the other members waited only for ``last_rank``.
    """

    kind: str
    operation: str
    size: int
    count: float
    size_bytes: float
    wait_ms: float
    transfer_ms: float
    last_rank: int
    last_ms: float


def collective_figures(run: RunTrace, iteration: int) -> list[CollectiveFigures]:
    """Returns the times of the collectives in ``iteration`` of ``run``.

    The list has one object per kind of process group and operation.
    """
    by_name: dict[str, list[JoinedCollectives]] = {}
    for joined in join_collectives(run, [iteration]):
        by_name.setdefault(joined.name, []).append(joined)
    return [_figures(groups) for groups in by_name.values()]


def _figures(groups: Sequence[JoinedCollectives]) -> CollectiveFigures:
    """Returns the mean times of ``groups``, which have the same kind and operation."""
    held_up_ms = {}
    wait_ms = []
    transfer_ms = []
    for group in groups:
        # Assume that the wait is the same fraction of the time in all collectives, with or without
        # recorded times.
        wait_ns = float(group.wait_ns.sum())
        waited = wait_ns / max(1.0, wait_ns + float(group.transfer_ns.sum()))
        wait_ms.append(group.total_ns * waited / _NS_PER_MS)
        transfer_ms.append(group.total_ns * (1 - waited) / _NS_PER_MS)
        for rank, held_ns in zip(group.ranks, group.held_up_ns.mean(axis=0), strict=True):
            held_up_ms[rank] = float(held_ns) * group.per_step / _NS_PER_MS
    last_rank = max(held_up_ms, key=lambda rank: held_up_ms[rank])
    return CollectiveFigures(
        kind=groups[0].kind,
        operation=groups[0].operation,
        size=max(len(group.ranks) for group in groups),
        count=float(np.mean([group.per_step for group in groups])),
        size_bytes=float(np.mean([group.size_bytes for group in groups])),
        wait_ms=float(np.mean(wait_ms)),
        transfer_ms=float(np.mean(transfer_ms)),
        last_rank=last_rank,
        last_ms=held_up_ms[last_rank],
    )
