"""Describes GPT-NeoX and Pythia."""

from __future__ import annotations

from megatron.adaptive.config.families.base_family import Family
from megatron.adaptive.config.families.weight_names import NORMS


class GptNeox(Family):
    """Describes GPT-NeoX, where attention and the feed-forward block both read the layer's input.

    The rotary embedding rotates only a part of each head.
    """

    model_types = ("gpt_neox",)
    settings = {"position_embedding_type": "rope"}
    defaults = {"rotary_pct": 0.25, "use_parallel_residual": True}
    layer_prefix = "gpt_neox.layers.{}."
    layer_weights = {
        **NORMS,
        "attention.query_key_value": "self_attention.linear_qkv",
        "attention.dense": "self_attention.linear_proj",
        "mlp.dense_h_to_4h": "mlp.linear_fc1",
        "mlp.dense_4h_to_h": "mlp.linear_fc2",
    }
    outer_weights = {
        "gpt_neox.embed_in": "embedding.word_embeddings",
        "gpt_neox.final_layer_norm": "decoder.final_layernorm",
        "embed_out": "output_layer",
    }
    is_grouped = True
