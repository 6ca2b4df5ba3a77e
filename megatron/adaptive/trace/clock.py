r"""Compares the clocks of all machines during a job, and converts a trace's times to one clock.

Every process has a monotonic clock, whose ID is in the header of its trace. Ranks on the same
machine share a clock. The clocks of two machines may differ by any amount, and drift apart by tens
of microseconds per second. One clock is the reference: the clock of the rank that replied to the
requests for samples, or of the first rank if there are no samples. The offset of every other clock
is determined from the first source in this list that is available:

- samples, corrected by the messages of the run, because no message arrives before it was sent,
- messages to and from a clock with a known offset,
- the time of day on each machine.

One rank on every other machine requests the time from rank 0 over a separate connection. It sends
series of requests in quick succession, and sleeps between the series. Both sides first prove that
they know a secret, which rank 0 generates for the trace. Later messages are not authenticated. A
sample consists of one request and the reply, whose four times bound the possible offset::

    here    ── t0 ────────────────────────────── t3 ──>      delay  = (t3 - t0) - (t2 - t1)
                 \\                              /            offset = ((t1 - t0) + (t2 - t3)) / 2
    rank 0  ────── t1 ─────────────────── t2 ──────────>     error  <= delay / 2

If the kernel supports timestamps, it records the arrival times (t1 and t3), which are then correct
even if a thread had to wait for a processor or for the interpreter lock (GIL). Samples are
optional: if rank 0 cannot be reached from a machine, the traces of this machine have no samples,
and a warning is printed when they are read.

Round trips in which a thread had to wait for a processor are slow and inaccurate. Therefore, only
the fastest samples of each second are used, and the slower of these samples get less weight. A
straight line is fitted to the samples, or a piecewise linear function if a clock was adjusted
during the run.

If a run has several clocks, all times are converted to the time of day of the reference machine, so
that they can be compared with logs. If it has only one clock, times are not changed.

Source: minimum-delay filter as in NTP, RFC 5905, section 10.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.adaptive.handshake import Gate, SealedSocket, bind, dial, new_secret, to_log
from megatron.adaptive.trace.span_columns import Ints, Messages
from megatron.adaptive.trace.trace_format import ClockExchange, ClockSamples, TraceHeader

WINDOW_NS = 1_000_000_000
BEST_SHARE = 0.25
"""Fraction of the samples in each time window that is used.

The fastest samples are used, and at least one per window.
"""

STAMP_NS = 2_000.0
"""Assumed minimum error of each clock reading in nanoseconds."""

DRIFT_PRIOR = 1e-4
"""Expected clock drift in seconds per second. Limits the fitted slope if samples are few."""

BENT = 4.0
"""Ratio of the residual to the expected error above which a piecewise linear fit is used."""
WINDOWS_PER_BEND = 4
MAX_KNOTS = 65

MOST_COMPARED = 5_000_000
"""Maximum number of comparisons between two clocks, summed over all rounds of :func:`settle`."""

LEAST_ROUNDS = 50
"""Minimum number of rounds of :func:`settle`, even if there are many clocks."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClockFit:
    """Converts readings of one clock to those of another clock by linear interpolation.

    Attributes:
        pivot_ns: Reading of the source clock to which ``knots_ns`` are relative.
        base_ns: Constant part of the offset to the target clock, in nanoseconds.
        knots_ns: ``[knots] float64``, times in nanoseconds after ``pivot_ns``, in ascending order.
        offsets_ns: ``[knots] float64``, offset in nanoseconds at each of these times, in addition
            to ``base_ns``. Offsets at other times are interpolated or extrapolated linearly.
        residual_ns: Median distance in nanoseconds between the samples and the fit, or 0 without
            samples.
        delay_ns: Round-trip time of the fastest request in ns. The error of the offset is at most
            half of this time.
        num_samples: Number of samples used for the fit.
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
        """Mean drift in parts per million, which is positive if the target clock runs faster."""
        if len(self.knots_ns) < 2:
            return 0.0
        length = self.knots_ns[-1] - self.knots_ns[0]
        return float(1e6 * (self.offsets_ns[-1] - self.offsets_ns[0]) / length)

    def apply(self, times_ns: Ints) -> Ints:
        """Converts ``times_ns`` to the target clock. Returns ``int64`` values of the same shape."""
        moved: Ints = times_ns + self.base_ns
        if len(self.knots_ns) == 1:
            moved += round(self.offsets_ns[0])
            return moved
        relative_ns = (times_ns - self.pivot_ns).astype(np.float64)
        knots, offsets = self.knots_ns, self.offsets_ns
        left = np.clip(np.searchsorted(knots, relative_ns) - 1, 0, len(knots) - 2)
        slope = np.diff(offsets) / np.diff(knots)
        extra = offsets[left] + (relative_ns - knots[left]) * slope[left]
        moved += np.rint(extra).astype(np.int64)
        return moved

    def plus(self, offset_ns: int) -> ClockFit:
        """Returns a fit whose results are larger by ``offset_ns`` nanoseconds."""
        return replace(self, base_ns=self.base_ns + offset_ns)


def shift(offset_ns: int) -> ClockFit:
    """Returns a fit that adds ``offset_ns`` nanoseconds to every reading, without drift."""
    return ClockFit(pivot_ns=0, base_ns=offset_ns, knots_ns=np.zeros(1), offsets_ns=np.zeros(1))


def fit_clock(samples: Sequence[ClockExchange] | Ints) -> ClockFit:
    """Fits the offset between the local clock and a reference clock as a function of time.

    Args:
        samples: Requests to the reference rank (at least one), or an array ``[requests, 4]`` with
            the times of the requests in ns, in the order of the fields of ``ClockExchange``.

    Returns:
        Fit that converts readings of the local clock to those of the reference clock.
    """
    numbers = np.asarray(samples, dtype=np.int64)
    numbers = numbers[np.argsort(numbers[:, 0], kind="stable")]
    sent, received, answered, back = numbers.T
    delays = ((back - sent) - (answered - received)).astype(np.float64)
    keep = _fastest(sent, delays)
    pivot, base = int(sent[0]), int(received[0] - sent[0])
    # Subtract the large constant ``base``, so that floats can represent the remaining small numbers
    # exactly, even half nanoseconds.
    offsets = ((received - sent - base) + (answered - back - base)).astype(np.float64) / 2
    times_ns = ((sent + (back - sent) // 2) - pivot).astype(np.float64)[keep]
    offsets, delays = offsets[keep], delays[keep]
    sigmas = STAMP_NS + np.maximum(delays - delays.min(), 0.0) / 2
    windows = len(np.unique(np.floor(times_ns / WINDOW_NS)))
    knots, values = _line(times_ns, offsets, sigmas, 2)
    deviation = np.abs(np.interp(times_ns, knots, values) - offsets)
    bends = min(windows // WINDOWS_PER_BEND + 1, MAX_KNOTS)
    if bends > 2 and np.median(deviation / sigmas) > BENT:
        knots, values = _line(times_ns, offsets, sigmas, bends)
        deviation = np.abs(np.interp(times_ns, knots, values) - offsets)
    return ClockFit(
        pivot_ns=pivot,
        base_ns=base,
        knots_ns=knots,
        offsets_ns=values,
        residual_ns=float(np.median(deviation)),
        delay_ns=float(delays.min()),
        num_samples=len(times_ns),
    )


def settle(
    slack_ns: Mapping[tuple[int, int], int], num_clocks: int, unsure: Collection[int] = ()
) -> tuple[list[int], int]:
    """Shifts clocks as little as possible, so that no message arrives before it was sent.

    Args:
        slack_ns: Shortest time in ns between the send and the arrival of a message, keyed by
            (sender's clock, receiver's clock). Negative if a message seems to arrive before it was
            sent.
        num_clocks: Number of clocks; clock 0 is never shifted.
        unsure: Indices of the clocks whose offset was not measured. If there are messages in both
            directions between such a clock and one with a known offset, they give a lower and an
            upper bound for the offset, and the mean of the two bounds is used.

    Returns:
        Nanoseconds to add to each clock, and the largest remaining contradiction in nanoseconds:
        the longest time by which a message still seems to arrive before it was sent, or 0 if none
        does.
    """
    moves = np.zeros(num_clocks)
    _place_unsure(moves, slack_ns, unsure)
    if not slack_ns:
        return [round(move) for move in moves.tolist()], 0
    pairs = list(slack_ns)
    source, target = np.array(pairs, dtype=np.int64).T
    slack = np.array([slack_ns[pair] for pair in pairs], dtype=np.float64)
    best, least = moves.copy(), math.inf
    rounds = min(50 * num_clocks, max(LEAST_ROUNDS, MOST_COMPARED // len(pairs)))
    for _ in range(rounds):
        early = moves[source] - moves[target] - slack
        worst = float(early.max())
        if worst < least:
            best, least = moves.copy(), worst
        if worst < 1:
            break
        for index in np.flatnonzero(early > 0).tolist():
            a, b = pairs[index]
            excess = moves[a] - moves[b] - slack[index]
            if excess > 0:
                share = 1.0 if a == 0 else 0.0 if b == 0 else 0.5
                moves[b] += excess * share
                moves[a] -= excess * (1 - share)
    return [round(move) for move in best.tolist()], max(0, round(least))


def _place_unsure(
    moves: Floats, slack_ns: Mapping[tuple[int, int], int], unsure: Collection[int]
) -> None:
    """Shifts each clock without a measured offset, based on messages to and from other clocks.

    The messages to and from an already aligned clock give a lower and an upper bound for the shift,
    and the mean of the two bounds is used. If several clocks can be aligned, the clock with the
    lowest index comes first.

    Args:
        moves: ``[clocks]``, nanoseconds to add to each clock; modified in place.
        slack_ns: Shortest time in ns between the send and the arrival of a message, for each pair
            (sender's clock, receiver's clock).
        unsure: Indices of the clocks whose offset was not measured.
    """
    waiting = set(unsure) - {0}
    around: dict[int, list[int]] = {}
    for a, b in slack_ns:
        if (b, a) in slack_ns:
            around.setdefault(a, []).append(b)
    order = {clock: n for n, clock in enumerate(c for c in range(len(moves)) if c not in waiting)}
    ready = [b for b in waiting if any(a in order for a in around.get(b, ()))]
    heapq.heapify(ready)
    while ready:
        b = heapq.heappop(ready)
        if b in order:
            continue
        a = min((clock for clock in around[b] if clock in order), key=order.__getitem__)
        moves[b] = moves[a] + (slack_ns[b, a] - slack_ns[a, b]) / 2
        order[b] = len(order)
        for clock in around[b]:
            if clock not in order:
                heapq.heappush(ready, clock)


def _fastest(sent: Ints, delays: Floats) -> Ints:
    """Returns the indices of the fastest samples of each time window.

    ``sent`` contains the times at which the requests were sent, and ``delays`` their round-trip
    times, both in ns.
    """
    window = (sent - sent[0]) // WINDOW_NS
    order = np.lexsort((delays, window))
    begins = np.flatnonzero(np.diff(window[order], prepend=window[0] - 1))
    sizes = np.diff(np.append(begins, len(order)))
    positions = np.arange(len(order)) - np.repeat(begins, sizes)
    limit = np.repeat(np.maximum(1, np.ceil(sizes * BEST_SHARE)), sizes)
    kept: Ints = np.sort(order[positions < limit])
    return kept


def _line(times_ns: Floats, offsets: Floats, sigmas: Floats, count: int) -> tuple[Floats, Floats]:
    """Fits a piecewise linear function with ``count`` knots to ``offsets`` at ``times_ns``.

    ``sigmas`` contains the expected errors of the offsets in ns. Outliers get less weight.

    Returns:
        Times of the knots in nanoseconds, and the values of the function at the knots.
    """
    length = float(times_ns[-1] - times_ns[0])
    if length <= 0:
        return np.zeros(1), np.array([np.average(offsets, weights=sigmas**-2)])
    knots = np.linspace(times_ns[0], times_ns[-1], count)
    # Row i contains the weights of the knots in the interpolated value at point i.
    design = np.stack([np.interp(times_ns, knots, unit) for unit in np.eye(count)], axis=1)
    # A few samples alone could not determine all slopes. Therefore, add a row for each interval
    # between knots that pulls the slope towards 0 with a small weight.
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
    """Describes a clock of the run and the source of its offset.

    Attributes:
        name: ID of the clock, as in the trace headers.
        ranks: Global ranks that use the clock.
        how: Source of the offset: ``reference``, ``samples``, ``messages`` or ``time of day``.
        fit: Fit that converts readings of the clock to the run's common time.
    """

    name: str
    ranks: tuple[int, ...]
    how: str
    fit: ClockFit


@dataclass(frozen=True)
class Alignment:
    """Contains all clocks of a run and their offsets.

    Attributes:
        clocks: All clocks of the run, with the reference clock first.
        contradiction_ns: Longest time in ns by which a message seems to arrive before it was sent,
            even after the clocks were corrected, or 0 if no message does.
    """

    clocks: tuple[ClockState, ...]
    contradiction_ns: int = 0

    def fit_of(self, name: str) -> ClockFit:
        """Returns the fit that converts readings of the clock ``name`` to the run's common time."""
        return self._fits[name]

    @cached_property
    def _fits(self) -> dict[str, ClockFit]:
        return {clock.name: clock.fit for clock in self.clocks}

    @property
    def residual_ns(self) -> float:
        """Largest residual in ns of all measured clocks, or 0 if no clock was measured."""
        return max((clock.fit.residual_ns for clock in self.clocks), default=0.0)

    def describe(self) -> str:
        """Returns the number of clocks, the residual error and the largest drift as text."""
        measured = [clock.fit for clock in self.clocks[1:] if clock.fit.num_samples]
        if len(self.clocks) <= 1:
            return "one for all ranks"
        if not measured:
            return f"{len(self.clocks)} clocks, whose offsets were not measured"
        drift = max((fit.drift_ppm for fit in measured), key=abs)
        return (
            f"{len(self.clocks)} clocks, {len(measured)} with measured offsets: residual "
            f"{self.residual_ns / 1e3:.1f} us, error below "
            f"{max(fit.delay_ns for fit in measured) / 2e3:.1f} us, drift up to {drift:+.1f} ppm"
        )

    def warnings(self) -> list[str]:
        """Returns one line of text per problem, such as a clock whose offset was not measured."""
        lines = []
        for how, advice in (
            (
                "messages",
                "were not measured, but estimated from messages; the error may be as large as the "
                "travel time of a message",
            ),
            ("time of day", "were not measured, but estimated from the machines' time of day"),
        ):
            ranks = [rank for clock in self.clocks if clock.how == how for rank in clock.ranks]
            if ranks:
                lines.append(f"the clock offsets of ranks {_ranks(ranks)} {advice}")
        if self.contradiction_ns:
            lines.append(
                "the clocks of the ranks do not match: according to them, a message arrives "
                f"{self.contradiction_ns / 1e3:.1f} us before it is sent"
            )
        return lines


def align(
    headers: Mapping[int, TraceHeader], samples_of: Mapping[int, Sequence[ClockSamples]]
) -> Alignment:
    """Aligns the clocks of a run using samples, or the time of day for clocks without samples.

    Args:
        headers: Trace header of each global rank, in ascending order of rank.
        samples_of: Clock samples of each global rank.
    """
    first: dict[str, TraceHeader] = {}
    ranks: dict[str, list[int]] = {}
    for rank, header in headers.items():
        first.setdefault(header.clock, header)
        ranks.setdefault(header.clock, []).append(rank)
    # All samples of a job have the same reference rank, so read it from the first record.
    judge = next((record.reference for rank in headers for record in samples_of[rank]), None)
    samples: dict[str, list[ClockExchange]] = {}
    for rank, header in headers.items():
        for record in samples_of[rank]:
            if record.reference == judge:
                samples.setdefault(header.clock, []).extend(record.samples)
    measured = {name: fit_clock(exchanges) for name, exchanges in samples.items()}
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
    """Corrects the clocks so that no message of the run arrives before it was sent.

    Args:
        alignment: Clocks as aligned by :func:`align`.
        names: Clock IDs of all ranks that send or receive a message, keyed by rank.
        messages: Messages of the run, with times converted by ``alignment``.
    """
    numbers = {clock.name: number for number, clock in enumerate(alignment.clocks)}
    clock_of = np.zeros(max(names, default=0) + 1, dtype=np.int64)
    clock_of[list(names)] = [numbers[name] for name in names.values()]
    count = len(alignment.clocks)
    ways, way = np.unique(
        clock_of[messages.source] * count + clock_of[messages.target], return_inverse=True
    )
    shortest = np.full(len(ways), np.iinfo(np.int64).max)
    np.minimum.at(shortest, way, messages.arrived_ns - messages.sent_ns)
    slack = {
        divmod(number, count): took
        for number, took in zip(ways.tolist(), shortest.tolist(), strict=True)
        if number // count != number % count
    }
    has_messages = {number for pair in slack for number in pair}
    unsure = [n for n, clock in enumerate(alignment.clocks) if clock.how == "time of day"]
    moves, left = settle(slack, count, unsure)
    clocks = []
    for number, clock in enumerate(alignment.clocks):
        is_placed = clock.how == "time of day" and number in has_messages
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
"""Pause in seconds between the requests of a series, so that a delay does not affect all of them.
"""

FIRST_PERIOD_S, LAST_PERIOD_S = 1.0, 10.0
"""Initial and maximum time between two series of requests in seconds.

The time doubles after each series.
"""

PATIENCE_S = 1.0
CONNECT_S = 5.0
TRIES = 3

_REQUEST = struct.Struct("!q")
_ANSWER = struct.Struct("!qqq")
# Python's socket module does not define this constant of <asm-generic/socket.h>.
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
    """Starts threads that compare the clocks of all machines with rank 0's clock.

    The first rank of each other machine requests the time from rank 0. All ranks of the job must
    call this function.

    Args:
        rank: Global rank of this process.
        clock_id: ID of this rank's monotonic clock; ranks with the same ID share a clock.
        address: Address at which other machines reach rank 0.
        gather: Function that takes this rank's value and returns a list of the values of all ranks.
        deliver: Function that is called in another thread with each new series of samples.

    Returns:
        Stack whose ``close()`` takes a last series of samples and then stops this rank's threads.
        ``close()`` may be called more than once, and blocks for at most two seconds.
    """
    ids = list(gather(clock_id))
    foreign = {name: first for first, name in reversed(list(enumerate(ids))) if name != ids[0]}
    parts = ExitStack()
    server_access = None
    if foreign and rank == 0:
        with contextlib.suppress(OSError):
            server = ClockServer(host=address)
            parts.callback(server.close)
            server_access = (address, server.port, server.secret)
    if foreign:
        server_access = gather(server_access)[0]
    if server_access is not None and foreign.get(clock_id) == rank:
        parts.callback(ClockSampler(*server_access, deliver=deliver).close)
    return parts


class ClockServer:
    """Server that sends its time to clients that know a secret, with one thread per connection.

    Args:
        host: Address to listen on. If it is empty or belongs to another machine, the server listens
            on all addresses of this machine.

    Attributes:
        port: Port on which the server listens.
        secret: Secret that clients must know. Generated by the constructor.

    Raises:
        OSError: The server cannot open a port.
    """

    def __init__(self, host: str = "") -> None:
        self.secret = new_secret()
        self._serving: dict[threading.Thread, socket.socket] = {}
        listening = bind(host, 0)
        self._gate = Gate(listening, lambda: self.secret, _PURPOSE, self._admit, to_log(_LOG))
        self.port = self._gate.port

    def close(self) -> None:
        """Waits briefly for the last requests, and stops the server. May be called repeatedly."""
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
        thread.start()  # If this raises an error, the caller closes the connection.
        self._serving[thread] = sealed.socket

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
    """Starts a thread that requests the time from rank 0, several times in quick succession.

    Args:
        host: Address of rank 0.
        port: Port of the clock server on rank 0.
        secret: Secret of the clock server.
        deliver: Function that the thread calls with the samples of each series of requests.
        now: Function that reads this rank's clock in nanoseconds.
        periods_s: Initial and maximum time between two series of requests in seconds.
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
        self._address = (host, port)
        self._secret = secret
        self._deliver = deliver
        self._now = now
        self._periods_s = periods_s
        self._number = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends a last series of requests, then stops the thread. May be called more than once."""
        self._closed.set()
        self._thread.join(2 * PATIENCE_S)

    def _run(self) -> None:
        period_s, longest_s = self._periods_s
        failures = 0
        while failures < TRIES:
            failures += 1
            with (
                contextlib.suppress(OSError),
                dial(self._address, self._secret, _PURPOSE, CONNECT_S).socket as connection,
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

    def _burst(self, connection: socket.socket) -> tuple[ClockExchange, ...]:
        samples = []
        for _ in range(BURST):
            self._number += 1
            request = _REQUEST.pack(self._number)
            sent_ns = self._now()
            connection.sendall(request)
            answer, returned_ns = _receive(connection, _ANSWER.size, self._now)
            if len(answer) < _ANSWER.size:
                raise ConnectionError("rank 0 closed the connection")
            number, received_ns, answered_ns = _ANSWER.unpack(answer)
            if number != self._number:
                raise ConnectionError("rank 0 replied to a different request")
            samples.append(ClockExchange(sent_ns, received_ns, answered_ns, returned_ns))
            time.sleep(PAUSE_S)
        return tuple(samples)


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def _receive(connection: socket.socket, size: int, now: Clock) -> tuple[bytes, int]:
    """Receives ``size`` bytes, and returns the bytes and their arrival time in nanoseconds.

    Fewer bytes are returned if the connection is closed. The kernel timestamps data with the time
    of day. To convert a timestamp to the clock ``now``, its age is subtracted from the current
    reading of ``now``.
    """
    data, ancillary, _, _ = connection.recvmsg(size, _STAMP_ROOM, socket.MSG_WAITALL)
    unix_ns = time.time_ns()
    present_ns = now()
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = _TIMESPEC.unpack(value[: _TIMESPEC.size])
            age_ns = unix_ns - (seconds * 10**9 + nanoseconds)
            # An age that is negative or above a second means that the time of day was changed in
            # the meantime. Ignore such a timestamp.
            if 0 <= age_ns < 10**9:
                return data, present_ns - age_ns
    return data, present_ns
