"""How many ranks of a node were at work beside each action of a run, and what that cost.

Fits a ``Pace`` to runs: the same layers take longer beside others, so a run with one process, one
with as many as there are cores and one with more tell it; so do the idle moments of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.adaptive.planner.pace import Pace
from megatron.adaptive.trace.event import DRAWN_ACTIONS
from megatron.adaptive.trace.figures import compute_ns
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.table import KIND

__all__ = ["Beside", "crowds", "fit_pace", "work_s"]

_PRIOR = 0.02
"""Weight of a speed of 1 against one stage of a run that says something else."""

MOST = 2.0
"""A process that works alone is at most so much faster."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Durations of a stage beside others.

    Attributes:
        counts: ``[kinds]``, how many layers of each kind it holds.
        seconds: ``[actions]``, of its forward, or of both parts of its backward.
        parts: ``[actions, processes + 1]``, part of them in which so many were at work.
        cores: of its node.
    """

    counts: Any
    seconds: Any
    parts: Any
    cores: int


def crowds(trace: RunTrace, iterations: Sequence[int], chunks: int) -> dict[int, Any]:
    """Part of its actions in which each number of ranks was at work on a rank's host.

    Args:
        trace: of all ranks.
        iterations: that count.
        chunks: of each rank.

    Returns:
        By rank, ``[chunks, 3, ranks + 1]``; rows of actions that it does not have are 0.
    """
    tables = {rank: one.table(list(iterations)) for rank, one in trace.ranks.items()}
    actions = {}
    for rank, table in tables.items():
        rows = np.flatnonzero(np.isin(table.kind, [KIND[name] for name in DRAWN_ACTIONS]))
        begins = table.start_ns[rows]
        actions[rank] = (
            table.chunk[rows],
            table.kind[rows],
            begins,
            begins + compute_ns(table)[rows],
        )
    found = {}
    hosts = {rank: one.header.host for rank, one in trace.ranks.items()}
    for host in sorted(set(hosts.values())):
        here = [rank for rank in tables if hosts[rank] == host]
        at = np.concatenate(
            [actions[rank][2] for rank in here] + [actions[rank][3] for rank in here]
        )
        step = np.repeat([1, -1], len(at) // 2)
        order = np.lexsort((step, at))
        at, active = at[order], np.cumsum(step[order])
        for rank in here:
            found[rank] = _parts(*actions[rank], at, active, chunks, len(trace.ranks))
    return found


def _parts(
    chunk: Any, kind: Any, begin: Any, end: Any, at: Any, active: Any, chunks: int, ranks: int
) -> Any:
    sums = np.zeros((chunks, len(DRAWN_ACTIONS), ranks + 1))
    first, last = np.searchsorted(at, begin), np.searchsorted(at, end)
    lengths = np.diff(at, append=at[-1:])
    for number in range(1, ranks + 1):
        before = np.concatenate([[0], np.cumsum(np.where(active == number, lengths, 0))])
        np.add.at(sums[..., number], (chunk, kind), (before[last] - before[first]).astype(float))
    whole = sums.sum(axis=-1, keepdims=True)
    return np.divide(sums, whole, out=np.zeros_like(sums), where=whole > 0)


def work_s(seconds: Any, parts: Any, pace: Pace, cores: int) -> Any:
    """What actions would take with one process on each core."""
    speeds = [1.0] + [pace.speed(number, cores) for number in range(1, parts.shape[-1])]
    return np.where(parts.sum(axis=-1) > 0, parts @ np.array(speeds), 1.0) * seconds


def fit_pace(groups: Sequence[Sequence[Beside]]) -> Pace:
    """Find the pace that lets layers explain all runs.

    Args:
        groups: stages whose layers take the same.
    """
    alone = min(max(_alone(groups), 1.0), MOST)
    return Pace(alone=alone, crowded=_crowded(groups, alone))


def _alone(groups: Sequence[Sequence[Beside]]) -> float:
    """Least squares over what each kind of layer takes and the speed of a process alone."""
    widths = [len(group[0].counts) for group in groups]
    rows, right = [], []
    for group, start in zip(groups, np.cumsum([0, *widths]), strict=False):
        for one in group:
            speed_up, rest, crowd = _shares(one)
            whole = float(one.seconds.sum())
            if crowd.sum() > 0.1 * whole:
                continue
            row = np.zeros(sum(widths) + 1)
            row[start : start + len(one.counts)] = one.counts
            row[-1] = -speed_up.sum()
            rows.append(row / whole)
            right.append(float(rest.sum()) / whole)
    if not rows:
        return 1.0
    scale = max(float(np.abs(np.array(rows)[:, :-1]).max(initial=0.0)), 1e-12)
    ridge = np.diag([1e-3 * scale] * sum(widths) + [_PRIOR])
    target = np.zeros(len(ridge))
    target[-1] = _PRIOR
    return float(
        np.linalg.lstsq(np.vstack([rows, ridge]), np.concatenate([right, target]), rcond=None)[0][
            -1
        ]
    )


def _shares(one: Beside) -> tuple[Any, Any, Any]:
    """Seconds by what they count: a lone process's speed, 1, or the core's share in a crowd."""
    number = np.arange(one.parts.shape[-1])
    cores = max(one.cores, 1)
    free = np.clip((cores - number) / max(cores - 1, 1), 0.0, 1.0)
    few = number <= cores
    seconds = one.parts * one.seconds[:, None]
    crowd = np.where(few, 0.0, cores / np.maximum(number, 1))
    return seconds @ (free * few), seconds @ ((1 - free) * few), seconds @ crowd


def _crowded(groups: Sequence[Sequence[Beside]], alone: float) -> float:
    """What of the cores is left in a crowd, by layers as runs without one have them."""
    needed = had = 0.0
    for group in groups:
        calm: list[tuple[Any, float, float]] = []
        full: list[tuple[Any, float, float]] = []
        for one in group:
            speed_up, rest, crowd = (float(part.sum()) for part in _shares(one))
            row = (one.counts, alone * speed_up + rest, crowd)
            (full if crowd > 0.1 * float(one.seconds.sum()) else calm).append(row)
        if not calm or not full:
            continue
        counts = np.array([row[0] for row in calm], dtype=np.float64)
        ridge = 1e-3 * np.eye(counts.shape[1])
        layers = np.linalg.solve(
            counts.T @ counts + ridge, counts.T @ np.array([row[1] for row in calm])
        )
        needed += sum(float(row[0] @ layers) - row[1] for row in full)
        had += sum(row[2] for row in full)
    return min(max(needed / had, 0.3), 1.0) if had > 0 else 1.0
