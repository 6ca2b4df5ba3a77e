"""What a pattern of ``patterns.py`` needs of a transport, and the peers' way of giving it.

A library is imported when its connector is opened, so that a process has only what it measures.
"""

from __future__ import annotations

import time
from collections import deque
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


def ping_pong(link: Connector, rank: int, payload: Any, nbytes: int, rounds: int) -> float:
    """Half a round trip by :meth:`Connector.send` and :meth:`Connector.receive`."""
    send, receive = link.send, link.receive
    link.expect(nbytes, rounds)
    start = time.perf_counter()
    if rank == 0:
        for _ in range(rounds):
            send(payload)
            receive()
    else:
        for _ in range(rounds):
            receive()
            send(payload)
    link.settle()
    return (time.perf_counter() - start) / rounds / 2


class Posted:
    """A transport that fills buffers given beforehand: gloo and MPI."""

    def __init__(self, make_buffer: Any) -> None:
        self._make_buffer = make_buffer
        self._sends: deque[Any] = deque()
        self._receives: deque[tuple[Any, Any]] = deque()
        self._buffers: dict[int, list[Any]] = {}
        self._nbytes = self._left = self._next = 0

    def start_send(self, payload: Any) -> Any:
        """Start a send; returns something to :meth:`wait` for."""
        raise NotImplementedError

    def start_receive(self, buffer: Any) -> Any:
        """Start a receive; returns something to :meth:`wait` for."""
        raise NotImplementedError

    def wait(self, request: Any) -> None:
        """Wait for a request."""
        raise NotImplementedError

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
        self._sends.append(self.start_send(payload))

    def settle(self, under_way: int = 0) -> None:
        """See :class:`Connector`."""
        while len(self._sends) > under_way:
            self.wait(self._sends.popleft())

    def receive(self) -> Any:
        """See :class:`Connector`."""
        request, buffer = self._receives.popleft()
        self.wait(request)
        self._post()
        return buffer

    def _post(self) -> None:
        if self._left:
            buffers = self._buffers[self._nbytes]
            buffer = buffers[self._next % len(buffers)]
            self._left -= 1
            self._next += 1
            self._receives.append((self.start_receive(buffer), buffer))


class Gloo(Posted):
    """``torch.distributed`` with gloo.

    Args:
        rank: of this process.
        make_buffer: makes a touched tensor of so many bytes.
    """

    def __init__(self, rank: int, make_buffer: Any) -> None:
        import torch.distributed as dist

        super().__init__(make_buffer)
        self._rank = rank
        self._peer = 1 - rank
        self._group = dist.new_group([0, 1], backend="gloo")
        self._dist = dist

    def start_send(self, payload: Any) -> Any:
        """See :class:`Posted`."""
        return self._group.send([payload], self._peer, 0)

    def start_receive(self, buffer: Any) -> Any:
        """See :class:`Posted`."""
        return self._group.recv([buffer], self._peer, 0)

    def wait(self, request: Any) -> None:
        """See :class:`Posted`."""
        request.wait()

    def half_round_trip_s(self, payload: Any, rounds: int) -> float:
        """See :class:`Connector`."""
        return ping_pong(self, self._rank, payload, payload.nbytes, rounds)

    def close(self) -> None:
        """See :class:`Connector`."""
        self._dist.destroy_process_group(self._group)


class Mpi(Posted):
    """An MPI library, which was chosen when the processes were started.

    Args:
        rank: of this process.
        make_buffer: makes a touched array of so many bytes.
    """

    def __init__(self, rank: int, make_buffer: Any) -> None:
        from mpi4py import MPI

        super().__init__(make_buffer)
        self._rank = rank
        self._peer = 1 - rank
        self._world = MPI.COMM_WORLD

    def start_send(self, payload: Any) -> Any:
        """See :class:`Posted`."""
        return self._world.Isend(payload, self._peer)

    def start_receive(self, buffer: Any) -> Any:
        """See :class:`Posted`."""
        return self._world.Irecv(buffer, self._peer)

    def wait(self, request: Any) -> None:
        """See :class:`Posted`."""
        request.Wait()

    def half_round_trip_s(self, payload: Any, rounds: int) -> float:
        """See :class:`Connector`; by blocking calls, the fastest that there is."""
        send, receive, peer = self._world.Send, self._world.Recv, self._peer
        start = time.perf_counter()
        if self._rank == 0:
            for _ in range(rounds):
                send(payload, peer)
                receive(payload, peer)
        else:
            for _ in range(rounds):
                receive(payload, peer)
                send(payload, peer)
        return (time.perf_counter() - start) / rounds / 2

    def close(self) -> None:
        """See :class:`Connector`."""
