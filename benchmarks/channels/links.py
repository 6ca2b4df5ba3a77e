"""Implements links between two processes over gloo and MPI."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

WINDOW = 4
"""Number of messages in flight with gloo or MPI. Larger numbers did not make messages faster."""


class Posted:
    """Link over gloo or MPI, which starts to receive messages before they arrive.

    Args:
        make_buffer: Function that allocates a buffer with the given number of bytes.
        start_send: Function that starts sending a payload, and returns a request.
        start_receive: Function that starts receiving into a buffer, and returns a request.
        wait: Function that waits for a request.
    """

    def __init__(
        self,
        make_buffer: Callable[[int], Any],
        start_send: Callable[[Any], Any],
        start_receive: Callable[[Any], Any],
        wait: Callable[[Any], Any],
    ) -> None:
        self._make_buffer = make_buffer
        self._start_send = start_send
        self._start_receive = start_receive
        self._wait = wait
        self._sends: deque[Any] = deque()
        self._receives: deque[tuple[Any, Any]] = deque()
        self._buffers: dict[int, list[Any]] = {}
        self._nbytes = self._left = self._next = 0

    def expect(self, nbytes: int, count: int) -> None:
        """Starts to receive the first of ``count`` messages of ``nbytes`` bytes (see ``Link``)."""
        assert not self._receives
        if nbytes not in self._buffers:
            # The caller holds one buffer, so allocate one more than there are pending receives.
            self._buffers = {nbytes: [self._make_buffer(nbytes) for _ in range(WINDOW + 1)]}
        self._nbytes, self._left, self._next = nbytes, count, 0
        for _ in range(WINDOW):
            self._post()

    def send(self, payload: Any) -> None:
        """Starts to send ``payload`` (see ``Link``)."""
        while len(self._sends) >= WINDOW:
            self._wait(self._sends.popleft())
        self._sends.append(self._start_send(payload))

    def settle(self) -> None:
        """Waits until all payloads have been sent (see ``Link``)."""
        while self._sends:
            self._wait(self._sends.popleft())

    def receive(self) -> Any:
        """Waits for the next message, and returns it (see ``Link``)."""
        request, buffer = self._receives.popleft()
        self._wait(request)
        self._post()
        return buffer

    def close(self) -> None:
        """Does nothing, because the process group or MPI ends when the process exits."""

    def _post(self) -> None:
        if self._left:
            buffers = self._buffers[self._nbytes]
            buffer = buffers[self._next % len(buffers)]
            self._left -= 1
            self._next += 1
            self._receives.append((self._start_receive(buffer), buffer))


def open_mpi(peer: int, make_buffer: Callable[[int], Any]) -> Posted:
    """Opens a link to the process ``peer`` over MPI, with the MPI library of ``mpiexec``.

    ``make_buffer`` allocates a buffer with the given number of bytes.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return Posted(
        make_buffer,
        lambda payload: world.Isend(payload, peer),
        lambda buffer: world.Irecv(buffer, peer),
        lambda request: request.Wait(),
    )


def open_gloo(peer: int, make_buffer: Callable[[int], Any]) -> Posted:
    """Opens a link to the process ``peer`` over gloo. Both processes must make this call.

    ``make_buffer`` allocates a buffer with the given number of bytes.
    """
    import torch.distributed as dist

    group = dist.new_group([0, 1], backend="gloo")
    return Posted(
        make_buffer,
        lambda payload: group.send([payload], peer, 0),
        lambda buffer: group.recv([buffer], peer, 0),
        lambda request: request.wait(),
    )
