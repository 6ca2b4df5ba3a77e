"""Reads the current or final state of a run from its files, for display by ``job top``.

The files are the traces (spans of the latest iterations), the status files of the ranks (current
actions, see ``status_files``), and the trainer's progress file. Any of them may be missing. The
clocks of different machines are aligned by their time of day, which is accurate enough for a
display.

No data is read twice. If a trace file is large, only the header and the end of the file are read at
first. The line before the spans of an iteration (the marker) contains the size of these spans, so
that older spans can be skipped. Only complete blocks of spans are read.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.config.input_files import open_file
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.block_index import Block, FileIndex, read_blocks
from megatron.adaptive.trace.locate import TRACES, newest_run, searched
from megatron.adaptive.trace.metrics import WAIT_CAUSES, RankFigures, rank_figures, stack_figures
from megatron.adaptive.trace.read import describe_numbers, frozen_chunks_of, trace_files
from megatron.adaptive.trace.span_columns import Ints, Mask
from megatron.adaptive.trace.status_files import (
    ENDED,
    PROGRESS_NAME,
    Now,
    ProgressTail,
    progress_file,
    read_now,
)
from megatron.adaptive.trace.trace_format import TraceHeader, parse_line, slices_of

TAIL_BYTES = 1 << 20
"""Number of bytes that are first read from the end of a large file.

More bytes are read if these do not contain a complete step.
"""

ALL_TAILS_BYTES = 1 << 28
"""Maximum total number of bytes that are first read from the ends of all files."""

LEAST_TAIL_BYTES = 1 << 16
"""Lower limit for the number of bytes that are first read from the end of each large file.

With many files, less than ``TAIL_BYTES`` is read from each, but never less than this limit.
"""

LOOKED_AT = 8
"""Number of latest iterations over which the displayed medians are taken."""

SILENT_S = 5.0
"""Time in seconds without a status report after which a rank is shown as silent.

Ranks write a status report twice a second.
"""

LONG_S = 60.0
"""Seconds since the last write after which a rank without status reports is shown as silent.

Such a rank only writes its trace, once per step.
"""


@dataclass(frozen=True, kw_only=True)
class LiveRank:
    """Describes the current state of one rank.

    Attributes:
        rank: Global rank.
        header: Header of the rank's trace, or ``None`` if the rank has no trace yet.
        now: Latest status report of the rank, or ``None`` if there is none.
        age_s: Seconds since the rank last wrote to its files, or ``None`` if it has not written
            yet.
        is_gone: Whether the rank's process has exited.
        iteration: Number of the latest iteration in the rank's trace, or 0 if there is none.
        held_bytes: Maximum total size in bytes of the activations in memory during the latest
            iteration.
        busy: Fraction of the step time during which the rank computes, or ``None`` if unknown.
        waits: Fractions of the step time during which the rank waits, keyed by cause of the wait.
        compute_ms: Total time in ms of the rank's actions per iteration, or ``None`` if unknown.
        slow: Ratio of the rank's computing time to the expected time, if the rank is slow according
            to the latest diagnosis; otherwise ``None``.
        problem: Reason why the trace file cannot be read; empty if it is readable.
    """

    rank: int
    header: TraceHeader | None = None
    now: Now | None = None
    age_s: float | None = None
    is_gone: bool = False
    iteration: int = 0
    held_bytes: int = 0
    busy: float | None = None
    waits: Mapping[str, float] = field(default_factory=dict)
    compute_ms: float | None = None
    slow: float | None = None
    problem: str = ""

    @property
    def is_ended(self) -> bool:
        """Whether the rank has closed its trace, which means that the process exited normally."""
        return self.now is not None and self.now.doing == ENDED


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Describes the state of a whole run at one point in time.

    Attributes:
        folder: Folder of the run's traces, which may not exist yet.
        ranks: States of all ranks of the run, including ranks without a trace; empty if no file
            exists yet.
        state: ``waiting``, ``running``, ``silent``, ``killed`` or ``ended``.
        detail: Explanation of the state, such as a list of silent ranks; may be empty.
        age_s: Seconds since any rank last wrote to its files, or ``None`` if no rank has written
            yet.
        iteration: Number of the latest iteration in any file, or 0 if there is none.
        total_iterations: Number of iterations of the whole training run, or 0 if unknown.
        step_ms: Median time of an iteration in ms, or ``None`` if unknown. If the trainer has not
            reported times, the time from the first to the last action of a pipeline is used.
        progress: Records of the trainer's progress file, one per iteration, in ascending order.
        bubble: Idle fraction of the step, averaged over ranks, or ``None`` if unknown.
        findings: Causes of slow steps according to the latest diagnosis. Each has a ``headline``, a
            ``gain`` (fraction of the step time that the remedy would save) and a remedy (``do``).
    """

    folder: Path
    ranks: Sequence[LiveRank] = ()
    state: str = "waiting"
    detail: str = ""
    age_s: float | None = None
    iteration: int = 0
    total_iterations: int = 0
    step_ms: float | None = None
    progress: Sequence[Mapping[str, Any]] = ()
    bubble: float | None = None
    findings: Sequence[Mapping[str, Any]] = ()

    @property
    def header(self) -> TraceHeader | None:
        """Trace header of some rank, or ``None`` if there is no trace yet.

        Use only fields that are equal on all ranks.
        """
        return next((rank.header for rank in self.ranks if rank.header is not None), None)

    @property
    def is_begun(self) -> bool:
        """Whether the run has written at least one file."""
        return bool(self.ranks or self.progress or self.total_iterations)

    @property
    def shares_gpus(self) -> bool:
        """Whether any rank shares its GPU, so that its times include work of other ranks."""
        return any(rank.header is not None and rank.header.gpu_ranks > 1 for rank in self.ranks)

    def last(self, name: str) -> float | None:
        """Returns the value of ``name`` in the latest progress record, or ``None`` if missing."""
        value = self.progress[-1].get(name) if self.progress else None
        return float(value) if isinstance(value, int | float) else None

    def left_s(self) -> float | None:
        """Estimates the remaining seconds of training from the latest iterations.

        Returns ``None`` if the remaining time is unknown.
        """
        recent = self.progress[-20:]
        if len(recent) < 2 or not self.total_iterations:
            return None
        done = recent[-1]["iteration"] - recent[0]["iteration"]
        passed_s = (recent[-1]["unix_ns"] - recent[0]["unix_ns"]) / 1e9
        left = max(0, self.total_iterations - recent[-1]["iteration"])
        return float(passed_s / done * left) if done > 0 else None


_LIVE = (
    "trace_rank_*.jsonl",
    PROGRESS_NAME,
    f"{TRACES}/trace_rank_*.jsonl",
    f"{TRACES}/{PROGRESS_NAME}",
)
"""Patterns of the files in a run's folder from which the state of the run is read."""


def find_live(folder: Path | None) -> Path:
    """Returns the folder of a run, even if it contains no traces yet.

    Args:
        folder: Path of the run's folder or of the folder of its traces; ``None`` for the newest
            run.

    Raises:
        TraceError: The folder does not exist.
    """
    if folder is None:
        newest = newest_run(_LIVE, may_be_empty=True)
        if newest is None:
            raise TraceError(
                f"there is no run in {searched()}; pass the folder of a run or its traces"
            )
        return newest.resolve()  # Resolve the link now, because a later run may change the link.
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise TraceError(f"{folder} {problem}; pass the folder of a run or its traces")
    return folder


class LiveRun:
    """Reads the files of a run repeatedly while the run is writing them.

    Args:
        folder: Path of the run's folder or of its folder of traces.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[int, RankTail] = {}
        self._progress = ProgressTail(progress_file(folder))

    def refresh(self) -> Snapshot:
        """Reads the data that was appended to the files, and returns the state of the run."""
        folder = self._folder / TRACES
        if not ((folder / PROGRESS_NAME).exists() or trace_files(folder)):
            folder = self._folder
        files = trace_files(folder)
        tail_bytes = ALL_TAILS_BYTES // max(1, len(files))
        tail_bytes = max(LEAST_TAIL_BYTES, min(TAIL_BYTES, tail_bytes))
        for rank, path in files.items():
            if rank not in self._tails or self._tails[rank].path != path:
                self._tails[rank] = RankTail(path, 2 * LOOKED_AT, tail_bytes)
        for rank in set(self._tails) - set(files):
            del self._tails[rank]
        for tail in self._tails.values():
            tail.refresh()
        if self._progress.path != (path := progress_file(folder)):
            self._progress = ProgressTail(path)
        self._progress.refresh()
        return self._snapshot(folder)

    def _snapshot(self, folder: Path) -> Snapshot:
        headers = [tail.header for tail in self._tails.values() if tail.header is not None]
        world = max([header.world_size for header in headers], default=0)
        parts, traced_ms = _parts_of_steps(self._tails)
        slow = self._progress.slow
        ranks = [
            _rank(folder, rank, self._tails.get(rank), parts.get(rank, {}), slow.get(rank))
            for rank in range(max(world, *(r + 1 for r in self._tails), 0, 0))
        ]
        state, detail = _state(ranks, self._progress)
        records = self._progress.records
        busy = [rank.busy for rank in ranks if rank.busy is not None]
        steps_ms = [r["step_ms"] for r in records[-LOOKED_AT:] if r.get("step_ms") is not None]
        steps_ms = steps_ms or traced_ms
        return Snapshot(
            folder=folder,
            ranks=ranks,
            state=state,
            detail=detail,
            age_s=min((r.age_s for r in ranks if r.age_s is not None), default=None),
            iteration=max(
                [records[-1]["iteration"] if records else 0]
                + [max(r.iteration, r.now.iteration if r.now else 0) for r in ranks]
            ),
            total_iterations=self._progress.total_iterations,
            step_ms=statistics.median(steps_ms) if steps_ms else None,
            progress=tuple(records),
            findings=tuple(self._progress.findings),
            bubble=1 - statistics.fmean(busy) if busy else None,
        )


class RankTail:
    """Reads what was appended to a rank's trace file each time :meth:`refresh` is called.

    Args:
        path: Path of the trace file.
        kept: Number of latest iterations to keep in memory.
        tail_bytes: Number of bytes to read first from the end of a large file.

    Attributes:
        figures: Statistics of the latest iterations with actions, or ``None`` if there are none.
        written_s: Time of the last write to the file, in seconds since 1970.
        problem: Reason why the file cannot be read; empty if it is readable.
    """

    def __init__(self, path: Path, kept: int, tail_bytes: int = TAIL_BYTES) -> None:
        self.path = path
        self._tail_bytes = tail_bytes
        self._kept = kept
        self._reset()

    def _reset(self) -> None:
        self.figures: RankFigures | None = None
        self.written_s = 0.0
        self.problem = ""
        self._identity: tuple[int, int] | None = None
        self._size = 0
        self._index = FileIndex(self.path)

    @property
    def header(self) -> TraceHeader | None:
        """Header of the trace file, or ``None`` if it has not been read yet."""
        return self._index.header

    def refresh(self) -> bool:
        """Reads new data from the file, and returns whether there was any."""
        try:
            status = self.path.stat()
        except OSError:
            return False  # A restarted job has just renamed the folder.
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or status.st_size < self._size:
            self._reset()
            self._identity = identity
        if status.st_size == self._size or self.problem:
            return False
        self._size, self.written_s = status.st_size, status.st_mtime
        try:
            if not self._index.header and self._size > self._tail_bytes:
                self._skip()
            self._index.read_on(self._size, is_growing=True)
            blocks = [b for b in self._index.blocks if b.is_whole and not b.marker.is_late]
            self._index.blocks.clear()
            self._take(blocks)
        except (OSError, TraceError) as error:
            self.problem = str(error)
        return True

    def _skip(self) -> None:
        """Reads the header of a large file, and then skips to an iteration near the end."""
        with open_file(self.path) as file:
            header = parse_line(file.readline(), f"{self.path}:1")
            tail_bytes = self._tail_bytes
            while tail_bytes < self._size and isinstance(header, TraceHeader):
                file.seek(self._size - tail_bytes)
                offset = file.read(tail_bytes).find(b'\n{"begin_iteration"')
                if offset >= 0:
                    self._index.header = header
                    self._index.offset = self._size - tail_bytes + offset + 1
                    return
                tail_bytes *= 4

    def _take(self, blocks: list[Block]) -> None:
        if self.header is None or not blocks:
            return
        table = read_blocks(self._index, blocks[-self._kept :])
        header = self.header
        counts = {b.marker.iteration: slices_of(header, b.marker) for b in blocks}
        frozen = {b.marker.iteration: frozen_chunks_of(header, b.marker) for b in reversed(blocks)}
        new = rank_figures(
            table,
            header.num_chunks,
            counts.__getitem__,
            device=header.device,
            frozen=frozen.__getitem__,
        )
        new = _rows(new, np.flatnonzero(new.num_actions))
        if self.figures is not None:
            old = _rows(self.figures, ~np.isin(self.figures.iterations, new.iterations))
            new = RankFigures(
                *(np.concatenate([getattr(t, n) for t in (old, new)]) for n in _NAMES)
            )
        if len(new.iterations):
            self.figures = _rows(new, np.argsort(new.iterations, kind="stable")[-self._kept :])


_NAMES = tuple(field.name for field in fields(RankFigures))


def _rows(figures: RankFigures, rows: Ints | Mask) -> RankFigures:
    """Selects the statistics of the iterations in ``rows``, which are indices or a mask."""
    return RankFigures(*(getattr(figures, name)[rows] for name in _NAMES))


def _parts_of_steps(tails: Mapping[int, RankTail]) -> tuple[dict[int, Any], list[float]]:
    """Returns the fractions of the step time during which each rank computes and waits.

    Returns:
        Dict from rank to the fractions of the step time during which it computes (``busy``) and
        waits (``waits``), and a list of the step times in ms. The fractions are medians over the
        latest iterations that all ranks of the pipeline recorded.
    """
    shifts: dict[str, int] = {}
    headers: list[TraceHeader] = []
    figures: list[RankFigures] = []
    for _, tail in sorted(tails.items()):
        header, latest = tail.header, tail.figures
        if not header or not latest or header.num_chunks != (headers or [header])[0].num_chunks:
            continue
        clock = header.clock or header.host
        shift_ns = shifts.setdefault(clock, header.unix_ns - header.monotonic_ns)
        headers.append(header)
        figures.append(
            replace(latest, start_ns=latest.start_ns + shift_ns, end_ns=latest.end_ns + shift_ns)
        )
    if not figures:
        return {}, []
    fractions: dict[int, Any] = {}
    steps_ms: list[float] = []
    run = stack_figures(figures, headers)
    for pipeline in run.pipelines:
        rows = np.flatnonzero((run.num_actions[:, pipeline] > 0).all(axis=1))[-LOOKED_AT:]
        rows = rows[run.step_ns[rows, pipeline[0]] > 0]
        for column in pipeline if len(rows) else ():
            length = run.step_ns[rows, column]
            waits = np.median(run.wait_ns[rows, column] / length[:, None], axis=0).tolist()
            fractions[int(run.ranks[column])] = {
                "busy": float(np.median(run.busy_ns[rows, column] / length)),
                "waits": {c: part for c, part in zip(WAIT_CAUSES, waits, strict=True) if part > 0},
            }
            steps_ms += (length / 1e6).tolist()
    return fractions, steps_ms


def _rank(
    folder: Path, rank: int, tail: RankTail | None, parts: Mapping[str, Any], slow: float | None
) -> LiveRank:
    if tail is None or tail.header is None:
        return LiveRank(rank=rank, problem="" if tail is None else tail.problem)
    header = tail.header
    now = read_now(folder, rank)
    figures = tail.figures
    ages = [max(0.0, time.time() - tail.written_s)] + ([] if now is None else [now.age_s()])
    return LiveRank(
        rank=rank,
        header=header,
        now=now,
        age_s=min(ages),
        is_gone=_is_gone(header, min(ages)),
        iteration=0 if figures is None else int(figures.iterations[-1]),
        held_bytes=0 if figures is None else int(figures.peak_in_flight_bytes[-1]),
        **parts,
        compute_ms=None
        if figures is None
        else float(np.median(figures.work_ns[-LOOKED_AT:])) / 1e6,
        slow=slow,
        problem=tail.problem,
    )


def _is_gone(header: TraceHeader, age_s: float) -> bool:
    if age_s < SILENT_S / 2 or header.host != socket.gethostname():
        # The rank has just reported, or runs on another machine, whose processes are not in /proc.
        return False
    return not os.path.exists(f"/proc/{header.pid}")


def _state(ranks: Sequence[LiveRank], progress: ProgressTail) -> tuple[str, str]:
    started = [rank for rank in ranks if rank.header is not None]
    if progress.ended:
        return "ended", progress.ended
    if not started:
        return ("running", "no traces") if progress.records else ("waiting", "no traces yet")
    if all(rank.is_ended for rank in started):
        return "ended", ""
    gone = [rank.rank for rank in started if rank.is_gone and not rank.is_ended]
    if gone:
        return "killed", f"the process of {_ranks(gone)} no longer exists"
    silent = [
        rank.rank
        for rank in started
        if (rank.age_s or 0.0) > (LONG_S if rank.now is None else SILENT_S) and not rank.is_ended
    ]
    if len(silent) == len(started):
        return "silent", "no rank has reported recently; the ranks may have been stopped or killed"
    return "running", f"no recent report from {_ranks(silent)}" if silent else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {describe_numbers(ranks)}"
