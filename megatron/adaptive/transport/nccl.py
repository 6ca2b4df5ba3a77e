"""Sends tensors over NCCL: payloads directly between GPUs, headers over gloo.

NCCL has no message tags. It matches the operations of both ends in the order in which they are
posted. A posted operation keeps the GPU busy until the other end has posted its operation.
Therefore, each channel (one direction between two ranks) has a separate communicator, with one
thread and one stream at each end. Each end posts an operation only when it can run immediately::

    sender                                            receiver
      executor: send() ── event ──┐
      thread: sleeps until the computation is done
              header over gloo ───────────────────>  thread: posts the receive on its stream
              posts the send on its stream  =======>          sleeps until the payload has come
              sleeps until the send is done                   arrival ──> queue of the executor
              releases the tensor

No compute stream waits for a message, so a slow rank delays the ranks that need its result, but not
its tensor-parallel neighbours. A message is only added to the queue after all of its data has
arrived, so a run-time scheduling rule only sees inputs that are ready to use. The memory of a
message is released when its send has finished. Each channel therefore holds the memory of the
messages that are being sent, and of one more message.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import make_current
from megatron.adaptive.config.input_files import say
from megatron.adaptive.errors import DeadlineError, TransportError
from megatron.adaptive.transport.gloo import (
    CLOSE_S,
    DEPTH,
    POSTED_FOR,
    GlooTransport,
    Packet,
    gloo_group,
    raw,
)
from megatron.adaptive.transport.interface import (
    Arrival,
    Completions,
    Endpoint,
    Header,
    HeldArrival,
    Label,
    Transport,
    settled,
)
from megatron.adaptive.transport.kind import Opening, RankFacts, TransportKind
from megatron.adaptive.transport.select import rounds_of
from megatron.adaptive.transport.worker import Worker

OPEN_S = 300.0
"""Maximum time in seconds to open a channel. Opening is fast, but ranks may start minutes apart.
"""

FREE_S = 30.0
"""Maximum time in seconds to free all communicators of a rank."""

MOST_CTAS = 8
"""Maximum number of thread blocks (CTAs) that NCCL uses to transfer a message.

By default, NCCL may use 32 blocks or more. During a transfer, each block occupies a multiprocessor
of the GPU, which delays computations, and needs its own buffers in GPU memory. A rank in the middle
of a pipeline has four channels, which may all transfer at the same time. Both ends of a channel
must use the same value. The value has not been tuned on GPUs. NCCL's environment variable
``NCCL_MAX_CTAS`` overrides it.
"""

_SEED_BYTES = 40
_FIRST = -1
"""Priority of the CUDA streams for messages. Compute streams have a lower priority.

CUDA maps streams to a small number of hardware queues. A kernel that cannot start yet blocks the
kernels of other streams in the same queue. Streams with different priorities use different queues,
so messages do not wait for computations.
"""


class NcclTransport(GlooTransport):
    """Sends and receives tensors over NCCL, with a communicator per peer and direction.

    Args:
        group: Gloo process group of the pipeline's ranks. It is only used for headers.
        channels: Communicators of this rank's channels.
        streams: Object that provides streams of the device.
        peers: Global ranks with which this rank exchanges messages.
        device: Device for received tensors.
        describe: Function that returns the name of a peer, with host and stage, for error messages.
        timeout_s: Maximum time in seconds that a send waits for a peer that is not receiving
            messages.
        completions: Queue for received messages and failures, or ``None`` to create a new queue.
    """

    name = "nccl"

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        channels: Channels,
        streams: Streams,
        peers: Sequence[int],
        device: torch.device,
        describe: Callable[[int], str] = lambda rank: f"rank {rank}",
        timeout_s: float = 600.0,
        completions: Completions | None = None,
    ) -> None:
        self._channels = channels
        self._streams = streams
        self._rank = dist.get_rank()
        self._failures: dict[int, Exception] = {}
        self._senders = {
            peer: Worker(
                f"send-to-{peer}", functools.partial(self._send_failed, peer), streams.private
            )
            for peer in peers
        }
        super().__init__(
            group,
            peers=peers,
            device=device,
            payload_shape=None,
            dtype=torch.float32,
            describe=describe,
            timeout_s=timeout_s,
            completions=completions,
        )

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        if peer in self._failures:
            raise self._failures[peer]
        payload = settled(tensor.detach())
        header = Header(label, tuple(payload.shape), payload.dtype, self._sent[peer])
        # Check the header now, so that invalid values are reported before anything is sent.
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
                f"{count} messages were not received within {timeout_s:g} s by "
                f"{', '.join(map(self._describe, slow))}; check that each receiver is running and "
                "reachable"
            )

    def close(self) -> None:
        if self._closing:
            return
        is_idle = False
        try:
            super().close()
            is_idle = True
        finally:
            for sender in self._senders.values():
                is_idle = sender.close(CLOSE_S if is_idle else 0.0) and is_idle
            self._channels.free(is_idle=is_idle)

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
        """Sends a message to ``peer``, and blocks the channel's thread until the send has finished.

        The message consists of ``header`` and ``payload``. The send begins when the device has
        reached ``computed``, the moment at which the payload has been computed.
        """
        if peer in self._failures:
            return
        computed.synchronize()
        packet = Packet(None, self._dtype)
        packet.fill(header, None)
        announced = self._start(peer, packet.raw, 2 * (header.sequence % DEPTH))
        if payload.numel():
            self._channels.outgoing[peer].send([raw(payload)], int(peer > self._rank), 0).wait()
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
        """Waits for the payload from ``peer`` that ``header`` describes, and returns it."""
        # Allocate the payload in this thread's stream, so that the receive does not wait for
        # earlier computations.
        payload = torch.empty(header.shape, dtype=header.dtype, device=self._device)
        if payload.numel():
            self._channels.incoming[peer].recv([raw(payload)], int(peer > self._rank), 0).wait()
            self._streams.mark().synchronize()
        return payload

    def _arrival(self, label: Label, peer: int, payload: torch.Tensor) -> Arrival:
        take = functools.partial(self._streams.use, payload)
        return HeldArrival(label, peer, payload.nbytes, take, time.monotonic_ns())


class Channels:
    """Holds the communicators of this rank's channels.

    Args:
        rank: Global rank of this process.
        groups: Communicators of the channels to and from this rank, keyed by the global ranks of
            sender and receiver. The channels must be in the same order on all ranks.
        device: Device of this process.

    Attributes:
        outgoing: Communicators for messages to each peer, keyed by global rank. The lower rank of
            the pair has index 0 in the communicator.
        incoming: Communicators for messages from each peer, keyed by global rank.
    """

    def __init__(
        self, rank: int, groups: Mapping[tuple[int, int], Any], device: torch.device
    ) -> None:
        self.outgoing = {end: group for (start, end), group in groups.items() if start == rank}
        self.incoming = {start: group for (start, end), group in groups.items() if end == rank}
        self._groups = groups
        self._device = device

    def free(self, *, is_idle: bool) -> None:
        """Frees the communicators. Blocks for at most :data:`FREE_S` seconds.

        Freeing an idle communicator blocks until the other end also frees it, so all ranks free
        their communicators one at a time and in the same order. Prints a warning if the other end
        does not free a communicator in time, or if there is an error.

        Errors during an abort are ignored, because they would hide the error that caused the abort.

        Args:
            is_idle: Whether no operations are pending. If False, pending operations are aborted,
                because they might never complete.
        """
        end_s = time.monotonic() + FREE_S
        failures: list[str] = []
        threads: dict[str, threading.Thread] = {}
        for (sender, receiver), group in self._groups.items():
            # Older torch releases have neither ``shutdown`` nor ``abort``. They free a communicator
            # when its last reference is released.
            end = getattr(group, "shutdown" if is_idle else "abort", None)
            if end is None:
                continue
            name = f"rank {sender} to rank {receiver}"
            thread = threading.Thread(
                target=self._end,
                args=(end, name, failures),
                name=f"free-{sender}-{receiver}",
                daemon=True,
            )
            thread.start()
            threads[name] = thread
            # An abort may wait for the peer until the communicator's timeout. Start all aborts
            # concurrently, because a peer may first have to abort another communicator.
            if is_idle:
                thread.join(max(0.0, end_s - time.monotonic()))
        for name, thread in threads.items():
            thread.join(max(0.0, end_s - time.monotonic()))
            if thread.is_alive():
                failures.append(f"{name}: the other end did not free it within {FREE_S:g} s")
        if is_idle and failures:
            say(f"warning: channels over NCCL could not be freed: {'; '.join(failures)}")

    def _end(self, end: Callable[[], None], name: str, failures: list[str]) -> None:
        """Calls ``end``, which frees the communicator of channel ``name``. Runs in a thread.

        If ``end`` raises an error, adds the error's text to ``failures``.
        """
        try:
            make_current(self._device)
            end()
        except Exception as error:
            failures.append(f"{name}: {_first_line(error)}")


# The transport accesses the device only through the Streams protocol, so tests can run its threads
# without a GPU.


class Moment(Protocol):
    """Point in a stream after all work that has been submitted so far."""

    def synchronize(self) -> None:
        """Waits until the device has done all work before this point. Releases the GIL."""


class Streams(Protocol):
    """Provides the streams of a device. All methods are thread-safe."""

    def private(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that makes this device and a new stream current."""

    def mark(self) -> Moment:
        """Returns the point after all work submitted so far to this thread's current stream."""

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes ``tensor``, which was computed in another stream, usable in the current stream.

        The allocator does not reuse the tensor's memory until the current stream has finished with
        it.
        """


class CudaStreams:
    """Provides CUDA streams of a GPU.

    Args:
        device: GPU with its index, such as ``cuda:0``.
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
    """Replaces CUDA streams on a CPU, where all work is synchronous."""

    def private(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self) -> Moment:
        return _PASSED

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _Passed:
    """Moment that has already been reached."""

    def synchronize(self) -> None:
        """Returns immediately, because all work is already complete."""


_PASSED = _Passed()


class NcclKind(TransportKind):
    """Declares NCCL, which can connect ranks that each have their own GPU."""

    reason = "each has a GPU of its own"

    def lacks(self, facts: RankFacts) -> str | None:
        if facts.device.type != "cuda":
            return "it has no GPU"
        return (
            None
            if facts.own_gpu
            else "it shares its GPU with another rank, or the job's backend is gloo"
        )

    def is_candidate(self, first: Endpoint, second: Endpoint) -> bool:
        return "cuda" in (first.device, second.device)

    def open(self, opening: Opening) -> Transport | None:
        group = gloo_group(opening.members, opening.gather)
        channels = self._channels(opening)
        if not opening.peers:
            return None
        return NcclTransport(
            group,
            peers=opening.peers,
            device=opening.accelerator.device,
            describe=opening.describe,
            timeout_s=opening.timeout_s,
            completions=opening.completions,
            channels=channels,
            streams=self.streams(opening),
        )

    def streams(self, opening: Opening) -> Streams:
        """Returns the CUDA streams that the channels use."""
        return CudaStreams(opening.accelerator.device)

    def pair_group(self, opening: Opening, store: dist.Store, index: int) -> Any:
        """Creates a communicator for two ranks, which find each other through a store.

        No other rank takes part. The two ranks connect when the first message is sent.

        Args:
            opening: Settings for opening the transport.
            store: Store that only the two ranks use.
            index: Index of this rank in the communicator. The lower rank of the pair has index 0.
        """
        # High-priority streams use separate hardware queues, so messages do not wait for kernels.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = datetime.timedelta(seconds=max(opening.timeout_s, OPEN_S))
        # torch does not have this attribute if it was built with an old NCCL release.
        config = getattr(options, "config", None)
        if config is not None:
            config.max_ctas = MOST_CTAS
        return dist.ProcessGroupNCCL(store, index, 2, options)

    def _channels(self, opening: Opening) -> Channels:
        """Creates a communicator for each channel to or from this rank. Every rank must call this.

        All ranks connect their pairs in the same order, in rounds in which no rank occurs twice.
        This order avoids deadlocks, and lets the pairs of a round connect concurrently. The
        channels are later freed in the same order.

        Raises:
            TransportError: A channel could not be opened. The error is raised on all ranks.
        """
        me = opening.rank
        gathered = opening.gather((list(opening.peers), secrets.token_hex(_SEED_BYTES)))
        pairs = {
            (min(rank, peer), max(rank, peer))
            for rank, (rank_peers, _) in enumerate(gathered)
            for peer in rank_peers
        }
        default: Any = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"channels/{gathered[0][1]}", default)
        groups: dict[tuple[int, int], Any] = {}
        failure: str | None = None
        try:
            for low, high in rounds_of(pairs):
                if me in (low, high):
                    for sender, receiver in ((low, high), (high, low)):
                        shared = dist.PrefixStore(f"{sender}-{receiver}", store)
                        group = self.pair_group(opening, shared, int(me == high))
                        # Record the group before it connects, so that it is freed even if
                        # connecting fails.
                        groups[sender, receiver] = group
                        _send_probe(group, opening, sender, receiver)
            opening.accelerator.synchronize()
        except RuntimeError as error:
            failure = f"rank {me}: a channel over NCCL cannot be opened: {_first_line(error)}"
        failures = [text for text in opening.gather(failure) if text]
        channels = Channels(me, groups, opening.accelerator.device)
        if failures:
            channels.free(is_idle=False)
            raise TransportError(f"{failures[0]}; choose another transport with --transport")
        return channels


def _send_probe(group: Any, opening: Opening, sender: int, receiver: int) -> None:
    """Sends a first message from rank ``sender`` to rank ``receiver``, which connects the ranks.

    Both ranks must call this function. ``group`` is the communicator of the channel.
    """
    probe = torch.zeros(1, device=opening.accelerator.device)
    operation = group.send if opening.rank == sender else group.recv
    operation([probe], int(opening.rank == min(sender, receiver)), 0).wait()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
