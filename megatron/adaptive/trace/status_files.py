"""Reads and writes what a running job says of itself at each moment, and reads how far it is.

A rank's spans come into its trace at the end of an iteration. Who looks at a running job wants to
know more about a long one, or about one that hangs, so the recorder's thread also keeps
``now_rank_00000.json``: one line of JSON, as a rule of a fixed length, which one write replaces::

    {"unix_ns": ..., "iteration": 7, "num_microbatches": 8, "doing": "F", "chunk": 0,
     "microbatch": 3, "cause": "", "since_s": 0.5, "done": [3, 1, 0], "held_bytes": 67108864}

The file stays when the rank is killed; its age then shows it.

``progress.jsonl`` says how far a run is, for ``top``, managers, status and report. One rank writes
it, see ``engine.progress``. Lines that were read are never read again; one that is just being
written is left for later, one that a full disk cut short is left out.
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
"""Interval at which a rank reports what it does."""

ENDED = "ended"
"""Action reported by a rank that closed its trace."""

_LINE_BYTES = 512
_LONGEST_NOW_BYTES = 1 << 20

_KINDS: Mapping[str, Any] = {"doing": str, "cause": str, "since_s": int | float, "done": list}

ReadState = Callable[[], Mapping[str, Any]]


def now_file_name(rank: int) -> str:
    """The name of the file of a global rank, in the folder of the traces."""
    return f"now_rank_{rank:05d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Reports a rank's present action.

    Attributes:
        unix_ns: when it said so, by its machine's time of day.
        iteration: its iteration, 0 before the first.
        num_microbatches: microbatches of that iteration.
        doing: a kind of span, :data:`ENDED`, or empty for what has no name.
        chunk: of the action, -1 for none.
        microbatch: of the action, -1 for none.
        cause: of a wait, empty where it is not known.
        since_s: for so long, to :data:`PERIOD_S`.
        done: finished forwards, backwards and weight gradients of the iteration, over all chunks.
        held_bytes: activation bytes held.
    """

    unix_ns: int
    iteration: int = 0
    num_microbatches: int = 0
    doing: str = ""
    chunk: int = -1
    microbatch: int = -1
    cause: str = ""
    since_s: float = 0.0
    done: Sequence[int] = (0, 0, 0)
    held_bytes: int = 0

    def age_s(self) -> float:
        """Seconds since the rank said so, 0 where its time of day is ahead of ours."""
        return max(0.0, (time.time_ns() - self.unix_ns) / 1e9)


class NowFile:
    """The file of one rank, for the thread that writes it; made when it is written first.

    Args:
        folder: of the traces.
        rank: global rank.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self._path = Path(folder) / now_file_name(rank)
        self._file: int | None = None
        self._seen: Any = None
        self._since_s = self._due_s = 0.0
        self._failed = self._is_said = False

    def report(self, read_state: ReadState | None) -> float | None:
        """Write what the rank does when that is due; what keeps that from working is said once.

        Args:
            read_state: reads it; ``None`` for nobody.

        Returns:
            Seconds to the next time, ``None`` for never.
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
                self._close()  # a full disk, say: what the spans meet there is reported
            except Exception as error:  # once is no fault: the run may be taken down
                if self._failed and not self._is_said:
                    self._is_said = True
                    why = f"reading what the rank does fails: {error!r}; the trace goes on"
                    say(f"warning: {self._path.name}: {why}")
                self._failed = True
        return self._due_s - now_s

    def write(self, fields: Mapping[str, Any]) -> None:
        """Say what the rank does.

        Args:
            fields: those of :class:`Now` but ``unix_ns`` and ``since_s``, as far as they are known.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            self._close()  # it was removed
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        now_s = time.monotonic()
        if fields != self._seen:
            self._seen, self._since_s = dict(fields), now_s
        said = {"unix_ns": time.time_ns(), **fields, "since_s": round(now_s - self._since_s, 1)}
        line = json.dumps(said, separators=(",", ":")).ljust(_LINE_BYTES - 1) + "\n"
        os.pwrite(self._file, line.encode("ascii"), 0)
        os.ftruncate(self._file, len(line))  # a longer one may have been there

    def end(self, read_state: ReadState | None) -> None:
        """Say for the last time what the rank did, where anybody looked on; the file stays."""
        if read_state is not None:
            with contextlib.suppress(Exception):  # as above
                self.write({**({} if self._failed else read_state()), "doing": ENDED})
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)


def read_now(folder: Path, rank: int) -> Now | None:
    """Returns a rank's last report; ``None`` where none can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        said = parse_json(
            read_whole(folder / now_file_name(rank), _LONGEST_NOW_BYTES), strict=False
        )
        values = {name: said[name] for name in Now.__slots__ if name in said}
        if all(isinstance(value, _KINDS.get(name, int)) for name, value in values.items()):
            return Now(**{**values, "done": tuple(map(int, values.get("done", (0, 0, 0))))})
    return None


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
            with open_file(self.path) as file:
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
