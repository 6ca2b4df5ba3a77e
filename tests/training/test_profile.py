"""What is made of a profiling run's measurements, without the run itself."""

from __future__ import annotations

import math

import pytest

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.profiling.links import as_curve, pairings  # noqa: E402
from megatron.adaptive.training.layer_profile import StageSample, layer_samples, spread  # noqa: E402


def stage(forward_s: float, parameters: float = 10.0) -> StageSample:
    return StageSample(
        forward_s=forward_s,
        backward_input_s=forward_s,
        backward_weight_s=0.0,
        kept_bytes=forward_s,
        parameters=parameters,
    )


def test_the_difference_of_two_stages_is_a_layer() -> None:
    samples, launch_s = layer_samples(stage(1.0), stage(0.5, 10), stage(1.1, 30), stage(2.0))
    by_kind = {one.kind: one.sample for one in samples}
    assert list(by_kind) == ["embedding", "transformer", "head"]
    assert by_kind["transformer"].forward_s == pytest.approx(0.3)
    assert by_kind["transformer"].parameters == 10
    assert launch_s == pytest.approx(0.2)


def test_noise_does_not_make_a_layer_free() -> None:
    samples, launch_s = layer_samples(stage(1.0), stage(0.9), stage(0.6), stage(2.0))
    assert samples[1].sample.forward_s == pytest.approx(0.1)
    assert launch_s == pytest.approx(0.8)


def test_spread_is_that_of_the_logarithm_and_knows_no_outlier() -> None:
    steady = [1.0] * 8
    assert spread([steady]) == 0
    draws = [math.exp(0.2 * z) for z in (-1.5, -0.9, -0.5, -0.16, 0.16, 0.5, 0.9, 1.5)]
    assert spread([draws, [2 * one for one in draws]]) == pytest.approx(0.2, rel=0.3)
    assert spread([[*draws[:-1], 1000.0]]) == pytest.approx(0.2, rel=0.5)
    assert spread([[1.0, 1.1]]) == 0


def test_pairs_are_each_kind_of_link_alone_and_together() -> None:
    machines = ["m0", "m0", "m0", "m0", "m1", "m1", "m1", "m1", "m2", "m2"]
    names = ["a"] * 8 + ["b"] * 2
    found = pairings(machines, names)
    assert (True, (0, 1), [(0, 1)]) in found
    assert (True, (0, 1), [(0, 1), (2, 3)]) in found
    assert (True, (8, 9), [(8, 9)]) in found
    assert (False, (0, 4), [(0, 4), (1, 5), (2, 6), (3, 7)]) in found
    assert (False, (0, 8), [(0, 8)]) in found
    assert (False, (0, 8), [(0, 8), (1, 9)]) in found
    assert len(found) == 7


def test_a_curve_gives_the_measured_seconds_back() -> None:
    curve = as_curve([(1024, 1e-5), (1 << 20, 1.1e-4), (1 << 22, 4.1e-4)])
    assert curve["latency_s"] == 1e-5
    for (size, speed), seconds in zip(curve["sizes"], (1.1e-4, 4.1e-4), strict=True):
        assert curve["latency_s"] + size / speed == pytest.approx(seconds)
    assert as_curve([(1024, 2e-5), (2048, 1e-5)])["sizes"] == [[2048, 2048 / 1e-5]]
