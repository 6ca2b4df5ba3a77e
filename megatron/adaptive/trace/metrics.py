"""Computes statistics of a whole run, per iteration and rank, from the spans of all ranks.

The files can be read in parallel. Each process reduces the spans of a file to these statistics
before it reads the next file, so it only keeps the spans of one file in memory.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property, partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.read import RankTrace, RunTrace
from megatron.adaptive.trace.span_columns import (
    KIND,
    REASON,
    Ints,
    SlicesOf,
    TraceTable,
    microbatches_of,
)
from megatron.adaptive.trace.trace_format import CAUSES, DRAWN_ACTIONS, KINDS, TraceHeader

WAIT_CAUSES = ("unknown", *CAUSES)
"""Causes of waits, in the order of the last axis of ``wait_ns``.

``unknown`` stands for causes that only a newer version of this program knows.
"""

PARTS = {
    "busy": "busy",
    **{cause: f"wait {cause}" for cause in (*CAUSES, "unknown")},
    "before": "before",
    "after": "after",
    "rest": "rest",
}
"""Parts of a step's time and their display names, in the order of the last axis of ``parts_ms``.

``before`` is the time from the start of the step to the rank's first action. ``after`` is the time
from the rank's last action to the end of the step. ``rest`` is the time that belongs to no other
part.
"""

NS_PER_MS = 1e6

SERIAL_BYTES = 48 << 20
"""Maximum total size in bytes of files that a single process reads.

For smaller files, starting several processes would take longer than reading the files.
"""

HANDED_OVER_NS = 100_000
"""Maximum time in ns from the end of a send to the end of an action that includes the send.

For a send that took longer than this value, the maximum is the send's own duration.
"""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RankFigures:
    """Contains the statistics of one rank as arrays, whose first axis is the iterations.

    An action is a forward pass (F), a backward pass (B), or a separate pass that computes weight
    gradients (W). Axes of length 3 correspond to F, B and W.

    Attributes:
        iterations: Numbers of the iterations in ascending order.
        start_ns: Start of the first action in ns on the common clock, or 0 if there is none.
        end_ns: End of the last action in ns on the common clock, or 0 if there is none.
        num_actions: Number of actions.
        busy_ns: Time in ns during which at least one action ran, excluding the sends at the ends of
            actions.
        wait_ns: ``[iterations, causes]``, waiting time in ns for each cause in :data:`WAIT_CAUSES`.
        first_wait_ns: Waiting time in ns before the first action. Included in ``wait_ns``.
        first_cause: Cause of the wait before the first action, as an index into
            :data:`WAIT_CAUSES`.
        kind_ns: ``[iterations, kinds]``, total duration in ns of the spans of each kind in
            ``trace_format.KINDS``.
        count: ``[iterations, chunks, 3]``, number of actions.
        mean_ns: ``[iterations, chunks, 3]``, mean duration of the actions in ns, or NaN if there
            are none.
        std_ns: ``[iterations, chunks, 3]``, standard deviation of the actions' durations in ns.
        median_ns: ``[iterations, chunks, 3]``, median duration of the actions in ns, excluding the
            time in which they read data or sent messages.
        mad_ns: ``[iterations, chunks, 3]``, median absolute deviation from ``median_ns``.
        peak_microbatches: Maximum number of microbatches in flight. A microbatch is in flight from
            the forward pass to the backward pass. Slices are added up as fractions of microbatches,
            and the sum is rounded up. Frozen stages, which have no backward passes, have no
            microbatches in flight.
        peak_in_flight_bytes: Maximum total size in bytes of the activations that are kept in
            memory.
        transfer_bytes: Total size in bytes of all messages that actions received and sent.
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
        """Computing time in ns per iteration. Based on medians, to be robust to outliers."""
        work: Floats = (self.count * np.nan_to_num(self.median_ns)).sum(axis=(-2, -1))
        return work


@dataclass(frozen=True, eq=False)
class RunFigures(RankFigures):
    """Contains the statistics of many ranks, in arrays like those of :class:`RankFigures`.

    Except for ``iterations``, the first two axes of each array are ``[iterations, ranks]``. If a
    rank did not record an iteration, ``num_actions`` is 0 and the other values are 0 or NaN.

    Attributes:
        ranks: Global ranks, in the order of the second axis.
        pp_rank: ``[ranks]``, pipeline rank.
        dp_rank: ``[ranks]``, data-parallel rank.
        tp_rank: ``[ranks]``, tensor-parallel rank.
    """

    ranks: Ints
    pp_rank: Ints
    dp_rank: Ints
    tp_rank: Ints

    @cached_property
    def pipelines(self) -> list[Ints]:
        """Indices of the ranks of each pipeline on the rank axis, as one array per pipeline."""
        positions = np.stack([self.dp_rank, self.tp_rank])
        return [
            np.flatnonzero((positions == position[:, None]).all(axis=0))
            for position in np.unique(positions, axis=1).T
        ]

    @cached_property
    def _step(self) -> tuple[Ints, Ints]:
        """Start and end in ns of the step in each rank's pipeline, both ``[iterations, ranks]``."""
        is_recorded = self.num_actions > 0
        far = np.iinfo(np.int64)
        starts = np.where(is_recorded, self.start_ns, far.max)
        ends = np.where(is_recorded, self.end_ns, far.min)
        first, last = np.zeros_like(starts), np.zeros_like(ends)
        for columns in self.pipelines:
            first[:, columns] = starts[:, columns].min(axis=1, keepdims=True)
            last[:, columns] = ends[:, columns].max(axis=1, keepdims=True)
        empty = last < first
        first[empty] = last[empty] = 0
        return first, last

    @property
    def step_start_ns(self) -> Ints:
        """Start in ns of the first action in each rank's pipeline, ``[iterations, ranks]``."""
        return self._step[0]

    @property
    def step_ns(self) -> Ints:
        """Time in ns from the first to the last action in the pipeline, ``[iterations, ranks]``."""
        return self._step[1] - self._step[0]

    @property
    def bubble_fraction(self) -> Floats:
        """Idle fraction of the step for each rank, ``[iterations, ranks]``, or NaN if unknown."""
        step = np.where(self.num_actions > 0, self.step_ns, 0).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            fraction: Floats = np.where(step > 0, 1 - self.busy_ns / step, np.nan)
        return fraction

    @cached_property
    def parts_ms(self) -> Floats:
        """Time in ms of each part of the step (:data:`PARTS`), ``[iterations, ranks, parts]``.

        The parts add up to the step time unless the clocks of the ranks disagree. Values are NaN if
        nothing was recorded.
        """
        waits = self.wait_ns.copy()
        rows, columns = np.indices(self.first_cause.shape)
        # The part "before" already includes the wait before the first action, so subtract it here.
        waits[rows, columns, self.first_cause] -= self.first_wait_ns
        first, last = self._step
        ends = np.stack([self.start_ns - first, last - self.end_ns], axis=-1)
        columns_ns = [self.busy_ns[..., None], waits[..., 1:], waits[..., :1], ends]
        parts = np.concatenate(columns_ns, axis=-1).astype(np.float64)
        rest = np.maximum(0, self.step_ns - parts.sum(axis=-1))
        parts = np.concatenate([parts, rest[..., None]], axis=-1) / NS_PER_MS
        parts[self.num_actions == 0] = np.nan
        return parts

    def heat(self, stages: Ints) -> tuple[Floats, Floats]:
        """Returns the computing times of ranks and of stages relative to the mean, for heat maps.

        Args:
            stages: ``[pipeline ranks, chunks]``, stage index of each chunk of a rank.

        Returns:
            Arrays ``[ranks, iterations]`` for the ranks and ``[replicas, stages]`` for the stages.
            Values are relative to the mean, and NaN if nothing was recorded.
        """
        # Sum only over the last axis, the kinds of actions, to get one value per chunk.
        work = (self.count * np.nan_to_num(self.median_ns)).sum(axis=-1)
        is_recorded = self.num_actions > 0
        usual = max(1.0, float(work[is_recorded].sum(axis=-1).mean()))
        by_rank = np.where(is_recorded, work.sum(axis=-1) / usual, np.nan).T
        replicas, row = np.unique(self.dp_rank, return_inverse=True)
        sums = np.zeros((2, len(replicas), stages.size))
        cells = (row[:, None], stages[self.pp_rank])
        for total, values in zip(
            sums, (work.sum(axis=0), is_recorded.sum(axis=0)[:, None]), strict=True
        ):
            np.add.at(total, cells, values)
        with np.errstate(invalid="ignore"):
            return by_rank, sums[0] / sums[1] / (usual / stages.shape[1])


def run_figures(
    run: RunTrace,
    iterations: Iterable[int] | None = None,
    *,
    ranks: Iterable[int] | None = None,
    workers: int | None = None,
) -> RunFigures:
    """Reads the spans of a run and computes the statistics of its ranks.

    Args:
        run: Trace of the run.
        iterations: Iterations to include; ``None`` for all.
        ranks: Global ranks to include; ``None`` for all. Step times are computed from these ranks
            only.
        workers: Number of processes that read files; ``None`` for one per processor core, or for
            this process only if that is faster. If there are several processes, the calling program
            needs an ``if __name__ == "__main__"`` guard, because each process imports the program
            again.

    Raises:
        TraceError: A file is damaged, or there are no spans for these iterations and ranks.
    """
    chosen = [
        run.ranks[r] for r in sorted(run.ranks if ranks is None else set(ranks) & set(run.ranks))
    ]
    only = None if iterations is None else frozenset(iterations)
    parts = list(_parts(chosen, only, run.num_chunks, workers))
    if not any(len(part.iterations) for part in parts):
        raise TraceError(f"{run.origin} contains no spans of the requested iterations and ranks")
    return stack_figures(parts, [trace.header for trace in chosen])


def stack_figures(parts: Sequence[RankFigures], headers: Sequence[TraceHeader]) -> RunFigures:
    """Stacks the statistics of several ranks into arrays with a rank axis.

    Args:
        parts: Statistics of each rank. All ranks must have the same number of chunks.
        headers: Trace header of each rank, in the order of ``parts``.
    """
    numbers = np.unique(np.concatenate([part.iterations for part in parts]))
    columns: dict[str, Any] = {"iterations": numbers}
    for name in (field.name for field in fields(RankFigures) if field.name != "iterations"):
        sample = getattr(parts[0], name)
        shape = (len(numbers), len(parts), *sample.shape[1:])
        fill = np.nan if sample.dtype == np.float64 else 0
        column = np.full(shape, fill, dtype=sample.dtype)
        for index, part in enumerate(parts):
            column[np.searchsorted(numbers, part.iterations), index] = getattr(part, name)
        columns[name] = column
    for name in ("pp_rank", "dp_rank", "tp_rank"):
        columns[name] = np.array([getattr(header, name) for header in headers])
    return RunFigures(ranks=np.array([header.rank for header in headers]), **columns)


def rank_figures(
    table: TraceTable,
    num_chunks: int,
    slices: SlicesOf = lambda _: 1,
    *,
    device: str = "",
    frozen: Callable[[int], int] = lambda _: 0,
) -> RankFigures:
    """Computes the statistics of a rank from the spans in ``table``.

    Args:
        table: All spans of the rank.
        num_chunks: Number of model chunks on the rank.
        slices: Function that maps an iteration to the number of slices of each microbatch. By
            default, microbatches are not split.
        device: Kind of device on which the rank computes, as in the header of its trace.
        frozen: Function that returns the number of leading chunks without backward passes in an
            iteration.
    """
    iterations, row = np.unique(table.iteration, return_inverse=True)
    count = len(iterations)
    drawn = np.flatnonzero(table.where(*DRAWN_ACTIONS))
    drawn = drawn[np.lexsort((table.start_ns[drawn], row[drawn]))]
    actions, action_row = table.take(drawn), row[drawn]
    sizes = np.bincount(action_row, minlength=count)
    begins = np.cumsum(sizes) - sizes
    handed, _ = _within_actions(table, "send", device, slices)
    _, number = microbatches_of(actions.iteration, actions.microbatch, slices)
    at_work_ns = _sums(action_row, _covered(actions), count)
    return RankFigures(
        iterations=iterations,
        start_ns=_reduced(np.minimum, actions.start_ns, begins, sizes),
        end_ns=_reduced(np.maximum, actions.end_ns, begins, sizes),
        num_actions=sizes,
        busy_ns=np.maximum(0, at_work_ns - _sums(row[handed], table.duration_ns[handed], count)),
        kind_ns=_by_kind(table, row, count),
        **_waits(table, row, count, actions, begins, sizes),
        **_durations(
            actions, compute_ns(table, device, slices)[drawn], action_row, count, num_chunks
        ),
        peak_microbatches=_peak(
            actions,
            np.where(actions.chunk < _each(frozen, iterations)[action_row], 0.0, 1 / number),
            action_row,
            begins,
            sizes,
        ),
        peak_in_flight_bytes=_reduced(np.maximum, actions.in_flight_bytes, begins, sizes),
        transfer_bytes=_sums(action_row, actions.bytes, count),
    )


def _each(count: Callable[[int], int], iterations: Ints) -> Ints:
    return np.array([count(iteration) for iteration in iterations.tolist()], dtype=np.int64)


def compute_ns(table: TraceTable, device: str = "", slices: SlicesOf = lambda _: 1) -> Ints:
    """Returns the duration of each span in ns, ``[spans] int64``.

    The duration of an action does not include the time in which the action read data or sent
    messages.

    Args:
        table: All spans of a rank.
        device: Kind of device on which the rank computes, as in the header of its trace.
        slices: Function that returns the number of slices of each microbatch in an iteration.
    """
    length: Ints = table.duration_ns.copy()
    for kind in ("data", "send"):
        rows, owner = _within_actions(table, kind, device, slices)
        np.subtract.at(length, owner, table.duration_ns[rows])
    return np.maximum(length, 0)


def _within_actions(
    table: TraceTable, kind: str, device: str, slices: SlicesOf
) -> tuple[Ints, Ints]:
    """Finds the spans of ``kind`` that are part of an action (F, B or W) on the same rank.

    A send is part of an action only if the action ends with the send.

    With ``cuda``, actions are timed on the GPU, but sends and data reads on the CPU, which runs
    ahead of the GPU. A send or a read may therefore seem to lie within a different action. No send
    counts as a part of an action in this case, because the GPU continues to compute during a send.
    A read is part of an action only if the action is the forward pass of the same microbatch.

    Returns:
        Rows of these spans in the table, and rows of the actions that contain them.
    """
    rows = np.flatnonzero(table.kind == KIND[kind])
    actions = np.flatnonzero(table.where(*DRAWN_ACTIONS))
    if not len(rows) or not len(actions) or (kind == "send" and device == "cuda"):
        return rows[:0], actions[:0]
    actions = actions[np.argsort(table.start_ns[actions], kind="stable")]
    around = np.searchsorted(table.start_ns[actions], table.start_ns[rows], "right") - 1
    owner = actions[np.maximum(around, 0)]
    left = table.end_ns[owner] - table.end_ns[rows]
    inside = (around >= 0) & (left >= 0)
    if kind == "send":
        inside &= left <= np.maximum(HANDED_OVER_NS, table.duration_ns[rows])
    elif device == "cuda":
        whole, _ = microbatches_of(table.iteration[owner], table.microbatch[owner], slices)
        inside &= (table.kind[owner] == KIND["F"]) & (whole == table.microbatch[rows])
    return rows[inside], owner[inside]


def _parts(
    traces: Sequence[RankTrace], only: frozenset[int] | None, num_chunks: int, workers: int | None
) -> Iterator[RankFigures]:
    """Yields the statistics of each rank in the order of ``traces``, using several processes.

    ``only`` contains the iterations to read; ``None`` reads all. ``workers`` is the number of
    processes; ``None`` chooses the number by the size of the files.
    """
    size = sum(
        block.size_bytes
        for trace in traces
        for block in trace.index.blocks
        if only is None or block.marker.iteration in only
    )
    if workers is None:
        workers = 1 if size < SERIAL_BYTES else len(os.sched_getaffinity(0))
    workers = min(workers, len(traces))
    figures_of_rank = partial(_figures_of, only=only, num_chunks=num_chunks)
    if workers <= 1:
        yield from map(figures_of_rank, traces)
        return
    share = max(1, -(-len(traces) // (4 * workers)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(figures_of_rank, traces, chunksize=share)


def _figures_of(trace: RankTrace, only: frozenset[int] | None, num_chunks: int) -> RankFigures:
    return rank_figures(
        trace.table(only),
        num_chunks,
        trace.slices,
        device=trace.header.device,
        frozen=trace.frozen_chunks,
    )


def _sums(groups: Ints, values: Ints, count: int) -> Ints:
    sums: Ints = np.rint(np.bincount(groups, weights=values, minlength=count)).astype(np.int64)
    return sums


def _by_kind(table: TraceTable, row: Ints, count: int) -> Ints:
    """Returns the total duration in ns of each kind of span, ``[iterations, kinds]``.

    ``row`` contains the index of each span's iteration, and ``count`` is the number of iterations.
    """
    width = len(KINDS) + 1  # The last column is for unknown kinds.
    sums = _sums(row * width + table.kind, table.duration_ns, count * width)
    return sums.reshape(count, width)[:, : len(KINDS)]


def _reduced(function: np.ufunc, values: Ints, begins: Ints, sizes: Ints) -> Ints:
    """Applies ``function``, such as ``np.maximum``, to each group of consecutive values.

    Group i consists of ``sizes[i]`` values starting at index ``begins[i]``. The result for an empty
    group is 0.
    """
    result = np.zeros(len(sizes), dtype=np.int64)
    if len(values):
        result[sizes > 0] = function.reduceat(values, begins[sizes > 0])
    return result


def _covered(actions: TraceTable) -> Ints:
    """Returns, for each action, the time in ns during which no earlier action was still running.

    The sum of these times is the time during which at least one action ran.
    """
    if not len(actions):
        return actions.start_ns
    reach = np.maximum.accumulate(actions.end_ns)
    free_from = np.concatenate([actions.start_ns[:1], reach[:-1]])
    later = np.flatnonzero(np.diff(actions.iteration, prepend=actions.iteration[0] - 1))
    # Actions of different iterations do not overlap, but would seem to if the clock was set back
    # between the iterations.
    free_from[later] = actions.start_ns[later]
    covered: Ints = np.maximum(0, actions.end_ns - np.maximum(actions.start_ns, free_from))
    return covered


def _waits(
    table: TraceTable, row: Ints, count: int, actions: TraceTable, begins: Ints, sizes: Ints
) -> dict[str, Ints]:
    rows = np.flatnonzero(table.kind == KIND["wait"])
    causes = np.zeros(len(REASON), dtype=np.int64)
    causes[[REASON[cause] for cause in CAUSES]] = np.arange(1, len(WAIT_CAUSES))
    cause = causes[table.reason[rows]]
    width = len(WAIT_CAUSES)
    wait_ns = _sums(row[rows] * width + cause, table.duration_ns[rows], count * width)
    start_ns = _reduced(np.minimum, actions.start_ns, begins, sizes)
    first = (table.end_ns[rows] <= start_ns[row[rows]]) & (sizes[row[rows]] > 0)
    first_cause = np.zeros(count, dtype=np.int64)
    first_cause[row[rows[first]]] = cause[first]
    return {
        "wait_ns": wait_ns.reshape(count, width),
        "first_wait_ns": _sums(row[rows[first]], table.duration_ns[rows[first]], count),
        "first_cause": first_cause,
    }


def _durations(
    actions: TraceTable, pure_ns: Ints, row: Ints, count: int, num_chunks: int
) -> dict[str, Any]:
    """Returns statistics of the actions' durations, each of shape ``[iterations, chunks, 3]``.

    Args:
        actions: Spans of actions.
        pure_ns: Duration of each action in ns without data reads and sends, from which the medians
            are computed.
        row: Index of each action's iteration.
        count: Number of iterations.
        num_chunks: Number of model chunks.
    """
    shape = (count, num_chunks, len(DRAWN_ACTIONS))
    size = count * num_chunks * len(DRAWN_ACTIONS)
    group = (row * num_chunks + actions.chunk) * len(DRAWN_ACTIONS) + actions.kind
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
    """Returns the median of each group of values, or NaN for an empty group.

    Args:
        group: Group index of each value.
        values: Values to group, in any order.
        number: Number of values in each group.
    """
    medians = np.full(len(number), np.nan)
    if len(values):
        ordered = values[np.lexsort((values, group))]
        begins = np.cumsum(number) - number
        some = number > 0
        low, high = begins + (number - 1) // 2, begins + number // 2
        medians[some] = (ordered[low[some]] + ordered[high[some]]) / 2
    return medians


def _peak(actions: TraceTable, share: Any, row: Ints, begins: Ints, sizes: Ints) -> Ints:
    """Returns the maximum number of microbatches in flight in each iteration.

    The forward pass of a slice counts as the fraction ``share`` of a microbatch. The share is 0 in
    a frozen chunk, because nothing is kept for a backward pass. Sums are rounded up to whole
    microbatches.

    ``row`` contains the index of each action's iteration. Iteration i has ``sizes[i]`` actions,
    starting at index ``begins[i]``.
    """
    step = np.where(actions.kind == KIND["F"], 1, np.where(actions.kind == KIND["B"], -1, 0))
    held = np.cumsum(step * share)
    before = np.concatenate([[0], held])[begins]
    whole = np.ceil(held - before[row] - _ROUNDING).astype(np.int64)
    peak: Ints = np.maximum(_reduced(np.maximum, whole, begins, sizes), 0)
    return peak


_ROUNDING = 1e-6
"""Tolerance within which a sum of fractions of microbatches counts as a whole number."""


@dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """Contains the times of one layer in a step in milliseconds.

    Attributes:
        layer: Index of the layer in the model. Multi-token prediction layers come last.
        pp_rank: Pipeline rank that has the layer.
        forward_ms: Total time of the forward passes, averaged over the ranks that have the layer.
        backward_ms: Total time of the backward passes, averaged over these ranks.
        runs: Number of the layer's forward passes on the slowest rank.
        slowest_rank: Global rank on which the layer took longest.
        slowest_ms: Total time of the layer's passes on the slowest rank.
    """

    layer: int
    pp_rank: int
    forward_ms: float
    backward_ms: float
    runs: int
    slowest_rank: int
    slowest_ms: float


def layer_figures(run: RunTrace, iteration: int) -> list[LayerFigures]:
    """Returns the times of each layer in ``iteration`` of ``run``.

    The list is empty if layers were not timed.
    """
    of_layer: dict[int, dict[int, tuple[int, ...]]] = {}
    for rank, trace in run.ranks.items():
        for layer, *times in trace.layers(iteration):
            of_layer.setdefault(layer, {})[rank] = tuple(times)
    figures = []
    for layer, of_rank in sorted(of_layer.items()):
        slowest = max(of_rank, key=lambda rank: of_rank[rank][0] + of_rank[rank][1])
        figures.append(
            LayerFigures(
                layer=layer,
                pp_rank=run.ranks[slowest].header.pp_rank,
                forward_ms=statistics.fmean(times[0] for times in of_rank.values()) / NS_PER_MS,
                backward_ms=statistics.fmean(times[1] for times in of_rank.values()) / NS_PER_MS,
                runs=of_rank[slowest][2],
                slowest_rank=slowest,
                slowest_ms=(of_rank[slowest][0] + of_rank[slowest][1]) / NS_PER_MS,
            )
        )
    return figures
