"""Defines what every transport offers to the pipeline executor.

A transport connects one pipeline rank with its neighbours. Messages between two ranks keep their
order; messages of different peers meet in one completion queue, in the order of their arrival.
Sending never waits for the peer's work: where the peer has no room, the message waits by itself.

::

    executor A                                         executor B
      send(peer, label, tensor) ──> channel A→B ──┐
                                                  ├──> completions.wait() -> Arrival
      executor C ──────────────── channel C→B ────┘

Which transport connects which pair is decided in ``select.py`` from both ends' :class:`Endpoint`,
and made in ``connect.py``. What a message says about itself is in ``header.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from megatron.adaptive.errors import TransportError
from megatron.adaptive.transport.completions import (
    Arrival,
    CompletionQueue,
    Completions,
    HeldArrival,
    Item,
    Notice,
)
from megatron.adaptive.transport.header import HEADER_WORDS, Header, Label

__all__ = [
    "HEADER_WORDS",
    "Arrival",
    "Channel",
    "CompletionQueue",
    "Completions",
    "DirectChannel",
    "Endpoint",
    "Header",
    "HeldArrival",
    "Item",
    "Label",
    "Notice",
    "Transport",
]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One rank as others see it: where it is, what it can do, where it listens.

    Attributes:
        rank: global rank.
        host: name of its host, for messages.
        machine: shows whether two ranks can see each other's processes; see ``liveness.here``.
        user: numeric user id.
        device: type of its device, ``cpu`` or ``cuda``.
        addresses: where it can be reached, by kind of link: ``unix``, ``tcp``.
        cpus: numbers of the processors it may run on; none where that is not known.
        ports: its active RDMA ports, such as ``mlx5_0:1``.
        lacks: why it cannot take part in a transport, by the transport's name.
    """

    rank: int
    host: str
    machine: str
    user: int
    device: str = "cpu"
    addresses: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    ports: tuple[str, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)

    def shares_cpus(self, other: Endpoint) -> bool:
        """Whether both may run on the same processor of one machine."""
        if self.machine != other.machine:
            return False
        return not (self.cpus and other.cpus) or not set(self.cpus).isdisjoint(other.cpus)

    def encode(self) -> str:
        """Return the endpoint as text, to be published through a store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Endpoint:
        """Read what :meth:`encode` made on another rank.

        Raises:
            TransportError: the text is something else.
        """
        try:
            given = json.loads(text)
            given["ports"] = tuple(given["ports"])
            given["cpus"] = tuple(given["cpus"])
            return cls(**given)
        except (ValueError, TypeError, KeyError) as error:
            raise TransportError(
                f"{str(text)[:80]!r} is no endpoint of a rank ({error}): do all ranks run the "
                "same version?"
            ) from None


class Channel(Protocol):
    """A directed connection: one writer, messages in order. One thread uses it."""

    peer: int

    def send(self, tag: Label, tensor: torch.Tensor) -> None:
        """Start sending ``tensor`` and return at once; see :meth:`Transport.send`.

        A tensor that :meth:`reserve` gave goes out without a copy, also as a view that begins at
        its first element. It belongs to the peer from then on: do not write to it.
        """

    def reserve(self, tag: Label, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor to compute a payload into, to be sent under ``tag``.

        It lies in the channel's own memory where there is room, else in ordinary memory; sending
        it works either way. Dropping it unsent gives the memory back.
        """

    def close(self) -> None:
        """Say that nothing more comes, after what is under way. Idempotent."""


class Transport(Protocol):
    """The channels of one rank. Only the executor's thread calls it."""

    name: str

    @property
    def completions(self) -> Completions:
        """Returns the queue of messages and failures of all channels."""

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """Start sending ``tensor`` to global rank ``peer`` and return at once.

        The transport keeps the storage alive until it is sent; the caller may drop or replace
        ``tensor.data`` afterwards but must not write to its memory.

        Raises:
            PeerLostError: the peer is gone.
        """

    def channel(self, peer: int) -> Channel:
        """Return the channel to global rank ``peer``."""

    def describe_links(self) -> dict[int, dict[str, Any]]:
        """Return what is known of the channel to each peer, ``kind`` at least."""

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent has left this process.

        Raises:
            DeadlineError: not within ``timeout_s``.
        """

    def close(self) -> None:
        """Notify the peers, drain the channels and stop the threads. Idempotent."""


class DirectChannel:
    """A channel of a transport that has no memory of its own to reserve."""

    def __init__(self, transport: Transport, peer: int) -> None:
        self.peer = peer
        self._transport = transport
        self._is_closed = False

    def send(self, tag: Label, tensor: torch.Tensor) -> None:
        """Implements :class:`Channel`."""
        if self._is_closed:
            raise TransportError(f"the channel to rank {self.peer} is closed: send before close()")
        self._transport.send(self.peer, tag, tensor)

    def reserve(self, tag: Label, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Implements :class:`Channel`."""
        return torch.empty(shape, dtype=dtype)

    def close(self) -> None:
        """Implements :class:`Channel`; the peer is notified when the transport closes."""
        self._is_closed = True
