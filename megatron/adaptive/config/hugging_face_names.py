"""Maps the names of megatron-core's modules to the names in Hugging Face models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class FamilyNames(NamedTuple):
    """Holds the module names that Hugging Face models of a family have.

    Attributes:
        inside: Hugging Face names of a layer's modules, by the name in megatron-core and in the
            order of the model. A list has a single name if both modules have the same matrix. It
            has several names if megatron-core stacks these matrices by rows.
        outside: Hugging Face names of the modules outside of layers, by the name in megatron-core.
        layer: Prefix of the names of a layer's modules, with ``{}`` for the number of the layer.
        predicts: Whether layers for multi-token prediction may follow the other layers.
        turned: Whether matrices of linear layers are transposed, that is, stored as
            ``[inputs, outputs]``.
        grouped: Whether the rows of queries, keys and values alternate by groups of heads, as in
            megatron-core's matrix.
    """

    inside: Mapping[str, list[str]]
    outside: Mapping[str, list[str]]
    layer: str = "model.layers.{}."
    predicts: bool = False
    turned: bool = False
    grouped: bool = False


def _table(text: str) -> dict[str, list[str]]:
    lines = (line.partition(" = ") for line in text.strip().splitlines())
    return {core.strip(): names.split() for core, _, names in lines}


_ATTENTION = """
self_attention.linear_qkv = self_attn.q_proj self_attn.k_proj self_attn.v_proj
self_attention.linear_proj = self_attn.o_proj
self_attention.q_layernorm = self_attn.q_norm
self_attention.k_layernorm = self_attn.k_norm
"""
_LATENT_NAMES = """
self_attention.linear_q_proj = self_attn.q_proj
self_attention.linear_q_down_proj = self_attn.q_a_proj
self_attention.q_layernorm = self_attn.q_a_layernorm
self_attention.linear_q_up_proj = self_attn.q_b_proj
self_attention.linear_kv_down_proj = self_attn.kv_a_proj_with_mqa
self_attention.kv_layernorm = self_attn.kv_a_layernorm
self_attention.linear_kv_up_proj = self_attn.kv_b_proj
self_attention.linear_proj = self_attn.o_proj
"""
_DENSE = """
mlp.linear_fc1 = mlp.gate_proj mlp.up_proj
mlp.linear_fc2 = mlp.down_proj
"""
_NORMS = """
input_layernorm = input_layernorm
pre_mlp_layernorm = post_attention_layernorm
"""
_FOUR_NORMS = """
input_layernorm = input_layernorm
post_attention_layernorm = post_attention_layernorm
pre_mlp_layernorm = pre_feedforward_layernorm
post_mlp_layernorm = post_feedforward_layernorm
"""
_EXPERTS = """
mlp.router = mlp.gate
mlp.router.expert_bias = mlp.gate.e_score_correction_bias
mlp.experts.experts.linear_fc1 = mlp.experts.{}.gate_proj mlp.experts.{}.up_proj
mlp.experts.experts.linear_fc2 = mlp.experts.{}.down_proj
mlp.shared_experts.linear_fc1 = mlp.shared_experts.gate_proj mlp.shared_experts.up_proj
mlp.shared_experts.linear_fc2 = mlp.shared_experts.down_proj
"""
_MIXTRAL = """
mlp.router = block_sparse_moe.gate
mlp.experts.experts.linear_fc1 = block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3
mlp.experts.experts.linear_fc2 = block_sparse_moe.experts.{}.w2
"""
_PHI = """
self_attention.linear_proj = self_attn.o_proj
self_attention.linear_qkv = self_attn.qkv_proj
mlp.linear_fc1 = mlp.gate_up_proj
mlp.linear_fc2 = mlp.down_proj
"""
PREDICTION = _table("""
enorm = enorm
hnorm = hnorm
eh_proj = eh_proj
final_layernorm = shared_head.norm
""")
_GPT_2_NAMES = """
input_layernorm = ln_1
self_attention.linear_qkv = attn.c_attn
self_attention.linear_proj = attn.c_proj
pre_mlp_layernorm = ln_2
mlp.linear_fc1 = mlp.c_fc
mlp.linear_fc2 = mlp.c_proj
"""
_NEOX = """
self_attention.linear_qkv = attention.query_key_value
self_attention.linear_proj = attention.dense
mlp.linear_fc1 = mlp.dense_h_to_4h
mlp.linear_fc2 = mlp.dense_4h_to_h
"""
_OUTSIDE = _table("""
embedding.word_embeddings = model.embed_tokens
decoder.final_layernorm = model.norm
output_layer = lm_head
""")
_GPT_2_OUTSIDE = _table("""
embedding.word_embeddings = transformer.wte
embedding.position_embeddings = transformer.wpe
decoder.final_layernorm = transformer.ln_f
output_layer = lm_head
""")
_NEOX_OUTSIDE = _table("""
embedding.word_embeddings = gpt_neox.embed_in
decoder.final_layernorm = gpt_neox.final_layer_norm
output_layer = embed_out
""")
_LLAMA = FamilyNames(_table(_ATTENTION + _DENSE + _NORMS), _OUTSIDE)
_DEEPSEEK = FamilyNames(_table(_LATENT_NAMES + _DENSE + _EXPERTS + _NORMS), _OUTSIDE, predicts=True)
NAMES: Mapping[str, FamilyNames] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _DEEPSEEK),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), _LLAMA),
    **dict.fromkeys(
        ("gemma2", "gemma3_text"), FamilyNames(_table(_ATTENTION + _DENSE + _FOUR_NORMS), _OUTSIDE)
    ),
    "mixtral": FamilyNames(_table(_ATTENTION + _MIXTRAL + _NORMS), _OUTSIDE),
    "qwen3_moe": FamilyNames(_table(_ATTENTION + _DENSE + _EXPERTS + _NORMS), _OUTSIDE),
    "phi3": FamilyNames(_table(_PHI + _NORMS), _OUTSIDE),
    "gpt2": FamilyNames(_table(_GPT_2_NAMES), _GPT_2_OUTSIDE, "transformer.h.{}.", turned=True),
    "gpt_neox": FamilyNames(
        _table(_NORMS + _NEOX), _NEOX_OUTSIDE, "gpt_neox.layers.{}.", grouped=True
    ),
}
