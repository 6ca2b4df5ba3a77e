"""Finds the fastest 1F1B pipeline by branch and bound, in code that numba compiles.

A pipeline is a chain of stages. The search decides, for each stage, on which class of nodes it
runs and which layers it holds. It works in two passes:

1. From the last stage to the first, dynamic programming computes lower bounds: how fast can the
   rest of a pipeline be at best, if it starts with this stage and this layer?
2. From the first stage to the last, a depth-first search adds stage after stage, those with the
   lowest bound first. It skips every beginning whose bound is not below the best time so far. A
   complete pipeline is timed exactly, action by action.

A *level* (a state of ``search_levels.DpStates``) says which nodes the last stages of a pipeline
use, and the class of the first of them; it does not say which layers they hold. An *edge* leads
from a level to the level of the next stage. An example: 4 layers and 4 microbatches on a node A,
where a layer takes 1 s forward and 1 s backward, and a node B, which takes twice as long::

    level   stages     edge to   bound of all 4 layers (Z)
    0       B                    64 s   4 microbatches x 4 layers x 4 s
    1       A                    32 s
    2       A -> B     0         26 s   A holds layers 0 to 2, B holds layer 3
    3       B -> A     1         28 s   B holds layer 0, A holds layers 1 to 3

The second pass begins with level 2, whose bound is the lowest. Timed exactly, its pipeline takes
26 s, which no other level can beat, so it is the best one.

One table of bounds serves pipelines of every length and every part of a cluster, because under 1F1B
a stage depends only on the stages behind it: if ``j`` stages follow, a stage keeps ``min(j + 1,
m)`` microbatches and runs ``w = min(j, m - 1)`` forwards before its first backward.

The bounds of a stage with ``f`` seconds forward, ``b`` seconds backward and ``m`` microbatches;
``r`` are the seconds from the end of a forward to the start of the same microbatch's backward::

    span   = m (f + b) + max(0, r - w f) + max(0, r - w b)        idle at both ends
    rounds = (1 + (m - 1) // (w + 1)) (f + b + r) + rest b        a forward waits for a backward
    D      = max(span, rounds, f + b + transfers + D of the next) end of its last backward
    Z      = max(D + reduction, f + transfer + Z of the next)     end of the step, from here on

Here ``rest`` is ``(m - 1) % (w + 1)``, and transfers are the message to the next stage and the one
back. If ``m = w + 1``, the two idle times of ``span`` are the same time, and only the larger one
counts. A rank can launch an action while it waits for its input, so launch times count in no path
through other ranks. ``r``, ``D`` and ``Z`` are minimised separately over all ways to continue, so
each of them is a lower bound for every way.

Importing this module imports numba, which takes half a second. Numba keeps the compiled code on
disk.
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
    """Returns the CPU seconds of this process, without those that numba spent on compiling.

    Limits on the time of a search count these seconds. Code is compiled once per machine;
    otherwise the first search on a machine would find less than the next one.
    """
    compiled_s: float = _compiling.duration if _compiling.done else 0.0
    return time.process_time() - compiled_s


def _compiled(function: _Function) -> _Function:
    compiled: Any = njit(function, cache=True)
    return cast(_Function, compiled)


class ShapeArrays(NamedTuple):
    """Costs of every possible stage of one shape, and the graph of its levels.

    There are ``c`` classes of stages and ``n`` layers. An array that ends with ``[n + 1, n + 1]``
    is indexed by the first layer of a stage and the layer behind its last one.

    Attributes:
        forward: Seconds of a forward of one microbatch, ``[c, n + 1, n + 1]``.
        backward: Seconds of a backward, weight gradients included, ``[c, n + 1, n + 1]``.
        weight: Seconds of the weight gradients alone, ``[c, n + 1, n + 1]``.
        launch: Seconds of forward and backward that need no input, ``[2, c, n + 1, n + 1]``.
        after: Seconds of gradient reduction and optimizer, ``[c, n + 1, n + 1]``.
        base: Bytes that do not depend on microbatches, minus the memory limit, for each type of
            node of a class, ``[c, tables, n + 1, n + 1]``.
        kept: Bytes of one microbatch in flight, ``[c, tables, n + 1, n + 1]``.
        latency: Seconds of latency of a message, ``[2, 2, c, c, n + 1]``, by its direction (0 after
            a forward, 1 after a backward), kind of the edge, class of the sender, class of the
            receiver, and number of layers in front of the boundary.
        occupancy: Seconds that a message keeps its link busy, indexed like ``latency``.
        tied: Seconds of the all-reduce of tied embeddings between first and last stage, in two
            blocks (0) or one (1), ``[2, c, c]``.
        level_class: Class of a level's first stage, ``[levels]``.
        level_follow: Number of stages that follow a level's first stage, ``[levels]``.
        level_edges: Index of each level's first edge, and the number of edges, ``[levels + 1]``.
        edge_from: Level that begins with the next stage, ``[edges]``.
        edge_kind: 1 if both stages share a node, 0 if they are in different blocks, ``[edges]``.
        held: Microbatches that a stage keeps in flight, by the number of stages that follow it.
        microbatches: Number of microbatches of a step.
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


class LevelBounds(NamedTuple):
    """Lower bounds of every level, in seconds, ``[levels, n + 1]`` by level and first layer.

    An entry is infinite if the layers from there on do not fit, or take too long.

    Attributes:
        ends: ``D`` of the module's docstring: from the start of the level's first stage to the end
            of its last backward.
        done: ``Z`` of the module's docstring: to the end of all stages of the level, with their
            reductions and optimizers.
        trips: Time from the start of a forward of the level's first stage to the end of the same
            microbatch's backward there.
    """

    ends: Any
    done: Any
    trips: Any


class BestPipeline(NamedTuple):
    """Room for the fastest pipeline that :func:`search_level` finds.

    Attributes:
        cuts: First layer of each stage, and the number of layers, ``[stages + 1]``.
        levels: Level that begins with each stage, ``[stages]``.
        kinds: Kind of the edge behind each stage, see ``ShapeArrays.edge_kind``, ``[stages]``.
    """

    cuts: Any
    levels: Any
    kinds: Any


class Walk(NamedTuple):
    """State of the depth-first search: the stages chosen so far, and the choices for each of them.

    The depth of the search is the number of a stage. A *child* of a stage is one choice of its last
    layer and of the edge to the next stage.

    Attributes:
        bounds: Lower bound of each child, in seconds, ``[stages, children]``.
        edges: Edge that each child takes, ``[stages, children]``.
        nexts: First layer of the next stage under each child, ``[stages, children]``.
        order: Children by ascending bound, ``[stages, children]``.
        count: Number of children of each stage, ``[stages]``.
        taken: Number of them that were followed already, ``[stages]``.
        levels: Level that begins with each stage, ``[stages]``.
        cuts: First layer of each stage, and the number of layers, ``[stages + 1]``.
        kinds: Kind of the edge behind each stage, ``[stages]``.
        head: Earliest second at which each stage can start, ``[stages + 1]``.
        reach: Seconds from the end of each stage's last backward to the latest end of the stages
            before it, plus ``head``, ``[stages + 1]``.
        bound: Lower bound that the stages before each stage give, in seconds, ``[stages + 1]``.
        seconds: Forward, backward and end of each stage of a complete pipeline, ``[3, stages]``.
        launch: Launch times of forward and backward, ``[2, stages]``.
        messages: Latencies after forward and backward, then both occupancies, ``[4, stages]``.
        counters: Forwards and backwards done, ``[2, stages]``.
        arrive: Second at which an input arrives, forward and backward, ``[2, stages, m]``.
    """

    bounds: Any
    edges: Any
    nexts: Any
    order: Any
    count: Any
    taken: Any
    levels: Any
    cuts: Any
    kinds: Any
    head: Any
    reach: Any
    bound: Any
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
def _span(shape: Any, c: int, low: int, high: int, w: int, round_trip: float, link: float) -> float:
    """Bounds the time from a stage's first input to the end of its last backward.

    This is the larger of ``span`` and ``rounds`` of the module's docstring. A link that every
    microbatch keeps busy for ``link`` seconds is a third bound.
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
    """Returns the seconds of a message forward and of one back, and the longer use of a link."""
    out = shape.occupancy[0, kind, c, d, cut]
    back = shape.occupancy[1, kind, d, c, cut]
    latency = shape.latency
    return out + latency[0, kind, c, d, cut], back + latency[1, kind, d, c, cut], max(out, back)


@_compiled
def _bound_edge(shape: Any, level: int, edge: int, cap: float, bounds: Any) -> None:
    """Lowers the bounds of a level by all pipelines that take one of its edges.

    Puts a stage with every range of layers in front of the bounded rest of the pipeline.
    """
    n = shape.forward.shape[1] - 1
    m = shape.microbatches
    c, j = shape.level_class[level], shape.level_follow[level]
    after, kind = shape.edge_from[edge], shape.edge_kind[edge]
    d = shape.level_class[after]
    w = min(j, m - 1)
    held = shape.held[j]
    for low in range(n - j):
        for high in range(low + 1, n - j + 1):
            f, b = shape.forward[c, low, high], shape.backward[c, low, high]
            # A stage that is too slow or too large stays so with more layers.
            if m * (f + b) >= cap or not _fits(shape, c, low, high, held):
                break
            if bounds.ends[after, high] == _INF:
                continue
            out, back, link = _transfer(shape, kind, c, d, high)
            trip = bounds.trips[after, high] + out + back
            f -= shape.launch[0, c, low, high]
            b -= shape.launch[1, c, low, high]
            span = _span(shape, c, low, high, w, trip, link)
            end = max(span, f + b + out + back + bounds.ends[after, high])
            if end >= cap:
                continue
            whole = max(end + shape.after[c, low, high], f + out + bounds.done[after, high])
            bounds.ends[level, low] = min(bounds.ends[level, low], end)
            bounds.trips[level, low] = min(bounds.trips[level, low], f + b + trip)
            bounds.done[level, low] = min(bounds.done[level, low], whole)


@_compiled
def bound_levels(shape: Any, cap: float, bounds: Any) -> None:
    """Fills the bounds of every level, from the ends of pipelines to their beginnings.

    Args:
        shape: A ``ShapeArrays``.
        cap: Limit in seconds; entries of pipelines that take as long stay infinite.
        bounds: A ``LevelBounds`` to fill, infinite at first.
    """
    n = shape.forward.shape[1] - 1
    m = shape.microbatches
    for level in range(shape.level_class.shape[0]):
        c, j = shape.level_class[level], shape.level_follow[level]
        if j > 0:
            for edge in range(shape.level_edges[level], shape.level_edges[level + 1]):
                _bound_edge(shape, level, edge, cap, bounds)
            continue
        for low in range(n):
            t = shape.forward[c, low, n] + shape.backward[c, low, n]
            if m * t < cap and _fits(shape, c, low, n, shape.held[j]):
                early = shape.launch[0, c, low, n]
                bounds.ends[level, low] = m * t - early
                bounds.trips[level, low] = t - early - shape.launch[1, c, low, n]
                bounds.done[level, low] = m * t - early + shape.after[c, low, n]


@_compiled
def _time_1f1b(walk: Any, p: int, m: int) -> None:
    """Simulates 1F1B on ``p`` stages with ``m`` microbatches; writes ends into ``seconds[2]``.

    An end is that of a stage's last backward. Launching needs no input. A message leaves as soon
    as its action has ended and the message before it has left the link.
    """
    arrive = walk.arrive
    ends = walk.seconds[2]
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
                # A stage prefers a forward until ``ahead`` + 1 microbatches wait for a backward.
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
    """Returns the seconds of the ``p`` stages in a walk, or infinity if they do not fit."""
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
def _list_children(
    shape: Any, walk: Any, depth: int, best: float, bounds: Any, tied: float
) -> None:
    """Lists a stage's children whose bound is below ``best`` seconds, lowest bound first."""
    n = shape.forward.shape[1] - 1
    m = shape.microbatches
    level, low = walk.levels[depth], walk.cuts[depth]
    c, j = shape.level_class[level], shape.level_follow[level]
    w = min(j, m - 1)
    number = 0
    for edge in range(shape.level_edges[level], shape.level_edges[level + 1]):
        after, kind = shape.edge_from[edge], shape.edge_kind[edge]
        d = shape.level_class[after]
        for high in range(low + 1, n - j + 1):
            if not _fits(shape, c, low, high, shape.held[j]):
                break
            if bounds.ends[after, high] == _INF:
                continue
            f = shape.forward[c, low, high] - shape.launch[0, c, low, high]
            b = shape.backward[c, low, high] - shape.launch[1, c, low, high]
            out, back, link = _transfer(shape, kind, c, d, high)
            reach = max(walk.reach[depth], walk.head[depth] + shape.after[c, low, high])
            span = _span(shape, c, low, high, w, bounds.trips[after, high] + out + back, link)
            bound = max(
                walk.bound[depth],
                tied + reach + span,
                tied + reach + f + b + out + back + bounds.ends[after, high],
                tied + walk.head[depth] + f + out + bounds.done[after, high],
            )
            if bound < best:
                walk.bounds[depth, number] = bound
                walk.edges[depth, number] = edge
                walk.nexts[depth, number] = high
                number += 1
    walk.count[depth] = number
    walk.order[depth, :number] = np.argsort(walk.bounds[depth, :number])
    walk.taken[depth] = 0


@_compiled
def _follow_child(shape: Any, walk: Any, depth: int, child: int, trips: Any, tied: float) -> None:
    """Fixes a stage's layers as a child has them, and opens the next stage."""
    edge, high = walk.edges[depth, child], walk.nexts[depth, child]
    low, level = walk.cuts[depth], walk.levels[depth]
    after, kind = shape.edge_from[edge], shape.edge_kind[edge]
    c, d, j = shape.level_class[level], shape.level_class[after], shape.level_follow[level]
    f = shape.forward[c, low, high] - shape.launch[0, c, low, high]
    b = shape.backward[c, low, high] - shape.launch[1, c, low, high]
    out, back, link = _transfer(shape, kind, c, d, high)
    reach = max(walk.reach[depth], walk.head[depth] + shape.after[c, low, high])
    w = min(j, shape.microbatches - 1)
    span = _span(shape, c, low, high, w, trips[after, high] + out + back, link)
    walk.bound[depth + 1] = max(walk.bound[depth], tied + reach + span)
    walk.reach[depth + 1] = reach + f + b + out + back
    walk.head[depth + 1] = walk.head[depth] + f + out
    walk.kinds[depth] = kind
    walk.cuts[depth + 1] = high
    walk.levels[depth + 1] = after


@_compiled
def _begin(walk: Any, goal: int) -> None:
    """Opens the first stage of a level."""
    walk.levels[0] = goal
    walk.reach[0] = -_INF
    walk.bound[0] = 0.0
    walk.head[0] = 0.0
    walk.cuts[0] = 0


@_compiled
def search_level(
    shape: Any, walk: Any, goal: int, bounds: Any, cap: float, most_leaves: int, best: Any
) -> tuple[float, float, int]:
    """Finds the fastest pipeline that begins with a level and holds all layers.

    Args:
        shape: A ``ShapeArrays``.
        walk: A ``Walk`` to work in, for as many stages as the level has.
        goal: Number of the level.
        bounds: ``LevelBounds`` that :func:`bound_levels` filled.
        cap: Limit in seconds; slower pipelines do not count.
        most_leaves: Maximum number of pipelines to time, and of stages to open per stage.
        best: A ``BestPipeline``, which receives the fastest pipeline, if any is below ``cap``.

    Returns:
        Seconds of the fastest pipeline, or ``cap``; lowest bound of those that ``most_leaves`` left
        out, or infinity; number of pipelines timed.
    """
    p = shape.level_follow[goal] + 1
    first = shape.level_class[goal]
    tied = shape.tied[:, first, :].min() if p > 1 else 0.0
    best_s = cap
    left_out = _INF
    leaves = 0
    opened = 0
    _begin(walk, goal)
    depth, is_new = 0, True
    while depth >= 0:
        if depth == p - 1:
            value = leaf_s(shape, walk, p)
            leaves += 1
            if value < best_s:
                best_s = value
                best.cuts[: p + 1] = walk.cuts[: p + 1]
                best.levels[:p] = walk.levels[:p]
                best.kinds[:p] = walk.kinds[:p]
            depth -= 1
            is_new = False
            continue
        if is_new:
            _list_children(shape, walk, depth, best_s, bounds, tied)
            opened += 1
        taken = walk.taken[depth]
        is_spent = taken == walk.count[depth]
        if not is_spent:
            child = walk.order[depth, taken]
            bound = walk.bounds[depth, child]
            is_over = leaves >= most_leaves or opened >= most_leaves * p
            is_spent = bound >= best_s or is_over
            if bound < best_s and is_over:
                # Children are sorted, so this is the lowest bound that the stage leaves out.
                left_out = min(left_out, bound)
        if is_spent:
            depth -= 1
            is_new = False
            continue
        walk.taken[depth] = taken + 1
        _follow_child(shape, walk, depth, child, bounds.trips, tied)
        depth += 1
        is_new = True
    return best_s, left_out, leaves


def make_walk(shape: ShapeArrays, stages: int) -> Walk:
    """Allocates the arrays of a search through pipelines of up to ``stages`` stages."""
    layers = shape.forward.shape[1] - 1
    width = layers * max(1, int(np.diff(shape.level_edges).max(initial=1)))
    return Walk(
        bounds=np.empty((stages, width)),
        edges=np.empty((stages, width), dtype=np.int64),
        nexts=np.empty((stages, width), dtype=np.int64),
        order=np.empty((stages, width), dtype=np.int64),
        count=np.zeros(stages, dtype=np.int64),
        taken=np.zeros(stages, dtype=np.int64),
        levels=np.zeros(stages, dtype=np.int64),
        cuts=np.zeros(stages + 1, dtype=np.int64),
        kinds=np.zeros(stages, dtype=np.int64),
        head=np.zeros(stages + 1),
        reach=np.zeros(stages + 1),
        bound=np.zeros(stages + 1),
        seconds=np.zeros((3, stages)),
        launch=np.zeros((2, stages)),
        messages=np.zeros((4, stages)),
        counters=np.zeros((2, stages), dtype=np.int64),
        arrive=np.empty((2, stages, shape.microbatches)),
    )
