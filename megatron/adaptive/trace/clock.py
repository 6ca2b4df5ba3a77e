"""One clock for all ranks: compares clocks while a job runs, aligns them when its trace is read.

Every process has a monotonic clock, named in its header; ranks of one machine share it.
Those of two machines differ by anything and drift apart by tens of microseconds a second. One of
them is the reference: that of the rank the samples were taken against, else of the first rank. Of
each other clock is known, from best to worst:

- what samples say, corrected by the run's messages: none arrives before it was sent,
- what messages between it and a known clock allow,
- what both machines believed the time of day to be.

Of every other machine one rank asks rank 0 for its time, in a short burst of exchanges now and
then, over a connection of its own; both have proved a secret of the job before, and sleep in the
kernel in between. A sample is an exchange of two messages, which bounds the offset::

    here    ── t0 ────────────────────────────── t3 ──>      delay  = (t3 - t0) - (t2 - t1)
                 \\                              /            offset = ((t1 - t0) + (t2 - t3)) / 2
    rank 0  ────── t1 ─────────────────── t2 ──────────>     error  <= delay / 2

Where it can, the kernel stamps what arrives, t1 and t3, so that it does not matter how long a
thread waits for a processor or for the interpreter's lock. A job goes on without samples: whoever
cannot be reached is missing in them, and the trace's reader says so.

Delays are long where a thread had to wait for a processor, so of every second only the fastest
exchanges count, each the less the slower it was. Through them goes a line, or, where a clock was
corrected on the way, a line with bends.

Where a run has several clocks its times are moved onto the reference's time of day, so that they
mean something to a reader; with one clock they stay what they are.

Source: minimum-delay filter as in NTP, RFC 5905, section 10.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.adaptive.handshake import Gate, SealedSocket, bind, dial, new_secret, to_log
from megatron.adaptive.trace.span_columns import Ints, Messages
from megatron.adaptive.trace.trace_format import ClockSamples, TraceHeader

WINDOW_NS = 1_000_000_000
BEST_SHARE = 0.25
"""Of the exchanges within a window, the fastest so many count, one at least."""

STAMP_NS = 2_000.0
"""Least uncertainty of a reading."""

DRIFT_PRIOR = 1e-4
"""Usual drift between clocks; decides only where the samples span too short a time."""

BENT = 4.0
"""Residuals so many times larger than expected make a line a line with bends."""
WINDOWS_PER_BEND = 4
MAX_KNOTS = 65

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClockFit:
    """Turns readings of one clock into those of another.

    Attributes:
        pivot_ns: a reading of the clock.
        base_ns: what is added to it there, but for ``offsets_ns``.
        knots_ns: ``[knots] float64``, readings after ``pivot_ns``, ascending.
        offsets_ns: ``[knots] float64``, what is added on top of ``base_ns`` there; a line between
            two knots and beyond the outermost.
        residual_ns: median distance of the samples that counted from the line, 0 without samples.
        delay_ns: the fastest exchange; offsets are wrong by no more than half of it.
        num_samples: how many counted.
    """

    pivot_ns: int
    base_ns: int
    knots_ns: Floats
    offsets_ns: Floats
    residual_ns: float = 0.0
    delay_ns: float = 0.0
    num_samples: int = 0

    @property
    def drift_ppm(self) -> float:
        """Returns the other clock's mean lead in rate, in millionths."""
        if len(self.knots_ns) < 2:
            return 0.0
        length = self.knots_ns[-1] - self.knots_ns[0]
        return float(1e6 * (self.offsets_ns[-1] - self.offsets_ns[0]) / length)

    def apply(self, times_ns: Ints) -> Ints:
        """Readings of the other clock, ``int64``, of the shape of ``times_ns``."""
        moved: Ints = times_ns + self.base_ns
        if len(self.knots_ns) == 1:
            moved += round(self.offsets_ns[0])
            return moved
        at = (times_ns - self.pivot_ns).astype(np.float64)
        knots, offsets = self.knots_ns, self.offsets_ns
        left = np.clip(np.searchsorted(knots, at) - 1, 0, len(knots) - 2)
        slope = np.diff(offsets) / np.diff(knots)
        extra = offsets[left] + (at - knots[left]) * slope[left]
        moved += np.rint(extra).astype(np.int64)
        return moved

    def plus(self, offset_ns: int) -> ClockFit:
        """The same with a constant added to every reading."""
        return replace(self, base_ns=self.base_ns + offset_ns)


def shift(offset_ns: int) -> ClockFit:
    """A fit that adds a constant."""
    return ClockFit(pivot_ns=0, base_ns=offset_ns, knots_ns=np.zeros(1), offsets_ns=np.zeros(1))


def fit_clock(samples: Sequence[tuple[int, int, int, int]] | Ints) -> ClockFit:
    """Fit the offset of a reference clock over time.

    Args:
        samples: ``[exchanges, 4]``: sent here, received there, answered there, answer received
            here; at least one.

    Returns:
        What turns readings of the clock here into those of the reference.
    """
    numbers = np.asarray(samples, dtype=np.int64)
    numbers = numbers[np.argsort(numbers[:, 0], kind="stable")]
    sent, received, answered, back = numbers.T
    delays = ((back - sent) - (answered - received)).astype(np.float64)
    keep = _fastest(sent, delays)
    pivot, base = int(sent[0]), int(received[0] - sent[0])
    # Half of a whole number of nanoseconds is exact in a float once the large part is gone.
    offsets = ((received - sent - base) + (answered - back - base)).astype(np.float64) / 2
    at = ((sent + (back - sent) // 2) - pivot).astype(np.float64)[keep]
    offsets, delays = offsets[keep], delays[keep]
    sigmas = STAMP_NS + np.maximum(delays - delays.min(), 0.0) / 2
    windows = len(np.unique(np.floor(at / WINDOW_NS)))
    knots, values = _line(at, offsets, sigmas, 2)
    deviation = np.abs(np.interp(at, knots, values) - offsets)
    bends = min(windows // WINDOWS_PER_BEND + 1, MAX_KNOTS)
    if bends > 2 and np.median(deviation / sigmas) > BENT:
        knots, values = _line(at, offsets, sigmas, bends)
        deviation = np.abs(np.interp(at, knots, values) - offsets)
    return ClockFit(
        pivot_ns=pivot,
        base_ns=base,
        knots_ns=knots,
        offsets_ns=values,
        residual_ns=float(np.median(deviation)),
        delay_ns=float(delays.min()),
        num_samples=len(at),
    )


def settle(
    slack_ns: Mapping[tuple[int, int], int], num_clocks: int, unsure: Collection[int] = ()
) -> tuple[list[int], int]:
    """Move clocks so that no message arrives before it was sent, as little as possible.

    Args:
        slack_ns: by clocks of sender and receiver, the shortest time between the start of a send
            and its arrival; negative where the clocks contradict each other.
        num_clocks: clocks count from 0, which is never moved.
        unsure: clocks whose offset was not measured: these go half-way between what messages to
            and from a clock before them allow.

    Returns:
        What to add to each clock, and by how much the worst message still arrives too early.
    """
    moves = [0.0] * num_clocks
    waiting = sorted(set(unsure) - {0})
    sure = [clock for clock in range(num_clocks) if clock not in waiting]
    while waiting:
        # The next one that exchanges messages with a clock that has its place.
        pair = next(
            ((a, b) for b in waiting for a in sure if (a, b) in slack_ns and (b, a) in slack_ns),
            None,
        )
        if pair is None:
            break
        a, b = pair
        moves[b] = moves[a] + (slack_ns[b, a] - slack_ns[a, b]) / 2
        waiting.remove(b)
        sure.append(b)
    best, least = list(moves), math.inf
    for _ in range(50 * num_clocks):
        early = {(a, b): moves[a] - moves[b] - slack for (a, b), slack in slack_ns.items()}
        worst = max(early.values(), default=0.0)
        if worst < least:
            best, least = list(moves), worst
        if worst < 1:
            break
        for a, b in early:
            excess = moves[a] - moves[b] - slack_ns[a, b]
            if excess > 0:
                share = 1.0 if a == 0 else 0.0 if b == 0 else 0.5
                moves[b] += excess * share
                moves[a] -= excess * (1 - share)
    return [round(move) for move in best], max(0, round(least)) if slack_ns else 0


def _fastest(sent: Ints, delays: Floats) -> Ints:
    """Numbers of the samples that count: of every window the fastest ones."""
    window = (sent - sent[0]) // WINDOW_NS
    order = np.lexsort((delays, window))
    begins = np.flatnonzero(np.diff(window[order], prepend=window[0] - 1))
    sizes = np.diff(np.append(begins, len(order)))
    place = np.arange(len(order)) - np.repeat(begins, sizes)
    limit = np.repeat(np.maximum(1, np.ceil(sizes * BEST_SHARE)), sizes)
    kept: Ints = np.sort(order[place < limit])
    return kept


def _line(at: Floats, offsets: Floats, sigmas: Floats, count: int) -> tuple[Floats, Floats]:
    """The line with ``count`` knots through weighted points; far ones lose their weight."""
    length = float(at[-1] - at[0])
    if length <= 0:
        return np.zeros(1), np.array([np.average(offsets, weights=sigmas**-2)])
    knots = np.linspace(at[0], at[-1], count)
    # How much of each knot's value a point has.
    design = np.stack([np.interp(at, knots, one) for one in np.eye(count)], axis=1)
    # The slope of every piece is a further observation, weak but never silent.
    matrix = np.concatenate([design, (np.eye(count, k=1) - np.eye(count))[:-1]])
    target = np.concatenate([offsets, np.zeros(count - 1)])
    prior = np.full(count - 1, length / (count - 1) * DRIFT_PRIOR)
    weights = 1 / sigmas
    for _ in range(6):
        scale = np.concatenate([weights, 1 / prior])
        values = np.linalg.lstsq(matrix * scale[:, None], target * scale, rcond=None)[0]
        distance = np.abs(design @ values - offsets)
        spread = max(STAMP_NS, 1.5 * float(np.median(distance)))
        weights = 1 / sigmas * np.sqrt(np.minimum(1.0, 3 * spread / np.maximum(distance, 1.0)))
    return knots, values


@dataclass(frozen=True, kw_only=True)
class ClockState:
    """Describes a clock of the run.

    Attributes:
        name: as the headers have it.
        ranks: global ranks that have it.
        how: ``reference``, ``samples``, ``messages`` or ``time of day``.
        fit: turns its readings into the common time.
    """

    name: str
    ranks: tuple[int, ...]
    how: str
    fit: ClockFit


@dataclass(frozen=True)
class Alignment:
    """The clocks of a run.

    Attributes:
        clocks: the reference first.
        contradiction_ns: by how much the worst message still seems to arrive before it was sent.
    """

    clocks: tuple[ClockState, ...]
    contradiction_ns: int = 0

    def fit_of(self, name: str) -> ClockFit:
        """Returns the fit that turns readings of a clock into the common time."""
        return next(clock.fit for clock in self.clocks if clock.name == name)

    @property
    def residual_ns(self) -> float:
        """The largest median residual of a clock that was measured, 0 where none was."""
        return max((clock.fit.residual_ns for clock in self.clocks), default=0.0)

    def describe(self) -> str:
        """Some words: how many clocks there are and how well they agree."""
        measured = [clock.fit for clock in self.clocks[1:] if clock.fit.num_samples]
        if len(self.clocks) <= 1:
            return "one for all ranks"
        if not measured:
            return f"{len(self.clocks)} clocks, none measured"
        drift = max((fit.drift_ppm for fit in measured), key=abs)
        return (
            f"{len(self.clocks)} clocks, {len(measured)} measured: residual "
            f"{self.residual_ns / 1e3:.1f} us, error below "
            f"{max(fit.delay_ns for fit in measured) / 2e3:.1f} us, drift up to {drift:+.1f} ppm"
        )

    def warnings(self) -> list[str]:
        """Returns warnings about the clocks, a line each."""
        lines = []
        for how, advice in (
            ("messages", "were not measured: messages place them, to within their travel time"),
            ("time of day", "were not measured: the machines' time of day places them"),
        ):
            ranks = [rank for clock in self.clocks if clock.how == how for rank in clock.ranks]
            if ranks:
                lines.append(f"the clocks of ranks {_ranks(ranks)} {advice}")
        if self.contradiction_ns:
            lines.append(
                f"the clocks contradict the messages: one arrives {self.contradiction_ns / 1e3:.1f}"
                " us before it is sent"
            )
        return lines


def align(
    headers: Mapping[int, TraceHeader], samples_of: Mapping[int, Sequence[ClockSamples]]
) -> Alignment:
    """Align clocks by samples, else by the time of day.

    Args:
        headers: by global rank, ascending.
        samples_of: each rank's samples.
    """
    first: dict[str, TraceHeader] = {}
    ranks: dict[str, list[int]] = {}
    for rank, header in headers.items():
        first.setdefault(header.clock, header)
        ranks.setdefault(header.clock, []).append(rank)
    # The rank that all clocks were measured against.
    judge = next((one.reference for rank in headers for one in samples_of[rank]), None)
    samples: dict[str, list[tuple[int, int, int, int]]] = {}
    for rank, header in headers.items():
        for record in samples_of[rank]:
            if record.reference == judge:
                samples.setdefault(header.clock, []).extend(record.samples)
    measured = {name: fit_clock(found) for name, found in samples.items()}
    if judge is None or judge in headers:
        reference = headers[min(headers) if judge is None else judge].clock
        lead = first[reference].unix_ns - first[reference].monotonic_ns
    else:
        reference = f"that of rank {judge}"
        name, fit = next(iter(measured.items()))
        lead = first[name].unix_ns - int(fit.apply(np.array([first[name].monotonic_ns]))[0])
    several = set(first) != {reference}
    clocks = [_state(reference, ranks.get(reference, ()), "reference", shift(lead * several))]
    for name, header in first.items():
        if name in measured and name != reference:
            clocks.append(_state(name, ranks[name], "samples", measured[name].plus(lead)))
        elif name != reference:
            fit = shift(header.unix_ns - header.monotonic_ns)
            clocks.append(_state(name, ranks[name], "time of day", fit))
    return Alignment(tuple(clocks))


def _state(name: str, ranks: Sequence[int], how: str, fit: ClockFit) -> ClockState:
    return ClockState(name=name, ranks=tuple(ranks), how=how, fit=fit)


def refine(alignment: Alignment, names: Mapping[int, str], messages: Messages) -> Alignment:
    """Correct clocks by messages of the run.

    Args:
        alignment: what :func:`align` found.
        names: of the clock that each rank has in these messages.
        messages: with times as ``alignment`` has them.
    """
    numbers = {clock.name: number for number, clock in enumerate(alignment.clocks)}
    clock_of = np.zeros(max(names, default=0) + 1, dtype=np.int64)
    clock_of[list(names)] = [numbers[name] for name in names.values()]
    ways = np.stack([clock_of[messages.source], clock_of[messages.target]], axis=1)
    took = messages.arrived_ns - messages.sent_ns
    slack = {
        (int(a), int(b)): int(took[(ways == (a, b)).all(axis=1)].min())
        for a, b in np.unique(ways, axis=0)
        if a != b
    }
    unsure = [n for n, clock in enumerate(alignment.clocks) if clock.how == "time of day"]
    moves, left = settle(slack, len(alignment.clocks), unsure)
    clocks = []
    for number, clock in enumerate(alignment.clocks):
        is_placed = number in unsure and any(number in pair for pair in slack)
        how = "messages" if is_placed else clock.how
        clocks.append(replace(clock, fit=clock.fit.plus(moves[number]), how=how))
    return Alignment(tuple(clocks), left)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"


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
) -> ExitStack:
    """Start comparing clocks: rank 0 answers, the first rank of each other machine asks.

    Collective over all ranks of the job.

    Args:
        rank: global rank.
        clock_id: of this rank's clock, see ``TraceHeader.clock``.
        address: where other machines reach rank 0.
        gather: gives every rank what each rank gave, by rank.
        deliver: takes samples; called from another thread.

    Returns:
        This rank's part; its ``close()`` takes a last burst and stops. That blocks for two seconds
        at most and is idempotent.
    """
    ids = list(gather(clock_id))
    foreign = {name: at for at, name in reversed(list(enumerate(ids))) if name != ids[0]}
    parts, place = ExitStack(), None
    if foreign and rank == 0:
        with contextlib.suppress(OSError):
            server = ClockServer(host=address)
            parts.callback(server.close)
            place = (address, server.port, server.secret)
    if foreign:
        place = gather(place)[0]
    if place is not None and foreign.get(clock_id) == rank:
        parts.callback(ClockSampler(*place, deliver=deliver).close)
    return parts


class ClockServer:
    """Sends the time to whoever knows the secret, with a thread for each connection.

    Args:
        host: address to listen at; all where it is empty or not of this machine.

    Attributes:
        port: where it listens.
        secret: that visitors prove.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(self, host: str = "") -> None:
        self.secret = new_secret()
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
        with connection, contextlib.suppress(OSError):
            _prepare(connection)
            while True:
                request, stamp_ns = _receive(connection, _REQUEST.size, time.monotonic_ns)
                if len(request) < _REQUEST.size:
                    return
                (number,) = _REQUEST.unpack(request)
                connection.sendall(_ANSWER.pack(number, stamp_ns, time.monotonic_ns()))


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
        period_s, longest_s = self._periods_s
        failures = 0
        while failures < TRIES:
            failures += 1
            with (
                contextlib.suppress(OSError),
                dial(self._place, self._secret, _PURPOSE, CONNECT_S).socket as connection,
            ):
                _prepare(connection)
                connection.settimeout(PATIENCE_S)
                while True:
                    is_last = self._closed.is_set()
                    self._deliver(ClockSamples(0, self._burst(connection)))
                    failures = 0
                    if is_last:
                        return
                    self._closed.wait(period_s)
                    period_s = min(2 * period_s, longest_s)
            self._closed.wait(period_s)

    def _burst(self, connection: socket.socket) -> tuple[tuple[int, int, int, int], ...]:
        samples = []
        for _ in range(BURST):
            self._number += 1
            request = _REQUEST.pack(self._number)
            sent_ns = self._now()
            connection.sendall(request)
            answer, back_ns = _receive(connection, _ANSWER.size, self._now)
            if len(answer) < _ANSWER.size:
                raise ConnectionError("rank 0 closed the connection")
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
    """Receive ``size`` bytes, fewer at the end, and when they came on the clock ``now``.

    The kernel stamps with the time of day; what it is worth is how long ago that was.
    """
    data, ancillary, _, _ = connection.recvmsg(size, _STAMP_ROOM, socket.MSG_WAITALL)
    moment_ns, present_ns = time.time_ns(), now()
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = _TIMESPEC.unpack(value[: _TIMESPEC.size])
            age_ns = moment_ns - (seconds * 10**9 + nanoseconds)
            if 0 <= age_ns < 10**9:  # else the time of day was set in between
                return data, present_ns - age_ns
    return data, present_ns
