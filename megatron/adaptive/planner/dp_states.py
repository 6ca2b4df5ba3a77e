"""Levels: every way in which the last stages of a pipeline can stand on a cluster's nodes.

A level is reached from the end of the pipeline. It knows the nodes used, how many stages there are,
the class of the foremost and how many more of the same class have to come before another node may
be opened. Orders of equal nodes that use the same nodes meet in one level, so that there are few
levels where there are many orders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.adaptive.planner.classes import StageClass

__all__ = ["Levels", "make_levels"]

_FEW = 2000


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels:
    """The levels, each after those that it stands on.

    Attributes:
        stage_class: ``[levels] int64``, class of the foremost stage.
        follow: ``[levels] int64``, stages behind it.
        first_edge: ``[levels + 1] int64``.
        edge_from: ``[edges] int64``, the level without the foremost stage.
        edge_kind: ``[edges] int64``, 1 where both stages share a node.
        used: per level, nodes of each type.
        complete: levels that leave no node half used.
        placements: orders of nodes among the complete ones.
        whole: whether every order is among them.
    """

    stage_class: Any
    follow: Any
    first_edge: Any
    edge_from: Any
    edge_kind: Any
    used: tuple[tuple[int, ...], ...]
    complete: tuple[int, ...]
    placements: int
    whole: bool


def make_levels(
    classes: Sequence[StageClass],
    counts: Sequence[int],
    *,
    most_stages: int,
    most_levels: int = 20_000,
) -> Levels:
    """Find all levels, or those of whole runs of equal nodes where there are too many.

    Args:
        classes: of stages.
        counts: nodes of each type.
        most_stages: longest pipeline.
        most_levels: above it, only runs of equal nodes are kept, so long that there are few levels.
    """
    run, most = 1, most_levels
    while True:
        found = _levels(classes, counts, most_stages, most, run)
        if found is not None:
            return found
        # Without a proof a finer choice is hardly worth its time.
        run, most = run * 2, min(most, _FEW)


_Key = tuple[int, tuple[int, ...], int, int, int]


def _levels(
    classes: Sequence[StageClass],
    counts: Sequence[int],
    most_stages: int,
    most_levels: int,
    run: int,
) -> Levels | None:
    """``run``: blocks of a class that have to come one after the other, as far as nodes last."""
    # Key: stages behind, nodes used, class, stages left of the block, further blocks of the run.
    edges: dict[_Key, list[tuple[_Key | None, int]]] = {}
    wave: dict[_Key, None] = {}
    nothing = (0,) * len(counts)
    for key in _opened(classes, counts, nothing, 0, run):
        edges.setdefault(key, []).append((None, 0))
        wave[key] = None
    for _ in range(most_stages - 1):
        ahead: dict[_Key, None] = {}
        for key in wave:
            j, used, c, left, more = key
            kind = 0
            if left:
                steps, kind = [(j + 1, used, c, left - 1, more)], 1
            elif more:
                nodes = tuple(a + b for a, b in zip(used, classes[c].nodes, strict=True))
                steps = [(j + 1, nodes, c, classes[c].block - 1, more - 1)]
            else:
                steps = list(_opened(classes, counts, used, j + 1, run))
            for step in steps:
                edges.setdefault(step, []).append((key, kind))
                ahead[step] = None
        if len(edges) > most_levels and run < max(counts):
            return None
        wave = ahead
    return _pack(edges, run == 1)


def _opened(
    classes: Sequence[StageClass],
    counts: Sequence[int],
    used: tuple[int, ...],
    follow: int,
    run: int,
) -> list[_Key]:
    keys = []
    for c, one in enumerate(classes):
        room = min((n - u) // a for n, u, a in zip(counts, used, one.nodes, strict=True) if a)
        if room > 0:
            nodes = tuple(a + b for a, b in zip(used, one.nodes, strict=True))
            keys.append((follow, nodes, c, one.block - 1, min(run, room) - 1))
    return keys


def _orders(used: tuple[int, ...]) -> int:
    """Distinct orders of so many nodes of each type."""
    orders = math.factorial(sum(used))
    for count in used:
        orders //= math.factorial(count)
    return orders


def _pack(edges: dict[_Key, list[tuple[_Key | None, int]]], whole: bool) -> Levels:
    numbers = {key: number for number, key in enumerate(edges)}
    first, sources, kinds = [0], [], []
    for key in edges:
        for source, kind in edges[key]:
            if source is not None:
                sources.append(numbers[source])
                kinds.append(kind)
        first.append(len(sources))
    return Levels(
        stage_class=np.array([key[2] for key in edges], dtype=np.int64),
        follow=np.array([key[0] for key in edges], dtype=np.int64),
        first_edge=np.array(first, dtype=np.int64),
        edge_from=np.array(sources, dtype=np.int64),
        edge_kind=np.array(kinds, dtype=np.int64),
        used=tuple(key[1] for key in edges),
        complete=tuple(numbers[key] for key in edges if not key[3]),
        placements=sum(_orders(key[1]) for key in edges if not key[3]),
        whole=whole,
    )
