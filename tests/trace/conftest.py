"""Provides traces of a small simulated pipeline, written by the real recorder."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.trace.metrics import rank_figures
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.span_columns import KIND, REASON, TraceTable
from megatron.adaptive.trace.step_view import PipelineStep
from megatron.adaptive.trace.trace_format import COLUMNS, Span, SpanRow, TraceHeader

FORWARD_NS, BACKWARD_NS = 1_000_000, 2_000_000
START_NS = 5_000_000_000

Timed = tuple[str, int, int, int, int]
"""Action, chunk, microbatch, start and end of a pass. The times are in nanoseconds."""


def simulate(num_ranks: int, num_chunks: int, num_microbatches: int) -> list[list[Timed]]:
    """Simulates a pipeline step, and returns the actions of each rank in the order of execution.

    All forward passes run before all backward passes. Each pass starts as soon as its input and its
    rank are available.
    """
    num_stages = num_ranks * num_chunks
    rows: list[list[Timed]] = [[] for _ in range(num_ranks)]
    free = [0] * num_ranks
    ready = [0] * num_microbatches
    forward = [("F", stage, FORWARD_NS) for stage in range(num_stages)]
    backward = [("B", stage, BACKWARD_NS) for stage in reversed(range(num_stages))]
    for action, stage, cost in forward + backward:
        chunk, rank = divmod(stage, num_ranks)
        for microbatch in range(num_microbatches):
            start = max(ready[microbatch], free[rank])
            free[rank] = ready[microbatch] = start + cost
            rows[rank].append((action, chunk, microbatch, start, start + cost))
    return rows


def make_header(rank: int, num_ranks: int = 2, **changes: object) -> TraceHeader:
    """Returns the trace header of ``rank`` in a run with ``num_ranks`` pipeline ranks.

    ``changes`` contains fields that replace the default values.
    """
    values: dict[str, object] = {
        "run": "run-1",
        "rank": rank,
        "world_size": num_ranks,
        "pp_rank": rank,
        "num_ranks": num_ranks,
        "num_chunks": 1,
        "num_microbatches": 4,
        "schedule": "adaptive",
    }
    return TraceHeader(**{**values, **changes})  # type: ignore[arg-type]


def row_of(span: Span) -> SpanRow:
    """Returns the row of a trace file that represents ``span``."""
    return SpanRow(
        kind=KIND[span.action],
        chunk=span.chunk,
        microbatch=span.microbatch,
        piece=span.piece,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        bytes=span.bytes,
        in_flight_bytes=span.in_flight_bytes,
        queue_depth=span.queue_depth,
        peer=span.peer,
        of=KIND[span.of] if span.of else -1,
        reason=REASON[span.reason],
    )


def table_of(spans: Iterable[Span]) -> TraceTable:
    """Returns a trace table with ``spans``, which must belong to one rank."""
    spans = tuple(spans)
    rows = np.array([row_of(span) for span in spans], dtype=np.int64)
    rows[:, COLUMNS.index("duration_ns")] -= rows[:, COLUMNS.index("start_ns")]
    return TraceTable.from_rows(np.array([span.iteration for span in spans]), rows)


def step_of(*rows: tuple[Span, ...], waits: tuple[tuple[Span, ...], ...] = ()) -> PipelineStep:
    """Returns a pipeline step. Each of ``rows`` contains the actions of one rank."""
    figures = {rank: rank_figures(table_of(row), 1) for rank, row in enumerate(rows) if row}
    return PipelineStep(1, "x", "loop", 1, 1, rows, waits, figures=figures)


def record(recorder: Recorder, *span: Any, **more: Any) -> None:
    """Records one span with ``recorder``.

    ``span`` and ``more`` are positional arguments and keyword arguments of :class:`Span`.
    """
    recorder.extend([row_of(Span(*span, iteration=0, **more))])


def write_spans(
    folder: Path, header: TraceHeader, spans: Iterable[Span], *, num_microbatches: int = 4
) -> Path:
    """Writes ``spans`` to a trace file in ``folder`` with the recorder, and returns its path.

    The start of an iteration is the start of its first span.
    """
    with Recorder(folder, header) as recorder:
        iteration = None
        for span in spans:
            if span.iteration != iteration:
                iteration = span.iteration
                recorder.begin_iteration(iteration, num_microbatches, start_ns=span.start_ns)
            recorder.extend([row_of(span)])
    return recorder.path


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes the traces of a simulated run and returns their folder."""

    def write(
        num_ranks: int = 2,
        num_chunks: int = 1,
        num_microbatches: int = 4,
        *,
        iterations: int = 3,
        folder: Path | None = None,
        **changes: object,
    ) -> Path:
        target = folder or tmp_path / "traces"
        rows = simulate(num_ranks, num_chunks, num_microbatches)
        for rank, row in enumerate(rows):
            header = make_header(
                rank, num_ranks, num_chunks=num_chunks, num_microbatches=num_microbatches, **changes
            )
            with Recorder(target, header) as recorder:
                for iteration in range(1, iterations + 1):
                    shift = START_NS + iteration * 10**10
                    recorder.begin_iteration(iteration, num_microbatches, start_ns=shift - 60)
                    record(recorder, "data", -1, -1, shift - 50, shift - 10)
                    for action, chunk, microbatch, start, end in row:
                        begin = shift + start
                        wait = (chunk, microbatch, begin - 7, begin)
                        record(recorder, "wait", *wait, of=action, reason="input")
                        times = (begin, shift + end)
                        held = {"bytes": 100, "in_flight_bytes": 1 << 20}
                        record(recorder, action, chunk, microbatch, *times, **held)
        return target

    return write
