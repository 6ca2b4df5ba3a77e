"""Rejects features of Megatron-LM that the engine does not support, before the first step.

megatron-core's own loop does more than run forward and backward passes. Each check rejects a
feature of that loop that the engine lacks, or a model that relies on the loop's order of passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.utils import get_model_type, unwrap_model

from megatron.adaptive.engine.deferred_layers import delays_by_itself
from megatron.adaptive.engine.model_groups import ModelGroups, has_same_ranks
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.plugin.first_weights import is_by_layer
from megatron.adaptive.plugin.placement_patch import kind_of
from megatron.adaptive.plugin.settings import Settings

_GRAPHS = "a CUDA graph replays the order it was captured in"
_CONFIG = {
    "delay_wgrad_compute": "the engine itself delays weight gradients, see split_backward",
    "defer_embedding_wgrad_compute": "only megatron-core's own loop computes deferred gradients",
    "num_microbatches_with_partial_activation_checkpoints": (
        "it relies on the order of megatron-core's own loop"
    ),
    "fine_grained_activation_offloading": "it relies on the order of megatron-core's own loop",
    "moe_paged_stash": "only megatron-core's own loop resets the stash",
    "hybrid_context_parallel": "it needs a special loop",
    "dynamic_context_parallel": "the context-parallel group changes from microbatch to microbatch",
    "sequence_packing_scheduler": "it deals documents to microbatches anew in each step",
    "cuda_graph_impl": _GRAPHS,
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
}
_OFF = (None, False, "none")
_INSTEAD = "or use schedule megatron"
_SEVERAL_INPUTS = {
    "add_encoder": "an encoder with a decoder",
    "modality_submodules": "a model of several modalities",
}
"""Maps the name of an attribute that only models with several inputs have to the kind of model."""


def check_call(arguments: Mapping[str, Any]) -> None:
    """Raises an error for arguments of a step that the engine does not support.

    Args:
        arguments: Arguments for megatron-core's function that runs a step.

    Raises:
        ConfigError: An argument is not supported.
    """
    if arguments.get("adjust_tensor_shapes_fn") is not None:
        raise ConfigError(
            "adjust_tensor_shapes_fn was given (distillation does): stages exchange one "
            f"tensor with its shape; leave it out {_INSTEAD}"
        )
    communicator = arguments.get("p2p_communicator")
    if communicator is not None:
        groups = ModelGroups(arguments.get("pg_collection"))
        if not has_same_ranks(getattr(communicator, "pp_group", None), groups.pp):
            raise ConfigError(
                "p2p_communicator was given with another pipeline than the step's process groups: "
                "the engine connects the ranks of these groups; make it with their pp group "
                f"{_INSTEAD}"
            )


def check_model(
    config: Any, chunks: Sequence[torch.nn.Module], settings: Settings, groups: ModelGroups
) -> None:
    """Raises an error for a model that the engine would train wrongly or not at all.

    Args:
        config: Configuration of the model in megatron-core.
        chunks: Model chunks of this rank.
        settings: Settings of the model.
        groups: Process groups of the step.

    Raises:
        ConfigError: A setting or chunk of the model is not supported.
    """
    for name, reason in _CONFIG.items():
        value = getattr(config, name, None)
        if value not in _OFF:
            raise ConfigError(f"{name}={value} of the model: {reason}; turn it off {_INSTEAD}")
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if (parts := getattr(config, name, 1)) > 1:
            raise ConfigError(
                f"{name}={parts} of the model: parts of weights are gathered in the order of "
                f"megatron-core's own loop; set it to 1 {_INSTEAD}"
            )
    _check_fp8(config, settings, groups)
    _check_groups(config, settings, groups)
    overlaps = getattr(config, "overlap_moe_expert_parallel_comm", False)
    if overlaps and "moe" in (config.recompute_modules or ()):
        raise ConfigError(
            "overlap_moe_expert_parallel_comm of the model with recomputed layers of experts: a "
            "recomputation would change a layer whose forward is still under way; turn one of the "
            f"two off {_INSTEAD}"
        )
    built = kind_of(config)
    if built != settings.kind and config.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"the model's chunks are placed in a {built}, and schedule {settings.schedule} was "
            f"given with placement {settings.kind}: call install() with it before the model is "
            "built"
        )
    for number, chunk in enumerate(chunks):
        _check_chunk(number, chunk, groups)
        model = unwrap_model([chunk])[0]
        if settings.first_weights == "by-layer" and not is_by_layer(model):
            raise ConfigError(
                f"first_weights by-layer with chunk {number}, a {type(model).__name__}: only a "
                "GPTModel that is built after install() draws weights by layer; call install() "
                "before, or leave first_weights out"
            )
    names = ("moe_token_dispatcher_type", "recompute_granularity")
    settings.require(
        num_virtual_stages_per_pipeline_rank=len(chunks),
        overlap_moe_expert_parallel_comm=overlaps,
        **{name: getattr(config, name, None) for name in names},
    )


def _check_groups(config: Any, settings: Settings, groups: ModelGroups) -> None:
    """Raises an error if the caller's process groups do not suit the placement or the model.

    In a V, the caller's groups would have no effect, because the functions of megatron-core that
    the plugin replaces use the groups of ``parallel_state``.
    """
    if not groups.is_of_parallel_state and settings.kind == "v":
        raise ConfigError(
            "pg_collection was given with stages in a V: a V is made of parallel_state's groups; "
            "leave pg_collection out, or choose placement loop"
        )
    if getattr(config, "num_moe_experts", None) and not groups.experts:
        raise ConfigError(
            "pg_collection was given without ep, expt_tp and tp_ep for a model with experts: ranks "
            "that exchange tokens run the same actions; set these groups"
        )


def _check_fp8(config: Any, settings: Settings, groups: ModelGroups) -> None:
    """Raises an error for fp8 with delayed scaling under a run-time rule.

    With delayed scaling, each forward pass reduces scaling factors over replicas. Under a run-time
    rule, replicas may run their forward passes in different orders.
    """
    delayed = getattr(config, "fp8", None) and getattr(config, "fp8_recipe", None) == "delayed"
    if not delayed:
        return
    _, replicas = groups.replica
    if replicas == 1 or getattr(config, "tp_only_amax_red", False):
        return
    if settings.is_rule:
        raise ConfigError(
            f"fp8_recipe=delayed of the model with schedule {settings.schedule} and {replicas} "
            "data-parallel replicas: each forward reduces over replicas that choose different "
            "orders; use another recipe, tp_only_amax_red, or a fixed order such as 1f1b"
        )


def _check_chunk(number: int, chunk: torch.nn.Module, groups: ModelGroups) -> None:
    kind = get_model_type(chunk)
    # Compare names, because megatron-core has two enumerations called ModelType: its models use
    # one, Megatron-LM uses the other.
    if getattr(kind, "name", kind) != ModelType.encoder_or_decoder.name:
        raise ConfigError(
            f"model type {getattr(kind, 'name', kind)} of chunk {number}: one tensor goes from "
            f"stage to stage here; use a model of type encoder_or_decoder {_INSTEAD}"
        )
    model = unwrap_model([chunk])[0]
    for attribute, model_kind in _SEVERAL_INPUTS.items():
        if hasattr(model, attribute):
            raise ConfigError(
                f"chunk {number} is a {type(model).__name__}, {model_kind}: one tensor goes from "
                f"stage to stage here; use a model with one input {_INSTEAD}"
            )
    built_with = getattr(model, "pg_collection", None)
    if built_with is not None and not has_same_ranks(getattr(built_with, "pp", None), groups.pp):
        raise ConfigError(
            f"chunk {number} was built with another pipeline than the step's process groups: the "
            "engine connects the ranks of these groups; give the step the pg_collection that the "
            f"model was built with {_INSTEAD}"
        )
    if "FullyShardedDataParallel" in type(chunk).__name__:
        raise ConfigError(
            f"chunk {number} is a {type(chunk).__name__}: replicas gather parameters in the order "
            f"of megatron-core's own loop; use DistributedDataParallel {_INSTEAD}"
        )


def why_not_by_default(
    config: Any, chunks: Sequence[torch.nn.Module], *, replicas: int
) -> str | None:
    """Returns the reason why separate weight gradients may not pay off, or ``None`` if they do.

    Usually, a backward by inputs (B) frees more memory than it keeps for the later backward by
    weights (W), so the limit on activations still holds. In the cases that this function finds, B
    keeps more memory than it frees, or reductions of gradients no longer overlap with backward
    passes.
    """
    if getattr(config, "recompute_granularity", None) == "full":
        return "full recomputation keeps less than weight gradients need"
    if replicas > 1 and config.no_sync_func is not None:
        return "gradients are reduced while the last backward still runs"
    if delays_by_itself(chunks):
        return "layers of Transformer Engine may keep gathered inputs"
    return None
