"""Improves a schedule by simulated annealing, given the durations of its actions.

``auto`` either runs the result, or uses it as the schedule that the ``hinted`` rule follows. The
actions of all ranks form a graph, in which each action depends on the previous action of its rank
and on the action that computes its input. A step takes as long as the longest path of this graph,
the critical path. The path stays on one rank until an action waits for another rank's result, then
changes to that rank. The path's actions on one rank between two such changes are a block. In this
example, the path visits ranks 1, 0 and 1, and its blocks are in brackets:

    rank 0 |      F0 F1 F2  B1 W1 [B0 W0]          W0 after B0 delays nothing;
    rank 1 | [F0 F1 B1]               [...]        with B1 before F1, B1 starts earlier

The step can only become shorter if an action moves within its block. Each attempt chooses a random
action of the path, and either moves the action to one end of its block or swaps it with a
neighbour. The change is kept if the step does not become longer. Otherwise, it is kept with a
probability that is smaller for larger increases in step time, and that falls with each attempt. The
result is the best order encountered in tens of thousands of attempts. Schedules of large pipelines
are not annealed, because this would take too long and gain less.

As everywhere in this package, each stage runs its microbatches in ascending order, and memory stays
within the limit (cap). All numbers are integers and the random sequence is fixed, so equal
arguments give the same order on every machine.

The functions up to and including ``anneal`` use only numbers, like the functions of
``rank_kernel``, so that ``numba_kernels`` can compile them.

Source: Moves within blocks of the critical path are from van Laarhoven, Aarts and Lenstra 1992,
"Job shop scheduling by simulated annealing". Moves to the ends of a block are from Brucker, Jurisch
and Sievers 1994.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from megatron.adaptive.schedule.action import NUMBER, ActionKind
from megatron.adaptive.schedule.memory_caps import with_rounding
from megatron.adaptive.schedule.numba_kernels import compile_function, has_code, is_cached
from megatron.adaptive.schedule.policy import actions_of
from megatron.adaptive.schedule.rank_kernel import MEMORY_SCALE
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.workload import Workload

VISITS = 500_000_000
"""Maximum number of action end times that all attempts together may compute.

Computing this many end times takes about a second.
"""
LEAST_ORDERS = 40_000
"""Minimum number of random changes to attempt.

If the limit ``VISITS`` allows fewer attempts, the schedule is not annealed.
"""
MOST_ORDERS = 200_000
"""Maximum number of random changes to attempt."""
COMPILE_S = 25.0
"""Maximum time in seconds to compile the annealing functions, unless the processors are overloaded.
"""
HEAT = 2
"""Largest increase in step time that the first attempts may accept, as a multiple of the mean
duration of an action.
"""


class OrderGraph(NamedTuple):
    """Graph of all ranks' actions, with their execution order and inputs, as ``int64`` arrays.

    An action is identified by its index in the arrays that have one entry per action. Scratch
    arrays contain valid values only while the function that uses them runs.

    Attributes:
        rows: Actions of each rank in execution order, ``[ranks, longest order]``.
        lengths: Number of actions on each rank.
        best: Copy of ``rows`` from the attempt with the shortest step so far.
        needs: For each action, the index of the action whose result is its input, or -1 if no input
            is needed.
        gaps: For each action, the time in picoseconds from the end of the action in ``needs`` to
            the arrival of that action's result.
        durations: Duration of each action in picoseconds.
        lanes: Integer ``kind * chunks + chunk`` of each action, which identifies its kind and
            chunk.
        takes: Memory that each action allocates, or a negative amount if the action frees memory.
            The unit is one microbatch or slice in one chunk, or a millionth of this unit if slices
            differ in size.
        ranks: Rank that runs each action.
        cap: Limit on the memory of a rank in the unit of ``takes``, ``[1]``.
        ends: Scratch array with the end time of each action in picoseconds, or -1 before the end
            time is known.
        positions: Scratch array with the index of each action in its rank's row of ``rows``.
        path: Scratch array with the actions of the critical path, last action first.
        position: Scratch array of ``finish`` with the index in ``rows`` of each rank's next action.
        now: Scratch array of ``finish`` with the end time of each rank's latest action, in
            picoseconds.
        stack: Scratch array of ``finish`` with the ranks whose next action may have received its
            input.
        waiting: Scratch array of ``finish`` with the rank that waits for the result of each action,
            or -1 if no rank waits.
    """

    rows: Any
    lengths: Any
    best: Any
    needs: Any
    gaps: Any
    durations: Any
    lanes: Any
    takes: Any
    ranks: Any
    cap: Any
    ends: Any
    positions: Any
    path: Any
    position: Any
    now: Any
    stack: Any
    waiting: Any


def finish(o: OrderGraph) -> int:
    """Computes the end times of all actions in ``o``, and writes them to ``o.ends``.

    Returns the end time of the step in picoseconds, or -1 if the ranks deadlock.
    """
    ranks = len(o.lengths)
    left = len(o.needs)
    for action in range(len(o.needs)):
        o.ends[action] = -1
        o.waiting[action] = -1
    for rank in range(ranks):
        o.position[rank] = 0
        o.now[rank] = 0
        o.stack[rank] = rank
    top = ranks
    while top > 0:
        top -= 1
        rank = o.stack[top]
        index = o.position[rank]
        now = o.now[rank]
        while index < o.lengths[rank]:
            action = o.rows[rank, index]
            needed = o.needs[action]
            if needed >= 0:
                if o.ends[needed] < 0:
                    o.waiting[needed] = rank
                    break
                now = max(now, o.ends[needed] + o.gaps[action])
            now += o.durations[action]
            o.ends[action] = now
            if o.waiting[action] >= 0:
                o.stack[top] = o.waiting[action]
                o.waiting[action] = -1
                top += 1
            index += 1
            left -= 1
        o.position[rank] = index
        o.now[rank] = now
    if left > 0:
        return -1
    step = 0
    for rank in range(ranks):
        step = max(step, o.now[rank])
    return step


def trace(o: OrderGraph, step: int) -> int:
    """Finds the critical path of a step that ends at the time ``step``, in picoseconds.

    Writes the actions of the path to ``o.path``, last action first, and returns the number of
    actions.
    """
    action = -1
    for rank in range(len(o.lengths)):
        for index in range(o.lengths[rank]):
            o.positions[o.rows[rank, index]] = index
        last = o.rows[rank, o.lengths[rank] - 1]
        if o.ends[last] == step:
            action = last
    count = 0
    while action >= 0:
        o.path[count] = action
        count += 1
        rank = o.ranks[action]
        index = o.positions[action]
        before = o.rows[rank, index - 1] if index > 0 else -1
        is_busy = before >= 0 and o.ends[before] == o.ends[action] - o.durations[action]
        action = before if is_busy else o.needs[action]
    return count


def shift(o: OrderGraph, rank: int, index: int, to: int) -> None:
    """Moves an action of ``rank`` from index ``index`` to index ``to`` of its row in ``o.rows``."""
    moved = o.rows[rank, index]
    way = 1 if to > index else -1
    while index != to:
        o.rows[rank, index] = o.rows[rank, index + way]
        index += way
    o.rows[rank, to] = moved


def reach(o: OrderGraph, rank: int, index: int, to: int) -> int:
    """Returns the allowed index closest to ``to`` for the action at ``index`` of ``rank``.

    The action must not pass an action of the same kind and chunk, because each stage runs its
    microbatches in ascending order.
    """
    lane = o.lanes[o.rows[rank, index]]
    way = 1 if to > index else -1
    while index != to and o.lanes[o.rows[rank, index + way]] != lane:
        index += way
    return index


def holds(o: OrderGraph, rank: int) -> bool:
    """Returns whether the memory of ``rank`` stays within ``o.cap`` in the current order."""
    held = 0
    for index in range(o.lengths[rank]):
        held += o.takes[o.rows[rank, index]]
        if held > o.cap[0]:
            return False
    return True


def anneal(o: OrderGraph, orders: int) -> int:
    """Improves the order of the actions in ``o`` by trying ``orders`` random changes.

    Writes the best order to ``o.best`` and returns its step time in picoseconds.
    """
    step = best = finish(o)
    hottest = 0
    for action in range(len(o.needs)):
        hottest += o.durations[action]
    hottest = HEAT * (hottest // len(o.needs))
    count = trace(o, step)
    drawn = 1
    for tried in range(orders):
        drawn = (drawn * 1103515245 + 12345) % 2147483648
        chosen = (drawn >> 8) % count
        rank = o.ranks[o.path[chosen]]
        index = o.positions[o.path[chosen]]
        # The path lists the last action first, so the first action of a block has a higher index in
        # the path than the last action of the block.
        edge = chosen
        while edge + 1 < count and o.ranks[o.path[edge + 1]] == rank:
            edge += 1
        begin = o.positions[o.path[edge]]
        edge = chosen
        while edge > 0 and o.ranks[o.path[edge - 1]] == rank:
            edge -= 1
        end = o.positions[o.path[edge]]
        drawn = (drawn * 1103515245 + 12345) % 2147483648
        move = (drawn >> 8) % 4
        to = begin if move == 0 else end if move == 1 else index - 1 if move == 2 else index + 1
        to = reach(o, rank, index, min(max(to, begin), end))
        if to == index:
            continue
        shift(o, rank, index, to)
        other = finish(o) if holds(o, rank) else -1
        drawn = (drawn * 1103515245 + 12345) % 2147483648
        most = hottest // orders * (orders - tried)
        if other < 0 or (other > step and (other - step) * 256 >= most * (drawn >> 23)):
            shift(o, rank, to, index)
            continue
        step = other
        count = trace(o, step)
        if step < best:
            best = step
            for rank in range(len(o.lengths)):
                for index in range(o.lengths[rank]):
                    o.best[rank, index] = o.rows[rank, index]
    return best


@lru_cache
def _compiled() -> Any:
    return compile_function(sys.modules[__name__], anneal)


def compile_s() -> float:
    """Estimates the time in seconds that the next call of :func:`improve` spends on compilation."""
    compiled = _compiled()
    return 0.0 if has_code(compiled) or is_cached(compiled) else COMPILE_S


def improve(schedule: Schedule, work: Workload, cap: float) -> Schedule | None:
    """Searches for a faster execution order of a schedule's actions.

    Args:
        schedule: Valid schedule whose memory is within the cap.
        work: Durations of all actions and messages in the step.
        cap: Limit on the activations that a rank holds. The unit is the activation memory of one
            microbatch in all chunks of the rank.

    Returns:
        Schedule with the best order of actions, which is at least as fast as ``schedule``, or
        ``None`` if the step has too many actions for ``LEAST_ORDERS`` attempts.
    """
    orders = min(MOST_ORDERS, VISITS // sum(map(len, schedule.orders)))
    if orders < LEAST_ORDERS:
        return None
    graph = _graph(schedule, work, cap)
    _compiled()(graph, orders)
    improved = (
        actions_of(
            graph.lanes[row[:length]].tolist(),
            schedule.placement.num_chunks,
            schedule.weight_pieces,
            schedule.num_slices,
        )
        for row, length in zip(graph.best, graph.lengths, strict=True)
    )
    return Schedule(
        name="annealed",
        placement=schedule.placement,
        num_microbatches=schedule.num_microbatches,
        num_slices=schedule.num_slices,
        orders=tuple(improved),
    )


def _graph(schedule: Schedule, work: Workload, cap: float) -> OrderGraph:
    """Builds the graph of the actions in ``schedule`` and of their inputs.

    The durations come from ``work``, and ``cap`` limits the memory of each rank.

    The index of an F or B is ``kind * cells + cell``, and the index of a W is ``2 * cells + cell *
    pieces + piece``. Here ``cell`` is ``stage * num_microbatches + microbatch``, and ``cells`` is
    the total number of cells. With slices, items replace microbatches (see ``rank_kernel``). A B of
    the last stage needs only the F of the same cell. This also holds with slices: the first B of a
    microbatch belongs to its last slice, whose F runs after all other slices.
    """
    placement = schedule.placement
    pieces = schedule.weight_pieces
    chunks = placement.num_chunks
    count = schedule.num_microbatches * schedule.num_slices
    cells = np.arange(placement.num_stages * count)
    of_stage = np.array([placement.locate(stage) for stage in range(placement.num_stages)])
    rank, chunk = of_stage[cells // count].T
    parts = np.arange(max(1, pieces) * (pieces > 0))
    forwards, backwards, weights = work.durations_ps.reshape(3, -1)
    cut = weights[:, None] * (parts + 1) // max(1, pieces) - weights[:, None] * parts // max(
        1, pieces
    )
    last = cells // count == placement.num_stages - 1
    needs = (
        np.where(cells < count, -1, cells - count),
        np.where(last, cells, len(cells) + cells + count),
        np.repeat(len(cells) + cells, len(parts)),
    )
    from_before = _gaps(work, of_stage[:, 0], kind=0, way=-1)
    from_after = _gaps(work, of_stage[:, 0], kind=1, way=1)
    gaps = (from_before, np.where(last, 0, from_after), np.zeros(cut.size))
    unit = 1 if not work.sizes else MEMORY_SCALE
    sizes = np.rint(np.tile(np.array(work.sizes or (1.0,) * count) * unit, placement.num_stages))
    frees = np.where(parts == pieces - 1, -1, 0)
    takes = (sizes, -sizes * (pieces == 0), (sizes[:, None] * frees).reshape(-1))

    def whole(values: Any) -> Any:
        return np.concatenate(values).astype(np.int64)

    def zeros(length: int) -> Any:
        return np.zeros(length, dtype=np.int64)

    of_actions = whole((rank, rank, np.repeat(rank, len(parts))))
    total = len(of_actions)
    ranks = placement.num_ranks
    rows = _rows(schedule, len(cells))
    return OrderGraph(
        rows=rows,
        lengths=np.array([len(order) for order in schedule.orders]),
        best=rows.copy(),
        needs=whole(needs),
        gaps=whole(gaps),
        durations=whole((forwards, backwards + weights * (pieces == 0), cut.reshape(-1))),
        lanes=whole((chunk, chunks + chunk, np.repeat(2 * chunks + chunk, len(parts)))),
        takes=whole(takes),
        ranks=of_actions,
        cap=np.array([int(with_rounding(cap) * chunks * schedule.num_slices * unit)]),
        **{name: zeros(total) for name in ("ends", "positions", "path", "waiting")},
        **{name: zeros(ranks) for name in ("position", "now")},
        stack=zeros(total + ranks),
    )


def _gaps(work: Workload, ranks: Any, *, kind: int, way: int) -> Any:
    """Returns the delay of each input, from the end of the action that computes it to its arrival.

    The result is in picoseconds, and has one entry per stage and microbatch, flattened.

    Args:
        work: Durations of all actions and messages in the step.
        ranks: Rank of each stage, ``[stages]``.
        kind: 0 for inputs of F, 1 for inputs of B.
        way: Offset from a stage to the stage that sends its input, -1 or 1.
    """
    source = np.roll(ranks, -way)
    delays = np.roll(work.delays_ps[kind], -way, axis=0)
    delays = delays + work.occupancy_ps[source, ranks][:, None]
    return (delays * (source != ranks)[:, None]).reshape(-1)


def _rows(schedule: Schedule, num_cells: int) -> Any:
    """Returns the indices of each rank's actions in ``schedule``, in execution order.

    ``num_cells`` is the number of (stage, microbatch) or (stage, slice) pairs, which determines the
    indices (see :func:`_graph`).

    The array has the shape ``[ranks, longest order]`` and is padded with -1.
    """
    longest = max(map(len, schedule.orders))
    rows = np.full((schedule.placement.num_ranks, longest), -1, dtype=np.int64)
    for rank, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            stage = schedule.placement.stage_of(rank, action.chunk)
            items = schedule.num_microbatches * schedule.num_slices
            cell = stage * items + action.microbatch
            if action.kind is ActionKind.W:
                rows[rank, index] = 2 * num_cells + cell * schedule.weight_pieces + action.piece
            else:
                rows[rank, index] = NUMBER[action.kind] * num_cells + cell
    return rows
