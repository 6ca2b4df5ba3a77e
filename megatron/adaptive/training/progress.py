"""How far a run is, for programs that look on: ``progress.jsonl`` in the run's folder.

One rank appends a line of JSON per iteration, two a second at most, and of every iteration that the
log tells of::

    {"total_iterations": 200, "start_iteration": 0, "unix_ns": ...}              at each start
    {"iteration": 7, "unix_ns": ..., "step_ms": 41.2, "tokens_per_s": 24850.1, "loss": 6.91, ...}
    {"loaded_s": 0.21, "unix_ns": ...}                        where a checkpoint was loaded
    {"saved": 50, "seconds": 0.31, "unix_ns": ...}            when a checkpoint is complete
    {"slow_rank": 2, "times": 1, "factor": 1.5, "cost_fraction": 0.2, "pace_ns": [...], ...}
    {"ended": "all iterations are done", "unix_ns": ...}                           at an orderly end

A number that is not finite is ``null``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["PROGRESS_NAME", "ProgressFile"]

PROGRESS_NAME = "progress.jsonl"
PERIOD_S = 0.5

Value = float | int | str | list[float] | None


class ProgressFile:
    """Appends to the file of a run; a failure is told once and ends that, not the job.

    Args:
        folder: of the traces; made if it is missing. ``None`` to write nothing.
    """

    def __init__(self, folder: str | None) -> None:
        self._path = Path(folder or "") / PROGRESS_NAME
        self._due_s = 0.0
        self._untold: Mapping[str, Value] | None = None
        self._file: int | None = None
        if folder is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = os.open(self._path, flags, 0o644)
        except OSError as error:
            self._give_up(error)

    def begins(self, start_iteration: int, total_iterations: int) -> None:
        """Tell how many iterations were done before, and how many the whole training has."""
        self._write({"total_iterations": total_iterations, "start_iteration": start_iteration})

    def iteration(self, iteration: int, values: Mapping[str, Value], *, is_logged: bool) -> None:
        """Tell of an iteration, unless another was told of just now.

        Args:
            iteration: its number.
            values: what is known of it.
            is_logged: whether the log has a line about it.
        """
        now_s = time.monotonic()
        self._untold = {"iteration": iteration, **values}
        if is_logged or now_s >= self._due_s:
            self._due_s = now_s + PERIOD_S
            self._tell()

    def tell(self, values: Mapping[str, Value]) -> None:
        """Tell something besides iterations, such as of a checkpoint."""
        self._tell()
        self._write(values)

    def ended(self, reason: str) -> None:
        """Tell why the training ended."""
        self._tell()
        self._write({"ended": reason})

    def close(self) -> None:
        """Tell of the last iteration and close the file; idempotent."""
        self._tell()
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _tell(self) -> None:
        untold, self._untold = self._untold, None
        if untold is not None:
            self._write(untold)

    def _write(self, values: Mapping[str, Value]) -> None:
        if self._file is None:
            return
        sound = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        try:
            line = json.dumps({**sound, "unix_ns": time.time_ns()}) + "\n"
            os.write(self._file, line.encode())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        print(
            f"warning: cannot write {self._path}: {error.strerror or error}; training goes on, "
            "who looks on does not see how far it is",
            file=sys.stderr,
            flush=True,
        )
        self.close()
