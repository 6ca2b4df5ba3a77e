"""Defines the interface between transports and the pipeline executor.

A transport connects one pipeline rank with its neighbours. Messages between two ranks keep their
order; messages of different peers go into one completion queue in the order of their arrival. A
send never waits for the peer's work: if the peer has no room, the transport keeps the message.

::

    executor A                                         executor B
      send(peer, label, tensor) ──> channel A→B ──┐
                                                  ├──> completions.wait() -> Arrival | Notice, or
      executor C ──────────────── channel C→B ────┤                raises a channel's error
                                  other threads ──┘

Two queues share one interface: :class:`CompletionQueue` here, in Python, and ``NativeQueue`` of
``native.py``, whose items come from the C++ extension. ``select.py`` chooses the transport of each
pair from both ends' :class:`Endpoint`, and ``connect.py`` makes it.

The header of a message (label, shape, element type, sequence) is defined here too: the table of
element types, whose codes are those of ``csrc/common/message.h``, and the words that precede a
payload over gloo. The native transports write the same fields into a C++ struct.
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
    """Describes a rank to the other ranks: its host, its abilities and its addresses.

    Attributes:
        rank: Global rank.
        host: Name of its host, for messages.
        machine: Identifier that is equal for ranks that can see each other's processes; see
            ``liveness.here``.
        user: Numeric user id.
        device: Type of its device, ``cpu`` or ``cuda``.
        addresses: Addresses by kind of link: ``unix``, ``tcp``.
        cpus: Numbers of the processors on which it may run; empty if unknown.
        ports: Active RDMA ports, such as ``mlx5_0:1``.
        lacks: Reasons why it cannot use a transport, by the transport's name.
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
        """Returns whether both ranks may run on the same processor of one machine."""
        if self.machine != other.machine:
            return False
        return not (self.cpus and other.cpus) or not set(self.cpus).isdisjoint(other.cpus)


class Transport(Protocol):
    """Owns the channels of one rank. Only the executor's thread calls it."""

    name: str

    @property
    def completions(self) -> Completions:
        """Returns the queue of messages and failures of all channels."""

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """Starts to send ``tensor`` to global rank ``peer`` and returns at once.

        The transport keeps the storage alive until it is sent. The caller may drop or replace
        ``tensor.data`` afterwards but must not write to its memory.

        Raises:
            PeerLostError: If the peer is gone.
        """

    def reserve(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor for a payload that will be sent to ``peer``.

        Its memory is the channel's if there is room, otherwise ordinary memory. In both cases the
        tensor, or a view that begins at its first element, may be sent. The channel's memory is
        sent without a copy and then belongs to the peer: do not write to it after the send. A
        tensor that is dropped unsent returns its memory.
        """

    def describe_links(self) -> dict[int, dict[str, Any]]:
        """Returns facts about the channel to each peer, at least its ``kind``."""

    def flush(self, timeout_s: float) -> None:
        """Waits until all messages have left this process.

        Raises:
            DeadlineError: If messages are left after ``timeout_s`` seconds.
        """

    def close(self) -> None:
        """Notifies the peers, drains the channels and stops the threads. Idempotent."""


class Arrival:
    """Represents a message that has arrived.

    Attributes:
        label: Label of the message.
        peer: Global rank of the sender.
        nbytes: Size of the payload in bytes.
        arrived_ns: Time at which the receive was complete, of ``time.monotonic_ns``; ``None`` if
            no thread observes it, because the peer writes into the memory directly.
    """

    # An object of the C++ extension is an arrival too, so this class has no slots.
    __slots__ = ()

    label: Label
    peer: int
    nbytes: int
    arrived_ns: int | None

    def take(self) -> torch.Tensor:
        """Returns the payload, which the caller owns. Call it once, in the order of arrival."""
        raise NotImplementedError


class HeldArrival(Arrival):
    """Represents an arrival whose payload a function returns."""

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
    """Reports that a message has arrived at another member of the decision group.

    Attributes:
        label: Label of the message.
        peer: Global rank of the member.
    """

    label: Label
    peer: int


Item = Arrival | Notice
"""Item that an executor takes out of a queue."""

Listener = Callable[[Item | Exception], None]


class Completions(Protocol):
    """Queues arrivals and failures of all channels of a process in the order of their occurrence.

    Any thread may put items, one thread takes them. A wait releases the GIL and never polls.
    """

    def listen(self, listener: Listener) -> None:
        """Calls ``listener`` with each later item, right after the item can be taken.

        The listener does not run in the thread that takes items, so it is called even while that
        thread is busy. There is one listener, and it must not raise.
        """

    def put(self, item: Item | Exception) -> None:
        """Adds an arrival, or the error that ended a channel."""

    def poll(self) -> Item | None:
        """Returns the oldest item, ``None`` if there is none now.

        Raises:
            TransportError: If a channel failed.
        """

    def wait(self, deadline_s: float) -> Item | None:
        """Waits for an item until ``deadline_s`` of ``time.monotonic``.

        Returns:
            The oldest item, ``None`` if the deadline passed.

        Raises:
            TransportError: If a channel failed.
        """


class CompletionQueue:
    """Implements :class:`Completions` in Python. Its listener runs in the thread that puts."""

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
    """Returns an item that leaves a queue, or raises it if it is a channel's error."""
    if isinstance(item, Exception):
        raise item
    return item


HEADER_WORDS = 16
KINDS = (ActionKind.F, ActionKind.B)
"""Kinds of actions that take a message; the code of a kind is its index."""
KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
"""Code by kind of action."""

MAX_DIMENSIONS = 7
_MAGIC = 0x4D41_5031  # "MAP1"
_END = -1
_VARIANT_SHIFT = 8

# The order is that of ElementType in message.h.
_PLAIN = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
)
_FLOAT8 = len(_PLAIN)
# These types are sent as another one of the same size (8-bit floats as bytes) and viewed as their
# own type by the receiver; their variant is above 0. A number must never change its meaning. Types
# that the installed torch lacks are left out.
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
"""Element type by code and variant."""


def code_of(dtype: torch.dtype, dimensions: int = 0) -> tuple[int, int]:
    """Returns code and variant of an element type.

    Raises:
        TransportError: If a message cannot contain this type, or tensors of so many dimensions.
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
    """Returns a contiguous tensor without pending negation or conjugation, itself if it is one."""
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


@dataclass(frozen=True, slots=True)
class Label:
    """Names a message: the input of ``action`` in step ``step`` on the receiving rank."""

    step: int
    action: Action


@dataclass(frozen=True, slots=True)
class Header:
    """Describes the payload that follows it on a channel.

    Attributes:
        label: Label of the message; ``None`` if the sender closes the channel.
        shape: Shape of the payload.
        dtype: Element type of the payload.
        sequence: Number of the message on its channel, from 0.
    """

    label: Label | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    sequence: int

    def words(self) -> list[int]:
        """Returns the 16 words of the header.

        Raises:
            TransportError: If the payload has an unsupported type or too many dimensions.
        """
        code, variant = code_of(self.dtype, len(self.shape))
        label_words = [0, _END, 0, 0]
        if self.label is not None:
            action = self.label.action
            kind = KIND_CODE[action.kind]
            label_words = [self.label.step, kind, action.chunk, action.microbatch]
        type_words = [code | variant << _VARIANT_SHIFT, len(self.shape)]
        header = [_MAGIC, self.sequence, *label_words, *type_words, *self.shape]
        return header + [0] * (HEADER_WORDS - len(header))

    @staticmethod
    def decode(numbers: Sequence[int], *, peer: int) -> Header:
        """Reads a header from ``peer`` and checks each field.

        Raises:
            TransportError: If a field is outside its range.
        """
        magic, sequence, step, kind, chunk, microbatch, code, dimensions = numbers[:8]
        variant, plain = divmod(code, 1 << _VARIANT_SHIFT)
        dtype = DTYPE_OF.get((plain, variant))
        is_valid = (
            magic == _MAGIC
            and kind in (_END, 0, 1)
            and dtype is not None
            and 0 <= dimensions <= MAX_DIMENSIONS
            and all(size >= 0 for size in numbers[8 : 8 + dimensions])
        )
        if not is_valid or dtype is None:
            raise TransportError(
                f"header {list(numbers)} from rank {peer} is not one of this format; "
                "do both ranks run the same version?"
            )
        label = None if kind == _END else Label(step, Action(KINDS[kind], chunk, microbatch))
        return Header(label, tuple(numbers[8 : 8 + dimensions]), dtype, sequence)
