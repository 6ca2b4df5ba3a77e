"""Sends tensors over a gloo process group: CPU tensors directly, GPU tensors through CPU memory.

One receiver thread per peer posts receives in advance, so that data can arrive while the executor
is computing. gloo matches the messages between two ranks by their tags and their order. A small
message whose shape is known in advance is sent as one gloo message. Any other message is sent as
two gloo messages, a header and a payload:

::

    tag 2i     packet: header and payload     i counts messages modulo ``DEPTH``

    tag 2i     packet: header, [16] int64
    tag 2i+1   payload with the header's shape and dtype

If ``payload_shape`` is given, receives are posted ``DEPTH`` messages in advance. Otherwise, the
receive for a payload is posted after its header has arrived. gloo returns a ``Work`` object for
each send. If the object were released before the send has finished, its destructor would block. The
transport therefore keeps the object until then.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.errors import DeadlineError, PeerLostError, TransportError
from megatron.adaptive.transport.interface import (
    HEADER_WORDS,
    Arrival,
    CompletionQueue,
    Completions,
    Header,
    HeldArrival,
    Label,
    Transport,
    settled,
)
from megatron.adaptive.transport.kind import Gather, Opening, TransportKind

DEPTH = 4
"""Number of receives that are posted in advance. Tags repeat after this many messages."""
# Maximum size in bytes of a payload that is copied into the same packet as its header. For such
# payloads, the copy is cheaper than a second gloo message.
_PACKED_BYTES = 1 << 20
# Posted receives need a very long timeout, because they stay posted between steps, for example
# while a checkpoint is saved. If a peer exits, its connection closes and the receive fails. The
# executor enforces the shorter deadlines.
POSTED_FOR = datetime.timedelta(days=20)
CLOSE_S = 30.0
_TICK_S = 0.002
# Dtypes that gloo supports. Tensors of other dtypes are sent as bytes.
_OF_GLOO = frozenset(
    (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    )
)


@dataclass(slots=True)
class _Posted:
    """Receive that was posted in advance. The payload is in the packet or in a separate message."""

    packet: Packet
    work: Any
    payload: torch.Tensor | None = None
    payload_work: Any = None


@dataclass(slots=True)
class _Sent:
    """Message that gloo is sending. Keeps the memory of the message alive."""

    peer: int
    packet: Packet
    payload: torch.Tensor | None
    works: list[Any]


class GlooTransport:
    """Sends and receives tensors over a gloo process group of a pipeline's ranks.

    Args:
        group: Gloo process group of the pipeline's ranks. It must not be used for anything else.
        peers: Global ranks with which this rank exchanges messages.
        device: Device for received tensors.
        payload_shape: Shape of all payloads, or ``None`` if shapes vary. All ranks must pass the
            same shape, because gloo aborts the process if more bytes arrive than expected.
        dtype: Dtype of the payloads.
        describe: Function that returns the name of a peer, with host and stage, for error messages.
        timeout_s: Maximum time in seconds that a send waits for a peer that is not receiving
            messages.
        completions: Queue for received messages and failures, or ``None`` to create a new queue.
    """

    name = "gloo"

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        peers: Sequence[int],
        device: torch.device,
        payload_shape: tuple[int, ...] | None,
        dtype: torch.dtype,
        describe: Callable[[int], str] = lambda rank: f"rank {rank}",
        timeout_s: float = 600.0,
        completions: Completions | None = None,
    ) -> None:
        self.completions: Completions = completions or CompletionQueue()
        self._group = group
        self._device = device
        self._shape = payload_shape
        self._dtype = dtype
        self._describe = describe
        self._send_limit = datetime.timedelta(seconds=timeout_s)
        self._index = {peer: dist.get_group_rank(group, peer) for peer in peers}
        self._sent = dict.fromkeys(peers, 0)
        self._pending: deque[_Sent] = deque()
        self._closing = False
        self._ahead = 1 if payload_shape is None else DEPTH
        size = 0 if payload_shape is None else torch.Size(payload_shape).numel() * dtype.itemsize
        self._packs = 0 < size <= _PACKED_BYTES
        self._free: list[Packet] = []
        self._threads = {
            peer: threading.Thread(
                target=self._receive, args=(peer,), name=f"receive-from-{peer}", daemon=True
            )
            for peer in peers
        }
        for thread in self._threads.values():
            thread.start()

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        payload = settled(tensor.detach().to("cpu"))
        if not self._fits(tuple(payload.shape), payload.dtype):
            raise TransportError(
                f"{label.name} for {self._describe(peer)} has shape {tuple(payload.shape)} of "
                f"{payload.dtype}, but this channel was opened for {self._shape} of "
                f"{self._dtype}; open it without a fixed shape"
            )
        self._send(peer, label, payload)
        while len(self._pending) > 4 * DEPTH * len(self._sent):
            self._reap(self._send_limit)

    def reserve(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def describe_links(self) -> dict[int, dict[str, Any]]:
        return {peer: {"kind": self.name} for peer in self._index}

    def flush(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while self._pending:
            peer = self._pending[0].peer
            count = len(self._pending)
            left = end - time.monotonic()
            try:
                # gloo rounds the timeout to milliseconds, and treats 0 as no timeout.
                if left >= _TICK_S:
                    self._reap(datetime.timedelta(seconds=left))
                    continue
            except PeerLostError:
                if time.monotonic() < end - _TICK_S:
                    raise
            raise DeadlineError(
                f"{count} messages were not received within {timeout_s:g} s (the oldest is for "
                f"{self._describe(peer)}); check that the receiver is running and reachable"
            )

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        for peer in self._index:
            self._say_end(peer)
        end = time.monotonic() + CLOSE_S
        self.flush(CLOSE_S)
        for peer, thread in self._threads.items():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise DeadlineError(
                    f"{self._describe(peer)} did not close its channel within {CLOSE_S:g} s; it "
                    "may have failed or be stuck in another part of the program"
                )

    def _say_end(self, peer: int) -> None:
        """Sends an end message to ``peer`` for each receive that the peer has posted."""
        shape = (0,) if self._shape is None else self._shape
        for _ in range(self._ahead):
            self._send(peer, None, torch.empty(shape, dtype=self._dtype))

    def _fits(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return self._shape is None or (shape == self._shape and dtype == self._dtype)

    def _send(self, peer: int, label: Label | None, payload: torch.Tensor) -> None:
        sequence = self._sent[peer]
        header = Header(label, tuple(payload.shape), payload.dtype, sequence)
        packet = self._free.pop() if self._free else self._packet()
        packet.fill(header, payload if self._packs else None)
        self._sent[peer] = sequence + 1
        slot = sequence % DEPTH
        works = [self._start(peer, packet.raw, 2 * slot)]
        if payload.numel() and not self._packs:
            works.append(self._start(peer, raw(payload), 2 * slot + 1))
        kept = None if self._packs else payload
        self._pending.append(_Sent(peer, packet, kept, works))

    def _packet(self) -> Packet:
        return Packet(self._shape if self._packs else None, self._dtype)

    def _start(self, peer: int, tensor: torch.Tensor, tag: int) -> Any:
        try:
            return self._group.send([tensor], self._index[peer], tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _reap(self, timeout: datetime.timedelta) -> None:
        """Waits up to ``timeout`` for the oldest send to finish, and releases its tensors."""
        sent = self._pending.popleft()
        try:
            for work in sent.works:
                work.wait(timeout)
        except RuntimeError as error:
            raise self._lost(sent.peer, error) from error
        self._free.append(sent.packet)

    def _receive(self, peer: int) -> None:
        """Receives messages until ``peer`` closes the channel. Runs in a receiver thread."""
        try:
            with self._receiving():
                self._receive_all(peer)
        except (TransportError, torch.OutOfMemoryError) as error:
            self._broken(peer, error)
        except Exception as error:
            self._broken(peer, self._lost(peer, error))

    def _broken(self, peer: int, error: Exception) -> None:
        """Adds ``error``, which broke the channel to ``peer``, to the queue.

        Runs in a thread of the channel.
        """
        self.completions.put(error)

    def _receiving(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context manager in which a receiver thread runs."""
        return contextlib.nullcontext()

    def _receive_all(self, peer: int) -> None:
        posted: deque[_Posted] = deque()
        ahead = self._ahead
        received = 0
        ends = 0
        while ends < ahead:
            while len(posted) < ahead - ends:
                posted.append(self._post(peer, received + len(posted)))
            header, payload = self._complete(peer, posted.popleft(), received)
            received += 1
            if header.label is None:
                ends += 1
            else:
                self.completions.put(self._arrival(header.label, peer, payload))

    def _post(self, peer: int, sequence: int) -> _Posted:
        slot = sequence % DEPTH
        index = self._index[peer]
        packet = self._packet()
        posted = _Posted(packet, self._group.recv([packet.raw], index, 2 * slot))
        if self._packs:
            posted.payload = packet.payload
        elif self._shape is not None:
            posted.payload = torch.empty(self._shape, dtype=self._dtype)
            if posted.payload.numel():
                into = [raw(posted.payload)]
                posted.payload_work = self._group.recv(into, index, 2 * slot + 1)
        return posted

    def _complete(self, peer: int, posted: _Posted, sequence: int) -> tuple[Header, torch.Tensor]:
        posted.work.wait(POSTED_FOR)
        header = posted.packet.header(peer=peer)
        if header.sequence != sequence:
            raise TransportError(
                f"message {header.sequence} from {self._describe(peer)} arrived instead of "
                f"message {sequence}; a message was lost or duplicated"
            )
        if not self._fits(header.shape, header.dtype):
            raise TransportError(
                f"{self._describe(peer)} sent shape {header.shape} of {header.dtype} on a channel "
                f"opened here for {self._shape} of {self._dtype}; run both ranks with the same "
                "options"
            )
        payload = posted.payload
        if payload is None:
            payload = self._receive_payload(peer, sequence, header)
        elif posted.payload_work is not None:
            posted.payload_work.wait(POSTED_FOR)
        return header, payload

    def _receive_payload(self, peer: int, sequence: int, header: Header) -> torch.Tensor:
        """Waits for the payload from ``peer`` that ``header`` describes, and returns the payload.

        ``sequence`` is the index of the message on the channel.
        """
        payload = torch.empty(header.shape, dtype=header.dtype)
        if payload.numel():
            tag = 2 * (sequence % DEPTH) + 1
            self._group.recv([raw(payload)], self._index[peer], tag).wait(POSTED_FOR)
        return payload

    def _arrival(self, label: Label, peer: int, payload: torch.Tensor) -> Arrival:
        return HeldArrival(
            label, peer, payload.nbytes, lambda: payload.to(self._device), time.monotonic_ns()
        )

    def _lost(self, peer: int, error: Exception) -> PeerLostError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return PeerLostError(f"the connection to {self._describe(peer)} was lost: {reason}")


def raw(payload: torch.Tensor) -> torch.Tensor:
    """Returns ``payload``, as a view of its bytes if gloo and NCCL do not support its dtype."""
    return payload if payload.dtype in _OF_GLOO else payload.view(-1).view(torch.uint8)


_HEADER_BYTES = 8 * HEADER_WORDS


class Packet:
    """Buffer for one message: the header and, if the payload's shape is known, the payload.

    Args:
        shape: Shape of the payload, or ``None`` if the payload is sent separately.
        dtype: Dtype of the payload.

    Attributes:
        raw: Bytes that are sent or received, ``[128 + payload bytes] uint8``.
        payload: View of the payload within the buffer. The view keeps the buffer alive.
    """

    __slots__ = ("_words", "payload", "raw")

    def __init__(self, shape: tuple[int, ...] | None, dtype: torch.dtype) -> None:
        count = 0 if shape is None else torch.Size(shape).numel()
        self.raw = torch.empty(_HEADER_BYTES + count * dtype.itemsize, dtype=torch.uint8)
        storage = self.raw.untyped_storage()
        self._words = self.raw[:_HEADER_BYTES].view(torch.int64).numpy()
        # Do not create the payload as a view of `raw`. The receiver uses the payload as a leaf of
        # its autograd graph, and a view cannot be a leaf.
        offset = _HEADER_BYTES // dtype.itemsize
        self.payload = torch.empty(0, dtype=dtype)
        if shape is not None:
            # torch's type hints do not declare this overload of the method.
            self.payload.set_(storage, offset, shape)  # type: ignore[call-overload]

    def fill(self, header: Header, payload: torch.Tensor | None) -> None:
        """Writes ``header`` and, unless it is ``None``, ``payload`` into the packet."""
        self._words[:] = header.words()
        if payload is not None:
            self.payload.copy_(payload)

    def header(self, *, peer: int) -> Header:
        """Reads and returns the header of this packet, which ``peer`` has sent.

        Raises:
            TransportError: The packet does not start with a valid header.
        """
        return Header.decode(self._words.tolist(), peer=peer)


class GlooKind(TransportKind):
    """Declares gloo, which can connect any two ranks."""

    def open(self, opening: Opening) -> Transport | None:
        group = gloo_group(opening.members, opening.gather)
        if not opening.peers:
            return None
        payloads = opening.payloads
        return GlooTransport(
            group,
            peers=opening.peers,
            device=opening.accelerator.device,
            describe=opening.describe,
            timeout_s=opening.timeout_s,
            completions=opening.completions,
            payload_shape=None if payloads.varies else payloads.shape,
            dtype=payloads.dtype,
        )


def gloo_group(members: list[int], gather: Gather) -> dist.ProcessGroup:
    """Creates one gloo process group per pipeline, and returns the group of this rank.

    Every rank of the job must call this function.

    Args:
        members: Global ranks of this rank's pipeline, including this rank.
        gather: Function that exchanges values between all ranks of the job.
    """
    joined: dist.ProcessGroup | None = None
    for ranks in sorted(set(map(tuple, gather(members)))):
        group = dist.new_group(list(ranks), backend="gloo")
        if list(ranks) == members:
            joined = group
    assert joined is not None
    return joined
