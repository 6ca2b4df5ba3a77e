"""Writes the progress of a run to ``progress.jsonl`` in the trace folder, for other programs.

One rank appends a line of JSON for every iteration that is logged. For the iterations that are not
logged, it writes at most two lines per second::

    {"total_iterations": 200, "start_iteration": 0, "world_size": 4, ...}     when training starts
    {"iteration": 7, "unix_ns": ..., "step_ms": 41.2, "tokens_per_s": 24850.1, "loss": 6.91, ...}
    {"loaded_s": 0.21, "unix_ns": ...}                        after a checkpoint was loaded
    {"saved": 50, "seconds": 0.31, "unix_ns": ...}            when a checkpoint is complete
    {"slow_rank": 2, "times": 1, "factor": 1.5, "cost_fraction": 0.2, "pace_ns": [...], ...}
    {"findings": [{"headline": "slow rank: ...", "gain": 0.11, "do": "move layers, ..."}], ...}
    {"probe": 1, "failed_nodes": [{"node": "c", "text": "rank 2 on ...", "limits": {...}}], ...}
    {"ended": "all iterations are done", "unix_ns": ...}                  when the run ends normally

Infinite and NaN values are written as ``null``. While the disk is full, no lines
are written.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.adaptive.trace.files import BestEffortFile, Outage
from megatron.adaptive.trace.status_files import PROGRESS_NAME

COMPLETE = "all iterations are done"
"""Reason that is written when a run ends because it has completed all of its iterations."""

PERIOD_S = 0.5
_MANY_SKIPPED = 0.1
"""Minimum fraction of skipped steps that is reported.

Most runs in float16 skip a few steps at the start, until the loss scale has been adjusted.
"""

Value = float | int | str | list[float] | list[dict[str, Any]] | None


def saved_line(iteration: int, path: Path, seconds: float, *, is_behind: bool = False) -> str:
    """Returns the line to print for a saved checkpoint.

    Args:
        iteration: Iteration after which the checkpoint was saved.
        path: Path of the checkpoint's folder.
        seconds: Time in seconds that training waited for the checkpoint.
        is_behind: Whether the checkpoint was written in the background.
    """
    waited = f"training waited {seconds:.2f} s" if is_behind else f"{seconds:.2f} s"
    return f"  successfully saved checkpoint from iteration {iteration:7d} to {path} ({waited})"


def skipped_line(skipped: int, steps: int, remedy: str) -> str | None:
    """Returns a warning about skipped steps of a run in float16, or ``None`` if there are few.

    Args:
        skipped: Number of steps whose update was skipped because gradients were not finite.
        steps: Number of all steps.
        remedy: Advice for the user, which ends the warning.
    """
    if not skipped or skipped < _MANY_SKIPPED * steps:
        return None
    unchanged = ", so the model is unchanged" if skipped == steps else ""
    return (
        f"warning: {skipped} of {steps} steps were skipped because gradients were infinite or "
        f"NaN in float16{unchanged}; {remedy}"
    )


class ProgressFile:
    """Appends lines to ``progress.jsonl``, which contains the progress of a run.

    If writing fails, a warning is printed once and some lines are lost, but the job continues.

    Args:
        folder: Trace folder, which is created if it does not exist, or ``None`` to write nothing.
    """

    def __init__(self, folder: str | None) -> None:
        self._due_s = 0.0
        self._pending: Mapping[str, Value] | None = None
        self._start = b""
        self._file: BestEffortFile | None = None
        if folder is None:
            return
        path = Path(folder) / PROGRESS_NAME
        try:
            self._file = BestEffortFile(path, "lines", lambda: self._start)
        except OSError as error:
            Outage(path, "lines").begins(error)

    def begins(self, start_iteration: int, total_iterations: int, **more: Value) -> None:
        """Writes a line about the start of a run.

        Args:
            start_iteration: Number of iterations completed before training started or resumed.
            total_iterations: Number of iterations of the whole training run.
            **more: Additional fields of the line, such as the parallel sizes. ``moved`` is set if
                the ranks were already training and now switch to this folder.
        """
        sizes = {"total_iterations": total_iterations, "start_iteration": start_iteration}
        self._start = _line({**sizes, **more})
        if self._file is not None:
            self._file.begin()

    def iteration(self, iteration: int, values: Mapping[str, Value], *, is_logged: bool) -> None:
        """Writes a line about an iteration, unless such a line was written less than 0.5 s ago.

        Args:
            iteration: Index of the iteration.
            values: Measurements of the iteration, keyed by field name.
            is_logged: Whether the iteration is logged. If so, the line is always written.
        """
        now_s = time.monotonic()
        self._pending = {"iteration": iteration, **values}
        if is_logged or now_s >= self._due_s:
            self._due_s = now_s + PERIOD_S
            self._flush()

    def report(self, values: Mapping[str, Value]) -> None:
        """Writes a line with the fields ``values`` about an event, such as a saved checkpoint."""
        self._flush()
        self._write(values)

    def close(self) -> None:
        """Writes the pending line, if any, and closes the file. Safe to call more than once."""
        self._flush()
        file = self._file
        self._file = None
        if file is not None:
            file.close()

    def _flush(self) -> None:
        pending = self._pending
        self._pending = None
        if pending is not None:
            self._write(pending)

    def _write(self, values: Mapping[str, Value]) -> None:
        if self._file is not None:
            self._file.append(_line(values))


def _line(values: Mapping[str, Value]) -> bytes:
    sound = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    return (json.dumps({**sound, "unix_ns": time.time_ns()}) + "\n").encode()
