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
decided in ``select.py`` from both ends' :class:`Endpoint`, and made in ``connect.py``.

What a message says about itself (label, shape, element type, sequence) is here too: the table of
element types, whose codes are those of ``csrc/common/message.h``, and the words that travel ahead
of a payload over gloo. The native transports write the same facts into a struct of their own.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron.adaptive.errors import TransportError
from megatron.adaptive.schedule.action import Action, ActionKind


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
        self._listener = listener

    def put(self, item: Item | Exception) -> None:
        self._queue.put(item)
        if self._listener is not None:
            self._listener(item)

    def poll(self) -> Item | None:
        return self.wait(-math.inf)

    def wait(self, deadline_s: float) -> Item | None:
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


HEADER_WORDS = 16
KINDS = (ActionKind.F, ActionKind.B)
"""Kinds of actions that take a message; the position is its code."""
KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
"""The way back."""

MAX_DIMENSIONS = 7
_MAGIC = 0x4D41_5031  # "MAP1"
_END = -1
_VARIANT_SHIFT = 8

# In the order of ElementType in message.h.
_PLAIN = (
    *("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex64", "complex128"),
)
_FLOAT8 = len(_PLAIN)
# Types that travel as another one of the same size, 8-bit floats as bytes, and are viewed again by
# the receiver: their variant is never 0. No number may ever change its meaning; names that this
# torch does not have are left out.
_VARIANTS = {
    "float8_e4m3fn": (_FLOAT8, 1),
    "float8_e5m2": (_FLOAT8, 2),
    "float8_e4m3fnuz": (_FLOAT8, 3),
    "float8_e5m2fnuz": (_FLOAT8, 4),
    "float8_e8m0fnu": (_FLOAT8, 5),
    "float4_e2m1fn_x2": (_FLOAT8, 6),
    "uint16": (_PLAIN.index("int16"), 1),
    "uint32": (_PLAIN.index("int32"), 1),
    "uint64": (_PLAIN.index("int64"), 1),
    "complex32": (_PLAIN.index("int32"), 2),
}

CODE_OF: dict[torch.dtype, tuple[int, int]] = {
    getattr(torch, name): code
    for name, code in (
        *((name, (number, 0)) for number, name in enumerate(_PLAIN)),
        *_VARIANTS.items(),
    )
    if hasattr(torch, name)
}
"""Code and variant of every element type that can be sent."""

DTYPE_OF = {code: dtype for dtype, code in CODE_OF.items()}
"""The way back."""


def code_of(dtype: torch.dtype, dimensions: int = 0) -> tuple[int, int]:
    """Return code and variant of an element type.

    Raises:
        TransportError: no message can carry it, or that many dimensions.
    """
    code = CODE_OF.get(dtype)
    if code is None or dimensions > MAX_DIMENSIONS:
        raise TransportError(
            f"a payload of {dimensions} dimensions and {dtype} cannot be sent: at most "
            f"{MAX_DIMENSIONS} dimensions of {', '.join(map(str, CODE_OF))} can; reshape it, or "
            "view it as another type of the same size"
        )
    return code


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its elements in order, itself where it is one."""
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a message: the input of ``action`` in step ``step`` on the receiving rank."""

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

    def words(self) -> list[int]:
        """Return the header's 16 words.

        Raises:
            TransportError: the payload is of a type or has more dimensions than a header can say.
        """
        code, variant = code_of(self.dtype, len(self.shape))
        step, kind, chunk, microbatch = 0, _END, 0, 0
        if self.label is not None:
            step, action = self.label.step, self.label.action
            kind, chunk, microbatch = KIND_CODE[action.kind], action.chunk, action.microbatch
        words = [_MAGIC, self.sequence, step, kind, chunk, microbatch]
        words += [code | variant << _VARIANT_SHIFT, len(self.shape), *self.shape]
        return words + [0] * (HEADER_WORDS - len(words))

    @staticmethod
    def decode(words: Sequence[int], *, peer: int) -> Header:
        """Read a header that came from ``peer``; nothing in it is trusted.

        Raises:
            TransportError: a field is outside its range.
        """
        magic, sequence, step, kind, chunk, microbatch, code, dimensions = words[:8]
        variant, plain = divmod(code, 1 << _VARIANT_SHIFT)
        dtype = DTYPE_OF.get((plain, variant))
        sound = (
            magic == _MAGIC
            and kind in (_END, 0, 1)
            and dtype is not None
            and 0 <= dimensions <= MAX_DIMENSIONS
            and all(size >= 0 for size in words[8 : 8 + dimensions])
        )
        if not sound or dtype is None:
            raise TransportError(
                f"header {list(words)} from rank {peer} is not one of this format; "
                "do both ranks run the same version?"
            )
        label = None if kind == _END else Label(step, Action(KINDS[kind], chunk, microbatch))
        return Header(label, tuple(words[8 : 8 + dimensions]), dtype, sequence)
