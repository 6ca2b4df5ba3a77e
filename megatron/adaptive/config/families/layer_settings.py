"""Derives layer settings that depend on several keys of ``config.json``.

These settings concern experts, attention windows and the scaling of rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from megatron.adaptive.config.families.config_keys import Settings, kind_of_rotation, scaling_of
from megatron.adaptive.errors import ConfigError


def expert_settings(config: Mapping[str, Any], layers: int, where: str) -> Settings:
    """Returns the settings for layers with experts, the shared expert and the router.

    Args:
        config: Contents of ``config.json``.
        layers: Number of layers in the model.
        where: Path of the file, shown in error messages.

    Raises:
        ConfigError: The layers with experts cannot be determined.
    """
    first = config.get("first_k_dense_replace", 0)
    every = config.get("moe_layer_freq", 1)
    step = config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    settings: Settings = {}
    try:
        have_experts = [
            i >= first and i % every == 0 and (i + 1) % step == 0 and i not in dense
            for i in range(layers)
        ]
        if not all(have_experts):
            settings["moe_layer_freq"] = layer_pattern(have_experts)
        if shared := config.get("n_shared_experts"):
            width = shared * config["moe_intermediate_size"]
            settings["moe_shared_expert_intermediate_size"] = width
    except (TypeError, KeyError, ZeroDivisionError):
        raise ConfigError(
            f"{where}: the layers with experts cannot be determined, because "
            "first_k_dense_replace, moe_layer_freq, decoder_sparse_step and n_shared_experts "
            "must be integers"
        ) from None
    if config.get("norm_topk_prob") is False and config.get("scoring_func") != "sigmoid":
        settings["moe_router_pre_softmax"] = True
    best = {"noaux_tc": 2, "group_limited_greedy": 1}.get(str(config.get("topk_method")), 0)
    if best == 2:
        settings["moe_router_enable_expert_bias"] = True
    groups = config.get("n_group") or 1
    chosen = config.get("topk_group") or 1
    if best and groups > 1 and best != config["num_experts_per_tok"] // chosen:
        settings["moe_router_group_best"] = best
    return settings


def window_settings(config: Mapping[str, Any], period: int, layers: int, where: str) -> Settings:
    """Returns the settings for the size of attention windows and for the layers with a window.

    Args:
        config: Contents of ``config.json``.
        period: Period n if every n-th layer attends to all tokens, or 0 if all layers have a
            window. The period is ignored if the file specifies which layers have a window.
        layers: Number of layers in the model.
        where: Path of the file, shown in error messages.

    Raises:
        ConfigError: The type of a layer is unknown, or the window size is negative.
    """
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ConfigError(
                    f"{where}: layer_types contains {kind!r}, which the planner does not "
                    "support; specify the sizes of these layers as `layers` of a model file "
                    '(see "plan --schema model")'
                )
        have_window = [kind == "sliding_attention" for kind in kinds]
    else:
        period = config.get("sliding_window_pattern") or (
            config.get("_sliding_window_pattern") or period
        )
        begin = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
        have_window = [i >= begin and (not period or (i + 1) % period != 0) for i in range(layers)]
    if not window or not any(have_window) or config.get("use_sliding_window") is False:
        return {}
    if window < 0:
        raise ConfigError(f"{where}: sliding_window must be a non-negative integer, got {window}")
    # The window size of megatron-core does not count the token itself, so 1 is subtracted.
    settings: Settings = {"window_size": (window - 1, 0)}
    if not all(have_window):
        every = have_window.index(False) + 1
        is_regular = every > 1 and have_window == [(i + 1) % every != 0 for i in range(layers)]
        skipped = str(every) if is_regular else layer_pattern(have_window)
        settings["window_attn_skip_freq"] = skipped
    return settings


def layer_pattern(values: Sequence[bool]) -> str:
    """Converts one boolean per layer to the trainer's notation, such as ``[0]*3+[1]*58``."""
    runs = [(int(value), len(list(group))) for value, group in groupby(values)]
    return "+".join(f"[{value}]*{count}" for value, count in runs)


def scaled_rotation(config: Mapping[str, Any]) -> Settings:
    """Returns the settings that scale rotary frequencies, or ``{}`` for an unsupported scaling."""
    scaling = scaling_of(config)
    kind = kind_of_rotation(config)
    factor = scaling.get("factor")
    expected = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if kind == "llama3" and all(scaling.get(key) == value for key, value in expected.items()):
        return {"use_rope_scaling": True, "rope_scaling_factor": factor}
    if kind == "linear" and factor and float(factor).is_integer():
        return {"rotary_seq_len_interpolation_factor": int(factor)}
    return {}


def latent_rotation(config: Mapping[str, Any]) -> Settings:
    """Returns the settings that scale rotary frequencies in models with latent attention."""
    scaling = scaling_of(config)
    if kind_of_rotation(config) != "yarn":
        return {"rope_type": "rope"}
    settings: Settings = {"rope_type": "yarn", "rotary_scaling_factor": scaling.get("factor")}
    defaults = {
        "original_max_position_embeddings": config["max_position_embeddings"],
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    return settings | {key: scaling.get(key) or default for key, default in defaults.items()}
