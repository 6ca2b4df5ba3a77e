"""Enumerates the possible orders of nodes in a pipeline, as a graph that the search traverses.

The search builds pipelines backwards from their last stage (``search_kernel``). A *level* describes
how the last stages of a pipeline use the cluster's nodes: the nodes in use, and the class of the
first of these stages, but not the layers. In this example, there are two nodes of type a and one
node of type b, with one stage on each node. The class of a level's first stage is written in
brackets. An arrow points to the level of the next stage::

    1 stage        2 stages           3 stages
    [a] a      <-  [a] 2a         <-  [b] 2a + b
    [a] a      <-  [b] a + b      <-  [a] 2a + b
    [b] b      <-  [a] a + b      <-  [a] 2a + b

Orders of nodes share a level if they use the same nodes and begin with the same class: ``a a b``
and ``a b a`` both lead to the level "[a] 2a + b". A small number of levels therefore represents
many orders.

If several stages fit on a node, they form a block. In this case, a level also contains the number
of stages that its block still needs. Until the block is complete, no other node can be added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron.adaptive.planner.stage_classes import StageClass

_FEW = 2000
"""Maximum number of levels if some orders of nodes are skipped."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DpStates:
    """Levels of the search, and edges between them.

    Each level comes after the levels to which its edges lead.

    Attributes:
        arrays: Arrays that describe levels and edges, keyed by their field name in
            ``search_kernel.ShapeArrays``.
        used: For each level, the number of nodes of each type that it uses.
        complete: Indices of the levels whose blocks of stages are complete.
        placements: Number of node orders that the complete levels represent.
        whole: Whether the levels cover every order of nodes.
    """

    arrays: dict[str, Any]
    used: tuple[tuple[int, ...], ...]
    complete: tuple[int, ...]
    placements: int
    whole: bool


def make_dp_states(
    classes: Sequence[StageClass],
    counts: Sequence[int],
    *,
    most_stages: int,
    most_levels: int = 20_000,
) -> DpStates:
    """Finds the levels of all orders of nodes, or only of some orders if there are too many levels.

    If there are too many levels, blocks of stages on nodes of the same type are grouped into runs.
    Runs of 2 blocks are tried first, then runs of 4, 8 and so on, until the number of levels is
    small enough.

    Args:
        classes: Stage classes (parallel sizes and node types) that a pipeline can use.
        counts: Number of nodes of each type in the cluster.
        most_stages: Maximum number of stages of a pipeline.
        most_levels: Maximum number of levels. If all orders of nodes together have more levels,
            some orders are skipped.
    """
    run = 1
    most = most_levels
    while True:
        states = _states_of_runs(classes, counts, most_stages, most, run)
        if states is not None:
            return states
        # If some orders are skipped, the search cannot prove that its result is optimal, so
        # searching more levels is not worth the time.
        run *= 2
        most = min(most, _FEW)


class _Level(NamedTuple):
    """State of the search, which describes how the last stages of a pipeline use the nodes.

    Attributes:
        follow: Number of stages after the level's first stage.
        used: Number of nodes of each type that the stages use.
        stage_class: Index of the class of the level's first stage.
        left: Number of stages that must still be added to the block of the first stage.
        more: Number of blocks that must still be added to the run of the first stage. A run is a
            sequence of blocks of the same class.
    """

    follow: int
    used: tuple[int, ...]
    stage_class: int
    left: int
    more: int


_Edges = dict[_Level, list[tuple[_Level | None, int]]]
"""Edges of each level, as a list of pairs. The first value is the level of the next stage, or
``None`` at the end of the pipeline. The second value is 1 for an edge within a block of nodes,
otherwise 0."""


def _states_of_runs(
    classes: Sequence[StageClass],
    counts: Sequence[int],
    most_stages: int,
    most_levels: int,
    run: int,
) -> DpStates | None:
    """Finds the levels (node sets) of pipelines in which equal blocks of stages form runs.

    A run consists of ``run`` adjacent blocks of the same class, or of fewer blocks if no more nodes
    are free. The result is ``None`` if there are more than ``most_levels`` levels.
    """
    edges: _Edges = {}
    wave: dict[_Level, None] = {}
    nothing = (0,) * len(counts)
    for level in _opened(classes, counts, nothing, 0, run):
        edges.setdefault(level, []).append((None, 0))
        wave[level] = None
    for _ in range(most_stages - 1):
        longer: dict[_Level, None] = {}
        for level in wave:
            follow, used, c, left, more = level
            kind = 0
            if left:
                steps = [_Level(follow + 1, used, c, left - 1, more)]
                kind = 1
            elif more:
                nodes = tuple(a + b for a, b in zip(used, classes[c].nodes, strict=True))
                steps = [_Level(follow + 1, nodes, c, classes[c].block - 1, more - 1)]
            else:
                steps = list(_opened(classes, counts, used, follow + 1, run))
            for step in steps:
                edges.setdefault(step, []).append((level, kind))
                longer[step] = None
        if len(edges) > most_levels and run < max(counts):
            return None
        wave = longer
    return _pack(edges, run == 1)


def _opened(
    classes: Sequence[StageClass],
    counts: Sequence[int],
    used: tuple[int, ...],
    follow: int,
    run: int,
) -> list[_Level]:
    """Returns levels that begin with a new stage on nodes that are not yet counted in ``used``.

    There is at most one level for each class. ``follow`` is the number of stages after the new
    stage, and ``run`` is the maximum number of adjacent blocks of the same class.
    """
    levels = []
    for c, stage_class in enumerate(classes):
        room = min(
            (n - u) // a for n, u, a in zip(counts, used, stage_class.nodes, strict=True) if a
        )
        if room > 0:
            nodes = tuple(a + b for a, b in zip(used, stage_class.nodes, strict=True))
            levels.append(_Level(follow, nodes, c, stage_class.block - 1, min(run, room) - 1))
    return levels


def _count_orders(used: tuple[int, ...]) -> int:
    """Returns how many distinct orders of nodes exist if ``used`` counts the nodes of each type."""
    orders = math.factorial(sum(used))
    for count in used:
        orders //= math.factorial(count)
    return orders


def _pack(edges: _Edges, whole: bool) -> DpStates:
    """Numbers the levels, and stores levels and edges in arrays.

    ``whole`` is true if the levels cover every possible order of nodes.
    """
    numbers = {level: number for number, level in enumerate(edges)}
    first, sources, kinds = [0], [], []
    for level in edges:
        for source, kind in edges[level]:
            if source is not None:
                sources.append(numbers[source])
                kinds.append(kind)
        first.append(len(sources))
    rows = {
        "level_class": [level.stage_class for level in edges],
        "level_follow": [level.follow for level in edges],
        "level_edges": first,
        "edge_from": sources,
        "edge_kind": kinds,
    }
    return DpStates(
        arrays={name: np.array(row, dtype=np.int64) for name, row in rows.items()},
        used=tuple(level.used for level in edges),
        complete=tuple(numbers[level] for level in edges if not level.left),
        placements=sum(_count_orders(level.used) for level in edges if not level.left),
        whole=whole,
    )
