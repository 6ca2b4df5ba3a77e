"""Reads the published table of a training job's operations, and writes a run into a folder.

A table has a row per operation, see :data:`COLUMNS`; Parquet or CSV. It says of which microbatch a
compute is, of messages only that one is the n-th of its kind: the n-th input that a rank received
was for the n-th of its computes that need one.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.config.input_files import open_file
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
"""Columns that must be there: replica, pipeline rank, global rank, iteration, kind of operation,
seconds, and the number of the operation among those of its kind in its step on its rank."""
OPTIONAL = ("mc", "gmc", "mb_id", "group")
"""Chunk on the rank, chunk in the model, microbatch, and lowest rank of a collective's group; a
rank has one chunk where they lack."""
_FROM_0 = ("dp_rank", "stage", "rank", "step")
ENDINGS = (".parquet", ".csv")

_COMPUTES = {"forward-compute": "F", "backward-compute": "B", "weight-compute": "W"}
_OPTIMIZERS = {"optimizer": "", "gc": "gc"}
_MESSAGES = {"forward": ("F", 1), "backward": ("B", -1)}


def read_table(path: Path) -> RunTrace:
    """Reads a file with the table.

    Raises:
        TraceError: it cannot be read, lacks a column, or contradicts itself.
        SetupError: it is Parquet, and nothing here reads that.
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
            f"{path.name} is Parquet, which pyarrow reads and this machine lacks; pip install "
            "'megatron-adaptive[trace]', or give the table as CSV"
        ) from error
    try:
        file = parquet.ParquetFile(path)
        wanted = [name for name in file.schema_arrow.names if name in (*COLUMNS, *OPTIONAL)]
        table = file.read(wanted, use_threads=False)
    except ArrowException as error:
        raise TraceError(f"{path} is no Parquet file that can be read: {error}") from error
    found: dict[str, Any] = {}
    for name in wanted:
        column = table[name].combine_chunks()
        if hasattr(column, "dictionary"):
            words = np.array(column.dictionary.to_pylist(), dtype=object)
            found[name] = words[column.indices.to_numpy(zero_copy_only=False)]
        else:
            found[name] = column.to_numpy(zero_copy_only=False)
    return found


def run_of_columns(columns: Mapping[str, Any], origin: Path, world_size: int = 0) -> RunTrace:
    """Makes a run of a table's columns.

    Args:
        columns: by the names in :data:`COLUMNS` and :data:`OPTIONAL`, anything that numpy takes.
        origin: the source, for messages.
        world_size: processes of the job, where more is known than the highest rank.

    Raises:
        TraceError: a column is missing or holds what it cannot, or the table contradicts itself.
    """
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise TraceError(
            f"{origin} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; a table of "
            f"operations has {', '.join((*COLUMNS, *OPTIONAL))}"
        )
    try:
        numbers = {
            name: np.asarray(columns[name]).astype(np.float64)
            for name in (*COLUMNS, *OPTIONAL)
            if name != "optype" and name in columns
        }
    except (TypeError, ValueError) as error:
        raise TraceError(f"{origin} has a column that holds no numbers: {error}") from None
    words, kind = np.unique(np.asarray(columns["optype"]).astype(str), return_inverse=True)
    if not len(kind):
        raise TraceError(f"{origin} holds no operation; was the job traced?")
    broken = [
        name
        for name, values in numbers.items()
        if not np.isfinite(values).all() or (name in _FROM_0 and values.min() < 0)
    ]
    if broken or numbers["duration"].min() < 0:
        raise TraceError(
            f"{origin} has {' and '.join(broken) or 'duration'} without a value from 0"
        )
    times_ns = {name: np.rint(numbers.pop(name) * 1e9) for name in ("start_ts", "duration")}
    table = {name: values.astype(np.int64) for name, values in numbers.items()}
    moved, notes = _on_one_clock(table["rank"], table["step"], **times_ns)
    start = _one_after_another(table["step"], moved, times_ns["duration"])
    return _Table(table, [str(word) for word in words], kind, start, times_ns["duration"]).run(
        origin, world_size, notes
    )


def _on_one_clock(rank: Ints, step: Ints, start_ts: Ints, duration: Ints) -> tuple[Ints, list[str]]:
    """Moves ranks whose first step lies elsewhere than that of others; says so."""
    rows = np.flatnonzero(step == step.min())
    ranks, place = np.unique(rank[rows], return_inverse=True)
    first, last = np.full(len(ranks), np.inf), np.full(len(ranks), -np.inf)
    np.minimum.at(first, place, start_ts[rows])
    np.maximum.at(last, place, start_ts[rows] + duration[rows])
    shift = first - first[0]
    apart = np.abs(shift) > 2 * np.median(last - first)
    if not apart.any():
        return start_ts, []
    at = np.minimum(np.searchsorted(ranks, rank), len(ranks) - 1)
    moved = start_ts - np.where((ranks[at] == rank) & apart[at], shift[at], 0.0)
    return moved, [
        f"clocks of ranks {describe_numbers(ranks[apart].tolist())} are up to "
        f"{np.abs(shift).max() / 1e9:.3g} s apart; their first steps are taken to begin together"
    ]


def _one_after_another(step: Ints, start_ns: Ints, duration_ns: Ints) -> Ints:
    """Moves each step behind the one before: tables may begin every step at 0."""
    _, number = np.unique(step, return_inverse=True)
    first = np.full(int(number.max()) + 1, np.inf)
    last = np.full(len(first), -np.inf)
    np.minimum.at(first, number, start_ns)
    np.maximum.at(last, number, start_ns + duration_ns)
    shift, end = np.zeros(len(first)), first[0]
    for place, begin in enumerate(first.tolist()):
        shift[place] = max(0.0, end - begin)
        end = last[place] + shift[place]
    moved: Ints = (start_ns + shift[number] - first[0]).astype(np.int64)
    return moved


class _Table:
    """Turns rows of a table into spans."""

    def __init__(
        self, table: dict[str, Ints], words: list[str], kind: Ints, start_ns: Ints, duration: Ints
    ) -> None:
        self._start, self._duration = start_ns, duration.astype(np.int64)
        self._words, self._kind = words, kind
        self._step = table["step"]
        ranks, first, worker = np.unique(table["rank"], return_index=True, return_inverse=True)
        self._ranks, self._worker = ranks, worker
        self._pp_rank, self._dp_rank = table["stage"][first], table["dp_rank"][first]
        place = np.lexsort((self._pp_rank, self._dp_rank))
        self._tp_rank = np.zeros_like(ranks)
        self._tp_rank[place] = nth_of_equal([self._dp_rank[place], self._pp_rank[place]])
        self._seq = table["seq_id"]
        zeros = np.zeros(len(kind), dtype=np.int64)
        self._chunk = table.get("mc", zeros)
        self._model_chunk = table.get("gmc", table["stage"])
        self._microbatch = table.get("mb_id", zeros - 1)
        self._stage = table["stage"]
        self._group = table.get("group", zeros - 1)

    def run(self, origin: Path, world_size: int, notes: list[str]) -> RunTrace:
        """Returns the run."""
        computes = self._rows(*_COMPUTES)
        if not len(computes):
            raise TraceError(f"{origin} holds no forward-compute and no backward-compute")
        num_ranks = int(self._stage.max()) + 1
        num_chunks = int(self._chunk[computes].max(initial=0)) + 1
        placement = self._placement(origin, computes, num_ranks, num_chunks)
        self._check_once(origin, computes)
        self._check_microbatches(computes)
        known = {*_COMPUTES, *_OPTIMIZERS, *COLLECTIVES}
        known |= {f"{way}-{end}" for way in _MESSAGES for end in ("send", "recv")}
        counts = dict(zip(self._words, np.bincount(self._kind).tolist(), strict=True))
        unknown = Counter({word: count for word, count in counts.items() if word not in known})
        at, spans = self._spans(computes, placement)
        traces = {}
        world_size = max(world_size, int(self._ranks.max()) + 1)
        order = np.lexsort((spans.start_ns, spans.iteration, self._worker[at]))
        worker, spans = self._worker[at][order], spans.take(order)
        changes = np.diff(worker, prepend=-1) | np.diff(spans.iteration, prepend=-1)
        heads = np.flatnonzero(changes).tolist()
        blocks: dict[int, dict[int, TraceTable]] = {}
        for low, high in zip(heads, [*heads[1:], len(at)], strict=True):
            mine = blocks.setdefault(int(worker[low]), {})
            mine[int(spans.iteration[low])] = spans.take(slice(low, high))
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
            listed = ", ".join(f"{word} ({count})" for word, count in unknown.most_common(8))
            notes.append(f"operations of unknown kinds left out: {listed}")
        return replace(run, caveats=tuple(notes))

    def _rows(self, *words: str) -> Ints:
        """Returns rows of these kinds, ordered by step, rank and number."""
        wanted = [place for place, word in enumerate(self._words) if word in words]
        rows = np.flatnonzero(np.isin(self._kind, wanted))
        keys = (self._seq[rows], self._worker[rows], self._step[rows])
        found: Ints = rows[np.lexsort(keys)]
        return found

    def _placement(self, origin: Path, rows: Ints, num_ranks: int, num_chunks: int) -> Placement:
        """Checks that chunks on ranks are the chunks of the model."""
        chunk = np.maximum(self._chunk[rows], 0)
        if (chunk * num_ranks + self._stage[rows] != self._model_chunk[rows]).any():
            raise TraceError(
                f"{origin}: gmc (chunk in the model) is not mc * {num_ranks} + stage; check the "
                "columns mc, gmc and stage"
            )
        return Placement(num_ranks=num_ranks, num_chunks=num_chunks)

    def _check_once(self, origin: Path, computes: Ints) -> None:
        keys = [key[computes] for key in (self._worker, self._step, self._kind, self._seq)]
        again = computes[find_rows(keys, keys) != np.arange(len(computes))]
        if len(again):
            rank, word = self._ranks[self._worker[again[0]]], self._words[self._kind[again[0]]]
            raise TraceError(
                f"{origin} has {word} {self._seq[again[0]]} of rank {rank} in step "
                f"{self._step[again[0]]} twice; keep the rows of one job"
            )

    def _check_microbatches(self, computes: Ints) -> None:
        """Numbers the microbatches by their order where the table does not, or not clearly."""
        keys = [self._step, self._worker, self._kind, self._chunk]
        found = find_rows(
            [*(key[computes] for key in keys), self._microbatch[computes]],
            [*(key[computes] for key in keys), self._microbatch[computes]],
        )
        if (self._microbatch[computes] >= 0).all() and (found == np.arange(len(computes))).all():
            return
        order = computes[np.lexsort((self._seq[computes], *(key[computes] for key in keys)))]
        self._microbatch[order] = nth_of_equal([key[order] for key in keys])

    def _spans(self, computes: Ints, placement: Placement) -> tuple[Ints, TraceTable]:
        """Returns rows of the table, and the span of each: some rows have two."""
        parts: list[tuple[Ints, TraceTable]] = []

        def add(rows: Ints, kind: str, **columns: Any) -> None:
            times = {"start_ns": self._start[rows], "duration_ns": self._duration[rows], **columns}
            parts.append((rows, TraceTable.of_columns(self._step[rows], kind=KIND[kind], **times)))

        for word, kind in _COMPUTES.items():
            rows = self._rows(word)
            add(rows, kind, chunk=self._chunk[rows], microbatch=self._microbatch[rows])
        for word, reason in _OPTIMIZERS.items():
            add(self._rows(word), "optimizer", reason=REASON[reason])
        low, high = 0, placement.num_stages - 1
        for word in COLLECTIVES:
            rows = self._rows(word)
            if len(rows):
                peer = self._roots(word, rows)
                add(rows, "collective", chunk=self._chunk[rows], peer=peer, reason=REASON[word])
        place = [placement.locate(stage) for stage in range(placement.num_stages)]
        rank_of, chunk_of = (np.array(side) for side in zip(*place, strict=True))
        for way, (kind, step) in _MESSAGES.items():
            made = self._rows(f"{way}-compute")
            stage = self._model_chunk[made]
            first, last = (low, high) if kind == "F" else (high, low)
            for end in ("recv", "send"):
                needs = made[stage != (first if end == "recv" else last)]
                rows, needs = self._paired(self._rows(f"{way}-{end}"), needs)
                if end == "recv":
                    here, there = self._model_chunk[needs], self._model_chunk[needs] - step
                else:
                    here = there = self._model_chunk[needs] + step
                of = {
                    "of": KIND[kind],
                    "chunk": chunk_of[here],
                    "microbatch": self._microbatch[needs],
                    "peer": self._global(self._worker[rows], rank_of[there]),
                }
                if end == "send":
                    add(rows, "send", **of)
                    continue
                add(rows, "wait", reason=REASON["input"], **of)
                arrived = self._start[rows] + self._duration[rows]
                taken = np.maximum(self._start[needs] - arrived, 0)
                times = {"start_ns": arrived, "duration_ns": taken}
                add(rows, "receive", reason=REASON["posted"], **of, **times)
        at, spans = zip(*parts, strict=True)
        return np.concatenate(at), TraceTable.concat(spans)

    def _paired(self, messages: Ints, computes: Ints) -> tuple[Ints, Ints]:
        """Pairs the n-th message of a rank in a step with its n-th compute; both are ordered."""
        keys = [[self._step[rows], self._worker[rows]] for rows in (messages, computes)]
        found = find_rows([*keys[1], nth_of_equal(keys[1])], [*keys[0], nth_of_equal(keys[0])])
        return messages[found >= 0], computes[found[found >= 0]]

    def _global(self, worker: Ints, pp_rank: Ints) -> Ints:
        """Returns the rank at a place of each worker's pipeline, -1 where it was not recorded."""
        found = find_rows(
            [self._pp_rank, self._dp_rank, self._tp_rank],
            [pp_rank, self._dp_rank[worker], self._tp_rank[worker]],
        )
        return np.where(found >= 0, self._ranks[found], -1)

    def _roots(self, word: str, rows: Ints) -> Ints:
        """Returns the lowest rank of each one's group; -1 where only one was recorded."""
        worker = self._worker[rows]
        pp_rank, dp_rank = self._pp_rank[worker], self._dp_rank[worker]
        if word in ("params-all-gather", "grads-reduce-scatter"):
            key = pp_rank
        elif word == "embedding-grads-all-reduce":
            key = dp_rank
        elif word == "optimizer-clip-main-grad":
            key = np.zeros_like(dp_rank)
        else:
            return self._group[rows]
        lowest = np.full(int(key.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(lowest, key, self._ranks[worker])
        return lowest[key]


def write_run(run: RunTrace, folder: str | os.PathLike[str]) -> None:
    """Writes a run into a folder of its own, a file per rank.

    Raises:
        TraceError: the folder holds traces, or cannot be written.
    """
    folder = Path(folder)
    if trace_files(folder):
        raise TraceError(f"{folder} holds the traces of a run; give a folder without any")
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
