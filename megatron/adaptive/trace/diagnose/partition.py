"""Layers per stage that make the best of the speeds that were measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.adaptive.trace.diagnose.measured import Measured
from megatron.adaptive.trace.diagnose.robust import Floats, middle

__all__ = ["LayerTimes", "best_partition", "layer_times"]


class LayerTimes:
    """What a layer takes on each stage, and what the stage takes beside its layers.

    Args:
        layer_ns: ``[stages]``.
        beside_ns: ``[stages]``, embedding, loss.
        rank_of: ``[stages]``, pipeline rank that holds it.
    """

    def __init__(self, layer_ns: Floats, beside_ns: Floats, rank_of: Sequence[int]) -> None:
        self.layer_ns = layer_ns
        self.beside_ns = beside_ns
        self.rank_of = tuple(rank_of)

    def pace_ns(self, layers: Sequence[int]) -> float:
        """How long the slowest rank takes for a microbatch under a partition."""
        stages = np.asarray(layers) * self.layer_ns + self.beside_ns
        return float(np.bincount(self.rank_of, weights=stages).max())


def layer_times(m: Measured) -> LayerTimes | None:
    """Work out from a run what layers take; ``None`` where it does not say how many there are."""
    if not m.layers or not sum(m.layers):
        return None
    stages = len(m.layers)
    takes = np.zeros(stages)
    rank_of = [0] * stages
    for column, place in enumerate(m.places):
        for chunk, stage in enumerate(place.stages):
            mine = float(np.nansum(middle(m.median_ns[:, column, chunk], axis=0)))
            takes[stage] = max(takes[stage], mine)  # all replicas wait for the slowest
            rank_of[stage] = place.pp_rank
    layers = np.array(m.layers, dtype=np.float64)
    beside = np.array(m.work or m.layers) - layers
    pure = (layers > 0) & (beside <= 0)
    pure = pure if pure.any() else layers > 0
    usual = float(np.median(takes[pure] / layers[pure]))
    # What a stage holds beside its layers is what it takes longer, as far as the plan explains it.
    extra = np.where(beside > 0, np.clip(takes - layers * usual, 0, 2 * beside * usual), 0.0)
    each = np.where(layers > 0, (takes - extra) / np.maximum(layers, 1), usual)
    return LayerTimes(each, extra, rank_of)


def best_partition(times: LayerTimes, num_layers: int) -> tuple[int, ...]:
    """Layers per stage under which the slowest rank is as quick as it can be.

    Layer by layer to the rank that is done first with it; on it to the stage that has fewer.

    Args:
        times: of layers.
        num_layers: of the model.
    """
    stages = len(times.rank_of)
    given = [0] * stages
    busy = np.bincount(times.rank_of, weights=times.beside_ns).astype(np.float64)
    for _ in range(num_layers):
        after = [busy[times.rank_of[stage]] + times.layer_ns[stage] for stage in range(stages)]
        best = min(range(stages), key=lambda stage: (after[stage], given[stage]))
        given[best] += 1
        busy[times.rank_of[best]] = after[best]
    return tuple(given)
