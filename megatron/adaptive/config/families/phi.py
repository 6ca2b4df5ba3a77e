"""Describes Phi 1 to 4. Only the planner accepts Phi 1 and 2."""

from __future__ import annotations

from megatron.adaptive.config.families.base_family import Family
from megatron.adaptive.config.families.llama import Llama
from megatron.adaptive.config.families.weight_names import NORMS


class Phi(Family):
    """Describes Phi 1 and 2."""

    model_types = ("phi",)
    settings = {"position_embedding_type": "rope"}
    missing_feature = "a single norm for both blocks of a layer"
    nearest = "phi3"


class Phi3(Llama):
    """Describes Phi 3 and 4, which combine Q, K and V in one matrix, and gate and up in another."""

    model_types = ("phi3",)
    defaults = {}
    layer_weights = {
        "self_attn.o_proj": "self_attention.linear_proj",
        "self_attn.qkv_proj": "self_attention.linear_qkv",
        "mlp.gate_up_proj": "mlp.linear_fc1",
        "mlp.down_proj": "mlp.linear_fc2",
        **NORMS,
    }
