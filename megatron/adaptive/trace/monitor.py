"""A run as it is at this moment, or as it was when it ended: what ``top`` shows.

Everything comes out of files: the spans of the latest iterations, what each rank says that it does
(``live_state``) and how far the trainer is. None of them has to be there. Times of several machines
are compared by their time of day, which is enough to look on; ``read`` does it well.

What was read is never read again. A rank's file may be of any size when it is looked at first: then
only its header and its end are read. Blocks of spans are passed over by what their marker says, and
only whole ones are read.
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
from megatron.adaptive.trace.locate import TRACES, latest_run
from megatron.adaptive.trace.metrics import WAIT_CAUSES, RankFigures, rank_figures, stack_figures
from megatron.adaptive.trace.read import describe_numbers, trace_files
from megatron.adaptive.trace.span_columns import Ints, Mask
from megatron.adaptive.trace.status_files import (
    ENDED,
    PROGRESS_NAME,
    Now,
    ProgressTail,
    progress_file,
    read_now,
)
from megatron.adaptive.trace.trace_format import TraceHeader, parse_line

TAIL_BYTES = 1 << 20
"""So much of a file's end is read at first, more where one iteration is longer."""

LOOKED_AT = 8
"""Figures are medians over so many iterations."""

SILENT_S = 5.0
"""Ranks say what they do twice a second; after so long they hang in the kernel, or are gone."""

LONG_S = 60.0
"""The same for a rank that only writes its spans, at the end of each iteration."""


@dataclass(frozen=True, kw_only=True)
class LiveRank:
    """One rank.

    Attributes:
        rank: global rank.
        header: of its trace, ``None`` where it has none yet.
        now: what it said last, ``None`` if nothing.
        age_s: seconds since it said or wrote something, ``None`` if it never did.
        is_gone: its process has ended.
        iteration: the latest of its trace, 0 for none.
        held_bytes: most activation bytes held in that iteration.
        busy: part of the step in which it works, ``None`` where that is not known.
        waits: part of the step, by cause.
        compute_ms: what its actions of an iteration take.
        slow: how many times as long as it should its work takes by the latest diagnosis, ``None``
            for as long as it should.
        problem: why its file cannot be read, empty if it can.
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
        """Whether it closed its trace in order."""
        return self.now is not None and self.now.doing == ENDED


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        folder: where its traces are, or would be.
        ranks: all of the world, also those without a trace; empty if nothing was written.
        state: ``waiting``, ``running``, ``silent``, ``killed`` or ``ended``.
        detail: more about the state, may be empty.
        age_s: age of the newest word of any rank, ``None`` if there is none.
        iteration: the latest that anything reports, 0 for none.
        total_iterations: of the whole training, 0 if unknown.
        step_ms: median time of an iteration, of the pipeline alone where no progress is reported.
        progress: lines of the trainer, ascending.
        bubble: idle part of the step, mean over the ranks.
        findings: what slows it by its latest diagnosis: ``headline``, ``gain`` and ``do`` each.
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
        """Any rank's: run, schedule and shape are the same in all."""
        return next((rank.header for rank in self.ranks if rank.header is not None), None)

    @property
    def is_begun(self) -> bool:
        """Whether the run has written anything yet."""
        return bool(self.ranks or self.progress or self.total_iterations)

    @property
    def shares_gpus(self) -> bool:
        """Whether times of some rank are slices of a GPU that it shares."""
        return any(rank.header is not None and rank.header.gpu_ranks > 1 for rank in self.ranks)

    def last(self, name: str) -> float | None:
        """A value of the trainer's latest line."""
        value = self.progress[-1].get(name) if self.progress else None
        return float(value) if isinstance(value, int | float) else None

    def left_s(self) -> float | None:
        """Seconds to the last iteration at the pace of the latest ones."""
        some = self.progress[-20:]
        if len(some) < 2 or not self.total_iterations:
            return None
        done = some[-1]["iteration"] - some[0]["iteration"]
        passed_s = (some[-1]["unix_ns"] - some[0]["unix_ns"]) / 1e9
        left = max(0, self.total_iterations - some[-1]["iteration"])
        return float(passed_s / done * left) if done > 0 else None


def find_live(given: Path | None) -> Path:
    """The folder of a run that the user means; its traces need not be there yet.

    Args:
        given: the run's folder or that of its traces; ``None`` for ``runs/latest``.

    Raises:
        TraceError: there is no such folder.
    """
    if given is None:
        latest = latest_run()
        if latest is None:
            raise TraceError("there is no runs/latest here; give the folder of a run or its traces")
        return latest.resolve()  # a later run does not take its place
    if not given.is_dir():
        what = "is no folder" if given.exists() else "does not exist"
        raise TraceError(f"{given} {what}; give the folder of a run or its traces")
    return given


class LiveRun:
    """Follows a run.

    Args:
        folder: of the run or its traces.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[int, RankTail] = {}
        self._progress = ProgressTail(progress_file(folder))

    def refresh(self) -> Snapshot:
        """Read what is new and say how the run is."""
        folder = self._folder / TRACES
        if not ((folder / PROGRESS_NAME).exists() or trace_files(folder)):
            folder = self._folder
        files = trace_files(folder)
        for rank, path in files.items():
            if rank not in self._tails or self._tails[rank].path != path:
                self._tails[rank] = RankTail(path, 2 * LOOKED_AT)
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
    """The trace file of one rank.

    Args:
        path: the file.
        kept: iterations that are kept, the latest.

    Attributes:
        figures: of the latest iterations that have actions, ``None`` before there are any.
        written_s: time of day of its last change.
        problem: why it is not read further, empty if it is.
    """

    def __init__(self, path: Path, kept: int) -> None:
        self.path = path
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
        """The file's header, ``None`` before it was seen."""
        return self._index.header

    def refresh(self) -> bool:
        """Read what is new; returns whether there was anything."""
        try:
            status = self.path.stat()
        except OSError:
            return False  # it is being moved aside
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or status.st_size < self._size:
            self._reset()
            self._identity = identity
        if status.st_size == self._size or self.problem:
            return False
        self._size, self.written_s = status.st_size, status.st_mtime
        try:
            if not self._index.header and self._size > TAIL_BYTES:
                self._skip()
            self._index.read_on(self._size, is_growing=True)
            blocks = [b for b in self._index.blocks if b.is_whole and not b.marker.is_late]
            self._index.blocks.clear()
            self._take(blocks)
        except (OSError, TraceError) as error:
            self.problem = str(error)
        return True

    def _skip(self) -> None:
        """Go from the header of a large file to a marker in its last part."""
        with open_file(self.path) as file:
            header = parse_line(file.readline(), f"{self.path}:1")
            wanted = TAIL_BYTES
            while wanted < self._size and isinstance(header, TraceHeader):
                file.seek(self._size - wanted)
                at = file.read(wanted).find(b'\n{"begin_iteration"')
                if at >= 0:
                    self._index.header = header
                    self._index.offset = self._size - wanted + at + 1
                    return
                wanted *= 4

    def _take(self, blocks: list[Block]) -> None:
        if self.header is None or not blocks:
            return
        table = read_blocks(self._index, blocks[-self._kept :])
        new = rank_figures(table, self.header.num_chunks)
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
    """The figures of some iterations."""
    return RankFigures(*(getattr(figures, name)[rows] for name in _NAMES))


def _parts_of_steps(tails: Mapping[int, RankTail]) -> tuple[dict[int, Any], list[float]]:
    """Parts of the latest steps in which each rank works and waits, medians; the steps' lengths.

    Of the latest iterations that all ranks of a pipeline have done.
    """
    shifts: dict[str, int] = {}
    headers: list[TraceHeader] = []
    figures: list[RankFigures] = []
    for _, tail in sorted(tails.items()):
        header, own = tail.header, tail.figures
        if not header or not own or header.num_chunks != (headers or [header])[0].num_chunks:
            continue
        clock = header.clock or header.host
        shift_ns = shifts.setdefault(clock, header.unix_ns - header.monotonic_ns)
        headers.append(header)
        figures.append(replace(own, start_ns=own.start_ns + shift_ns, end_ns=own.end_ns + shift_ns))
    if not figures:
        return {}, []
    found: dict[int, Any] = {}
    steps_ms: list[float] = []
    run = stack_figures(figures, headers)
    for pipeline in run.pipelines:
        rows = np.flatnonzero((run.num_actions[:, pipeline] > 0).all(axis=1))[-LOOKED_AT:]
        rows = rows[run.step_ns[rows, pipeline[0]] > 0]
        for column in pipeline if len(rows) else ():
            length = run.step_ns[rows, column]
            waits = np.median(run.wait_ns[rows, column] / length[:, None], axis=0).tolist()
            found[int(run.ranks[column])] = {
                "busy": float(np.median(run.busy_ns[rows, column] / length)),
                "waits": {c: part for c, part in zip(WAIT_CAUSES, waits, strict=True) if part > 0},
            }
            steps_ms += (length / 1e6).tolist()
    return found, steps_ms


def _rank(
    folder: Path, rank: int, tail: RankTail | None, parts: Mapping[str, Any], slow: float | None
) -> LiveRank:
    if tail is None or tail.header is None:
        return LiveRank(rank=rank, problem="" if tail is None else tail.problem)
    header, now, figures = tail.header, read_now(folder, rank), tail.figures
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
        return False  # of another machine's processes nothing is known but their silence
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
        return "killed", f"the process of {_ranks(gone)} is gone"
    silent = [
        rank.rank
        for rank in started
        if (rank.age_s or 0.0) > (LONG_S if rank.now is None else SILENT_S) and not rank.is_ended
    ]
    if len(silent) == len(started):
        return "silent", "no word of any rank; stopped, or killed on another machine?"
    return "running", f"no word of {_ranks(silent)}" if silent else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {describe_numbers(ranks)}"
