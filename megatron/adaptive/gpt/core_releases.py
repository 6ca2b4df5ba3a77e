"""Calls functions of megatron-core whose arguments differ between the supported releases."""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core import parallel_state, utils


def part_of_context_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns this context-parallel rank's part of each sequence in a batch.

    Args:
        batch: Tensors by name, with the sequence along axis 1 (``attention_mask``: axis 2).
    """
    split = utils.get_batch_on_this_cp_rank
    # Pass the group explicitly: from 0.18 on, the default is the group of all ranks.
    options: dict[str, Any] = {"cp_group": parallel_state.get_context_parallel_group()}
    if "is_hybrid_cp" in inspect.signature(split).parameters:  # megatron-core 0.18 has it
        options["is_hybrid_cp"] = False
    part: dict[str, Any] = split(batch, **options)
    return part


def number_in_model(layer: Any) -> int:
    """Returns the number of a transformer layer, from 1; prediction layers follow all others.

    Args:
        layer: Transformer layer of megatron-core. From 0.17 on, megatron-core numbers multi-token
            prediction layers separately.
    """
    before = layer.config.num_layers if getattr(layer, "is_mtp_layer", False) else 0
    number: int = before + layer.layer_number
    return number
