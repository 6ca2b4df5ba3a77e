"""Tests the expected compute times of ranks, and how much each kind of evidence counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.trace.diagnose.baselines import ALIKE, RankBaselines, rank_baselines
from megatron.adaptive.trace.diagnose.covariance import Covariance, Shared
from megatron.adaptive.trace.diagnose.samples import measure
from megatron.adaptive.trace.read import read_run
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

from .conftest import NOISE


def fitted(folder: Path, **options: Any) -> RankBaselines:
    write_synthetic(folder, SyntheticRun(**{**NOISE, "iterations": 16, **options}))
    return rank_baselines(measure(read_run(folder)))


def drawn(seed: int, ranks: int = 4, count: int = 20) -> RankBaselines:
    """Returns the baselines of ``ranks`` random ranks that differ only by noise.

    Each rank has measurements of ``count`` iterations.
    """
    rng = np.random.default_rng(seed)
    levels, noise = rng.normal(0, ALIKE, ranks), rng.normal(0, 0.03, (count, ranks))
    return RankBaselines(
        series=levels + noise,
        by_kind=np.stack([levels + noise] * 3, axis=2),
        lasting=Covariance(
            np.full(ranks, ALIKE**2), (Shared(np.zeros(ranks, dtype=int), np.full(ranks, 10.0)),)
        ),
        passing=Covariance(np.full(ranks, 0.03**2)),
    )


def test_errors_are_as_large_as_they_say() -> None:
    sizes = np.concatenate([np.divide(*drawn(seed).errors()) for seed in range(300)])
    assert float(np.std(sizes)) == pytest.approx(1, abs=0.1)


def test_chance_is_no_shift() -> None:
    shifts = [shift for seed in range(300) for shift in drawn(seed).scan(0.0, 3.2)]
    assert sum(shift.excess > 0 for shift in shifts) <= 3


@pytest.mark.parametrize(("first", "end"), [(0, 20), (12, 20), (5, 14)])
def test_a_shift_is_found_where_it_is(first: int, end: int) -> None:
    baselines = drawn(1)
    baselines.series[first:end, 2] += 0.2
    best = max(baselines.scan(0.05, 3.2), key=lambda shift: shift.excess)
    assert (best.column, best.first, best.end) == (2, first, end)
    assert best.size == pytest.approx(0.2, abs=3 * best.error)
    baselines.remove(best)
    assert max(shift.excess for shift in baselines.scan(0.05, 3.2)) < 0


def test_a_rank_that_is_not_trusted_says_nothing_of_others() -> None:
    baselines = drawn(2)
    baselines.series[:, 0] -= 0.5
    assert baselines.errors()[0][1] > 0.1
    baselines.distrust(0)
    assert abs(baselines.errors()[0][1]) < 0.05


def test_more_is_known_with_peers_and_less_of_a_stage_with_a_head(tmp_path: Path) -> None:
    alone = fitted(tmp_path / "a").errors()[1]
    with_peers = fitted(tmp_path / "b", replicas=2).errors()[1]
    with_head = fitted(tmp_path / "c", head=1.0).errors()[1]
    assert with_peers.max() < alone.min()
    assert with_head[3] > 2 * alone[3]


def test_long_microbatches_make_no_noise_between_stages(tmp_path: Path) -> None:
    plain = fitted(tmp_path / "a").errors()
    long = fitted(tmp_path / "b", microbatch_sigma=0.3).errors()
    assert long[1] == pytest.approx(plain[1], rel=0.3)
    assert np.abs(long[0]).max() < 0.05
