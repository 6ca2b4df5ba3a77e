"""The configuration as an object: derived values and its form in a checkpoint."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.config.schedule import default_placement
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

from .conftest import small

RICH = (
    "--pipeline-model-parallel-size 2 --model-chunks 2 --partition 0-3-1-0 --bf16 "
    "--activation-cap 3 --profile-ranks 0 1 --train-data-path a b --valid-data-path c "
    "--recompute-granularity selective --recompute-modules core_attn mlp"
)
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --lr 1e-3 --train-samples 1000 "
    "--global-batch-size 16 --rampup-batch-size 4 4 100 "
    "--tokenizer-type NullTokenizer --vocab-size 9"
)


@pytest.fixture
def rich() -> TrainerConfig:
    return small(RICH, world_size=4, base=BASE)


def test_a_checkpoint_gives_back_what_was_put_in(rich: TrainerConfig) -> None:
    saved = json.loads(json.dumps(rich.to_dict()))
    assert TrainerConfig.from_dict(saved) == rich


def test_derived_values(rich: TrainerConfig) -> None:
    assert rich.world_size == 4
    assert rich.num_stages == 4
    assert rich.layers_per_stage == (0, 3, 1, 0)
    assert rich.num_microbatches == 4
    assert rich.batch.batch_sizes() == (4, 8, 12, 16)


def test_the_placement_is_the_given_one_or_chosen() -> None:
    shape = "--pipeline-model-parallel-size 2 --model-chunks 2 --global-batch-size 8"
    for schedule in ("adaptive", "interleaved", "megatron"):
        config = small(f"{shape} --pipeline-schedule {schedule}", world_size=2)
        assert config.schedule.pipeline_placement is None
        assert config.placement_kind == default_placement(schedule, 2)
    for kind in ("loop", "v"):
        assert small(f"{shape} --pipeline-placement {kind}", world_size=2).placement_kind == kind


def test_a_configuration_cannot_be_changed(rich: TrainerConfig) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        rich.model.num_layers = 5  # type: ignore[misc]


def test_an_unknown_setting_is_an_error(rich: TrainerConfig) -> None:
    saved = rich.to_dict()
    saved["model"]["colour"] = 1
    with pytest.raises(ConfigError, match="unknown model setting 'colour'"):
        TrainerConfig.from_dict(saved)


def test_unknown_and_missing_groups_are_errors(rich: TrainerConfig) -> None:
    with pytest.raises(ConfigError, match="unknown group of settings 'more'"):
        TrainerConfig.from_dict(rich.to_dict() | {"more": {}})
    saved = rich.to_dict()
    del saved["batch"]
    with pytest.raises(ConfigError, match="no group 'batch'"):
        TrainerConfig.from_dict(saved)


def test_a_group_that_the_writer_did_not_know_takes_its_defaults(rich: TrainerConfig) -> None:
    """Checkpoints of before there was a choice of transports are still read."""
    saved = rich.to_dict()
    del saved["transport"]
    assert TrainerConfig.from_dict(saved).transport == TransportConfig()


def test_a_setting_that_the_writer_did_not_know_takes_its_default(rich: TrainerConfig) -> None:
    saved = rich.to_dict()
    del saved["logging"]["log_interval"]
    assert TrainerConfig.from_dict(saved).logging.log_interval == 100
    del saved["model"]["num_layers"]
    with pytest.raises(ConfigError, match="no 'num_layers'"):
        TrainerConfig.from_dict(saved)


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("model", "num_layers", "4"),
        ("model", "num_layers", True),
        ("model", "num_layers", None),
        ("precision", "bf16", 1),
        ("schedule", "partition", 4),
        ("schedule", "partition", ["4"]),
        ("batch", "rampup_batch_size", [1, 2]),
    ],
)
def test_a_value_of_another_type_is_an_error(
    rich: TrainerConfig, group: str, name: str, value: object
) -> None:
    saved = rich.to_dict()
    saved[group][name] = value
    with pytest.raises(ConfigError, match=name):
        TrainerConfig.from_dict(saved)


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
def test_width_of_the_feed_forward_block(flags: str, width: int) -> None:
    assert small(flags).model.ffn_hidden_size == width


def test_heads() -> None:
    plain = small().model
    assert (plain.kv_channels, plain.query_groups) == (16, 4)
    grouped = small("--group-query-attention --num-query-groups 2 --kv-channels 24").model
    assert (grouped.kv_channels, grouped.query_groups) == (24, 2)


def test_old_spellings_of_rotary_positions() -> None:
    config = small("--use-rotary-position-embeddings --no-position-embedding")
    assert config.model.position_embedding_type == "rope"


def test_fusions_that_cannot_apply_are_off() -> None:
    model = small("--disable-bias-linear").model
    assert not model.bias_gelu_fusion
    assert not model.add_qkv_bias
    assert not model.apply_rope_fusion
    assert small("--position-embedding-type rope").model.apply_rope_fusion


def test_precision() -> None:
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


def test_recompute_shorthand() -> None:
    assert small("--recompute-activations").recompute.recompute_granularity == "selective"
    assert small().recompute.recompute_granularity is None


def test_traced_iterations() -> None:
    assert not small().schedule.traces(0)
    schedule = small("--trace-dir t --trace-interval 3 --trace-iterations 2").schedule
    assert [done for done in range(20) if schedule.traces(done)] == [0, 3]
    endless = small("--trace-dir t").schedule
    assert all(endless.traces(done) for done in range(20))
