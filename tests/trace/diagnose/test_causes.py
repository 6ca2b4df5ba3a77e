"""The partition that is proposed is as quick as any; so many spikes are chance or they are not."""

import itertools

import numpy as np
import pytest

from megatron.adaptive.trace.diagnose.causes import StageCosts, _tail, best_partition


def every_partition(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [p for p in itertools.product(range(layers + 1), repeat=stages) if sum(p) == layers]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rank_of", [(0, 1, 2), (0, 1, 2, 3), (0, 1, 1, 0)])
def test_no_partition_is_quicker(seed: int, rank_of: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    stages = len(rank_of)
    times = StageCosts(rng.uniform(1, 3, stages), rng.uniform(0, 4, stages), rank_of)
    found = best_partition(times, 8)
    assert sum(found) == 8
    best = min(times.rank_ns(partition).max() for partition in every_partition(8, stages))
    assert times.rank_ns(found).max() == pytest.approx(best)


def test_equal_stages_get_equal_layers() -> None:
    times = StageCosts(np.ones(4), np.zeros(4), (0, 1, 0, 1))
    assert best_partition(times, 8) == (2, 2, 2, 2)


@pytest.mark.parametrize(("count", "seen", "part"), [(1, 1, 0.5), (6, 3, 0.7), (4, 8, 0.3)])
def test_its_likelihood_is_that_of_draws(count: int, seen: float, part: float) -> None:
    rng = np.random.default_rng(0)
    drawn = rng.poisson(rng.gamma(seen, part, 200_000))
    assert _tail(count, seen, part) == pytest.approx(float((drawn >= count).mean()), abs=0.004)


def test_the_more_others_have_the_likelier() -> None:
    likely = [_tail(10, seen, 0.3) for seen in (1, 4, 16)]
    assert likely == sorted(likely)
    assert _tail(10, 1, 0.0005) == pytest.approx(0, abs=1e-9)
