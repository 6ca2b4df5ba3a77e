"""Figures of a whole run: per iteration and rank, from the spans of all ranks.

A rank's spans become its figures in the process that reads them, so that ten million spans need no
more memory than those of one file, and files are read by several processes at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property, partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.read import RankTrace, RunTrace
from megatron.adaptive.trace.span_columns import KIND, REASON, Ints, TraceTable
from megatron.adaptive.trace.trace_format import CAUSES, DRAWN_ACTIONS, KINDS, TraceHeader

WAIT_CAUSES = ("unknown", *CAUSES)
"""The last axis of ``wait_ns``; the cause may be unknown to this program."""

PARTS = {
    "busy": "busy",
    **{cause: f"wait {cause}" for cause in (*CAUSES, "unknown")},
    "before": "before",
    "after": "after",
    "rest": "rest",
}
"""The last axis of ``parts_ms``, with the names that people read."""

NS_PER_MS = 1e6

SERIAL_BYTES = 48 << 20
"""Up to here one process reads all files: others take longer to start than to help."""

HANDED_OVER_NS = 100_000
"""A send is the end of an action that ends no later after it."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RankFigures:
    """Figures of one rank; the first axis of every column is its iterations.

    Attributes:
        iterations: their numbers, ascending.
        start_ns: start of the first F, B or W on the common clock, 0 where there is none.
        end_ns: end of the last one.
        num_actions: how many there were.
        busy_ns: time in which it did at least one and did not hand over a result.
        wait_ns: ``[iterations, causes]``, by :data:`WAIT_CAUSES`.
        first_wait_ns: how much of it came before the first action.
        first_cause: and its cause.
        kind_ns: ``[iterations, kinds]``, total length of the spans of each of ``event.KINDS``.
        count: ``[iterations, chunks, 3]``, number of F, B and W.
        mean_ns: ``[iterations, chunks, 3]``, their mean length, NaN for none.
        std_ns: the same, their standard deviation.
        median_ns: the same, median without reading and handing over within them.
        mad_ns: the same, median distance from that median.
        peak_microbatches: most forwards that had no backward yet.
        peak_in_flight_bytes: most activation bytes held.
        transfer_bytes: payload that actions received and sent.
    """

    iterations: Ints
    start_ns: Ints
    end_ns: Ints
    num_actions: Ints
    busy_ns: Ints
    wait_ns: Ints
    first_wait_ns: Ints
    first_cause: Ints
    kind_ns: Ints
    count: Ints
    mean_ns: Floats
    std_ns: Floats
    median_ns: Floats
    mad_ns: Floats
    peak_microbatches: Ints
    peak_in_flight_bytes: Ints
    transfer_bytes: Ints

    @property
    def work_ns(self) -> Floats:
        """Length of all actions, each counted as the median of its kind and chunk."""
        work: Floats = (self.count * np.nan_to_num(self.median_ns)).sum(axis=(-2, -1))
        return work


@dataclass(frozen=True, eq=False)
class RunFigures(RankFigures):
    """Figures of many ranks; every column but ``iterations`` begins with ``[iterations, ranks]``.

    An iteration that a rank did not record has ``num_actions`` 0 and NaN or 0 elsewhere.

    Attributes:
        ranks: global ranks, the second axis.
        pp_rank: ``[ranks]``, their positions in the pipeline.
        dp_rank: ``[ranks]``.
        tp_rank: ``[ranks]``.
    """

    ranks: Ints
    pp_rank: Ints
    dp_rank: Ints
    tp_rank: Ints

    @cached_property
    def pipelines(self) -> list[Ints]:
        """Columns of the ranks of each pipeline."""
        places = np.stack([self.dp_rank, self.tp_rank])
        return [
            np.flatnonzero((places == place[:, None]).all(axis=0))
            for place in np.unique(places, axis=1).T
        ]

    @cached_property
    def _step(self) -> tuple[Ints, Ints]:
        """Start and end of the step of each rank's pipeline, ``[iterations, ranks]``."""
        known = self.num_actions > 0
        far = np.iinfo(np.int64)
        starts = np.where(known, self.start_ns, far.max)
        ends = np.where(known, self.end_ns, far.min)
        first, last = np.zeros_like(starts), np.zeros_like(ends)
        for mine in self.pipelines:
            first[:, mine] = starts[:, mine].min(axis=1, keepdims=True)
            last[:, mine] = ends[:, mine].max(axis=1, keepdims=True)
        empty = last < first
        first[empty] = last[empty] = 0
        return first, last

    @property
    def step_start_ns(self) -> Ints:
        """``[iterations, ranks]``: the first action of any rank of the pipeline begins."""
        return self._step[0]

    @property
    def step_ns(self) -> Ints:
        """``[iterations, ranks]``: from there to the end of the last action of any of them."""
        return self._step[1] - self._step[0]

    @property
    def bubble_fraction(self) -> Floats:
        """``[iterations, ranks]``: idle part of the step, NaN where nothing was recorded."""
        step = np.where(self.num_actions > 0, self.step_ns, 0).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            fraction: Floats = np.where(step > 0, 1 - self.busy_ns / step, np.nan)
        return fraction

    @cached_property
    def parts_ms(self) -> Floats:
        """``[iterations, ranks, parts]``: the parts of each step on each rank, by :data:`PARTS`.

        The sum over the parts is the step's time, but where clocks disagree. NaN where nothing was
        recorded.
        """
        waits = self.wait_ns.copy()
        rows, columns = np.indices(self.first_cause.shape)
        waits[rows, columns, self.first_cause] -= self.first_wait_ns  # part of what is before
        first, last = self._step
        ends = np.stack([self.start_ns - first, last - self.end_ns], axis=-1)
        known = [self.busy_ns[..., None], waits[..., 1:], waits[..., :1], ends]
        parts = np.concatenate(known, axis=-1).astype(np.float64)
        rest = np.maximum(0, self.step_ns - parts.sum(axis=-1))
        parts = np.concatenate([parts, rest[..., None]], axis=-1) / NS_PER_MS
        parts[self.num_actions == 0] = np.nan
        return parts

    def heat(self, stages: Ints) -> tuple[Floats, Floats]:
        """Computes how many times as long as usual the work of ranks and of stages takes.

        Args:
            stages: ``[pipeline ranks, chunks]``, the stage that lies there.

        Returns:
            ``[ranks, iterations]`` and ``[replicas, stages]``, NaN where nothing was recorded.
        """
        work = (self.count * np.nan_to_num(self.median_ns)).sum(axis=-1)  # of each chunk
        known = self.num_actions > 0
        usual = max(1.0, float(work[known].sum(axis=-1).mean()))
        by_rank = np.where(known, work.sum(axis=-1) / usual, np.nan).T
        replicas, row = np.unique(self.dp_rank, return_inverse=True)
        sums = np.zeros((2, len(replicas), stages.size))
        at = (row[:, None], stages[self.pp_rank])
        for held, values in zip(sums, (work.sum(axis=0), known.sum(axis=0)[:, None]), strict=True):
            np.add.at(held, at, values)
        with np.errstate(invalid="ignore"):
            return by_rank, sums[0] / sums[1] / (usual / stages.shape[1])


def run_figures(
    run: RunTrace,
    iterations: Iterable[int] | None = None,
    *,
    ranks: Iterable[int] | None = None,
    workers: int | None = None,
) -> RunFigures:
    """Compute the figures of a run.

    Args:
        run: the run.
        iterations: only these; ``None`` for all.
        ranks: only these global ranks; ``None`` for all. Steps then end with the last of them.
        workers: processes that read; as many as there are processors where ``None``, and this one
            alone where that is quicker. The program that calls must have an ``if __name__ ==
            "__main__"`` guard.

    Raises:
        TraceError: a file is damaged, or nothing is left of what was asked for.
    """
    chosen = [
        run.ranks[r] for r in sorted(run.ranks if ranks is None else set(ranks) & set(run.ranks))
    ]
    only = None if iterations is None else frozenset(iterations)
    parts = list(_parts(chosen, only, run.num_chunks, workers))
    if not any(len(part.iterations) for part in parts):
        raise TraceError(f"{run.origin} holds no spans of the iterations and ranks asked for")
    return stack_figures(parts, [trace.header for trace in chosen])


def stack_figures(parts: Sequence[RankFigures], headers: Sequence[TraceHeader]) -> RunFigures:
    """Put the figures of ranks with equally many chunks, one at least, beside each other.

    Args:
        parts: of each rank.
        headers: of each rank.
    """
    numbers = np.unique(np.concatenate([part.iterations for part in parts]))
    columns: dict[str, Any] = {"iterations": numbers}
    for name in (field.name for field in fields(RankFigures) if field.name != "iterations"):
        sample = getattr(parts[0], name)
        shape = (len(numbers), len(parts), *sample.shape[1:])
        fill = np.nan if sample.dtype == np.float64 else 0
        column = np.full(shape, fill, dtype=sample.dtype)
        for place, part in enumerate(parts):
            column[np.searchsorted(numbers, part.iterations), place] = getattr(part, name)
        columns[name] = column
    for name in ("pp_rank", "dp_rank", "tp_rank"):
        columns[name] = np.array([getattr(header, name) for header in headers])
    return RunFigures(ranks=np.array([header.rank for header in headers]), **columns)


def rank_figures(table: TraceTable, num_chunks: int) -> RankFigures:
    """Compute the figures of one rank.

    Args:
        table: its spans.
        num_chunks: model chunks that it holds.
    """
    iterations, place = np.unique(table.iteration, return_inverse=True)
    count = len(iterations)
    drawn = np.flatnonzero(table.where(*DRAWN_ACTIONS))
    drawn = drawn[np.lexsort((table.start_ns[drawn], place[drawn]))]
    actions, at = table.take(drawn), place[drawn]
    sizes = np.bincount(at, minlength=count)
    begins = np.cumsum(sizes) - sizes
    handed, _ = _within_actions(table, "send")
    at_work_ns = _sums(at, _covered(actions), count)
    return RankFigures(
        iterations=iterations,
        start_ns=_reduced(np.minimum, actions.start_ns, begins, sizes),
        end_ns=_reduced(np.maximum, actions.end_ns, begins, sizes),
        num_actions=sizes,
        busy_ns=np.maximum(0, at_work_ns - _sums(place[handed], table.duration_ns[handed], count)),
        kind_ns=_by_kind(table, place, count),
        **_waits(table, place, count, actions, begins, sizes),
        **_durations(actions, compute_ns(table)[drawn], at, count, num_chunks),
        peak_microbatches=_peak(actions, at, begins, sizes),
        peak_in_flight_bytes=_reduced(np.maximum, actions.in_flight_bytes, begins, sizes),
        transfer_bytes=_sums(at, actions.bytes, count),
    )


def compute_ns(table: TraceTable) -> Ints:
    """``[spans] int64``: the length of each action without reading and handing over within it.

    Other spans keep their length.
    """
    length: Ints = table.duration_ns.copy()
    for kind in ("data", "send"):
        rows, owner = _within_actions(table, kind)
        np.subtract.at(length, owner, table.duration_ns[rows])
    return np.maximum(length, 0)


def _within_actions(table: TraceTable, kind: str) -> tuple[Ints, Ints]:
    """The spans of a kind that lie within actions, and these actions, as numbers of rows.

    A send does only if the action ends with it: an action of a device has times of its own, and
    hands nothing over in the midst of its work.
    """
    rows = np.flatnonzero(table.kind == KIND[kind])
    actions = np.flatnonzero(table.where(*DRAWN_ACTIONS))
    if not len(rows) or not len(actions):
        return rows[:0], actions[:0]
    actions = actions[np.argsort(table.start_ns[actions], kind="stable")]
    around = np.searchsorted(table.start_ns[actions], table.start_ns[rows], "right") - 1
    owner = actions[np.maximum(around, 0)]
    left = table.end_ns[owner] - table.end_ns[rows]
    inside = (around >= 0) & (left >= 0)
    if kind == "send":
        inside &= left <= HANDED_OVER_NS
    return rows[inside], owner[inside]


def _parts(
    traces: Sequence[RankTrace], only: frozenset[int] | None, num_chunks: int, workers: int | None
) -> Iterator[RankFigures]:
    """The figures of each rank, in order."""
    size = sum(
        block.size_bytes
        for trace in traces
        for block in trace.index.blocks
        if only is None or block.marker.iteration in only
    )
    if workers is None:
        workers = 1 if size < SERIAL_BYTES else len(os.sched_getaffinity(0))
    workers = min(workers, len(traces))
    of_one = partial(_figures_of, only=only, num_chunks=num_chunks)
    if workers <= 1:
        yield from map(of_one, traces)
        return
    share = max(1, -(-len(traces) // (4 * workers)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(of_one, traces, chunksize=share)


def _figures_of(trace: RankTrace, only: frozenset[int] | None, num_chunks: int) -> RankFigures:
    return rank_figures(trace.table(only), num_chunks)


def _sums(places: Ints, values: Ints, count: int) -> Ints:
    sums: Ints = np.rint(np.bincount(places, weights=values, minlength=count)).astype(np.int64)
    return sums


def _by_kind(table: TraceTable, place: Ints, count: int) -> Ints:
    """``[iterations, kinds]``: total length of the spans of each kind."""
    width = len(KINDS) + 1  # what this program does not know comes last
    sums = _sums(place * width + table.kind, table.duration_ns, count * width)
    return sums.reshape(count, width)[:, : len(KINDS)]


def _reduced(function: np.ufunc, values: Ints, begins: Ints, sizes: Ints) -> Ints:
    """``function`` over each run of values; 0 for an empty one."""
    result = np.zeros(len(sizes), dtype=np.int64)
    if len(values):
        result[sizes > 0] = function.reduceat(values, begins[sizes > 0])
    return result


def _covered(actions: TraceTable) -> Ints:
    """Returns the time that each action adds to that covered by those before it."""
    if not len(actions):
        return actions.start_ns
    reach = np.maximum.accumulate(actions.end_ns)
    free_from = np.concatenate([actions.start_ns[:1], reach[:-1]])
    later = np.flatnonzero(np.diff(actions.iteration, prepend=actions.iteration[0] - 1))
    free_from[later] = actions.start_ns[later]  # iterations do not overlap, clocks may go back
    covered: Ints = np.maximum(0, actions.end_ns - np.maximum(actions.start_ns, free_from))
    return covered


def _waits(
    table: TraceTable, place: Ints, count: int, actions: TraceTable, begins: Ints, sizes: Ints
) -> dict[str, Ints]:
    rows = np.flatnonzero(table.kind == KIND["wait"])
    causes = np.zeros(len(REASON), dtype=np.int64)
    causes[[REASON[cause] for cause in CAUSES]] = np.arange(1, len(WAIT_CAUSES))
    cause = causes[table.reason[rows]]
    width = len(WAIT_CAUSES)
    wait_ns = _sums(place[rows] * width + cause, table.duration_ns[rows], count * width)
    start_ns = _reduced(np.minimum, actions.start_ns, begins, sizes)
    first = (table.end_ns[rows] <= start_ns[place[rows]]) & (sizes[place[rows]] > 0)
    first_cause = np.zeros(count, dtype=np.int64)
    first_cause[place[rows[first]]] = cause[first]
    return {
        "wait_ns": wait_ns.reshape(count, width),
        "first_wait_ns": _sums(place[rows[first]], table.duration_ns[rows[first]], count),
        "first_cause": first_cause,
    }


def _durations(
    actions: TraceTable, pure_ns: Ints, at: Ints, count: int, num_chunks: int
) -> dict[str, Any]:
    """Number, mean, spread, median and its spread of each kind of action of each chunk."""
    shape = (count, num_chunks, len(DRAWN_ACTIONS))
    size = count * num_chunks * len(DRAWN_ACTIONS)
    group = (at * num_chunks + actions.chunk) * len(DRAWN_ACTIONS) + actions.kind
    length = actions.duration_ns.astype(np.float64)
    pure = pure_ns.astype(np.float64)
    number = np.bincount(group, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.bincount(group, weights=length, minlength=size) / number
        square = np.bincount(group, weights=(length - mean[group]) ** 2, minlength=size) / number
    median = medians(group, pure, number)
    return {
        "count": number.reshape(shape),
        "mean_ns": mean.reshape(shape),
        "std_ns": np.sqrt(square).reshape(shape),
        "median_ns": median.reshape(shape),
        "mad_ns": medians(group, np.abs(pure - median[group]), number).reshape(shape),
    }


def medians(group: Ints, values: Floats, number: Ints) -> Floats:
    """The median of each group, NaN for an empty one."""
    medians = np.full(len(number), np.nan)
    if len(values):
        ordered = values[np.lexsort((values, group))]
        begins = np.cumsum(number) - number
        some = number > 0
        low, high = begins + (number - 1) // 2, begins + number // 2
        medians[some] = (ordered[low[some]] + ordered[high[some]]) / 2
    return medians


def _peak(actions: TraceTable, at: Ints, begins: Ints, sizes: Ints) -> Ints:
    """Most forwards without their backward in each iteration."""
    step = np.where(actions.kind == KIND["F"], 1, np.where(actions.kind == KIND["B"], -1, 0))
    held = np.cumsum(step)
    before = np.concatenate([[0], held])[begins]
    peak: Ints = np.maximum(_reduced(np.maximum, held - before[at], begins, sizes), 0)
    return peak
