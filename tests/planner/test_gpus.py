"""The table of GPUs, and what is estimated from it."""

from __future__ import annotations

import pytest

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import find_gpu, gpu_names, known_gpu
from megatron.adaptive.planner.layers import make_estimator
from megatron.adaptive.planner.model_file import preset

GB = 1e9


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("A100", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("Titan-RTX", "titan-rtx"),
        ("rtx 3090", "rtx-3090"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
    ],
)
def test_names_of_files_and_drivers_are_known(told: str, name: str) -> None:
    assert find_gpu(told, "x").name == name


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    assert known_gpu("a1000-xyz") is None
    with pytest.raises(
        ConfigError, match="cluster: GPU 'rtx-309' is neither.*the nearest is rtx-3090"
    ):
        find_gpu("rtx-309", "cluster")


def test_every_row_is_sound() -> None:
    names = [find_gpu(name, "x") for name in gpu_names()]
    assert len(names) >= 30
    for gpu in names:
        assert 4 * GB <= gpu.memory_bytes <= 300 * GB
        assert 100 * GB <= gpu.memory_bytes_per_s <= 10_000 * GB
        assert gpu.flops["fp32"] < gpu.flops["fp16"]
        assert gpu.flops.get("bf16", gpu.flops["fp16"]) == gpu.flops["fp16"]
        assert gpu.source


def test_a_part_without_bfloat16_is_refused_for_it() -> None:
    estimate = make_estimator(preset("gpt2-medium", "bf16"))
    with pytest.raises(ConfigError, match="v100-16 does not compute in bf16"):
        estimate("transformer", "V100", 1, 1)


def test_estimates_are_near_what_others_measured() -> None:
    """Seconds of a layer of OPT-350M, 2,048 tokens, fp32, as published with Sailor (SOSP 2025)."""
    from megatron.adaptive.planner.model_file import arguments_model

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


def test_estimates_grow_with_work_and_shrink_with_speed() -> None:
    estimate = make_estimator(preset("gpt3-13b", "fp16"))
    for kind in ("embedding", "transformer", "head"):
        one, four = estimate(kind, "a100-80", 1, 1), estimate(kind, "a100-80", 1, 4)
        assert one.forward_s <= four.forward_s
        assert one.backward_s <= four.backward_s
        assert estimate(kind, "v100-32", 1, 4).backward_s > four.backward_s
        assert estimate(kind, "a100-80", 4, 4).backward_s < four.backward_s
