"""Reads tables of a training job's operations in a published format, and writes runs as traces.

A table is a Parquet or CSV file with one row per operation and the columns :data:`COLUMNS`. The
table contains the microbatch of each computation, but not of messages, which are only numbered. The
n-th message that a rank receives belongs to the n-th computation on the rank that needs an input.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.adaptive.config.input_files import open_file
from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.errors import SetupError, TraceError
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.read import RankTrace, RunTrace, describe_numbers, trace_files
from megatron.adaptive.trace.span_columns import (
    KIND,
    REASON,
    Ints,
    TraceTable,
    find_rows,
    nth_of_equal,
)
from megatron.adaptive.trace.trace_format import (
    COLLECTIVES,
    IterationStart,
    SpanRow,
    block_text,
    header_line,
    trace_file_name,
)

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
"""Required columns of a table.

They contain, in this order: the replica, the pipeline rank, the global rank, the iteration, the
kind of operation, its start and duration in seconds, and its index among the operations of the same
kind, step and rank.
"""
OPTIONAL = ("mc", "gmc", "mb_id", "group")
"""Optional columns of a table.

They contain, in this order: the index of the chunk on its rank, the index of the chunk in the
model, the microbatch, and the lowest rank of a collective's group. If the first two columns are
missing, each rank has one chunk.
"""
_FROM_0 = ("dp_rank", "stage", "rank", "step")
ENDINGS = (".parquet", ".csv")

_COMPUTES = {"forward-compute": "F", "backward-compute": "B", "weight-compute": "W"}
_OPTIMIZERS = {"optimizer": "", "gc": "gc"}
_MESSAGES = {"forward": ("F", 1), "backward": ("B", -1)}


class OperationRow(NamedTuple):
    """Contains one row of a table, with the columns :data:`COLUMNS` and :data:`OPTIONAL`.

    Times are in ns.
    """

    dp_rank: int
    stage: int
    rank: int
    step: int
    optype: str
    start_ts: int
    duration: int
    seq_id: int
    mc: int
    gmc: int
    mb_id: int
    group: int


def read_table(path: Path) -> RunTrace:
    """Reads the trace of a run from the table file at ``path``.

    Raises:
        TraceError: The file cannot be read, a column is missing, or the table is inconsistent.
        SetupError: The file is a Parquet file and pyarrow is not installed.
    """
    try:
        columns = _csv_columns(path) if path.suffix == ".csv" else _parquet_columns(path)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    return run_of_columns(columns, path)


def _csv_columns(path: Path) -> dict[str, Any]:
    with io.TextIOWrapper(
        open_file(path), newline="", encoding="utf-8-sig", errors="replace"
    ) as file:
        rows = csv.reader(file)
        names = next(rows, [])
        cells = list(zip(*rows, strict=False))
    return dict(zip(names, map(np.array, cells), strict=False)) or dict.fromkeys(names)


def _parquet_columns(path: Path) -> dict[str, Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise SetupError(
            f"{path.name} is a Parquet file, but pyarrow is not installed; pip install "
            "'megatron-adaptive[trace]', or use a CSV file"
        ) from error
    try:
        file = parquet.ParquetFile(path)
        names = [name for name in file.schema_arrow.names if name in (*COLUMNS, *OPTIONAL)]
        table = file.read(names, use_threads=False)
    except ArrowException as error:
        raise TraceError(f"{path} cannot be read as a Parquet file: {error}") from error
    columns: dict[str, Any] = {}
    for name in names:
        column = table[name].combine_chunks()
        if hasattr(column, "dictionary"):
            values = np.array(column.dictionary.to_pylist(), dtype=object)
            columns[name] = values[column.indices.to_numpy(zero_copy_only=False)]
        else:
            columns[name] = column.to_numpy(zero_copy_only=False)
    return columns


def run_of_columns(columns: Mapping[str, Any], origin: Path, world_size: int = 0) -> RunTrace:
    """Converts a table to the trace of a run.

    Args:
        columns: Values of each column, keyed by the names in :data:`COLUMNS` and :data:`OPTIONAL`.
        origin: Path of the table, for error messages.
        world_size: Minimum number of ranks in the job. If the table contains higher ranks, the
            number is increased.

    Raises:
        TraceError: A column is missing or has an impossible value, or the table is inconsistent.
    """
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise TraceError(
            f"{origin} does not have the column{'s' * (len(missing) > 1)} {', '.join(missing)}; "
            f"a table of operations has {', '.join((*COLUMNS, *OPTIONAL))}"
        )
    try:
        numbers = {
            name: np.asarray(columns[name]).astype(np.float64)
            for name in (*COLUMNS, *OPTIONAL)
            if name != "optype" and name in columns
        }
    except (TypeError, ValueError) as error:
        raise TraceError(f"{origin} has a column with text instead of numbers: {error}") from None
    names, kind = np.unique(np.asarray(columns["optype"]).astype(str), return_inverse=True)
    if not len(kind):
        raise TraceError(f"{origin} does not contain operations; check that the job was traced")
    broken = [
        name
        for name, values in numbers.items()
        if not np.isfinite(values).all() or (name in _FROM_0 and values.min() < 0)
    ]
    if broken or numbers["duration"].min() < 0:
        raise TraceError(
            f"{origin} has values of {' and '.join(broken) or 'duration'} that are missing or "
            "negative"
        )
    times_ns = {name: np.rint(numbers.pop(name) * 1e9) for name in ("start_ts", "duration")}
    table = {name: values.astype(np.int64) for name, values in numbers.items()}
    moved, notes = _on_one_clock(table["rank"], table["step"], **times_ns)
    start = _one_after_another(table["step"], moved, times_ns["duration"])
    kind_names = [str(name) for name in names]
    return _Table(table, kind_names, kind, start, times_ns["duration"]).run(
        origin, world_size, notes
    )


def _on_one_clock(rank: Ints, step: Ints, start_ts: Ints, duration: Ints) -> tuple[Ints, list[str]]:
    """Aligns the first steps of ranks whose clocks seem to differ.

    Returns the aligned start times, and notes for the user.

    The clock of a rank seems to differ if its first step begins much earlier or later than that of
    the lowest rank: by more than twice the median length of the first steps.
    """
    rows = np.flatnonzero(step == step.min())
    ranks, index = np.unique(rank[rows], return_inverse=True)
    first = np.full(len(ranks), np.inf)
    last = np.full(len(ranks), -np.inf)
    np.minimum.at(first, index, start_ts[rows])
    np.maximum.at(last, index, start_ts[rows] + duration[rows])
    shift = first - first[0]
    apart = np.abs(shift) > 2 * np.median(last - first)
    if not apart.any():
        return start_ts, []
    nearest = np.minimum(np.searchsorted(ranks, rank), len(ranks) - 1)
    is_shifted = (ranks[nearest] == rank) & apart[nearest]
    moved = start_ts - np.where(is_shifted, shift[nearest], 0.0)
    return moved, [
        f"clocks of ranks {describe_numbers(ranks[apart].tolist())} are off by up to "
        f"{number_text(np.abs(shift).max() / 1e9)} s; the import assumes that the first steps of "
        "all ranks begin together"
    ]


def _one_after_another(step: Ints, start_ns: Ints, duration_ns: Ints) -> Ints:
    """Shifts the steps in time so that each step begins after the previous step has ended.

    Returns the shifted start times in ns. The shift is needed because the times of every step in a
    table may begin at 0.
    """
    _, number = np.unique(step, return_inverse=True)
    first = np.full(int(number.max()) + 1, np.inf)
    last = np.full(len(first), -np.inf)
    np.minimum.at(first, number, start_ns)
    np.maximum.at(last, number, start_ns + duration_ns)
    shift = np.zeros(len(first))
    end = first[0]
    for index, begin in enumerate(first.tolist()):
        shift[index] = max(0.0, end - begin)
        end = last[index] + shift[index]
    moved: Ints = (start_ns + shift[number] - first[0]).astype(np.int64)
    return moved


class _Table:
    """Converts the rows of a table to spans.

    Args:
        table: Columns of integers, keyed by name.
        kind_names: Names of the kinds of operations in the table.
        kind: Kind of operation in each row, as an index into ``kind_names``.
        start_ns: Start of the operation in each row in nanoseconds.
        duration: Duration of the operation in each row in nanoseconds.
    """

    def __init__(
        self,
        table: dict[str, Ints],
        kind_names: list[str],
        kind: Ints,
        start_ns: Ints,
        duration: Ints,
    ) -> None:
        self._start = start_ns
        self._duration = duration.astype(np.int64)
        self._kind_names = kind_names
        self._kind = kind
        self._step = table["step"]
        ranks, first, worker = np.unique(table["rank"], return_index=True, return_inverse=True)
        self._ranks = ranks
        self._worker = worker
        self._pp_rank = table["stage"][first]
        self._dp_rank = table["dp_rank"][first]
        order = np.lexsort((self._pp_rank, self._dp_rank))
        self._tp_rank = np.zeros_like(ranks)
        self._tp_rank[order] = nth_of_equal([self._dp_rank[order], self._pp_rank[order]])
        self._seq = table["seq_id"]
        zeros = np.zeros(len(kind), dtype=np.int64)
        self._chunk = table.get("mc", zeros)
        self._model_chunk = table.get("gmc", table["stage"])
        self._microbatch = table.get("mb_id", zeros - 1)
        self._stage = table["stage"]
        self._group = table.get("group", zeros - 1)

    def run(self, origin: Path, world_size: int, notes: list[str]) -> RunTrace:
        """Returns the trace of the run described by the table.

        Args:
            origin: Path of the table, for error messages.
            world_size: Minimum number of ranks in the job.
            notes: Notes about the table for the user, one line each. This method appends further
                notes.

        Raises:
            TraceError: The table contains no computations, or is inconsistent.
        """
        computes = self._rows(*_COMPUTES)
        if not len(computes):
            raise TraceError(f"{origin} contains no forward-compute or backward-compute operations")
        num_ranks = int(self._stage.max()) + 1
        num_chunks = int(self._chunk[computes].max(initial=0)) + 1
        placement = self._placement(origin, computes, num_ranks, num_chunks)
        self._check_once(origin, computes)
        self._check_microbatches(computes)
        known_kinds = {*_COMPUTES, *_OPTIMIZERS, *COLLECTIVES}
        known_kinds |= {f"{direction}-{end}" for direction in _MESSAGES for end in ("send", "recv")}
        counts = dict(zip(self._kind_names, np.bincount(self._kind).tolist(), strict=True))
        unknown = Counter(
            {name: count for name, count in counts.items() if name not in known_kinds}
        )
        rows, spans = self._spans(computes, placement)
        traces = {}
        world_size = max(world_size, int(self._ranks.max()) + 1)
        blocks = self._blocks(rows, spans)
        for number, rank in enumerate(self._ranks.tolist()):
            traces[rank] = RankTrace.of_tables(
                origin,
                blocks.get(number, {}),
                run=origin.stem,
                rank=rank,
                world_size=world_size,
                pp_rank=int(self._pp_rank[number]),
                tp_rank=int(self._tp_rank[number]),
                dp_rank=int(self._dp_rank[number]),
                num_ranks=num_ranks,
                num_chunks=num_chunks,
                schedule="imported",
                clock="imported",
            )
        run = RunTrace(origin, origin.stem, world_size, num_ranks, num_chunks, traces)
        if unknown:
            listed = ", ".join(f"{name} ({count})" for name, count in unknown.most_common(8))
            notes.append(f"operations of unknown kinds are left out: {listed}")
        return replace(run, caveats=tuple(notes))

    def _blocks(self, rows: Ints, spans: TraceTable) -> dict[int, dict[int, TraceTable]]:
        """Returns the spans of each worker and iteration, as a dict of dicts.

        The keys of the outer dict are workers (indices of the ranks in the table), and the keys of
        the inner dicts are iterations. ``rows`` contains the index of each span's table row.
        """
        order = np.lexsort((spans.start_ns, spans.iteration, self._worker[rows]))
        worker = self._worker[rows][order]
        spans = spans.take(order)
        changes = np.diff(worker, prepend=-1) | np.diff(spans.iteration, prepend=-1)
        heads = np.flatnonzero(changes).tolist()
        blocks: dict[int, dict[int, TraceTable]] = {}
        for low, high in zip(heads, [*heads[1:], len(rows)], strict=True):
            by_iteration = blocks.setdefault(int(worker[low]), {})
            by_iteration[int(spans.iteration[low])] = spans.take(slice(low, high))
        return blocks

    def _rows(self, *names: str) -> Ints:
        """Returns the indices of the rows whose kind is in ``names``.

        The rows are ordered by step, rank and ``seq_id``.
        """
        kinds = [index for index, name in enumerate(self._kind_names) if name in names]
        rows = np.flatnonzero(np.isin(self._kind, kinds))
        keys = (self._seq[rows], self._worker[rows], self._step[rows])
        ordered: Ints = rows[np.lexsort(keys)]
        return ordered

    def _placement(self, origin: Path, rows: Ints, num_ranks: int, num_chunks: int) -> Placement:
        """Returns the placement of stages on ranks, and checks that the columns agree with it."""
        chunk = np.maximum(self._chunk[rows], 0)
        if (chunk * num_ranks + self._stage[rows] != self._model_chunk[rows]).any():
            raise TraceError(
                f"{origin}: gmc (the index of a chunk in the model) must equal mc * {num_ranks} + "
                "stage; check the columns mc, gmc and stage"
            )
        return Placement(num_ranks=num_ranks, num_chunks=num_chunks)

    def _check_once(self, origin: Path, computes: Ints) -> None:
        """Raises ``TraceError`` if the table contains the same computation twice.

        ``computes`` contains the rows of all computations, and ``origin`` is the path of the table.
        """
        keys = [key[computes] for key in (self._worker, self._step, self._kind, self._seq)]
        again = computes[find_rows(keys, keys) != np.arange(len(computes))]
        if len(again):
            rank = self._ranks[self._worker[again[0]]]
            kind = self._kind_names[self._kind[again[0]]]
            raise TraceError(
                f"{origin} has {kind} {self._seq[again[0]]} of rank {rank} in step "
                f"{self._step[again[0]]} twice, so the rows belong to several jobs; keep only the "
                "rows of one job"
            )

    def _check_microbatches(self, computes: Ints) -> None:
        """Numbers the microbatches in order, unless the table contains unique numbers for them.

        ``computes`` contains the rows of all computations.
        """
        keys = [self._step, self._worker, self._kind, self._chunk]
        columns = [*(key[computes] for key in keys), self._microbatch[computes]]
        is_unique = (find_rows(columns, columns) == np.arange(len(computes))).all()
        if (self._microbatch[computes] >= 0).all() and is_unique:
            return
        order = computes[np.lexsort((self._seq[computes], *(key[computes] for key in keys)))]
        self._microbatch[order] = nth_of_equal([key[order] for key in keys])

    def _spans(self, computes: Ints, placement: Placement) -> tuple[Ints, TraceTable]:
        """Returns the spans of all operations, and the index of each span's table row.

        A received message gets two spans: ``wait`` and ``receive``. ``computes`` contains the rows
        of the computations.
        """
        parts: list[tuple[Ints, TraceTable]] = []

        def add(rows: Ints, kind: str, **columns: Any) -> None:
            times = {"start_ns": self._start[rows], "duration_ns": self._duration[rows], **columns}
            parts.append((rows, TraceTable.of_columns(self._step[rows], kind=KIND[kind], **times)))

        for name, kind in _COMPUTES.items():
            rows = self._rows(name)
            add(rows, kind, chunk=self._chunk[rows], microbatch=self._microbatch[rows])
        for name, reason in _OPTIMIZERS.items():
            add(self._rows(name), "optimizer", reason=REASON[reason])
        for name in COLLECTIVES:
            rows = self._rows(name)
            if len(rows):
                peer = self._roots(name, rows)
                add(rows, "collective", chunk=self._chunk[rows], peer=peer, reason=REASON[name])
        low = 0
        high = placement.num_stages - 1
        locations = [placement.locate(stage) for stage in range(placement.num_stages)]
        rank_of, chunk_of = (np.array(side) for side in zip(*locations, strict=True))
        for direction, (kind, step) in _MESSAGES.items():
            computed = self._rows(f"{direction}-compute")
            stage = self._model_chunk[computed]
            first, last = (low, high) if kind == "F" else (high, low)
            for end in ("recv", "send"):
                partners = computed[stage != (first if end == "recv" else last)]
                rows, partners = self._paired(self._rows(f"{direction}-{end}"), partners)
                receiver = self._model_chunk[partners] + (0 if end == "recv" else step)
                peer_chunk = self._model_chunk[partners] + (-step if end == "recv" else step)
                message = {
                    "of": KIND[kind],
                    "chunk": chunk_of[receiver],
                    "microbatch": self._microbatch[partners],
                    "peer": self._global(self._worker[rows], rank_of[peer_chunk]),
                }
                if end == "send":
                    add(rows, "send", **message)
                    continue
                add(rows, "wait", reason=REASON["input"], **message)
                arrived = self._start[rows] + self._duration[rows]
                queued = np.maximum(self._start[partners] - arrived, 0)
                times = {"start_ns": arrived, "duration_ns": queued}
                add(rows, "receive", reason=REASON["posted"], **message, **times)
        row_parts, span_parts = zip(*parts, strict=True)
        return np.concatenate(row_parts), TraceTable.concat(span_parts)

    def _paired(self, messages: Ints, computes: Ints) -> tuple[Ints, Ints]:
        """Pairs the n-th message of a rank in a step with the rank's n-th computation in the step.

        Returns the rows of the paired messages and of their computations.
        """
        keys = [[self._step[rows], self._worker[rows]] for rows in (messages, computes)]
        partner = find_rows([*keys[1], nth_of_equal(keys[1])], [*keys[0], nth_of_equal(keys[0])])
        return messages[partner >= 0], computes[partner[partner >= 0]]

    def _global(self, worker: Ints, pp_rank: Ints) -> Ints:
        """Returns the global rank at ``pp_rank`` in each worker's pipeline, or -1 if missing."""
        index = find_rows(
            [self._pp_rank, self._dp_rank, self._tp_rank],
            [pp_rank, self._dp_rank[worker], self._tp_rank[worker]],
        )
        return np.where(index >= 0, self._ranks[index], -1)

    def _roots(self, name: str, rows: Ints) -> Ints:
        """Returns the lowest rank of each collective's process group, or -1 if unknown.

        ``name`` is the name of the collective, and ``rows`` contains its rows in the table.
        """
        worker = self._worker[rows]
        pp_rank = self._pp_rank[worker]
        dp_rank = self._dp_rank[worker]
        if name in ("params-all-gather", "grads-reduce-scatter"):
            key = pp_rank
        elif name == "embedding-grads-all-reduce":
            key = dp_rank
        elif name == "optimizer-clip-main-grad":
            key = np.zeros_like(dp_rank)
        else:
            return self._group[rows]
        lowest = np.full(int(key.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(lowest, key, self._ranks[worker])
        return lowest[key]


def write_run(run: RunTrace, folder: str | os.PathLike[str]) -> None:
    """Writes the trace of ``run`` into ``folder``, with one file per rank.

    Raises:
        TraceError: The folder already contains traces, or cannot be written.
    """
    folder = Path(folder)
    if trace_files(folder):
        raise TraceError(f"{folder} already contains the traces of a run; use another folder")
    for rank, trace in run.ranks.items():
        with (
            replaced(folder / trace_file_name(rank)) as temporary,
            temporary.open("w", encoding="utf-8") as file,
        ):
            file.write(header_line(trace.header))
            for iteration in trace.iterations:
                table = trace.table([iteration])
                columns = [getattr(table, name).tolist() for name in SpanRow._fields]
                rows = [SpanRow(*values) for values in zip(*columns, strict=True)]
                start_ns = int(table.start_ns.min())
                count = trace.num_microbatches[iteration]
                file.write(block_text(IterationStart(iteration, count, start_ns), rows))
