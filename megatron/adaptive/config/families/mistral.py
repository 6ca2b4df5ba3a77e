"""Describes Mistral and Mixtral."""

from __future__ import annotations

from megatron.adaptive.config.families.llama import Llama
from megatron.adaptive.config.families.weight_names import ATTENTION, NORMS


class Mistral(Llama):
    """Describes Mistral, where all layers have a sliding window."""

    model_types = ("mistral",)
    defaults = {**Llama.defaults, "num_key_value_heads": 8, "sliding_window": 4096}


class Mixtral(Llama):
    """Describes Mixtral, where all layers have experts."""

    model_types = ("mixtral",)
    defaults = {"num_key_value_heads": 8, "rope_theta": 1e6}
    layer_weights = {
        **ATTENTION,
        "block_sparse_moe.gate": "mlp.router",
        "block_sparse_moe.experts.{}.w1": "mlp.experts.experts.linear_fc1",
        "block_sparse_moe.experts.{}.w3": "mlp.experts.experts.linear_fc1",
        "block_sparse_moe.experts.{}.w2": "mlp.experts.experts.linear_fc2",
        **NORMS,
    }
