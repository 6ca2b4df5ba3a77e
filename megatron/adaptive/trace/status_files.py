"""Reads and writes the ranks' status files, and reads a run's progress file.

The spans of an iteration are written to the trace file only when the iteration ends. To show
progress during an iteration that is long or hangs, the recorder's thread also writes the rank's
current action to a status file, such as ``now_rank_00000.json``. The file contains one line of
JSON, usually of a fixed length, which is replaced in a single write::

    {"unix_ns": ..., "iteration": 7, "num_microbatches": 8, "doing": "F", "chunk": 0,
     "microbatch": 3, "cause": "", "since_s": 0.5, "done": [3, 1, 0], "held_bytes": 67108864}

If microbatches are split into slices, ``slice`` is the index of the slice within ``microbatch``.

If the rank is killed, its status file remains, and the age of the file shows that the rank has
stopped.

``progress.jsonl`` contains the progress of a run, with a line for each iteration, start, end and
diagnosis. One rank writes this file (``engine.progress``); ``job top``, ``job status``,
``job report`` and managers read it. No line is read twice. A line that is still being written is
read later. A line that was truncated because the disk was full is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.adaptive.config.input_files import open_file, parse_json, read_whole, say

PERIOD_S = 0.5
"""Interval in seconds between two writes of a rank's current action to the status file."""

ENDED = "ended"
"""Value of ``doing`` in the last report of a rank, which is written when the trace is closed."""

_LINE_BYTES = 512
_LONGEST_NOW_BYTES = 1 << 20
_MAX_NUMBER = 1 << 63

_KINDS: Mapping[str, Any] = {"doing": str, "cause": str, "since_s": int | float, "done": list}

ReadState = Callable[[], Mapping[str, Any]]


def now_file_name(rank: int) -> str:
    """Returns the name of the status file of ``rank`` in the folder of traces."""
    return f"now_rank_{rank:05d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Describes a rank's current action, as stored in its status file.

    Attributes:
        unix_ns: Time of the report in nanoseconds since 1970, on the clock of the rank's machine.
        iteration: Number of the current iteration, or 0 before the first.
        num_microbatches: Number of microbatches in the current iteration.
        doing: Current activity: a kind of span, :data:`ENDED`, or empty between actions.
        chunk: Model chunk of the current action, or -1 if there is none.
        microbatch: Microbatch of the current action, or -1 if there is none.
        slice: Slice of that microbatch, or -1 if microbatches are not split.
        cause: Cause of the current wait; empty if unknown.
        since_s: Seconds since the activity began, accurate to about :data:`PERIOD_S`.
        done: Numbers of finished forward passes, backward passes and separate weight-gradient
            passes in the current iteration, added up over all chunks. Each slice counts as one
            pass.
        held_bytes: Total size in bytes of the activations that the rank keeps in memory.
    """

    unix_ns: int
    iteration: int = 0
    num_microbatches: int = 0
    doing: str = ""
    chunk: int = -1
    microbatch: int = -1
    slice: int = -1
    cause: str = ""
    since_s: float = 0.0
    done: Sequence[int] = (0, 0, 0)
    held_bytes: int = 0

    def age_s(self) -> float:
        """Returns the seconds since the report.

        The result is 0 if the report seems to be in the future, because the clock of the rank's
        machine is ahead.
        """
        return max(0.0, (time.time_ns() - self.unix_ns) / 1e9)


class NowFile:
    """Writes the status file of one rank. The first write creates the file.

    Args:
        folder: Path of the folder of traces.
        rank: Global rank that the file describes.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self._path = Path(folder) / now_file_name(rank)
        self._file: int | None = None
        self._seen: Any = None
        self._since_s = self._due_s = 0.0
        self._failed = self._is_said = False

    def report(self, read_state: ReadState | None) -> float | None:
        """Writes the rank's current action, if the last report is at least half a second old.

        If ``read_state`` fails twice in a row, a warning is printed, but only once.

        Args:
            read_state: Function that returns fields of :class:`Now`, or ``None`` to write nothing.

        Returns:
            Seconds until the next report is due, or ``None`` if there is nothing to write.
        """
        if read_state is None:
            return None
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + PERIOD_S
            try:
                self.write(read_state())
                self._failed = False
            except OSError:
                # Do not print a warning, because the recorder already warns about a full disk.
                self._close()
            except Exception as error:  # The function may fail while the run shuts down.
                if self._failed and not self._is_said:
                    self._is_said = True
                    reason = f"cannot read the rank's current action: {error!r}"
                    say(f"warning: {self._path.name}: {reason}; tracing continues")
                self._failed = True
        return self._due_s - now_s

    def write(self, fields: Mapping[str, Any]) -> None:
        """Writes the rank's current action to the status file.

        Args:
            fields: Any fields of :class:`Now` except ``unix_ns`` and ``since_s``.

        Raises:
            OSError: The file cannot be written.
        """
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            self._close()  # The file was deleted. Create it again below.
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        now_s = time.monotonic()
        if fields != self._seen:
            self._seen, self._since_s = dict(fields), now_s
        report = {"unix_ns": time.time_ns(), **fields, "since_s": round(now_s - self._since_s, 1)}
        line = json.dumps(report, separators=(",", ":")).ljust(_LINE_BYTES - 1) + "\n"
        os.pwrite(self._file, line.encode("ascii"), 0)
        # Remove the rest of the previous line, which may have been longer.
        os.ftruncate(self._file, len(line))

    def end(self, read_state: ReadState | None) -> None:
        """Writes a last report with :data:`ENDED` as ``doing``, and closes the file.

        Args:
            read_state: Function that returns fields of :class:`Now`, or ``None`` to write nothing.
        """
        if read_state is not None:
            # The function may raise an exception while the run shuts down.
            with contextlib.suppress(Exception):
                self.write({**({} if self._failed else read_state()), "doing": ENDED})
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)


def read_now(folder: Path, rank: int) -> Now | None:
    """Reads the status file of ``rank``. Returns ``None`` if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, OverflowError):
        report = parse_json(
            read_whole(folder / now_file_name(rank), _LONGEST_NOW_BYTES), strict=False
        )
        values = {name: report[name] for name in Now.__slots__ if name in report}
        if all(isinstance(value, _KINDS.get(name, int)) for name, value in values.items()):
            done = tuple(map(int, values.get("done", (0, 0, 0))))
            numbers = [value for value in values.values() if isinstance(value, int | float)]
            if len(done) >= 2 and all(abs(number) < _MAX_NUMBER for number in (*numbers, *done)):
                return Now(**{**values, "done": done})
    return None


PROGRESS_NAME = "progress.jsonl"
TAIL_BYTES = 1 << 20
"""Number of bytes to read first from the end of a large file."""

KEPT = 512
_COUNTS = ("unix_ns", "iteration", "total_iterations", "start_iteration", "slow_rank")
_MEASURED = ("step_ms", "tokens_per_s", "loss", "seconds", "loaded_s", "learning_rate", "factor")


def progress_file(folder: Path) -> Path:
    """Returns the path of a run's progress file.

    Args:
        folder: Path of the run's folder or of the folder ``traces`` in it. Both are searched.
    """
    others = (folder.parent,) if folder.name == "traces" else (folder / "traces",)
    candidates = (candidate / PROGRESS_NAME for candidate in (folder, *others))
    return next((path for path in candidates if path.is_file()), folder / PROGRESS_NAME)


class ProgressTail:
    """Reads what was appended to a run's progress file each time :meth:`refresh` is called.

    Args:
        path: Path of the progress file, which does not have to exist yet.
        kept: Number of lines about iterations to keep; ``None`` to keep all of them, and to read
            even a large file from the beginning.

    Attributes:
        records: Latest lines about iterations, as dicts.
        start: Line about the latest start of the run; empty if the file has no such line.
        total_iterations: Number of iterations of the whole training run, or 0 if unknown.
        ended: Reason why the run ended; empty if it has not ended.
        ended_ns: Time at which the run ended in nanoseconds since 1970, or 0 if unknown.
        findings: Causes of slow steps, from the latest diagnosis.
        slow: Ratio of the actual to the expected computing time of each rank that is slow according
            to the latest diagnosis.
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
        """Reads the lines appended since the last call, and returns all records in them."""
        try:
            with open_file(self.path) as file:
                status = os.fstat(file.fileno())
                lines: list[dict[str, Any]] = []
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._reset()
                    self._inode = status.st_ino
                    if self._kept is not None and status.st_size > TAIL_BYTES:
                        lines += _parsed(file.readline())
                        file.seek(status.st_size - TAIL_BYTES)
                        file.readline()
                        self._offset = file.tell()
                file.seek(self._offset)
                whole = file.read()
        except OSError:
            return []
        whole = whole[: whole.rfind(b"\n") + 1]
        self._offset += len(whole)
        for text in whole.splitlines():
            lines += _parsed(text)
        for line in lines:
            self._note(line)
        if self._kept is not None:
            del self.records[: -self._kept]
        return lines

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


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < _MAX_NUMBER


def _parsed(line: bytes) -> list[dict[str, Any]]:
    """Returns a list with the record in ``line``, or an empty list if the line is damaged.

    A line counts as damaged if it is truncated or if a field has the wrong type.
    """
    try:
        record = parse_json(line, strict=False)
    except ValueError:
        return []
    if not isinstance(record, dict):
        return []
    findings = record.get("findings", [])
    if not isinstance(findings, list) or not all(isinstance(each, dict) for each in findings):
        return []
    number = int | float
    is_sound = (
        all(_is_whole(record.get(name, 0)) for name in _COUNTS)
        and all(isinstance(record.get(name), number | None) for name in _MEASURED)
        and all(isinstance(finding.get("gain"), number) for finding in findings)
        and all(
            isinstance(finding.get(name), str)
            for finding in findings
            for name in ("headline", "do")
        )
    )
    return [{"unix_ns": 0, **record}] if is_sound else []
