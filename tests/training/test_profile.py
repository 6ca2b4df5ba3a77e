"""Tests how the measurements of a profiling run are evaluated, with made-up measurements."""

from __future__ import annotations

import pytest

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.training.profile_run import Figures, ProfileOptions, _config, layer_sample  # noqa: E402


def stage(forward_s: float, parameters: float = 10.0) -> Figures:
    halves = {"backward_input_s": forward_s, "backward_weight_s": 0.0, "kept_bytes": forward_s}
    return {"forward_s": forward_s, "parameters": parameters, "sigma": 0.0, **halves}


def test_the_difference_of_two_stages_is_a_layer() -> None:
    layer = layer_sample(stage(0.5, 10), stage(1.1, 30))
    assert layer["forward_s"] == pytest.approx(0.3)
    assert layer["parameters"] == 10
    assert layer["launch_s"] == pytest.approx(0.2)


def test_noise_does_not_make_a_layer_free() -> None:
    layer = layer_sample(stage(0.9), stage(0.6))
    assert layer["forward_s"] == pytest.approx(0.1)
    assert layer["launch_s"] == pytest.approx(0.8)


def test_layers_are_measured_whole_if_a_run_has_slices() -> None:
    model = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 "
        "--max-position-embeddings 256 --vocab-size 100"
    )
    for slices in ("--slice-tokens 64", "--sequence-slices 4"):
        options = ProfileOptions(name="small", arguments=tuple(f"{model} {slices}".split()))
        assert not _config(options, 1, 2, 1).cuts_sequences
