"""Queues what peers send, for the executor to wait on: one queue per process, for all channels.

::

    channel A→B ──┐
    channel C→B ──┼──> Completions.wait() -> Arrival | Notice, or raises what ended a channel
    other threads ┘

Two queues share one interface: :class:`CompletionQueue` here, in Python, and ``NativeQueue`` of
``native.py``, whose items come out of the C++ extension.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.adaptive.transport.header import Label

__all__ = [
    "Arrival",
    "CompletionQueue",
    "Completions",
    "HeldArrival",
    "Item",
    "Notice",
    "delivered",
]


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
    """Word of another member of the tensor-parallel group that a message has arrived there.

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
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return None
        return delivered(item)

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
