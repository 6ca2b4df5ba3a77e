"""Tests the model that settings describe: its configuration, layers and initial weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm  # noqa: E402
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.tensor_parallel import layers as parallel_layers  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Installed  # noqa: E402
from megatron.adaptive.errors import ConfigError  # noqa: E402
from megatron.adaptive.gpt import local_layers  # noqa: E402
from megatron.adaptive.gpt.build_model import KeyedInit, transformer_config  # noqa: E402
from megatron.adaptive.gpt.forward import HalfPrecisionChunk  # noqa: E402

from .conftest import SMALL  # noqa: E402


def core_config(flags: str, world_size: int = 1, backend: str = "gloo") -> Any:
    config = parse(f"{SMALL} {flags}".split(), world_size=world_size, last_wins=True)
    device = dataclasses.replace(accelerator.detect(0, backend="gloo"), backend=backend)
    return transformer_config(config, device)


Weights = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture
def weights(build: Callable[..., list[Any]]) -> Weights:
    """Returns a function that builds a rank's only chunk and returns its named parameters."""

    def run(flags: str = "", pp_rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
        (chunk,) = build(f"--init-method-std 0.5 {flags}", pp_rank, ranks)
        named = {
            name.removeprefix("module."): parameter for name, parameter in chunk.named_parameters()
        }
        return {name: parameter.detach().clone() for name, parameter in named.items()}

    return run


def test_draws_follow_seed_layer_and_number() -> None:
    def draws(seed: int, layer: int | None, count: int = 2, outside: int = 0) -> list[float]:
        init = KeyedInit(seed, first_outside=outside)
        if layer is not None:
            init.enter_layer(layer)
        return [float(init.normal(1.0)(torch.empty(1))) for _ in range(count)]

    assert draws(1, 3) == draws(1, 3)
    numbers = [*draws(1, 3), *draws(1, 4), *draws(2, 3), *draws(1, None)]
    assert len(set(numbers)) == len(numbers)
    # If a second chunk has weights outside of layers, it continues the numbering of the first
    # chunk.
    assert draws(1, None, outside=1) == draws(1, None, count=3)[1:]
    assert draws(1, None)[0] not in draws(1, 0)


def test_another_seed_gives_other_weights(weights: Weights) -> None:
    default, same, other = weights(), weights(), weights("--seed 4321")
    for name, value in default.items():
        assert torch.equal(value, same[name])
        if value.dim() == 2:
            assert not torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("flags", "present", "absent"),
    [
        ("", ["position_embeddings", "linear_fc1.bias"], ["output_layer"]),
        ("--untie-embeddings-and-output-weights", ["output_layer.weight"], []),
        ("--position-embedding-type rope", [], ["position_embeddings"]),
        ("--disable-bias-linear", [], ["linear_fc1.bias", "linear_proj.bias"]),
        ("--normalization RMSNorm", ["final_layernorm.weight"], ["final_layernorm.bias"]),
    ],
)
def test_parts_of_the_model(
    flags: str, present: list[str], absent: list[str], weights: Weights
) -> None:
    names = " ".join(weights(flags))
    assert all(part in names for part in present)
    assert not any(part in names for part in absent)


@pytest.mark.parametrize(
    ("flags", "world_size", "layout"),
    [
        ("--pipeline-model-parallel-size 4 --partition 0-3-1-0", 4, "E|ttt|t|L"),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--partition 1-0-2-1 --pipeline-placement v",
            2,
            "Et||tL|tt",
        ),
    ],
)
def test_layers_lie_as_the_partition_says(flags: str, world_size: int, layout: str) -> None:
    """Checks which layers each chunk has. Chunks are listed from the first to the last stage."""
    core = core_config(flags, world_size)
    ranks = core.pipeline_model_parallel_size
    built = core.pipeline_model_parallel_layout.layout
    letters = {"embedding": "E", "decoder": "t", "loss": "L"}
    stages = [built[stage % ranks][stage // ranks] for stage in range(len(layout.split("|")))]
    assert "|".join("".join(letters[layer.name] for layer in s) for s in stages) == layout


class Identity(torch.nn.Module):
    """Imitates a model chunk, but returns its input unchanged."""

    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self.pre_process, self.post_process = first, last

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("flag", ["--fp16", "--bf16"])
def test_only_the_ends_of_the_pipeline_convert(flag: str) -> None:
    """Checks that only the first stage and the last stage convert between dtypes."""
    core = core_config(
        f"{flag} --pipeline-model-parallel-size 2 --model-chunks 2 --pipeline-placement v", 2
    )
    narrow, wide = core.params_dtype, torch.float32
    for first, last, dtype, expected in (
        (True, False, wide, narrow),
        (False, False, narrow, narrow),
        (False, True, narrow, wide),
    ):
        chunk = HalfPrecisionChunk(core, Identity(first=first, last=last))
        assert chunk(torch.ones(1, dtype=dtype)).dtype is expected
    last_chunk = HalfPrecisionChunk(core, Identity(first=False, last=True))
    assert last_chunk(torch.ones(1, dtype=narrow), fp32_output=False).dtype is narrow


def test_settings_reach_megatron_core() -> None:
    core = core_config(
        "--bf16 --swiglu --ffn-hidden-size 24 --init-method-std 0.03 "
        "--hidden-dropout 0.2 --attention-dropout 0.3 "
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2 "
        "--norm-epsilon 1e-6"
    )
    assert core.bf16
    assert core.params_dtype is core.pipeline_dtype is torch.bfloat16
    assert core.gated_linear_unit
    assert core.activation_func is torch.nn.functional.silu
    assert (core.init_method_std, core.layernorm_epsilon) == (0.03, 1e-6)
    assert (core.hidden_dropout, core.attention_dropout) == (0.2, 0.3)
    assert core.recompute_granularity == "full"
    assert (core.recompute_method, core.recompute_num_layers) == ("block", 2)


@pytest.fixture
def fusions(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns a function that makes a model configuration for a GPU with Transformer Engine."""

    def run(flags: str = "", *, apex: bool, engine_rotates: bool = True) -> Any:
        monkeypatch.setattr(parallel_layers, "_grad_accum_fusion_available", apex)
        rotation = (lambda *_: None) if engine_rotates else None
        monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", rotation)
        gpu = accelerator.Accelerator(device=torch.device("cuda"), backend="nccl", name="GPU")
        arguments = (
            f"{SMALL} --transformer-impl transformer_engine --use-cpu-initialization {flags}"
        )
        installed = Installed(transformer_engine=True)
        return transformer_config(parse(arguments.split(), world_size=1, installed=installed), gpu)

    return run


@pytest.mark.parametrize("apex", [False, True])
def test_gradient_accumulation_is_fused_only_where_its_kernels_are(
    apex: bool, fusions: Callable[..., Any]
) -> None:
    """Checks that gradient accumulation is fused only with apex, which has the kernel for it."""
    core = fusions(apex=apex)
    assert core.gradient_accumulation_fusion == apex
    layer = ColumnParallelLinear(
        8, 8, config=core, init_method=torch.nn.init.zeros_, bias=False, skip_bias_add=False
    )
    assert layer.gradient_accumulation_fusion == apex
    assert not fusions("--no-gradient-accumulation-fusion", apex=True).gradient_accumulation_fusion


def test_rotation_is_fused_only_where_its_kernel_is(fusions: Callable[..., Any]) -> None:
    rope = "--position-embedding-type rope"
    assert fusions(rope, apex=False).apply_rope_fusion
    assert not fusions(rope, apex=False, engine_rotates=False).apply_rope_fusion
    assert not fusions(f"{rope} --no-rope-fusion", apex=False).apply_rope_fusion


@pytest.mark.parametrize("flags", ["", "--norm-block-outputs"])
def test_apex_norms_no_model_that_it_refuses(
    flags: str, build: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that models do not use apex's layer norm for RMSNorm, which it does not support."""
    monkeypatch.setattr(local_layers, "LayerNormImpl", FusedLayerNorm)
    (chunk,) = build(f"--normalization RMSNorm {flags}")
    norms = [module for name, module in chunk.named_modules() if name.endswith("layernorm")]
    assert {type(norm) for norm in norms} - {IdentityOp} == {torch.nn.RMSNorm}


def test_grouped_products_without_their_package_are_refused(
    build: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Releases since 0.17 do not use this package. For these releases, test_releases trains experts.
    name = "megatron.core.transformer.moe.grouped_gemm_util"
    grouped_gemm_util = pytest.importorskip(name, reason="this megatron-core needs no grouped_gemm")
    flags = "--bf16 --disable-bias-linear --num-experts 2 --moe-grouped-gemm"
    assert build(flags)
    monkeypatch.setattr(grouped_gemm_util, "grouped_gemm", None)
    with pytest.raises(
        ConfigError, match="--moe-grouped-gemm .* requires the package grouped_gemm"
    ):
        build(flags)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("schedule", ["megatron", "adaptive"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_outputs_are_freed_only_where_sends_keep_them(
    backend: str, schedule: str, chunks: int
) -> None:
    """Checks that megatron-core's own schedule keeps outputs with gloo, and frees them with NCCL.

    If outputs were not freed with NCCL, training would need more memory than with Megatron-LM.
    """
    flags = f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule}"
    if chunks > 1:
        flags += f" --num-virtual-stages-per-pipeline-rank {chunks}"
    core = core_config(flags, world_size=2, backend=backend)
    assert core.deallocate_pipeline_outputs == (schedule != "megatron" or backend == "nccl")
    if chunks > 1:
        # If two messages between the same ranks were sent in a batch, gloo would confuse them.
        assert not core.batch_p2p_comm
        assert core.overlap_p2p_comm
