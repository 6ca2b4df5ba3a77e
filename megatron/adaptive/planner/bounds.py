"""Bounds for every order of nodes at once, where there are too many orders to go through."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megatron.adaptive.planner.classes import StageClass
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.shapes import Choice, Tables

__all__ = ["capacity_bound", "most_rate"]


def most_rate(rates: Iterable[tuple[int, float, float]], most_stages: int) -> float:
    """Microbatches per second if the work of one could be divided freely.

    Args:
        rates: type of node, microbatches per second of one stage that holds all layers, and how
            many stages the nodes of the type are enough for; several where widths differ.
        most_stages: of a pipeline.
    """
    by_type: dict[int, tuple[float, float]] = {}
    for index, rate, stages in rates:
        fastest, most = by_type.get(index, (0.0, 0.0))
        # The fastest stage and the most throughput may belong to different widths.
        fastest, most = max(fastest, rate), max(most, rate * stages)
        by_type[index] = (fastest, most)
    left, whole = float(most_stages), 0.0
    for fastest, most in sorted(by_type.values(), reverse=True):
        stages = min(most / fastest, left) if fastest else 0.0
        whole += fastest * stages
        left -= stages
    return max(whole, 1e-30)


def capacity_bound(
    tables: Tables, cluster: Cluster, classes: Sequence[StageClass], choice: Choice
) -> float:
    """Seconds below which the stages of all nodes together cannot hold all layers.

    A stage holds at most so many layers as fit beside one microbatch, and as its GPUs get through
    in time. Mixed stages are no better than their parts.

    Args:
        tables: for durations and bytes.
        cluster: the nodes.
        classes: of the shape.
        choice: what its stages share.

    Returns:
        Seconds; infinite if they do not fit at all.
    """
    n = tables.model.num_layers
    least: dict[int, list[tuple[float, Any]]] = {}
    for index, group in enumerate(cluster.groups):
        for tp, dp, micro_batch in {(one.tp, one.dp, one.micro_batch) for one in classes}:
            if group.type.gpus % tp == 0:
                stages = group.count * group.type.gpus / (tp * dp)
                one = StageClass((), tp, dp, micro_batch, 1)
                row = _least_s(tables.ranges(group.type, one, choice), choice.microbatches)
                least.setdefault(index, []).append((stages, row))
    rows = [row for found in least.values() for row in found]
    times = np.unique(np.concatenate([row[1] for row in rows]))
    times = times[np.isfinite(times)]

    def held(seconds: float) -> float:
        total = 0.0
        for found in least.values():
            # Of several widths on the same nodes, the one that holds most.
            total += max(
                stages * float(np.searchsorted(row, seconds, side="right")) for stages, row in found
            )
        return total

    if not len(times) or held(float(times[-1])) < n:
        return math.inf
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if held(float(times[middle])) >= n:
            high = middle
        else:
            low = middle + 1
    return float(times[low])


def _least_s(ranges: Sequence[Any], microbatches: int) -> Any:
    """``[n]``: least seconds in which a stage of the class runs 1, 2, ... layers; ascending."""
    forward, backward, weight, _, _, base, kept = ranges
    whole = microbatches * (forward + backward + weight)
    whole = np.where(base + kept <= 0, whole, np.inf)
    each = np.array([np.diagonal(whole, size).min() for size in range(1, whole.shape[0])])
    return np.maximum.accumulate(each)
