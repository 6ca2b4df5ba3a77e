"""Says of a checkpoint of Megatron-LM what a manifest says of ours.

Megatron-LM has the arguments of the run among the state that all ranks have in common. Those that
give the weights their shape and meaning are compared with the settings of the run that loads, as
for a checkpoint of ours. Its random states are left alone: dropout is drawn from the seed and the
place of each microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.adaptive.checkpoint.folder import Manifest
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import CheckpointError

# Settings that give the weights their shape, or say which weights there are.
SHAPES = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels"),
    *("query_groups", "position_embedding_type", "max_position_embeddings", "normalization"),
    *("qk_layernorm", "norm_block_outputs", "swiglu", "geglu", "add_bias_linear", "add_qkv_bias"),
    "untie_embeddings_and_output_weights",
)
# Settings that say what is computed with them; a fine-tuning may change these.
MEANINGS = (
    *(
        "parallel_residual",
        "squared_relu",
        "norm_epsilon",
        "apply_layernorm_1p",
        "rotary_base",
        "rotary_percent",
    ),
    *("rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling"),
    *("rope_scaling_factor", "apply_residual_connection_post_layernorm", "window_rotary_base"),
    *("scale_embeddings", "attention_softcap", "logit_softcap", "moe_router_group_best"),
)
# Arguments of Megatron-LM that settings of the same group and name are compared with.
_COMPARED = {
    "model": (
        *(*SHAPES, *MEANINGS, "group_query_attention", "num_query_groups"),
        "make_vocab_size_divisible_by",
    ),
    "parallel": ("tensor_model_parallel_size", "use_distributed_optimizer"),
    "precision": ("fp16", "bf16"),
    "optimizer": ("optimizer", "sgd_momentum", "decoupled_lr"),
}
_SHARDING = "distrib_optim_sharding_type"
_RESHARDABLE = "fully_reshardable"


def make_manifest(
    path: Path, files: Mapping[str, int], common: Mapping[str, Any], own: TrainerConfig
) -> Manifest:
    """Returns the manifest that a checkpoint of Megatron-LM would have.

    Args:
        path: of the checkpoint.
        files: size of each of its files in bytes.
        common: state that all ranks have in common.
        own: settings of the run that loads it, which stand in for arguments that are missing.

    Raises:
        CheckpointError: it lacks what every checkpoint of Megatron-LM has.
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
    if wrong := [name for name, one in {**progress, "rows": rows}.items() if type(one) is not int]:
        raise CheckpointError(f"--load {path}: {wrong[0]} in common.pt is not a whole number")
    settings = own.to_dict()
    for group, names in _COMPARED.items():
        given = {name: arguments[name] for name in names if name in arguments}
        settings[group].update(given)
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
    """Checks that a distributed optimizer's state loads into other meshes than its own.

    Raises:
        CheckpointError: it does not.
    """
    if content.get(_SHARDING, _RESHARDABLE) != _RESHARDABLE:
        raise CheckpointError(
            f"--load {path} holds the state of a distributed optimizer as {content[_SHARDING]!r},"
            " which its own mesh alone can load: save it with Megatron-LM's"
            " --dist-ckpt-optim-fully-reshardable, or load the weights alone with --no-load-optim"
        )
