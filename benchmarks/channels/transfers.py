"""Rows of what two processes send each other: bandwidth, latency, hand-over."""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Result, Row, measured, missing, ratios

from .chart import Point, bandwidths, size_text
from .copies import Copies
from .pair import Pair, PairError, find_peers

KIB, MIB = 1 << 10, 1 << 20
NEAR_NS, FAR_NS = 110.0, 130.0
"""A cache line there and back takes less than the first between near processors, more than the
second between far ones."""
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
MEMORY_SIZES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
GLOO_SIZES = (MIB, 4 * MIB, 16 * MIB)
MEMORY_SPEED = 0.90
GLOO_NEAR, GLOO_FAR = 5.0, 10.0
PEERS, FRESH = 1.7, (1.5, 4.0)
HALF_ROUND_TRIP_US, GLOO_OVER_SHM = 2.0, 25.0
HAND_OVER_US = 3.0
_LEAST_MESSAGES = 16  # in fewer, the first and the last weigh too much
_MOST_CHANNEL_BYTES = 256 * MIB
_SLOTS = 8
COPIES = ("plain", "streaming")
NO_COMPILER = "no C compiler for benchmarks/channels/copies.c; on Debian: gcc"
Series = dict[tuple[str, int], list[float]]
"""Seconds by name and size, one per repetition."""


@dataclass
class Bench:
    """What the parts share.

    Attributes:
        library: compiled ``copies.c``; ``None`` without a compiler.
        cores: processors of a pair.
        repetitions: of everything.
        pool_bytes: cold memory.
        absent: why other pairs than ``torch`` are not there.
        distances_ns: cache-line ping-pongs, in the order they were taken.
    """

    library: Path | None
    cores: tuple[int, int]
    repetitions: int
    pool_bytes: int
    absent: str = ""
    distances_ns: list[float] = field(default_factory=list)
    _pairs: dict[str, Pair] = field(default_factory=dict)

    @property
    def pairs(self) -> dict[str, Pair]:
        """All pairs that can be, by name; started at first, and anew after one has failed.

        Raises:
            PairError: the one with our transports did not start.
        """
        if self._pairs and not any(pair.is_gone for pair in self._pairs.values()):
            return self._pairs
        self.close()
        found, self.absent = find_peers()
        for name, launcher in {"torch": [], **found}.items():
            try:
                self._pairs[name] = Pair(
                    name,
                    cores=self.cores,
                    copies=self.library,
                    pool_bytes=self.pool_bytes,
                    launcher=launcher,
                )
            except PairError as error:
                if not launcher:
                    raise
                self.absent = str(error).splitlines()[0]
                print(f"left out: {error}", file=sys.stderr)
        return self._pairs

    def distance(self) -> float:
        """Measure how far apart the processors are now; not-a-number where that is impossible."""
        if self.library is None:
            return math.nan
        self.distances_ns.append(Copies(self.library).cache_line_ns(*self.cores))
        return self.distances_ns[-1]

    def close(self) -> None:
        """End all pairs."""
        for pair in self._pairs.values():
            try:
                pair.close()
            except PairError as error:
                print(f"warning: {error}", file=sys.stderr)
        self._pairs.clear()

    def competitors(self) -> list[tuple[str, str]]:
        """Pairs and the connectors that they measure."""
        ours = [("torch", name) for name in ("shm", "tcp", "gloo")]
        return ours + [(pair, pair) for pair in self.pairs if pair != "torch"]


def state_of(cache_line_ns: float) -> str:
    """``near``, ``far`` or ``between``; ``unknown`` for not-a-number."""
    if math.isnan(cache_line_ns):
        return "unknown"
    if cache_line_ns < NEAR_NS:
        return "near"
    return "far" if cache_line_ns > FAR_NS else "between"


def channel_options(nbytes: int) -> dict[str, Any]:
    """Slots that hold a message of that size whole."""
    slots = max(2, min(_SLOTS, _MOST_CHANNEL_BYTES // nbytes))
    return {"slot_bytes": max(4 * KIB, nbytes), "slots": slots}


def options_of(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a connector: others' have none."""
    return {} if name in ("gloo", "mpi", "ucx") else options


def bandwidth(bench: Bench, sizes: Sequence[int]) -> Result:
    """Streams of cold tensors, and of tensors that are written and read."""
    if bench.library is None:
        return Result(rows=[missing("shm: speed of the faster memcpy", NO_COMPILER)])
    one_way: Series = defaultdict(list)
    fresh_ones: Series = defaultdict(list)
    states: dict[int, str] = {}
    for nbytes in sizes:
        options = channel_options(nbytes)
        messages = max(_LEAST_MESSAGES, bench.pool_bytes // nbytes)
        shared = {"nbytes": nbytes, "messages": min(messages, 512)}
        distances = []
        torch = bench.pairs["torch"]
        for repetition in range(-1, bench.repetitions):
            distances.append(bench.distance())
            taken: dict[tuple[str, bool], float] = {}
            for kind in COPIES:
                taken["memcpy " + kind, False] = torch.call(
                    "patterns", "copy", kind=kind, **shared
                )[0]
            order = bench.competitors()
            turn = repetition % len(order)
            for pair, name in order[turn:] + order[:turn]:
                asked = {**shared, "connector": name, "options": options_of(name, options)}
                for fresh in (False, True):
                    answer = bench.pairs[pair].call("patterns", "stream", fresh=fresh, **asked)
                    taken[name, fresh] = answer[0]
            if repetition < 0:
                continue  # first touches and connections
            asked = {**shared, "connector": "shm", "options": options}
            answer = torch.call("patterns", "stream", fresh=True, in_place=True, **asked)
            taken["shm, in place", True] = answer[0]
            for (name, is_fresh), seconds in taken.items():
                (fresh_ones if is_fresh else one_way)[name, nbytes].append(seconds)
        states[nbytes] = state_of(statistics.median(distances))
    points = [
        Point(name=name, pattern=pattern, nbytes=nbytes, seconds=seconds)
        for pattern, series in (("stream", one_way), ("written, sent and read", fresh_ones))
        for (name, nbytes), seconds in series.items()
    ]
    print(bandwidths(points))
    return Result(
        rows=bandwidth_rows(one_way, fresh_ones, states, bench.absent),
        points=points,
        facts={"state of the cores by size": {size_text(n): s for n, s in states.items()}},
    )


def bandwidth_rows(
    one_way: Series, fresh: Series, states: dict[int, str], absent: str
) -> list[Row]:
    """Compare the series with the fastest of their rivals, size by size."""
    rows = []
    over, peers = "shm over the best of MPI and UCX", ("mpi", "ucx")
    copies = tuple(f"memcpy {kind}" for kind in COPIES)
    speed = "shm, {}: speed of the faster memcpy"
    for what, own, rivals, series, sizes, near, far in (
        (speed, "shm", copies, one_way, MEMORY_SIZES, MEMORY_SPEED, MEMORY_SPEED),
        ("shm over gloo, {}", "shm", ("gloo",), one_way, GLOO_SIZES, GLOO_NEAR, GLOO_FAR),
        (f"{over}, {{}}", "shm", peers, one_way, GLOO_SIZES, PEERS, PEERS),
        (f"{over}, written and read, {{}}", "shm", peers, fresh, GLOO_SIZES, *FRESH),
        (
            *(f"{over}, written in place and read, {{}}", "shm, in place"),
            *(peers, fresh, GLOO_SIZES, *FRESH),
        ),
    ):
        for nbytes in (size for size in sizes if size in states):
            label, state = what.format(size_text(nbytes)), states[nbytes]
            limits: dict[str, Any] = {"goal": far if state == "far" else near, "least": True}
            found = {name: series[name, nbytes] for name in rivals if series.get((name, nbytes))}
            if not found:
                rows.append(missing(label, absent, **limits))
                continue
            best = min(found, key=lambda name: statistics.median(found[name]))
            ours = series[own, nbytes]
            note = f"{state}; {best}: {_times(ours, found[best])}"
            rows.append(measured(label, ratios(found[best], ours), note=note, **limits))
    return rows


def latency(bench: Bench, rounds: int) -> Result:
    """Half a round trip of a small tensor."""
    nbytes, options = KIB, channel_options(KIB)
    taken: dict[str, list[float]] = defaultdict(list)
    names = bench.competitors()
    distances = []
    for repetition in range(-1, bench.repetitions):
        distances.append(bench.distance())
        for pair, name in names:
            slow = name in ("gloo", "tcp")
            answer = bench.pairs[pair].call(
                "patterns",
                "half_round_trip",
                connector=name,
                nbytes=nbytes,
                rounds=max(50, rounds // 10) if slow else rounds,
                options=options_of(name, options),
            )
            if repetition >= 0:
                taken[name].append(1e6 * answer[0])
    state = state_of(statistics.median(distances))
    rows = [
        measured(
            "shm, 1 KiB: half a round trip",
            taken["shm"],
            unit="us",
            goal=HALF_ROUND_TRIP_US,
            note=state,
        ),
        measured(
            "the same, gloo over shm",
            ratios(taken["gloo"], taken["shm"]),
            goal=GLOO_OVER_SHM,
            least=True,
            note=f"gloo {statistics.median(taken['gloo']):.3g} us",
        ),
    ]
    rows += [
        measured(f"{name}, 1 KiB: half a round trip", taken[name], unit="us")
        for _, name in names
        if name not in ("shm", "gloo")
    ]
    return Result(rows=rows)


def hand_over(bench: Bench, rounds: int, sizes: Sequence[int]) -> Result:
    """Memory of the channel that changes hands, whatever its size."""
    rows = []
    for nbytes in sizes:
        taken: list[float] = []
        for repetition in range(-1, bench.repetitions):
            left, arrived = bench.pairs["torch"].call(
                "patterns",
                "hand_over",
                connector="shm",
                nbytes=nbytes,
                rounds=rounds,
                options=channel_options(nbytes),
            )
            if repetition >= 0:
                pairs = zip(left, arrived, strict=True)
                taken.append(1e6 * statistics.median(end - start for start, end in pairs))
        what = f"shm, {size_text(nbytes)} reserved: hand-over"
        rows.append(measured(what, taken, unit="us", goal=HAND_OVER_US))
    return Result(rows=rows)


def _times(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(ours):.3g} ms against {1e3 * statistics.median(theirs):.3g}"
