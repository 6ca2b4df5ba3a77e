"""What every transport offers to the pipeline executor.

A transport connects one pipeline rank with its neighbours. Messages between two ranks keep their
order; messages of different peers meet in one completion queue, in the order of their arrival.
Sending never waits for the peer's work: a receiver takes messages out of the network whether or
not its executor asks for them.

::

    executor A                                         executor B
      send(peer, label, tensor) ──> channel A→B ──┐
                                                  ├──> CompletionQueue.wait() -> Arrival
      executor C ──────────────── channel C→B ────┘
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.adaptive.errors import TransportError
from megatron.adaptive.schedule.action import Action, ActionKind

HEADER_WORDS = 16
_MAGIC = 0x4D41_5031  # "MAP1"
_MAX_DIMENSIONS = 6
_KINDS = (ActionKind.F, ActionKind.B)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_END = -1


@dataclass(frozen=True, slots=True)
class Label:
    """What a message is: the input of ``action`` in step ``step`` on the receiving rank."""

    step: int
    action: Action


@dataclass(frozen=True, slots=True)
class Header:
    """The words that travel ahead of a payload.

    Attributes:
        label: what the payload is; ``None`` says that the sender closes the channel.
        shape: shape of the payload.
        dtype: element type of the payload.
        sequence: number of the message on its channel, from 0.
    """

    label: Label | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    sequence: int

    def encode(self) -> torch.Tensor:
        """Return the header as ``[16] int64``; see :meth:`words`."""
        return torch.tensor(self.words(), dtype=torch.int64)

    def words(self) -> list[int]:
        """Return the header's 16 words.

        Raises:
            TransportError: the payload is of a type or has more dimensions than a header can say.
        """
        if self.dtype not in _DTYPES or len(self.shape) > _MAX_DIMENSIONS:
            raise TransportError(
                f"a payload of {len(self.shape)} dimensions and {self.dtype} cannot be sent; at "
                f"most {_MAX_DIMENSIONS} dimensions of {', '.join(map(str, _DTYPES))} can"
            )
        step, kind, chunk, microbatch = 0, _END, 0, 0
        if self.label is not None:
            step, action = self.label.step, self.label.action
            kind, chunk, microbatch = _KINDS.index(action.kind), action.chunk, action.microbatch
        words = [_MAGIC, self.sequence, step, kind, chunk, microbatch]
        words += [_DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return words + [0] * (HEADER_WORDS - len(words))

    @staticmethod
    def decode(words: Sequence[int], *, peer: int) -> Header:
        """Read a header that came from ``peer``; nothing in it is trusted.

        Raises:
            TransportError: a field is outside its range.
        """
        magic, sequence, step, kind, chunk, microbatch, dtype, dimensions = words[:8]
        sound = (
            magic == _MAGIC
            and kind in (_END, 0, 1)
            and 0 <= dtype < len(_DTYPES)
            and 0 <= dimensions <= _MAX_DIMENSIONS
            and all(size >= 0 for size in words[8 : 8 + dimensions])
        )
        if not sound:
            raise TransportError(
                f"header {list(words)} from rank {peer} is not one of this format; "
                "do both ranks run the same version?"
            )
        label = None if kind == _END else Label(step, Action(_KINDS[kind], chunk, microbatch))
        return Header(label, tuple(words[8 : 8 + dimensions]), _DTYPES[dtype], sequence)


class Arrival:
    """One message that has arrived.

    Attributes:
        label: what it is.
        peer: global rank of the sender.
        nbytes: size of the payload.
    """

    __slots__ = ("_take", "label", "nbytes", "peer")

    def __init__(
        self, label: Label, peer: int, nbytes: int, take: Callable[[], torch.Tensor]
    ) -> None:
        self.label = label
        self.peer = peer
        self.nbytes = nbytes
        self._take = take

    def take(self) -> torch.Tensor:
        """Return the payload; the caller owns it. Call once, in the order of arrival."""
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
"""What an executor takes out of a :class:`CompletionQueue`."""


class CompletionQueue:
    """Arrivals and failures of all channels of a process, in the order they happened.

    Any thread may put, one thread takes. Waiting releases the GIL and never polls.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item | Exception] = queue.SimpleQueue()
        self._listener: Callable[[Item | Exception], None] | None = None

    def listen(self, listener: Callable[[Item | Exception], None]) -> None:
        """Call ``listener`` with each item that is put from now on, right after it can be taken.

        It runs in the thread that puts, so that others hear of the item even while the thread that
        takes is busy. One listener; it must raise nothing.
        """
        self._listener = listener

    def put(self, item: Item | Exception) -> None:
        """Add an arrival, or the error that ended a channel."""
        self._queue.put(item)
        if self._listener is not None:
            self._listener(item)

    def poll(self) -> Item | None:
        """Return the oldest item, ``None`` if there is none now.

        Raises:
            TransportError: a channel failed.
        """
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return None
        return self._open(item)

    def wait(self, deadline_s: float) -> Item | None:
        """Return the oldest item, waiting for one until ``deadline_s`` of ``time.monotonic``.

        Returns:
            ``None`` when the deadline passed.

        Raises:
            TransportError: a channel failed.
        """
        try:
            item = self._queue.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            return None
        return self._open(item)

    @staticmethod
    def _open(item: Item | Exception) -> Item:
        if isinstance(item, Exception):
            raise item
        return item


class Transport(Protocol):
    """The channels of one rank. Only the executor's thread calls it."""

    name: str
    completions: CompletionQueue

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """Start sending ``tensor`` to global rank ``peer`` and return at once.

        The transport keeps the storage alive until it is sent; the caller may drop or replace
        ``tensor.data`` afterwards but must not write to its memory.

        Raises:
            PeerLostError: the peer is gone.
        """

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent has left this process.

        Raises:
            DeadlineError: not within ``timeout_s``.
        """

    def close(self) -> None:
        """Tell the peers, drain the channels and stop the threads. Idempotent."""
