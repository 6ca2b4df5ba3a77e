"""Contains programs that some tests of transports run on several ranks.

A program takes a :class:`Rank` and other arguments, and returns results for the test to check.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.engine.stop import StopRequest
from megatron.adaptive.errors import PeerLostError
from megatron.adaptive.transport.gloo import GlooTransport
from megatron.adaptive.transport.interface import CompletionQueue
from megatron.adaptive.transport.liveness import Watcher, here
from megatron.adaptive.transport.nccl import HostStreams, Moment

from .contract_rank import CPU, LIMIT_S, Rank, error_of, label, wait

# The following programs use the gloo transport.


def refused(rank: Rank) -> None:
    """Checks that the sender rejects tensors whose shape or dtype is not that of the channel."""
    transport, peer = rank.open("gloo", shape=(2, 3))
    if rank.rank == 1:
        assert wait(transport).label.action.microbatch == 5
        return
    name, text = error_of(lambda: transport.send(peer, label(0), torch.ones(3, 2)))
    assert name == "TransportError"
    assert "shape (3, 2) of torch.float32" in text
    assert "opened for (2, 3) of torch.float32" in text
    half = torch.ones(2, 3, dtype=torch.float16)
    name, text = error_of(lambda: transport.send(peer, label(0), half))
    assert (name, "float16" in text) == ("TransportError", True)
    transport.send(peer, label(5), torch.ones(2, 3))


def foreign(rank: Rank, header: list[int], shape: tuple[int, ...] | None) -> None:
    """Sends the invalid message ``header`` to rank 1, and returns the error that rank 1 gets.

    Rank 1 expects tensors of ``shape``, or of any shape if ``shape`` is ``None``.
    """
    rank.join_group()
    group = dist.new_group(backend="gloo")
    if rank.rank == 1:
        transport = GlooTransport(
            group, peers=[0], device=CPU, payload_shape=shape, dtype=torch.float32
        )
        seen = error_of(lambda: wait(transport))
        rank.mark("done")
        rank.exit_with(seen)
    works = [group.send([torch.tensor(header + [0] * (16 - len(header)))], 1, 0)]
    if shape is not None:
        works.append(group.send([torch.ones(shape)], 1, 1))
    rank.await_mark("done")
    rank.exit_with(len(works))


def disagree(rank: Rank, shape: tuple[int, ...]) -> None:
    """Opens a channel with different shapes on both ranks, and returns the error of rank 1."""
    transport, peer = rank.open("gloo", shape=shape if rank.rank else (2, 3))
    if rank.rank == 0:
        transport.send(peer, label(0), torch.ones(2, 3))
        rank.await_mark("done")
        rank.exit_with(None)
    seen = error_of(lambda: wait(transport))
    rank.mark("done")
    rank.exit_with(seen)


def stuck(rank: Rank) -> None:
    """Returns the error of a flush on rank 0 while the test suspends rank 1."""
    transport, peer = rank.open("gloo")
    if rank.rank == 1:
        rank.mark("ready")
        time.sleep(LIMIT_S)
    rank.await_mark("stopped")
    for microbatch in range(4):
        transport.send(peer, label(microbatch), torch.ones(1 << 20))
    rank.exit_with(error_of(lambda: transport.flush(0.5)))


# The following programs use the NCCL transport. In its channels, gloo replaces NCCL.


class HeldStreams(HostStreams):
    """Simulates a device on which work in streams finishes only when the test allows it.

    Attributes:
        reached: Events, keyed by a prefix of thread names. Work that was launched by a thread with
            this prefix finishes when the event is set.
        users: Names of the threads that used a received tensor in their current stream.
        within: Names of the threads that use a private stream.
    """

    def __init__(self, held: str) -> None:
        self.reached = {held: threading.Event()}
        self.users: list[str] = []
        self.within: set[str] = set()

    @contextlib.contextmanager
    def private(self) -> Iterator[None]:
        self.within.add(threading.current_thread().name)
        yield

    def mark(self) -> Moment:
        name = threading.current_thread().name
        return _Moment([event for held, event in self.reached.items() if name.startswith(held)])

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        self.users.append(threading.current_thread().name)
        return tensor


class _Moment:
    def __init__(self, events: list[threading.Event]) -> None:
        self._events = events

    def synchronize(self) -> None:
        assert all(event.wait(LIMIT_S) for event in self._events)


_HELD_SHAPE = (8191,)  # No other tensor in this process has this shape.


def _held_messages() -> int:
    return sum(
        type(item) is torch.Tensor
        and item.shape == _HELD_SHAPE
        and item.untyped_storage().nbytes() > 0
        for item in gc.get_objects()
    )


def many_sends(rank: Rank, count: int, ahead: int) -> list[int]:
    """Sends ``count`` messages to rank 1, which replies after every ``ahead`` messages.

    Returns:
        Number of sent tensors that rank 0 holds in memory, minus the number of messages that rank 1
        has not yet received. There is one value for each of several replies.
    """
    transport, peer = rank.open("nccl")
    if rank.rank == 1:
        for number in range(count):
            assert wait(transport).take()[0] == number
            if number % ahead == ahead - 1:
                transport.send(peer, label(number), torch.ones(1))
        return []
    excess = []
    for number in range(count):
        transport.send(peer, label(number), torch.full(_HELD_SHAPE, float(number)))
        if number % ahead == ahead - 1 and number >= 2 * ahead:
            taken = wait(transport).label.action.microbatch + 1
            if number % (6 * ahead) == ahead - 1:
                excess.append(_held_messages() - (number + 1 - taken))
    return excess


def late_computation(rank: Rank) -> list[str]:
    """Checks that a message is sent only after its tensor was computed.

    Returns:
        Names of the threads that use a private stream.
    """
    streams = HeldStreams("MainThread")
    rank.streams = streams
    transport, peer = rank.open("nccl")
    if rank.rank == 1:
        streams.reached["MainThread"].set()
        rank.await_mark("sent")
        assert transport.completions.wait(time.monotonic() + 0.3) is None
        rank.mark("nothing came")
        assert wait(transport).take().tolist() == [7.0, 7.0]
        return sorted(streams.within)
    computed = torch.zeros(2)
    # The call must return at once, although the tensor has not been computed yet.
    transport.send(peer, label(0), computed)
    rank.mark("sent")
    rank.await_mark("nothing came")
    computed.fill_(7.0)
    streams.reached["MainThread"].set()
    return sorted(streams.within)


def late_data(rank: Rank) -> list[str]:
    """Checks that a message is delivered when its data has arrived, not when its header has.

    Returns:
        Names of the threads that used the received tensor in their streams.
    """
    streams = HeldStreams("receive-from-0")
    rank.streams = streams
    transport, peer = rank.open("nccl")
    if rank.rank == 0:
        transport.send(peer, label(0), torch.ones(2))
        rank.mark("sent")
        return []
    rank.await_mark("sent")
    assert transport.completions.wait(time.monotonic() + 0.3) is None
    streams.reached["receive-from-0"].set()
    arrival = wait(transport)
    assert streams.users == []
    assert arrival.take().tolist() == [1.0, 1.0]
    return streams.users


def one_takes_nothing(rank: Rank) -> list[str]:
    """Checks that rank 0 can still send messages to rank 2 while rank 1 takes no messages.

    Returns:
        Class and text of the error of a flush on rank 0.
    """
    streams = HeldStreams("receive-from-0")
    rank.streams = streams
    transport, _ = rank.open("nccl", {0: [1, 2], 1: [0], 2: [0]}[rank.rank])
    if rank.rank != 1:
        streams.reached["receive-from-0"].set()
    if rank.rank == 0:
        for number in range(20):
            for peer in (1, 2):
                transport.send(peer, label(number), torch.full((1 << 18,), float(number)))
        rank.await_mark("all came")
        seen = error_of(lambda: transport.flush(0.3))
        rank.mark("flushed")
        return seen
    if rank.rank == 1:
        rank.await_mark("flushed")
        streams.reached["receive-from-0"].set()
    for number in range(20):
        arrival = wait(transport)
        assert (arrival.label, float(arrival.take()[-1])) == (label(number), float(number))
    if rank.rank == 2:
        rank.mark("all came")
    return []


def row(rank: Rank) -> int:
    """Checks that all neighbouring ranks in a row can exchange messages.

    Returns:
        Number of times that this rank opened an NCCL process group.
    """
    peers = [peer for peer in (rank.rank - 1, rank.rank + 1) if 0 <= peer < rank.num_ranks]
    transport, _ = rank.open("nccl", peers)
    for peer in peers:
        transport.send(peer, label(rank.rank), torch.ones(3))
    assert sorted(wait(transport).peer for _ in peers) == peers
    return rank.num_pairs


def broken_row(rank: Rank) -> list[str]:
    """Makes opening the channel between ranks 2 and 3 fail, and returns this rank's error."""
    rank.pair_limit_s = 3.0
    rank.fails_at = 1 if rank.rank == 2 else 0
    peers = [peer for peer in (rank.rank - 1, rank.rank + 1) if 0 <= peer < rank.num_ranks]
    return error_of(lambda: rank.open("nccl", peers))


# The following programs test that ranks notice when other ranks are lost.


def watch(
    rank: Rank,
    port: int,
    *,
    machines: list[str] | None = None,
    serve: bool = False,
    with_store: bool = True,
    on_lost: Any = lambda error: None,
    **options: Any,
) -> Watcher:
    """Joins the job whose store is at ``port``, and returns a watcher of its ranks.

    Args:
        rank: Rank of this process.
        port: Port of the store.
        machines: Names of the machines on which the ranks pretend to run.
        serve: Whether rank 0 serves the store. Otherwise, the test does.
        with_store: Whether the watcher may use the store.
        on_lost: Function to which the watcher passes the error when a rank is lost.
        options: Other options of the watcher.
    """
    store = dist.TCPStore("127.0.0.1", port, rank.num_ranks, serve and rank.rank == 0)
    rank.join_group(store)
    places: list[Any] = [None] * rank.num_ranks
    dist.all_gather_object(places, here(rank.rank))
    for host, machine in zip(places, machines or [], strict=False):
        host["machine"] = host["host"] = machine
    options = {"grace_s": 0.5, **options}
    return Watcher(places, rank.rank, store if with_store else None, on_lost, **options)


def blocked(rank: Rank, port: int, **options: Any) -> None:
    """Blocks each rank until its watcher ends the process.

    If there are three ranks, rank 0 waits in a collective. All other ranks wait for a message.
    """
    if options.pop("without_pidfd", False):
        del os.pidfd_open
    stop = StopRequest() if options.pop("with_stop", False) else None
    watcher = watch(rank, port, **options)
    watcher.position = "iteration 7"
    group = dist.new_group([0, rank.num_ranks - 1], backend="gloo")
    rank.mark(f"blocked {rank.rank}")
    if rank.rank == 0 and rank.num_ranks == 3:
        dist.all_reduce(torch.ones(1), group=group)
    CompletionQueue().wait(time.monotonic() + LIMIT_S)
    raise AssertionError(f"the rank is still alive, {stop}")


def broken(rank: Rank, port: int) -> None:
    """Returns the error that a collective on rank 0 raises after the test has killed rank 1."""
    watcher = watch(rank, port, grace_s=5.0)
    rank.mark(f"blocked {rank.rank}")
    if rank.rank == 1:
        time.sleep(LIMIT_S)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        rank.exit_with([str(error), str(watcher.verdict(10.0))])
    raise AssertionError("the collective succeeded")


def woken(rank: Rank, port: int, at_exit_s: int) -> None:
    """Waits for a message until a rank is lost, and then exits.

    Before it exits, the main thread keeps the GIL for ``at_exit_s`` seconds.
    """
    queue = CompletionQueue()
    calls = []

    def on_lost(error: PeerLostError) -> None:
        calls.append(str(error))
        queue.put(error)

    watcher = watch(rank, port, on_lost=on_lost, grace_s=1.0)
    rank.mark(f"blocked {rank.rank}")
    seen: list[Any] = error_of(lambda: queue.wait(time.monotonic() + LIMIT_S))
    seen += [str(watcher.verdict(0.0)), len(calls)]
    watcher.close()
    if at_exit_s:
        # This call does not release the GIL, so no other Python thread can run.
        ctypes.PyDLL(None).sleep(at_exit_s)
    rank.exit_with(seen)


def reporting(rank: Rank, port: int) -> None:
    """Reports a failure of rank 1, which then takes a long time to exit."""
    watcher = watch(rank, port)
    if rank.rank == 1:
        watcher.report("out of memory on device 0\nwith a second line")
        watcher.report("a later reason")
        rank.await_mark("seen")
        return
    time.sleep(LIMIT_S)


def leaving(rank: Rank, port: int, *, serve: bool) -> list[Any]:
    """Makes each rank leave the job without an error. Rank 2 leaves long after rank 1."""
    watcher = watch(rank, port, serve=serve)
    dist.barrier()
    if rank.rank == 2:
        rank.await_mark("one-is-gone")
        time.sleep(1.0)
    watcher.leave()
    watcher.close()
    watcher.close()
    threads = [thread.name for thread in threading.enumerate() if "liveness" in thread.name]
    return [str(watcher.verdict(0.0)), threads]


def closed(rank: Rank, port: int) -> None:
    """Closes the watcher of rank 0 before the test kills rank 1. Returns the watcher's verdict."""
    watcher = watch(rank, port)
    dist.barrier()
    if rank.rank == 1:
        rank.mark(f"blocked {rank.rank}")
        time.sleep(LIMIT_S)
    watcher.close()
    rank.mark("closed")
    rank.await_mark("killed")
    time.sleep(1.0)
    rank.exit_with(str(watcher.verdict(0.0)))
