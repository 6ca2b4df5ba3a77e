"""One clock for all ranks: how far the clocks of other machines are from that of a reference.

Two hosts' monotonic clocks differ by anything and drift apart by tens of microseconds a second. An
exchange of two messages bounds the offset::

    here    ── t0 ────────────────────────────── t3 ──>      delay  = (t3 - t0) - (t2 - t1)
                 \\                              /            offset = ((t1 - t0) + (t2 - t3)) / 2
    there   ────── t1 ─────────────────── t2 ──────────>     error  <= delay / 2

Delays are long where a thread had to wait for a processor, so of every second only the fastest
exchanges count, each the less the slower it was. Through them goes a line, or, where a clock was
corrected on the way, a line with bends. What remains is settled by the run's own messages: none
arrives before it was sent.

This module computes; samples are taken in ``clock_sync`` and read with the trace.

Source: minimum-delay filter as in NTP, RFC 5905, section 10.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.adaptive.trace.table import Ints

__all__ = ["ClockFit", "fit_clock", "settle", "shift"]

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
    def is_identity(self) -> bool:
        """Whether it changes nothing."""
        return self.base_ns == 0 and not self.offsets_ns.any()

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
        return ClockFit(
            pivot_ns=self.pivot_ns,
            base_ns=self.base_ns + offset_ns,
            knots_ns=self.knots_ns,
            offsets_ns=self.offsets_ns,
            residual_ns=self.residual_ns,
            delay_ns=self.delay_ns,
            num_samples=self.num_samples,
        )


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
    deviation = np.abs(_between(knots, values, at) - offsets)
    bends = min(windows // WINDOWS_PER_BEND + 1, MAX_KNOTS)
    if bends > 2 and np.median(deviation / sigmas) > BENT:
        knots, values = _line(at, offsets, sigmas, bends)
        deviation = np.abs(_between(knots, values, at) - offsets)
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
    design = _hats(at, knots)
    # The slope of every piece is a further observation, weak but never silent.
    step = length / (count - 1)
    slopes = (np.eye(count, k=1) - np.eye(count))[:-1]
    matrix = np.concatenate([design, slopes])
    target = np.concatenate([offsets, np.zeros(count - 1)])
    prior = np.full(count - 1, step * DRIFT_PRIOR)
    weights = 1 / sigmas
    for _ in range(6):
        scale = np.concatenate([weights, 1 / prior])
        values = np.linalg.lstsq(matrix * scale[:, None], target * scale, rcond=None)[0]
        distance = np.abs(design @ values - offsets)
        spread = max(STAMP_NS, 1.5 * float(np.median(distance)))
        weights = 1 / sigmas * np.sqrt(np.minimum(1.0, 3 * spread / np.maximum(distance, 1.0)))
    return knots, values


def _hats(at: Floats, knots: Floats) -> Floats:
    """``[points, knots]``: how much of each knot's value a point has."""
    count = len(knots)
    place = (at - knots[0]) / (knots[1] - knots[0])
    left = np.clip(np.floor(place), 0, count - 2).astype(np.int64)
    share = place - left
    design: Floats = np.zeros((len(at), count))
    rows = np.arange(len(at))
    design[rows, left] = 1 - share
    design[rows, left + 1] = share
    return design


def _between(knots: Floats, values: Floats, at: Floats) -> Floats:
    if len(knots) == 1:
        return np.full(len(at), values[0])
    found: Floats = _hats(at, knots) @ values
    return found
