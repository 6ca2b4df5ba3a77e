"""Connects a rank with its neighbours in the pipeline."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.config.schedule import KEEPING_ALL
from megatron.adaptive.engine.build import build_executor, inputs_in_flight
from megatron.adaptive.modules.mesh import Mesh
from megatron.adaptive.modules.orders import Orders

__all__ = ["connect"]

_LEAST_SLOT_BYTES = 4096


def connect(
    orders: Orders,
    mesh: Mesh,
    transport: TransportConfig,
    *,
    largest_message: int,
    recorder: Any,
    timeout_s: float,
) -> Any:
    """Return the executor with its channels. Collective over all ranks.

    Args:
        orders: of this rank.
        mesh: the job.
        transport: how neighbours are connected.
        largest_message: bytes of the largest between two stages.
        recorder: of the trace, ``None`` for none.
        timeout_s: limit of every wait for another process.
    """
    if transport.transport_slot_bytes is None:
        size = max(_LEAST_SLOT_BYTES, largest_message)
        transport = dataclasses.replace(transport, transport_slot_bytes=size)
    placement = orders.placement
    return build_executor(
        placement=placement,
        accelerator=mesh.accelerator,
        places=mesh.places,
        payload_shape=None,
        payload_dtype=torch.float32,
        timeout_s=timeout_s,
        recorder=recorder,
        transport=transport,
        in_flight=inputs_in_flight(
            placement,
            4 * placement.num_ranks,
            cap=orders.cap,
            keeps_all=orders.schedule in KEEPING_ALL,
        ),
    )
