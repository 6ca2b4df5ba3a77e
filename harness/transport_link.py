"""Connects two processes by one of this project's transports, configured as for an executor."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.connect import Connector, own_endpoint
from megatron.adaptive.transport.interface import Label, Transport
from megatron.adaptive.transport.kind import Payloads
from megatron.adaptive.transport.liveness import here

LIMIT_S = 60.0
"""Maximum time in seconds to wait for a message."""
_LABEL = Label(0, Action(ActionKind.F, 0, 0))


class TransportLink:
    """Implements ``Link`` with one transport. Both processes must create this object together.

    Args:
        name: Name of the transport, such as ``shm`` (shared memory).
        rank: Rank of this process, 0 or 1.
        slot_bytes: Size in bytes of a slot, which is a buffer for one message. A message must not
            be larger than a slot.
        slots: Number of slots.
        fixed: Whether all messages have exactly the size of a slot, which makes gloo faster.
        address: Address at which the other process can reach this process.

    Attributes:
        transport: Transport that the link uses.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        *,
        slot_bytes: int,
        slots: int,
        fixed: bool = False,
        address: str = "127.0.0.1",
    ) -> None:
        settings = TransportConfig(
            transport=name, transport_slot_bytes=slot_bytes, transport_slots=slots
        )
        device = torch.device("cpu")
        endpoint = own_endpoint(
            rank, here(rank), device=device, own_gpu=False, options=settings, address=address
        )
        shape = (slot_bytes // 4,) if fixed else None
        transport = Connector(
            members=[0, 1],
            gather=_gather,
            accelerator=Accelerator(device=device, backend="gloo", name="CPU"),
            payloads=Payloads(shape=shape, dtype=torch.float32),
            describe=lambda rank: f"rank {rank}",
            timeout_s=LIMIT_S,
        ).connect(endpoint, [1 - rank], settings)
        assert transport is not None
        self.transport: Transport = transport
        self._peer = 1 - rank

    def expect(self, nbytes: int, count: int) -> None:
        """Does nothing, because these transports receive messages without preparation.

        Args:
            nbytes: Size of each expected message.
            count: Number of expected messages.
        """

    def send(self, payload: torch.Tensor) -> None:
        """Starts to send the tensor ``payload``."""
        self.transport.send(self._peer, _LABEL, payload)

    def settle(self) -> None:
        """Waits until the memory of all sent tensors may be reused."""
        self.transport.flush(LIMIT_S)

    def receive(self) -> torch.Tensor:
        """Waits for the next tensor and returns it. The tensor is valid until the next call."""
        arrival: Any = self.transport.completions.wait(time.monotonic() + LIMIT_S)
        if arrival is None:
            raise TimeoutError(f"no message arrived within {LIMIT_S:g} s")
        payload: torch.Tensor = arrival.take()
        return payload

    def close(self) -> None:
        """Closes the transport. Both processes must call this together."""
        self.transport.close()


def _gather(value: Any) -> list[Any]:
    """Gathers ``value`` from both processes, and returns the two values, ordered by rank."""
    values: list[Any] = [None, None]
    dist.all_gather_object(values, value)
    return values
