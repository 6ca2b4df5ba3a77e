"""Tests that unsupported features of models are rejected with advice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator
from megatron.adaptive.errors import ConfigError

accelerator.install()

from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron.adaptive.plugin.settings import Settings  # noqa: E402
from megatron.adaptive.plugin.unsupported_features import check_model, why_not_by_default  # noqa: E402

from ..engine.te_layers import TELinear  # noqa: E402

PIPELINE: Any = object()


class Chunk(torch.nn.Module):
    """Imitates a model chunk. It has only a model type and the given attributes."""

    def __init__(self, kind: Any = ModelType.encoder_or_decoder, **attributes: Any) -> None:
        super().__init__()
        self.model_type = kind
        for name, value in attributes.items():
            setattr(self, name, value)


class FullyShardedDataParallel(Chunk):
    """Stands in for the megatron-core class of this name. Only the name is checked."""


def configuration(**changes: Any) -> Any:
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def check(config: Any = None, *chunks: Any, replicas: int = 1, **settings: Any) -> None:
    groups: Any = SimpleNamespace(
        pp=PIPELINE, replica=(0, replicas), experts=[object()], is_of_parallel_state=True
    )
    check_model(config or configuration(), chunks or [Chunk()], Settings(**settings), groups)


@pytest.mark.parametrize("name", ["gtp_weight_remat_size", "expert_gtp_weight_remat_size"])
def test_weights_in_parts(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^the model's {name}=2 is not supported, because parts"):
        check(configuration(**{name: 2}))


def test_groups_of_another_job_than_ours() -> None:
    check(None, Chunk(pg_collection=SimpleNamespace(pp=PIPELINE)))
    line = "^chunk 0 was built with a different pipeline group than the step's, but the"
    with pytest.raises(ConfigError, match=line):
        check(None, Chunk(pg_collection=SimpleNamespace(pp=None)))


@pytest.mark.parametrize(
    ("config", "settings", "line"),
    [
        ({}, {"placement": "v"}, "^pg_collection is not supported with placement v, which"),
        (
            {"num_moe_experts": 4},
            {},
            "^pg_collection has no ep, expt_tp and tp_ep groups, but a model",
        ),
    ],
)
def test_what_groups_of_the_caller_lack(
    config: dict[str, Any], settings: dict[str, Any], line: str
) -> None:
    groups: Any = SimpleNamespace(
        pp=PIPELINE, replica=(0, 1), experts=[], is_of_parallel_state=False
    )
    with pytest.raises(ConfigError, match=line):
        check_model(configuration(**config), [Chunk(), Chunk()], Settings(**settings), groups)


def test_what_is_not_refused() -> None:
    check()
    check(configuration(fp8="hybrid", fp8_recipe="delayed"))
    check(configuration(fp8="hybrid", fp8_recipe="delayed"), replicas=2, schedule="1f1b")
    check(configuration(fp8="hybrid", fp8_recipe="tensorwise"), replicas=2)
    check(configuration(variable_seq_lengths=True, deallocate_pipeline_outputs=True))
    check(configuration(recompute_granularity="full"), schedule="varuna")
    check(configuration(num_moe_experts=8, expert_model_parallel_size=4), replicas=4)
    check(None, Chunk(), Chunk(), schedule="interleaved")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("cuda_graph_impl", "local", "a CUDA graph replays the order in which it was captured"),
        (
            "cuda_graph_impl",
            "full_iteration",
            "a CUDA graph replays the order in which it was captured",
        ),
        ("moe_paged_stash", True, "only megatron-core's own loop resets the stash"),
        ("hybrid_context_parallel", True, "it requires a different loop over the microbatches"),
        (
            "dynamic_context_parallel",
            True,
            "the context-parallel group changes between microbatches",
        ),
        (
            "sequence_packing_scheduler",
            "dp_balanced",
            "it reassigns documents to microbatches in each step",
        ),
        (
            "delay_wgrad_compute",
            True,
            "the engine itself delays weight gradients (see split_backward)",
        ),
    ],
)
def test_parts_of_megatron_cores_own_loop(name: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(configuration(**{name: value}))
    assert str(caught.value) == (
        f"the model's {name}={value} is not supported: {reason}; turn it off or use "
        "--pipeline-schedule megatron"
    )


@pytest.mark.parametrize(
    ("changes", "schedule", "reason"),
    [
        ({}, "1f1b", "got --pipeline-schedule 1f1b .*other schedules never overlap two actions"),
        ({"moe_token_dispatcher_type": "flex"}, "adaptive", "type flex .*cannot pause"),
        ({"recompute_modules": ["moe"]}, "adaptive", "recomputed expert layers"),
    ],
)
def test_exchanges_that_nothing_can_hide(
    changes: dict[str, Any], schedule: str, reason: str
) -> None:
    asked = {"overlap_moe_expert_parallel_comm": True, "moe_token_dispatcher_type": "alltoall"}
    check(configuration(**asked))
    with pytest.raises(
        ConfigError, match=f"^(--|the model's )?overlap.moe.expert.parallel.comm .*{reason}"
    ):
        check(configuration(**{**asked, **changes}), schedule=schedule)


def test_delayed_scaling_across_replicas() -> None:
    with pytest.raises(
        ConfigError, match="^the model's fp8_recipe=delayed .* schedule adaptive with 2 data-p"
    ):
        check(configuration(fp8="hybrid", fp8_recipe="delayed"), replicas=2)


@pytest.mark.parametrize(
    ("chunk", "line"),
    [
        (
            Chunk(SimpleNamespace(name="encoder_and_decoder")),
            "model type encoder_and_decoder of chunk 0 is not supported, because stages exchange",
        ),
        (Chunk(add_encoder=True), "chunk 0 is a Chunk, an encoder with a decoder, which is not"),
        (Chunk(modality_submodules={}), "chunk 0 is a Chunk, a model of several modalities, which"),
        (FullyShardedDataParallel(), "chunk 0 is a FullyShardedDataParallel, which is not"),
    ],
)
def test_models(chunk: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        check(None, chunk)


@pytest.mark.parametrize(
    ("chunks", "settings", "line"),
    [
        (
            1,
            {"schedule": "breadth-first"},
            "--pipeline-schedule breadth-first requires .*, got .*-rank 1 ",
        ),
        (3, {"schedule": "zb-h1"}, "--pipeline-schedule zb-h1 requires .*, got .*-rank 3 "),
        (
            1,
            {"schedule": "varuna"},
            "--pipeline-schedule varuna requires --recompute-granularity full ",
        ),
    ],
)
def test_schedules(chunks: int, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        check(None, *[Chunk() for _ in range(chunks)], **settings)


def test_a_model_that_was_built_in_another_placement() -> None:
    line = "^the model's chunks have placement loop, but schedule hinted requires placement v; call"
    with pytest.raises(ConfigError, match=line):
        check(
            configuration(pipeline_model_parallel_size=2),
            *(Chunk(), Chunk()),
            schedule="hinted",
            placement="v",
        )


def test_where_splitting_may_cost_more_than_it_gains() -> None:
    def why(config: Any, *chunks: Any, replicas: int = 2) -> str | None:
        return why_not_by_default(config, chunks, replicas=replicas)

    overlapped = configuration(no_sync_func=[])
    assert why(configuration()) is None
    assert why(overlapped, replicas=1) is None
    assert why(overlapped) == "gradients are reduced while the last backward pass is still running"
    full = configuration(recompute_granularity="full")
    assert why(full) == (
        "with full recomputation, separate weight gradients need additional memory"
    )
    config = configuration()
    layer = TELinear(2, 2, config=config, bias=True, skip_bias_add=True)
    assert why(config, Chunk(layer=layer)) == (
        "with separate weight gradients, layers of Transformer Engine may keep gathered inputs "
        "in memory"
    )
