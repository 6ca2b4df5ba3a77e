r"""Reads the operations of some iterations as arrays, and simulates them with any durations.

This module determines the kind and stage of each operation, and splits each message or collective
into a waiting time and a transfer. The transfer begins when the last participating rank has joined.
The trace may have been recorded by this project or imported.

An operation starts when all operations that it depends on have finished:

- the previous computation on its rank
- the message with its input, or the computation that produced its input if it ran on the same rank
- the previous collective or optimizer step on its rank
- for collectives, optimizer steps and computations that overlap with others on their rank: the last
  computation on the rank that had finished when the operation started in the recorded run

A collective starts when its last participating rank joins. The all-gather of a chunk's parameters
precedes the chunk's first forward pass.

::

    rank 0   gather -> F0 -> F1 ----------> B0 -> B1 -> reduce -> clip -> optimizer
                         \\-> message        ^ message   ^ all replicas    ^ all ranks
    rank 1   gather --------> F0 -> B0 -----/

All steps are simulated at the same time, with several sets of durations. The graph is processed
level by level in topological order. The level of a node is the length of the longest path to the
node from a node without predecessors. Helper nodes are inserted in front of nodes with more than
two predecessors, so that each level requires only two array look-ups, a maximum and a sum.

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis", arXiv 2505.05713,
section 3. The kinds of work have the same names as in the traces published with the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron.adaptive.errors import TraceError
from megatron.adaptive.schedule.action import SliceCounts, item_label
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.span_columns import (
    KIND,
    REASON,
    Ints,
    Mask,
    TraceTable,
    find_rows,
    microbatches_of,
    nth_of_equal,
    row_keys,
    rows_by_value,
)
from megatron.adaptive.trace.step_view import stages_of_rank
from megatron.adaptive.trace.trace_format import COLLECTIVES, DRAWN_ACTIONS, REASONS, is_item

Floats = npt.NDArray[np.float64]

FORWARD, BACKWARD, WEIGHT, OPTIMIZER, GC, FORWARD_COMM, BACKWARD_COMM, REDUCE = range(8)
NAMES = (
    "forward-compute",
    "backward-compute",
    "weight-compute",
    "optimizer",
    "gc",
    "forward-pp-comm",
    "backward-pp-comm",
    "reduce",
    *COLLECTIVES,
)
"""Names of the kinds of work. The first five are computations, and the rest are communication."""
FIRST_COMM = FORWARD_COMM
_COLLECTIVE = len(NAMES) - len(COLLECTIVES)

NS_PER_S = 1e9
_FAR = np.iinfo(np.int64).max


class StepSlices(Protocol):
    """Function that returns the number of slices of each microbatch in a replica's step."""

    def __call__(self, iteration: int, replica: int) -> SliceCounts:
        """Returns the number of slices of each microbatch for an iteration and a replica."""


def whole(iteration: int, replica: int) -> SliceCounts:
    """Returns 1, the number of slices if microbatches are not split."""
    return 1


class StepSizes(Protocol):
    """Function that returns the activation size in bytes of each microbatch in a replica's step."""

    def __call__(self, iteration: int, replica: int) -> tuple[int, ...]:
        """Returns the sizes of the microbatches for an iteration and a replica.

        Returns an empty tuple if the sizes are unknown.
        """


def no_sizes(iteration: int, replica: int) -> tuple[int, ...]:
    """Returns an empty tuple for runs whose microbatches have equal or unknown sizes."""
    return ()


@dataclass(frozen=True, eq=False)
class Pipelines:
    """Describes the pipeline rank, replica and stages of each recorded rank (worker).

    Attributes:
        ranks: ``[workers]``, global rank of each worker.
        pp_rank: ``[workers]``, pipeline rank of each worker.
        replica: ``[workers]``, index of each worker's data-parallel replica. The indices are
            consecutive and start at 0.
        stages: ``[pipeline ranks, chunks]``, index of the stage that each chunk of a rank computes.
        slices: Function that returns the number of slices of each microbatch for an iteration and a
            replica. It returns 1 if microbatches are not split.
        sizes: Function that returns the activation size in bytes of each microbatch for an
            iteration and a replica. It returns an empty tuple if the sizes are equal or unknown.
    """

    ranks: Ints
    pp_rank: Ints
    replica: Ints
    stages: Ints
    slices: StepSlices = whole
    sizes: StepSizes = no_sizes

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return self.stages.size

    def name(self, worker: int) -> str:
        """Returns the display name of ``worker``: rank, stages, and replica if several exist."""
        stages = self.stages[self.pp_rank[worker]].tolist()
        text = f"rank {self.ranks[worker]} (stage{'s' * (len(stages) > 1)} "
        text += ", ".join(map(str, stages))
        return text + (f", replica {self.replica[worker]})" if self.replica.any() else ")")


@dataclass(frozen=True, eq=False)
class Operations:
    """Contains the operations of some iterations, as arrays with one value per operation.

    Computations (forward, backward and weight-gradient passes) come first, ordered by iteration,
    worker and start time. Collectives and optimizer steps follow in the same order. Messages come
    last. There is one message for each computation whose input came from another rank.

    Attributes:
        where: Maps each worker to its pipeline rank, replica and stages.
        iteration: Iteration number (training step).
        worker: Index of the rank in ``where.ranks``. For a message, this is the receiving rank.
        kind: Kind of work, as an index into :data:`NAMES`.
        chunk: Index of the chunk on its rank, or -1 for operations without a chunk.
        stage: Index of the stage. For operations without a chunk, this is the stage of the rank's
            first chunk.
        microbatch: Index of the microbatch, or of the slice if microbatches are split (see
            ``SpanRow``), or -1 if there is none.
        start_ns: Start time in nanoseconds on the run's common clock.
        end_ns: End time in nanoseconds on the run's common clock.
        duration_s: Duration in seconds. For communication, it does not include the time spent
            waiting for other ranks.
        group: Index of the collective that the operation is part of, or -1 if there is none.
        source: Index of the rank that sent the message, or -1 for operations other than messages.
        input: Row of the computation that produced the input of this computation, or the content of
            this message. -1 if there is none.
        message: ``[computations]``, row of the message with the computation's input, or -1 if there
            is none.
        is_posted: Whether receives are posted one at a time. A rank then receives the messages of
            each direction in order.
        num_computes: Number of computations.
        orphans: Number of computations whose input was not produced by any recorded computation.
    """

    where: Pipelines
    iteration: Ints
    worker: Ints
    kind: Ints
    chunk: Ints
    stage: Ints
    microbatch: Ints
    start_ns: Ints
    end_ns: Ints
    duration_s: Floats
    group: Ints
    source: Ints
    input: Ints
    message: Ints
    is_posted: bool
    num_computes: int
    orphans: int

    def __len__(self) -> int:
        """Returns the number of operations."""
        return len(self.kind)

    def whole_microbatches(self, rows: slice) -> Ints:
        """Returns the microbatch of each operation in ``rows``, even if microbatches are split."""
        replica = self.where.replica[self.worker[rows]]
        iteration, microbatch = self.iteration[rows], self.microbatch[rows].astype(np.int64)
        for number, chosen in rows_by_value(replica):
            slices = partial(self.where.slices, replica=number)
            microbatch[chosen], _ = microbatches_of(iteration[chosen], microbatch[chosen], slices)
        return microbatch

    def describe(self, row: int) -> str:
        """Returns the display name of the operation in ``row``, with rank, kind and microbatch."""
        text = f"{self.where.name(int(self.worker[row]))}: {NAMES[self.kind[row]]}"
        if self.microbatch[row] >= 0:
            replica = int(self.where.replica[self.worker[row]])
            slices = self.where.slices(int(self.iteration[row]), replica)
            item = int(self.microbatch[row])
            text += f" of microbatch {item_label(item, slices if is_item(item, slices) else 1)}"
        if self.where.stages.shape[1] > 1 and self.chunk[row] >= 0:
            text += f", chunk {self.chunk[row]}"
        return f"{text}, iteration {self.iteration[row]}"


def pipelines_of(run: RunTrace, ranks: Iterable[int] | None = None) -> Pipelines:
    """Returns the ranks to simulate: the first rank of each tensor-parallel group.

    Args:
        run: Trace of the run.
        ranks: Global ranks to choose from, or ``None`` for all recorded ranks.
    """
    headers = [run.ranks[rank].header for rank in (run.ranks if ranks is None else ranks)]
    first = min(header.tp_rank for header in headers)
    headers = sorted((h for h in headers if h.tp_rank == first), key=lambda h: h.rank)
    dp_ranks, replica = np.unique([header.dp_rank for header in headers], return_inverse=True)
    first_of = {header.dp_rank: run.ranks[header.rank] for header in reversed(headers)}

    def slices(iteration: int, replica: int) -> SliceCounts:
        return first_of[int(dp_ranks[replica])].slices(iteration)

    def sizes(iteration: int, replica: int) -> tuple[int, ...]:
        return first_of[int(dp_ranks[replica])].sizes(iteration)

    return Pipelines(
        ranks=np.array([header.rank for header in headers]),
        pp_rank=np.array([header.pp_rank for header in headers]),
        replica=replica,
        stages=np.array([stages_of_rank(headers[0], rank) for rank in range(run.num_ranks)]),
        slices=slices,
        sizes=sizes,
    )


def usual_s(kinds: Sequence[Ints], durations_s: Sequence[Floats]) -> Floats:
    """Returns the ideal duration of each kind of work in seconds, ``[kinds]``.

    The ideal duration is the mean for computations, and the median for transfers. ``kinds`` and
    ``durations_s`` contain the kind of work and the duration in seconds of each operation.
    """
    kind = np.concatenate(kinds)
    duration = np.concatenate(durations_s)
    usual = np.zeros(len(NAMES))
    for index in np.unique(kind).tolist():
        durations = duration[kind == index]
        usual[index] = np.median(durations) if index >= FIRST_COMM else durations.mean()
    return usual


def read_operations(run: RunTrace, where: Pipelines, iterations: Iterable[int]) -> Operations:
    """Reads the operations of ``iterations`` from the trace of ``run``.

    Args:
        run: Trace of the run.
        where: Ranks to read, with their pipeline rank, replica and stages.
        iterations: Numbers of the iterations to read.

    Raises:
        TraceError: A file is damaged, nothing was recorded, or a backward pass began before its
            forward pass.
    """
    chosen = list(iterations)
    tables = [run.ranks[rank].table(chosen) for rank in where.ranks.tolist()]
    table = TraceTable.concat(tables)
    worker = np.repeat(np.arange(len(tables)), [len(part) for part in tables])
    computes = _in_order(table, worker, table.where(*DRAWN_ACTIONS))
    if not len(computes):
        raise TraceError(
            f"{run.origin} does not contain F, B or W actions in the requested iterations"
        )
    others = _in_order(table, worker, table.where("reduce", "optimizer", "collective"))
    both = np.concatenate([computes, others])
    kind = _kinds(table.take(both))
    pp_rank = where.pp_rank[worker[both]]
    chunk = table.chunk[both].astype(np.int64)
    stage = where.stages[pp_rank, np.maximum(chunk, 0) % where.stages.shape[1]]
    actions, owner = table.take(computes), worker[computes]
    inputs, orphans = _inputs(actions, stage[: len(computes)], where, owner)
    came = np.flatnonzero(inputs >= 0)
    came = came[owner[inputs[came]] != owner[came]]
    transfer, arrived, is_posted = _transfers(table, worker, actions, owner, came, where)
    message = np.full(len(computes), -1)
    message[came] = len(both) + np.arange(len(came))
    group = _groups(table.take(others), worker[others], where, kind[len(computes) :])
    duration = table.duration_ns[both] / NS_PER_S
    duration[len(computes) :] -= _waits(table.take(others), group)
    none = np.full(len(both), -1)
    message_kind = np.where(actions.kind[came] == KIND["F"], FORWARD_COMM, BACKWARD_COMM)
    operations = Operations(
        where=where,
        iteration=_joined(table.iteration[both], actions.iteration[came]),
        worker=_joined(worker[both], owner[came]),
        kind=_joined(kind, message_kind),
        chunk=_joined(chunk, actions.chunk[came]),
        stage=_joined(stage, stage[came]),
        microbatch=_joined(table.microbatch[both], actions.microbatch[came]),
        start_ns=_joined(table.start_ns[both], arrived - np.rint(transfer * NS_PER_S).astype(int)),
        end_ns=_joined(table.end_ns[both], arrived),
        duration_s=_joined(duration, transfer),
        group=_joined(_joined(none[: len(computes)], group), none[: len(came)]),
        source=_joined(none, owner[inputs[came]]),
        input=_joined(_joined(inputs, none[: len(others)]), inputs[came]),
        message=message,
        is_posted=is_posted,
        num_computes=len(computes),
        orphans=orphans,
    )
    _check_own_order(operations, actions)
    return operations


def _in_order(table: TraceTable, worker: Ints, mask: Mask) -> Ints:
    """Returns the rows where ``mask`` is true, ordered by iteration, worker and start."""
    rows = np.flatnonzero(mask)
    keys = (table.start_ns[rows], worker[rows], table.iteration[rows])
    ordered: Ints = rows[np.lexsort(keys)]
    return ordered


def _joined(first: Ints, second: Ints) -> Ints:
    return np.concatenate([first, second])


def _kinds(table: TraceTable) -> Ints:
    """Returns the kind of work of each span in ``table``, as an index into :data:`NAMES`."""
    by_kind = np.zeros(len(KIND) + 1, dtype=np.int64)
    for name, index in (("F", FORWARD), ("B", BACKWARD), ("W", WEIGHT), ("reduce", REDUCE)):
        by_kind[KIND[name]] = index
    by_kind[KIND["optimizer"]] = OPTIMIZER
    by_name = np.full(len(REASONS), NAMES.index("all-reduce"))
    by_name[[REASON[name] for name in COLLECTIVES]] = _COLLECTIVE + np.arange(len(COLLECTIVES))
    kind = np.where(table.kind == KIND["collective"], by_name[table.reason], by_kind[table.kind])
    kind[(kind == OPTIMIZER) & (table.reason == REASON["gc"])] = GC
    return kind


def _inputs(actions: TraceTable, stage: Ints, where: Pipelines, owner: Ints) -> tuple[Ints, int]:
    """Returns the row of the computation that produced each computation's input.

    The row is -1 for forward passes in the first stage, and for orphaned inputs, which no recorded
    computation produced. The second result is the number of orphaned inputs. ``actions`` contains
    the computations, ``stage`` their stages, and ``owner`` the indices of their workers.
    """
    is_f = actions.kind == KIND["F"]
    is_b = actions.kind == KIND["B"]
    last = where.num_stages - 1
    input_stage = np.where(is_f, stage - 1, np.where(is_b & (stage < last), stage + 1, stage))
    input_kind = np.where(is_f | (is_b & (stage == last)), KIND["F"], KIND["B"])
    replica = where.replica[owner]
    needs_input = ~(is_f & (stage == 0))
    inputs = find_rows(
        [actions.iteration, replica, actions.kind, stage, actions.microbatch],
        [actions.iteration, replica, input_kind, input_stage, actions.microbatch],
    )
    inputs[~needs_input] = -1
    return inputs, int((needs_input & (inputs < 0)).sum())


def _transfers(
    table: TraceTable, worker: Ints, actions: TraceTable, owner: Ints, came: Ints, where: Pipelines
) -> tuple[Floats, Ints, bool]:
    """Returns the transfer times of the messages that computations received as their inputs.

    If the arrival of a message was not recorded, its transfer time is assumed to be the median of
    the other messages in the same direction.

    ``table`` contains all spans, and ``worker`` the rank index of each span. ``actions`` contains
    the computations, and ``owner`` the rank index of each computation. ``came`` contains the rows
    of those computations that received their input from another rank.

    Returns:
        Time of each transfer in seconds, arrival time of each message in nanoseconds, and whether
        ranks posted their receives one at a time.
    """
    keys = [
        actions.iteration[came],
        owner[came],
        actions.kind[came],
        actions.chunk[came],
        actions.microbatch[came],
    ]
    # The index -1 of unknown peers selects the additional last element, which stays -1.
    worker_of_rank = np.full(int(where.ranks.max()) + 2, -1)
    worker_of_rank[where.ranks] = np.arange(len(where.ranks))

    def rows_of(kind: str) -> tuple[Ints, TraceTable, Ints]:
        rows = np.flatnonzero((table.kind == KIND[kind]) & (table.of >= 0))
        part = table.take(rows)
        receiver = worker[rows]
        if kind == "send":
            is_known = (part.peer >= 0) & (part.peer < len(worker_of_rank) - 1)
            receiver = worker_of_rank[np.where(is_known, part.peer, -1)]
        columns = [part.iteration, receiver, part.of, part.chunk, part.microbatch]
        matches = find_rows(columns, keys)
        return matches >= 0, part, np.maximum(matches, 0)

    has_receive, receives, matches = rows_of("receive")
    start = actions.start_ns[came]
    if not len(receives):
        return np.zeros(len(came)), start, False
    arrived = np.where(has_receive, receives.start_ns[matches], start)
    reason = receives.reason[matches]
    is_posted = has_receive & (reason == REASON["posted"])
    is_seen = is_posted | (has_receive & (reason == REASON["seen"]))
    has_send, sends, matches = rows_of("send")
    began = sends.start_ns[matches] if len(sends) else arrived
    has_wait, waits, matches = rows_of("wait")
    if len(waits) and is_posted.any():
        began = np.where(is_posted & has_wait, np.maximum(began, waits.start_ns[matches]), began)
    transfer = np.maximum(arrived - began, 0) / NS_PER_S
    is_measured = is_seen & has_send
    for kind in (KIND["F"], KIND["B"]):
        is_kind = actions.kind[came] == kind
        measured = transfer[is_kind & is_measured]
        transfer[is_kind & ~is_measured] = float(np.median(measured)) if len(measured) else 0.0
    return transfer, arrived, bool(is_posted.any())


def _groups(table: TraceTable, worker: Ints, where: Pipelines, kind: Ints) -> Ints:
    """Returns the index of the collective to which each operation belongs, or -1 if there is none.

    Operations belong to the same collective if they have the same iteration, the same kind, the
    same lowest rank, and the same position among such operations on their rank.
    """
    is_reduce = table.kind == KIND["reduce"]
    root = np.where(is_reduce, where.pp_rank[worker], table.peer)
    if is_reduce.any():
        # If all ranks finish their gradient reduction at the same time, it is a single collective.
        # Otherwise, each stage has a separate reduction.
        _, step = np.unique(table.iteration, return_inverse=True)
        last, first, least = (np.full(int(step.max()) + 1, bound) for bound in (0, _FAR, _FAR))
        np.maximum.at(last, step[is_reduce], table.end_ns[is_reduce])
        np.minimum.at(first, step[is_reduce], table.end_ns[is_reduce])
        np.minimum.at(least, step[is_reduce], table.duration_ns[is_reduce])
        root[is_reduce & (last - first <= least)[step]] = 0
    is_member = (root >= 0) & (kind >= FIRST_COMM)
    rows = np.flatnonzero(is_member)
    keys = [column[rows] for column in (table.iteration, kind, root, worker)]
    group = np.full(len(table), -1)
    if len(rows):
        # Rows are ordered by start time, and a stable sort preserves that order. nth_of_equal()
        # therefore numbers each rank's collectives in the order in which they began.
        order = np.argsort(row_keys(keys), kind="stable")
        keys[3][order] = nth_of_equal([key[order] for key in keys])
        _, group[rows] = np.unique(row_keys(keys), return_inverse=True)
    return group


def _waits(table: TraceTable, group: Ints) -> Floats:
    """Returns the time in seconds that each rank waited for the last rank of a collective.

    ``group`` contains the index of each operation's collective. The time is 0 for operations that
    do not belong to a collective.
    """
    waited = np.zeros(len(table))
    rows = np.flatnonzero(group >= 0)
    if len(rows):
        last = np.full(int(group.max()) + 1, -_FAR)
        np.maximum.at(last, group[rows], table.start_ns[rows])
        late = last[group[rows]] - table.start_ns[rows]
        waited[rows] = np.minimum(late, table.duration_ns[rows]) / NS_PER_S
    return waited


def _check_own_order(operations: Operations, actions: TraceTable) -> None:
    """Raises ``TraceError`` if a backward or W pass began before the pass that it needs."""
    for kind, before in (("B", "F"), ("W", "B")):
        rows = np.flatnonzero(actions.kind == KIND[kind])
        columns = [
            actions.iteration,
            operations.worker[: len(actions)],
            actions.kind,
            actions.chunk,
            actions.microbatch,
        ]
        keys = [column[rows] for column in columns]
        keys[2] = np.full(len(rows), KIND[before])
        predecessors = find_rows(columns, keys)
        wrong = np.flatnonzero(predecessors > rows)
        if len(wrong):
            raise TraceError(
                f"{operations.describe(int(rows[wrong[0]]))} ran before the "
                f"{NAMES[(FORWARD, BACKWARD)[before == 'B']]} that it needs; the trace or its "
                "clock is damaged"
            )


_GATHER = NAMES.index("params-all-gather")
_ENDED = 0.05
"""Fraction of a computation that may overlap with the next one before both count as concurrent.

Consecutive operations may overlap slightly because of rounding and differences between the clocks
of GPU and host.
"""


@dataclass(frozen=True, eq=False)
class Graph:
    """Contains the dependencies between the operations of some iterations.

    Attributes:
        node: ``[operations]``, index of the operation's node.
        before: ``[2, nodes]``, up to two predecessors of each node. Node 0 is the start of the
            step.
        levels: ``[levels + 1]``, index of the first node of each topological level, and the number
            of nodes as the last element.
        final: Indices of the nodes without successors, ordered by step.
        final_step: ``[steps]``, position in ``final`` of each step's first node.
    """

    node: Ints
    before: Ints
    levels: Ints
    final: Ints
    final_step: Ints

    def simulate(self, durations_s: Sequence[Floats]) -> Floats:
        """Returns the step times for alternative durations of the operations.

        Args:
            durations_s: Alternatives, each with the duration of every operation in seconds.

        Returns:
            Time of each step in seconds, ``[steps, alternatives]``.
        """
        ends = self._ends(np.stack(durations_s, axis=1))
        steps: Floats = np.maximum.reduceat(ends[self.final], self.final_step, axis=0)
        return steps

    def ends_s(self, durations_s: Floats) -> Floats:
        """Returns the time in seconds from the step's start to the end of each operation."""
        ends: Floats = self._ends(durations_s[:, None])[self.node, 0]
        return ends

    def _ends(self, durations_s: Floats) -> Floats:
        ends = np.zeros((self.before.shape[1], durations_s.shape[1]))
        ends[self.node] = durations_s
        first, second = self.before
        for low, high in zip(self.levels[:-1].tolist(), self.levels[1:].tolist(), strict=True):
            ready = ends.take(first[low:high], axis=0)
            np.maximum(ready, ends.take(second[low:high], axis=0), out=ready)
            ends[low:high] += ready
        return ends


def build_graph(operations: Operations) -> Graph:
    """Returns the dependencies between ``operations``, sorted topologically.

    Raises:
        TraceError: The dependencies contain a cycle, so the recorded order is impossible. The
            message names the earliest operation of the cycle.
    """
    sources, targets, count = _edges(operations)
    # Node 0 is the start of every step. Increase the numbers of all other nodes by 1.
    before = _two_each(sources + 1, targets + 1, count + 1)
    level, is_known = _levels(before)
    if not is_known.all():
        stuck = np.flatnonzero(~is_known[1 : len(operations) + 1])
        first = stuck[np.argmin(operations.start_ns[stuck])]
        raise TraceError(
            f"{operations.describe(int(first))} waits for another operation and vice versa, so the "
            "recorded order is impossible; check whether clocks differ, or whether two jobs share "
            "a folder"
        )
    order = np.argsort(level, kind="stable")
    node = np.empty(len(order), dtype=np.int32)
    node[order] = np.arange(len(order))
    waited = np.zeros(len(order), dtype=np.bool_)
    waited[before] = True
    final = np.flatnonzero(~waited[1 : len(operations) + 1])
    final = final[np.argsort(operations.iteration[final], kind="stable")]
    return Graph(
        node=node[1 : len(operations) + 1],
        before=node[before[:, order]],
        levels=np.append(np.flatnonzero(np.diff(level[order], prepend=-1)), len(order))[1:],
        final=node[final + 1],
        final_step=np.flatnonzero(np.diff(operations.iteration[final], prepend=-1)),
    )


def ideal_steps(
    run: RunTrace, ranks: Sequence[int], iterations: Sequence[int]
) -> dict[int, TraceTable] | None:
    """Simulates ``iterations`` on ``ranks`` as if all work took the ideal time for its kind.

    Returns:
        Computations of each rank in the ideal steps, keyed by global rank. In an ideal step, no
        rank is slower than the others. Each ideal step begins when the recorded step began.
        ``None`` if operations are missing, or if the recorded order is impossible.
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
    return {
        rank: table.take(worker == index) for index, rank in enumerate(ops.where.ranks.tolist())
    }


def _edges(ops: Operations) -> tuple[Ints, Ints, int]:
    """Returns the source and target nodes of every dependency, and the number of nodes.

    Each operation has a node. Each collective has one additional node, which waits for all
    participating ranks.
    """
    computes = np.arange(ops.num_computes)
    messages = np.flatnonzero(ops.source >= 0)
    others = np.arange(ops.num_computes, len(ops) - len(messages))
    rank = ops.iteration * len(ops.where.ranks) + ops.worker
    pairs: list[tuple[Ints, Ints]] = []

    def follow(rows: Ints, segment: Ints) -> None:
        same = segment[rows[1:]] == segment[rows[:-1]]
        pairs.append((rows[:-1][same], rows[1:][same]))

    # If computations on a rank overlap, the previous computation may still be running when the next
    # one starts. Each computation then depends on the last one that had finished before it started.
    span = ops.end_ns[computes] - ops.start_ns[computes]
    ended = ops.end_ns[computes] - (span * _ENDED).astype(np.int64)
    overlaps = (np.diff(rank[computes]) == 0) & (ops.start_ns[computes][1:] < ended[:-1])
    overlaps = np.isin(rank[computes], rank[computes][1:][overlaps])
    follow(computes[~overlaps], rank)
    follow(others, rank)
    pairs.append((ops.input[messages], messages))
    by_message = computes[ops.message >= 0]
    pairs.append((ops.message[by_message], by_message))
    local = computes[(ops.input[computes] >= 0) & (ops.message < 0)]
    pairs.append((ops.input[local], local))
    if ops.is_posted:
        way = rank * 2 + ops.kind % 2
        follow(messages[np.lexsort((ops.end_ns[messages], way[messages]))], way)
    pairs += _around(ops, rank, ended, computes[overlaps], others)
    sources, targets = (np.concatenate(side) for side in zip(*pairs, strict=True))
    # A collective begins when all ranks have joined. Therefore, the collective's node gets the
    # dependencies of all members, and the members depend on this node.
    group = ops.group[targets]
    targets = np.where(group >= 0, len(ops) + group, targets)
    members = np.flatnonzero(ops.group >= 0)
    groups = len(ops) + ops.group[members]
    count = len(ops) + int(ops.group.max(initial=-1)) + 1
    return np.append(sources, groups), np.append(targets, members), count


def _around(
    ops: Operations, rank: Ints, ended_ns: Ints, overlapping: Ints, others: Ints
) -> list[tuple[Ints, Ints]]:
    """Returns the dependencies of overlapping computations and of collectives.

    Args:
        ops: Operations of the iterations.
        rank: ``[operations]``, index of the operation's (iteration, rank) pair.
        ended_ns: ``[computations]``, time in nanoseconds from which each computation is considered
            to be finished.
        overlapping: Rows of computations that overlap in time with another computation on their
            rank.
        others: Rows of collectives and optimizer steps.

    Returns:
        Pairs of arrays with the source rows and target rows of the dependencies.
    """
    computes = np.arange(ops.num_computes)
    start = int(ops.start_ns.min())
    width = int(ops.end_ns.max()) - start + 1
    _, number = np.unique(rank, return_inverse=True)
    key = number[computes] * width + np.clip(ended_ns - start, 0, width - 1)
    order = np.argsort(key, kind="stable")

    def latest_ended(rows: Ints) -> tuple[Ints, Mask]:
        begun = number[rows] * width + ops.start_ns[rows] - start
        index = np.searchsorted(key[order], begun, "right") - 1
        latest = computes[order[np.maximum(index, 0)]]
        return latest, (index >= 0) & (number[latest] == number[rows]) & (latest != rows)

    before, has_before = latest_ended(overlapping)
    pairs = [(before[has_before], overlapping[has_before])]
    if not len(others):
        return pairs
    latest, after = latest_ended(others)
    heads = np.flatnonzero(np.diff(number[computes], prepend=-1))
    first = np.full(int(number.max()) + 1, -1)
    first[number[computes[heads]]] = computes[heads]
    early = others[~after & (ops.kind[others] != _GATHER)]
    early = early[ops.start_ns[early] < ops.start_ns[np.maximum(first[number[early]], 0)]]
    pairs += [(latest[after], others[after]), (early, first[number[early]])]
    # The first forward pass of a chunk waits for the all-gather of the chunk's parameters.
    gathers = others[ops.kind[others] == _GATHER]
    chunks = ops.where.stages.shape[1]
    of_chunk = number[computes] * chunks + ops.chunk[computes]
    distinct, rows = np.unique(of_chunk, return_index=True)
    gathered = number[gathers] * chunks + np.maximum(ops.chunk[gathers], 0)
    index = np.minimum(np.searchsorted(distinct, gathered), len(distinct) - 1)
    begins = computes[rows[index]]
    fits = (distinct[index] == gathered) & (ops.start_ns[gathers] <= ops.start_ns[begins])
    pairs.append((gathers[fits], begins[fits]))
    return [(a[(a >= 0) & (b >= 0)], b[(a >= 0) & (b >= 0)]) for a, b in pairs]


def _two_each(sources: Ints, targets: Ints, count: int) -> Ints:
    """Returns up to two predecessors of each node, ``[2, nodes]``. Missing predecessors are 0.

    If a node has more than two predecessors, helper nodes with at most two predecessors are
    inserted in front of it. ``sources`` and ``targets`` contain the two nodes of each dependency,
    and ``count`` is the number of nodes.
    """
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
    """Returns the topological level of each node, and whether the level is known.

    The levels of nodes that are on a cycle or depend on a cycle are unknown.
    """
    count = before.shape[1]
    waits = (before > 0).sum(axis=0).astype(np.int8)
    targets = np.concatenate([np.flatnonzero(before[0]), np.flatnonzero(before[1])])
    sources = np.concatenate([row[row > 0] for row in before])
    order = np.argsort(sources, kind="stable")
    targets = targets[order]
    begins = np.searchsorted(sources[order], np.arange(count + 1))
    level = np.zeros(count, dtype=np.int32)
    is_known = waits == 0
    # Skip node 0, the start of a step, because its level is already set.
    front = np.flatnonzero(is_known)[1:]
    number = 1
    while len(front):
        level[front] = number
        sizes = begins[front + 1] - begins[front]
        shift = np.cumsum(sizes) - sizes
        edges = np.repeat(begins[front] - shift, sizes) + np.arange(int(sizes.sum()))
        reached = targets[edges]
        np.subtract.at(waits, reached, 1)
        front = np.unique(reached[waits[reached] == 0])
        is_known[front] = True
        number += 1
    return level, is_known
