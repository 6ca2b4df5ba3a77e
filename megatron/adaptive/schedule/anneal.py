"""Improves an order of work for known times: what ``auto`` gives ``hinted`` to follow.

The orders of all ranks and the inputs that their actions wait for make one graph, and a step takes
as long as its longest path, the critical one. It goes along ranks and jumps where one waits for
another; what lies on one rank between two jumps is a block. Here on ranks 1, 0 and 1 again:

    rank 0 |      F0 F1 F2  B1 W1 [B0 W0]          W0 after B0 is in nobody's way;
    rank 1 | [F0 F1 B1]               [...]        B1 would start earlier before F1

Only an action that moves within its block can shorten the step. A random one moves to a random end
of its block or changes places with its neighbour. An order that is not longer is taken, a longer
one with a chance that falls with its excess and with time (simulated annealing); the best is kept.
Thousands of orders are tried; large pipelines, whose rules leave less to gain, stay as they are.
Microbatches ascend as everywhere, and memory stays within the cap. All numbers are whole and the
random ones are always the same, so the result depends on nothing else.

The first functions are written as those of ``machine``: numbers only, compiled by ``compiled``.

Source: moves within blocks of the critical path as in van Laarhoven, Aarts and Lenstra 1992, "Job
shop scheduling by simulated annealing"; to the ends of a block, Brucker, Jurisch and Sievers 1994.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from megatron.adaptive.schedule.action import NUMBER
from megatron.adaptive.schedule.memory_caps import with_rounding
from megatron.adaptive.schedule.numba_kernels import compile_function
from megatron.adaptive.schedule.policy import actions_of
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.workload import Workload

VISITS = 500_000_000
"""Actions that are timed in all, at most: about a second."""
LEAST_ORDERS, MOST_ORDERS = 40_000, 200_000
HEAT = 2
"""At first orders are taken that are longer by less than so many actions of mean duration."""


class OrderGraph(NamedTuple):
    """Holds orders of all ranks, as ``int64`` arrays; actions have numbers of their own.

    Attributes:
        rows, lengths: per rank, its actions in order, and how many.
        best: the best rows so far.
        needs, gaps: per action, the one whose result it waits for, -1 for none, and the time until
            that has arrived.
        durations: per action, picoseconds.
        lanes: per action, ``kind * chunks + chunk``.
        takes: per action, the chunks of memory that it takes, negative where it frees them.
        ranks: per action.
        cap: chunks of memory of a rank.
        ends, places, path: scratch, per action: its end, its place in its row, the critical path.
        at, now, stack, waiting: scratch of ``finish``; ``waiting`` is per action the rank that
            waits for it, -1 for none.
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
    places: Any
    path: Any
    at: Any
    now: Any
    stack: Any
    waiting: Any


def finish(o: OrderGraph) -> int:
    """Returns the end of the step, -1 where ranks wait for ever."""
    ranks = len(o.lengths)
    left = len(o.needs)
    for action in range(len(o.needs)):
        o.ends[action] = -1
        o.waiting[action] = -1
    for rank in range(ranks):
        o.at[rank] = 0
        o.now[rank] = 0
        o.stack[rank] = rank
    top = ranks
    while top > 0:
        top -= 1
        rank = o.stack[top]
        place, now = o.at[rank], o.now[rank]
        while place < o.lengths[rank]:
            action = o.rows[rank, place]
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
            place += 1
            left -= 1
        o.at[rank] = place
        o.now[rank] = now
    if left > 0:
        return -1
    step = 0
    for rank in range(ranks):
        step = max(step, o.now[rank])
    return step


def trace(o: OrderGraph, step: int) -> int:
    """Notes the critical path, last action first, and returns its length."""
    action = -1
    for rank in range(len(o.lengths)):
        for place in range(o.lengths[rank]):
            o.places[o.rows[rank, place]] = place
        last = o.rows[rank, o.lengths[rank] - 1]
        if o.ends[last] == step:
            action = last
    count = 0
    while action >= 0:
        o.path[count] = action
        count += 1
        rank, place = o.ranks[action], o.places[action]
        before = o.rows[rank, place - 1] if place > 0 else -1
        is_busy = before >= 0 and o.ends[before] == o.ends[action] - o.durations[action]
        action = before if is_busy else o.needs[action]
    return count


def shift(o: OrderGraph, rank: int, place: int, to: int) -> None:
    """Moves an action within its row."""
    moved = o.rows[rank, place]
    way = 1 if to > place else -1
    while place != to:
        o.rows[rank, place] = o.rows[rank, place + way]
        place += way
    o.rows[rank, to] = moved


def reach(o: OrderGraph, rank: int, place: int, to: int) -> int:
    """Returns how far towards a place an action can move before one of its own lane."""
    lane = o.lanes[o.rows[rank, place]]
    way = 1 if to > place else -1
    while place != to and o.lanes[o.rows[rank, place + way]] != lane:
        place += way
    return place


def holds(o: OrderGraph, rank: int) -> bool:
    """Returns whether a row keeps the cap."""
    held = 0
    for place in range(o.lengths[rank]):
        held += o.takes[o.rows[rank, place]]
        if held > o.cap[0]:
            return False
    return True


def anneal(o: OrderGraph, orders: int) -> int:
    """Tries so many orders; returns the step of the best one, which is in ``best``."""
    step = best = finish(o)
    hottest = 0
    for action in range(len(o.needs)):
        hottest += o.durations[action]
    hottest = HEAT * (hottest // len(o.needs))
    count = trace(o, step)
    drawn = 1
    for number in range(orders):
        drawn = (drawn * 1103515245 + 12345) % 2147483648
        chosen = (drawn >> 8) % count
        rank, place = o.ranks[o.path[chosen]], o.places[o.path[chosen]]
        # The path goes backwards: a block begins at a higher index.
        at = chosen
        while at + 1 < count and o.ranks[o.path[at + 1]] == rank:
            at += 1
        begin = o.places[o.path[at]]
        at = chosen
        while at > 0 and o.ranks[o.path[at - 1]] == rank:
            at -= 1
        end = o.places[o.path[at]]
        drawn = (drawn * 1103515245 + 12345) % 2147483648
        move = (drawn >> 8) % 4
        to = begin if move == 0 else end if move == 1 else place - 1 if move == 2 else place + 1
        to = reach(o, rank, place, min(max(to, begin), end))
        if to == place:
            continue
        shift(o, rank, place, to)
        other = finish(o) if holds(o, rank) else -1
        drawn = (drawn * 1103515245 + 12345) % 2147483648
        most = hottest // orders * (orders - number)
        if other < 0 or (other > step and (other - step) * 256 >= most * (drawn >> 23)):
            shift(o, rank, to, place)
            continue
        step = other
        count = trace(o, step)
        if step < best:
            best = step
            for rank in range(len(o.lengths)):
                for place in range(o.lengths[rank]):
                    o.best[rank, place] = o.rows[rank, place]
    return best


@lru_cache
def _compiled() -> Any:
    return compile_function(sys.modules[__name__], anneal)


def improve(schedule: Schedule, work: Workload, cap: float) -> Schedule | None:
    """Looks for a faster order of the same actions.

    Args:
        schedule: valid, within the cap.
        work: times of the whole step.
        cap: most activations of a rank, in whole-rank microbatches.

    Returns:
        The best found, never slower; ``None`` where the step has too many actions to try enough.
    """
    placement, pieces = schedule.placement, schedule.weight_pieces
    orders = min(MOST_ORDERS, VISITS // sum(map(len, schedule.orders)))
    if orders < LEAST_ORDERS:
        return None
    chunks, stages, count = placement.num_chunks, placement.num_stages, schedule.num_microbatches
    cells = np.arange(stages * count)
    of_stage = np.array([placement.locate(stage) for stage in range(stages)])
    rank, chunk = of_stage[cells // count].T
    parts = np.arange(max(1, pieces) * (pieces > 0))
    forwards, backwards, weights = work.durations_ps.reshape(3, -1)
    cut = weights[:, None] * (parts + 1) // max(1, pieces) - weights[:, None] * parts // max(
        1, pieces
    )
    hops = []
    for kind, way in ((0, -1), (1, 1)):  # from the stage before, and from the one behind
        source = np.roll(of_stage[:, 0], -way)
        delays = np.roll(work.delays_ps[kind], -way, axis=0)
        delays = delays + work.occupancy_ps[source, of_stage[:, 0]][:, None]
        hops.append((delays * (source != of_stage[:, 0])[:, None]).reshape(-1))
    last = cells // count == stages - 1
    needs = (
        np.where(cells < count, -1, cells - count),
        np.where(last, cells, len(cells) + cells + count),
        np.repeat(len(cells) + cells, len(parts)),
    )
    gaps = (hops[0], np.where(last, 0, hops[1]), np.zeros(cut.size))
    frees = np.where(parts == pieces - 1, -1, 0)
    takes = (np.ones(len(cells)), np.full(len(cells), -(pieces == 0)), np.tile(frees, len(cells)))

    def whole(values: Any) -> Any:
        return np.concatenate(values).astype(np.int64)

    of_actions = whole((rank, rank, np.repeat(rank, len(parts))))
    total, ranks = len(of_actions), placement.num_ranks
    rows = np.full((ranks, max(map(len, schedule.orders))), -1, dtype=np.int64)
    for number, order in enumerate(schedule.orders):
        for place, one in enumerate(order):
            cell = placement.stage_of(number, one.chunk) * count + one.microbatch
            kind = NUMBER[one.kind]
            rows[number, place] = (
                kind * len(cells) + cell if kind < 2 else 2 * len(cells) + cell * pieces + one.piece
            )
    o = OrderGraph(
        rows=rows,
        lengths=np.array([len(order) for order in schedule.orders]),
        best=rows.copy(),
        needs=whole(needs),
        gaps=whole(gaps),
        durations=whole((forwards, backwards + weights * (pieces == 0), cut.reshape(-1))),
        lanes=whole((chunk, chunks + chunk, np.repeat(2 * chunks + chunk, len(parts)))),
        takes=whole(takes),
        ranks=of_actions,
        cap=np.array([int(with_rounding(cap) * chunks)]),
        **{name: np.zeros(total, dtype=np.int64) for name in ("ends", "places", "path", "waiting")},
        **{name: np.zeros(ranks, dtype=np.int64) for name in ("at", "now")},
        stack=np.zeros(total + ranks, dtype=np.int64),
    )
    _compiled()(o, orders)
    found = (
        actions_of(o.lanes[row[:length]].tolist(), chunks, pieces)
        for row, length in zip(o.best, o.lengths, strict=True)
    )
    return Schedule(
        name="annealed", placement=placement, num_microbatches=count, orders=tuple(found)
    )
