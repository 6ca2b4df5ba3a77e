"""Checks keys of ``config.json`` for which the trainer's layers support only some values.

The attribute ``Family.refuse`` of a family maps keys to these checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron.adaptive.config.families.config_keys import (
    TANH,
    Settings,
    kind_of_rotation,
    scaling_of,
)
from megatron.adaptive.config.families.layer_settings import scaled_rotation


class Verdict(NamedTuple):
    """Result of a check: whether the trainer supports the value of a key.

    Attributes:
        is_supported: Whether the trainer's layers support the value.
        feature: Model feature that this value requests. The error message contains it.
        nearest: Nearest supported value. The error message suggests it.
    """

    is_supported: bool
    feature: str
    nearest: str


Check = Callable[[Any, Mapping[str, Any], Settings], Verdict | None]
"""Function that checks the value of a key. It returns ``None`` if the key has no effect.

The arguments are the value of the key, the file's contents with the family's defaults, and the
settings read from the file.
"""


def only(supported: Any, feature: str) -> Check:
    """Returns a function that accepts only ``null`` and ``supported`` as the value of a key.

    Args:
        supported: Value that the trainer's layers support.
        feature: Model feature that all other values request. The error message contains it.
    """

    def check(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict:
        return Verdict(value in (None, supported), feature, str(supported).lower())

    return check


def never(feature: str) -> Check:
    """Returns a function that accepts only falsy values of a key, such as ``null``.

    Args:
        feature: Model feature that all other values request. The error message contains it.
    """

    def check(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict:
        return Verdict(not value, feature, "null, if that does not change the model")

    return check


def _activation(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict:
    supported: tuple[str, ...] = ("gelu", *TANH)
    if settings.get("swiglu"):
        supported = ("silu", "swish")
    return Verdict(value in supported, "another activation", " or ".join(supported))


def _rotation(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict:
    nearest = (
        "default, linear with an integer factor, or llama3 with low_freq_factor 1, "
        "high_freq_factor 4 and original_max_position_embeddings 8192"
    )
    return rotation_verdict(value, config, bool(scaled_rotation(config)), nearest)


def rotation_verdict(
    value: Any, config: Mapping[str, Any], is_scaled: bool, nearest: str
) -> Verdict:
    """Checks the value of a key that holds settings of the rotary embedding.

    Args:
        value: Value of the key.
        config: Contents of the file, with the family's defaults.
        is_scaled: Whether the trainer's layers support this scaling of rotary frequencies.
        nearest: Supported types of scaling. The error message lists them.
    """
    kind = kind_of_rotation(config)
    scaling = scaling_of(config)
    is_supported = not value or kind == "default" or is_scaled
    feature = f"{kind} rotation"
    if kind == "yarn" and (scaling.get("attention_factor") or scaling.get("truncate") is False):
        is_supported = False
        feature = "yarn rotation with attention_factor, or with truncate set to false"
    in_windows = (value or {}).get("sliding_attention") or {}
    is_supported = is_supported and in_windows.get("rope_type", "default") == "default"
    return Verdict(is_supported, feature, nearest)


def _attention_bias(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict:
    if settings.get("add_bias_linear", True):
        return Verdict(bool(value), "queries, keys and values without biases", "true")
    return Verdict(value in (None, False), "a bias of the output projection", "false")


def _embedding_dropout(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict:
    dropout = config.get("resid_pdrop")
    return Verdict(
        value == dropout, "a different dropout rate for embeddings", f"resid_pdrop, {dropout}"
    )


def _quantization(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict:
    nearest = "fp8 in blocks of 128 x 128, or none (dequantize the model and save it in 16 bits)"
    is_supported = not value or (
        value.get("quant_method") == "fp8"
        and value.get("weight_block_size") == [128, 128]
        and value.get("fmt", "e4m3") == "e4m3"
    )
    return Verdict(is_supported, "quantized weights", nearest)


def _second_window(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict:
    window = config.get("sliding_window")
    return Verdict(value == window, "two sizes of windows", f"sliding_window, {window}")


def _expert_weights(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict | None:
    return expert_weights_verdict(
        value, settings, are_raw=settings.get("moe_router_pre_softmax", False)
    )


def expert_weights_verdict(value: Any, settings: Settings, *, are_raw: bool) -> Verdict | None:
    """Checks whether the trainer scales the weights of the chosen experts as the file requires.

    Args:
        value: Value of the key: whether the weights are scaled to a sum of 1.
        settings: Settings read from the file.
        are_raw: Whether the trainer's layers use the weights without this scaling.
    """
    if "num_moe_experts" not in settings:
        return None
    return Verdict(
        bool(value) != are_raw,
        "a different scaling of the experts' weights",
        str(not are_raw).lower(),
    )


def _chosen_experts(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict | None:
    if settings.get("moe_router_pre_softmax"):
        return None
    return Verdict(value != 1, "a single expert whose weight is always 1", "2")


def _choice_of_experts(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict:
    is_sigmoid = config.get("scoring_func") == "sigmoid"
    supported = ("noaux_tc",) if is_sigmoid else ("greedy", "group_limited_greedy")
    return Verdict(value in supported, "another choice", supported[0])


REFUSE: Mapping[str, Check] = {
    "hidden_act": _activation,
    "activation_function": _activation,
    "hidden_activation": _activation,
    "rope_parameters": _rotation,
    "rope_scaling": _rotation,
    "attention_bias": _attention_bias,
    "mlp_bias": only(False, "a bias of the feed-forward block"),
    "scale_attn_weights": only(True, "scores that are not scaled"),
    "scale_attn_by_inverse_layer_idx": only(False, "scores that are scaled depending on the layer"),
    "rope_interleave": only(True, "rotation in a different order"),
    "moe_layer_freq": only(1, "experts in every n-th layer"),
    "use_bidirectional_attention": only(False, "attention to later tokens"),
    "router_jitter_noise": only(0.0, "noise in the router"),
    "embd_pdrop": _embedding_dropout,
    "quantization_config": _quantization,
    "sliding_window_size": _second_window,
    "norm_topk_prob": _expert_weights,
    "num_experts_per_tok": _chosen_experts,
    "topk_method": _choice_of_experts,
}
"""Checks shared by all families, keyed by the ``config.json`` key to check."""
