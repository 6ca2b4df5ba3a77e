"""Describes Llama 2 and 3. Other families with similar layers are derived from this one."""

from __future__ import annotations

from typing import ClassVar

from megatron.adaptive.config.families.base_family import Family
from megatron.adaptive.config.families.weight_names import ATTENTION, GATED, NORMS, OUTER


class Llama(Family):
    """Describes Llama 2 and 3."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)
    settings = {
        "swiglu": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": "rope",
    }
    defaults = {"rms_norm_eps": 1e-6}
    layer_weights = {**ATTENTION, **GATED, **NORMS}
    outer_weights = OUTER
