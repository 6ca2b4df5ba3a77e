"""Finds the fastest 1F1B pipeline by branch and bound, in code that numba compiles.

A pipeline is a chain of stages. For each stage, the search chooses its layers and the class of
nodes on which it runs. The search has two passes:

1. Dynamic programming from the last stage to the first computes lower bounds for the time of the
   rest of a pipeline, given its first stage and first layer.
2. A depth-first search from the first stage to the last adds one stage at a time, trying choices
   with the lowest bound first. It skips every partial pipeline whose bound is not below the best
   time so far. A complete pipeline is simulated exactly, action by action.

A *level* (a state in ``search_levels.DpStates``) describes the last stages of a pipeline: the nodes
that they use, and the class of the first of these stages, but not their layers. An *edge* leads
from a level to the level of the next stage. For example, take 4 layers, 4 microbatches and two
nodes. On node A, a layer takes 1 s forward and 1 s backward. Node B takes twice as long::

    level   stages     edge to   bound of all 4 layers (Z)
    0       B                    64 s   4 microbatches x 4 layers x 4 s
    1       A                    32 s
    2       A -> B     0         26 s   A holds layers 0 to 2, B holds layer 3
    3       B -> A     1         28 s   B holds layer 0, A holds layers 1 to 3

The second pass begins with level 2, because it has the lowest bound. In an exact simulation, its
pipeline takes 26 s. No other level has a lower bound, so this pipeline is the best.

A single table of bounds is enough for pipelines of all lengths and all parts of a cluster, because
under 1F1B the bounds of a stage depend only on the stages after it. If ``j`` stages follow, a stage
keeps ``min(j + 1, m)`` microbatches in flight. It runs ``w = min(j, m - 1)`` warm-up forward passes
before its first backward pass.

The bounds of a stage are listed below. On this stage, a forward pass takes ``f`` seconds and a
backward pass ``b`` seconds. A step has ``m`` microbatches. The round trip ``r`` is the time from
the end of a forward pass to the start of the same microbatch's backward pass::

    span   = m (f + b) + max(0, r - w f) + max(0, r - w b)        idle at both ends
    rounds = (1 + (m - 1) // (w + 1)) (f + b + r) + rest b        forward waits for backward pass
    D      = max(span, rounds, f + b + transfers + D of the next) end of last backward pass
    Z      = max(D + reduction, f + transfer + Z of the next)     end of the step, from here on

Here, ``rest`` is ``(m - 1) % (w + 1)``, and transfers are the messages to and from the next stage.
If ``m = w + 1``, both idle times in ``span`` are the same interval, so only the larger one is
added. A rank can launch an action's kernels while it waits for the input, so launch times are
excluded from all paths through other ranks. ``r``, ``D`` and ``Z`` are minimised separately over
all continuations of the pipeline, so each of these values is a lower bound for every continuation.

Importing this module imports numba, which takes half a second. Numba caches the compiled code on
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
    """Returns the CPU time of this process in seconds, excluding the time for compiling with numba.

    The limits of a search apply to this time. Code is compiled only once per machine. If compile
    time were included, the first search on a machine would find worse plans than later searches.
    """
    compiled_s: float = _compiling.duration if _compiling.done else 0.0
    return time.process_time() - compiled_s


def _compiled(function: _Function) -> _Function:
    compiled: Any = njit(function, cache=True)
    return cast(_Function, compiled)


class ShapeArrays(NamedTuple):
    """Costs of all possible stages of a combination of parallel sizes, and the graph of levels.

    There are ``c`` classes of stages and ``n`` layers. Arrays of shape ``[..., n + 1, n + 1]`` are
    indexed by a stage's first layer and the layer after its last layer.

    Attributes:
        forward: Duration of a microbatch's forward pass in seconds, ``[c, n + 1, n + 1]``.
        backward: Duration of a backward pass in seconds, including weight gradients, ``[c, n + 1, n
            + 1]``.
        weight: Time for computing only the weight gradients in seconds, ``[c, n + 1, n + 1]``.
        launch: Time in seconds for launching the kernels of a forward and a backward pass, ``[2, c,
            n + 1, n + 1]``. Kernels may be launched before the input arrives.
        after: Duration of gradient reduction and optimizer step in seconds, ``[c, n + 1, n + 1]``.
        base: Memory in bytes that does not depend on microbatches, minus the memory limit, for each
            node type of a class, ``[c, tables, n + 1, n + 1]``.
        kept: Size in bytes of the activations of a microbatch, ``[c, tables, n + 1, n + 1]``.
        latency: Latency of a message in seconds, ``[2, 2, c, c, n + 1]``. The indices are the
            message's direction (0 after a forward pass, 1 after a backward pass), the kind of the
            edge, the sender's class, the receiver's class, and the number of layers before the
            boundary.
        occupancy: Time in seconds during which a message occupies its link, indexed like
            ``latency``.
        tied: Duration of the all-reduce of tied embeddings in seconds, ``[2, c, c]``. The first
            index is 1 if the first and last stage are in the same block of nodes, otherwise 0. The
            other indices are the classes of these two stages.
        level_class: For each level, the index of the class of its first stage, ``[levels]``.
        level_follow: For each level, the number of stages that follow its first stage,
            ``[levels]``.
        level_edges: For each level, the index of its first edge. The total number of edges follows
            at the end, ``[levels + 1]``.
        edge_from: For each edge, the index of the level of the next stage, ``[edges]``.
        edge_kind: For each edge, 1 if both its stages are in the same block of nodes, otherwise 0,
            ``[edges]``.
        held: Number of microbatches that a stage keeps in flight, indexed by the number of stages
            after it.
        microbatches: Number of microbatches per step.
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
    """Lower bounds of times in seconds, by level and first layer, ``[levels, n + 1]``.

    A level is a set of nodes with the class of its first stage. An entry is infinite if the
    remaining layers do not fit into memory or take too long.

    Attributes:
        ends: Lower bound of the time from the start of the level's first stage to the end of its
            last backward pass (``D`` in the module's docstring).
        done: Lower bound of the time from the start of the level's first stage until all stages of
            the level have finished, including gradient reductions and optimizer (``Z`` in the
            module's docstring).
        trips: Lower bound of the time from the start of a forward pass in the level's first stage
            to the end of the same microbatch's backward pass in this stage.
    """

    ends: Any
    done: Any
    trips: Any


class BestPipeline(NamedTuple):
    """Output arrays for the fastest pipeline that :func:`search_level` finds.

    Attributes:
        cuts: Index of the first layer of each stage, followed by the number of layers, ``[stages +
            1]``.
        levels: For each stage, the level (set of nodes) that this and all later stages use,
            ``[stages]``.
        kinds: For each stage, 1 if it is in the same block of nodes as the next stage, otherwise 0,
            ``[stages]``.
    """

    cuts: Any
    levels: Any
    kinds: Any


class Walk(NamedTuple):
    """State of the depth-first search: the stages chosen so far, and the choices for each of them.

    The depth of the search is the index of a stage. A *child* of a stage is one choice of its last
    layer and of the edge to the next stage.

    Attributes:
        bounds: Lower bound in seconds of the step time with each child, ``[stages, children]``.
        edges: Index of each child's edge to the next stage, ``[stages, children]``.
        nexts: For each child, the index of the next stage's first layer, ``[stages, children]``.
        order: Indices of the children in ascending order of their bound, ``[stages, children]``.
        count: Number of children of each stage, ``[stages]``.
        taken: For each stage, the number of children that the search has already followed,
            ``[stages]``.
        levels: For each stage, the level (set of nodes) that this and all later stages use,
            ``[stages]``.
        cuts: Index of the first layer of each stage, followed by the number of layers, ``[stages +
            1]``.
        kinds: For each stage, 1 if it is in the same block of nodes as the next stage, otherwise 0,
            ``[stages]``.
        head: Earliest possible start of each stage in seconds, ``[stages + 1]``.
        reach: Time in seconds from each stage's last backward pass to the end of all earlier
            stages, plus the value of ``head``, ``[stages + 1]``.
        bound: Lower bound of the step time in seconds that follows from all earlier stages,
            ``[stages + 1]``.
        seconds: Durations of forward pass and backward pass, and end of the last backward pass, in
            seconds, ``[3, stages]``.
        launch: Kernel launch times of forward and backward pass in seconds, ``[2, stages]``.
        messages: Latency after a forward pass, latency after a backward pass, and the link
            occupancy after each of these passes, in seconds, ``[4, stages]``.
        counters: Number of completed forward and backward passes, ``[2, stages]``.
        arrive: Arrival time of each input in seconds, ``[2, stages, m]``. The first index is 0 for
            forward passes and 1 for backward passes.
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
    """Returns the minimum time from a stage's first input to the end of its last backward pass.

    The result is in seconds. It is the maximum of three bounds: ``span`` and ``rounds`` in the
    module's docstring, and the time that the messages of all microbatches need on a link if each
    occupies it for ``link`` seconds.
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
    """Returns the times of a forward and a backward message, and the larger of their occupancies.

    All three values are in seconds. A message's occupancy is the time during which it occupies its
    link.
    """
    out = shape.occupancy[0, kind, c, d, cut]
    back = shape.occupancy[1, kind, d, c, cut]
    latency = shape.latency
    return out + latency[0, kind, c, d, cut], back + latency[1, kind, d, c, cut], max(out, back)


@_compiled
def _bound_edge(shape: Any, level: int, edge: int, cap: float, bounds: Any) -> None:
    """Lowers the bounds of ``level`` where a pipeline that continues along ``edge`` is faster.

    A level describes the last stages of a pipeline, and an edge leads to the level of the next
    stage. Each range of layers is tried for the level's first stage. The bounds of the remaining
    stages are already known.
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
            # If a stage is too slow or too large, so is every stage with more layers. Skip the
            # larger ranges.
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
    """Computes the lower bounds of all levels, starting with levels at the end of pipelines.

    Args:
        shape: Costs and graph of levels, as ``ShapeArrays``.
        cap: Time limit in seconds. The bounds of slower pipelines remain infinite.
        bounds: ``LevelBounds`` to fill. All entries are initially infinite.
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
    """Simulates 1F1B on ``p`` stages with ``m`` microbatches, and writes times to ``seconds[2]``.

    These times are the end times of each stage's last backward pass. Kernels can be launched before
    the input arrives. A message is sent when its action has ended and the previous message has left
    the link.
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
                # A stage runs forward passes until ``ahead`` + 1 microbatches wait for their
                # backward pass.
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
    """Returns the step time of ``p`` stages in seconds, or infinity if memory is too small."""
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
    """Lists all choices (children) for the stage ``depth`` with a bound below ``best`` seconds.

    A choice consists of the stage's last layer and the edge to the next stage. Choices are sorted
    by bound.
    """
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
    """Assigns the layers of ``child`` to the stage at ``depth``, and moves on to the next stage."""
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
    """Starts the search at the first stage of the level ``goal``."""
    walk.levels[0] = goal
    walk.reach[0] = -_INF
    walk.bound[0] = 0.0
    walk.head[0] = 0.0
    walk.cuts[0] = 0


@_compiled
def search_level(
    shape: Any, walk: Any, goal: int, bounds: Any, cap: float, most_leaves: int, best: Any
) -> tuple[float, float, int]:
    """Finds the fastest pipeline that contains all layers and begins with the level ``goal``.

    Args:
        shape: Costs and graph of levels, as ``ShapeArrays``.
        walk: Search state to overwrite, with space for all stages of a pipeline.
        goal: Index of the level at which the pipeline begins.
        bounds: Lower bounds of all levels, filled by :func:`bound_levels`.
        cap: Time limit in seconds. Slower pipelines are ignored.
        most_leaves: Maximum number of pipelines to simulate. The maximum number of partial
            pipelines to extend is this number multiplied by the number of stages.
        best: Output arrays for the fastest pipeline. They are only written if the pipeline is
            faster than ``cap``.

    Returns:
        Three values. The first is the step time of the fastest pipeline in seconds, or ``cap`` if
        no pipeline is faster. The second is the lowest bound of the pipelines that were skipped
        because of ``most_leaves``, or infinity. The third is the number of pipelines that were
        simulated.
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
                # Children are sorted by bound, so this bound is the lowest of all skipped children.
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
    """Allocates arrays for searching pipelines with up to ``stages`` stages."""
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
