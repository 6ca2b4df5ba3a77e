"""Finds the trace of the run that the user names, by default of the newest run.

The folder of a run contains a folder ``traces`` with one JSON-lines file per rank. It may also
contain a trace in the older text format (``legacy_text``). The newest run is the run whose files
changed last. By default, runs write to these folders in the current directory::

    runs/NAME/traces, runs/NAME/checkpoints     train single, the scripts of examples/gpt
    runs/latest                                 link to the newest such folder, or file with its
                                                path
    logs/JOB, logs/JOB/traces                   jobs of conf.sh, on pods and on Slurm
    traces, checkpoints                         the names that the documentation uses with
                                                --trace-dir and --save
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from megatron.adaptive.config.input_files import read_text, say
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.imports.profiles import read_profiles
from megatron.adaptive.trace.imports.published import ENDINGS, read_table
from megatron.adaptive.trace.legacy_text import legacy_shape, read_legacy
from megatron.adaptive.trace.read import RunTrace, read_run, trace_files

TRACES = "traces"
"""Name of the folder of traces within a run's folder."""

_RUNS = Path("runs")
_LATEST = _RUNS / "latest"
_HERE = Path()
PARENTS = (_RUNS, Path("logs"), _HERE)
"""Folders that are searched for runs by default.

The current folder may itself be the folder of a run. Of its subfolders, only ``runs`` and ``logs``
are searched.
"""

_LINES = (f"{TRACES}/trace_rank_*.jsonl", "trace_rank_*.jsonl")
_TEXT = "trace_pipeline_*_model_chunks_*.txt"


def load_run(
    path: Path | None, num_ranks: int | None = None, num_chunks: int | None = None
) -> RunTrace:
    """Finds and reads the trace of a run in any of the supported formats.

    Args:
        path: Path of the run's folder, of the folder ``traces`` in it, of a file in the text
            format, of a profile (``imports``), or of a published table; ``None`` for the newest
            run.
        num_ranks: Required number of pipeline ranks; ``None`` to accept any number.
        num_chunks: Required number of chunks per rank; ``None`` to accept any number.

    Raises:
        TraceError: The trace does not exist, cannot be read, or does not have the required numbers
            of ranks or chunks.
    """
    source = path or newest_run(_LINES) or newest_run((_TEXT,))
    if source is None:
        raise TraceError(
            f"there is no run with a trace in {searched()}; train with --trace-dir, or pass the "
            "folder of a run"
        )
    if not source.exists():
        raise TraceError(f"{source} does not exist; pass the folder of a run")
    return _read(source, num_ranks, num_chunks)


def newest_run(
    patterns: Sequence[str], parents: Sequence[Path] = PARENTS, *, may_be_empty: bool = False
) -> Path | None:
    """Finds the folder of the newest run, and prints the path to standard error.

    Args:
        patterns: Patterns of files relative to a run's folder. The newest run is the one in which a
            matching file changed last.
        parents: Folders that contain runs.
        may_be_empty: Whether to accept a run in the folder ``runs`` that has no matching file yet.

    Returns:
        Path of the folder, or ``None`` if there is no run.

    Raises:
        TraceError: ``runs/latest`` points to a folder that does not exist.
    """
    newest: Path | None = None
    newest_s = -1.0
    for parent in parents:
        for folder in _folders(parent, patterns, may_be_empty=may_be_empty):
            changed_s = _changed_s(folder, patterns)
            if changed_s is None and may_be_empty and parent == _RUNS:
                changed_s = folder.stat().st_mtime
            if changed_s is not None and changed_s > newest_s:
                newest = folder
                newest_s = changed_s
    if newest is not None:
        say(f"no folder given: reading the newest run, {newest.resolve()}")
    return newest


def searched(parents: Sequence[Path] = PARENTS) -> str:
    """Returns the names of the folders in ``parents`` for an error message."""
    *others, last = (str(parent.resolve()) for parent in parents)
    return f"{', '.join(others)} or {last}" if others else last


def _folders(parent: Path, patterns: Sequence[str], *, may_be_empty: bool) -> list[Path]:
    """Returns the folders in ``parent`` that may contain the newest run.

    For the current directory, the list contains only the directory itself. The list is empty if
    ``parent`` cannot be read. In the folder ``runs``, the target of ``runs/latest`` is the only
    candidate if the target contains a file that matches ``patterns``, or if ``may_be_empty`` is
    true.
    """
    if parent == _HERE:
        return [parent]
    latest = _latest_run() if parent == _RUNS else None
    if latest is not None and (may_be_empty or _changed_s(latest, patterns) is not None):
        return [latest]
    with contextlib.suppress(OSError):
        return sorted(path for path in parent.iterdir() if path.is_dir() and path.name[0] != ".")
    return []


def _latest_run() -> Path | None:
    """Returns the folder that ``runs/latest`` points to, or ``None`` if there is no such link.

    Raises:
        TraceError: The link points to a folder that does not exist.
    """
    if _LATEST.is_file():
        text = read_text(
            _LATEST, "write the path of a run's folder into this file, or run again", TraceError
        )
        folder = _LATEST.parent / text.strip()
    elif _LATEST.is_symlink() or _LATEST.is_dir():
        folder = _LATEST
    else:
        return None
    if not folder.is_dir():
        raise TraceError(
            f"{_LATEST} points to {folder.resolve()}, which does not exist; pass the folder of a "
            "run, or run again"
        )
    return folder


def _changed_s(folder: Path, patterns: Sequence[str]) -> float | None:
    """Returns the time in seconds at which a file that matches one of ``patterns`` last changed.

    The patterns are relative to ``folder``. The result is ``None`` if no file matches.
    """
    times_s = []
    for pattern in patterns:
        for path in folder.glob(pattern):
            # Ignore files that a running job deletes between the two calls.
            with contextlib.suppress(OSError):
                times_s.append(path.stat().st_mtime)
    return max(times_s, default=None)


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
            "trace_pipeline_<p>_model_chunks_<c>.txt; check that the run was traced and finished a "
            "step"
        )
    shape = (num_ranks or run.num_ranks, num_chunks or run.num_chunks)
    if shape != (run.num_ranks, run.num_chunks):
        raise TraceError(
            f"{run.origin} has {run.num_ranks} pipeline ranks x {run.num_chunks} chunks, not the "
            f"requested {shape[0]} x {shape[1]}; use --pipeline_parallel {run.num_ranks} "
            f"--model_chunks {run.num_chunks}, or the --run-dir of another run"
        )
    return run


def _text_file(folder: Path, num_ranks: int | None, num_chunks: int | None) -> Path | None:
    """Returns the newest text file in ``folder`` with the required numbers of ranks and chunks."""
    candidates = []
    for path in folder.glob(_TEXT):
        shape = legacy_shape(path)
        if shape and num_ranks in (None, shape[0]) and num_chunks in (None, shape[1]):
            candidates.append(path)
    return max(candidates, key=lambda path: path.stat().st_mtime, default=None)
