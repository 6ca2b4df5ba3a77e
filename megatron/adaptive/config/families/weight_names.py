"""Maps module names in Hugging Face files to names in megatron-core, for several families."""

from __future__ import annotations

from collections.abc import Mapping

ATTENTION: Mapping[str, str] = {
    "self_attn.q_proj": "self_attention.linear_qkv",
    "self_attn.k_proj": "self_attention.linear_qkv",
    "self_attn.v_proj": "self_attention.linear_qkv",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
}
"""Modules of an attention block with separate matrices for queries, keys and values."""
GATED: Mapping[str, str] = {
    "mlp.gate_proj": "mlp.linear_fc1",
    "mlp.up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
}
"""Modules of a gated feed-forward block: Hugging Face names, mapped to megatron-core's names."""
EXPERTS: Mapping[str, str] = {
    "mlp.gate": "mlp.router",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.experts.{}.gate_proj": "mlp.experts.experts.linear_fc1",
    "mlp.experts.{}.up_proj": "mlp.experts.experts.linear_fc1",
    "mlp.experts.{}.down_proj": "mlp.experts.experts.linear_fc2",
    "mlp.shared_experts.gate_proj": "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.up_proj": "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
}
"""Modules of the router, of gated experts and of shared experts."""
NORMS: Mapping[str, str] = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
}
"""Norms before attention and before the feed-forward block."""
OUTER: Mapping[str, str] = {
    "model.embed_tokens": "embedding.word_embeddings",
    "model.norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
}
"""Modules outside the layers."""
PREDICTION: Mapping[str, str] = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "shared_head.norm": "final_layernorm",
}
"""Modules that only multi-token prediction layers have."""
