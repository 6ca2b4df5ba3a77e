"""Tests the configuration of the trainer: derived values, and its format in checkpoints."""

from __future__ import annotations

import dataclasses
import json
import operator
from dataclasses import replace

import pytest

from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.config.schedule import default_placement
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

from .conftest import UNEQUAL, cases_of, small

EXPERTS = "--num-experts 4 --moe-router-load-balancing-type none"
RICH = (
    "--pipeline-model-parallel-size 2 --model-chunks 2 --partition 0-3-1-0 --bf16 "
    "--activation-cap 3 --profile-ranks 0 1 --train-data-path a b --valid-data-path c "
    "--recompute-granularity selective --recompute-modules core_attn mlp"
)


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("flags", "splits"),
    [
        ("", True),
        (FULL, False),
        (f"{FULL} --split-backward True", True),
        (f"{FULL} --pipeline-schedule zb-h1", True),
        ("--recompute-granularity selective", True),
        ("--overlap-grad-reduce", False),
        ("--overlap-grad-reduce --split-backward True", True),
        ("--overlap-grad-reduce --pipeline-model-parallel-size 4", True),
        ("--overlap-grad-reduce --pipeline-schedule zb-h1", True),
    ],
)
def test_weight_gradients_are_separate_where_they_save_memory_or_time(
    flags: str, splits: bool
) -> None:
    """Checks whether weight gradients are computed separately by default.

    There are two replicas of two stages, or one replica of four stages. With full recomputation,
    separate weight gradients keep more memory than recomputation frees. If reductions overlap with
    computation, they would start too late, after the last weight gradient.
    """
    config = small(f"--pipeline-model-parallel-size 2 {flags}", world_size=4)
    assert config.splits_backward is splits


@pytest.fixture
def rich() -> TrainerConfig:
    return small(f"RAMP {RICH}", world_size=4)


def test_a_checkpoint_gives_back_what_was_put_in(rich: TrainerConfig) -> None:
    saved = json.loads(json.dumps(rich.to_dict()))
    assert TrainerConfig.from_dict(saved) == rich


@pytest.mark.parametrize(
    "flags",
    [
        "--trace-dir t --trace-otlp http://user:hushhush@collector:4318/v1/traces?key=hushhush",
        "--mlflow-experiment e --mlflow-tracking-uri https://user:hushhush@mlflow.example",
    ],
)
def test_a_checkpoint_contains_no_secret_of_a_url(flags: str) -> None:
    config = small(flags, world_size=1)
    text = json.dumps(config.to_dict())
    assert "hushhush" not in text
    assert "//...@" in text
    TrainerConfig.from_dict(json.loads(text))


def test_a_checkpoint_says_auto_after_the_number_of_slices_was_chosen() -> None:
    shape = "--pipeline-model-parallel-size 2 --pipeline-schedule auto --sequence-slices auto"
    config = small(f"{shape} --global-batch-size 8", world_size=2)
    first = config.num_slices
    chosen = replace(config, schedule=replace(config.schedule, chosen_slices=2))
    assert (chosen.num_slices, len(chosen.slice_ends)) == (2, 2)
    saved = TrainerConfig.from_dict(json.loads(json.dumps(chosen.to_dict())))
    assert saved == config
    assert saved.schedule.chooses_slices
    assert saved.num_slices == first


def test_a_checkpoint_says_auto_after_the_length_of_slices_was_chosen() -> None:
    shape = "--pipeline-model-parallel-size 2 --pipeline-schedule auto --variable-seq-lengths"
    config = small(f"{shape} --slice-tokens auto --micro-batch-size 1", world_size=2)
    assert config.slice_tokens == config.tokens_to_choose[-1] == 16
    assert (config.constant_slices, config.varies_slices) == (1, True)
    chosen = replace(config, schedule=replace(config.schedule, chosen_tokens=32))
    assert (chosen.slice_tokens, chosen.num_slices) == (32, 1)
    saved = TrainerConfig.from_dict(json.loads(json.dumps(chosen.to_dict())))
    assert saved == config
    assert saved.schedule.chooses_tokens


@pytest.mark.parametrize(
    ("flags", "varies"),
    [
        ("--pipeline-schedule auto", True),
        ("--pipeline-schedule adaptive", True),
        ("--pipeline-schedule dfc", True),
        # All microbatches must have the same number of slices here, because the order of actions is
        # computed in advance, or because replicas exchange tokens.
        ("--pipeline-schedule hinted", False),
        ("--pipeline-schedule seq-1f1b", False),
        (f"{EXPERTS} --moe-token-dispatcher-type alltoall", False),
    ],
)
def test_which_runs_have_numbers_of_slices_that_differ(flags: str, varies: bool) -> None:
    lengths = "--variable-seq-lengths --micro-batch-size 1 --slice-tokens 16"
    shape = "--pipeline-model-parallel-size 2 --global-batch-size 8"
    config = small(f"{shape} {lengths} {flags}", world_size=2)
    assert config.varies_slices is varies


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
    with pytest.raises(ConfigError, match="'micro_batch_size'"):
        TrainerConfig.from_dict(saved)


def test_a_group_that_the_writer_did_not_know_takes_its_defaults(rich: TrainerConfig) -> None:
    """Checks that checkpoints from before transport settings existed can still be loaded."""
    saved = rich.to_dict()
    del saved["transport"]
    assert TrainerConfig.from_dict(saved).transport == TransportConfig()


def test_a_setting_that_the_writer_did_not_know_takes_its_default(rich: TrainerConfig) -> None:
    saved = rich.to_dict()
    del saved["logging"]["log_interval"]
    assert TrainerConfig.from_dict(saved).logging.log_interval == 100
    del saved["model"]["num_layers"]
    with pytest.raises(ConfigError, match="'num_layers'"):
        TrainerConfig.from_dict(saved)


VALUES = """\
=> model.kv_channels 16 | model.query_groups 4 | model.ffn_hidden_size 256
    | parallel.num_chunks 1 | parallel.virtual_pipeline_model_parallel_size None
    | precision.dtype_name 'float32' | precision.check_for_nan_in_loss_and_grad True
    | recompute.recompute_granularity None | transport.forced None
    | transport.transport_slots None | transport.transport_gpu 'auto'
--hidden-size 1024 --swiglu => model.ffn_hidden_size 2688
--hidden-size 4096 --swiglu => model.ffn_hidden_size 10880
--ffn-hidden-size 96 => model.ffn_hidden_size 96
--hidden-size 1024 --swiglu --ffn-hidden-size 96 => model.ffn_hidden_size 96
--hidden-size 66 --kv-channels 20 => model.kv_channels 20
--group-query-attention --num-query-groups 2 --kv-channels 24
    => model.kv_channels 24 | model.query_groups 2
--use-rotary-position-embeddings --no-position-embedding => model.position_embedding_type 'rope'
--disable-bias-linear
    => model.bias_gelu_fusion False | model.add_qkv_bias False | model.apply_rope_fusion False
--position-embedding-type rope => model.apply_rope_fusion True
--fp16 => precision.dtype_name 'float16' | precision.initial_loss_scale 4294967296.0
    | precision.check_for_nan_in_loss_and_grad False
--fp16 --loss-scale 128 => precision.check_for_nan_in_loss_and_grad True
--bf16 => precision.dtype_name 'bfloat16' | precision.accumulate_allreduce_grads_in_fp32 True
--bf16 --grad-reduce-in-bf16 => precision.accumulate_allreduce_grads_in_fp32 False
--apply-query-key-layer-scaling => precision.attention_softmax_in_fp32 True
--recompute-activations => recompute.recompute_granularity 'selective'
--lr-warmup-fraction 0.1 --lr-warmup-iters 0 --lr-warmup-samples 0
    => optimizer.lr_warmup_fraction 0.1
--pipeline-model-parallel-size 2 --model-chunks 2 @2
    => parallel.num_chunks 2 | parallel.virtual_pipeline_model_parallel_size 2
    | layers_per_stage (1, 1, 1, 1)
--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 @2
    => parallel.num_chunks 2
--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 @2
    => parallel.num_chunks 2
--tensor-model-parallel-size 2 @6 => parallel.data_parallel_size 3 | batch.global_batch_size 6
    | num_microbatches 1 | model.transformer_impl 'local' | data.tokenizer_type 'NullTokenizer'
    | data.split '969,30,1' | parallel.distributed_backend None
    | schedule.pipeline_timeout_s 600.0
ENGINE => model.transformer_impl 'transformer_engine'
--pipeline-timeout-s 2.5 => schedule.pipeline_timeout_s 2.5
NO_LENGTH --train-samples 1000 --lr-decay-samples 800 --lr-warmup-samples 10
    --rampup-batch-size 2 2 100 --global-batch-size 8
    => run.train_iters None | batch.rampup_batch_size (2, 2, 100)
PARALLEL @2 => parallel.sequence_parallel True
--context-parallel-size 2 @4 => parallel.data_parallel_size 2
PP2 --pipeline-model-parallel-layout E|t*2,(t|)*2L @2 => layers_per_stage (0, 3, 1, 0)
    | parallel.num_chunks 2 | mtp_stage None
PP2 MTP --pipeline-model-parallel-layout Et|tttmL @2 => layers_per_stage (1, 3) | mtp_stage 1
MTP --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Et|tttm|L @3
    => layers_per_stage (1, 3, 0) | mtp_stage 1
PP2 MTP @2 => mtp_stage 1
PP2 --decoder-first-pipeline-num-layers 1 @2 => layers_per_stage (1, 3)
PP2 --decoder-last-pipeline-num-layers 4 --num-layers 10 --model-chunks 2
    --pipeline-schedule interleaved @2 => layers_per_stage (3, 2, 3, 2)
PP2 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    --num-layers 6 --model-chunks 2 @2 => layers_per_stage (1, 2, 2, 1)
UNEQUAL --global-batch-size 24 @3 => parallel.unequal_sizes (2, 1) | num_microbatches 6
    | parallel.data_parallel_size 2
UNEQUAL --stage-data-parallel-sizes 2-3 @5 => num_microbatches 1 | batch.global_batch_size 12
UNEQUAL --stage-data-parallel-sizes 2-2 @4
    => parallel.unequal_sizes None | parallel.data_parallel_size 2
"""


@pytest.mark.parametrize(("flags", "world_size", "values"), cases_of(VALUES))
def test_values_that_follow_from_flags(flags: str, world_size: int, values: list[str]) -> None:
    config = small(flags, world_size=world_size)
    for name, _, value in (text.strip().partition(" ") for text in values):
        assert repr(operator.attrgetter(name)(config)) == value, name


def test_every_setting_of_the_transports() -> None:
    config = small(
        "--transport rdma --transport-slot-bytes 65536 --transport-slots 12 --transport-crc "
        "--transport-silence-s 1.5 --transport-gpu pinned --transport-interface ib0 "
        "--rdma-device mlx5_0:1 --rdma-gid-index 3 --rdma-mtu-bytes 4096 --rdma-queue-pairs 4"
    ).transport
    values = ("rdma", 65536, 12, True, 1.5, "pinned", "ib0", "mlx5_0:1", 3, 4096, 4)
    assert tuple(dataclasses.asdict(config).values()) == values


def test_microbatches_are_dealt_out_to_unequal_stages() -> None:
    for widths, processes, dealt in (("2-1", 3, [6, 12]), ("2-2", 4, [6, 6])):
        flags = f"{UNEQUAL} --global-batch-size 24 --stage-data-parallel-sizes {widths}"
        parallel = small(flags, world_size=processes).parallel
        assert [parallel.microbatches_of(stage, 6) for stage in (0, 1)] == dealt


def test_traced_iterations() -> None:
    assert not small().schedule.traces(0)
    schedule = small("--trace-dir t --trace-interval 3 --trace-iterations 2").schedule
    assert [done for done in range(20) if schedule.traces(done)] == [0, 3]
    endless = small("--trace-dir t").schedule
    assert all(endless.traces(done) for done in range(20))
