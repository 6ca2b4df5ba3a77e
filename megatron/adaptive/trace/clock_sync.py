"""Compares the clocks of a running job, so that its trace has one time.

Ranks of one machine share a clock and need nothing. Of every other machine one rank asks rank 0 for
its time, in a short burst of exchanges now and then, over a connection of its own::

    first rank of another machine        rank 0
      t0 ── token, number ──────────────> t1 (stamped by the kernel)
      t3 <─ number, t1, t2 ────────────── t2
      (stamped by the kernel)

Both ends sleep in the kernel in between. Where it can, the kernel stamps what arrives, so that it
does not matter how long a thread waits for a processor or for the interpreter's lock. What the
samples say is worked out when the trace is read (``trace.clock``). A job goes on without them:
whoever cannot be reached is missing in the samples, and the trace's reader says so.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron.adaptive.trace.event import ClockSamples

__all__ = ["ClockServer", "ClockSync", "ClockSampler", "start_clock_sync"]

Clock = Callable[[], int]
Gather = Callable[[Any], Sequence[Any]]

BURST = 16
PAUSE_S = 0.001
"""Between two exchanges of a burst, so that they do not share one moment's bad luck."""

FIRST_PERIOD_S, LAST_PERIOD_S = 1.0, 10.0
"""Between two bursts; the period doubles, because the drift shows only over time."""

PATIENCE_S = 1.0
CONNECT_S = 5.0
TRIES = 3

_REQUEST = struct.Struct("!8sq")
_ANSWER = struct.Struct("!qqq")
# Of <asm-generic/socket.h>; the socket module has no name for it.
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("=qq")
_STAMP_ROOM = 64


class ClockSync:
    """This rank's part: rank 0 answers, the first rank of each other machine asks.

    Args:
        parts: what runs, closed with this.
    """

    def __init__(self, parts: Sequence[ClockServer | ClockSampler]) -> None:
        self._parts = parts

    def close(self) -> None:
        """Take a last burst and stop. Blocks for two seconds at most; idempotent."""
        for part in self._parts:
            part.close()


def start_clock_sync(
    *,
    rank: int,
    clock_id: str,
    address: str,
    gather: Gather,
    deliver: Callable[[ClockSamples], None],
    now: Clock = time.monotonic_ns,
) -> ClockSync:
    """Start comparing clocks. Collective over all ranks of the job.

    Args:
        rank: global rank.
        clock_id: of this rank's clock, see ``TraceHeader.clock``.
        address: where other machines reach rank 0.
        gather: gives every rank what each rank gave, by rank.
        deliver: takes samples; called from another thread.
        now: this rank's clock.
    """
    ids = list(gather(clock_id))
    foreign = {name: at for at, name in reversed(list(enumerate(ids))) if name != ids[0]}
    parts: list[ClockServer | ClockSampler] = []
    place = None
    if foreign and rank == 0:
        with contextlib.suppress(OSError):
            server = ClockServer(now)
            parts.append(server)
            place = (address, server.port, server.token)
    if foreign:
        place = gather(place)[0]
    if place is not None and foreign.get(clock_id) == rank:
        parts.append(ClockSampler(*place, deliver=deliver, now=now))
    return ClockSync(parts)


class ClockServer:
    """Sends the time to whoever knows the token.

    Args:
        now: the clock.

    Attributes:
        port: where it listens, on all addresses.
        token: what a request must carry, 8 bytes.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(self, now: Clock = time.monotonic_ns) -> None:
        self.token = secrets.token_bytes(8)
        self._now = now
        self._listener = _listen()
        self.port: int = self._listener.getsockname()[1]
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pending: dict[socket.socket, bytes] = {}
        self._thread = threading.Thread(target=self._serve, name="clock-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, after a moment in which others take their last samples. Idempotent."""
        if not self._thread.is_alive():
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join(2 * PATIENCE_S)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            end: float | None = None
            while end is None or (self._pending and time.monotonic() < end):
                rest = None if end is None else max(0.0, end - time.monotonic())
                for key, _ in selector.select(rest):
                    if key.fileobj is self._listener:
                        self._welcome(selector)
                    elif key.fileobj == self._wake:
                        end = time.monotonic() + PATIENCE_S
                        selector.unregister(self._wake)
                    else:
                        self._answer(selector, key.fileobj)
        for open_socket in (*self._pending, self._listener):
            open_socket.close()
        os.close(self._wake)

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            _prepare(connection)
            self._pending[connection] = b""
            selector.register(connection, selectors.EVENT_READ)

    def _answer(self, selector: selectors.BaseSelector, connection: Any) -> None:
        try:
            data, stamp_ns = _receive(connection, _REQUEST.size, self._now)
            request = self._pending[connection] + data
            if not data or not self.token.startswith(request[: len(self.token)]):
                raise ConnectionError("closed, or not one of us")
            if len(request) == _REQUEST.size:
                number = _REQUEST.unpack(request)[1]
                request = b""
                connection.sendall(_ANSWER.pack(number, stamp_ns, self._now()))
            self._pending[connection] = request
        except OSError:
            selector.unregister(connection)
            del self._pending[connection]
            connection.close()


class ClockSampler:
    """Asks rank 0 for its time, in a thread.

    Args:
        host: where rank 0 is.
        port: its clock server's port.
        token: its clock server's token.
        deliver: takes the samples of each burst.
        now: this rank's clock.
        periods_s: shortest and longest time between two bursts.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        *,
        deliver: Callable[[ClockSamples], None],
        now: Clock = time.monotonic_ns,
        periods_s: tuple[float, float] = (FIRST_PERIOD_S, LAST_PERIOD_S),
    ) -> None:
        self._place = (host, port)
        self._token = token
        self._deliver = deliver
        self._now = now
        self._periods_s = periods_s
        self._number = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take a last burst and stop. Idempotent."""
        self._closed.set()
        self._thread.join(2 * PATIENCE_S)

    def _run(self) -> None:
        connection: socket.socket | None = None
        period_s, longest_s = self._periods_s
        failures, is_last = 0, False
        while failures < TRIES:
            try:
                if connection is None:
                    connection = socket.create_connection(self._place, CONNECT_S)
                    _prepare(connection)
                    connection.settimeout(PATIENCE_S)
                samples = self._burst(connection)
                self._deliver(ClockSamples(0, samples))
                failures = 0
            except OSError:
                failures += 1
                if connection is not None:
                    connection.close()
                connection = None
            if is_last:
                break
            is_last = self._closed.wait(period_s)
            period_s = min(2 * period_s, longest_s)
        if connection is not None:
            connection.close()

    def _burst(self, connection: socket.socket) -> tuple[tuple[int, int, int, int], ...]:
        samples = []
        for _ in range(BURST):
            self._number += 1
            request = _REQUEST.pack(self._token, self._number)
            sent_ns = self._now()
            connection.sendall(request)
            answer, back_ns = b"", 0
            while len(answer) < _ANSWER.size:
                data, back_ns = _receive(connection, _ANSWER.size - len(answer), self._now)
                if not data:
                    raise ConnectionError("rank 0 closed the connection")
                answer += data
            number, received_ns, answered_ns = _ANSWER.unpack(answer)
            if number != self._number:
                raise ConnectionError("an answer to another request")
            samples.append((sent_ns, received_ns, answered_ns, back_ns))
            time.sleep(PAUSE_S)
        return tuple(samples)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def _receive(connection: socket.socket, size: int, now: Clock) -> tuple[bytes, int]:
    """Receive up to ``size`` bytes, and when they came on the clock ``now``.

    The kernel stamps with the time of day; what it is worth is how long ago that was.
    """
    data, ancillary, _, _ = connection.recvmsg(size, _STAMP_ROOM)
    moment_ns, present_ns = time.time_ns(), now()
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = _TIMESPEC.unpack(value[: _TIMESPEC.size])
            age_ns = moment_ns - (seconds * 10**9 + nanoseconds)
            if 0 <= age_ns < 10**9:  # else the time of day was set in between
                return data, present_ns - age_ns
    return data, present_ns
