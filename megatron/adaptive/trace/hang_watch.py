"""Watches this machine's ranks from a separate process, and reports the rank that blocks the job.

The first rank on a machine starts ``python -I -S hang_watch.py FOLDER`` (``engine/hang_guard.py``).
This process imports only the standard library to start fast, and works even if no rank responds::

    rank 0   a thread, each second ──> now_rank_00000.json ──┐
    rank 1   the same ───────────────> now_rank_00001.json ──┼─> this process: does nothing move?
    /proc    state, wchan, CPU time, bytes ──────────────────┤      └─> stacks: py-spy, else a
    other machines, by the job's store ──> machine_N.json ───┘          signal to faulthandler

The culprit is the rank that waits for no other rank. It may be stopped, blocked in a system call,
holding the interpreter lock (GIL), reading data, or computing before a collective. If all ranks
wait, a message was lost or there is a deadlock. This process exits when its parent exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

LEAST_S = 30.0
STEPS = 10.0
"""Default of ``--hang-after-s`` as a multiple of the median step time, but at least 30 s."""
_LOOK_S = 1.0
_PATIENCE = 10.0
"""Time that ranks may compute without progress between steps, as a multiple of the hang limit."""
_BUSY = (0.05, 0.5, float(1 << 17))
"""Minimum usage per second of a working rank: processor time, processor time plus time in the
run queue (both in seconds), and bytes read or written. Monitoring threads alone use less."""
_STALE_S = 6.0
"""Age in seconds above which a rank's status file is outdated. Ranks write it every second."""
_OTHERS_S = 11.0
"""Time in seconds to wait for the hang detectors of other machines to report the same hang."""
_SILENT_S = 20.0
"""Time in seconds without a report after which another machine's hang detector counts as lost."""

JOB_FILE, _ENDED = "job.json", "ended"

_WAITING = re.compile(
    r"torch/distributed/|adaptive/transport/|engine/agreement|decision_channel|engine/stop\.py"
    r"|p2p_communication|gradients?_reduce|param_and_grad_buffer"
)
_READING = re.compile(r"adaptive/data/|core/datasets/|torch/utils/data/|data_samplers|/datasets?/")
_SAVING = re.compile(
    r"adaptive/(modules/)?checkpoint|dist_checkpointing|torch/serialization|/checkpointing"
)
_LOCKS = re.compile(r"/threading\.py|acquire\(|\.join\(|with \S*lock\b|flock\(", re.I)
_LOCK_CODE = re.compile(r"/(threading|queue)\.py")
_DEVICE = re.compile(r"torch/cuda/|synchronize\(|\.item\(\)|\.cpu\(\)")
_FAULT = re.compile(r'^ *File "(.+)", line (\d+) in (.+)$')
_SPY = re.compile(r"^ +(\S+) \((.+):(\d+)\)$")
_KINDS = {"F": "the forward", "B": "the backward", "W": "the weight gradient"}


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """Describes the state of one rank as seen from outside of its process.

    Attributes:
        rank: Global rank.
        name: Name of the rank in messages, including its machine.
        pid: Process ID on the rank's machine.
        now: Latest status report of the rank's monitoring thread; empty if there is none.
        age_s: Age of the latest status report in seconds.
        state: Letter of the process state (proc(5)), ``X`` if it has exited; empty if unknown.
        wchan: Kernel function in which the main thread sleeps, from /proc; empty if unknown.
        frames: (File, line, function) of each stack frame of the main thread, innermost first.
        line: Line of source code that the innermost frame is executing.
        stack: Stacks of all threads, as printed by py-spy or faulthandler.
    """

    rank: int
    name: str
    pid: int = 0
    now: Mapping[str, Any] = field(default_factory=dict)
    age_s: float = 0.0
    state: str = "S"
    wchan: str = ""
    frames: Sequence[Sequence[Any]] = ()
    line: str = ""
    stack: str = ""

    @property
    def doing(self) -> str:
        """Text that names the rank's current action, with the microbatch, chunk and iteration."""
        now = self.now
        doing = str(now.get("doing", ""))
        when = f"in iteration {n}" if (n := now.get("iteration")) else "before the first iteration"
        if doing in _KINDS:
            item = ".".join(str(now[name]) for name in ("microbatch", "slice") if name in now)
            suffix = f" of microbatch {item}" if item else ""
            return f"{_KINDS[doing]}{suffix} (chunk {now.get('chunk', 0)}) {when}"
        return f"{doing or 'none'} {when}"

    @property
    def place(self) -> str:
        """Location of the main thread in the code, outside of ``threading`` and ``queue``."""
        frames = [frame for frame in self.frames if not _LOCK_CODE.search(str(frame[0]))]
        if not frames:
            return f"in {self.wchan}" if self.wchan not in ("", "0") else "at an unknown location"
        file, line, function = frames[0]
        return f"at {'/'.join(Path(str(file)).parts[-2:])}:{line} in {function}"

    @property
    def needs(self) -> Sequence[Sequence[Any]]:
        """Messages that the rank waits for, as (sender, kind, chunk, action index, microbatch)."""
        return self.now.get("needs", ()) if self.now.get("doing") == "wait" else ()

    def is_in(self, pattern: re.Pattern[str], depth: int = 12) -> bool:
        """Returns whether ``pattern`` matches ``line`` or a file in the innermost frames."""
        files = [str(frame[0]) for frame in self.frames[:depth]]
        return any(pattern.search(text) for text in (*files, self.line))

    @property
    def collectives(self) -> Mapping[str, Sequence[Any]]:
        """Maps the name of each process group to (number of collectives started, member ranks)."""
        collectives: Mapping[str, Sequence[Any]] = self.now.get("collectives", {})
        return collectives

    @property
    def waits(self) -> bool:
        """Whether the rank waits for other ranks, according to its stack or its latest report."""
        if not self.frames:
            return self.now.get("doing") == "wait"
        return self.is_in(_WAITING, 4) or (".wait(" in self.line and not self.is_in(_LOCKS, 1))

    def has_done(self, kind: str, chunk: int, turn: int, step: int) -> bool:
        """Returns whether the rank has finished action number ``turn`` of ``kind`` on ``chunk``."""
        own_step = int(self.now.get("step", -1))
        done = self.now.get("finished", {}).get(f"{kind}{chunk}", 0)
        return own_step > step or (own_step == step and done > turn)


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Describes which ranks block a job, the cause, and advice for the user.

    Attributes:
        ranks: Global ranks that block the job; empty if they could not be determined.
        cause: One of ``ended``, ``stopped``, ``file system``, ``interpreter lock``,
            ``silent machine``, ``data reader``, ``lock``, ``device``, ``collective``, ``code``,
            ``network``, ``deadlock``.
        text: Sentence that names the ranks, their state and the code that they are running.
        advice: Instruction for the user, such as a command that resolves the hang.
    """

    ranks: tuple[int, ...]
    cause: str
    text: str
    advice: str


def find_culprit(ranks: Sequence[RankEvidence]) -> Culprit:
    """Determines which ranks block a job and why, from the evidence about all of its ranks."""
    for symptom in _SYMPTOMS:
        if matching := [rank for rank in ranks if symptom.applies(rank)]:
            first = matching[0]
            state = f"{_names(matching)} {symptom.text}"
            return Culprit(
                ranks=tuple(rank.rank for rank in matching),
                cause=symptom.cause,
                text=f"{state} (last action: {first.doing}), {first.place}",
                advice=symptom.advice.format(pid=first.pid),
            )
    edges = _waits_for(ranks)
    free = [rank for rank in ranks if not rank.waits and (rank.now or rank.frames)]
    if free:
        return _blame_free_rank(
            max(free, key=lambda rank: (_ahead_of(rank, ranks), _waiters(rank.rank, edges))), ranks
        )
    by_rank = {rank.rank: rank for rank in ranks}
    for rank in ranks:
        for sender, kind, chunk, turn, item in rank.needs:
            peer = by_rank.get(sender)
            if peer and peer.has_done(kind, chunk, turn, int(rank.now.get("step", 0))):
                return Culprit(
                    ranks=(sender, rank.rank),
                    cause="network",
                    text=f"{rank.name} waits for the result of {_KINDS[kind]} of microbatch "
                    f"{item}, which {peer.name} has sent, so the message was lost",
                    advice="check the network between the two ranks (cable, firewall, interface)",
                )
    circle = _circle(edges)
    if circle and any(by_rank[member].needs for member in circle):
        waits = "; ".join(f"rank {member} waits for {_needs(by_rank[member])}" for member in circle)
        return Culprit(
            ranks=tuple(sorted(circle)),
            cause="deadlock",
            text=f"{_names([by_rank[member] for member in circle])} wait for each other: {waits}",
            advice="the ranks run their actions in conflicting orders; check that all ranks use "
            "the same --schedule-file, or use another --pipeline-schedule",
        )
    behind = [waiting for waiting, others in edges.items() if not others]
    return Culprit(
        ranks=tuple(behind),
        cause="collective",
        text="all ranks wait for other ranks: "
        + "; ".join(f"{rank.name} {rank.place}" for rank in ranks[:4]),
        advice="all ranks have entered a collective that does not finish; check the GPUs and the "
        "network between the ranks",
    )


class _Symptom(NamedTuple):
    """Describes a state of a rank that blocks the job regardless of the other ranks."""

    cause: str
    applies: Callable[[RankEvidence], bool]
    text: str
    advice: str


_SYMPTOMS = (
    _Symptom("ended", lambda rank: rank.state in ("X", "Z"), "exited", "see its error above"),
    _Symptom(
        "stopped",
        lambda rank: rank.state in ("T", "t"),
        "is stopped (by a signal or a debugger)",
        "run kill -CONT {pid} to resume the process",
    ),
    _Symptom(
        "file system",
        lambda rank: rank.state == "D",
        "is blocked in a system call for a disk, a file system or the GPU driver",
        "check disks, mounts and the GPU (dmesg); the process cannot be killed during the call",
    ),
    _Symptom(
        "interpreter lock",
        lambda rank: rank.state in ("R", "S") and bool(rank.now) and rank.age_s > _STALE_S,
        "holds the interpreter lock (GIL) in C code, so no other Python thread of its process runs",
        "change the C code that the rank is running, so that it releases the lock while it waits",
    ),
    _Symptom(
        "silent machine",
        lambda rank: not rank.state,
        "does not report, and neither does the hang detector on its machine",
        "check the machine and its network connection",
    ),
)


def _blame_free_rank(rank: RankEvidence, ranks: Sequence[RankEvidence]) -> Culprit:
    """Determines why ``rank`` blocks the job, given that it waits for no other rank."""
    missed = next(
        (
            f", while other ranks wait in collective {max(waiting_in)} of the group of ranks "
            f"{_numbers(members)}, which this rank has not entered"
            for name, (begun, members) in rank.collectives.items()
            if (waiting_in := _ahead(ranks, name, begun))
        ),
        "",
    )
    if rank.is_in(_READING) or rank.now.get("doing") == "data":
        cause = "data reader"
        activity = "reads data"
        advice = "check the disk that stores the data, and the data reader's workers"
    elif rank.is_in(_SAVING) or rank.now.get("doing") == "checkpoint":
        cause = "file system"
        activity = "reads or writes a checkpoint"
        advice = "check the disk that stores the checkpoints"
    elif rank.is_in(_LOCKS, 3):
        cause = "lock"
        activity = "waits for a lock or thread"
        advice = "find the thread that holds the lock in the file with all stacks"
    elif rank.is_in(_DEVICE, 2):
        cause = "device"
        activity = "waits for its GPU"
        advice = "check the GPU with nvidia-smi and dmesg"
    else:
        cause = "collective" if missed else "code"
        activity = "runs other code" if missed else "is not waiting for any other rank"
        advice = "check the code that the rank is running"
    source = f" ({rank.line})" if rank.line else ""
    return Culprit(
        ranks=(rank.rank,),
        cause=cause,
        text=f"{rank.name} {activity} (action: {rank.doing}), {rank.place}{source}{missed}",
        advice=advice,
    )


def _ahead_of(candidate: RankEvidence, ranks: Iterable[RankEvidence]) -> int:
    """Returns the number of ranks that have started more collectives than ``candidate``.

    A rank counts if it is ahead in at least one process group and behind in none. If background
    threads wait for each other, only these counts show which rank has not entered a collective.
    """

    def is_behind(rank: RankEvidence, other: RankEvidence) -> bool:
        others = other.collectives
        return any(
            others.get(name, (begun,))[0] > begun for name, (begun, _) in rank.collectives.items()
        )

    return sum(is_behind(candidate, other) and not is_behind(other, candidate) for other in ranks)


def _ahead(ranks: Iterable[RankEvidence], name: str, begun: int) -> list[int]:
    """Returns the indices above ``begun`` at which ranks wait in a collective of group ``name``."""
    waited_in = (rank.collectives.get(name, (0,))[0] for rank in ranks if rank.waits)
    return [number for number in waited_in if number > begun]


def _waits_for(ranks: Sequence[RankEvidence]) -> dict[int, set[int]]:
    """Maps each rank to the ranks it waits for: senders, or members late for a collective."""
    by_rank = {rank.rank: rank for rank in ranks}
    edges: dict[int, set[int]] = {}
    for rank in ranks:
        edges[rank.rank] = blocking = set()
        if not rank.waits:
            continue
        if rank.needs:
            step = int(rank.now.get("step", 0))
            for peer, kind, chunk, turn, _ in rank.needs:
                if peer not in by_rank or not by_rank[peer].has_done(kind, chunk, turn, step):
                    blocking.add(peer)
            continue
        for name, (begun, members) in rank.collectives.items():
            for peer in members:
                others = by_rank[peer].collectives if peer in by_rank else {}
                if others.get(name, (begun,))[0] < begun:
                    blocking.add(peer)
    return edges


def _waiters(rank: int, edges: Mapping[int, set[int]]) -> int:
    """Returns the number of ranks that wait for ``rank``, even indirectly, including ``rank``."""
    waiting = {rank}
    while more := {other for other, peers in edges.items() if peers & waiting} - waiting:
        waiting |= more
    return len(waiting)


def _circle(edges: Mapping[int, set[int]]) -> list[int]:
    """Returns ranks that wait for each other in a cycle, or an empty list if there is no cycle."""
    for start in edges:
        path = [start]
        while others := sorted(edges.get(path[-1], ())):
            if others[0] in path:
                return path[path.index(others[0]) :]
            path.append(others[0])
    return []


def _needs(rank: RankEvidence) -> str:
    return " or ".join(
        f"{_KINDS[kind]} of microbatch {item} of rank {peer}"
        for peer, kind, _, _, item in rank.needs
    )


def _names(ranks: Sequence[RankEvidence]) -> str:
    return " and ".join(rank.name for rank in ranks)


def _numbers(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


class Stillness:
    """Measures for how long no rank on this machine has made progress.

    Within a step, only a change of action or a new collective counts as progress. Between steps, in
    evaluations, in checkpoints and before the third iteration (imports, compilation), reads and
    writes also count, and computing counts for up to ten times the hang limit.

    Args:
        limit_s: Value of ``--hang-after-s`` in seconds, or ``None`` for the default limit.

    Attributes:
        paused: Numbers of collectives started in each process group, if all ranks are idle between
            two steps of a user's own training loop; otherwise ``None``.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self.paused: dict[str, int] | None = None
        self._seen: Any = None
        self._moved_s = self._computed_s = 0.0
        self._iteration = (0, 0.0)
        self._steps_s: deque[float] = deque(maxlen=51)

    @property
    def limit_s(self) -> float:
        """Time in seconds without progress after which a hang is reported (hang limit)."""
        if self._limit_s is not None:
            return self._limit_s
        steps = sorted(self._steps_s)
        return max(LEAST_S, STEPS * (steps[len(steps) // 2] if steps else 0.0))

    def restart(self, now_s: float) -> None:
        """Resets the time without progress to 0, for example after the machine was suspended."""
        self._moved_s = self._computed_s = now_s

    def look(
        self,
        nows: Mapping[int, Mapping[str, Any]],
        now_s: float,
        *,
        computes: bool = False,
        transfers: bool = False,
    ) -> float:
        """Compares the ranks' status reports with those of the previous call.

        Args:
            nows: Status reports, keyed by global rank.
            now_s: Current time in seconds on a monotonic clock.
            computes: Whether a rank has computed on a processor since the previous call.
            transfers: Whether a rank has read or written bytes since the previous call.

        Returns:
            Time in seconds since a rank last made progress.
        """
        is_strict = len(self._steps_s) > 1 and all(now.get("in_step") for now in nows.values())
        seen = {
            rank: [now.get(name) for name in _MOVES]
            + [begun for begun, _ in now.get("collectives", {}).values()]
            for rank, now in nows.items()
        }
        if seen != self._seen or (transfers and not is_strict):
            self.restart(now_s)
        elif computes:
            self._computed_s = now_s
        self._seen = seen
        self.paused = _paused(nows.values())
        iteration = max((int(now.get("iteration", 0)) for now in nows.values()), default=0)
        before, since_s = self._iteration
        if iteration != before:
            if before and iteration > before:
                self._steps_s.append((now_s - since_s) / (iteration - before))
            self._iteration = (iteration, now_s)
        still_s = now_s - self._moved_s
        if is_strict or still_s > _PATIENCE * self.limit_s:
            return still_s
        return now_s - self._computed_s


def _paused(nows: Collection[Mapping[str, Any]]) -> dict[str, int] | None:
    if not all(now.get("may_pause") and not (now["in_step"] or now["doing"]) for now in nows):
        return None
    return agreed(
        [{name: begun for name, (begun, _) in now["collectives"].items()} for now in nows]
    )


def agreed(counts: Iterable[Mapping[str, int] | None]) -> dict[str, int] | None:
    """Returns the number of started collectives of each group, or ``None`` if ``counts`` differ."""
    common: dict[str, int] = {}
    for by_name in counts:
        if by_name is None or any(common.setdefault(name, n) != n for name, n in by_name.items()):
            return None
    return common


_MOVES = ("iteration", "step", "doing", "chunk", "microbatch", "slice", "done", "in_step")
"""Entries of a rank's status report that change when the rank makes progress."""


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name, or ``["X"]`` if ``pid`` has exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def _work(pid: int) -> tuple[float, float, float]:
    """Returns how much of each resource in :data:`_BUSY` the process ``pid`` has used in total."""
    stat = _stat(pid)
    moved = waited_ns = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/io").read_text().split("\n")
        moved = sum(int(line.split()[1]) for line in lines if line[1:5] == "char")
    ticks = sum(map(int, stat[11:13])) if len(stat) > 12 else 0
    used_s = ticks / os.sysconf("SC_CLK_TCK")
    return used_s, used_s + waited_ns / 1e9, moved


def collect_evidence(folder: Path, job: Mapping[str, Any]) -> list[RankEvidence]:
    """Collects evidence about this machine's ranks. This takes several seconds.

    Args:
        folder: Folder in which this machine's ranks write their status reports and stacks.
        job: Contents of ``job.json``: process IDs and names of the ranks, tools and settings.
    """
    pids = {int(rank): int(pid) for rank, pid in job["pids"].items()}
    before = {rank: _stat(pid)[0] for rank, pid in pids.items()}
    files = {rank: folder / f"stack_{rank}.txt" for rank in pids}
    sizes = {rank: file.stat().st_size if file.exists() else 0 for rank, file in files.items()}
    stacks = {rank: _spy(job.get("py_spy"), pid, before[rank]) for rank, pid in pids.items()}
    nows = _read_nows(folder, pids)
    for rank, pid in pids.items():
        # The signal would kill a rank without a handler. Ranks that have reported have one.
        if not stacks[rank] and nows[rank] and before[rank] not in "XZTt":
            with contextlib.suppress(OSError):
                os.kill(pid, int(job["signal"]))
    time.sleep(1.5)
    evidence = []
    for rank, pid in pids.items():
        stack = stacks[rank]
        if not stack:
            with contextlib.suppress(OSError), files[rank].open("rb") as file:
                file.seek(sizes[rank])
                stack = file.read(1 << 20).decode(errors="replace")
        state = _stat(pid)[0]
        wchan = ""
        with contextlib.suppress(OSError):
            wchan = Path(f"/proc/{pid}/wchan").read_text()
        frames = main_frames(stack)
        evidence.append(
            RankEvidence(
                rank=rank,
                name=job["names"][str(rank)],
                pid=pid,
                now=nows[rank],
                age_s=max(0.0, time.time() - nows[rank].get("unix_ns", 0) / 1e9),
                # A healthy process may briefly wait for a disk (D), so D counts only if seen twice.
                state="S" if state == "D" and before[rank] != "D" else state,
                wchan=wchan,
                frames=frames,
                line=_source(frames),
                stack=stack,
            )
        )
    return evidence


def main_frames(stack: str) -> list[tuple[str, int, str]]:
    """Returns the frames of the main thread in ``stack``, from the innermost to the outermost.

    ``py-spy`` marks the main thread, and ``faulthandler`` prints the main thread last.
    """
    threads: list[list[tuple[str, int, str]]] = []
    marked: list[tuple[str, int, str]] | None = None
    process = re.match(r"Process (\d+):", stack)
    # The ID of the main thread equals the process ID, which py-spy prints first.
    main = f"Thread {process[1]} " if process else "MainThread"
    for line in stack.splitlines():
        if "hread" in line and not line.startswith(" "):
            threads.append([])
            if main in line or "MainThread" in line:
                marked = threads[-1]
        elif not threads:
            continue
        elif frame := _FAULT.match(line):
            threads[-1].append((frame[1], int(frame[2]), frame[3]))
        elif (frame := _SPY.match(line)) and frame[2].endswith(".py"):
            threads[-1].append((frame[2], int(frame[3]), frame[1]))
    return marked if marked is not None else threads[-1] if threads else []


def _spy(program: str | None, pid: int, state: str) -> str:
    if program is None or state in "XZ":
        return ""
    # py-spy would pause and then resume the process, but must not resume one that a user stopped.
    mode = ["--nonblocking"] if state in "Tt" else ["--native"]
    try:
        done = subprocess.run(
            [program, "dump", "--full-filenames", *mode, "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=10.0,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _source(frames: Sequence[tuple[str, int, str]]) -> str:
    if not frames:
        return ""
    with contextlib.suppress(OSError, IndexError, UnicodeDecodeError):
        return Path(frames[0][0]).read_text().split("\n")[frames[0][1] - 1].strip()
    return ""


def _read_nows(folder: Path, pids: Mapping[int, int]) -> dict[int, dict[str, Any]]:
    """Returns each rank's latest status report. A report of an earlier process counts as empty."""
    nows: dict[int, dict[str, Any]] = {}
    for rank, pid in pids.items():
        now = _read_json(folder / f"now_rank_{rank:05d}.json")
        nows[rank] = now if now.get("pid") == pid else {}
    return nows


def _read_json(path: Path) -> dict[str, Any]:
    for _ in range(3):  # Try again, because a rank may be writing the file.
        try:
            return dict(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            time.sleep(0.01)
    return {}


def format_page(culprit: Culprit, ranks: Sequence[RankEvidence], still_s: float) -> str:
    """Returns a hang report as text: the culprit, one line per rank, and all stacks."""
    lines = [
        f"No rank made progress for {still_s:.0f} s ({time.strftime('%Y-%m-%d %H:%M:%S')}).",
        f"Cause: {culprit.cause}. {culprit.text}.",
        f"Remedy: {culprit.advice}.",
        "",
        "rank  state  report  action; location",
    ]
    for rank in ranks:
        needs = f"; waits for {_needs(rank)}" if rank.needs else ""
        begun = " ".join(f"{name}:{count}" for name, (count, _) in rank.collectives.items())
        lines.append(
            f"{rank.rank:4}  {rank.state or '?':5}  {rank.age_s:4.0f} s  {rank.doing}{needs}; "
            f"{rank.place}{f' [{rank.wchan}]' if rank.wchan not in ('', '0') else ''}"
            f"; started collectives of each group: {begun or 'unknown'}"
        )
    for rank in ranks:
        lines += ["", f"--- {rank.name}", rank.stack.rstrip() or "no stack"]
    return "\n".join(lines) + "\n"


class _Watch:
    """Checks this machine's ranks every second until the parent process exits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._job = _read_json(folder / JOB_FILE)
        self._pids = {int(rank): int(pid) for rank, pid in self._job["pids"].items()}
        self._still = Stillness(self._job["after_s"])
        self._work = dict.fromkeys(self._pids, (0.0, 0.0, 0.0))
        self._reported_s: float | None = None
        self._heard: dict[int, tuple[Any, float]] = {}
        self._beat = 0

    def run(self) -> None:
        last_s = time.monotonic()
        self._still.restart(last_s)
        # Use the parent's ID in the job file, because the parent may already have exited.
        while os.getppid() == self._job["parent"]:
            time.sleep(_LOOK_S)
            now_s, elapsed_s = time.monotonic(), time.monotonic() - last_s
            last_s = now_s
            nows = _read_nows(self._folder, self._pids)
            if any(now.get("doing") == _ENDED for now in nows.values()):
                return  # The job has finished, or the rank has already printed an error.
            work = {rank: _work(pid) for rank, pid in self._pids.items()}
            moved = [
                any(
                    after[n] - self._work[r][n] > _BUSY[n] * elapsed_s
                    for r, after in work.items()
                    if n == 2 or not nows[r].get("spins")  # CUDA busy-waits on the CPU.
                )
                for n in range(len(_BUSY))
            ]
            self._work = work
            if elapsed_s > 5 * _LOOK_S:
                # This process (and perhaps the ranks) was suspended, so measure again from now on.
                self._still.restart(now_s)
            still_s = self._still.look(nows, now_s, computes=any(moved[:2]), transfers=moved[2])
            self._decide(still_s, now_s)

    def _decide(self, still_s: float, now_s: float) -> None:
        limit_s = self._still.limit_s
        others = self._others(now_s)
        # A machine that sends evidence has found a hang and waits for the evidence of the others.
        is_asked = any(other.get("ranks") for other in others.values())
        if self._reported_s is not None:
            if still_s < self._reported_s:
                _say(f"hang: ended after at least {self._reported_s:.0f} s; the job continues")
                self._reported_s = None
        elif (
            still_s > (limit_s / 2 if is_asked else limit_s)
            and all(not other or other["still_s"] > limit_s / 2 for other in others.values())
            and agreed([self._still.paused, *(o.get("paused") for o in others.values())]) is None
        ):
            self._report(still_s)
            return
        self._publish(still_s)

    def _publish(self, still_s: float, evidence: Sequence[RankEvidence] = ()) -> None:
        """Writes the time without progress, and ``evidence``, to a file for the other machines."""
        if self._job["machines"] < 2:
            return
        self._beat += 1
        report = {
            "beat": self._beat,
            "still_s": still_s,
            "ranks": [vars(rank) for rank in evidence],
            "paused": self._still.paused,
        }
        path = self._folder / "machine.json"
        path.with_suffix(".part").write_text(json.dumps(report))
        path.with_suffix(".part").replace(path)

    def _others(self, now_s: float) -> dict[int, dict[str, Any]]:
        """Maps each other machine to its latest report, or to an empty one if it is too old."""
        reports = {}
        for machine in {*range(self._job["machines"])} - {self._job["machine"]}:
            report = _read_json(self._folder / f"machine_{machine}.json")
            beat, since_s = self._heard.get(machine, (None, now_s))
            if report.get("beat") != beat:
                since_s = now_s
            self._heard[machine] = (report.get("beat"), since_s)
            reports[machine] = report if now_s - since_s < _SILENT_S else {}
        return reports

    def _report(self, still_s: float) -> None:
        evidence = collect_evidence(self._folder, self._job)
        ranks = list(evidence)
        if self._job["machines"] > 1:
            ranks += self._wait_for_others(still_s, evidence)
        after = _read_nows(self._folder, self._pids)
        if any(
            rank.now.get(name) != after[rank.rank].get(name) for rank in evidence for name in _MOVES
        ):
            return  # The job has made progress while evidence was collected.
        self._reported_s = still_s
        ranks.sort(key=lambda rank: rank.rank)
        culprit = find_culprit(ranks)
        path = Path(self._job["page_folder"]) / (
            f"hang_{time.strftime('%Y%m%d_%H%M%S')}_machine_{self._job['machine']}.txt"
        )
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(format_page(culprit, ranks, still_s))
        ends = self._job["on_hang"] == "end"
        iteration = max(int(rank.now.get("iteration", 0)) for rank in ranks)
        suffix = f" in iteration {iteration}" if iteration else ""
        if self._job["machine"] == 0 or not self._others(time.monotonic()).get(0):
            _say(
                f"hang: no progress for {still_s:.0f} s{suffix}: {culprit.text}; "
                f"{culprit.advice}; stacks of all ranks: {path}"
                f"{'; stopping the job (--on-hang end)' if ends else ''}"
            )
        if ends:
            for pid in self._pids.values():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _wait_for_others(
        self, still_s: float, evidence: Sequence[RankEvidence]
    ) -> list[RankEvidence]:
        """Waits several seconds for evidence from the other machines, and returns it."""
        until_s = time.monotonic() + _OTHERS_S
        reports: dict[int, dict[str, Any]] = {}
        while time.monotonic() < until_s:
            self._publish(still_s, evidence)
            reports = self._others(time.monotonic())
            if all(not other or other["ranks"] for other in reports.values()):
                break
            time.sleep(_LOOK_S)
        self._publish(still_s, evidence)
        heard = {
            fields["rank"]: RankEvidence(**fields)
            for other in reports.values()
            for fields in other.get("ranks", ())
        }
        missing = []
        for key, name in self._job["names"].items():
            rank = int(key)
            if rank not in heard and rank not in self._pids:
                report = reports.get(self._job["machine_of"][key])
                missing.append(RankEvidence(rank=rank, name=name, state="S" if report else ""))
        return [*heard.values(), *missing]


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def main() -> int:
    """Runs the hang detector until the parent process exits, and then deletes ``FOLDER``."""
    folder = Path(sys.argv[1])
    with contextlib.suppress(OSError):
        os.nice(10)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Ignore signals to the whole process group, because this process must exit last.
        signal.signal(number, signal.SIG_IGN)
    try:
        _Watch(folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
