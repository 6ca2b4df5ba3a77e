"""What a pattern of ``patterns.py`` needs of a transport, and the peers' way of giving it.

A library is imported when its connector is opened, so that a process has only what it measures.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

WINDOW = 4
"""Messages that a peer may have under way: more made none of them faster."""


class Connector(Protocol):
    """One transport between the two processes of a pair, both directions."""

    def expect(self, nbytes: int, count: int) -> None:
        """Announce that ``count`` messages of ``nbytes`` will be received."""

    def send(self, payload: Any) -> None:
        """Start sending; may wait for older messages."""

    def settle(self, under_way: int = 0) -> None:
        """Wait until no more than ``under_way`` payloads sent are still needed here."""

    def receive(self) -> Any:
        """Wait for the next message; the payload belongs to the caller until the next call."""

    def half_round_trip_s(self, payload: Any, rounds: int) -> float:
        """Seconds from one process to the other, from ``rounds`` there and back."""

    def close(self) -> None:
        """End it; both processes do so."""


def half_of(
    rank: int, send: Callable[[], object], receive: Callable[[], object], rounds: int
) -> float:
    """Seconds of half a round trip, from ``rounds`` of which rank 0 sends first."""
    first, second = (receive, send) if rank else (send, receive)
    start = time.perf_counter()
    for _ in range(rounds):
        first()
        second()
    return (time.perf_counter() - start) / rounds / 2


class Posted:
    """A transport that fills buffers given beforehand: gloo and MPI.

    Args:
        rank: of this process.
        make_buffer: makes a touched payload of so many bytes.
        start_send: starts to send a payload; returns a request.
        start_receive: starts to receive into a buffer; returns a request.
        wait: waits for a request.
        close: ends the transport.
    """

    def __init__(
        self,
        rank: int,
        make_buffer: Callable[[int], Any],
        start_send: Callable[[Any], Any],
        start_receive: Callable[[Any], Any],
        wait: Callable[[Any], Any],
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self.rank = rank
        self.close = close
        self._make_buffer = make_buffer
        self._start_send = start_send
        self._start_receive = start_receive
        self._wait = wait
        self._sends: deque[Any] = deque()
        self._receives: deque[tuple[Any, Any]] = deque()
        self._buffers: dict[int, list[Any]] = {}
        self._nbytes = self._left = self._next = 0

    def expect(self, nbytes: int, count: int) -> None:
        """See :class:`Connector`."""
        assert not self._receives
        if nbytes not in self._buffers:
            # Of the last large size only: memory.
            self._buffers = {n: b for n, b in self._buffers.items() if n < 4096}
            # One more than are posted: the caller holds one.
            self._buffers[nbytes] = [self._make_buffer(nbytes) for _ in range(WINDOW + 1)]
        self._nbytes, self._left, self._next = nbytes, count, 0
        for _ in range(WINDOW):
            self._post()

    def send(self, payload: Any) -> None:
        """See :class:`Connector`."""
        self.settle(WINDOW - 1)
        self._sends.append(self._start_send(payload))

    def settle(self, under_way: int = 0) -> None:
        """See :class:`Connector`."""
        while len(self._sends) > under_way:
            self._wait(self._sends.popleft())

    def receive(self) -> Any:
        """See :class:`Connector`."""
        request, buffer = self._receives.popleft()
        self._wait(request)
        self._post()
        return buffer

    def half_round_trip_s(self, payload: Any, rounds: int) -> float:
        """See :class:`Connector`."""
        self.expect(payload.nbytes, rounds)
        seconds = half_of(self.rank, lambda: self.send(payload), self.receive, rounds)
        self.settle()
        return seconds

    def _post(self) -> None:
        if self._left:
            buffers = self._buffers[self._nbytes]
            buffer = buffers[self._next % len(buffers)]
            self._left -= 1
            self._next += 1
            self._receives.append((self._start_receive(buffer), buffer))


def open_gloo(rank: int, make_buffer: Callable[[int], Any]) -> Posted:
    """Opens ``torch.distributed`` with gloo; collective."""
    import torch.distributed as dist

    peer, group = 1 - rank, dist.new_group([0, 1], backend="gloo")
    return Posted(
        rank,
        make_buffer,
        lambda payload: group.send([payload], peer, 0),
        lambda buffer: group.recv([buffer], peer, 0),
        lambda request: request.wait(),
        lambda: dist.destroy_process_group(group),
    )


class Mpi(Posted):
    """An MPI library, which was chosen when the processes were started."""

    def __init__(self, rank: int, make_buffer: Callable[[int], Any]) -> None:
        from mpi4py import MPI

        peer, world = 1 - rank, MPI.COMM_WORLD
        super().__init__(
            rank,
            make_buffer,
            lambda payload: world.Isend(payload, peer),
            lambda buffer: world.Irecv(buffer, peer),
            lambda request: request.Wait(),
        )
        self._world = world

    def half_round_trip_s(self, payload: Any, rounds: int) -> float:
        """See :class:`Connector`; by blocking calls, the fastest that there is."""
        world, peer = self._world, 1 - self.rank
        send, receive = lambda: world.Send(payload, peer), lambda: world.Recv(payload, peer)
        return half_of(self.rank, send, receive, rounds)
