"""Finds what each operation of a step waits for, and simulates that with any times.

An operation starts when all that it depends on have ended: the rank's compute before it, the
message that brings its input (or the compute itself, on one rank), the collective or optimizer step
before it on its rank, and the last compute that had ended when it was recorded to start. A
collective starts with its last member; parameters that are gathered come before the first forward
of their chunk.

::

    rank 0   gather -> F0 -> F1 ----------> B0 -> B1 -> reduce -> clip -> optimizer
                         \\-> message        ^ message   ^ all replicas    ^ all ranks
    rank 1   gather --------> F0 -> B0 -----/

All steps and several sets of times are simulated at once. Nodes are ordered by level, the longest
way from a node without a predecessor; one with more than two predecessors gets helpers, so that a
level is two gathers, a maximum and a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.table import Ints, Mask, TraceTable
from megatron.adaptive.trace.whatif.operations import (
    NAMES,
    NS_PER_S,
    Floats,
    Operations,
    pipelines_of,
    read_operations,
    usual_s,
)

_GATHER = NAMES.index("params-all-gather")
_ENDED = 0.05
"""A compute counts as ended before an operation that begins in its last part: recorded times are
rounded, and those of GPUs and hosts differ."""


@dataclass(frozen=True, eq=False)
class Graph:
    """Dependencies of the operations of some iterations.

    Attributes:
        place: ``[operations]``, the node of each.
        before: ``[2, nodes]``, up to two nodes that each waits for; node 0 is the step's start.
        levels: where each level begins and the last one ends.
        final: nodes that nothing waits for, ordered by step.
        final_step: ``[steps]``, where those of each step begin in ``final``.
    """

    place: Ints
    before: Ints
    levels: Ints
    final: Ints
    final_step: Ints

    def simulate(self, durations_s: Sequence[Floats]) -> Floats:
        """Simulates all steps with several sets of times.

        Args:
            durations_s: ``[operations]`` each.

        Returns:
            ``[steps, sets]``, seconds of each step.
        """
        ends = self._ends(np.stack(durations_s, axis=1))
        steps: Floats = np.maximum.reduceat(ends[self.final], self.final_step, axis=0)
        return steps

    def ends_s(self, durations_s: Floats) -> Floats:
        """``[operations]``: seconds from the step's start to the end of each operation."""
        ends: Floats = self._ends(durations_s[:, None])[self.place, 0]
        return ends

    def _ends(self, durations_s: Floats) -> Floats:
        ends = np.zeros((self.before.shape[1], durations_s.shape[1]))
        ends[self.place] = durations_s
        first, second = self.before
        for low, high in zip(self.levels[:-1].tolist(), self.levels[1:].tolist(), strict=True):
            ready = ends.take(first[low:high], axis=0)
            np.maximum(ready, ends.take(second[low:high], axis=0), out=ready)
            ends[low:high] += ready
        return ends


def build_graph(operations: Operations) -> Graph:
    """Finds what each operation waits for.

    Raises:
        TraceError: operations wait for one another in a circle, so the recorded order cannot have
            been; names the first of them.
    """
    sources, targets, count = _edges(operations)
    # Node 0 is the start of every step.
    before = _two_each(sources + 1, targets + 1, count + 1)
    level, is_known = _levels(before)
    if not is_known.all():
        stuck = np.flatnonzero(~is_known[1 : len(operations) + 1])
        first = stuck[np.argmin(operations.start_ns[stuck])]
        raise TraceError(
            f"{operations.describe(int(first))} waits for what waits for it: the recorded order "
            "contradicts the dependencies; are clocks apart, or two jobs in one folder?"
        )
    order = np.argsort(level, kind="stable")
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order))
    waited = np.zeros(len(order), dtype=np.bool_)
    waited[before] = True
    final = np.flatnonzero(~waited[1 : len(operations) + 1])
    final = final[np.argsort(operations.iteration[final], kind="stable")]
    return Graph(
        place=place[1 : len(operations) + 1],
        before=place[before[:, order]],
        levels=np.append(np.flatnonzero(np.diff(level[order], prepend=-1)), len(order))[1:],
        final=place[final + 1],
        final_step=np.flatnonzero(np.diff(operations.iteration[final], prepend=-1)),
    )


def ideal_steps(
    run: RunTrace, ranks: Sequence[int], iterations: Sequence[int]
) -> dict[int, TraceTable] | None:
    """Simulates some iterations of some ranks with the usual time of every kind of work.

    Returns:
        By global rank its computes in steps in which nobody is slower than others, each step
        beginning when the recorded one did; ``None`` where the trace does not hold all of them or
        contradicts itself.
    """
    try:
        ops = read_operations(run, pipelines_of(run, ranks), iterations)
        if ops.orphans:
            return None
        usual = usual_s([ops.kind], [ops.duration_s])[ops.kind]
        ends_s = build_graph(ops).ends_s(usual)[: ops.num_computes]
    except TraceError:
        return None
    rows = slice(0, ops.num_computes)
    _, step = np.unique(ops.iteration[rows], return_inverse=True)
    first = np.full(int(step.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, step, ops.start_ns[rows])
    length_ns = np.rint(usual[rows] * NS_PER_S).astype(np.int64)
    table = TraceTable.of_columns(
        ops.iteration[rows],
        kind=ops.kind[rows],
        chunk=ops.chunk[rows],
        microbatch=ops.microbatch[rows],
        start_ns=first[step] + np.rint(ends_s * NS_PER_S).astype(np.int64) - length_ns,
        duration_ns=length_ns,
    )
    worker = ops.worker[rows]
    return {rank: table.take(worker == at) for at, rank in enumerate(ops.where.ranks.tolist())}


def _edges(ops: Operations) -> tuple[Ints, Ints, int]:
    """Returns from and to of every dependency, and the number of nodes, one more per collective."""
    computes = np.arange(ops.num_computes)
    messages = np.flatnonzero(ops.source >= 0)
    others = np.arange(ops.num_computes, len(ops) - len(messages))
    rank = ops.iteration * len(ops.where.ranks) + ops.worker
    pairs: list[tuple[Ints, Ints]] = []

    def follow(rows: Ints, segment: Ints) -> None:
        same = segment[rows[1:]] == segment[rows[:-1]]
        pairs.append((rows[:-1][same], rows[1:][same]))

    # Where a rank did two things at a time, each waits for what had ended before it began.
    span = ops.end_ns[computes] - ops.start_ns[computes]
    ended = ops.end_ns[computes] - (span * _ENDED).astype(np.int64)
    beside = (np.diff(rank[computes]) == 0) & (ops.start_ns[computes][1:] < ended[:-1])
    beside = np.isin(rank[computes], rank[computes][1:][beside])
    follow(computes[~beside], rank)
    follow(others, rank)
    pairs.append((ops.input[messages], messages))
    by_message = computes[ops.message >= 0]
    pairs.append((ops.message[by_message], by_message))
    local = computes[(ops.input[computes] >= 0) & (ops.message < 0)]
    pairs.append((ops.input[local], local))
    if ops.is_posted:
        way = rank * 2 + ops.kind % 2
        follow(messages[np.lexsort((ops.end_ns[messages], way[messages]))], way)
    pairs += _around(ops, rank, ended, computes[beside], others)
    sources, targets = (np.concatenate(side) for side in zip(*pairs, strict=True))
    # What a member of a collective waits for, all members wait for.
    group = ops.group[targets]
    targets = np.where(group >= 0, len(ops) + group, targets)
    members = np.flatnonzero(ops.group >= 0)
    groups = len(ops) + ops.group[members]
    count = len(ops) + int(ops.group.max(initial=-1)) + 1
    return np.append(sources, groups), np.append(targets, members), count


def _around(
    ops: Operations, rank: Ints, ended_ns: Ints, beside: Ints, others: Ints
) -> list[tuple[Ints, Ints]]:
    """Returns what computes beside others wait for, and dependencies between these and the rest."""
    computes = np.arange(ops.num_computes)
    start = int(ops.start_ns.min())
    width = int(ops.end_ns.max()) - start + 1
    _, number = np.unique(rank, return_inverse=True)
    key = number[computes] * width + np.clip(ended_ns - start, 0, width - 1)
    order = np.argsort(key, kind="stable")

    def latest_ended(rows: Ints) -> tuple[Ints, Mask]:
        begun = number[rows] * width + ops.start_ns[rows] - start
        place = np.searchsorted(key[order], begun, "right") - 1
        latest = computes[order[np.maximum(place, 0)]]
        return latest, (place >= 0) & (number[latest] == number[rows]) & (latest != rows)

    before, has_before = latest_ended(beside)
    pairs = [(before[has_before], beside[has_before])]
    if not len(others):
        return pairs
    latest, after = latest_ended(others)
    heads = np.flatnonzero(np.diff(number[computes], prepend=-1))
    first = np.full(int(number.max()) + 1, -1)
    first[number[computes[heads]]] = computes[heads]
    early = others[~after & (ops.kind[others] != _GATHER)]
    early = early[ops.start_ns[early] < ops.start_ns[np.maximum(first[number[early]], 0)]]
    pairs += [(latest[after], others[after]), (early, first[number[early]])]
    # The first forward of a chunk needs the parameters gathered for it.
    gathers = others[ops.kind[others] == _GATHER]
    chunks = ops.where.stages.shape[1]
    of_chunk = number[computes] * chunks + ops.chunk[computes]
    distinct, rows = np.unique(of_chunk, return_index=True)
    wanted = number[gathers] * chunks + np.maximum(ops.chunk[gathers], 0)
    at = np.minimum(np.searchsorted(distinct, wanted), len(distinct) - 1)
    begins = computes[rows[at]]
    fits = (distinct[at] == wanted) & (ops.start_ns[gathers] <= ops.start_ns[begins])
    pairs.append((gathers[fits], begins[fits]))
    return [(a[(a >= 0) & (b >= 0)], b[(a >= 0) & (b >= 0)]) for a, b in pairs]


def _two_each(sources: Ints, targets: Ints, count: int) -> Ints:
    """Returns ``[2, nodes]``: predecessors, 0 for none; helpers join more than two."""
    while True:
        order = np.argsort(targets, kind="stable")
        sources, targets = sources[order], targets[order]
        number = np.bincount(targets, minlength=count)
        nth = np.arange(len(targets)) - (np.cumsum(number) - number)[targets]
        many = number[targets] > 2
        if not many.any():
            before = np.zeros((2, count), dtype=np.int32)
            before[nth, targets] = sources
            return before
        pair = targets[many] * len(targets) + nth[many] // 2
        distinct, helper = np.unique(pair, return_inverse=True)
        sources = np.concatenate([sources[~many], sources[many], count + np.arange(len(distinct))])
        targets = np.concatenate([targets[~many], count + helper, distinct // len(targets)])
        count += len(distinct)


def _levels(before: Ints) -> tuple[Ints, Ints]:
    """Returns the level of every node, and whether it has one: those in a circle have none."""
    count = before.shape[1]
    waits = (before > 0).sum(axis=0).astype(np.int8)
    targets = np.concatenate([np.flatnonzero(before[0]), np.flatnonzero(before[1])])
    sources = np.concatenate([row[row > 0] for row in before])
    order = np.argsort(sources, kind="stable")
    targets = targets[order]
    begins = np.searchsorted(sources[order], np.arange(count + 1))
    level, is_known = np.zeros(count, dtype=np.int32), waits == 0
    front, number = np.flatnonzero(is_known)[1:], 1  # node 0 alone is level 0
    while len(front):
        level[front] = number
        sizes = begins[front + 1] - begins[front]
        shift = np.cumsum(sizes) - sizes
        at = np.repeat(begins[front] - shift, sizes) + np.arange(int(sizes.sum()))
        reached = targets[at]
        np.subtract.at(waits, reached, 1)
        front = np.unique(reached[waits[reached] == 0])
        is_known[front] = True
        number += 1
    return level, is_known
