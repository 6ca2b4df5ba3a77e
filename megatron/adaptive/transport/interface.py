"""Defines the interface between the transports and the pipeline executor.

A transport connects a pipeline rank with its neighbours. Messages between two ranks arrive in the
order in which they were sent. Messages from all peers are added to a single completion queue as
they arrive. A send never waits until the peer has finished its work: if the channel is full, the
transport keeps the message and sends it later.

::

    executor A                                         executor B
      send(peer, label, tensor) ──> channel A→B ──┐
                                                  ├──> completions.wait() -> Arrival | Notice, or
      executor C ──────────────── channel C→B ────┤                raises a channel's error
                                  other threads ──┘

The completion queue has two implementations: :class:`CompletionQueue` in this file, and
``NativeQueue`` in ``native.py`` for messages of the C++ extension. ``select.py`` chooses the
transport for each pair of ranks based on their :class:`Endpoint` objects, and ``connect.py`` opens
the chosen transports.

This file also defines the header of a message: label, shape, dtype and sequence number. Dtypes have
the same codes as in ``csrc/common/message.h``. Over gloo, the header is sent as integers before the
payload. The native transports write the same fields into a C++ struct.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron.adaptive.errors import TransportError
from megatron.adaptive.schedule.action import Action, ActionKind, SliceCounts


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Describes a rank to the other ranks: its host, supported transports and addresses.

    Attributes:
        rank: Global rank.
        host: Name of the rank's host, for error messages.
        machine: Identifier of the machine, as returned by ``liveness.here``. Ranks that can see
            each other's processes have the same identifier.
        user: Numeric ID of the Unix user who runs the rank.
        device: Type of the rank's device, ``cpu`` or ``cuda``.
        addresses: Addresses at which the rank listens, keyed by kind of link (``unix``, ``tcp``).
        cpus: Indices of the CPUs on which the rank may run, or empty if unknown.
        ports: Active RDMA ports of the rank's machine, such as ``mlx5_0:1``.
        lacks: Reasons why the rank cannot use certain transports, keyed by the name of the
            transport.
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
        """Returns whether this rank and ``other`` run on the same machine and share a CPU."""
        if self.machine != other.machine:
            return False
        return not (self.cpus and other.cpus) or not set(self.cpus).isdisjoint(other.cpus)


class Transport(Protocol):
    """Owns the channels of one rank. Only the executor's thread may call the methods."""

    name: str

    @property
    def completions(self) -> Completions:
        """Returns the queue to which all channels add received messages and failures."""

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """Starts to send ``tensor`` with ``label`` to global rank ``peer``. Returns immediately.

        The transport keeps the tensor's storage alive until the message has been sent. After this
        call, the caller may release the tensor or replace ``tensor.data``, but must not write to
        the tensor's memory.

        Raises:
            PeerLostError: The peer's process has exited.
        """

    def reserve(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor of ``shape`` and ``dtype`` for a message to ``peer``.

        The tensor is allocated in a free slot (buffer) of the channel, or in ordinary memory if no
        slot is free. In both cases, the caller can send the tensor, or a view that begins at its
        first element. A tensor in a slot is sent without a copy. The slot then belongs to the peer,
        so the caller must not write to it after the send. If the tensor is released without being
        sent, the slot returns to the channel.
        """

    def describe_links(self) -> dict[int, dict[str, Any]]:
        """Returns properties of the channel to each peer, at least the transport (``kind``).

        ``peer_closed`` is ``True`` if the peer has closed the channel, so that no more messages
        will arrive. A transport may omit this key. In that case, a rank that needs a message from a
        closed peer fails only after the timeout, unless the transport reports the closed channel as
        an error.
        """

    def flush(self, timeout_s: float) -> None:
        """Waits up to ``timeout_s`` seconds until all messages have left this process.

        Raises:
            DeadlineError: Some messages did not leave the process within ``timeout_s`` seconds.
        """

    def close(self) -> None:
        """Notifies the peers, waits until all messages are sent, and stops all threads.

        Safe to call more than once.
        """


def closed_peers(transport: Transport, peers: Iterable[int]) -> list[int]:
    """Returns the ranks in ``peers`` that have closed their channel to this rank, sorted.

    Args:
        transport: Transport with the channels of this rank.
        peers: Global ranks to check.
    """
    links = transport.describe_links()
    return sorted(peer for peer in set(peers) if links.get(peer, {}).get("peer_closed"))


class Arrival:
    """Received message. :meth:`take` returns its payload.

    Attributes:
        label: Step and action for which the message is the input.
        peer: Global rank of the sender.
        nbytes: Size of the payload in bytes.
        arrived_ns: Time from ``time.monotonic_ns`` when the receive completed, or ``None`` if the
            peer writes directly to this rank's memory, where no thread notices the arrival.
    """

    # __slots__ is empty, because Python cannot combine a class that has slots with the arrival
    # class of the C++ extension.
    __slots__ = ()

    label: Label
    peer: int
    nbytes: int
    arrived_ns: int | None

    def take(self) -> torch.Tensor:
        """Returns the payload and transfers its ownership to the caller.

        Must be called once per message, in the order in which the messages arrived.
        """
        raise NotImplementedError


class HeldArrival(Arrival):
    """Received message whose :meth:`take` calls a function to get the payload."""

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
    """Reports that a message has arrived on another rank of this rank's decision group.

    A decision group consists of the ranks that communicate with each other during forward and
    backward passes, such as tensor-parallel ranks.

    Attributes:
        label: Step and action for which the message is the input.
        peer: Global rank that has received the message.
    """

    label: Label
    peer: int


Item = Arrival | Notice
"""Entry of the completion queue: a received message, or a notice from another rank."""

Listener = Callable[[Item | Exception], None]


class Completions(Protocol):
    """Queue of received messages and failures from all channels of a process, oldest first.

    Any thread may add items, but only one thread may remove them. Waiting releases the GIL and does
    not poll.
    """

    def listen(self, listener: Listener) -> None:
        """Calls ``listener`` with each item added from now on, after the item has been queued.

        The listener does not run in the thread that takes items from the queue, so it is called
        even while that thread is busy. Only one listener is supported, and it must not raise
        exceptions.
        """

    def put(self, item: Item | Exception) -> None:
        """Adds ``item``: an arrival, a notice, or an error that broke a channel."""

    def poll(self) -> Item | None:
        """Returns the oldest item, or ``None`` if the queue is empty.

        Raises:
            TransportError: The oldest item is the error of a channel.
        """

    def wait(self, deadline_s: float) -> Item | None:
        """Waits for an item until ``deadline_s``, a time on the clock of ``time.monotonic``.

        Returns:
            The oldest item, or ``None`` if the deadline has passed.

        Raises:
            TransportError: The oldest item is the error of a channel.
        """


class CompletionQueue:
    """Implements the completion queue in Python. :meth:`put` also calls the listener."""

    def __init__(self) -> None:
        # Before Python 3.13, SimpleQueue.get() may block forever if its timeout is short.
        self._queue: queue.Queue[Item | Exception] = queue.Queue()
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
    """Returns ``item``, or raises ``item`` if it is the error of a channel."""
    if isinstance(item, Exception):
        raise item
    return item


HEADER_WORDS = 16
KINDS = (ActionKind.F, ActionKind.B)
"""Kinds of actions that need a message as input. In messages, a kind is encoded as its index."""
KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
"""Number that represents each kind of action in messages."""

MAX_DIMENSIONS = 7
_MAGIC = 0x4D41_5031  # ASCII characters "MAP1".
_END = -1
_VARIANT_SHIFT = 8

# A dtype's index is its code, so keep this order equal to that of the enum ElementType in
# message.h.
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
# Each of these dtypes is sent as a different dtype of the same size, for example 8-bit floats as
# bytes. A positive number, the variant, lets the receiver restore the original dtype. These numbers
# must never change, because other versions of this package read them. Dtypes that the installed
# torch does not have are skipped.
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
"""Code and variant that represent each supported dtype in messages."""

DTYPE_OF = {code: dtype for dtype, code in CODE_OF.items()}
"""Dtype for each pair of code and variant in a message."""


def code_of(dtype: torch.dtype, dimensions: int = 0) -> tuple[int, int]:
    """Returns the code and the variant that represent ``dtype`` in messages.

    Raises:
        TransportError: ``dtype`` is not supported, or there are too many dimensions.
    """
    code = CODE_OF.get(dtype)
    if code is None or dimensions > MAX_DIMENSIONS:
        raise TransportError(
            f"a payload must have at most {MAX_DIMENSIONS} dimensions and one of the types "
            f"{', '.join(map(str, CODE_OF))}, got {dimensions} dimensions and {dtype}; reshape "
            "it, or view it as another type of the same size"
        )
    return code


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` as a contiguous tensor with any lazy negation or conjugation resolved.

    Copies the tensor only if necessary.
    """
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


@dataclass(frozen=True, slots=True)
class Label:
    """Identifies a message as the input of ``action`` in step ``step`` on the receiving rank.

    Attributes:
        step: Index of the step.
        action: Action for which the message is the input.
        num_slices: Number of slices of each microbatch, which only the sender knows. It is used to
            name the action in error messages, and is ignored in comparisons.
    """

    step: int
    action: Action
    num_slices: SliceCounts = field(default=1, compare=False)

    @property
    def name(self) -> str:
        """Returns the name of the action. For example, ``F0-3.5`` is an action on one slice."""
        return self.action.label(self.num_slices)


@dataclass(frozen=True, slots=True)
class Header:
    """Describes the payload that follows the header on a channel.

    Attributes:
        label: Action and step of the message, or ``None`` if the sender closes the channel.
        shape: Shape of the payload.
        dtype: Dtype of the payload.
        sequence: Index of the message on its channel, from 0.
    """

    label: Label | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    sequence: int

    def words(self) -> list[int]:
        """Returns the header as 16 integers.

        Raises:
            TransportError: The payload has an unsupported dtype or too many dimensions.
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
        """Creates a header from the ``numbers`` that ``peer`` sent, and validates each field.

        Raises:
            TransportError: A field has an invalid value.
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
                f"header {list(numbers)} from rank {peer} is not valid; run the same version on "
                "both ranks"
            )
        label = None if kind == _END else Label(step, Action(KINDS[kind], chunk, microbatch))
        return Header(label, tuple(numbers[8 : 8 + dimensions]), dtype, sequence)
