"""Writes and reads traces in an older text format, ``trace_pipeline_<p>_model_chunks_<c>.txt``.

This format is read by the script ``process_trace.py`` of OpenSQZ/MegatronApp. Each line is a
record::

    rank 0 iteration starts at timestamp 12.500000% iteration 7
    0, 3, forward start, 12.500000%
    0, 3, forward finished, 14.100000%
    rank 0 iteration ends at timestamp 60.000000% iteration 7

Times are in milliseconds and end with a percent sign. The first number in the line of an action is
the pipeline rank. The second number encodes the chunk k and the microbatch, as the position of the
action in the interleaved schedule for p ranks and c chunks::

    number = (microbatch // p) * (p * c)  +  k * p  +  microbatch % p
    k = chunk for forward,  c - 1 - chunk for backward and weight

Iterations are written without the pauses between them. This module adds ``#`` lines with the names
of the run, the schedule and the placement, and appends the iteration number to the lines that start
or end an iteration. The script ignores these additions. ``weight start`` and ``weight finished``
mark weight-gradient passes (W). Unlike the JSON-lines files, this format does not include waits,
message sizes or memory usage.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron.adaptive.config.input_files import open_file
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.read import RankTrace, RunTrace
from megatron.adaptive.trace.span_columns import KIND, TraceTable
from megatron.adaptive.trace.step_view import PipelineStep, pipeline_step
from megatron.adaptive.trace.trace_format import Span
from megatron.adaptive.trace.views.palette import ACTION_NAMES

KEPT_ITERATIONS = 20
"""Maximum number of iterations in a text file. ``process_trace.py`` cannot read more."""

NS_PER_MS = 1_000_000

_ACTIONS = {word: action for action, word in ACTION_NAMES.items()}
_NAME = re.compile(r"trace_pipeline_(\d+)_model_chunks_(\d+)")
_ACTION_LINE = re.compile(r"(\d+), (\d+), (forward|backward|weight) (start|finished), (\d+\.\d+)%")
_MARKER = re.compile(r"rank (\d+) iteration starts at timestamp \d+\.\d+% iteration (\d+)")
_NOTE = re.compile(r"# (run|schedule|placement(?= (?:loop|v)$)) (.+)")


def legacy_name(num_ranks: int, num_chunks: int) -> str:
    """Returns the file name without suffix, such as ``trace_pipeline_2_model_chunks_2``."""
    return f"trace_pipeline_{num_ranks}_model_chunks_{num_chunks}"


def legacy_shape(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Reads the numbers of pipeline ranks and of chunks per rank from the file name in ``path``.

    Returns ``None`` if the name has another form.
    """
    match = _NAME.fullmatch(Path(path).stem)
    if not match or int(match[1]) < 1 or int(match[2]) < 1:
        return None
    return int(match[1]), int(match[2])


def write_legacy(run: RunTrace, path: str | os.PathLike[str]) -> None:
    """Writes the last complete iterations of a run's first pipeline in the text format.

    If no iteration is complete, the last iteration is written.

    Args:
        run: Trace of the run to write.
        path: Path of the file. An existing file is replaced. Use :func:`legacy_name` for the file
            name.

    Raises:
        TraceError: The run has no iteration, or the file cannot be written.
    """
    chosen = run.complete_iterations()[-KEPT_ITERATIONS:] or run.iterations[-1:]
    steps = [pipeline_step(run, number) for number in chosen or [None]]
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(f"# run {run.run}\n# schedule {steps[0].schedule}\n")
        file.write(f"# placement {steps[0].placement}\n")
        start_ns = 0
        for step in steps:
            file.writelines(line + "\n" for line in _step_lines(step, start_ns))
            start_ns += step.step_ns


def read_legacy(path: str | os.PathLike[str]) -> RunTrace:
    """Reads a trace in the older text format.

    Args:
        path: Path of the trace file. The file name must contain the numbers of pipeline ranks and
            of chunks per rank.

    Returns:
        Trace of the run, with one rank per pipeline rank. Unknown lines are skipped. Actions
        without a ``finished`` line are dropped and counted in ``truncated_lines``.

    Raises:
        TraceError: The file cannot be read, contains no action, or its name has another form.
    """
    path = Path(path)
    shape = legacy_shape(path)
    if shape is None:
        raise TraceError(
            f"{path} must be named trace_pipeline_<p>_model_chunks_<c>.txt, because the name states"
            " the numbers of ranks and chunks"
        )
    num_ranks, num_chunks = shape
    contents = _Contents(num_ranks, num_chunks)
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8", errors="replace") as file:
            for line in file:
                contents.add(line)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    if not contents.rows:
        raise TraceError(
            f"{path} does not contain actions, which are lines such as"
            " '0, 3, forward start, 12.500000%'"
        )
    if max(contents.rows) >= num_ranks:
        raise TraceError(
            f"{path} has actions of rank {max(contents.rows)}, but its name states {num_ranks} "
            "pipeline ranks; restore the original name"
        )
    traces = {}
    for rank, by_iteration in sorted(contents.rows.items()):
        traces[rank] = RankTrace.of_tables(
            path,
            {iteration: _table(iteration, rows) for iteration, rows in by_iteration.items()},
            sum(unfinished == rank for unfinished, _, _ in contents.begun),
            **contents.notes,
            rank=rank,
            world_size=num_ranks,
            pp_rank=rank,
            num_ranks=num_ranks,
            num_chunks=num_chunks,
            clock="",
        )
    return RunTrace(path, contents.notes["run"], num_ranks, num_ranks, num_chunks, traces)


class _Contents:
    """Collects the contents of a file in the text format line by line.

    Attributes:
        notes: Names of the run, schedule and placement, from the ``#`` lines.
        rows: Finished actions, keyed by rank and iteration.
        begun: Start time in ns of each unfinished action, keyed by rank, kind and the number that
            encodes the chunk and the microbatch.
    """

    def __init__(self, num_ranks: int, num_chunks: int) -> None:
        self.notes = {"run": "text", "schedule": "unknown", "placement": "loop"}
        self.rows: dict[int, dict[int, list[tuple[int, ...]]]] = {}
        self.begun: dict[tuple[int, str, int], int] = {}
        self._num_ranks = num_ranks
        self._num_chunks = num_chunks
        self._iterations: dict[int, int] = {}

    def add(self, line: str) -> None:
        """Adds the contents of ``line``. Skips lines of an unknown form."""
        if note := _NOTE.match(line):
            self.notes[note[1]] = note[2]
        elif marker := _MARKER.match(line):
            self._iterations[int(marker[1])] = int(marker[2])
        elif match := _ACTION_LINE.match(line):
            rank = int(match[1])
            packed = int(match[2])
            action = _ACTIONS[match[3]]
            time_ns = _ns(match[5])
            if match[4] == "start":
                self.begun[rank, action, packed] = time_ns
            elif (start_ns := self.begun.pop((rank, action, packed), None)) is not None:
                chunk_microbatch = _unpack(action, packed, self._num_ranks, self._num_chunks)
                row = (KIND[action], *chunk_microbatch, start_ns, time_ns - start_ns)
                of_rank = self.rows.setdefault(rank, {})
                of_rank.setdefault(self._iterations.get(rank, 1), []).append(row)


def _table(iteration: int, rows: Sequence[tuple[int, ...]]) -> TraceTable:
    names = ("kind", "chunk", "microbatch", "start_ns", "duration_ns")
    columns = dict(zip(names, np.array(rows).T, strict=True))
    return TraceTable.of_columns(np.full(len(rows), iteration), **columns)


def _step_lines(step: PipelineStep, start_ns: int) -> Iterator[str]:
    for rank, row in enumerate(step.rows):
        if not row:
            continue
        suffix = f"% iteration {step.iteration}"
        yield f"rank {rank} iteration starts at timestamp {_ms(start_ns + row[0].start_ns)}{suffix}"
        for span in row:
            prefix = f"{rank}, {_pack(span, step)}, {ACTION_NAMES[span.action]}"
            yield f"{prefix} start, {_ms(start_ns + span.start_ns)}%"
            yield f"{prefix} finished, {_ms(start_ns + span.end_ns)}%"
        end_ns = max(span.end_ns for span in row)
        yield f"rank {rank} iteration ends at timestamp {_ms(start_ns + end_ns)}{suffix}"


def _ms(time_ns: int) -> str:
    return f"{time_ns // NS_PER_MS}.{time_ns % NS_PER_MS:06d}"


def _ns(milliseconds: str) -> int:
    whole, _, part = milliseconds.partition(".")
    return int(whole) * NS_PER_MS + int(part[:6].ljust(6, "0"))


def _pack(span: Span, step: PipelineStep) -> int:
    turn = span.chunk if span.action == "F" else step.num_chunks - 1 - span.chunk
    group, remainder = divmod(span.microbatch, step.num_ranks)
    return (group * step.num_chunks + turn) * step.num_ranks + remainder


def _unpack(action: str, packed: int, num_ranks: int, num_chunks: int) -> tuple[int, int]:
    group, rest = divmod(packed, num_ranks * num_chunks)
    turn, remainder = divmod(rest, num_ranks)
    chunk = turn if action == "F" else num_chunks - 1 - turn
    return chunk, group * num_ranks + remainder
