"""Sends tensors over NCCL: payloads go between GPUs, headers over gloo.

NCCL has no tags: it matches the operations of both ends in the order in which they are posted. A
posted kernel spins on the GPU until the other end has posted its own. Therefore each directed
channel has its own communicator, with one thread and one stream at each end, and an end posts an
operation only when it can run at once::

    sender                                            receiver
      executor: send() ── event ──┐
      thread: sleeps until the computation is there
              header over gloo ───────────────────>  thread: posts the receive on its stream
              posts the send on its stream  =======>          sleeps until the payload is there
              sleeps until the send is done                   arrival ──> queue of the executor
              drops the tensor

No compute stream waits for a message, so a late rank delays only the ranks that need its result,
and not its tensor-parallel neighbours. An arrival is announced when its data is there, so a
run-time policy only sees inputs that can be used. A message is dropped when its send is done, so a
channel keeps the messages on their way and one more.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import make_current
from megatron.adaptive.errors import DeadlineError, TransportError
from megatron.adaptive.transport.gloo import CLOSE_S, DEPTH, POSTED_FOR, GlooTransport, Packet, raw
from megatron.adaptive.transport.interface import Arrival, Header, HeldArrival, Label, settled
from megatron.adaptive.transport.worker import Worker

_FIRST = -1
"""Priority of the transport's streams.

CUDA maps streams to a few hardware queues, in which a kernel that cannot start yet blocks kernels
of other streams. Streams of different priorities have different queues, so no message waits behind
a computation.
"""


class NcclTransport(GlooTransport):
    """Sends and receives over one communicator per direction and peer.

    Args:
        group: Gloo group of the pipeline's ranks for headers, used by nothing else.
        outgoing: Communicators of two ranks for messages to a peer, by peer; the lower rank is 0.
        incoming: Communicators for messages from a peer, by peer.
        streams: Streams of the device.
        options: Further options of :class:`GlooTransport`.
    """

    name = "nccl"

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        outgoing: Mapping[int, Any],
        incoming: Mapping[int, Any],
        streams: Streams,
        **options: Any,
    ) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._streams = streams
        self._rank = dist.get_rank()
        self._failures: dict[int, Exception] = {}
        self._senders = {
            peer: Worker(
                f"send-to-{peer}", functools.partial(self._send_failed, peer), streams.private
            )
            for peer in options["peers"]
        }
        super().__init__(group, payload_shape=None, dtype=torch.float32, **options)

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        if peer in self._failures:
            raise self._failures[peer]
        payload = settled(tensor.detach())
        header = Header(label, tuple(payload.shape), payload.dtype, self._sent[peer])
        # Values that a header cannot contain must raise before anything is sent.
        header.words()
        self._hand_over(peer, header, payload, self._streams.mark())

    def flush(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        slow = [peer for peer, sender in self._senders.items() if not sender.flush(end_s)]
        for failure in self._failures.values():
            raise failure
        if slow:
            count = sum(self._senders[peer].pending for peer in slow)
            raise DeadlineError(
                f"{count} messages were not taken within {timeout_s:g} s by "
                f"{', '.join(map(self._describe, slow))}; is it alive and on the network?"
            )

    def close(self) -> None:
        if self._closing:
            return
        is_idle = False
        try:
            super().close()
            is_idle = True
        finally:
            groups = [*self._outgoing.values(), *self._incoming.values()]
            for sender in self._senders.values():
                is_idle = sender.close(CLOSE_S if is_idle else 0.0) and is_idle
            for group in groups:
                free(group, is_idle=is_idle)

    def _say_end(self, peer: int) -> None:
        if peer not in self._failures:
            nothing = torch.empty(0)
            header = Header(None, (0,), nothing.dtype, self._sent[peer])
            self._hand_over(peer, header, nothing, self._streams.mark())

    def _hand_over(
        self, peer: int, header: Header, payload: torch.Tensor, computed: Moment
    ) -> None:
        self._sent[peer] += 1
        self._senders[peer].do(functools.partial(self._deliver, peer, header, payload, computed))

    def _deliver(self, peer: int, header: Header, payload: torch.Tensor, computed: Moment) -> None:
        """Sends a message; blocks the channel's thread until the send is done."""
        if peer in self._failures:
            return
        computed.synchronize()
        packet = Packet(None, self._dtype)
        packet.fill(header, None)
        announced = self._start(peer, packet.raw, 2 * (header.sequence % DEPTH))
        if payload.numel():
            self._outgoing[peer].send([raw(payload)], int(peer > self._rank), 0).wait()
            self._streams.mark().synchronize()
        announced.wait(POSTED_FOR)

    def _send_failed(self, peer: int, error: Exception) -> None:
        is_specific = isinstance(error, (TransportError, torch.OutOfMemoryError))
        self._broken(peer, error if is_specific else self._lost(peer, error))

    def _broken(self, peer: int, error: Exception) -> None:
        self._failures.setdefault(peer, error)
        self._senders[peer].give_up()
        super()._broken(peer, error)

    @contextlib.contextmanager
    def _receiving(self) -> Iterator[None]:
        with self._streams.private():
            yield

    def _receive_payload(self, peer: int, sequence: int, header: Header) -> torch.Tensor:
        """Receives the payload of a header; blocks until the payload has arrived."""
        # The memory belongs to this thread's stream, so it need not wait for earlier computation.
        payload = torch.empty(header.shape, dtype=header.dtype, device=self._device)
        if payload.numel():
            self._incoming[peer].recv([raw(payload)], int(peer > self._rank), 0).wait()
            self._streams.mark().synchronize()
        return payload

    def _arrival(self, label: Label, peer: int, payload: torch.Tensor) -> Arrival:
        take = functools.partial(self._streams.use, payload)
        return HeldArrival(label, peer, payload.nbytes, take, time.monotonic_ns())


def free(group: Any, *, is_idle: bool) -> None:
    """Frees a communicator of two ranks.

    Args:
        group: The communicator.
        is_idle: Whether no operation is pending. Pending ones will not complete and are aborted.
    """
    # An older torch lacks both methods and frees the communicator with its last reference.
    end = getattr(group, "shutdown" if is_idle else "abort", None)
    if end is not None:
        end()


# The transport sees the device only as Streams, so that tests run its threads on the host.


class Moment(Protocol):
    """Marks the end of the work that a stream has been given so far."""

    def synchronize(self) -> None:
        """Blocks, without the GIL, until the device has reached this point."""


class Streams(Protocol):
    """Provides the streams of a device. Any thread may call it."""

    def private(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the device and a new stream are current."""

    def mark(self) -> Moment:
        """Returns the end of the work given so far to the calling thread's current stream."""

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a finished tensor of another stream for use in the current one.

        Its memory is not reused before the current stream is done with it.
        """


class CudaStreams:
    """Provides the streams of a GPU.

    Args:
        device: Device of the GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextlib.contextmanager
    def private(self) -> Iterator[None]:
        make_current(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device, priority=_FIRST)):
            yield

    def mark(self) -> Moment:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor


class HostStreams:
    """Provides streams on a CPU, where all work is done when a call returns."""

    def private(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self) -> Moment:
        return _PASSED

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _Passed:
    """Represents a moment in the past."""

    def synchronize(self) -> None:
        """Returns at once."""


_PASSED = _Passed()
