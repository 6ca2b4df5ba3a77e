"""Compares the formula for the probability of a number of spikes with random draws."""

import numpy as np
import pytest

from megatron.adaptive.trace.diagnose.causes.spikes import _tail


@pytest.mark.parametrize(("count", "seen", "part"), [(1, 1, 0.5), (6, 3, 0.7), (4, 8, 0.3)])
def test_its_likelihood_is_that_of_draws(count: int, seen: float, part: float) -> None:
    rng = np.random.default_rng(0)
    drawn = rng.poisson(rng.gamma(seen, part, 200_000))
    assert _tail(count, seen, part) == pytest.approx(float((drawn >= count).mean()), abs=0.004)


def test_the_more_others_have_the_likelier() -> None:
    likely = [_tail(10, seen, 0.3) for seen in (1, 4, 16)]
    assert likely == sorted(likely)
    assert _tail(10, 1, 0.0005) == pytest.approx(0, abs=1e-9)
