"""Hides differences between the supported releases of megatron-core."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import package_info, parallel_state, utils
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron.adaptive.errors import SetupError

_OLDEST_WITH_MUON = (0, 18)
"""Oldest release of megatron-core in which ``get_megatron_optimizer`` also builds muon."""


def part_of_context_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of each sequence in ``batch`` that belongs to this context-parallel rank.

    Args:
        batch: Tensors, keyed by name. The sequence is dimension 1, except in ``attention_mask``,
            where it is dimension 2.
    """
    split = utils.get_batch_on_this_cp_rank
    # Pass the group explicitly: since megatron-core 0.18, the default is the group of all ranks.
    options: dict[str, Any] = {"cp_group": parallel_state.get_context_parallel_group()}
    # Only megatron-core 0.18 has this argument.
    if "is_hybrid_cp" in inspect.signature(split).parameters:
        options["is_hybrid_cp"] = False
    part: dict[str, Any] = split(batch, **options)
    return part


def take_prediction_losses() -> torch.Tensor | None:
    """Returns the summed losses of multi-token prediction, and removes them from megatron-core.

    Returns:
        Loss of each prediction layer, summed over the microbatches of a step, or ``None`` if no
        prediction layer has run since the last call.
    """
    tracker = MTPLossLoggingHelper.tracker
    # Since 0.19, megatron-core uses other keys, and also counts correct predictions.
    sums: torch.Tensor | None = tracker.pop("values", None)
    later: list[torch.Tensor | None] = [
        tracker.pop(f"{name}_values", None) for name in ("loss", "correct", "total")
    ]
    return later[0] if sums is None else sums


def number_in_model(layer: Any) -> int:
    """Returns the number of ``layer``, counted from 1 over the whole model.

    Args:
        layer: Transformer layer of megatron-core. Multi-token prediction layers, which
            megatron-core numbers separately since 0.17, follow after all other layers.
    """
    before = layer.config.num_layers if getattr(layer, "is_mtp_layer", False) else 0
    number: int = before + layer.layer_number
    return number


def require_muon() -> None:
    """Checks that megatron-core can build the muon optimizer.

    Raises:
        SetupError: If megatron-core is too old, or the package that implements muon cannot be used.
    """
    if (package_info.MAJOR, package_info.MINOR) < _OLDEST_WITH_MUON:
        raise SetupError(
            "--optimizer muon requires megatron-core 0.18 or newer, but "
            f"{package_info.__version__} is installed; upgrade megatron-core, or use adam"
        )
    emerging = importlib.import_module("megatron.core.optimizer.emerging_optimizers")
    if not emerging.HAVE_EMERGING_OPTIMIZERS:
        raise SetupError(
            "--optimizer muon requires the package emerging-optimizers; install "
            "emerging-optimizers>=0.2,<1 with Python 3.12 or newer, or use adam"
        )


def balancing_losses() -> Mapping[str, torch.Tensor]:
    """Returns the load-balancing losses of experts, summed up since the last reset.

    Returns:
        Loss of each layer ``[layers]``, keyed by megatron-core's name for the kind of loss.
    """
    tracker = _balancing_tracker()
    if isinstance(tracker, dict):
        return {name: entry["values"] for name, entry in tracker.items()}
    return {name: entry.values for name, entry in tracker.metrics.items()}


def reset_balancing_losses() -> None:
    """Sets the load-balancing losses of experts to zero."""
    for values in balancing_losses().values():
        values.zero_()


def forget_balancing_losses() -> None:
    """Removes all stored load-balancing losses. Call this before running a larger model."""
    tracker = _balancing_tracker()
    (tracker if isinstance(tracker, dict) else tracker.metrics).clear()


def _balancing_tracker() -> Any:
    """Returns megatron-core's global object that stores the load-balancing losses of experts.

    The object is a dictionary in releases up to 0.17. Since 0.18 it has a class of its own, and
    ``get_moe_layer_wise_logging_tracker`` prints a warning and returns only a dictionary copy.
    """
    make = getattr(moe_utils, "get_moe_metrics_tracker", None)
    return moe_utils.get_moe_layer_wise_logging_tracker() if make is None else make()
