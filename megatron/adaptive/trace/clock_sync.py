"""Compares the clocks of a running job, so that its trace has one time.

Ranks of one machine share a clock and need nothing. Of every other machine one rank asks rank 0 for
its time, in a short burst of exchanges now and then, over a connection of its own::

    first rank of another machine        rank 0
      t0 ── number ─────────────────────> t1 (stamped by the kernel)
      t3 <─ number, t1, t2 ────────────── t2
      (stamped by the kernel)

Both have proved a secret of the job before. They sleep in the kernel in between. Where it can, the
kernel stamps what arrives, so that it does not matter how long a thread waits for a processor or
for the interpreter's lock. What the samples say is worked out when the trace is read
(``trace.clock``). A job goes on without them: whoever cannot be reached is missing in the samples,
and the trace's reader says so.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from megatron.adaptive.handshake import Gate, SealedSocket, bind, dial, new_secret, to_log
from megatron.adaptive.trace.event import ClockSamples

_LOG = logging.getLogger(__name__)
_PURPOSE = "clocks"
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

_REQUEST = struct.Struct("!q")
_ANSWER = struct.Struct("!qqq")
# Of <asm-generic/socket.h>; the socket module has no name for it.
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("=qq")
_STAMP_ROOM = 64


def start_clock_sync(
    *,
    rank: int,
    clock_id: str,
    address: str,
    gather: Gather,
    deliver: Callable[[ClockSamples], None],
    now: Clock = time.monotonic_ns,
) -> ExitStack:
    """Start comparing clocks: rank 0 answers, the first rank of each other machine asks.

    Collective over all ranks of the job.

    Args:
        rank: global rank.
        clock_id: of this rank's clock, see ``TraceHeader.clock``.
        address: where other machines reach rank 0.
        gather: gives every rank what each rank gave, by rank.
        deliver: takes samples; called from another thread.
        now: this rank's clock.

    Returns:
        This rank's part; its ``close()`` takes a last burst and stops. That blocks for two seconds
        at most and is idempotent.
    """
    ids = list(gather(clock_id))
    foreign = {name: at for at, name in reversed(list(enumerate(ids))) if name != ids[0]}
    parts, place = ExitStack(), None
    if foreign and rank == 0:
        with contextlib.suppress(OSError):
            server = ClockServer(now, address)
            parts.callback(server.close)
            place = (address, server.port, server.secret)
    if foreign:
        place = gather(place)[0]
    if place is not None and foreign.get(clock_id) == rank:
        parts.callback(ClockSampler(*place, deliver=deliver, now=now).close)
    return parts


class ClockServer:
    """Sends the time to whoever knows the secret, with a thread for each connection.

    Args:
        now: the clock.
        host: address to listen at; all where it is empty or not of this machine.

    Attributes:
        port: where it listens.
        secret: that visitors prove.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(self, now: Clock = time.monotonic_ns, host: str = "") -> None:
        self.secret = new_secret()
        self._now = now
        self._serving: dict[threading.Thread, socket.socket] = {}
        listening = bind(host, 0)
        self._gate = Gate(listening, lambda: self.secret, _PURPOSE, self._admit, to_log(_LOG))
        self.port = self._gate.port

    def close(self) -> None:
        """Stop, after a moment in which others take their last samples. Idempotent."""
        self._gate.close()
        end_s = time.monotonic() + PATIENCE_S
        while self._serving:
            thread, connection = self._serving.popitem()
            thread.join(max(0.0, end_s - time.monotonic()))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)

    def _admit(self, sealed: SealedSocket) -> None:
        thread = threading.Thread(
            target=self._serve, args=(sealed.socket,), name="clock-connection", daemon=True
        )
        self._serving[thread] = sealed.socket
        thread.start()

    def _serve(self, connection: socket.socket) -> None:
        request = b""
        with connection, contextlib.suppress(OSError):
            _prepare(connection)
            while True:
                data, stamp_ns = _receive(connection, _REQUEST.size - len(request), self._now)
                request += data
                if not data:
                    return
                if len(request) == _REQUEST.size:
                    (number,) = _REQUEST.unpack(request)
                    connection.sendall(_ANSWER.pack(number, stamp_ns, self._now()))
                    request = b""


class ClockSampler:
    """Asks rank 0 for its time, in a thread.

    Args:
        host: where rank 0 is.
        port: its clock server's port.
        secret: its clock server's.
        deliver: takes the samples of each burst.
        now: this rank's clock.
        periods_s: shortest and longest time between two bursts.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        *,
        deliver: Callable[[ClockSamples], None],
        now: Clock = time.monotonic_ns,
        periods_s: tuple[float, float] = (FIRST_PERIOD_S, LAST_PERIOD_S),
    ) -> None:
        self._place = (host, port)
        self._secret = secret
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
                    connection = dial(self._place, self._secret, _PURPOSE, CONNECT_S).socket
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
            request = _REQUEST.pack(self._number)
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
