"""Builds a manifest for checkpoints that Megatron-LM wrote.

Megatron-LM saves the command-line arguments of a run together with the state that all ranks share.
The manifest contains the arguments that determine the model's weights and how the weights are used.
A run that loads the checkpoint compares these arguments with its own settings. Random states are
not read, because dropout depends only on the seed and the position of each microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.adaptive.checkpoint.folder import Manifest
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import CheckpointError

# These settings determine which weights the model has, and their shapes.
SHAPES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "query_groups",
    "position_embedding_type",
    "max_position_embeddings",
    "normalization",
    "qk_layernorm",
    "norm_block_outputs",
    "swiglu",
    "geglu",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
)
# These settings change the computation, but not the shapes of the weights. They may differ if
# --finetune is used.
MEANINGS = (
    "parallel_residual",
    "squared_relu",
    "norm_epsilon",
    "apply_layernorm_1p",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "window_rotary_base",
    "scale_embeddings",
    "attention_softcap",
    "logit_softcap",
    "moe_router_group_best",
)
# These arguments of Megatron-LM are copied to the manifest. Each key is the name of a group of
# this program's settings.
_COMPARED = {
    "model": (
        *SHAPES,
        *MEANINGS,
        "group_query_attention",
        "num_query_groups",
        "make_vocab_size_divisible_by",
    ),
    "parallel": ("tensor_model_parallel_size", "use_distributed_optimizer"),
    "precision": ("fp16", "bf16"),
    "optimizer": ("optimizer", "sgd_momentum", "decoupled_lr"),
}
_SHARDING = "distrib_optim_sharding_type"
_RESHARDABLE = "fully_reshardable"


def make_manifest(
    path: Path, files: Mapping[str, int], common: Mapping[str, Any], config: TrainerConfig
) -> Manifest:
    """Builds the manifest that is missing in a checkpoint written by Megatron-LM.

    Args:
        path: Path of the checkpoint.
        files: Size in bytes of each file of the checkpoint, keyed by name.
        common: State that all ranks share, as read from ``common.pt``.
        config: Settings of the run that loads the checkpoint. They are used for arguments that the
            checkpoint does not contain.

    Raises:
        CheckpointError: If ``common`` does not contain a value that every checkpoint of Megatron-LM
            contains.
    """
    try:
        arguments = vars(common["args"])
        progress = {
            "iteration": common["iteration"],
            "consumed_train_samples": arguments["consumed_train_samples"],
            "consumed_valid_samples": arguments["consumed_valid_samples"],
        }
        rows = arguments["padded_vocab_size"]
    except (KeyError, TypeError) as error:
        # vars() raises TypeError if "args" is not a namespace.
        problem = f"lacks {error}" if isinstance(error, KeyError) else "contains invalid 'args'"
        raise CheckpointError(
            f"--load {path}: common.pt {problem}, so Megatron-LM's trainer did not write it; "
            "pass a checkpoint that Megatron-LM's trainer wrote"
        ) from None
    numbers = {**progress, "rows": rows}
    if wrong := [name for name, number in numbers.items() if type(number) is not int]:
        raise CheckpointError(f"--load {path}: {wrong[0]} in common.pt must be an integer")
    settings = config.to_dict()
    for group, names in _COMPARED.items():
        settings[group].update({name: arguments[name] for name in names if name in arguments})
    return {
        "progress": progress,
        "config": settings,
        "shape": {},
        "padded_vocab_size": rows,
        "has_optimizer": "optimizer" in common,
        "has_rng": False,
        "files": files,
        "blocks": {},
        "save_id": "",
    }


def require_reshardable(path: Path, content: Mapping[str, Any]) -> None:
    """Checks that a distributed optimizer's state can be loaded with different parallel sizes.

    Args:
        path: Path of the checkpoint, for the error message.
        content: Content metadata of the checkpoint, from Megatron-LM.

    Raises:
        CheckpointError: If the state can be loaded only with the parallel sizes of the run that
            saved it.
    """
    if content.get(_SHARDING, _RESHARDABLE) != _RESHARDABLE:
        raise CheckpointError(
            f"--load {path} contains the state of a distributed optimizer as "
            f"{content[_SHARDING]!r}, which can be loaded only with the same parallel sizes; "
            "save it with Megatron-LM's --dist-ckpt-optim-fully-reshardable, or use "
            "--no-load-optim to load only the weights"
        )
