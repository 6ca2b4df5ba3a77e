"""Finds the trace to read when the user names a run, or names nothing.

A run's folder contains a folder ``traces`` with a JSON-lines file per rank. It may also contain the
trace in the older text format (``legacy_text``). If the user names nothing, the newest run below
the current directory is read (``newest_run``).
"""

from __future__ import annotations

from pathlib import Path

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.imports.profiles import read_profiles
from megatron.adaptive.trace.imports.published import ENDINGS, read_table
from megatron.adaptive.trace.legacy_text import legacy_shape, read_legacy
from megatron.adaptive.trace.newest_run import TRACES, newest_run, searched
from megatron.adaptive.trace.read import RunTrace, read_run, trace_files

_TEXT = "trace_pipeline_*_model_chunks_*.txt"
_TRACED = (f"{TRACES}/trace_rank_*.jsonl", "trace_rank_*.jsonl", _TEXT)


def load_run(
    path: Path | None, num_ranks: int | None = None, num_chunks: int | None = None
) -> RunTrace:
    """Finds the trace of a run, in any format that can be read, and reads it.

    Args:
        path: Path of the run's folder, of its folder ``traces``, of a file in the text format, or
            of a table of times that somebody published. ``None`` for the newest run.
        num_ranks: Required number of pipeline ranks, ``None`` for any.
        num_chunks: Required number of chunks per rank, ``None`` for any.

    Raises:
        TraceError: No trace exists, it cannot be read, or it has other numbers of ranks or chunks.
    """
    source = path or newest_run(_TRACED)
    if source is None:
        raise TraceError(
            f"no run with a trace in {searched()}: train with --trace-dir, or give the folder of a"
            " run"
        )
    if not source.exists():
        raise TraceError(f"{source} does not exist; give the folder of a run")
    return _read(source, num_ranks, num_chunks)


def _read(source: Path, num_ranks: int | None, num_chunks: int | None) -> RunTrace:
    if source.suffix in ENDINGS and source.is_file():
        return read_table(source)
    if source.is_file():
        return read_profiles(source) or read_legacy(source)
    traces = next((p for p in (source / TRACES, source) if trace_files(p)), None)
    if traces is not None:
        run = read_run(traces)
    elif (text := _text_file(source, num_ranks, num_chunks)) is not None:
        run = read_legacy(text)
    elif (imported := read_profiles(source)) is not None:
        run = imported
    else:
        raise TraceError(
            f"{source} contains no trace: neither {TRACES}/trace_rank_*.jsonl nor "
            "trace_pipeline_<p>_model_chunks_<c>.txt; was the run traced, and did it finish a step?"
        )
    shape = (num_ranks or run.num_ranks, num_chunks or run.num_chunks)
    if shape != (run.num_ranks, run.num_chunks):
        raise TraceError(
            f"{run.origin} has {run.num_ranks} pipeline ranks x {run.num_chunks} chunks, asked for "
            f"{shape[0]} x {shape[1]}; give --pipeline_parallel {run.num_ranks} --model_chunks "
            f"{run.num_chunks}, or the --run-dir of another run"
        )
    return run


def _text_file(folder: Path, num_ranks: int | None, num_chunks: int | None) -> Path | None:
    """Returns the newest file in the text format that has the required ranks and chunks."""
    candidates = []
    for path in folder.glob(_TEXT):
        shape = legacy_shape(path)
        if shape and num_ranks in (None, shape[0]) and num_chunks in (None, shape[1]):
            candidates.append(path)
    return max(candidates, key=lambda path: path.stat().st_mtime, default=None)
