"""Reads the times of a run into arrays, and computes statistics that are robust to outliers."""

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
from megatron.adaptive.trace.collectives import JoinedCollectives, join_collectives
from megatron.adaptive.trace.diagnose.finding import Finding, Period
from megatron.adaptive.trace.machine_counters import COUNTERS
from megatron.adaptive.trace.metrics import compute_ns
from megatron.adaptive.trace.read import RankTrace, RunTrace
from megatron.adaptive.trace.span_columns import (
    Ints,
    Messages,
    TraceTable,
    match_messages,
    microbatches_of,
)
from megatron.adaptive.trace.step_view import stages_of_rank
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, IterationStart, TraceHeader

Floats = npt.NDArray[np.floating[Any]]

MOST_ITERATIONS = 200
"""Maximum number of iterations in a diagnosis. Longer runs are sampled evenly."""

MOST_SPANS = 4_000_000
"""Maximum number of spans in a diagnosis. If a run has more, fewer iterations are read."""

MOST_MESSAGE_SPANS = 1_500_000
"""Maximum number of spans to search for messages.

If a trace has more spans, only some of its iterations are searched.
"""

FIRST_STEPS = 1
"""Number of iterations at the start of a run that are skipped, because they include warm-up."""

_KINDS = len(DRAWN_ACTIONS)


@dataclass(frozen=True, eq=False)
class Measured:
    """Holds the measured times of a run as arrays.

    Below, the "column" of a rank is its index on the rank axis of these arrays.

    Attributes:
        headers: Trace header of each rank, indexed by column.
        stages: Indices of the pipeline stages on each rank, indexed by column.
        iterations: ``[iterations]``, numbers of the iterations.
        num_microbatches: Number of microbatches in the last iteration.
        num_chunks: Number of model chunks per rank.
        layers: Number of layers per stage; empty if unknown.
        work: Expected computing time of each stage, including embedding and loss, expressed as an
            equivalent number of layers; empty if unknown.
        layer_kinds: Kind of each layer, as a number. Layers of the same kind do the same work.
            Empty if all layers do the same work.
        action_ns: ``[iterations, ranks, chunks, 3, microbatches] float32``, durations in ns of
            forward passes, backward passes and separate weight-gradient passes, without the time
            spent on reading data and sending messages. The pieces of a pass are added up. NaN if
            the rank did not run the action.
        read_ns: ``[iterations, ranks]``, total time in ns of reading data.
        reads: ``[iterations, ranks]``, number of data reads.
        step_ns: ``[iterations]``, time in ns from the first to the last action in the slowest
            pipeline.
        messages: Messages between ranks in the iterations, or in a sample of the iterations if
            they have many spans.
        clock_error_ns: Maximum remaining error in ns between the clocks of two ranks.
        experts: Records with the load of the experts, keyed by iteration, for each rank.
        machine: Values of each counter in ``machine_counters``, ``[iterations, ranks] float64``.
            NaN for iterations without counters.
        layer_rows: Times of the layers as in ``IterationStart``, for each rank and iteration. Empty
            for iterations in which layers were not timed.
        collectives: Collectives of each process group and operation; empty if none were recorded.
    """

    headers: tuple[TraceHeader, ...]
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
    machine: Mapping[str, Floats]
    layer_rows: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...] = ()
    collectives: tuple[JoinedCollectives, ...] = ()
    layer_kinds: tuple[int, ...] = ()

    @cached_property
    def median_ns(self) -> Floats:
        """Median duration of an action in ns over microbatches, ``[iterations, ranks, chunks, 3]``.

        NaN for actions that the rank did not run.
        """
        medians: Floats = middle(self.action_ns, axis=-1)
        return medians

    @cached_property
    def microbatch_ns(self) -> Floats:
        """Computing time in ns for one microbatch, over all chunks of a rank, ``[ranks]``."""
        totals: Floats = np.nansum(middle(self.median_ns, axis=0), axis=(1, 2))
        return totals

    @property
    def num_actions(self) -> int:
        """Number of actions whose duration is known."""
        return int(np.isfinite(self.action_ns).sum())

    @property
    def step(self) -> float:
        """Median step time in ns, or 0 if there are no iterations."""
        return float(np.median(self.step_ns)) if len(self.step_ns) else 0.0

    @cached_property
    def column(self) -> dict[int, int]:
        """Maps each global rank to its column (index on the arrays' rank axis)."""
        return {header.rank: column for column, header in enumerate(self.headers)}

    @cached_property
    def replicas(self) -> dict[tuple[int, ...], list[int]]:
        """Maps (data-parallel rank, tensor-parallel rank) to the columns of one pipeline."""
        return self._grouped("dp_rank", "tp_rank")

    @cached_property
    def peers(self) -> dict[tuple[int, ...], list[int]]:
        """Maps (pipeline rank, tensor-parallel rank) to the columns of the ranks in that position.

        Ranks in the same position do the same work on different data.
        """
        return self._grouped("pp_rank", "tp_rank")

    def _grouped(self, *axes: str) -> dict[tuple[int, ...], list[int]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for column, header in enumerate(self.headers):
            position = tuple(getattr(header, axis) for axis in axes)
            groups.setdefault(position, []).append(column)
        return groups

    def finding(
        self,
        columns: Sequence[int],
        iterations: Ints | Sequence[int],
        *,
        against: str,
        confidence: float,
        counts: Mapping[str, int] | None = None,
        factor: float | None = None,
        delay_ms: float | None = None,
        detail: str = "",
        kind: str | None = None,
    ) -> Finding:
        """Returns a finding about the ranks in ``columns``, with their stages and machines.

        Args:
            columns: Indices of the affected ranks on the rank axis.
            iterations: Numbers of the affected iterations in ascending order.
            against: Reference of the comparison: ``peers`` (ranks with the same work), ``plan``
                (expected times), ``history`` (other iterations) or ``others`` (other ranks or
                links).
            confidence: Probability that the finding is not caused by chance, between 0.5 and 0.99.
            counts: Number of actions, messages or reads that were compared, keyed by name. The
                number of iterations is added.
            factor: Ratio of the ranks' computing time to the expected time or, for overloaded
                experts, of their tokens to the mean. ``None`` if only ``delay_ms`` is known.
            delay_ms: Delay in milliseconds of each message, microbatch or action, or ``None`` if
                only ``factor`` is known.
            detail: Additional numbers, as a line of text.
            kind: Kind of the period, as in :class:`Period`, or ``None`` to infer it from
                ``iterations``.
        """
        headers = [self.headers[column] for column in columns]
        iterations = np.asarray(iterations)
        first, last = iterations[[0, -1]].tolist()
        if kind is None:
            kind = "lasting" if first == self.iterations[0] else "begun"
            kind = "passed" if last < self.iterations[-1] else kind
        return Finding(
            cause="",
            ranks=tuple(header.rank for header in headers),
            stages=tuple(sorted({stage for column in columns for stage in self.stages[column]})),
            hosts=tuple(header.host for header in headers),
            period=Period(first=first, last=last, kind=kind),
            against=against,
            confidence=confidence,
            factor=factor,
            delay_ms=delay_ms,
            counts={"iterations": len(iterations), **(counts or {})},
            detail=detail,
        )


def measure(run: RunTrace, iterations: Iterable[int] | None = None) -> Measured:
    """Reads all times that a diagnosis needs from the trace of ``run``.

    Args:
        run: Trace of the run.
        iterations: Iterations to read. ``None`` reads all but the first, or a sample of them.

    Raises:
        TraceError: A file is damaged, or the iterations contain no actions.
    """
    ranks = sorted(run.ranks)
    chosen = np.array(_choose(run, iterations), dtype=np.int64)
    counts = {i: max(_count(trace, i) for trace in run.ranks.values()) for i in chosen.tolist()}
    shape = (len(chosen), len(ranks), run.num_chunks, _KINDS, max(counts.values(), default=0))
    action_ns = np.full(shape, np.nan, dtype=np.float32)
    read_ns, reads = np.zeros(shape[:2], dtype=np.int64), np.zeros(shape[:2], dtype=np.int64)
    begins = np.full(shape[:2], np.iinfo(np.int64).max)
    ends = np.zeros(shape[:2], dtype=np.int64)
    shown = thinned(chosen, run.num_spans(chosen.tolist()), MOST_MESSAGE_SPANS)
    tables: dict[int, TraceTable] = {}
    for number, rank in enumerate(ranks):
        table = run.ranks[rank].table(chosen.tolist())
        _fill(action_ns[:, number], table, chosen, run.ranks[rank])
        rows = np.searchsorted(chosen, table.iteration)
        data = table.where("data")
        np.add.at(read_ns[:, number], rows[data], table.duration_ns[data])
        np.add.at(reads[:, number], rows[data], 1)
        drawn = table.where(*DRAWN_ACTIONS)
        np.minimum.at(begins[:, number], rows[drawn], table.start_ns[drawn])
        np.maximum.at(ends[:, number], rows[drawn], table.end_ns[drawn])
        is_message = table.where("send", "receive") & np.isin(table.iteration, shown)
        tables[rank] = table.take(is_message)
    if not np.isfinite(action_ns).any():
        where = "in the examined iterations; choose other iterations"
        raise TraceError(f"{run.origin} does not contain F, B or W actions {where}")
    headers = [run.ranks[rank].header for rank in ranks]
    pipelines = [(header.dp_rank, header.tp_rank) for header in headers]
    order = sorted(range(len(ranks)), key=pipelines.__getitem__)
    heads = [
        n for n in range(len(ranks)) if not n or pipelines[order[n]] != pipelines[order[n - 1]]
    ]
    # Measure each step within a pipeline, because the clocks of different pipelines may disagree.
    steps = np.maximum.reduceat(ends[:, order], heads, axis=1)
    steps -= np.minimum.reduceat(begins[:, order], heads, axis=1)
    last = max(counts)
    return Measured(
        headers=tuple(headers),
        stages=tuple(stages_of_rank(header, header.pp_rank) for header in headers),
        iterations=chosen,
        num_microbatches=counts[last],
        num_chunks=run.num_chunks,
        layers=_of_stages(headers, "layers"),
        work=_of_stages(headers, "work"),
        action_ns=action_ns,
        read_ns=read_ns,
        reads=reads,
        step_ns=np.maximum(steps.max(axis=1), 0),
        messages=match_messages(tables),
        clock_error_ns=_clock_error(run),
        experts=tuple(run.ranks[rank].experts for rank in ranks),
        machine=_machine(run, chosen),
        layer_rows=tuple(
            tuple(run.ranks[rank].layers(iteration) for iteration in chosen.tolist())
            for rank in ranks
        ),
        collectives=tuple(join_collectives(run, chosen.tolist())),
        layer_kinds=headers[0].layer_kinds,
    )


def _count(trace: RankTrace, iteration: int) -> int:
    """Returns the number of microbatches in ``iteration``.

    The recorded number may be wrong, so the result is limited to the number of spans.
    """
    return min(trace.num_microbatches.get(iteration, 0), trace.num_spans.get(iteration, 0))


def _machine(run: RunTrace, iterations: Ints) -> Mapping[str, Floats]:
    """Returns the counts of each machine counter, ``[iterations, ranks]``, keyed by counter name.

    Missing counts are NaN.
    """
    counts = [
        [run.ranks[rank].machine(iteration) for rank in sorted(run.ranks)]
        for iteration in iterations.tolist()
    ]
    return {
        name: np.array([[of.get(name, 0) if of else np.nan for of in row] for row in counts])
        for name in COUNTERS
    }


def _choose(run: RunTrace, iterations: Iterable[int] | None) -> Sequence[int]:
    """Returns the iterations to read: all ``iterations``, or a sample if there are many.

    ``None`` selects all complete iterations except the first, which includes warm-up.
    """
    if iterations is not None:
        candidates = sorted(set(iterations))
        for iteration in candidates:
            run.require_iteration(iteration)
    else:
        candidates = list(run.complete_iterations(None) or run.iterations)
        if len(candidates) > 2 * FIRST_STEPS:
            candidates = candidates[FIRST_STEPS:]
    if not candidates:
        raise TraceError(
            f"{run.origin} does not contain iterations, because the run ended before its first "
            "iteration"
        )
    sample = thinned(np.array(candidates), len(candidates), MOST_ITERATIONS)
    kept: list[int] = thinned(sample, run.num_spans(sample.tolist()), MOST_SPANS).tolist()
    return kept


def thinned(iterations: Ints, spans: int, most: int) -> Ints:
    """Returns an evenly spaced sample of iterations with about ``most`` spans in total.

    Args:
        iterations: Numbers of the iterations to choose from.
        spans: Total number of spans in these iterations.
        most: Approximate maximum number of spans in the sample. The sample always contains at least
            one iteration.
    """
    keep = max(1, min(len(iterations), len(iterations) * most // max(1, spans)))
    return iterations[np.linspace(0, len(iterations) - 1, keep).astype(np.int64)]


def _fill(action_ns: Floats, table: TraceTable, iterations: Ints, trace: RankTrace) -> None:
    """Writes the durations of a rank's actions into ``action_ns``.

    If a microbatch is split into slices, the durations of the slices are added up.

    Args:
        action_ns: ``[iterations, chunks, 3, microbatches]``, array to fill.
        table: All spans of the rank.
        iterations: Numbers of the iterations on the first axis, in ascending order.
        trace: Trace of the rank.
    """
    drawn = table.where(*DRAWN_ACTIONS)
    pure = compute_ns(table, trace.header.device, trace.slices)[drawn]
    actions = table.take(drawn)
    row = np.searchsorted(iterations, actions.iteration)
    _, chunks, kinds, microbatches = action_ns.shape
    microbatch, _ = microbatches_of(actions.iteration, actions.microbatch, trace.slices)
    fits = (actions.chunk < chunks) & (microbatch < microbatches)
    key = ((row * chunks + actions.chunk) * kinds + actions.kind) * microbatches
    key = (key + microbatch)[fits]
    total = np.bincount(key, weights=pure[fits], minlength=action_ns.size)
    is_measured = np.bincount(key, minlength=action_ns.size) > 0
    action_ns[...] = np.where(is_measured & (total > 0), total, np.nan).reshape(action_ns.shape)


def _of_stages(headers: Sequence[TraceHeader], name: str) -> tuple[Any, ...]:
    """Returns the header field called ``name``, which has one value per stage.

    The result is empty if the field is missing or differs between headers.
    """
    values: set[tuple[Any, ...]] = {getattr(header, name) for header in headers}
    stages = headers[0].num_ranks * headers[0].num_chunks
    value = next(iter(values))
    return value if len(values) == 1 and len(value) == stages else ()


def _clock_error(run: RunTrace) -> float:
    """Returns the maximum error of the clock offsets in ns, or 1 s if an offset was not measured.

    The error of an offset is at most half of the shortest round-trip time to the reference clock.
    """
    clocks = run.alignment.clocks[1:]
    if not clocks:
        return 0.0
    return max(c.fit.delay_ns / 2 if c.fit.num_samples else 1e9 for c in clocks)


NORMAL = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of a normal distribution."""

FROM_END = 4
"""Minimum number of values that a series must have both before and after a detected change."""

PASSED = 6
"""Minimum number of values in an interval that ends before the end of the series."""

TO_THE_END = 0.85
"""Minimum score to prefer an interval that lasts to the end, as a fraction of the best score.

Such an interval is chosen even if another interval has a higher score.
"""

APART = 0.2
"""Minimum gap between the lower quartile inside an interval and the upper quartile outside.

The unit is the rise, which is the median inside minus the median outside.
"""

TAME = 1.75
"""Distance from the median, in standard deviations, at which :func:`tame_mean` clips outliers."""


@dataclass(frozen=True)
class Interval:
    """Describes an interval of a series in which the values are higher than in the rest.

    Attributes:
        inside: Indices of the values in the interval.
        rise: Difference between the medians of the values inside and outside the interval.
        score: Difference between the means inside and outside, in standard errors.
    """

    inside: slice
    rise: float
    score: float


def middle(values: Floats, axis: int | tuple[int, ...] | None = None) -> Any:
    """Returns the median of ``values`` along ``axis``, ignoring NaN.

    The result is NaN if all values are NaN.
    """
    with warnings.catch_warnings():
        # Slices that contain only NaN are expected, and numpy would issue a warning for each.
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmedian(values, axis=axis)


def spread(values: Floats, axis: int | None = None) -> Any:
    """Estimates the standard deviation of ``values`` from their median absolute deviation."""
    centre = middle(values, axis)
    centre = centre if axis is None else np.expand_dims(centre, axis)
    return NORMAL * middle(np.abs(values - centre), axis)


def tame_mean(values: Floats) -> Floats:
    """Returns the mean over the last axis after clipping outliers.

    This estimate has a smaller error than the median, and is equally robust to a few outliers.

    Args:
        values: ``[n, ..., m]``, with NaN for missing values. Values are clipped around the median
            of their row, at the same distance for all rows along the first axis.

    Returns:
        Clipped mean of each row, ``[n, ...]``, or NaN if all values are missing.
    """
    centre = middle(values, axis=-1)[..., None]
    reach = TAME * middle(spread(values, axis=-1), axis=0)[None, ..., None]
    with warnings.catch_warnings():
        # Slices that contain only NaN are expected, and numpy would issue a warning for each.
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmean(np.clip(values, centre - reach, centre + reach), axis=-1))


def noise(series: Floats) -> float:
    """Estimates the standard deviation of the random noise in a series.

    The estimate uses the differences between neighbouring values, which are hardly affected by
    jumps and slow drifts.

    Args:
        series: ``[n]`` without NaN. With fewer than three values, the result is 0.
    """
    if len(series) < 3:
        return 0.0
    return float(NORMAL * np.median(np.abs(np.diff(series))) / math.sqrt(2))


def intervals(count: int, *, ended: bool = True) -> tuple[Ints, Ints]:
    """Returns the start and end indices of all intervals to search in a series.

    Args:
        count: Number of values in the series.
        ended: Whether to include intervals that end before the end of the series.
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
    """Returns the interval in which the values are most clearly higher than in the rest.

    Args:
        series: ``[n]`` without NaN.
        floor: Minimum standard deviation to assume for the noise in the series.
        rise: Minimum rise of the interval (median inside minus median outside).
        score: Minimum score of the interval (difference of the means in standard errors).

    Returns:
        Best interval, or ``None`` if the series is too short, if the values inside and outside
        overlap too much, or if the rise or score is below the minimum.
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
    interval = Interval(slice(a, b), height, float(scores[best]))
    # Require that most values inside the interval exceed most values outside, because a few
    # outliers could raise the mean.
    overlaps = np.quantile(series[a:b], 0.25) < np.quantile(rest, 0.75) + APART * interval.rise
    return None if overlaps or interval.rise < rise or interval.score < score else interval


def chance(deviations: float) -> float:
    """Returns the probability, from 0.5 to 0.99, that a positive deviation is not caused by chance.

    Args:
        deviations: Size of the deviation in standard deviations.
    """
    return min(0.99, max(0.5, 0.5 * (1 + math.erf(deviations / math.sqrt(2)))))
