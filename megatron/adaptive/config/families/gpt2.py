"""Describes GPT-2."""

from __future__ import annotations

from megatron.adaptive.config.families.base_family import Family


class Gpt2(Family):
    """Describes GPT-2, with learned positions, biases and transposed matrices."""

    model_types = ("gpt2",)
    defaults = {
        "tie_word_embeddings": True,
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    }
    layer_prefix = "transformer.h.{}."
    layer_weights = {
        "ln_1": "input_layernorm",
        "attn.c_attn": "self_attention.linear_qkv",
        "attn.c_proj": "self_attention.linear_proj",
        "ln_2": "pre_mlp_layernorm",
        "mlp.c_fc": "mlp.linear_fc1",
        "mlp.c_proj": "mlp.linear_fc2",
    }
    outer_weights = {
        "transformer.wte": "embedding.word_embeddings",
        "transformer.wpe": "embedding.position_embeddings",
        "transformer.ln_f": "decoder.final_layernorm",
        "lm_head": "output_layer",
    }
    is_transposed = True
