"""Reads ``progress.jsonl`` as it grows: how far a run is, for ``top``, managers, status and report.

One rank of a run writes it, see ``engine.progress``. Lines that were read are never read again; one
that is just being written is left for later, one that a full disk cut short is left out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.adaptive.config.outside import parse_json

PROGRESS_NAME = "progress.jsonl"
TAIL_BYTES = 1 << 20
"""Part of a large file's end that is read at first."""

KEPT = 512
_COUNTS = ("unix_ns", "iteration", "total_iterations", "start_iteration", "slow_rank")
_MEASURED = ("step_ms", "tokens_per_s", "loss", "seconds", "loaded_s", "learning_rate", "factor")


def progress_file(folder: Path) -> Path:
    """Return the file of a run.

    Args:
        folder: of the run or of its traces; the file is in it, in ``traces`` or above that.
    """
    above = (folder.parent,) if folder.name == "traces" else (folder / "traces",)
    found = (place / PROGRESS_NAME for place in (folder, *above))
    return next((path for path in found if path.is_file()), folder / PROGRESS_NAME)


class ProgressTail:
    """Follows the file of a run.

    Args:
        path: the file, which may be missing.
        kept: lines about iterations that are kept, ``None`` for all; a large file is then read
            from its beginning.

    Attributes:
        records: the latest lines about iterations.
        start: the line about the latest start, empty before there is one.
        total_iterations: of the whole training, 0 if unknown.
        ended: why it ended, empty if it goes on.
        ended_ns: time of day of that.
        findings: what slows the run by its latest diagnosis.
        slow: by slow rank, how many times as long its work takes by that diagnosis.
    """

    def __init__(self, path: Path, kept: int | None = KEPT) -> None:
        self.path = path
        self._kept = kept
        self._inode = -1
        self._reset()

    def _reset(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.start: dict[str, Any] = {}
        self.total_iterations = self.ended_ns = self._offset = 0
        self.ended = ""
        self.findings: list[dict[str, Any]] = []
        self.slow: dict[int, float | None] = {}

    def refresh(self) -> list[dict[str, Any]]:
        """Read what is new; returns it, lines about other things than iterations too."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                found: list[dict[str, Any]] = []
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._reset()
                    self._inode = status.st_ino
                    if self._kept is not None and status.st_size > TAIL_BYTES:
                        found += _parsed(file.readline())
                        file.seek(status.st_size - TAIL_BYTES)
                        file.readline()
                        self._offset = file.tell()
                file.seek(self._offset)
                whole = file.read()
        except OSError:
            return []
        whole = whole[: whole.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            found += _parsed(line)
        for one in found:
            self._note(one)
        if self._kept is not None:
            del self.records[: -self._kept]
        return found

    def _note(self, line: dict[str, Any]) -> None:
        if "ended" in line:
            self.ended, self.ended_ns = str(line["ended"]), line.get("unix_ns", 0)
        elif "iteration" in line:
            self.records.append(line)
        elif "findings" in line:
            self.findings, self.slow = line["findings"], {}
        elif "slow_rank" in line:
            self.slow[line["slow_rank"]] = line.get("factor")
        elif "total_iterations" in line:
            self.total_iterations, self.ended = int(line["total_iterations"]), ""
            if not line.get("moved"):
                self.start = line


def _parsed(line: bytes) -> list[dict[str, Any]]:
    """A whole line; nothing where it was cut short, or numbers are something else."""
    try:
        found = parse_json(line, strict=False)
    except ValueError:
        return []
    if not isinstance(found, dict) or not isinstance(findings := found.get("findings", []), list):
        return []
    if not all(
        isinstance(one.get(name, least), kind) if isinstance(one, dict) else False
        for one, names, kind, least in (
            (found, _COUNTS, int, 0),
            (found, _MEASURED, int | float | None, None),
            *((finding, ("gain",), int | float, None) for finding in findings),
            *((finding, ("headline", "do"), str, None) for finding in findings),
        )
        for name in names
    ):
        return []
    return [{"unix_ns": 0, **found}]
