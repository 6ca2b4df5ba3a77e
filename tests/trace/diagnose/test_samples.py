"""Checks that changes in a series of measurements are located, and that noise is ignored."""

import numpy as np
import pytest

from megatron.adaptive.trace.diagnose.samples import best_interval, chance, noise, spread


@pytest.mark.parametrize(("first", "last"), [(12, 29), (0, 9), (8, 19)])
@pytest.mark.parametrize("seed", range(5))
def test_an_interval_is_found(first: int, last: int, seed: int) -> None:
    series = np.random.default_rng(seed).normal(0, 0.02, 30)
    series[first : last + 1] += 0.2
    interval = best_interval(series)
    assert interval is not None
    assert interval.inside == slice(first, last + 1)
    assert interval.rise == pytest.approx(0.2, abs=0.03)
    assert interval.score > 10


def test_noise_has_no_interval_worth_the_name() -> None:
    scores = []
    for seed in range(100):
        interval = best_interval(np.random.default_rng(seed).normal(0, 1, 30), floor=1.0)
        scores.append(0.0 if interval is None else interval.score)
    assert max(scores) < 4.5


def test_two_wild_numbers_are_no_level() -> None:
    series = np.random.default_rng(0).normal(0, 0.01, 20)
    series[[5, 13]] = 5.0
    interval = best_interval(series)
    assert interval is None or interval.rise < 0.1


def test_too_few_numbers() -> None:
    assert best_interval(np.arange(5.0)) is None
    assert noise(np.array([1.0, 2.0])) == 0


def test_noise_looks_past_a_change_and_spread_past_odd_numbers() -> None:
    series = np.random.default_rng(1).normal(0, 1, 2000)
    assert noise(series + 50 * (np.arange(2000) > 700)) == pytest.approx(1, rel=0.1)
    series[:20] = 1e6
    assert float(spread(series)) == pytest.approx(1, rel=0.1)


def test_chance_stays_within_its_bounds() -> None:
    assert chance(-3) == chance(0) == 0.5
    assert chance(1) == pytest.approx(0.841, abs=0.001)
    assert chance(9) == 0.99
