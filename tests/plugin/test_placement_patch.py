"""Tests which stages megatron-core places on a rank in a V, and which settings are rejected."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron.adaptive
from megatron.adaptive import accelerator
from megatron.adaptive.errors import ConfigError

accelerator.install()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.transformer.enums import LayerType  # noqa: E402
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402

TWO = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
OUTSIDE = {
    "num_layers": 8,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "pipeline_dtype": torch.float32,
}


@pytest.fixture(autouse=True)
def taken_back() -> Iterator[None]:
    held = (schedules.is_pp_first_stage, dist_checkpointing.load, TransformerConfig.__post_init__)
    yield
    megatron.adaptive.uninstall()
    parallel_state.set_pipeline_model_parallel_rank(None)
    parallel_state.set_pipeline_model_parallel_world_size(None)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    now = (schedules.is_pp_first_stage, dist_checkpointing.load, TransformerConfig.__post_init__)
    assert now == held


def configuration(**settings: Any) -> Any:
    return TransformerConfig(**OUTSIDE | TWO | settings)


def be(pp_rank: int) -> None:
    parallel_state.set_pipeline_model_parallel_rank(pp_rank)
    parallel_state.set_pipeline_model_parallel_world_size(2)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(2)


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ({}, {(1, 0): (0, 2), (0, 0): (2, 2), (0, 1): (4, 2), (1, 1): (6, 2)}),
        (
            {"num_layers": 6, "num_layers_in_first_pipeline_stage": 2},
            {(1, 0): (0, 1), (0, 0): (1, 2), (0, 1): (3, 1), (1, 1): (4, 2)},
        ),
        (
            {"num_layers": 4, "pipeline_model_parallel_layout": "Ett||t|tL"},
            {(1, 0): (0, 2), (0, 0): (2, 0), (0, 1): (2, 1), (1, 1): (3, 1)},
        ),
    ],
)
def test_layers_are_those_of_the_loops_stages(settings: Any, places: Any) -> None:
    megatron.adaptive.install("hinted", placement="v")
    config = configuration(**settings)
    for copy in (config, dataclasses.replace(config)):
        for (pp_rank, chunk), (offset, layers) in places.items():
            be(pp_rank)
            assert get_transformer_layer_offset(copy, vp_stage=chunk) == offset
            assert get_num_layers_to_build(copy, vp_stage=chunk) == layers
        layout = copy.pipeline_model_parallel_layout.layout
        assert LayerType.embedding in layout[1][0]
        assert LayerType.loss in layout[1][1]


def test_one_rank_is_no_v() -> None:
    megatron.adaptive.install(placement="v")
    config = configuration(
        pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None
    )
    assert config.pipeline_model_parallel_layout is None


@pytest.mark.parametrize(
    ("settings", "arguments", "line"),
    [
        (
            {"virtual_pipeline_model_parallel_size": None},
            {},
            "placement v requires 2 model chunks on each pipeline rank, got 1 model chunk; set",
        ),
        (
            {"num_layers": 4, "pipeline_model_parallel_layout": "Et|t|tt|mL", "mtp_num_layers": 1},
            {"load": "here", "ckpt_format": "torch"},
            "placement v does not support --ckpt-format torch, because such checkpoints name",
        ),
        (
            {"num_layers": 4, "pipeline_model_parallel_layout": "Ett|tt|m|L", "mtp_num_layers": 1},
            {},
            "pipeline_model_parallel_layout of the model puts multi-token prediction on",
        ),
        (
            {},
            {
                "save": "here",
                "use_distributed_optimizer": True,
                "dist_ckpt_optim_fully_reshardable": False,
            },
            "placement v does not support checkpoints that store the distributed optimizer",
        ),
    ],
)
def test_what_cannot_lie_in_a_v(
    monkeypatch: pytest.MonkeyPatch, settings: Any, arguments: Any, line: str
) -> None:
    training: Any = types.ModuleType("megatron.training")
    training.get_args = lambda: argparse.Namespace(pipeline_placement="v", **arguments)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    megatron.adaptive.install()
    with pytest.raises(ConfigError, match=f"^{line}"):
        configuration(**settings)


@pytest.fixture(params=[0, 1, 2])
def one_of_three(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes this process one of three ranks. Collectives with the other ranks do nothing."""
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=request.param, world_size=3
    )
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("schedule", ["interleaved", "megatron"])
def test_groups_of_a_v_are_refused_in_a_loop(one_of_three: None, schedule: str) -> None:
    """Checks that each rank rejects process groups of a V placement for a loop placement.

    If only some ranks raised the error, the other ranks would wait for them.
    """
    three = {"num_layers": 6, "pipeline_model_parallel_size": 3}
    megatron.adaptive.install("zb-v")
    parallel_state.initialize_model_parallel(1, 3, 2, create_gloo_process_groups=False)
    configuration(**three)
    megatron.adaptive.uninstall()
    megatron.adaptive.install(schedule)
    line = "^megatron-core's process groups were created for placement v, but the model has .* loop"
    with pytest.raises(ConfigError, match=line):
        configuration(**three)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 3, 2, create_gloo_process_groups=False)
    configuration(**three)
