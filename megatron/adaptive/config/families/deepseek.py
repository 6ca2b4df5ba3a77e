"""Describes DeepSeek-V2, DeepSeek-V3, and Kimi-K2, which uses the layers and names of V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.adaptive.config.families.config_keys import (
    LATENT,
    Settings,
    kind_of_rotation,
    plain_value,
)
from megatron.adaptive.config.families.layer_settings import latent_rotation
from megatron.adaptive.config.families.llama import Llama
from megatron.adaptive.config.families.refusals import (
    Verdict,
    expert_weights_verdict,
    rotation_verdict,
)
from megatron.adaptive.config.families.weight_names import EXPERTS, GATED, NORMS


def _rotation(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict:
    is_scaled = kind_of_rotation(config) == "yarn"
    return rotation_verdict(value, config, is_scaled, "default or yarn")


def _expert_weights(value: Any, config: Mapping[str, Any], settings: Settings) -> Verdict | None:
    return expert_weights_verdict(value, settings, are_raw=True)


class _Latent(Llama):
    """Describes models with latent attention, shared experts, and groups of experts."""

    settings = {
        **Llama.settings,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "moe_router_dtype": "fp32",
    }
    needed = LATENT
    attention_keys = {"q_lora_rank": ("q_lora_rank",)}
    refuse = {**Llama.refuse, "rope_parameters": _rotation, "rope_scaling": _rotation}
    layer_weights = {
        "self_attn.q_proj": "self_attention.linear_q_proj",
        "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
        "self_attn.q_a_layernorm": "self_attention.q_layernorm",
        "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
        "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
        "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
        "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
        "self_attn.o_proj": "self_attention.linear_proj",
        **GATED,
        **EXPERTS,
        **NORMS,
    }
    predicts = True

    def adjust(self, config: Mapping[str, Any], settings: Settings) -> None:
        """Removes the setting for the router's data type if the model has no experts."""
        if not plain_value(config, "n_routed_experts"):
            del settings["moe_router_dtype"]

    def rotation(self, config: Mapping[str, Any]) -> Settings:
        """Returns the settings that scale rotary frequencies if the model uses YaRN."""
        return latent_rotation(config)


class DeepseekV2(_Latent):
    """Describes DeepSeek-V2, which weights experts by the router's probabilities."""

    model_types = ("deepseek_v2",)
    defaults = {**Llama.defaults, "q_lora_rank": 1536, "norm_topk_prob": False}
    refuse = {**_Latent.refuse, "norm_topk_prob": _expert_weights}


class DeepseekV3(_Latent):
    """Describes DeepSeek-V3, whose router adds a bias to the sigmoid of each expert's score."""

    model_types = ("deepseek_v3", "kimi_k2")
    defaults = {
        **Llama.defaults,
        "q_lora_rank": 1536,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "rope_interleave": True,
    }
