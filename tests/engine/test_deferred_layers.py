"""GPT models with a backward in two halves: the gradients of the whole, to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive.errors import ConfigError

from ..multiprocess.launch import torchrun
from .split_gpt import (
    HIDDEN,
    SAMPLES,
    SEQUENCE,
    VOCABULARY,
    assert_equal,
    build,
    core_config,
    gradients,
    job,
    make_stages,
    pairs,
    run_step,
    with_weights,
)

# isort: split
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.adaptive.engine import deferred_layers
from megatron.adaptive.engine.deferred_layers import (
    DeferringColumnParallelLinear,
    DeferringRowParallelLinear,
    attach_store,
    attach_stores,
    deferring_spec,
    why_not_split,
)
from megatron.adaptive.engine.weight_gradient import WeightGradientStore

MICROBATCHES = 3


@pytest.fixture(autouse=True, scope="module")
def one_process() -> Iterator[None]:
    with job():
        yield


def linears(spec: ModuleSpec) -> dict[str, Any]:
    attention = spec.submodules.self_attention.submodules
    mlp = spec.submodules.mlp.submodules
    return {
        "qkv": attention.linear_qkv,
        "proj": attention.linear_proj,
        "fc1": mlp.linear_fc1,
        "fc2": mlp.linear_fc2,
    }


def test_spec_is_copied_with_other_linear_layers() -> None:
    spec = get_gpt_layer_local_spec()
    column, row = DeferringColumnParallelLinear, DeferringRowParallelLinear
    expected = {"qkv": column, "proj": row, "fc1": column, "fc2": row}
    rewritten = deferring_spec(spec)
    assert linears(rewritten) == expected
    assert linears(deferring_spec(rewritten)) == expected
    column, row = ColumnParallelLinear, RowParallelLinear
    assert linears(spec) == {"qkv": column, "proj": row, "fc1": column, "fc2": row}
    assert rewritten.module is spec.module
    assert rewritten.submodules.input_layernorm is spec.submodules.input_layernorm
    attention, plain = rewritten.submodules.self_attention, spec.submodules.self_attention
    assert attention.params == plain.params


def check(core: Any, late: int, pieces: int, **model: Any) -> None:
    """Compare a model's split step with a whole one, then its own whole step."""
    plain = build(core, splits=False, **model)
    order = pairs(len(plain), MICROBATCHES)
    run_step(plain, order)
    expected = gradients(plain)
    chunks = build(core, splits=True, **model)
    assert list(plain[0].state_dict()) == list(chunks[0].state_dict())
    stores = attach_stores(chunks)
    run_step(chunks, with_weights(order, late=late, pieces=pieces), stores)
    assert_equal(gradients(chunks), expected)
    assert not any(store.active or store.pending for store in stores)
    run_step(chunks, order)
    assert_equal(gradients(chunks), expected)


@pytest.mark.parametrize(("late", "pieces"), [(0, 1), (0, 40), (1, 3), (MICROBATCHES, 2)])
def test_gradients_are_those_of_the_whole_backward(late: int, pieces: int) -> None:
    check(core_config(), late, pieces)


MODERN = {
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "num_query_groups": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
WIDER = DistributedDataParallelConfig(grad_reduce_in_fp32=True)


@pytest.mark.parametrize(
    ("changes", "late", "pieces", "model"),
    [
        # One weight, two uses in a microbatch: they are summed before they join earlier ones.
        ({}, 1, 3, {"tied": True}),
        ({}, 2, 2, {"chunks": 3}),
        (MODERN, 1, 2, {"rope": True}),
        ({"deterministic_mode": True}, 1, 2, {}),
        (BF16, 1, 2, {"tied": True, "settings": WIDER}),
    ],
    ids=["tied", "chunks", "modern", "deterministic", "wider gradients"],
)
def test_other_models(
    changes: dict[str, Any], late: int, pieces: int, model: dict[str, Any]
) -> None:
    check(core_config(**changes), late, pieces, **model)


@pytest.mark.parametrize(
    "recompute",
    [
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective"},
        {
            # With biases megatron-core's own recomputation of an MLP calls itself without end.
            "add_bias_linear": False,
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "mlp"],
        },
    ],
    ids=["uniform", "block", "attention", "mlp"],
)
def test_recomputed_layers(recompute: dict[str, Any]) -> None:
    check(core_config(**recompute), 1, 2, chunks=2)


@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.float32, "fp32"), (torch.bfloat16, "fp16"), (None, "none")]
)
def test_fused_accumulation(
    dtype: torch.dtype | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    def add(given: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        assert given.dim() == gradient.dim() == 2
        main_grad.add_(gradient.t() @ given)

    def kernel_of(name: str) -> Any:
        return lambda *tensors: (used.append(name), add(*tensors))

    kernels = SimpleNamespace(
        wgrad_gemm_accum_fp32=kernel_of("fp32"), wgrad_gemm_accum_fp16=kernel_of("fp16")
    )
    monkeypatch.setattr(deferred_layers, "_fused", kernels)
    core = core_config(add_bias_linear=False)
    spec = deferring_spec(get_gpt_layer_local_spec())
    layer = spec.submodules.mlp.submodules.linear_fc1(
        HIDDEN, HIDDEN, config=core, init_method=core.init_method, bias=False
    )
    layer.gradient_accumulation_fusion = True
    if dtype is not None:
        layer.weight.main_grad = torch.zeros(HIDDEN, HIDDEN, dtype=dtype)
    store = WeightGradientStore()
    store.active = attach_store(layer, store) == 1
    with store.collect(0):
        layer(torch.ones(SEQUENCE, SAMPLES, HIDDEN))[0].sum().backward()
    store.run(0, 0, 1)
    # A weight without main_grad takes the plain way.
    assert used == ([] if dtype is None else [kernel])
    found = layer.weight.grad if dtype is None else layer.weight.main_grad
    assert torch.equal(found.float(), torch.full((HIDDEN, HIDDEN), 1.0 * SEQUENCE * SAMPLES))


def test_frozen_weights_stay_without_gradient() -> None:
    core = core_config()
    results = []
    for splits in (False, True):
        chunks = build(core, splits=splits)
        for name, parameter in chunks[0].named_parameters():
            if "layers.0.mlp.linear_fc1.weight" in name or "linear_qkv.bias" in name:
                parameter.requires_grad_(False)
        stores = attach_stores(chunks) if splits else None
        order = pairs(1, 1)
        run_step(chunks, with_weights(order, late=0, pieces=1) if splits else order, stores)
        results.append(gradients(chunks))
    for name, tensor in results[0].items():
        assert torch.equal(results[1][name], tensor), name
        assert bool(tensor.any()) == (
            "layers.0.mlp.linear_fc1.weight" not in name and "linear_qkv.bias" not in name
        )


def test_evaluation_runs_the_plain_layers() -> None:
    core = core_config(attention_dropout=0.0, hidden_dropout=0.0)
    losses = []
    for splits in (False, True):
        chunks = build(core, splits=splits)
        stores = attach_stores(chunks) if splits else None
        stages = make_stages(chunks, 1, stores, forward_only=True)
        with torch.no_grad():
            losses.append(stages.forward(0, 0, None))
        stages.finish()
        assert stages.retained_bytes(0) == 0
    assert torch.equal(losses[0], losses[1])


def test_embedding_backward_is_all_weight_gradient() -> None:
    (chunk,) = chunks = build(core_config(), splits=True)
    (store,) = attach_stores(chunks)
    chunk.zero_grad_buffer()
    stages = make_stages(chunks, 1, [store])
    stages.forward(0, 0, None)
    stages.backward(0, 0, None)
    word = chunk.module.embedding.word_embeddings.weight
    assert word.shape[0] == VOCABULARY
    assert not word.main_grad.any()
    assert chunk.module.embedding.position_embeddings.weight.main_grad.any()
    # Output layer first, embedding last, four linear layers in each of the two between.
    for piece in range(30):
        before = word.main_grad.any()
        stages.weights(0, 0, piece, 30)
        assert piece == 29 or not before
    assert word.main_grad.any()
    stages.finish()


def test_a_model_that_cannot_defer_is_refused() -> None:
    chunks = build(core_config(), splits=False)
    with pytest.raises(ConfigError, match="chunk 0 was to split .* build it with deferring_spec"):
        attach_stores(chunks)
    # A stage without layers owes nothing.
    (store,) = attach_stores([torch.nn.Identity()])
    assert store.pending == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"fp8": "hybrid"}, "fp8 layers compute weight gradients"),
        ({"fp4": "e2m1"}, "fp4 layers"),
        ({"num_moe_experts": 8}, "mixture of experts"),
        ({"mtp_num_layers": 1}, "multi-token prediction"),
        ({"cuda_graph_impl": "local"}, "CUDA graph"),
        ({"cpu_offloading": True}, "offloading"),
        ({"defer_embedding_wgrad_compute": True}, "defer_embedding_wgrad_compute"),
    ],
)
def test_reasons_not_to_split(changes: dict[str, Any], text: str | None) -> None:
    given = {field.name: getattr(core_config(), field.name) for field in _config_fields()}
    found = why_not_split(SimpleNamespace(**{**given, **changes}), get_gpt_layer_local_spec())
    assert (found is None) if text is None else (found is not None and text in found)


def _config_fields() -> Any:
    return [field for field in dataclasses.fields(core_config()) if field.init]


class FusedColumnParallelLinear(torch.nn.Module):
    """Stands for a layer of Transformer Engine."""


def test_other_linear_layers_are_named() -> None:
    core, spec = core_config(), deferring_spec(get_gpt_layer_local_spec())
    assert why_not_split(core, spec) is None
    spec.submodules.mlp.submodules.linear_fc1 = IdentityOp
    assert why_not_split(core, spec) is None
    spec.submodules.mlp.submodules.linear_fc1 = ModuleSpec(module=FusedColumnParallelLinear)
    reason = "FusedColumnParallelLinear (linear_fc1) computes weight gradients in its backward"
    assert why_not_split(core, spec) == reason


@pytest.mark.multiprocess
@pytest.mark.slow
def test_tensor_and_data_parallel_ranks(tmp_path: Path) -> None:
    program = Path(__file__).with_name("split_gpt.py")
    torchrun(program, [], world_size=2, log=tmp_path / "output.txt", limit_s=150.0)
