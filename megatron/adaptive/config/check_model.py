"""Rules between settings of the model: its shape, experts, latent attention, kernels.

As in ``check.py``, which asks for them: every message names the values, the rule and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from megatron.adaptive.config.core import (
    EXPERT_SETTINGS,
    LATENT_SETTINGS,
    CoreConfig,
    parse_pattern,
)
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.schedule import PAIRING, RULES
from megatron.adaptive.config.trainer import TrainerConfig, groups

Rules: TypeAlias = Iterator[tuple[object, str]]
"""Conditions under which a configuration is refused, and the messages."""


class Given:
    """Writes settings as on the command line: attribute ``lr`` is ``--lr 0.1``."""

    def __init__(self, config: TrainerConfig) -> None:
        self._texts = {
            spec.dest: spec.text_of(getattr(getattr(config, group), spec.dest))
            for group, kind in groups().items()
            for spec in fields_of(kind)
            if spec.has_flag
        }

    def __getattr__(self, name: str) -> str:
        return self._texts[name]


def model_rules(config: TrainerConfig, given: Given, installed: Installed) -> Rules:
    """Yields the rules of the model."""
    yield from _shape(config, given)
    yield from _latent(config, given)
    yield from _experts(config, given, installed)
    yield from _expert_ranks(config, given)
    yield from _overlap(config, given)
    yield from _kernels(config, given, installed)


def _shape(config: TrainerConfig, given: Given) -> Rules:
    model = config.model
    heads = model.num_attention_heads
    yield (
        model.hidden_size % heads != 0 and model.kv_channels == model.hidden_size // heads,
        f"{given.hidden_size} is not a multiple of {given.num_attention_heads}: change one of "
        "them, or give --kv-channels",
    )
    yield (
        model.ffn_hidden_size < 1,
        f"--swiglu with {given.hidden_size} makes a feed-forward block of width 0, rounded down "
        "to a multiple of 64: give --ffn-hidden-size",
    )
    yield (
        model.seq_length > model.max_position_embeddings,
        f"{given.seq_length} is longer than {given.max_position_embeddings}: raise the latter to "
        f"{model.seq_length} at least",
    )
    yield (
        not model.group_query_attention and model.num_query_groups != 1,
        f"{given.num_query_groups} has no effect by itself: add --group-query-attention",
    )
    yield (
        heads % model.query_groups != 0,
        f"{given.num_attention_heads} is not a multiple of {given.num_query_groups}: every group "
        "serves the same number of heads",
    )
    activations = ("swiglu", "squared_relu", "quick_geglu", "geglu", "openai_gelu")
    chosen = [name for name in activations if getattr(model, name)]
    yield (
        len(chosen) > 1,
        f"{' and '.join(getattr(given, name) for name in chosen)} exclude each other: a model has "
        "one activation; keep one",
    )
    yield (
        not model.add_position_embedding and model.position_embedding_type == "learned_absolute",
        "--no-position-embedding contradicts --position-embedding-type learned_absolute: give "
        "--position-embedding-type rope or none",
    )


def _latent(config: TrainerConfig, given: Given) -> Rules:
    core, unset = config.core, CoreConfig()
    for name in () if core.multi_latent_attention else LATENT_SETTINGS:
        yield (
            getattr(core, name) != getattr(unset, name),
            f"{getattr(given, name)} has no effect by itself: add --multi-latent-attention",
        )
    yield (
        core.multi_latent_attention and config.model.group_query_attention,
        "--group-query-attention with --multi-latent-attention, which has one key and value for "
        "each head: drop one of them",
    )


def _experts(config: TrainerConfig, given: Given, installed: Installed) -> Rules:
    core, unset, experts = config.core, CoreConfig(), config.core.num_moe_experts
    if experts is None:
        for name in EXPERT_SETTINGS:
            yield (
                getattr(core, name) != getattr(unset, name),
                f"{getattr(given, name)} has no effect by itself: add --num-experts",
            )
        return
    yield experts < 1, f"{given.num_moe_experts}: give 1 at least, or drop the flag"
    yield (
        not 1 <= core.moe_router_topk <= experts,
        f"{given.moe_router_topk} of {given.num_moe_experts}: a token goes to 1 expert at least "
        "and to all at most; change one of them",
    )
    groups, best = core.moe_router_num_groups, config.model.moe_router_group_best
    yield (
        best is not None and (groups is None or best > experts // groups or core.moe_router_fusion),
        f"{given.moe_router_group_best} needs groups of as many experts (--moe-router-num-groups) "
        "and no --moe-router-fusion: change one of them",
    )
    yield (
        core.moe_expert_capacity_factor == 0,
        f"{given.moe_expert_capacity_factor} leaves experts no token: give a factor above 0, or "
        "drop the flag so that none is dropped",
    )
    pattern, layers = parse_pattern(core.moe_layer_freq), config.model.num_layers
    if isinstance(pattern, list):
        yield (
            len(pattern) != layers or not {*pattern} <= {0, 1},
            f"{given.moe_layer_freq} says of {len(pattern)} layers whether they have experts, and "
            f"{given.num_layers}: give one 0 or 1 for each",
        )
    else:
        yield pattern < 1, f"{given.moe_layer_freq}: give 1 at least, or a list of 0 and 1"
    kinds, weights = core.moe_router_load_balancing_type, core.moe_aux_loss_coeff
    yield (
        len(kinds) != len(weights),
        f"{given.moe_router_load_balancing_type} with {given.moe_aux_loss_coeff}: give as many "
        "coefficients as types",
    )
    dispatcher = core.moe_token_dispatcher_type
    yield (
        dispatcher == "flex" and not installed.flexible_dispatch,
        f"{given.moe_token_dispatcher_type} needs DeepEP, which is not installed, and GPUs: "
        "install it, or use alltoall",
    )
    yield (
        dispatcher == "allgather" and config.data.variable_seq_lengths,
        f"{given.moe_token_dispatcher_type} with --variable-seq-lengths, whose rows differ from "
        "rank to rank: use alltoall",
    )
    local, biased = config.model.transformer_impl == "local", config.model.add_bias_linear
    grouped, shared = core.moe_grouped_gemm and local, core.moe_shared_expert_intermediate_size
    yield (
        grouped and not config.precision.bf16,
        f"{given.moe_grouped_gemm} with --transformer-impl local, whose grouped experts compute in "
        "bf16: add --bf16, or drop --moe-grouped-gemm, which changes the speed alone",
    )
    tensor = config.parallel.expert_tensor_parallel_size
    for what, broken in (
        (given.moe_grouped_gemm, grouped),
        (given.moe_shared_expert_intermediate_size, shared is not None),
        (
            f"experts on {tensor or config.parallel.tensor_model_parallel_size} tensor parallel "
            "ranks (--expert-tensor-parallel-size)",
            (tensor or config.parallel.tensor_model_parallel_size) > 1,
        ),
    ):
        yield biased and broken, f"{what} with biases: add --disable-bias-linear"
    yield (
        core.moe_latent_size is not None and local,
        f"{given.moe_latent_size} needs Transformer Engine, but --transformer-impl is local: "
        "install it and use --transformer-impl transformer_engine, or drop the flag",
    )
    yield (
        config.parallel.unequal_sizes is not None,
        f"{given.num_moe_experts} with {given.stage_data_parallel_sizes}: stages of unequal sizes "
        "do without experts; use the same number of ranks for each stage",
    )
    yield (
        config.core.heterogeneous_layers_config_encoded_json,
        f"{given.num_moe_experts} with layers of --heterogeneous-layers-config-path, which have no "
        "experts: drop one of them",
    )


def _expert_ranks(config: TrainerConfig, given: Given) -> Rules:
    """The ranks that experts are spread over."""
    parallel, experts = config.parallel, config.core.num_moe_experts
    spread, tensor = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    if experts is None:
        for what, is_given in (
            (given.expert_model_parallel_size, spread > 1),
            (given.expert_tensor_parallel_size, tensor is not None),
        ):
            yield is_given, f"{what} has no effect by itself: add --num-experts"
        return
    yield (
        experts % spread != 0,
        f"{given.num_moe_experts} is not a multiple of {given.expert_model_parallel_size}: every "
        "rank takes as many experts; change one of them",
    )
    tensor = tensor or parallel.tensor_model_parallel_size
    unit = tensor * spread * parallel.pipeline_model_parallel_size
    yield (
        config.world_size % unit != 0,
        f"world size {config.world_size} is not a multiple of expert tensor {tensor} x expert "
        f"{spread} x pipeline {parallel.pipeline_model_parallel_size} = {unit}: start a multiple "
        f"of {unit} processes or change --expert-model-parallel-size",
    )
    yield (
        parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel,
        f"{given.num_moe_experts} with {given.tensor_model_parallel_size}: the ranks share the "
        "tokens of a sequence between them; add --sequence-parallel",
    )
    yield (
        spread == 1 and tensor != parallel.tensor_model_parallel_size,
        f"{given.expert_tensor_parallel_size} with {given.tensor_model_parallel_size} and "
        f"{given.expert_model_parallel_size}: megatron-core adds up experts' gradients over the "
        "wrong ranks; make the first two equal, or raise --expert-model-parallel-size",
    )
    width = config.core.moe_ffn_hidden_size or config.model.ffn_hidden_size
    yield (
        width % tensor != 0,
        f"experts of width {width} (--moe-ffn-hidden-size) on {tensor} expert tensor parallel "
        "ranks: every rank takes an equal share; change one of them",
    )


def _overlap(config: TrainerConfig, given: Given) -> Rules:
    """Refuses what keeps an action from going on beside another while tokens are exchanged."""
    settings, core, what = config.schedule, config.core, given.overlap_moe_expert_parallel_comm
    if not settings.overlap_moe_expert_parallel_comm:
        return
    yield (
        config.parallel.expert_model_parallel_size == 1,
        f"{what} with {given.expert_model_parallel_size}: no tokens are exchanged; drop it, or "
        "spread experts over ranks",
    )
    yield (
        core.moe_token_dispatcher_type != "alltoall",
        f"{what} with {given.moe_token_dispatcher_type}, whose layers cannot be left where they "
        "exchange tokens: use --moe-token-dispatcher-type alltoall",
    )
    yield (
        settings.pipeline_schedule not in {*RULES, *PAIRING, "file"} - {"auto"},
        f"{what} with {given.pipeline_schedule}, in which no action begins beside another: use "
        "adaptive, combined-1f1b or dualpipe-v",
    )
    yield (
        settings.repartition != "off",
        f"{what} with {given.repartition}: the time of a layer would hold what runs beside it; "
        "drop one of them",
    )
    for repeats, is_given in (
        ("--recompute-granularity full", config.recompute.recompute_granularity == "full"),
        (given.moe_layer_recompute, core.moe_layer_recompute),
    ):
        yield (
            is_given,
            f"{what} with {repeats}: a forward that is left in a layer would find it changed by "
            "one that is repeated there; use --recompute-granularity selective",
        )
    yield (
        core.moe_shared_expert_overlap,
        f"{what} with {given.moe_shared_expert_overlap}, which fills the same exchanges: drop one",
    )


def _kernels(config: TrainerConfig, given: Given, installed: Installed) -> Rules:
    model = config.model
    uses_engine = model.transformer_impl == "transformer_engine"
    yield (
        model.attention_softcap is not None
        and (model.use_flash_attn or model.attention_backend in ("flash", "fused")),
        f"{given.attention_softcap} with {given.use_flash_attn} or {given.attention_backend}, which"
        " bound no scores: drop one of them",
    )
    yield (
        uses_engine and not installed.transformer_engine,
        "--transformer-impl transformer_engine needs Transformer Engine, which is not installed: "
        "install it or give --transformer-impl local",
    )
    for what, wanted in (
        (given.attention_backend, model.attention_backend in ("flash", "fused")),
        (given.use_flash_attn, model.use_flash_attn),
        (given.cross_entropy_fusion_impl, model.cross_entropy_fusion_impl == "te"),
    ):
        yield (
            wanted and not uses_engine,
            f"{what} needs Transformer Engine, but --transformer-impl is local: install it and "
            "use --transformer-impl transformer_engine, or drop the flag",
        )
    yield (
        model.attention_backend == "local" and uses_engine,
        "--attention-backend local belongs to --transformer-impl local, not to "
        "transformer_engine: change one of them",
    )
    yield (
        model.window_rotary_base is not None
        and (config.core.window_size is None or model.position_embedding_type != "rope"),
        f"{given.window_rotary_base} has no effect by itself: add --window-size and "
        "--position-embedding-type rope",
    )
