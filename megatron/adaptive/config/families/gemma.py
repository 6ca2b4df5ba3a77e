"""Describes the text models Gemma 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.adaptive.config.families.config_keys import TANH, Settings
from megatron.adaptive.config.families.llama import Llama
from megatron.adaptive.config.families.refusals import Verdict
from megatron.adaptive.config.families.weight_names import ATTENTION, GATED


def _activation(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict:
    return Verdict(value is None or value in TANH, "another activation", " or ".join(TANH))


def _old_activation(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict:
    # Gemma's files contain "gelu" under the old key hidden_act, although the models use the
    # approximation of GELU with a hyperbolic tangent.
    supported = ("gelu", *TANH)
    return Verdict(
        value is None or value in supported, "another activation", " or ".join(supported)
    )


class Gemma(Llama):
    """Describes Gemma 1, with scaled embeddings, a GELU gate, and norm weights relative to 1."""

    model_types = ("gemma",)
    settings = {
        "geglu": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "apply_layernorm_1p": True,
        "scale_embeddings": True,
    }
    defaults = {
        **Llama.defaults,
        "tie_word_embeddings": True,
        "head_dim": 256,
        "num_key_value_heads": 16,
        "hidden_act": "gelu",
    }
    refuse = {
        **Llama.refuse,
        "hidden_act": _old_activation,
        "activation_function": _activation,
        "hidden_activation": _activation,
    }


# Values for keys that are absent from a config.json of Gemma 2 or 3.
_DEFAULTS: Mapping[str, Any] = {
    **Llama.defaults,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}


class Gemma2(Gemma):
    """Describes Gemma 2, with soft caps, sliding windows, and extra norms after both blocks."""

    model_types = ("gemma2",)
    settings = {**Gemma.settings, "norm_block_outputs": True}
    defaults = {**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    window_period = 2
    keys = {
        "softmax_scale": ("query_pre_attn_scalar",),
        "logit_softcap": ("final_logit_softcapping",),
        "attention_softcap": ("attn_logit_softcapping",),
    }
    layer_weights = {
        **ATTENTION,
        **GATED,
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }

    def adjust(self, config: Mapping[str, Any], settings: Settings) -> None:
        """Sets ``softmax_scale`` to 1 / sqrt(n), where n is ``query_pre_attn_scalar``."""
        if "softmax_scale" in settings:
            settings["softmax_scale"] **= -0.5


class Gemma3Text(Gemma2):
    """Describes Gemma 3 for text, with query and key norms, and a rotary base for windows."""

    model_types = ("gemma3_text",)
    settings = {**Gemma2.settings, "qk_layernorm": True}
    defaults = {**_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    window_period = 6
    keys = {
        "softmax_scale": ("query_pre_attn_scalar",),
        "logit_softcap": ("final_logit_softcapping",),
        "window_rotary_base": ("rope_local_base_freq",),
    }

    def adjust(self, config: Mapping[str, Any], settings: Settings) -> None:
        """Adjusts settings as for Gemma 2. Removes the rotary base for windows without windows."""
        super().adjust(config, settings)
        if "window_size" not in settings:
            settings.pop("window_rotary_base", None)
