"""The transports of this project as connectors, through their public interface and below it.

``shm``, ``tcp``, ``rdma`` and ``gloo transport`` are what the executor uses, by ``Connector``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.errors import DeadlineError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.connect import Connector, Payloads, own_endpoint
from megatron.adaptive.transport.interface import Label, Transport
from megatron.adaptive.transport.liveness import here

from .connectors import half_of

LIMIT_S = 60.0
_LONG_S = 3600.0
_LABEL = Label(0, Action(ActionKind.F, 0, 0))
_BYTES = torch.uint8


def gather(value: Any) -> list[Any]:
    """What every rank of the pair passed."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def open_transport(name: str, rank: int, options: dict[str, Any]) -> Transport:
    """Make the transport that an executor would get. Collective.

    Args:
        name: see the module.
        rank: 0 or 1.
        options: ``slot_bytes`` and ``slots``; ``address`` where it is not loopback; ``fixed`` where
            all messages have the size of a slot, which gloo gains from.
    """
    settings = TransportConfig(
        transport=name.split()[0],
        transport_slot_bytes=options.get("slot_bytes"),
        transport_slots=options.get("slots"),
        rdma_device=options.get("device"),
        rdma_queue_pairs=options.get("num_qps", 1),
    )
    own = own_endpoint(
        rank,
        here(rank),
        device=torch.device("cpu"),
        own_gpu=False,
        options=settings,
        address=options.get("address", "127.0.0.1"),
    )
    nbytes = options.get("slot_bytes") if options.get("fixed") else None
    made = Connector(
        members=[0, 1],
        gather=gather,
        accelerator=Accelerator(device=torch.device("cpu"), backend="gloo", name="CPU"),
        payloads=Payloads(shape=None if nbytes is None else (nbytes // 4,), dtype=torch.float32),
        describe=lambda rank: f"rank {rank}",
        timeout_s=LIMIT_S,
    ).connect(own, [1 - rank], settings)
    assert made is not None
    return made


class TransportConnector:
    """A :class:`~megatron.adaptive.transport.interface.Transport` of two ranks.

    Attributes:
        transport: it.
    """

    def __init__(self, rank: int, transport: Transport) -> None:
        self.transport = transport
        self._rank = rank
        self._peer = 1 - rank
        self._never_s = time.monotonic() + _LONG_S

    def expect(self, nbytes: int, count: int) -> None:
        """Nothing: messages come unasked."""

    def send(self, payload: torch.Tensor) -> None:
        """See :class:`~.connectors.Connector`."""
        self.transport.send(self._peer, _LABEL, payload)

    def settle(self, under_way: int = 0) -> None:
        """See :class:`~.connectors.Connector`; always waits for all."""
        self.transport.flush(LIMIT_S)

    def receive(self) -> torch.Tensor:
        """See :class:`~.connectors.Connector`."""
        arrival: Any = self.transport.completions.wait(time.monotonic() + LIMIT_S)
        if arrival is None:
            raise DeadlineError(f"nothing arrived within {LIMIT_S:g} s")
        payload: torch.Tensor = arrival.take()
        return payload

    def half_round_trip_s(self, payload: torch.Tensor, rounds: int) -> float:
        """See :class:`~.connectors.Connector`."""
        send, wait, peer = self.transport.send, self.transport.completions.wait, self._peer
        deadline_s = time.monotonic() + LIMIT_S
        return half_of(
            self._rank,
            lambda: send(peer, _LABEL, payload),
            lambda: wait(deadline_s).take(),  # type: ignore[union-attr]
            rounds,
        )

    def round_trip(self, payload: torch.Tensor) -> None:
        """Send a message and wait for the answer; on rank 1 the other way round."""
        if not self._rank:
            self.transport.send(self._peer, _LABEL, payload)
        arrival: Any = self.transport.completions.wait(self._never_s)
        arrival.take()
        if self._rank:
            self.transport.send(self._peer, _LABEL, payload)

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Memory of the channel to write the next payload into; :meth:`send` passes it on."""
        return self.transport.reserve(self._peer, (nbytes,), _BYTES)

    def hand_over(self, nbytes: int, rounds: int) -> list[float]:
        """Hand reserved memory over, one after the other.

        Returns:
            On rank 0 the moments before each was reserved, on rank 1 those when each was there as
            a tensor; both on the machine's clock.
        """
        transport, peer, wait = self.transport, self._peer, self.transport.completions.wait
        deadline_s = time.monotonic() + LIMIT_S
        shape, answer = (nbytes,), torch.zeros(1, dtype=_BYTES)

        def there() -> float:
            start = time.monotonic()
            transport.send(peer, _LABEL, transport.reserve(peer, shape, _BYTES))
            wait(deadline_s)  # until it has been dropped: none shall queue
            return start

        def back() -> float:
            payload = wait(deadline_s).take()  # type: ignore[union-attr]
            end = time.monotonic()
            del payload
            transport.send(peer, _LABEL, answer)
            return end

        step = back if self._rank else there
        return [step() for _ in range(rounds)]

    def close(self) -> None:
        """See :class:`~.connectors.Connector`."""
        self.transport.close()
