"""A run as it is at this moment, or as it was when it ended: what ``top`` shows.

Everything comes out of files: the spans of the latest iterations, what each rank says that it does
(``live_state``) and how far the trainer is. None of them has to be there. Times of several machines
are compared by their time of day, which is enough to look on; ``read`` does it well.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.event import TraceHeader
from megatron.adaptive.trace.figures import WAIT_CAUSES
from megatron.adaptive.trace.live_files import RankIteration, RankTail
from megatron.adaptive.trace.live_state import ENDED, Now, read_now
from megatron.adaptive.trace.locate import TRACES, latest_run
from megatron.adaptive.trace.progress import PROGRESS_NAME, ProgressTail, progress_file
from megatron.adaptive.trace.read import describe_numbers, trace_files

__all__ = ["LiveRank", "LiveRun", "Slowness", "Snapshot", "find_live", "slow_ranks"]

LOOKED_AT = 8
"""Figures are medians over so many iterations."""

SURE = 4
"""Iterations of which every one has to say that a rank is slow."""

OF_REPLICAS, OF_STAGES, OF_BEFORE = 1.15, 1.4, 1.25
"""From these factors on a rank stands out: among the ranks that do the same work, among the stages,
whose work differs by some design, and against its own past."""

SILENT_S = 5.0
"""Ranks say what they do twice a second; after so long they hang in the kernel, or are gone."""

LONG_S = 60.0
"""The same for a rank that only writes its spans, at the end of each iteration."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """A rank computes longer than it should.

    Attributes:
        factor: how much longer.
        than: what it is compared with: ``replicas``, ``stages`` or ``before``.
    """

    factor: float
    than: str


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
        figures: of that iteration.
        busy: part of the step in which it works, ``None`` where that is not known.
        waits: part of the step, by cause.
        compute_ms: what its actions of an iteration take.
        slowness: where it stands out.
        problem: why its file cannot be read, empty if it can.
    """

    rank: int
    header: TraceHeader | None = None
    now: Now | None = None
    age_s: float | None = None
    is_gone: bool = False
    iteration: int = 0
    figures: RankIteration | None = None
    busy: float | None = None
    waits: Mapping[str, float] = field(default_factory=dict)
    compute_ms: float | None = None
    slowness: Slowness | None = None
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
        iteration: the latest that anything tells of, 0 for none.
        total_iterations: of the whole training, 0 if unknown.
        step_ms: median time of an iteration, of the pipeline alone where no progress is told.
        progress: lines of the trainer, ascending.
        bubble: idle part of the step, mean over the ranks.
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

    @property
    def header(self) -> TraceHeader | None:
        """Any rank's: run, schedule and shape are the same in all."""
        return next((rank.header for rank in self.ranks if rank.header is not None), None)

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


def find_live(given: Path | None, *, base: Path | None = None) -> Path:
    """The folder of a run that the user means; its traces need not be there yet.

    Args:
        given: the run's folder or that of its traces; ``None`` for ``runs/latest``.
        base: where to look instead of the current directory.

    Raises:
        TraceError: there is no such folder.
    """
    if given is None:
        latest = latest_run(Path() if base is None else base)
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
        folder = next(
            (f for f in (self._folder / TRACES, self._folder) if _holds_anything(f)), self._folder
        )
        files = trace_files(folder)
        kept = min(32, max(LOOKED_AT, 4096 // max(1, len(files))))
        for rank, path in files.items():
            if rank not in self._tails or self._tails[rank].path != path:
                self._tails[rank] = RankTail(path, kept)
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
        steps = _steps(self._tails)
        slow = slow_ranks(
            {r: t.header for r, t in self._tails.items() if t.header is not None},
            {r: [i.compute_ns for _, i in _ordered(t)] for r, t in self._tails.items()},
        )
        ranks = [
            _rank(folder, rank, self._tails.get(rank), steps, slow.get(rank))
            for rank in range(max(world, *(r + 1 for r in self._tails), 0, 0))
        ]
        state, detail = _state(ranks, self._progress)
        told = self._progress.records
        busy = [rank.busy for rank in ranks if rank.busy is not None]
        return Snapshot(
            folder=folder,
            ranks=ranks,
            state=state,
            detail=detail,
            age_s=min((r.age_s for r in ranks if r.age_s is not None), default=None),
            iteration=max(
                [told[-1]["iteration"] if told else 0]
                + [max(r.iteration, r.now.iteration if r.now else 0) for r in ranks]
            ),
            total_iterations=self._progress.total_iterations,
            step_ms=_step_ms(told, steps),
            progress=tuple(told),
            bubble=1 - statistics.fmean(busy) if busy else None,
        )


def slow_ranks(
    headers: Mapping[int, TraceHeader], compute_ns: Mapping[int, Sequence[float]]
) -> dict[int, Slowness]:
    """Ranks that compute longer than they should, by a rule of thumb.

    A rank is held against those with the same work (its stage's other replicas), without any
    against the other stages, and at last against its own past.

    Args:
        headers: by global rank.
        compute_ns: by global rank, of successive iterations, ascending.
    """
    recent = {
        rank: list(times)[-LOOKED_AT:] for rank, times in compute_ns.items() if rank in headers
    }
    middle = {r: statistics.median(times) for r, times in recent.items() if len(times) >= SURE}
    stages: dict[int, dict[int, float]] = {}
    for rank, value in middle.items():
        stages.setdefault(headers[rank].pp_rank, {})[rank] = value
    found = {}
    for rank, mine in middle.items():
        stage = headers[rank].pp_rank
        same = [value for other, value in stages[stage].items() if other != rank]
        if same:
            compared = [("replicas", OF_REPLICAS, same)]
        else:
            past = list(compute_ns[rank])[: -2 * LOOKED_AT]
            others = [value for other, value in middle.items() if other != rank]
            compared = [("before", OF_BEFORE, past if len(past) >= LOOKED_AT else [])]
            compared += [("stages", OF_STAGES, others if len(others) > 1 else [])]
        for than, limit, values in compared:
            usual = statistics.median(values) if values else 0.0
            if usual and min(recent[rank][-SURE:]) > limit * usual:
                found[rank] = Slowness(mine / usual, than)
                break
    return found


def _ordered(tail: RankTail) -> list[tuple[int, RankIteration]]:
    return sorted(tail.iterations.items())


@dataclass(frozen=True, slots=True)
class _Step:
    start_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


Steps = dict[tuple[int, tuple[int, int]], _Step]


def _steps(tails: Mapping[int, RankTail]) -> Steps:
    """The steps of each pipeline by iteration and its position among the pipelines."""
    shifts: dict[str, int] = {}
    pipelines: dict[tuple[int, int], list[tuple[int, RankTail]]] = {}
    for tail in tails.values():
        header = tail.header
        if header is not None and tail.iterations:
            clock = header.clock or header.host
            shift_ns = shifts.setdefault(clock, header.unix_ns - header.monotonic_ns)
            place = (header.dp_rank, header.tp_rank)
            pipelines.setdefault(place, []).append((shift_ns, tail))
    steps: Steps = {}
    for place, members in pipelines.items():
        common = set.intersection(*(set(tail.iterations) for _, tail in members))
        for iteration in sorted(common)[-LOOKED_AT:]:
            found = [(shift_ns, tail.iterations[iteration]) for shift_ns, tail in members]
            steps[iteration, place] = _Step(
                min(shift_ns + each.start_ns for shift_ns, each in found),
                max(shift_ns + each.end_ns for shift_ns, each in found),
            )
    return steps


def _step_ms(told: Sequence[Mapping[str, Any]], steps: Steps) -> float | None:
    values = [line["step_ms"] for line in told[-LOOKED_AT:] if line.get("step_ms") is not None]
    values = values or [step.length_ns / 1e6 for step in steps.values()]
    return statistics.median(values) if values else None


def _rank(
    folder: Path, rank: int, tail: RankTail | None, steps: Steps, slowness: Slowness | None
) -> LiveRank:
    if tail is None or tail.header is None:
        return LiveRank(rank=rank, problem="" if tail is None else tail.problem)
    header, now = tail.header, read_now(folder, rank)
    ages = [max(0.0, time.time() - tail.written_s)] + ([] if now is None else [now.age_s()])
    iterations = _ordered(tail)
    parts = []
    for iteration, figures in iterations:
        step = steps.get((iteration, (header.dp_rank, header.tp_rank)))
        if step is not None and step.length_ns > 0:
            parts.append((figures, step.length_ns))
    waits = {
        cause: statistics.median(figures.wait_ns[place] / length for figures, length in parts)
        for place, cause in enumerate(WAIT_CAUSES)
        if parts
    }
    recent = [figures.compute_ns for _, figures in iterations[-LOOKED_AT:]]
    return LiveRank(
        rank=rank,
        header=header,
        now=now,
        age_s=min(ages),
        is_gone=_is_gone(header, min(ages)),
        iteration=iterations[-1][0] if iterations else 0,
        figures=iterations[-1][1] if iterations else None,
        busy=statistics.median(f.busy_ns / length for f, length in parts) if parts else None,
        waits={cause: part for cause, part in waits.items() if part > 0},
        compute_ms=statistics.median(recent) / 1e6 if recent else None,
        slowness=slowness,
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
    silent = [rank.rank for rank in started if _is_silent(rank)]
    if len(silent) == len(started):
        return "silent", "no word of any rank; stopped, or killed on another machine?"
    return "running", f"no word of {_ranks(silent)}" if silent else ""


def _is_silent(rank: LiveRank) -> bool:
    limit_s = LONG_S if rank.now is None else SILENT_S
    return rank.age_s is not None and rank.age_s > limit_s and not rank.is_ended


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {describe_numbers(ranks)}"


def _holds_anything(folder: Path) -> bool:
    return (folder / PROGRESS_NAME).exists() or bool(trace_files(folder))
