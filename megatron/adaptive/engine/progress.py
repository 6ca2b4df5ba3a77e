"""Writes how far a run is, for programs that look on: ``progress.jsonl`` in its folder.

One rank appends a line of JSON per iteration, two a second at most, and of every iteration that the
log reports::

    {"total_iterations": 200, "start_iteration": 0, "world_size": 4, ...}        at each start
    {"iteration": 7, "unix_ns": ..., "step_ms": 41.2, "tokens_per_s": 24850.1, "loss": 6.91, ...}
    {"loaded_s": 0.21, "unix_ns": ...}                        where a checkpoint was loaded
    {"saved": 50, "seconds": 0.31, "unix_ns": ...}            when a checkpoint is complete
    {"slow_rank": 2, "times": 1, "factor": 1.5, "cost_fraction": 0.2, "pace_ns": [...], ...}
    {"findings": [{"headline": "slow rank: ...", "gain": 0.11, "do": "move layers, ..."}], ...}
    {"ended": "all iterations are done", "unix_ns": ...}                           at an orderly end

A number that is not finite is ``null``. While the disk is full lines are missing.
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
"""Reason of a training's end that did all that it was to do."""

PERIOD_S = 0.5

Value = float | int | str | list[float] | list[dict[str, Any]] | None


def saved_line(iteration: int, path: Path, seconds: float, *, is_behind: bool = False) -> str:
    """The line of the log about a checkpoint.

    Args:
        iteration: that it is of.
        path: where it is.
        seconds: that training waited for it.
        is_behind: whether it was written behind training.
    """
    waited = f"training waited {seconds:.2f} s" if is_behind else f"{seconds:.2f} s"
    return f"  successfully saved checkpoint from iteration {iteration:7d} to {path} ({waited})"


class ProgressFile:
    """Appends to the file of a run; a failure is reported once and costs lines, not the job.

    Args:
        folder: of the traces; made if it is missing. ``None`` to write nothing.
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
        """Write how many iterations were done before, and how many the whole training has.

        Args:
            start_iteration: iterations done before.
            total_iterations: of the whole training.
            more: parallel sizes; ``moved`` where ranks that train already write here from now on.
        """
        sizes = {"total_iterations": total_iterations, "start_iteration": start_iteration}
        self._start = _line({**sizes, **more})
        if self._file is not None:
            self._file.begin()

    def iteration(self, iteration: int, values: Mapping[str, Value], *, is_logged: bool) -> None:
        """Report an iteration, unless another was reported just now.

        Args:
            iteration: its number.
            values: what is known of it.
            is_logged: whether the log has a line about it.
        """
        now_s = time.monotonic()
        self._pending = {"iteration": iteration, **values}
        if is_logged or now_s >= self._due_s:
            self._due_s = now_s + PERIOD_S
            self._flush()

    def report(self, values: Mapping[str, Value]) -> None:
        """Report something besides iterations: a checkpoint, or why training ``ended``."""
        self._flush()
        self._write(values)

    def close(self) -> None:
        """Report the last iteration and close the file; idempotent."""
        self._flush()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _flush(self) -> None:
        pending, self._pending = self._pending, None
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
