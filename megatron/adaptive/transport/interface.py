"""Defines what every transport offers to the pipeline executor.

A transport connects one pipeline rank with its neighbours. Messages between two ranks keep their
order; messages of different peers meet in one completion queue, in the order of their arrival.
Sending never waits for the peer's work: where the peer has no room, the message waits by itself.

::

    executor A                                         executor B
      send(peer, label, tensor) ──> channel A→B ──┐
                                                  ├──> completions.wait() -> Arrival | Notice, or
      executor C ──────────────── channel C→B ────┤                raises what ended a channel
                                  other threads ──┘

Two queues share one interface: :class:`CompletionQueue` here, in Python, and ``NativeQueue`` of
``native.py``, whose items come out of the C++ extension. Which transport connects which pair is
decided in ``select.py`` from both ends' :class:`Endpoint`, and made in ``connect.py``. What a
message says about itself is in ``header.py``.
"""

from __future__ import annotations

import json
import math
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from megatron.adaptive.config.outside import parse_json
from megatron.adaptive.errors import TransportError
from megatron.adaptive.transport.header import HEADER_WORDS, Header, Label

__all__ = [
    "HEADER_WORDS",
    "Arrival",
    "CompletionQueue",
    "Completions",
    "Endpoint",
    "Header",
    "HeldArrival",
    "Item",
    "Label",
    "Notice",
    "Transport",
    "delivered",
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
            given = parse_json(text)
            given["ports"] = tuple(given["ports"])
            given["cpus"] = tuple(given["cpus"])
            return cls(**given)
        except (ValueError, TypeError, KeyError) as error:
            raise TransportError(
                f"{str(text)[:80]!r} is no endpoint of a rank ({error}): do all ranks run the "
                "same version?"
            ) from None


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

    def reserve(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor to compute a payload for ``peer`` into.

        It lies in the channel's own memory where there is room, else in ordinary memory; sending
        it, or a view that begins at its first element, works either way. From the channel's memory
        it goes out without a copy and belongs to the peer from then on: do not write to it.
        Dropping it unsent gives the memory back.
        """

    def describe_links(self) -> dict[int, dict[str, Any]]:
        """Return what is known of the channel to each peer, ``kind`` at least."""

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent has left this process.

        Raises:
            DeadlineError: not within ``timeout_s``.
        """

    def close(self) -> None:
        """Notify the peers, drain the channels and stop the threads. Idempotent."""


class Arrival:
    """One message that has arrived.

    Attributes:
        label: what it is.
        peer: global rank of the sender.
        nbytes: size of the payload.
        arrived_ns: when the receive was complete, on ``time.monotonic_ns``; ``None`` where no
            thread sees that happen, as in memory that the peer writes by itself.
    """

    # None of its own: what the C++ extension makes is an arrival too.
    __slots__ = ()

    label: Label
    peer: int
    nbytes: int
    arrived_ns: int | None

    def take(self) -> torch.Tensor:
        """Return the payload; the caller owns it. Call once, in the order of arrival."""
        raise NotImplementedError


class HeldArrival(Arrival):
    """An arrival whose payload ``take`` returns."""

    __slots__ = ("_take", "arrived_ns", "label", "nbytes", "peer")

    def __init__(
        self,
        label: Label,
        peer: int,
        nbytes: int,
        take: Callable[[], torch.Tensor],
        arrived_ns: int | None = None,
    ) -> None:
        self.label = label
        self.peer = peer
        self.nbytes = nbytes
        self.arrived_ns = arrived_ns
        self._take = take

    def take(self) -> torch.Tensor:
        """Implements :class:`Arrival`."""
        return self._take()


@dataclass(frozen=True, slots=True)
class Notice:
    """Word of another member of the decision group that a message has arrived there.

    Attributes:
        label: what has arrived.
        peer: global rank of the member.
    """

    label: Label
    peer: int


Item = Arrival | Notice
"""An item that an executor takes out of a queue."""

Listener = Callable[[Item | Exception], None]


class Completions(Protocol):
    """Arrivals and failures of all channels of a process, in the order they happened.

    Any thread may put, one thread takes. Waiting releases the GIL and never polls.
    """

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with each item from now on, right after it can be taken.

        It runs in another thread than the one that takes, so that others hear of the item even
        while that one is busy. One listener; it must raise nothing.
        """

    def put(self, item: Item | Exception) -> None:
        """Add an arrival, or the error that ended a channel."""

    def poll(self) -> Item | None:
        """Return the oldest item, ``None`` if there is none now.

        Raises:
            TransportError: a channel failed.
        """

    def wait(self, deadline_s: float) -> Item | None:
        """Return the oldest item, waiting for one until ``deadline_s`` of ``time.monotonic``.

        Returns:
            ``None`` when the deadline passed.

        Raises:
            TransportError: a channel failed.
        """


class CompletionQueue:
    """The queue in Python; see :class:`Completions`. Its listener runs in the thread that puts."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item | Exception] = queue.SimpleQueue()
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        """Implements :class:`Completions`."""
        self._listener = listener

    def put(self, item: Item | Exception) -> None:
        """Implements :class:`Completions`."""
        self._queue.put(item)
        if self._listener is not None:
            self._listener(item)

    def poll(self) -> Item | None:
        """Implements :class:`Completions`."""
        return self.wait(-math.inf)

    def wait(self, deadline_s: float) -> Item | None:
        """Implements :class:`Completions`."""
        try:
            item = self._queue.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            return None
        return delivered(item)


def delivered(item: Item | Exception) -> Item:
    """Return an item as it leaves a queue: the error that ended a channel is raised."""
    if isinstance(item, Exception):
        raise item
    return item
