"""What is made of a profiling run's measurements, without the run itself."""

from __future__ import annotations

import pytest

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.training.profile_run import Figures, layer_samples  # noqa: E402


def stage(forward_s: float, parameters: float = 10.0) -> Figures:
    halves = {"backward_input_s": forward_s, "backward_weight_s": 0.0, "kept_bytes": forward_s}
    return {"forward_s": forward_s, "parameters": parameters, **halves}


def test_the_difference_of_two_stages_is_a_layer() -> None:
    samples, launch_s = layer_samples(stage(1.0), stage(0.5, 10), stage(1.1, 30), stage(2.0))
    assert list(samples) == ["embedding", "transformer", "head"]
    assert samples["transformer"]["forward_s"] == pytest.approx(0.3)
    assert samples["transformer"]["parameters"] == 10
    assert launch_s == pytest.approx(0.2)


def test_noise_does_not_make_a_layer_free() -> None:
    samples, launch_s = layer_samples(stage(1.0), stage(0.9), stage(0.6), stage(2.0))
    assert samples["transformer"]["forward_s"] == pytest.approx(0.1)
    assert launch_s == pytest.approx(0.8)
