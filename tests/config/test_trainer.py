"""The configuration as an object: derived values and its form in a checkpoint."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.config.schedule import default_placement
from megatron.adaptive.config.trainer import TrainerConfig, groups
from megatron.adaptive.errors import ConfigError

from .conftest import Parse

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
def rich(small: Parse) -> TrainerConfig:
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


def test_the_placement_is_the_given_one_or_chosen(small: Parse) -> None:
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


@pytest.mark.parametrize("group", list(groups()))
def test_an_unknown_setting_is_an_error(rich: TrainerConfig, group: str) -> None:
    saved = rich.to_dict()
    saved[group]["colour"] = 1
    with pytest.raises(ConfigError, match=f"unknown {group} setting 'colour'"):
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
