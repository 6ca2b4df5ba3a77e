"""Values that a group derives from its own fields."""

from __future__ import annotations

import pytest

from .conftest import Parse


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ("--hidden-size 64", 256),
        ("--hidden-size 1024 --swiglu", 2688),
        ("--hidden-size 4096 --swiglu", 10880),
        ("--hidden-size 64 --ffn-hidden-size 96", 96),
        ("--hidden-size 1024 --swiglu --ffn-hidden-size 96", 96),
    ],
)
def test_width_of_the_feed_forward_block(small: Parse, flags: str, width: int) -> None:
    assert small(flags).model.ffn_hidden_size == width


def test_heads(small: Parse) -> None:
    plain = small().model
    assert (plain.kv_channels, plain.query_groups) == (16, 4)
    grouped = small("--group-query-attention --num-query-groups 2 --kv-channels 24").model
    assert (grouped.kv_channels, grouped.query_groups) == (24, 2)


def test_old_spellings_of_rotary_positions(small: Parse) -> None:
    config = small("--use-rotary-position-embeddings --no-position-embedding")
    assert config.model.position_embedding_type == "rope"


def test_fusions_that_cannot_apply_are_off(small: Parse) -> None:
    model = small("--disable-bias-linear").model
    assert not model.bias_gelu_fusion
    assert not model.add_qkv_bias
    assert not model.apply_rope_fusion
    assert small("--position-embedding-type rope").model.apply_rope_fusion


def test_precision(small: Parse) -> None:
    full = small().precision
    assert full.dtype_name == "float32"
    assert full.check_for_nan_in_loss_and_grad
    half = small("--fp16").precision
    assert half.dtype_name == "float16"
    assert half.initial_loss_scale == 2**32
    assert not half.check_for_nan_in_loss_and_grad
    assert small("--fp16 --loss-scale 128").precision.check_for_nan_in_loss_and_grad
    brain = small("--bf16").precision
    assert brain.dtype_name == "bfloat16"
    assert brain.accumulate_allreduce_grads_in_fp32
    reduced = small("--bf16 --grad-reduce-in-bf16").precision
    assert not reduced.accumulate_allreduce_grads_in_fp32
    assert small("--apply-query-key-layer-scaling").precision.attention_softmax_in_fp32


def test_recompute_shorthand(small: Parse) -> None:
    assert small("--recompute-activations").recompute.recompute_granularity == "selective"
    assert small().recompute.recompute_granularity is None


def test_traced_iterations(small: Parse) -> None:
    assert not small().schedule.traces(0)
    schedule = small("--trace-dir t --trace-interval 3 --trace-iterations 2").schedule
    assert [done for done in range(20) if schedule.traces(done)] == [0, 3]
    endless = small("--trace-dir t").schedule
    assert all(endless.traces(done) for done in range(20))
