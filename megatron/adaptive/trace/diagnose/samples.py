"""The times of a run as arrays, and statistics of them that a few odd numbers do not move."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.diagnose.finding import Finding, Period
from megatron.adaptive.trace.metrics import compute_ns
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.span_columns import Ints, Messages, TraceTable, match_messages
from megatron.adaptive.trace.step_view import stages_of_rank
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, IterationStart, TraceHeader

Floats = npt.NDArray[np.floating[Any]]

MOST_ITERATIONS = 200
"""Of a longer run so many are looked at, evenly spread."""

MOST_SPANS = 4_000_000
"""And fewer where they hold more spans than this."""

MOST_MESSAGE_SPANS = 1_500_000
"""Of these iterations messages are matched in so many as hold this many spans."""

FIRST_STEPS = 1
"""So many first iterations of a process are left out: they set up what others reuse."""

_KINDS = len(DRAWN_ACTIONS)


@dataclass(frozen=True, eq=False)
class Measured:
    """The times of some iterations.

    Attributes:
        places: headers of the ranks, by column of the arrays.
        stages: pipeline stages of the ranks, by column.
        iterations: ``[iterations]``, their numbers.
        num_microbatches: of the last of them.
        num_chunks: per rank.
        layers: per stage, empty where the trace does not say it.
        work: per stage, see ``TraceHeader.work``.
        action_ns: ``[iterations, ranks, chunks, 3, microbatches] float32``, F, B and W without the
            reading of data within them, pieces of a W added up; NaN for what there is none of.
        read_ns: ``[iterations, ranks]``, reading of data.
        reads: ``[iterations, ranks]``, how often.
        step_ns: ``[iterations]``, first action to last, longest pipeline.
        messages: of some iterations.
        clock_error_ns: how far two ranks' clocks may be apart beyond what is known.
        experts: of each rank, markers of the iterations in which it says what its experts did.
    """

    places: tuple[TraceHeader, ...]
    stages: tuple[tuple[int, ...], ...]
    iterations: Ints
    num_microbatches: int
    num_chunks: int
    layers: tuple[int, ...]
    work: tuple[float, ...]
    action_ns: Floats
    read_ns: Ints
    reads: Ints
    step_ns: Ints
    messages: Messages
    clock_error_ns: float
    experts: tuple[Mapping[int, IterationStart], ...]

    @cached_property
    def median_ns(self) -> Floats:
        """``[iterations, ranks, chunks, 3]``: medians over microbatches, NaN for none."""
        found: Floats = middle(self.action_ns, axis=-1)
        return found

    @cached_property
    def microbatch_ns(self) -> Floats:
        """``[ranks]``: how long all work of one microbatch takes a rank."""
        found: Floats = np.nansum(middle(self.median_ns, axis=0), axis=(1, 2))
        return found

    @property
    def num_actions(self) -> int:
        """Counts the measured actions."""
        return int(np.isfinite(self.action_ns).sum())

    @property
    def step(self) -> float:
        """Median length of a step in ns."""
        return float(np.median(self.step_ns)) if len(self.step_ns) else 0.0

    @cached_property
    def column(self) -> dict[int, int]:
        """Column by global rank."""
        return {place.rank: number for number, place in enumerate(self.places)}

    @cached_property
    def replicas(self) -> dict[tuple[int, int], list[int]]:
        """Columns of each pipeline, by its data- and tensor-parallel position."""
        return self._grouped("dp_rank", "tp_rank")

    @cached_property
    def peers(self) -> dict[tuple[int, int], list[int]]:
        """Columns of ranks that do the same work on other data, by stage and tensor position."""
        return self._grouped("pp_rank", "tp_rank")

    def _grouped(self, one: str, other: str) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for number, place in enumerate(self.places):
            found.setdefault((getattr(place, one), getattr(place, other)), []).append(number)
        return found

    def finding(
        self, cause: str, columns: Sequence[int], iterations: Ints, **evidence: Any
    ) -> Finding:
        """Makes a finding about some ranks.

        Args:
            cause: see :class:`Finding`.
            columns: of the ranks.
            iterations: numbers of those that have it, ascending.
            evidence: further fields of the finding; ``counts`` besides the iterations.
        """
        places = [self.places[column] for column in columns]
        first, last = iterations[[0, -1]].tolist()
        kind = "lasting" if first == self.iterations[0] else "begun"
        if cause == "spikes":
            kind = cause
        elif last < self.iterations[-1]:
            kind = "passed"
        evidence["counts"] = {"iterations": len(iterations), **evidence["counts"]}
        return Finding(
            cause=cause,
            ranks=tuple(place.rank for place in places),
            stages=tuple(sorted({stage for column in columns for stage in self.stages[column]})),
            hosts=tuple(place.host for place in places),
            period=Period(first=first, last=last, kind=kind),
            **evidence,
        )


def measure(run: RunTrace, iterations: Iterable[int] | None = None) -> Measured:
    """Read what a diagnosis needs.

    Args:
        run: the run.
        iterations: only these; ``None`` for all but the first.

    Raises:
        TraceError: a file is damaged, or the iterations hold no action.
    """
    ranks = sorted(run.ranks)
    chosen = np.array(_choose(run, iterations), dtype=np.int64)
    counts = {i: max(t.num_microbatches.get(i, 0) for t in run.ranks.values()) for i in chosen}
    shape = (len(chosen), len(ranks), run.num_chunks, _KINDS, max(counts.values(), default=0))
    action_ns = np.full(shape, np.nan, dtype=np.float32)
    read_ns, reads = np.zeros(shape[:2], dtype=np.int64), np.zeros(shape[:2], dtype=np.int64)
    begins = np.full(shape[:2], np.iinfo(np.int64).max)
    ends = np.zeros(shape[:2], dtype=np.int64)
    shown = thinned(chosen, run.num_spans(chosen.tolist()), MOST_MESSAGE_SPANS)
    tables: dict[int, TraceTable] = {}
    for number, rank in enumerate(ranks):
        table = run.ranks[rank].table(chosen.tolist())
        _fill(action_ns[:, number], table, chosen)
        places = np.searchsorted(chosen, table.iteration)
        data = table.where("data")
        np.add.at(read_ns[:, number], places[data], table.duration_ns[data])
        np.add.at(reads[:, number], places[data], 1)
        drawn = table.where(*DRAWN_ACTIONS)
        np.minimum.at(begins[:, number], places[drawn], table.start_ns[drawn])
        np.maximum.at(ends[:, number], places[drawn], table.end_ns[drawn])
        wanted = table.where("send", "receive") & np.isin(table.iteration, shown)
        tables[rank] = table.take(wanted)
    if not np.isfinite(action_ns).any():
        raise TraceError(f"{run.origin} holds no F, B or W of the iterations asked for")
    headers = [run.ranks[rank].header for rank in ranks]
    pipelines = np.array([(header.dp_rank, header.tp_rank) for header in headers])
    members = [(pipelines == one).all(axis=1) for one in np.unique(pipelines, axis=0)]
    # Clocks of two pipelines never mix.
    steps = [ends[:, mine].max(axis=1) - begins[:, mine].min(axis=1) for mine in members]
    last = max(counts)
    return Measured(
        places=tuple(headers),
        stages=tuple(stages_of_rank(header, header.pp_rank) for header in headers),
        iterations=chosen,
        num_microbatches=counts[last],
        num_chunks=run.num_chunks,
        layers=_of_stages(headers, "layers"),
        work=_of_stages(headers, "work"),
        action_ns=action_ns,
        read_ns=read_ns,
        reads=reads,
        step_ns=np.max([*steps, np.zeros(len(chosen), dtype=np.int64)], axis=0),
        messages=match_messages(tables),
        clock_error_ns=_clock_error(run),
        experts=tuple(run.ranks[rank].experts for rank in ranks),
    )


def _choose(run: RunTrace, iterations: Iterable[int] | None) -> Sequence[int]:
    """The iterations to look at: complete ones, not the first, not too many."""
    if iterations is not None:
        wanted = sorted(set(iterations))
        for iteration in wanted:
            run.require_iteration(iteration)
        found = wanted
    else:
        found = list(run.complete_iterations(None) or run.iterations)
        found = found[FIRST_STEPS:] if len(found) > 2 * FIRST_STEPS else found
    if not found:
        raise TraceError(f"{run.origin} holds no iteration; the run ended before its first one")
    some = thinned(np.array(found), len(found), MOST_ITERATIONS)
    kept: list[int] = thinned(some, run.num_spans(some.tolist()), MOST_SPANS).tolist()
    return kept


def thinned(iterations: Ints, spans: int, most: int) -> Ints:
    """Returns as many of them, evenly spread, as hold not too many spans; one at least."""
    keep = max(1, min(len(iterations), len(iterations) * most // max(1, spans)))
    return iterations[np.linspace(0, len(iterations) - 1, keep).astype(np.int64)]


def _fill(action_ns: Floats, table: TraceTable, iterations: Ints) -> None:
    """Put a rank's actions into ``[iterations, chunks, 3, microbatches]``."""
    drawn = table.where(*DRAWN_ACTIONS)
    pure = compute_ns(table)[drawn]
    actions = table.take(drawn)
    place = np.searchsorted(iterations, actions.iteration)
    _, chunks, kinds, microbatches = action_ns.shape
    fits = (actions.chunk < chunks) & (actions.microbatch < microbatches)
    key = ((place * chunks + actions.chunk) * kinds + actions.kind) * microbatches
    key = (key + actions.microbatch)[fits]
    total = np.bincount(key, weights=pure[fits], minlength=action_ns.size)
    some = np.bincount(key, minlength=action_ns.size) > 0
    action_ns[...] = np.where(some & (total > 0), total, np.nan).reshape(action_ns.shape)


def _of_stages(headers: Sequence[TraceHeader], name: str) -> tuple[Any, ...]:
    """Returns what the headers say about stages, if they say it and agree."""
    values: set[tuple[Any, ...]] = {getattr(header, name) for header in headers}
    stages = headers[0].num_ranks * headers[0].num_chunks
    value = next(iter(values))
    return value if len(values) == 1 and len(value) == stages else ()


def _clock_error(run: RunTrace) -> float:
    """Half the fastest exchange of the worst clock; a second where a clock was not measured."""
    clocks = run.alignment.clocks[1:]
    if not clocks:
        return 0.0
    return max(c.fit.delay_ns / 2 if c.fit.num_samples else 1e9 for c in clocks)


NORMAL = 1.4826
"""Standard deviation by median absolute deviation, for a normal distribution."""

FROM_END = 4
"""A change is looked for where it leaves so many numbers on either side."""

PASSED = 6
"""And what ended again must have lasted so many: something else ran for a moment."""

TO_THE_END = 0.85
"""A shift that lasts to the end is preferred to one that ended, if it is nearly as likely."""

APART = 0.2
"""The lower quartile inside is above the upper one outside by so much of the rise."""

TAME = 1.75
"""Plain numbers are within so many standard deviations."""


@dataclass(frozen=True)
class Interval:
    """Locates a part of a series whose numbers were higher.

    Attributes:
        inside: its places.
        rise: median within minus median outside.
        score: that difference in standard errors.
    """

    inside: slice
    rise: float
    score: float


def middle(values: Floats, axis: int | tuple[int, ...] | None = None) -> Any:
    """The median without NaN; NaN where there is nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of an empty slice
        return np.nanmedian(values, axis=axis)


def spread(values: Floats, axis: int | None = None) -> Any:
    """The standard deviation that the median absolute deviation stands for."""
    centre = middle(values, axis)
    centre = centre if axis is None else np.expand_dims(centre, axis)
    return NORMAL * middle(np.abs(values - centre), axis)


def tame_mean(values: Floats) -> Floats:
    """The mean over the last axis, wild numbers taken for as far off as plain ones get.

    Of plain numbers it is surer than the median, and of some wild ones as sure.

    Args:
        values: ``[n, ..., m]``; NaN for none. How far plain numbers get is the same along the first
            axis.

    Returns:
        ``[n, ...]``, NaN where there is nothing.
    """
    centre = middle(values, axis=-1)[..., None]
    reach = TAME * middle(spread(values, axis=-1), axis=0)[None, ..., None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of an empty slice
        return np.asarray(np.nanmean(np.clip(values, centre - reach, centre + reach), axis=-1))


def noise(series: Floats) -> float:
    """The standard deviation of a series around whatever level it has at a time.

    From differences of neighbours, so that a change of the level does not count.

    Args:
        series: ``[n]`` without NaN; 0 is returned for fewer than three.
    """
    if len(series) < 3:
        return 0.0
    return float(NORMAL * np.median(np.abs(np.diff(series))) / math.sqrt(2))


def intervals(count: int, *, ended: bool = True) -> tuple[Ints, Ints]:
    """Returns first and end of the parts of a series in which it may be another.

    Args:
        count: numbers in the series.
        ended: parts that ended before the series does as well.
    """
    begins = np.arange(FROM_END, count - FROM_END + 1)
    first, end = [begins], [np.full(len(begins), count)]
    if ended:
        a, b = np.triu_indices(count, PASSED)
        keep = count - (b - a) >= FROM_END
        first.append(a[keep])
        end.append(b[keep])
    return np.concatenate(first), np.concatenate(end)


def best_interval(
    series: Floats, floor: float = 0.0, *, rise: float = 0.0, score: float = 0.0
) -> Interval | None:
    """The interval in which a series is higher than elsewhere with the least doubt.

    Args:
        series: ``[n]`` without NaN.
        floor: least standard deviation to believe in.
        rise: least rise that counts.
        score: least score that counts.

    Returns:
        ``None`` where the series is too short for an inside and an outside, where these overlap, or
        where the interval does not count.
    """
    count = len(series)
    if count < 2 * FROM_END:
        return None
    sigma = max(noise(series), floor, 1e-12)
    tail = np.median(np.sort(series)[-FROM_END:])
    tame = np.clip(series, np.median(series) - 8 * sigma, tail + 8 * sigma)
    sums = np.concatenate([[0.0], np.cumsum(tame)])
    first, end = intervals(count)
    inside, outside = end - first, count - (end - first)
    within = (sums[end] - sums[first]) / inside
    without = (sums[-1] - sums[end] + sums[first]) / outside
    scores = (within - without) / (sigma * np.sqrt(1 / inside + 1 / outside))
    best, lasting = int(np.argmax(scores)), int(np.argmax(np.where(end == count, scores, -np.inf)))
    if scores[lasting] >= TO_THE_END * scores[best]:
        best = lasting
    a, b = int(first[best]), int(end[best])
    rest = np.concatenate([series[:a], series[b:]])
    height = float(np.median(series[a:b]) - np.median(rest))
    found = Interval(slice(a, b), height, float(scores[best]))
    # A few wild numbers are no level: most of the inside must lie above most of the outside.
    overlaps = np.quantile(series[a:b], 0.25) < np.quantile(rest, 0.75) + APART * found.rise
    return None if overlaps or found.rise < rise or found.score < score else found


def chance(deviations: float) -> float:
    """Returns how likely a normal number so many deviations up is above 0, 0.5 to 0.99."""
    return min(0.99, max(0.5, 0.5 * (1 + math.erf(deviations / math.sqrt(2)))))
