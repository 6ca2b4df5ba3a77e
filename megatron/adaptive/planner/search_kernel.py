"""Compiles the search's inner loops: bounds by dynamic programming, then an exact search.

A pipeline is built from its end. A *level* is a state of ``shapes.DpStates``: it gives the nodes
that the stages so far stand on and the class of the foremost; over it come the layers that they
hold. For 1F1B everything a stage needs to know of the others is behind it: ``j`` stages follow, so
it holds ``min(j + 1, m)`` microbatches and runs ``min(j, m - 1)`` forwards ahead. One table
therefore serves all lengths of pipelines and all parts of a cluster.

This module is apart from ``search``, and loaded late, because numba takes half a second to import.
The compiled code is kept on disk.

Bounds, for a stage with forward ``f``, backward ``b``, ``m`` microbatches, ``w`` forwards ahead
and ``r`` seconds from the end of a forward to the start of that microbatch's backward::

    own    = m (f + b) + max(0, r - w f) + max(0, r - w b)       idle at both ends
    rounds = (1 + (m - 1) // (w + 1)) (f + b + r) + rest b        a forward waits for a backward
    D      = max(own, rounds, f + b + transfers + D of the next)  its last backward is over
    Z      = max(D + reduction, f + transfer + Z of the next)     all that stand here are done

With ``m = w + 1`` both idle times are one, and only the larger counts. The launching of an action
goes on while its rank waits, so that it counts in no path through other ranks. ``r``, ``D`` and
``Z`` are minimised on their own, so that each is a bound for every way to go on. ``search_level``
enumerates what lies below the best known, with these bounds as a guide, and times every leaf
exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numba.core import event

_INF = np.inf
_Function = TypeVar("_Function", bound=Callable[..., Any])


_events: Any = event
_compiling = _events.TimingListener()
_events.register("numba:compile", _compiling)


def search_s() -> float:
    """Returns CPU seconds of the process without those that compiling took, once for a machine."""
    compiled_s: float = _compiling.duration if _compiling.done else 0.0
    return time.process_time() - compiled_s


def _compiled(function: _Function) -> _Function:
    made: Any = njit(function, cache=True)
    return cast(_Function, made)


class ShapeArrays(NamedTuple):
    """Arrays of one shape; ``c`` classes, ``n`` layers, a stage holds layers ``l`` to ``k - 1``.

    Attributes:
        forward: ``[c, n + 1, n + 1]`` seconds.
        backward: the same, weight gradients included.
        weight: the same, weight gradients alone.
        launch: ``[2, c, n + 1, n + 1]``, parts of both that need no input.
        after: the same, reduction and optimizer.
        base: ``[c, tables, n + 1, n + 1]`` bytes that do not depend on microbatches, less the
            limit.
        kept: the same, bytes of one microbatch in flight.
        latency: ``[2, 2, c, c, n + 1]``: of a message after a forward or backward, within a node
            or between blocks, from class, to class, at a cut.
        occupancy: the same.
        tied: ``[2, c, c]``: embedding all-reduce between first and last, of one block or of two.
        level_class: ``[levels]``, class of the foremost stage.
        level_follow: ``[levels]``, stages that follow it.
        level_edges: ``[levels + 1]``, where a level's edges begin.
        edge_from: ``[edges]``, the level of the next stage.
        edge_kind: ``[edges]``, 1 for two stages of one node, 0 for two blocks.
        held: ``[stages]``, microbatches in flight by stages that follow.
        microbatches: of a step.
    """

    forward: Any
    backward: Any
    weight: Any
    launch: Any
    after: Any
    base: Any
    kept: Any
    latency: Any
    occupancy: Any
    tied: Any
    level_class: Any
    level_follow: Any
    level_edges: Any
    edge_from: Any
    edge_kind: Any
    held: Any
    microbatches: int


class Walk(NamedTuple):
    """State of an enumeration; everything by depth, which is the stage.

    Attributes:
        bounds: ``[stages, children]``: of the ways to go on from each stage.
        edges: the same, the edge that each takes.
        nexts: the same, where the next stage begins.
        order: the same, children by bound.
        count: children of each stage.
        at: how many of them were taken.
        levels: ``[stages]``.
        cuts: ``[stages + 1]``, where stages begin.
        kinds: ``[stages]``, kind of the edge after each.
        head: ``[stages + 1]``, earliest start of each stage.
        reach: ``[stages + 1]``, from there to the latest end before it, when added to its own.
        known: ``[stages + 1]``, the bound by the stages before.
        seconds: ``[3, stages]``: forward, backward and end of each stage of a leaf.
        launch: ``[2, stages]``: of forward and backward.
        messages: ``[4, stages]``: latencies forward and backward, occupancies.
        counters: ``[2, stages]``.
        arrive: ``[2, stages, microbatches]``.
    """

    bounds: Any
    edges: Any
    nexts: Any
    order: Any
    count: Any
    at: Any
    levels: Any
    cuts: Any
    kinds: Any
    head: Any
    reach: Any
    known: Any
    seconds: Any
    launch: Any
    messages: Any
    counters: Any
    arrive: Any


@_compiled
def _fits(shape: Any, c: int, low: int, high: int, held: float) -> bool:
    for table in range(shape.base.shape[1]):
        if shape.base[c, table, low, high] + held * shape.kept[c, table, low, high] > 0.0:
            return False
    return True


@_compiled
def _own(shape: Any, c: int, low: int, high: int, w: int, round_trip: float, link: float) -> float:
    """Bounds the time from a stage's first input to the end of its last backward.

    ``link``: most seconds that one message keeps a link busy.
    """
    m = shape.microbatches
    f, b = shape.forward[c, low, high], shape.backward[c, low, high]
    early, late = shape.launch[0, c, low, high], shape.launch[1, c, low, high]
    first = max(0.0, round_trip - w * f - late)
    last = max(0.0, round_trip - w * b - late)
    idle = first + last if m - w >= 2 else max(first, last)
    turns = (m - 1) // (w + 1)
    path = f + b - early - late + round_trip
    rounds = (1 + turns) * path + (m - 1 - turns * (w + 1)) * b
    return float(max(m * (f + b) - early + idle, rounds, path + (m - 1) * link))


@_compiled
def _transfer(shape: Any, kind: int, c: int, d: int, cut: int) -> tuple[float, float, float]:
    """Times a message forward and back between two stages, and the longer use of the link."""
    out = shape.occupancy[0, kind, c, d, cut]
    back = shape.occupancy[1, kind, d, c, cut]
    latency = shape.latency
    return out + latency[0, kind, c, d, cut], back + latency[1, kind, d, c, cut], max(out, back)


@_compiled
def _bound_edge(
    shape: Any, level: int, edge: int, cap: float, ends: Any, done: Any, trips: Any
) -> None:
    """Puts a stage before those of the edge's level, in every way."""
    n, m = shape.forward.shape[1] - 1, shape.microbatches
    c, j = shape.level_class[level], shape.level_follow[level]
    after, kind = shape.edge_from[edge], shape.edge_kind[edge]
    d = shape.level_class[after]
    w, held = min(j, m - 1), shape.held[j]
    for low in range(n - j):
        for high in range(low + 1, n - j + 1):
            f, b = shape.forward[c, low, high], shape.backward[c, low, high]
            # What is too slow or too large stays so with more layers.
            if m * (f + b) >= cap or not _fits(shape, c, low, high, held):
                break
            if ends[after, high] == _INF:
                continue
            out, back, link = _transfer(shape, kind, c, d, high)
            trip = trips[after, high] + out + back
            f -= shape.launch[0, c, low, high]
            b -= shape.launch[1, c, low, high]
            mine = _own(shape, c, low, high, w, trip, link)
            end = max(mine, f + b + out + back + ends[after, high])
            if end >= cap:
                continue
            whole = max(end + shape.after[c, low, high], f + out + done[after, high])
            ends[level, low] = min(ends[level, low], end)
            trips[level, low] = min(trips[level, low], f + b + trip)
            done[level, low] = min(done[level, low], whole)


@_compiled
def bound_levels(shape: Any, cap: float, ends: Any, done: Any, trips: Any) -> None:
    """Fills the bounds of every level.

    Args:
        cap: what takes as long stays infinite.
        ends: ``[levels, n + 1]``, ``D``; infinite at first, as all three.
        done: the same, ``Z``.
        trips: the same, from the start of a stage's forward to the end of its backward.
    """
    n, m = shape.forward.shape[1] - 1, shape.microbatches
    for level in range(shape.level_class.shape[0]):
        c, j = shape.level_class[level], shape.level_follow[level]
        if j > 0:
            for edge in range(shape.level_edges[level], shape.level_edges[level + 1]):
                _bound_edge(shape, level, edge, cap, ends, done, trips)
            continue
        for low in range(n):
            t = shape.forward[c, low, n] + shape.backward[c, low, n]
            if m * t < cap and _fits(shape, c, low, n, shape.held[j]):
                early = shape.launch[0, c, low, n]
                ends[level, low] = m * t - early
                trips[level, low] = t - early - shape.launch[1, c, low, n]
                done[level, low] = m * t - early + shape.after[c, low, n]


@_compiled
def _time_1f1b(walk: Any, p: int, m: int) -> None:
    """Times the end of each of ``p`` stages' last of ``m`` backwards in 1F1B, into ``seconds[2]``.

    Launching needs no input. A message leaves when its action ends and the one before it has left
    the link.
    """
    arrive, ends = walk.arrive, walk.seconds[2]
    link = np.zeros((2, p))
    walk.counters[:, :p] = 0
    ends[:p] = 0.0
    arrive[:, :p, :] = _INF
    arrive[0, 0, :] = 0.0
    left = 2 * p * m
    while left > 0:
        for i in range(p):
            ahead = min(p - 1 - i, m)
            while True:
                forwards, backwards = walk.counters[0, i], walk.counters[1, i]
                # A forward while no more than those ahead wait for their backward.
                kind = 0 if forwards < m and forwards - backwards <= ahead else 1
                number = walk.counters[kind, i]
                if number == m or arrive[kind, i, number] == _INF:
                    break
                launch = walk.launch[kind, i]
                start = max(arrive[kind, i, number], ends[i] + launch)
                end = start + walk.seconds[kind, i] - launch
                ends[i] = end
                walk.counters[kind, i] = number + 1
                left -= 1
                other = i + 1 if kind == 0 else i - 1
                if 0 <= other < p:
                    link[kind, i] = max(end, link[kind, i]) + walk.messages[2 + kind, i]
                    arrive[kind, other, number] = link[kind, i] + walk.messages[kind, i]
                elif kind == 0:
                    arrive[1, i, number] = end


@_compiled
def leaf_s(shape: Any, walk: Any, p: int) -> float:
    """Returns the seconds of the pipeline that the walk describes, infinite if it does not fit."""
    n = shape.forward.shape[1] - 1
    walk.cuts[p] = n
    for i in range(p):
        c, low, high = shape.level_class[walk.levels[i]], walk.cuts[i], walk.cuts[i + 1]
        if not _fits(shape, c, low, high, shape.held[p - 1 - i]):
            return _INF
        walk.seconds[0, i] = shape.forward[c, low, high]
        walk.seconds[1, i] = shape.backward[c, low, high]
        walk.launch[0, i] = shape.launch[0, c, low, high]
        walk.launch[1, i] = shape.launch[1, c, low, high]
        if i < p - 1:
            d, kind = shape.level_class[walk.levels[i + 1]], walk.kinds[i]
            walk.messages[0, i] = shape.latency[0, kind, c, d, high]
            walk.messages[2, i] = shape.occupancy[0, kind, c, d, high]
            walk.messages[1, i + 1] = shape.latency[1, kind, d, c, high]
            walk.messages[3, i + 1] = shape.occupancy[1, kind, d, c, high]
    _time_1f1b(walk, p, shape.microbatches)
    value = 0.0
    for i in range(p):
        c = shape.level_class[walk.levels[i]]
        value = max(value, walk.seconds[2, i] + shape.after[c, walk.cuts[i], walk.cuts[i + 1]])
    if p == 1:
        return value
    inside = 1 if walk.kinds[: p - 1].min() == 1 else 0
    first, last = shape.level_class[walk.levels[0]], shape.level_class[walk.levels[p - 1]]
    return value + float(shape.tied[inside, first, last])


@_compiled
def _open(
    shape: Any, walk: Any, depth: int, best: float, ends: Any, done: Any, trips: Any, tied: float
) -> None:
    """Lists the ways to go on from a stage, best bound first."""
    n, m = shape.forward.shape[1] - 1, shape.microbatches
    level, low = walk.levels[depth], walk.cuts[depth]
    c, j = shape.level_class[level], shape.level_follow[level]
    w, number = min(j, m - 1), 0
    for edge in range(shape.level_edges[level], shape.level_edges[level + 1]):
        after, kind = shape.edge_from[edge], shape.edge_kind[edge]
        d = shape.level_class[after]
        for high in range(low + 1, n - j + 1):
            if not _fits(shape, c, low, high, shape.held[j]):
                break
            if ends[after, high] == _INF:
                continue
            f = shape.forward[c, low, high] - shape.launch[0, c, low, high]
            b = shape.backward[c, low, high] - shape.launch[1, c, low, high]
            out, back, link = _transfer(shape, kind, c, d, high)
            reach = max(walk.reach[depth], walk.head[depth] + shape.after[c, low, high])
            mine = _own(shape, c, low, high, w, trips[after, high] + out + back, link)
            bound = max(
                walk.known[depth],
                tied + reach + mine,
                tied + reach + f + b + out + back + ends[after, high],
                tied + walk.head[depth] + f + out + done[after, high],
            )
            if bound < best:
                walk.bounds[depth, number] = bound
                walk.edges[depth, number] = edge
                walk.nexts[depth, number] = high
                number += 1
    walk.count[depth] = number
    walk.order[depth, :number] = np.argsort(walk.bounds[depth, :number])
    walk.at[depth] = 0


@_compiled
def _descend(shape: Any, walk: Any, depth: int, child: int, trips: Any, tied: float) -> None:
    """Takes one of the ways to go on."""
    edge, high = walk.edges[depth, child], walk.nexts[depth, child]
    low, level = walk.cuts[depth], walk.levels[depth]
    after, kind = shape.edge_from[edge], shape.edge_kind[edge]
    c, d, j = shape.level_class[level], shape.level_class[after], shape.level_follow[level]
    f = shape.forward[c, low, high] - shape.launch[0, c, low, high]
    b = shape.backward[c, low, high] - shape.launch[1, c, low, high]
    out, back, link = _transfer(shape, kind, c, d, high)
    reach = max(walk.reach[depth], walk.head[depth] + shape.after[c, low, high])
    w = min(j, shape.microbatches - 1)
    mine = _own(shape, c, low, high, w, trips[after, high] + out + back, link)
    walk.known[depth + 1] = max(walk.known[depth], tied + reach + mine)
    walk.reach[depth + 1] = reach + f + b + out + back
    walk.head[depth + 1] = walk.head[depth] + f + out
    walk.kinds[depth] = kind
    walk.cuts[depth + 1] = high
    walk.levels[depth + 1] = after


@_compiled
def search_level(
    shape: Any,
    walk: Any,
    goal: int,
    ends: Any,
    done: Any,
    trips: Any,
    cap: float,
    most_leaves: int,
    best_cuts: Any,
    best_levels: Any,
    best_kinds: Any,
) -> tuple[float, float, int]:
    """Finds the fastest way to fill one level that starts with the first layer.

    Args:
        shape: the arrays; ``walk`` is room to work in, for as many stages as the level has.
        goal: the level.
        ends: of ``bound_levels``; likewise ``done`` and ``trips``.
        cap: only faster ones count.
        most_leaves: pipelines to time at most, and for each as many stages to lay as it has.
        best_cuts: ``[stages + 1]``, where the stages of the best begin.
        best_levels: ``[stages]``, their levels.
        best_kinds: the same, the kinds of the edges behind them.

    Returns:
        Seconds of the best, or ``cap``; a bound on what was left out, or infinity; leaves timed.
    """
    p, first = shape.level_follow[goal] + 1, shape.level_class[goal]
    tied = shape.tied[:, first, :].min() if p > 1 else 0.0
    best, left_out, leaves, opened = cap, _INF, 0, 0
    walk.levels[0] = goal
    walk.reach[0] = -_INF
    walk.known[0] = 0.0
    walk.head[0] = 0.0
    walk.cuts[0] = 0
    depth, fresh = 0, True
    while depth >= 0:
        if depth == p - 1:
            value = leaf_s(shape, walk, p)
            leaves += 1
            if value < best:
                best = value
                best_cuts[: p + 1] = walk.cuts[: p + 1]
                best_levels[:p] = walk.levels[:p]
                best_kinds[:p] = walk.kinds[:p]
            depth, fresh = depth - 1, False
            continue
        if fresh:
            _open(shape, walk, depth, best, ends, done, trips, tied)
            opened += 1
        at = walk.at[depth]
        spent = at == walk.count[depth]
        if not spent:
            child = walk.order[depth, at]
            bound = walk.bounds[depth, child]
            over = leaves >= most_leaves or opened >= most_leaves * p
            spent = bound >= best or over
            if bound < best and over:
                # Sorted: the least of all that this stage leaves out.
                left_out = min(left_out, bound)
        if spent:
            depth, fresh = depth - 1, False
            continue
        walk.at[depth] = at + 1
        _descend(shape, walk, depth, child, trips, tied)
        depth, fresh = depth + 1, True
    return best, left_out, leaves


def make_walk(shape: ShapeArrays, stages: int) -> Walk:
    """Allocates room for an enumeration of so many stages."""
    layers = shape.forward.shape[1] - 1
    width = layers * max(1, int(np.diff(shape.level_edges).max(initial=1)))
    return Walk(
        bounds=np.empty((stages, width)),
        edges=np.empty((stages, width), dtype=np.int64),
        nexts=np.empty((stages, width), dtype=np.int64),
        order=np.empty((stages, width), dtype=np.int64),
        count=np.zeros(stages, dtype=np.int64),
        at=np.zeros(stages, dtype=np.int64),
        levels=np.zeros(stages, dtype=np.int64),
        cuts=np.zeros(stages + 1, dtype=np.int64),
        kinds=np.zeros(stages, dtype=np.int64),
        head=np.zeros(stages + 1),
        reach=np.zeros(stages + 1),
        known=np.zeros(stages + 1),
        seconds=np.zeros((3, stages)),
        launch=np.zeros((2, stages)),
        messages=np.zeros((4, stages)),
        counters=np.zeros((2, stages), dtype=np.int64),
        arrive=np.empty((2, stages, shape.microbatches)),
    )
