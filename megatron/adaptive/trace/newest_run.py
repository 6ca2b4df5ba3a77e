"""Finds the newest run below the current folder, for programs that got no folder.

Runs write here by default::

    runs/NAME/traces, runs/NAME/checkpoints     train single, the scripts of examples/gpt
    runs/latest                                 the newest of these: a link, or a file with its path
    logs/JOB, logs/JOB/traces                   jobs of conf.sh, on pods and on Slurm
    traces, checkpoints                         the names that the documentation uses with
                                                --trace-dir and --save

The newest run is the one that wrote its files last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from megatron.adaptive.config.input_files import read_text, say
from megatron.adaptive.errors import TraceError

TRACES = "traces"
"""Name of the folder of traces in a run's folder."""

_RUNS = Path("runs")
_LATEST = _RUNS / "latest"
_HERE = Path()
PARENTS = (_RUNS, Path("logs"), _HERE)
"""Folders in which runs are searched by default; of the current folder only its own files count."""


def newest_run(
    patterns: Sequence[str], parents: Sequence[Path] = PARENTS, *, may_be_empty: bool = False
) -> Path | None:
    """Returns the folder of the newest run, and says on stderr which one it is.

    Args:
        patterns: Patterns of the files that a run's folder must contain, relative to it. The run
            whose files were changed last is the newest.
        parents: Folders that contain runs.
        may_be_empty: Whether a folder in ``runs`` counts even if it contains no such file yet.

    Returns:
        Path of the folder, ``None`` if there is no run.

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
    """Returns the folders that :func:`newest_run` searches, for an error message."""
    *others, last = (str(parent.resolve()) for parent in parents)
    return f"{', '.join(others)} or {last}" if others else last


def _folders(parent: Path, patterns: Sequence[str], *, may_be_empty: bool) -> list[Path]:
    """Returns the subfolders of a folder that may be the newest run.

    These are none if the folder cannot be read. In ``runs`` it is only the run that ``runs/latest``
    names, if that run has the files that are needed.
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
    """Returns the folder that ``runs/latest`` points to, ``None`` if there is no such link.

    Raises:
        TraceError: The link points to a folder that does not exist.
    """
    if _LATEST.is_file():
        text = read_text(_LATEST, "name the folder of a run, or run again", TraceError)
        folder = _LATEST.parent / text.strip()
    elif _LATEST.is_symlink() or _LATEST.is_dir():
        folder = _LATEST
    else:
        return None
    if not folder.is_dir():
        raise TraceError(
            f"{_LATEST} points to {folder.resolve()}, which is gone; name the folder of a run, or"
            " run again"
        )
    return folder


def _changed_s(folder: Path, patterns: Sequence[str]) -> float | None:
    """Returns the time of the last change of a run's files, ``None`` if it has none of them."""
    times_s = []
    for pattern in patterns:
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):  # an active run may remove a file
                times_s.append(path.stat().st_mtime)
    return max(times_s, default=None)
