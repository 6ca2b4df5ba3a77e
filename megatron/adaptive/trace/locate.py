"""Finds the trace that the user means.

``runs/latest`` is a symbolic link to the newest run's folder, or a text file with its path
(relative to ``runs``). A run's folder holds ``traces/`` with the JSON lines of its ranks, and may
hold the text form. Looked for, in this order:

1. the folder or file given by the user,
2. ``runs/latest`` below the current directory,
3. the text form in the current directory.
"""

from __future__ import annotations

from pathlib import Path

from megatron.adaptive.config.input_files import read_text
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.imports.profiles import read_profiles
from megatron.adaptive.trace.imports.published import ENDINGS, read_table
from megatron.adaptive.trace.legacy_text import legacy_name, legacy_shape, read_legacy
from megatron.adaptive.trace.read import RunTrace, read_run, trace_files

TRACES = "traces"
RUNS = "runs"
LATEST = "latest"


def load_run(
    given: Path | None, num_ranks: int | None = None, num_chunks: int | None = None
) -> RunTrace:
    """Find and read the trace of a run.

    Args:
        given: the run's folder, its folder of traces, a file in the text form, or a published
            table; ``None`` to look for the latest run.
        num_ranks: the pipeline ranks that it must have, ``None`` for any.
        num_chunks: the chunks per rank that it must have, ``None`` for any.

    Raises:
        TraceError: there is none, it has another shape, or it cannot be read.
    """
    place = given or latest_run() or _text_file(Path(), num_ranks, num_chunks)
    if place is None:
        shape = f"{legacy_name(num_ranks, num_chunks)}.txt" if num_ranks and num_chunks else "text"
        raise TraceError(
            f"no trace found: neither {Path(RUNS, LATEST)} nor {shape} in {Path().resolve()}; "
            "run run_single.sh first or give --run-dir"
        )
    if not place.exists():
        raise TraceError(f"{place} does not exist; give the folder of a run")
    return _read(place, num_ranks, num_chunks)


def latest_run() -> Path | None:
    """The folder behind ``runs/latest``, ``None`` where there is none.

    Raises:
        TraceError: it points to a folder that is gone.
    """
    pointer = Path(RUNS, LATEST)
    if pointer.is_file():
        text = read_text(pointer, "give --run-dir, or run again", TraceError)
        folder = pointer.parent / text.strip()
    elif pointer.is_symlink() or pointer.is_dir():
        folder = pointer
    else:
        return None
    if not folder.is_dir():
        raise TraceError(
            f"{pointer} points to {folder.resolve()}, which is gone; give --run-dir, or run again"
        )
    return folder


def _read(place: Path, num_ranks: int | None, num_chunks: int | None) -> RunTrace:
    if place.suffix in ENDINGS and place.is_file():
        return read_table(place)
    if place.is_file():
        return read_profiles(place) or read_legacy(place)
    traces = next((p for p in (place / TRACES, place) if trace_files(p)), None)
    if traces is not None:
        run = read_run(traces)
    elif (text := _text_file(place, num_ranks, num_chunks)) is not None:
        run = read_legacy(text)
    elif (imported := read_profiles(place)) is not None:
        run = imported
    else:
        raise TraceError(
            f"{place} holds no trace: neither {TRACES}/trace_rank_*.jsonl nor "
            "trace_pipeline_<p>_model_chunks_<c>.txt; was the run traced, and did it finish a step?"
        )
    wanted = (num_ranks or run.num_ranks, num_chunks or run.num_chunks)
    if wanted != (run.num_ranks, run.num_chunks):
        raise TraceError(
            f"{run.origin} has {run.num_ranks} pipeline ranks x {run.num_chunks} chunks, asked for "
            f"{wanted[0]} x {wanted[1]}; give --pipeline_parallel {run.num_ranks} --model_chunks "
            f"{run.num_chunks}, or the --run-dir of another run"
        )
    return run


def _text_file(folder: Path, num_ranks: int | None, num_chunks: int | None) -> Path | None:
    """The newest file in the text form that has the shape."""
    found = []
    for path in folder.glob("trace_pipeline_*_model_chunks_*.txt"):
        shape = legacy_shape(path)
        if shape and num_ranks in (None, shape[0]) and num_chunks in (None, shape[1]):
            found.append(path)
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
