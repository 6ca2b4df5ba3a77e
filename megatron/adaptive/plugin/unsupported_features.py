"""Rejects features of Megatron-LM that the engine does not support, before the first step.

megatron-core's own loop does more than run forward and backward passes. Each check rejects an
unsupported feature of that loop, or a model that depends on the loop's order of passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.utils import get_model_type, unwrap_model

from megatron.adaptive.config.schedule_specs import why_whole_backward
from megatron.adaptive.engine.deferred_layers import delays_by_itself
from megatron.adaptive.engine.model_groups import ModelGroups, has_same_ranks
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.plugin.first_weights import is_by_layer
from megatron.adaptive.plugin.placement_patch import kind_of
from megatron.adaptive.plugin.settings import Settings

_GRAPHS = "a CUDA graph replays the order in which it was captured"
_CONFIG = {
    "delay_wgrad_compute": "the engine itself delays weight gradients (see split_backward)",
    "defer_embedding_wgrad_compute": "only megatron-core's own loop computes deferred gradients",
    "num_microbatches_with_partial_activation_checkpoints": (
        "it relies on the order of megatron-core's own loop"
    ),
    "fine_grained_activation_offloading": "it relies on the order of megatron-core's own loop",
    "moe_paged_stash": "only megatron-core's own loop resets the stash",
    "hybrid_context_parallel": "it requires a different loop over the microbatches",
    "dynamic_context_parallel": "the context-parallel group changes between microbatches",
    "sequence_packing_scheduler": "it reassigns documents to microbatches in each step",
    "cuda_graph_impl": _GRAPHS,
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
}
_OFF = (None, False, "none")
_INSTEAD = "or use --pipeline-schedule megatron"
_SEVERAL_INPUTS = {
    "add_encoder": "an encoder with a decoder",
    "modality_submodules": "a model of several modalities",
}
"""Kinds of models with several inputs, keyed by an attribute that only such models have."""


def check_call(arguments: Mapping[str, Any]) -> None:
    """Raises an error if the engine does not support one of the arguments of a step.

    Args:
        arguments: Arguments of megatron-core's function that runs a step, keyed by name.

    Raises:
        ConfigError: An argument is not supported.
    """
    if arguments.get("adjust_tensor_shapes_fn") is not None:
        raise ConfigError(
            "adjust_tensor_shapes_fn (used for distillation) is not supported, because stages "
            f"exchange exactly one tensor and its shape; remove it {_INSTEAD}"
        )
    communicator = arguments.get("p2p_communicator")
    if communicator is not None:
        groups = ModelGroups(arguments.get("pg_collection"))
        if not has_same_ranks(getattr(communicator, "pp_group", None), groups.pp):
            raise ConfigError(
                "p2p_communicator has a different pipeline group than the step, but the engine "
                "connects the ranks of the step's process groups; create the communicator with "
                f"their pp group {_INSTEAD}"
            )


def check_model(
    config: Any, chunks: Sequence[torch.nn.Module], settings: Settings, groups: ModelGroups
) -> None:
    """Raises an error if the engine cannot train a model, or would train it incorrectly.

    Args:
        config: megatron-core's configuration of the model.
        chunks: Model chunks of this rank.
        settings: Settings of the model.
        groups: Process groups of the step.

    Raises:
        ConfigError: The engine does not support a setting or chunk of the model.
    """
    for name, reason in _CONFIG.items():
        value = getattr(config, name, None)
        if value not in _OFF:
            raise ConfigError(
                f"the model's {name}={value} is not supported: {reason}; turn it off {_INSTEAD}"
            )
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if (parts := getattr(config, name, 1)) > 1:
            raise ConfigError(
                f"the model's {name}={parts} is not supported, because parts of weights are "
                f"gathered in the order of megatron-core's own loop; set it to 1 {_INSTEAD}"
            )
    _check_fp8(config, settings, groups)
    _check_groups(config, settings, groups)
    overlaps = getattr(config, "overlap_moe_expert_parallel_comm", False)
    if overlaps and "moe" in (config.recompute_modules or ()):
        raise ConfigError(
            "the model's overlap_moe_expert_parallel_comm does not support recomputed expert "
            "layers, because recomputation would change a layer whose forward pass is still "
            f"running; turn off one of them {_INSTEAD}"
        )
    built = kind_of(config)
    if built != settings.kind and config.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"the model's chunks have placement {built}, but schedule {settings.schedule} "
            f"requires placement {settings.kind}; call install() with this schedule before the "
            "model is built"
        )
    for number, chunk in enumerate(chunks):
        _check_chunk(number, chunk, groups)
        model = unwrap_model([chunk])[0]
        if settings.first_weights == "by-layer" and not is_by_layer(model):
            raise ConfigError(
                f"first_weights by-layer does not support chunk {number}, a "
                f"{type(model).__name__}: only a GPTModel that is built after install() draws "
                "weights by layer; call install() earlier, or remove first_weights"
            )
    names = ("moe_token_dispatcher_type", "recompute_granularity")
    settings.require(
        num_virtual_stages_per_pipeline_rank=len(chunks),
        overlap_moe_expert_parallel_comm=overlaps,
        **{name: getattr(config, name, None) for name in names},
    )


def _check_groups(config: Any, settings: Settings, groups: ModelGroups) -> None:
    """Raises an error if the caller's process groups do not match the placement or the model.

    In a V-shaped placement, the caller's groups would have no effect, because the plugin's
    replacements for megatron-core's functions use the groups of ``parallel_state``.
    """
    if not groups.is_of_parallel_state and settings.kind == "v":
        raise ConfigError(
            "pg_collection is not supported with placement v, which always uses the groups of "
            "parallel_state; remove pg_collection, or choose placement loop"
        )
    if getattr(config, "num_moe_experts", None) and not groups.experts:
        raise ConfigError(
            "pg_collection has no ep, expt_tp and tp_ep groups, but a model with experts "
            "requires them, because ranks that exchange tokens must run the same actions; set "
            "these groups"
        )


def _check_fp8(config: Any, settings: Settings, groups: ModelGroups) -> None:
    """Raises an error if fp8 with delayed scaling is combined with a run-time rule.

    With delayed scaling, each forward pass reduces scaling factors over the replicas. Under a
    run-time rule, replicas may run forward passes in different orders.
    """
    delayed = getattr(config, "fp8", None) and getattr(config, "fp8_recipe", None) == "delayed"
    if not delayed:
        return
    _, replicas = groups.replica
    if replicas == 1 or getattr(config, "tp_only_amax_red", False):
        return
    if settings.is_rule:
        raise ConfigError(
            f"the model's fp8_recipe=delayed does not support schedule {settings.schedule} with "
            f"{replicas} data-parallel replicas, because each forward pass communicates with the "
            "other replicas, which may run passes in a different order; use another recipe, "
            "tp_only_amax_red, or a schedule with a fixed order, such as 1f1b"
        )


def _check_chunk(number: int, chunk: torch.nn.Module, groups: ModelGroups) -> None:
    kind = get_model_type(chunk)
    # megatron-core has two enumerations called ModelType. Its models use one, and Megatron-LM uses
    # the other, so compare the names of the values.
    if getattr(kind, "name", kind) != ModelType.encoder_or_decoder.name:
        raise ConfigError(
            f"model type {getattr(kind, 'name', kind)} of chunk {number} is not supported, "
            "because stages exchange only one tensor; use a model of type encoder_or_decoder "
            f"{_INSTEAD}"
        )
    model = unwrap_model([chunk])[0]
    for attribute, model_kind in _SEVERAL_INPUTS.items():
        if hasattr(model, attribute):
            raise ConfigError(
                f"chunk {number} is a {type(model).__name__}, {model_kind}, which is not "
                "supported, because stages exchange only one tensor; use a model with one input "
                f"{_INSTEAD}"
            )
    built_with = getattr(model, "pg_collection", None)
    if built_with is not None and not has_same_ranks(getattr(built_with, "pp", None), groups.pp):
        raise ConfigError(
            f"chunk {number} was built with a different pipeline group than the step's, but the "
            "engine connects the ranks of the step's process groups; pass the pg_collection with "
            f"which the model was built {_INSTEAD}"
        )
    if "FullyShardedDataParallel" in type(chunk).__name__:
        raise ConfigError(
            f"chunk {number} is a {type(chunk).__name__}, which is not supported, because "
            "replicas gather parameters in the order of megatron-core's own loop; use "
            f"DistributedDataParallel {_INSTEAD}"
        )


def why_not_by_default(
    config: Any, chunks: Sequence[torch.nn.Module], *, replicas: int
) -> str | None:
    """Returns why weight gradients should not be separate by default, or ``None`` if they should.

    :func:`~megatron.adaptive.config.schedule_specs.why_whole_backward` describes the cases that
    also apply to the trainer. ``config`` is the configuration of the model, ``chunks`` contains its
    chunks on this rank, and ``replicas`` is the number of data-parallel replicas.
    """
    reason = why_whole_backward(
        recompute=getattr(config, "recompute_granularity", None),
        overlaps=config.no_sync_func is not None,
        replicas=replicas,
    )
    if reason is not None:
        return reason
    if delays_by_itself(chunks):
        return (
            "with separate weight gradients, layers of Transformer Engine may keep gathered inputs "
            "in memory"
        )
    return None
