"""Tests that GPT models have bitwise equal gradients with and without split backward passes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive.errors import ConfigError

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
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import experts, moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.adaptive.engine import deferred_layers
from megatron.adaptive.engine.deferred_layers import (
    DeferringColumnParallelLinear,
    attach_store,
    attach_stores,
    defer_layers,
)
from megatron.adaptive.engine.weight_gradient import WeightGradientStore

from .te_layers import GroupedLinear, TELayerNormLinear, TELinear

MICROBATCHES = 3


@pytest.fixture(autouse=True, scope="module")
def one_process() -> Iterator[None]:
    with job():
        yield


def check(core: Any, late: int, pieces: int, **model: Any) -> None:
    """Checks that a step with split backward passes gives the same gradients as an unsplit step.

    The weight gradients of a backward pass are delayed until ``late`` further backward passes of
    the chunk have run, and are computed in ``pieces`` actions. ``model`` contains arguments of
    :func:`build`.
    """
    plain = build_held(core, **model)
    order = pairs(len(plain), MICROBATCHES)
    run_step(plain, order)
    expected = gradients(plain)
    chunks = build_held(core, **model)
    names = list(plain[0].state_dict())
    stores = attach_stores(chunks)
    assert list(chunks[0].state_dict()) == names
    run_step(chunks, with_weights(order, late=late, pieces=pieces), stores)
    assert_equal(gradients(chunks), expected)
    assert not any(store.active or store.pending for store in stores)
    run_step(chunks, order)
    assert_equal(gradients(chunks), expected)


def build_held(core: Any, **model: Any) -> list[Any]:
    """Builds model chunks. Overlapped reductions of gradients wait for the last backward pass.

    ``model`` contains other arguments of :func:`build`.
    """
    chunks = build(core, **model)
    if chunks[0].ddp_config.overlap_grad_reduce:
        core.no_sync_func = [chunk.no_sync for chunk in chunks]
    return chunks


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
        # A tied weight is used twice in each microbatch. The sum of both gradients must be added to
        # the gradients of earlier microbatches.
        ({}, 1, 3, {"tied": True}),
        ({}, 2, 2, {"chunks": 3}),
        (MODERN, 1, 2, {"rope": True}),
        ({"deterministic_mode": True}, 1, 2, {}),
        (BF16, 1, 2, {"tied": True, "settings": WIDER}),
        ({"mtp_num_layers": 2}, 1, 3, {"tied": True}),
        ({"mtp_num_layers": 1, **MODERN}, 2, 2, {"rope": True}),
    ],
    ids=["tied", "chunks", "modern", "deterministic", "wider gradients", "mtp", "modern mtp"],
)
def test_other_models(
    changes: dict[str, Any], late: int, pieces: int, model: dict[str, Any]
) -> None:
    check(core_config(**changes), late, pieces, **model)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective"},
        {
            # Disable biases. Otherwise, megatron-core's recomputation of an MLP would recurse
            # endlessly.
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

    def add(hidden: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        assert hidden.dim() == gradient.dim() == 2
        main_grad.add_(gradient.t() @ hidden)

    def kernel_of(name: str) -> Any:
        return lambda *tensors: (used.append(name), add(*tensors))

    kernels = SimpleNamespace(
        wgrad_gemm_accum_fp32=kernel_of("fp32"), wgrad_gemm_accum_fp16=kernel_of("fp16")
    )
    monkeypatch.setattr(deferred_layers, "_fused", kernels)
    core = core_config(add_bias_linear=False)
    layer = ColumnParallelLinear(
        HIDDEN, HIDDEN, config=core, init_method=core.init_method, bias=False
    )
    layer.gradient_accumulation_fusion = True
    if dtype is not None:
        layer.weight.main_grad = torch.zeros(HIDDEN, HIDDEN, dtype=dtype)
    (store,) = attach_stores([layer])
    store.active = True
    with store.collect(0):
        layer(torch.ones(SEQUENCE, SAMPLES, HIDDEN))[0].sum().backward()
    store.run(0, 0, 1)
    # Without main_grad, there is no buffer in which a kernel could accumulate the gradient.
    assert used == ([] if dtype is None else [kernel])
    accumulated = layer.weight.grad if dtype is None else layer.weight.main_grad
    assert torch.equal(accumulated.float(), torch.full((HIDDEN, HIDDEN), 1.0 * SEQUENCE * SAMPLES))


def test_frozen_weights_stay_without_gradient() -> None:
    core = core_config()
    results = []
    for splits in (False, True):
        chunks = build(core)
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
        chunks = build(core)
        stores = attach_stores(chunks) if splits else None
        stages = make_stages(chunks, 1, stores, forward_only=True)
        with torch.no_grad():
            losses.append(stages.forward(0, 0, None))
        stages.finish()
        assert stages.retained_bytes(0, 0) == 0
    assert torch.equal(losses[0], losses[1])


def test_embedding_backward_is_all_weight_gradient() -> None:
    (chunk,) = chunks = build(core_config())
    (store,) = attach_stores(chunks)
    chunk.zero_grad_buffer()
    stages = make_stages(chunks, 1, [store])
    stages.forward(0, 0, None)
    stages.backward(0, 0, None)
    word = chunk.module.embedding.word_embeddings.weight
    assert word.shape[0] == VOCABULARY
    assert not word.main_grad.any()
    assert chunk.module.embedding.position_embeddings.weight.main_grad.any()
    # The weight gradient of the embedding must be computed last, after four linear layers for each
    # layer of the model.
    for piece in range(30):
        before = word.main_grad.any()
        stages.weights(0, 0, piece, 30)
        assert piece == 29 or not before
    assert word.main_grad.any()
    stages.finish()


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_logits_do_not_wait_for_w(tied: bool) -> None:
    # The gradients of logits must not be kept from B to W.
    (chunk,) = chunks = build(core_config(add_bias_linear=False), tied=tied, rope=True)
    (store,) = attach_stores(chunks)
    chunk.zero_grad_buffer()
    stages = make_stages(chunks, 1, [store])
    stages.forward(0, 0, None)
    stages.backward(0, 0, None)
    logits_bytes = SEQUENCE * SAMPLES * VOCABULARY * 4
    rows_bytes = SEQUENCE * SAMPLES * HIDDEN * 4
    # Only a tied weight is deferred, because its two gradients must be summed first.
    tokens_bytes = SEQUENCE * SAMPLES * 8
    layers_bytes = 2 * 16 * rows_bytes + rows_bytes + tokens_bytes
    assert store.microbatch_bytes == layers_bytes + tied * (logits_bytes + rows_bytes)
    weight = chunk.module.shared_embedding_or_output_weight() if tied else None
    weight = chunk.module.output_layer.weight if weight is None else weight
    assert weight.main_grad.any() == (not tied)
    stages.weights(0, 0, 0, 1)
    assert weight.main_grad.any()
    stages.finish()


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "allgather",
    "moe_aux_loss_coeff": 0.01,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
}

BIAS = {"bias": True}
ONE = {"moe_router_topk": 1, "moe_router_pre_softmax": True}


@pytest.mark.parametrize(
    ("grouped", "changes"),
    [
        (False, {}),
        (False, {"moe_shared_expert_intermediate_size": 16, **BF16}),
        (True, BF16),
        (True, {"moe_apply_probs_on_input": True, **ONE, **BF16}),
    ],
    ids=["sequential", "shared", "grouped", "grouped probs"],
)
def test_experts(grouped: bool, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # megatron-core gets these names from packages that need a GPU, so replace them.
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    if grouped and not hasattr(experts, "gg"):
        pytest.skip("from 0.17 on megatron-core groups experts with Transformer Engine alone")
    if grouped:
        monkeypatch.setattr(experts.gg, "grouped_gemm", SimpleNamespace())
        monkeypatch.setattr(experts.gg, "ops", SimpleNamespace(gmm=grouped_products))
    core = core_config(**{**EXPERTS, "moe_grouped_gemm": grouped, **changes})
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=grouped)
    for late, pieces in ((0, 1), (1, 5)):
        check(core, late, pieces, spec=spec)


def grouped_products(rows: Any, matrices: Any, counts: Any, trans_b: bool = False) -> Any:
    parts = zip(rows.split(counts.tolist()), matrices.unbind(), strict=True)
    return torch.cat([part @ (matrix.t() if trans_b else matrix) for part, matrix in parts])


@pytest.mark.parametrize(
    "settings",
    [{}, {"is_old": True}, BIAS, {**BIAS, "fp8": True}, {**BIAS, "return_bias": True}],
    ids=["", "old", "bias", "fp8", "returned bias"],
)
@pytest.mark.parametrize("overlap", [None, False, True], ids=["", "wrapped", "overlap"])
def test_grouped_experts_of_transformer_engine(
    settings: dict[str, bool], overlap: bool | None
) -> None:
    # Until W has run, the backward pass of the layer returns a weight gradient that contains NaN.
    # This gradient must not be added to the real one, and must not raise an error if
    # megatron-core's wrapper overlaps reductions.
    layers = [GroupedLinear(3, 4, 5, **settings) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    wrapped: list[Any] = [torch.nn.Sequential(layer) for layer in layers]
    if overlap is not None:
        wrapper = DistributedDataParallelConfig(overlap_grad_reduce=overlap)
        wrapped = [DistributedDataParallel(core_config(), wrapper, each) for each in wrapped]
    chunk, store = wrapped[1], WeightGradientStore()
    assert defer_layers(chunk) == []
    attach_store(chunk, store)
    store.active = True
    with contextlib.ExitStack() as held:
        for each in wrapped if overlap is not None else ():
            held.enter_context(each.no_sync())
        for microbatch, sizes in enumerate(([3, 0, 4], [1, 5, 2])):
            hidden = torch.randn(sum(sizes), 4)
            for number, layer in enumerate(layers):
                output = layer(hidden.clone().requires_grad_(), sizes).square().sum()
                for bias in layer.biases if layer.te_return_bias else ():
                    output = output + bias.square().sum()
                with store.collect(microbatch) if number else contextlib.nullcontext():
                    output.backward()
            store.run(microbatch, 0, 1)
    expected, actual = (
        {name: gradient_of(weight) for name, weight in layer.named_parameters()} for layer in layers
    )
    assert_equal(actual, expected)
    assert store.is_uneven


def gradient_of(parameter: Any) -> Any:
    if hasattr(parameter, "main_grad"):
        assert parameter.grad is None
        return parameter.main_grad
    return parameter.grad


def engine_spec() -> ModuleSpec:
    """Returns a layer spec that uses the imitated layers of Transformer Engine.

    The norms are part of the linear layers that follow them.
    """
    spec = get_gpt_layer_local_spec()
    attention, mlp = map(parts_of, (spec.submodules.self_attention, spec.submodules.mlp))
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
    attention.linear_qkv = mlp.linear_fc1 = TELayerNormLinear
    attention.linear_proj = mlp.linear_fc2 = TELinear
    return spec


def parts_of(described: Any) -> Any:
    """Returns the submodules of the layer spec ``described``.

    Since megatron-core 0.17, a spec may be a ``functools.partial`` object.
    """
    if isinstance(described, functools.partial):
        return described.keywords["submodules"]
    return described.submodules


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        ({}, {"fuse_wgrad_accumulation": True}),
        ({}, {"fp8": True}),
        ({"add_bias_linear": False}, {"fuse_wgrad_accumulation": True, "fp8": True}),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            {},
        ),
    ],
    ids=["", "fused", "fp8", "fused fp8", "recompute"],
)
def test_layers_of_transformer_engine(
    changes: dict[str, Any],
    settings: dict[str, bool],
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TELinear, "settings", settings)
    wrapper = DistributedDataParallelConfig(overlap_grad_reduce=overlap)
    for late, pieces in ((0, 1), (2, 3)):
        check(core_config(**changes), late, pieces, spec=engine_spec(), settings=wrapper)


def test_what_a_delayed_call_keeps_is_counted() -> None:
    core = core_config(add_bias_linear=False)
    kept = []
    for spec in (engine_spec(), get_gpt_layer_local_spec()):
        chunks = build(core, spec=spec)
        stores = attach_stores(chunks)
        run_step(chunks, with_weights(pairs(1, 1), late=0, pieces=1), stores)
        kept.append(stores[0].microbatch_bytes)
    assert kept[0] == kept[1] > 0


def test_layers_that_cannot_defer_run_whole() -> None:
    core = core_config()
    plain = build(core, rope=True)
    order = pairs(1, MICROBATCHES)
    run_step(plain, order)
    (chunk,) = chunks = build(core, rope=True)
    block = chunk.module.decoder
    block.layers[0].cuda_graphs = []
    subclass = type("OwnLinear", (ColumnParallelLinear,), {})
    block.layers[1].mlp.linear_fc1.__class__ = subclass
    assert defer_layers(chunk) == [
        *(
            f"module.decoder.layers.0.{name} is a {kind}ParallelLinear, whose backward pass is "
            "replayed by a CUDA graph"
            for name, kind in (
                ("self_attention.linear_proj", "Row"),
                ("self_attention.linear_qkv", "Column"),
                ("mlp.linear_fc1", "Column"),
                ("mlp.linear_fc2", "Row"),
            )
        ),
        "module.decoder.layers.1.mlp.linear_fc1 is a OwnLinear, which computes its weight gradient "
        "in its backward pass",
    ]
    assert type(chunk.module.output_layer) is DeferringColumnParallelLinear
    stores = attach_stores(chunks)
    run_step(chunks, with_weights(order, late=1, pieces=2), stores)
    assert_equal(gradients(chunks), gradients(plain))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "is a Linear, which computes its weight gradient in its backward"),
        ({"cpu_offloading": True}, "is a TELinear, with CPU offloading, which moves the"),
        ({"tp_comm_overlap": True}, "is a TELinear, with tp_comm_overlap, which computes the"),
        ({"old": True}, "is a TELinear, from a Transformer Engine release without backward_dw"),
    ],
)
def test_where_nothing_can_defer_the_first_layer_is_named(
    changes: dict[str, bool], line: str
) -> None:
    layer: Any = torch.nn.Linear(2, 2)
    if changes:
        core = SimpleNamespace(delay_wgrad_compute=False, **changes)
        layer = TELinear(2, 2, config=core, bias=False, skip_bias_add=False)
    if "old" in changes:
        del layer.wgrad_store
    chunk = torch.nn.ModuleDict({"fc": layer})
    with pytest.raises(ConfigError, match=f"^backward passes cannot be split: fc {line}"):
        attach_stores([torch.nn.Identity(), chunk])
    # A stage without layers has no weight gradients to defer, but must not cause an error.
    (store,) = attach_stores([torch.nn.Identity()])
    assert store.pending == 0
