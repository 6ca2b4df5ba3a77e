"""Computes the time of a layer on each stage of a run, and the best partition of the layers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.adaptive.trace.diagnose.samples import Floats, Measured, middle


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Holds the time of one layer, and the time of embedding and loss, on each stage.

    Attributes:
        layer_ns: ``[stages]``, time in ns of one layer for one microbatch.
        extra_ns: ``[stages]``, time in ns of embedding and loss for one microbatch.
        rank_of: ``[stages]``, pipeline rank of each stage.
    """

    layer_ns: Floats
    extra_ns: Floats
    rank_of: Sequence[int]

    def stage_ns(self, layers: Sequence[int]) -> Floats:
        """Returns the time in ns of a microbatch on each stage, ``[stages]``.

        Args:
            layers: Number of layers per stage.
        """
        return np.asarray(np.asarray(layers) * self.layer_ns + self.extra_ns)

    def rank_ns(self, layers: Sequence[int]) -> Floats:
        """Returns the time in ns of a microbatch on each rank, ``[pipeline ranks]``.

        Args:
            layers: Number of layers per stage.
        """
        ranks: Floats = np.bincount(self.rank_of, weights=self.stage_ns(layers)).astype(np.float64)
        return ranks


def stage_costs(m: Measured) -> StageCosts | None:
    """Estimates the time of a layer on each stage from ``m``, the measured times of a run.

    Returns ``None`` if the number of layers per stage is unknown.
    """
    if not m.layers or not sum(m.layers):
        return None
    stage_ns = np.zeros(len(m.layers))
    rank_of = [0] * len(m.layers)
    for column, header in enumerate(m.headers):
        for chunk, stage in enumerate(m.stages[column]):
            chunk_ns = float(np.nansum(middle(m.median_ns[:, column, chunk], axis=0)))
            # Data-parallel replicas wait for each other, so only the time of the slowest replica
            # matters.
            stage_ns[stage] = max(stage_ns[stage], chunk_ns)
            rank_of[stage] = header.pp_rank
    return split_costs(stage_ns, m.layers, m.work, rank_of)


def split_costs(
    stage_ns: Floats, layers_of: Sequence[int], work: Sequence[float], rank_of: Sequence[int]
) -> StageCosts:
    """Splits each stage's time into the time of its layers and the time of embedding and loss.

    Args:
        stage_ns: ``[stages]``, time in ns of a microbatch.
        layers_of: Number of layers per stage, at least one of which must be positive.
        work: Expected computing time of each stage, expressed as an equivalent number of layers;
            empty if unknown.
        rank_of: ``[stages]``, pipeline rank of each stage.
    """
    layers = np.array(layers_of, dtype=np.float64)
    extra_work = np.array(work or layers_of) - layers
    pure = (layers > 0) & (extra_work <= 0)
    pure = pure if pure.any() else layers > 0
    usual = float(np.median(stage_ns[pure] / layers[pure]))
    # If a stage takes longer than its layers usually do, attribute the additional time to embedding
    # and loss, but at most twice the time planned for them. If the stage takes even longer, its
    # layers are slow.
    extra_ns = np.where(
        extra_work > 0, np.clip(stage_ns - layers * usual, 0, 2 * extra_work * usual), 0.0
    )
    layer_ns = np.where(layers > 0, (stage_ns - extra_ns) / np.maximum(layers, 1), usual)
    return StageCosts(layer_ns, extra_ns, rank_of)


def best_partition(times: StageCosts, num_layers: int) -> tuple[int, ...]:
    """Returns the number of layers per stage that minimizes the time of the slowest rank.

    A greedy algorithm assigns each layer to the stage whose rank has the lowest total time
    including the layer. In case of a tie, it chooses the stage with the fewest layers.

    Args:
        times: Time of a layer, and of embedding and loss, on each stage.
        num_layers: Number of layers of the model.
    """
    stages = len(times.rank_of)
    layers = [0] * stages
    busy = np.bincount(times.rank_of, weights=times.extra_ns).astype(np.float64)

    def candidate(stage: int) -> tuple[float, int, int]:
        return float(busy[times.rank_of[stage]] + times.layer_ns[stage]), layers[stage], stage

    ready = [candidate(stage) for stage in range(stages)]
    heapq.heapify(ready)
    placed = 0
    while placed < num_layers:
        # The heap may contain outdated entries. Because the time of a rank never decreases, the
        # first entry is the best one if it is up to date.
        entry = ready[0]
        stage = entry[2]
        if entry == candidate(stage):
            layers[stage] += 1
            busy[times.rank_of[stage]] = entry[0]
            placed += 1
        heapq.heapreplace(ready, candidate(stage))
    return tuple(layers)
