"""What each layer takes on one type of node: seconds and bytes of one microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.adaptive.planner import memory
from megatron.adaptive.planner.cluster import NodeType
from megatron.adaptive.planner.communication import all_reduce_s
from megatron.adaptive.planner.model import LayerKind, Model
from megatron.adaptive.planner.profile import Profile

__all__ = ["LayerTable", "layer_table", "optimizer_s"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTable:
    """Every layer of the model as one GPU of one replica has it; arrays ``[layers] float64``.

    Attributes:
        forward_s: of one microbatch, tensor-parallel communication included.
        backward_s: gradient by the inputs, recompute included.
        weight_s: gradient by the weights; 0 where the profile has both in one.
        launch_s: part of ``forward_s``, and as much of ``backward_s``, that needs no input.
        tp_s: communication within ``forward_s`` and ``backward_s``; 0 where the profile has it in
            its durations.
        parameters: that the GPU holds.
        kept_bytes: of one microbatch from forward to backward.
        workspace_bytes: of one microbatch while the layer runs.
        estimated: whether a duration was estimated.
    """

    forward_s: Any
    backward_s: Any
    weight_s: Any
    launch_s: Any
    tp_s: Any
    parameters: Any
    kept_bytes: Any
    workspace_bytes: Any
    estimated: bool


def layer_table(
    model: Model,
    profile: Profile,
    node: NodeType,
    *,
    tp: int,
    micro_batch: int,
    recompute: str = "none",
    sequence_parallel: bool = False,
) -> LayerTable:
    """Durations and bytes of every layer on one type of node.

    Raises:
        ConfigError: the profile lacks a duration.
    """
    rows = {
        name: _kind_row(kind, model, profile, node, tp, micro_batch, recompute, sequence_parallel)
        for name, kind in model.kinds.items()
        if name in model.layers
    }
    table = np.array([rows[name][0] for name in model.layers], dtype=np.float64).T
    return LayerTable(
        forward_s=table[0],
        backward_s=table[1],
        weight_s=table[2],
        launch_s=table[3],
        tp_s=table[4],
        parameters=table[5],
        kept_bytes=table[6],
        workspace_bytes=table[7],
        estimated=any(row[1] for row in rows.values()),
    )


def _kind_row(
    kind: LayerKind,
    model: Model,
    profile: Profile,
    node: NodeType,
    tp: int,
    micro_batch: int,
    recompute: str,
    sequence_parallel: bool,
) -> tuple[tuple[float, ...], bool]:
    times = profile.times(kind.name, node.gpu, tp, micro_batch)
    once = 0.0
    if tp > 1 and not times.tp_included and kind.tp_bytes:
        once = all_reduce_s(
            profile.intra_links.get(node.name, node.intra), kind.tp_bytes * micro_batch, tp
        )
    forward = times.forward_s + once
    backward, comm = times.backward_input_s + once, 2 * once
    if recompute == "full":
        backward += forward
        comm += once
    elif recompute == "selective" and kind.forward_flops:
        backward += times.forward_s * kind.attention_flops / kind.forward_flops
    kept = memory.layer_kept_bytes(
        kind, profile, node.gpu, tp=tp, micro_batch=micro_batch, recompute=recompute
    )
    if sequence_parallel and recompute == "none":
        kept -= kind.replicated_activation_bytes * micro_batch * (1 - 1 / tp)
    row = (
        forward,
        backward,
        times.backward_weight_s,
        min(times.launch_s, times.forward_s, times.backward_input_s),
        comm,
        kind.held_parameters(tp),
        max(kept, 0.0),
        kind.workspace_bytes * micro_batch / tp,
    )
    return row, times.source == "estimated"


def optimizer_s(
    profile: Profile, gpu: str, parameters: float, *, dp: int, distributed_optimizer: bool
) -> float:
    """Seconds of the optimizer step of one GPU; 0 where the profile does not say."""
    each = profile.optimizer_s_per_parameter.get(gpu, 0.0)
    return each * parameters / (dp if distributed_optimizer else 1)
