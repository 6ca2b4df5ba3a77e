"""Builds a manifest for a checkpoint that Megatron-LM wrote.

Megatron-LM saves the arguments of a run with the state that all ranks share. Arguments that decide
the shape and meaning of the weights are compared with the settings of the run that loads them, as
for this program's own checkpoints. The random states are not read: dropout is drawn from the seed
and the position of each microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.adaptive.checkpoint.folder import Manifest
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import CheckpointError

# Settings that decide the shapes of the weights, or which weights there are.
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
# Settings that decide what is computed with the weights; fine-tuning may change these.
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
    "apply_residual_connection_post_layernorm",
    "window_rotary_base",
    "scale_embeddings",
    "attention_softcap",
    "logit_softcap",
    "moe_router_group_best",
)
# Arguments of Megatron-LM that are compared with the setting of the same group and name.
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
_RESHARDABLE = "fully_reshardable"


def make_manifest(
    path: Path, files: Mapping[str, int], common: Mapping[str, Any], config: TrainerConfig
) -> Manifest:
    """Returns the manifest for a checkpoint of Megatron-LM, which has none.

    Args:
        path: Path of the checkpoint.
        files: Sizes of its files in bytes, by name.
        common: State that all ranks share.
        config: Settings of the run that loads it. They replace arguments that are missing.

    Raises:
        CheckpointError: If it lacks a value that each checkpoint of Megatron-LM has.
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
        raise CheckpointError(
            f"--load {path} has no {error} in common.pt: it is not of Megatron-LM's trainer"
        ) from None
    numbers = {**progress, "rows": rows}
    if wrong := [name for name, number in numbers.items() if type(number) is not int]:
        raise CheckpointError(f"--load {path}: {wrong[0]} in common.pt is not a whole number")
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
    """Checks that a distributed optimizer's state loads into other meshes than the one it is from.

    Raises:
        CheckpointError: If it loads only into that mesh.
    """
    if content.get(_SHARDING, _RESHARDABLE) != _RESHARDABLE:
        raise CheckpointError(
            f"--load {path} holds the state of a distributed optimizer as {content[_SHARDING]!r},"
            " which its own mesh alone can load: save it with Megatron-LM's"
            " --dist-ckpt-optim-fully-reshardable, or load the weights alone with --no-load-optim"
        )
