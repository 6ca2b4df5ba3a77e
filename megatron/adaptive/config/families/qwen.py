"""Describes Qwen 2, 2.5 and 3, with and without experts."""

from __future__ import annotations

from megatron.adaptive.config.families.llama import Llama
from megatron.adaptive.config.families.weight_names import ATTENTION, EXPERTS, GATED, NORMS


class Qwen2(Llama):
    """Describes Qwen 2 and 2.5, where queries, keys and values have biases."""

    model_types = ("qwen2",)
    settings = {**Llama.settings, "add_qkv_bias": True}
    defaults = {**Llama.defaults, "num_key_value_heads": 32}


class Qwen2Moe(Llama):
    """Describes Qwen 2 with experts, which only the planner accepts."""

    model_types = ("qwen2_moe",)
    settings = Qwen2.settings
    defaults = {}
    missing_feature = "a gate of the shared expert"
    nearest = "qwen3_moe"


class Qwen3(Llama):
    """Describes Qwen 3, where queries and keys are normalized."""

    model_types = ("qwen3",)
    settings = {**Llama.settings, "qk_layernorm": True}
    defaults = {**Qwen2.defaults, "head_dim": 128}


class Qwen3Moe(Qwen3):
    """Describes Qwen 3 with experts."""

    model_types = ("qwen3_moe",)
    defaults = {**Llama.defaults, "num_key_value_heads": 4, "norm_topk_prob": False}
    layer_weights = {**ATTENTION, **GATED, **EXPERTS, **NORMS}
