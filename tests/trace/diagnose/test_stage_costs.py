"""Checks that the partition that the diagnosis proposes is the fastest partition."""

import itertools

import numpy as np
import pytest

from megatron.adaptive.trace.diagnose.stage_costs import StageCosts, best_partition


def every_partition(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [p for p in itertools.product(range(layers + 1), repeat=stages) if sum(p) == layers]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rank_of", [(0, 1, 2), (0, 1, 2, 3), (0, 1, 1, 0)])
def test_no_partition_is_quicker(seed: int, rank_of: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    stages = len(rank_of)
    times = StageCosts(rng.uniform(1, 3, stages), rng.uniform(0, 4, stages), rank_of)
    chosen = best_partition(times, 8)
    assert sum(chosen) == 8
    best = min(times.rank_ns(partition).max() for partition in every_partition(8, stages))
    assert times.rank_ns(chosen).max() == pytest.approx(best)


def test_equal_stages_get_equal_layers() -> None:
    times = StageCosts(np.ones(4), np.zeros(4), (0, 1, 0, 1))
    assert best_partition(times, 8) == (2, 2, 2, 2)
