"""Layers estimated from data sheets."""

from __future__ import annotations

import pytest

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.layers import make_estimator
from megatron.adaptive.planner.model_file import arguments_model, preset


def test_a_part_without_bfloat16_is_refused_for_it() -> None:
    estimate = make_estimator(preset("gpt2-medium", "bf16"))
    with pytest.raises(ConfigError, match="v100-16 does not compute in bf16"):
        estimate("transformer", "V100", 1, 1)


def test_estimates_are_near_what_others_measured() -> None:
    """Seconds of a layer of OPT-350M, 2,048 tokens, fp32, as published with Sailor (SOSP 2025)."""
    model = arguments_model(
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
        "--max-position-embeddings 2048 --vocab-size 50304".split(),
        "opt-350m",
        fused=False,
    )
    estimate = make_estimator(model)
    measured = {
        ("transformer", "RTX-2080-Ti"): (0.0081, 0.0216),
        ("transformer", "RTX-3090"): (0.0044, 0.0120),
        ("transformer", "Titan-RTX"): (0.0077, 0.0203),
        ("head", "RTX-3090"): (0.0099, 0.0134),
    }
    for (kind, gpu), (forward_s, backward_s) in measured.items():
        times = estimate(kind, gpu, 1, 1)
        assert times.source == "estimated"
        assert times.forward_s == pytest.approx(forward_s, rel=0.35)
        assert times.backward_s == pytest.approx(backward_s, rel=0.5)
