"""Reads the operations of some iterations as columns, and simulates them with any times.

Owns their names, the stages they belong to, and which part of a communication is its transfer: it
begins when the last member does, what comes before is waiting for others. Reads any trace, ours or
an imported one.

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

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis", arXiv 2505.05713,
section 3; the names of kinds are those of its published traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.span_columns import (
    KIND,
    REASON,
    Ints,
    Mask,
    TraceTable,
    find_rows,
    nth_of_equal,
    row_keys,
)
from megatron.adaptive.trace.step_view import stages_of_rank
from megatron.adaptive.trace.trace_format import COLLECTIVES, DRAWN_ACTIONS, REASONS

Floats = npt.NDArray[np.float64]

FORWARD, BACKWARD, WEIGHT, OPTIMIZER, GC, FORWARD_COMM, BACKWARD_COMM, REDUCE = range(8)
NAMES = (
    *("forward-compute", "backward-compute", "weight-compute", "optimizer", "gc"),
    *("forward-pp-comm", "backward-pp-comm", "reduce"),
    *COLLECTIVES,
)
"""Kinds of work; the first five compute, the others communicate."""
FIRST_COMM = FORWARD_COMM
_COLLECTIVE = len(NAMES) - len(COLLECTIVES)

NS_PER_S = 1e9
_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Pipelines:
    """Says where each recorded rank stands.

    Attributes:
        ranks: ``[workers]``, global ranks.
        pp_rank: ``[workers]``.
        replica: ``[workers]``, from 0 without gaps.
        stages: ``[pipeline ranks, chunks]``, the stage that lies there.
    """

    ranks: Ints
    pp_rank: Ints
    replica: Ints
    stages: Ints

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return self.stages.size

    def name(self, worker: int) -> str:
        """Names a worker for people."""
        stages = self.stages[self.pp_rank[worker]].tolist()
        text = f"rank {self.ranks[worker]} (stage{'s' * (len(stages) > 1)} "
        text += ", ".join(map(str, stages))
        return text + (f", replica {self.replica[worker]})" if self.replica.any() else ")")


@dataclass(frozen=True, eq=False)
class Operations:
    """Operations of some iterations; every column is ``[operations]``.

    Computes come first, ordered by iteration, worker and start; then collectives and optimizer
    steps, ordered likewise; then messages, one for each compute whose input came from another rank.

    Attributes:
        where: the ranks.
        iteration: number of the iteration.
        worker: place in ``where.ranks``; of a message the receiver.
        kind: place in :data:`NAMES`.
        chunk: on its rank, -1 for none.
        stage: of the model; that of the rank's first chunk for what belongs to none.
        microbatch: -1 for none.
        start_ns: on the run's clock.
        end_ns: likewise.
        duration_s: of a communication its transfer only.
        group: number of the collective it is a member of, -1 for none.
        source: worker that sent a message, -1 for what is none.
        input: of a compute, the compute whose result it needs, -1 for none; of a message, the
            compute whose result it carries.
        message: of a compute, the message that brings its input, -1 for none.
        is_posted: messages of a direction follow each other, and their receiver waits for each.
        num_computes: how many computes there are.
        orphans: computes whose input nobody is recorded to have made.
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
        """The number of operations."""
        return len(self.kind)

    def describe(self, row: int) -> str:
        """Names an operation for people: rank, kind of work and microbatch."""
        text = f"{self.where.name(int(self.worker[row]))}: {NAMES[self.kind[row]]}"
        if self.microbatch[row] >= 0:
            text += f" of microbatch {self.microbatch[row]}"
        if self.where.stages.shape[1] > 1 and self.chunk[row] >= 0:
            text += f", chunk {self.chunk[row]}"
        return f"{text}, iteration {self.iteration[row]}"


def pipelines_of(run: RunTrace, ranks: Iterable[int] | None = None) -> Pipelines:
    """Finds the ranks whose operations are simulated: the first of each tensor-parallel group.

    Args:
        run: the run.
        ranks: only these global ranks; ``None`` for all.

    """
    headers = [run.ranks[rank].header for rank in (run.ranks if ranks is None else ranks)]
    first = min(header.tp_rank for header in headers)
    headers = sorted((h for h in headers if h.tp_rank == first), key=lambda h: h.rank)
    _, replica = np.unique([header.dp_rank for header in headers], return_inverse=True)
    return Pipelines(
        ranks=np.array([header.rank for header in headers]),
        pp_rank=np.array([header.pp_rank for header in headers]),
        replica=replica,
        stages=np.array([stages_of_rank(headers[0], rank) for rank in range(run.num_ranks)]),
    )


def usual_s(kinds: Sequence[Ints], durations_s: Sequence[Floats]) -> Floats:
    """Returns by kind of work: mean seconds of computes, median of transfers."""
    kind, duration = np.concatenate(kinds), np.concatenate(durations_s)
    usual = np.zeros(len(NAMES))
    for place in np.unique(kind).tolist():
        known = duration[kind == place]
        usual[place] = np.median(known) if place >= FIRST_COMM else known.mean()
    return usual


def read_operations(run: RunTrace, where: Pipelines, iterations: Iterable[int]) -> Operations:
    """Reads the operations of some iterations.

    Args:
        run: the run.
        where: its ranks.
        iterations: numbers of iterations.

    Raises:
        TraceError: a file is damaged, nothing was recorded, or a rank did something before what it
            depends on.
    """
    chosen = list(iterations)
    tables = [run.ranks[rank].table(chosen) for rank in where.ranks.tolist()]
    table = TraceTable.concat(tables)
    worker = np.repeat(np.arange(len(tables)), [len(part) for part in tables])

    def ordered(mask: Mask) -> Ints:
        rows = np.flatnonzero(mask)
        keys = (table.start_ns[rows], worker[rows], table.iteration[rows])
        found: Ints = rows[np.lexsort(keys)]
        return found

    computes = ordered(table.where(*DRAWN_ACTIONS))
    if not len(computes):
        raise TraceError(f"{run.origin} holds no F, B or W in the iterations asked for")
    others = ordered(table.where("reduce", "optimizer", "collective"))
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

    def joined(first: Ints, of_messages: Ints) -> Ints:
        return np.concatenate([first, of_messages])

    of_message = np.where(actions.kind[came] == KIND["F"], FORWARD_COMM, BACKWARD_COMM)
    found = Operations(
        where=where,
        iteration=joined(table.iteration[both], actions.iteration[came]),
        worker=joined(worker[both], owner[came]),
        kind=joined(kind, of_message),
        chunk=joined(chunk, actions.chunk[came]),
        stage=joined(stage, stage[came]),
        microbatch=joined(table.microbatch[both], actions.microbatch[came]),
        start_ns=joined(table.start_ns[both], arrived - np.rint(transfer * NS_PER_S).astype(int)),
        end_ns=joined(table.end_ns[both], arrived),
        duration_s=joined(duration, transfer),
        group=joined(joined(none[: len(computes)], group), none[: len(came)]),
        source=joined(none, owner[inputs[came]]),
        input=joined(joined(inputs, none[: len(others)]), inputs[came]),
        message=message,
        is_posted=is_posted,
        num_computes=len(computes),
        orphans=orphans,
    )
    _check_own_order(found, actions)
    return found


def _kinds(table: TraceTable) -> Ints:
    """Returns ``[spans]``: places in :data:`NAMES`."""
    by_kind = np.zeros(len(KIND) + 1, dtype=np.int64)
    for word, place in (("F", FORWARD), ("B", BACKWARD), ("W", WEIGHT), ("reduce", REDUCE)):
        by_kind[KIND[word]] = place
    by_kind[KIND["optimizer"]] = OPTIMIZER
    by_name = np.full(len(REASONS), NAMES.index("all-reduce"))
    by_name[[REASON[word] for word in COLLECTIVES]] = _COLLECTIVE + np.arange(len(COLLECTIVES))
    kind = np.where(table.kind == KIND["collective"], by_name[table.reason], by_kind[table.kind])
    kind[(kind == OPTIMIZER) & (table.reason == REASON["gc"])] = GC
    return kind


def _inputs(actions: TraceTable, stage: Ints, where: Pipelines, owner: Ints) -> tuple[Ints, int]:
    """Finds the compute that made each one's input, and counts those that lack theirs."""
    is_f, is_b = actions.kind == KIND["F"], actions.kind == KIND["B"]
    last = where.num_stages - 1
    wanted_stage = np.where(is_f, stage - 1, np.where(is_b & (stage < last), stage + 1, stage))
    wanted_kind = np.where(is_f | (is_b & (stage == last)), KIND["F"], KIND["B"])
    replica = where.replica[owner]
    needs = ~(is_f & (stage == 0))
    made = find_rows(
        [actions.iteration, replica, actions.kind, stage, actions.microbatch],
        [actions.iteration, replica, wanted_kind, wanted_stage, actions.microbatch],
    )
    made[~needs] = -1
    return made, int((needs & (made < 0)).sum())


def _transfers(
    table: TraceTable, worker: Ints, actions: TraceTable, owner: Ints, came: Ints, where: Pipelines
) -> tuple[Floats, Ints, bool]:
    """Returns transfer seconds and arrival of the message before each compute in ``came``.

    Of those whose arrival was not seen the transfer is the median of the others of their kind.
    """
    wanted = [actions.iteration[came], owner[came], actions.kind[came]]
    wanted += [actions.chunk[came], actions.microbatch[came]]
    target = np.full(int(where.ranks.max()) + 2, -1)  # the last one stands for -1
    target[where.ranks] = np.arange(len(where.ranks))

    def rows_of(kind: str) -> tuple[Ints, TraceTable, Ints]:
        rows = np.flatnonzero((table.kind == KIND[kind]) & (table.of >= 0))
        part, mine = table.take(rows), worker[rows]
        if kind == "send":
            known = (part.peer >= 0) & (part.peer < len(target) - 1)
            mine = target[np.where(known, part.peer, -1)]
        known_columns = [part.iteration, mine, part.of, part.chunk, part.microbatch]
        found = find_rows(known_columns, wanted)
        return found >= 0, part, np.maximum(found, 0)

    has_receive, receives, at = rows_of("receive")
    start = actions.start_ns[came]
    if not len(receives):
        return np.zeros(len(came)), start, False
    arrived = np.where(has_receive, receives.start_ns[at], start)
    reason = receives.reason[at]
    is_posted = has_receive & (reason == REASON["posted"])
    is_seen = is_posted | (has_receive & (reason == REASON["seen"]))
    has_send, sends, at = rows_of("send")
    began = sends.start_ns[at] if len(sends) else arrived
    has_wait, waits, at = rows_of("wait")
    if len(waits) and is_posted.any():
        began = np.where(is_posted & has_wait, np.maximum(began, waits.start_ns[at]), began)
    transfer = np.maximum(arrived - began, 0) / NS_PER_S
    known = is_seen & has_send
    for kind in (KIND["F"], KIND["B"]):
        mine = actions.kind[came] == kind
        usual = float(np.median(transfer[mine & known])) if (mine & known).any() else 0.0
        transfer[mine & ~known] = usual
    return transfer, arrived, bool(is_posted.any())


def _groups(table: TraceTable, worker: Ints, where: Pipelines, kind: Ints) -> Ints:
    """Returns ``[others]``: number of the collective that each is a member of, -1 for none.

    Members have iteration, name and lowest rank alike, and are each rank's n-th of these.
    """
    is_reduce = table.kind == KIND["reduce"]
    root = np.where(is_reduce, where.pp_rank[worker], table.peer)
    if is_reduce.any():
        # One that ends everywhere at once is one of all ranks, else each stage has its own.
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
        # The rank's n-th: rows are ordered by iteration, worker and start.
        order = np.argsort(row_keys(keys), kind="stable")
        keys[3][order] = nth_of_equal([key[order] for key in keys])
        _, group[rows] = np.unique(row_keys(keys), return_inverse=True)
    return group


def _waits(table: TraceTable, group: Ints) -> Floats:
    """Returns seconds that each member of a collective waited for the last one, 0 for others."""
    waited = np.zeros(len(table))
    rows = np.flatnonzero(group >= 0)
    if len(rows):
        last = np.full(int(group.max()) + 1, -_FAR)
        np.maximum.at(last, group[rows], table.start_ns[rows])
        late = last[group[rows]] - table.start_ns[rows]
        waited[rows] = np.minimum(late, table.duration_ns[rows]) / NS_PER_S
    return waited


def _check_own_order(found: Operations, actions: TraceTable) -> None:
    """Refuses a backward that its rank did before its forward, and a W before its B."""
    for kind, before in (("B", "F"), ("W", "B")):
        rows = np.flatnonzero(actions.kind == KIND[kind])
        columns = [actions.iteration, found.worker[: len(actions)], actions.kind]
        columns += [actions.chunk, actions.microbatch]
        wanted = [column[rows] for column in columns]
        wanted[2] = np.full(len(rows), KIND[before])
        places = find_rows(columns, wanted)
        wrong = np.flatnonzero(places > rows)
        if len(wrong):
            raise TraceError(
                f"{found.describe(int(rows[wrong[0]]))} ran before its own "
                f"{NAMES[(FORWARD, BACKWARD)[before == 'B']]}; the trace or its clock is damaged"
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
