"""Checks that the inverse of a covariance is exact, and is computed without a dense matrix."""

import tracemalloc

import numpy as np
import pytest

from megatron.adaptive.trace.diagnose.covariance import Covariance, Shared


def dense(covariance: Covariance) -> np.ndarray:
    matrix = np.diag(covariance.variances)
    for kind in covariance.shared:
        is_same = kind.group[:, None] == kind.group
        matrix += is_same * np.outer(kind.size, kind.size)
    return matrix


def random_covariance(seed: int, ranks: int) -> Covariance:
    rng = np.random.default_rng(seed)
    kinds = []
    for _ in range(int(rng.integers(0, 4))):
        _, group = np.unique(
            rng.integers(0, rng.integers(1, ranks + 1), ranks), return_inverse=True
        )
        size = rng.choice([0.0, 0.02, 0.2, 10.0], ranks)
        kinds.append(Shared(group, size))
    return Covariance(rng.uniform(1e-4, 1e-2, ranks), tuple(kinds))


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_inverse_of_the_full_matrix(seed: int) -> None:
    ranks = 1 + seed % 13
    covariance = random_covariance(seed, ranks)
    other = random_covariance(seed + 1000, ranks)
    added = np.linspace(0, 1, ranks)
    both = covariance.plus(other, 0.25).with_own(added)
    matrix = dense(covariance) + 0.25 * dense(other) + np.diag(added)
    expected = np.linalg.inv(matrix)
    close = {"rel": 1e-6, "abs": 1e-8 * float(np.abs(expected).max())}
    inverse = both.inverse()
    values = np.random.default_rng(seed).normal(size=(ranks, 3))
    assert inverse.diagonal == pytest.approx(np.diagonal(expected), **close)
    assert inverse @ values == pytest.approx(expected @ values, **close)
    assert inverse @ values[:, 0] == pytest.approx(expected @ values[:, 0], **close)
    assert inverse.column(ranks - 1) == pytest.approx(expected[-1], **close)


def test_memory_does_not_grow_with_the_square_of_the_ranks() -> None:
    ranks, stages = 20_000, 20
    rank = np.arange(ranks)
    shared = [
        Shared(rank // stages, np.full(ranks, 0.1)),
        Shared(rank % stages, np.full(ranks, 0.2)),
    ]
    covariance = Covariance(np.full(ranks, 1e-3), (*shared, Shared(0 * rank, np.full(ranks, 10.0))))
    tracemalloc.start()
    inverse = covariance.inverse()
    product = inverse @ np.ones(ranks)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.isfinite(product).all()
    assert (inverse.diagonal > 0).all()
    # A dense matrix with an entry for each pair of ranks would take 3.2 GB of memory.
    assert peak_bytes < 20 * ranks * (stages + 1) * 8
