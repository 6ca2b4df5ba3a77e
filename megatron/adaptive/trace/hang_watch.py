"""Watches the ranks of a machine from a process of its own, and names the one that others wait for.

``python -I -S hang_watch.py FOLDER``, started by a machine's first rank (``engine/hang_guard.py``),
needs only Python's library: it costs milliseconds and little memory. Who hangs is asked for
nothing::

    rank 0   a thread, each second ──> now_rank_00000.json ──┐
    rank 1   the same ───────────────> now_rank_00001.json ──┼─> this process: does nothing move?
    /proc    state, wchan, CPU time, bytes ──────────────────┤      └─> stacks: py-spy, else a
    other machines, by the job's store ──> machine_N.json ───┘          signal to faulthandler

A rank that waits for nobody is the one: stopped, in a system call of a disk, holding the
interpreter's lock, reading data, away from a collective. If all wait, a message that was sent did
not arrive, or the waits form a circle. The process ends with the one that started it.
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
from typing import Any

LEAST_S = 30.0
STEPS = 10.0
"""Without ``--hang-after-s`` a hang is the larger of these: seconds, and median steps."""

_LOOK_S = 1.0
_PATIENCE = 10.0  # limits that a rank outside its steps may compute without another sign of life
_BUSY = (0.05, 0.5, float(1 << 17))
"""Of each second what a rank uses above the threads that look on: processor time, the same with
waits for a processor that others use, and bytes."""
_STALE_S = 6.0  # a rank's thread writes each second
_OTHERS_S = 11.0  # they may find out some seconds later
_WORDLESS_S = 20.0  # silence of another machine's watcher
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
_DEVICE = re.compile(r"torch/cuda/|synchronize\(|\.item\(\)|\.cpu\(\)")
_FAULT = re.compile(r'^ *File "(.+)", line (\d+) in (.+)$')
_SPY = re.compile(r"^ +(\S+) \((.+):(\d+)\)$")
_KINDS = {"F": "the forward", "B": "the backward", "W": "the weight gradient"}


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """Holds what is known of one rank without its help.

    Attributes:
        rank: global rank.
        name: as messages call it.
        pid: process id on its machine.
        now: the last report of its thread; empty if there was none.
        age_s: seconds since that.
        state: letter of proc(5), ``X`` for a process that is gone, empty if its machine is silent.
        wchan: kernel function in which the main thread sleeps, where that can be read.
        frames: file, line and function of the main thread, innermost first.
        line: source text of the innermost frame.
        stack: of all threads, as it was printed.
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
        """Action under way in words."""
        doing, now = str(self.now.get("doing", "")), self.now
        iteration = f"iteration {now['iteration']}" if now.get("iteration") else "the start"
        if doing in _KINDS:
            microbatch = now.get("microbatch", -1)
            of = f" of microbatch {microbatch}" if microbatch >= 0 else ""
            return f"{_KINDS[doing]}{of} (chunk {now.get('chunk', 0)}) in {iteration}"
        return f"{doing or 'between actions'} in {iteration}"

    @property
    def place(self) -> str:
        """Innermost place of the main thread that is neither a lock's nor a queue's code."""
        own = [one for one in self.frames if not re.search(r"/(threading|queue)\.py", str(one[0]))]
        if not own:
            return f"in {self.wchan}" if self.wchan not in ("", "0") else "at an unknown place"
        file, line, function = own[0]
        return f"at {'/'.join(Path(str(file)).parts[-2:])}:{line} in {function}"

    @property
    def needs(self) -> Sequence[Sequence[Any]]:
        """Messages it waits for: sender, kind, chunk and microbatch of the sender's action."""
        return self.now.get("needs", ()) if self.now.get("doing") == "wait" else ()

    def is_in(self, places: re.Pattern[str], depth: int = 12) -> bool:
        """Whether one of the innermost frames, or the source of the first, matches."""
        files = [str(one[0]) for one in self.frames[:depth]]
        return any(places.search(text) for text in (*files, self.line))

    @property
    def collectives(self) -> Mapping[str, Sequence[Any]]:
        """Number of collectives begun and members of each group, by its name."""
        found: Mapping[str, Sequence[Any]] = self.now.get("collectives", {})
        return found

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        if not self.frames:
            return self.now.get("doing") == "wait"
        return self.is_in(_WAITING, 4) or (".wait(" in self.line and not self.is_in(_LOCKS, 1))

    def has_done(self, kind: str, chunk: int, microbatch: int, step: int) -> bool:
        """Whether it finished an action of a step."""
        own = int(self.now.get("step", -1))
        done = self.now.get("finished", {}).get(f"{kind}{chunk}", 0)
        return own > step or (own == step and done > microbatch)


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Names the ranks that others wait for.

    Attributes:
        ranks: they; empty where nobody can be named.
        cause: one of ``ended``, ``stopped``, ``file system``, ``interpreter lock``, ``silent
            machine``, ``data reader``, ``lock``, ``device``, ``collective``, ``code``,
            ``network``, ``deadlock``.
        text: who, where and what, in one sentence.
        advice: what to do.
    """

    ranks: tuple[int, ...]
    cause: str
    text: str
    advice: str


def find_culprit(ranks: Sequence[RankEvidence]) -> Culprit:
    """Returns who keeps a job from going on, from what is known of all its ranks."""
    for cause, is_so, text, advice in _CERTAIN:
        if found := [one for one in ranks if is_so(one)]:
            first = found[0]
            words = f"{_names(found)} {text}, last seen in: {first.doing}, {first.place}"
            return Culprit(
                ranks=tuple(one.rank for one in found),
                cause=cause,
                text=words,
                advice=advice.format(pid=first.pid),
            )
    edges = _waits_for(ranks)
    free = [one for one in ranks if not one.waits and (one.now or one.frames)]
    if free:
        return _of_free(
            max(free, key=lambda one: (_ahead_of(one, ranks), _waiters(one.rank, edges))), ranks
        )
    by_rank = {one.rank: one for one in ranks}
    for one in ranks:
        for sender, kind, chunk, microbatch in one.needs:
            peer = by_rank.get(sender)
            if peer and peer.has_done(kind, chunk, microbatch, int(one.now.get("step", 0))):
                return Culprit(
                    ranks=(sender, one.rank),
                    cause="network",
                    text=f"{one.name} waits for the result of {_KINDS[kind]} of microbatch "
                    f"{microbatch}, which {peer.name} sent: it is lost on the way between them",
                    advice="check the network between the two (cable, firewall, interface)",
                )
    circle = _circle(edges)
    if circle and any(by_rank[rank].needs for rank in circle):
        waits = "; ".join(f"rank {rank} waits for {_needs(by_rank[rank])}" for rank in circle)
        return Culprit(
            ranks=tuple(sorted(circle)),
            cause="deadlock",
            text=f"{_names([by_rank[rank] for rank in circle])} wait for each other: {waits}",
            advice="their orders contradict each other: check that all ranks have the same "
            "--schedule-file, or take another --pipeline-schedule",
        )
    behind = [rank for rank, others in edges.items() if not others]
    return Culprit(
        ranks=tuple(behind),
        cause="collective",
        text="all ranks wait for others; "
        + "; ".join(f"{one.name} {one.place}" for one in ranks[:4]),
        advice="a collective that all have entered does not end: check the network between the "
        "ranks, and the GPUs",
    )


_Certain = tuple[str, Callable[[RankEvidence], bool], str, str]
_CERTAIN: tuple[_Certain, ...] = (
    ("ended", lambda one: one.state in ("X", "Z"), "ended", "look for its error above"),
    (
        "stopped",
        lambda one: one.state in ("T", "t"),
        "is stopped (by a signal or a debugger)",
        "kill -CONT {pid} lets it go on",
    ),
    (
        "file system",
        lambda one: one.state == "D",
        "is in a system call that does not return (a disk or a file system)",
        "check the disk or mount that it uses; such a process cannot be killed before",
    ),
    (
        "interpreter lock",
        lambda one: one.state in ("R", "S") and bool(one.now) and one.age_s > _STALE_S,
        "lets no other Python thread of its process run (C code holds the interpreter's lock)",
        "look at that call; code in C must release the lock (GIL) while it waits",
    ),
    (
        "silent machine",
        lambda one: not one.state,
        "gives no word, nor does its machine",
        "check that machine and the network to it",
    ),
)


def _of_free(one: RankEvidence, ranks: Sequence[RankEvidence]) -> Culprit:
    """Returns what the rank that waits for nobody does instead."""
    missed = next(
        (
            f", while others wait in collective {max(seen)} of the group of ranks "
            f"{_numbers(members)}, which it has not entered"
            for name, (own, members) in one.collectives.items()
            if (seen := _ahead(ranks, name, own))
        ),
        "",
    )
    if one.is_in(_READING) or one.now.get("doing") == "data":
        cause, what, advice = "data reader", "reads data", "check the data's disk or its workers"
    elif one.is_in(_SAVING) or one.now.get("doing") == "checkpoint":
        cause, what = "file system", "reads or writes a checkpoint"
        advice = "check the disk of the checkpoints"
    elif one.is_in(_LOCKS, 3):
        cause, what, advice = "lock", "waits for a lock or thread", "see who holds it on the page"
    elif one.is_in(_DEVICE, 2):
        cause, what, advice = "device", "waits for its GPU", "check it with nvidia-smi and dmesg"
    elif missed:
        cause, what, advice = "collective", "does something else", "look at the code it is in"
    else:
        cause, what, advice = "code", "waits for no rank", "look at the code it is in"
    source = f" ({one.line})" if one.line else ""
    return Culprit(
        ranks=(one.rank,),
        cause=cause,
        text=f"{one.name} {what}, {one.doing}, {one.place}{source}{missed}",
        advice=advice,
    )


def _ahead_of(one: RankEvidence, ranks: Iterable[RankEvidence]) -> int:
    """Returns how many ranks are ahead of this one in some collective and behind it in none.

    If a background thread waits for another rank's, the main threads of both wait for their own
    background threads. Then only the counts of collectives distinguish the two ranks.
    """

    def is_behind(rank: RankEvidence, other: RankEvidence) -> bool:
        theirs = other.collectives
        return any(theirs.get(name, (own,))[0] > own for name, (own, _) in rank.collectives.items())

    return sum(is_behind(one, other) and not is_behind(other, one) for other in ranks)


def _ahead(ranks: Iterable[RankEvidence], name: str, own: int) -> list[int]:
    """Returns numbers of a group's collectives that others wait in and this rank is behind of."""
    found = (one.collectives.get(name, (0,))[0] for one in ranks if one.waits)
    return [number for number in found if number > own]


def _waits_for(ranks: Sequence[RankEvidence]) -> dict[int, set[int]]:
    """Returns for whom each rank waits: senders of its inputs, or who is behind in a group."""
    by_rank = {one.rank: one for one in ranks}
    edges: dict[int, set[int]] = {}
    for one in ranks:
        edges[one.rank] = found = set()
        if not one.waits:
            continue
        if one.needs:
            step = int(one.now.get("step", 0))
            for peer, kind, chunk, microbatch in one.needs:
                if peer not in by_rank or not by_rank[peer].has_done(kind, chunk, microbatch, step):
                    found.add(peer)
            continue
        for name, (own, members) in one.collectives.items():
            for peer in members:
                theirs = by_rank[peer].collectives if peer in by_rank else {}
                if theirs.get(name, (own,))[0] < own:
                    found.add(peer)
    return edges


def _waiters(rank: int, edges: Mapping[int, set[int]]) -> int:
    """Returns how many ranks wait for this one, directly or through others."""
    found = {rank}
    while more := {one for one, others in edges.items() if others & found} - found:
        found |= more
    return len(found)


def _circle(edges: Mapping[int, set[int]]) -> list[int]:
    """Returns ranks that wait for each other in a circle; none if there is none."""
    for start in edges:
        path = [start]
        while others := sorted(edges.get(path[-1], ())):
            if others[0] in path:
                return path[path.index(others[0]) :]
            path.append(others[0])
    return []


def _needs(one: RankEvidence) -> str:
    return " or ".join(
        f"{_KINDS[kind]} of microbatch {microbatch} of rank {peer}"
        for peer, kind, _, microbatch in one.needs
    )


def _names(ranks: Sequence[RankEvidence]) -> str:
    return " and ".join(one.name for one in ranks)


def _numbers(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


class Stillness:
    """Measures for how long nothing has moved on the ranks of a machine.

    Within steps only ends of actions and collectives are movement. Before the third iteration
    (imports, compilation), between steps, in evaluations and checkpoints, so is what ranks read
    and write, and for ten times the limit what they compute.

    Args:
        limit_s: as ``--hang-after-s`` has it, ``None`` for the default.

    Attributes:
        paused: where all ranks are between steps of a loop that may rest there, and none waits for
            another, how many collectives of each group they have begun; else ``None``.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self.paused: dict[str, int] | None = None
        self._seen: Any = None
        self._moved_s = self._computed_s = 0.0
        self._is_strict = False
        self._iteration = (0, 0.0)
        self._steps_s: deque[float] = deque(maxlen=51)

    @property
    def limit_s(self) -> float:
        """Seconds of stillness that make a hang."""
        if self._limit_s is not None:
            return self._limit_s
        steps = sorted(self._steps_s)
        return max(LEAST_S, STEPS * (steps[len(steps) // 2] if steps else 0.0))

    def restart(self, now_s: float) -> None:
        """Begins anew, as after a sleep of the machine."""
        self._moved_s = self._computed_s = now_s

    def look(
        self,
        nows: Mapping[int, Mapping[str, Any]],
        now_s: float,
        *,
        computes: bool = False,
        transfers: bool = False,
    ) -> float:
        """Takes in the ranks' reports.

        Args:
            nows: by rank.
            now_s: time of the look, ascending.
            computes: a rank has used its processor since the look before.
            transfers: a rank has read or written since then.

        Returns:
            For how many seconds nothing has moved.
        """
        self._is_strict = len(self._steps_s) > 1 and all(
            now.get("in_step") for now in nows.values()
        )
        seen = {
            rank: [now.get(name) for name in _MOVES]
            + [own for own, _ in now.get("collectives", {}).values()]
            for rank, now in nows.items()
        }
        if seen != self._seen or (transfers and not self._is_strict):
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
        if self._is_strict or still_s > _PATIENCE * self.limit_s:
            return still_s
        return now_s - self._computed_s


def _paused(nows: Collection[Mapping[str, Any]]) -> dict[str, int] | None:
    if not all(now.get("may_pause") and not (now["in_step"] or now["doing"]) for now in nows):
        return None
    return agreed([{k: own[0] for k, own in now["collectives"].items()} for now in nows])


def agreed(counts: Iterable[Mapping[str, int] | None]) -> dict[str, int] | None:
    """Returns counts by name; ``None`` where two differ, so that somebody waits, or one lacks."""
    found: dict[str, int] = {}
    for some in counts:
        if some is None or any(found.setdefault(name, n) != n for name, n in some.items()):
            return None
    return found


_MOVES = ("iteration", "step", "doing", "chunk", "microbatch", "done", "in_step")


def _stat(pid: int) -> list[str]:
    """Returns what proc(5) says of a process from its state on; ``X`` of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def _work(pid: int) -> tuple[float, float, float]:
    """Returns what a process has used of what :data:`_BUSY` lists."""
    stat, moved, waited_ns = _stat(pid), 0, 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/io").read_text().split("\n")
        moved = sum(int(line.split()[1]) for line in lines if line[1:5] == "char")
    ticks = sum(map(int, stat[11:13])) if len(stat) > 12 else 0
    used_s = ticks / os.sysconf("SC_CLK_TCK")
    return used_s, used_s + waited_ns / 1e9, moved


def collect_evidence(folder: Path, job: Mapping[str, Any]) -> list[RankEvidence]:
    """Returns what can be known of this machine's ranks without their help; takes seconds.

    Args:
        folder: the private one.
        job: what ``job.json`` says.
    """
    pids = {int(rank): int(pid) for rank, pid in job["pids"].items()}
    before = {rank: _stat(pid)[0] for rank, pid in pids.items()}
    files = {rank: folder / f"stack_{rank}.txt" for rank in pids}
    sizes = {rank: file.stat().st_size if file.exists() else 0 for rank, file in files.items()}
    stacks = {rank: _spy(job.get("py_spy"), pid, before[rank]) for rank, pid in pids.items()}
    nows = _read_nows(folder, pids)
    for rank, pid in pids.items():
        # Only who has a handler: the signal ends any other process.
        if not stacks[rank] and nows[rank] and before[rank] not in "XZTt":
            with contextlib.suppress(OSError):
                os.kill(pid, int(job["signal"]))
    time.sleep(1.5)
    found = []
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
        found.append(
            RankEvidence(
                rank=rank,
                name=job["names"][str(rank)],
                pid=pid,
                now=nows[rank],
                age_s=max(0.0, time.time() - nows[rank].get("unix_ns", 0) / 1e9),
                # In a disk's call for a moment is no hang.
                state="S" if state == "D" and before[rank] != "D" else state,
                wchan=wchan,
                frames=frames,
                line=_source(frames),
                stack=stack,
            )
        )
    return found


def main_frames(stack: str) -> list[tuple[str, int, str]]:
    """Returns the frames of the main thread, innermost first, from what a tool printed.

    ``py-spy`` marks it; ``faulthandler`` prints it last.
    """
    threads: list[list[tuple[str, int, str]]] = []
    marked: list[tuple[str, int, str]] | None = None
    process = re.match(r"Process (\d+):", stack)
    main = f"Thread {process[1]} " if process else "MainThread"  # its id is the process's
    for line in stack.splitlines():
        if "hread" in line and not line.startswith(" "):
            threads.append([])
            if main in line or "MainThread" in line:
                marked = threads[-1]
        elif not threads:
            continue
        elif found := _FAULT.match(line):
            threads[-1].append((found[1], int(found[2]), found[3]))
        elif (found := _SPY.match(line)) and found[2].endswith(".py"):
            threads[-1].append((found[2], int(found[3]), found[1]))
    return marked if marked is not None else threads[-1] if threads else []


def _spy(program: str | None, pid: int, state: str) -> str:
    if program is None or state in "XZ":
        return ""
    # It pauses the process it looks at, and a stopped one must stay so.
    how = ["--nonblocking"] if state in "Tt" else ["--native"]
    try:
        done = subprocess.run(
            [program, "dump", "--full-filenames", *how, "--pid", str(pid)],
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
    """Returns the last reports of the ranks; of former processes there is none."""
    nows: dict[int, dict[str, Any]] = {}
    for rank, pid in pids.items():
        now = _read_json(folder / f"now_rank_{rank:05d}.json")
        nows[rank] = now if now.get("pid") == pid else {}
    return nows


def _read_json(path: Path) -> dict[str, Any]:
    for _ in range(3):  # it may be written just now
        try:
            return dict(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            time.sleep(0.01)
    return {}


def format_page(culprit: Culprit, ranks: Sequence[RankEvidence], still_s: float) -> str:
    """Returns the page: the culprit, a line for each rank, and all stacks."""
    lines = [
        f"Nothing moved for {still_s:.0f} s ({time.strftime('%Y-%m-%d %H:%M:%S')}).",
        f"Cause: {culprit.cause}. {culprit.text}.",
        f"What to do: {culprit.advice}.",
        "",
        "rank  state  report  doing, place",
    ]
    for one in ranks:
        needs = f"; needs {_needs(one)}" if one.needs else ""
        begun = " ".join(f"{name}:{own[0]}" for name, own in one.collectives.items())
        lines.append(
            f"{one.rank:4}  {one.state or '?':5}  {one.age_s:4.0f} s  {one.doing}{needs}; "
            f"{one.place}{f' [{one.wchan}]' if one.wchan not in ('', '0') else ''}"
            f"; collectives begun, by group: {begun or 'unknown'}"
        )
    for one in ranks:
        lines += ["", f"--- {one.name}", one.stack.rstrip() or "no stack"]
    return "\n".join(lines) + "\n"


class _Watch:
    """The process: looks each second until its parent is gone."""

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
        while os.getppid() == self._job["parent"]:  # which may have ended before this process began
            time.sleep(_LOOK_S)
            now_s, elapsed_s = time.monotonic(), time.monotonic() - last_s
            last_s = now_s
            nows = _read_nows(self._folder, self._pids)
            if any(now.get("doing") == _ENDED for now in nows.values()):
                return  # a rank ends after all have come to the end, or with an error of its own
            work = {rank: _work(pid) for rank, pid in self._pids.items()}
            moved = [
                any(after[n] - self._work[r][n] > _BUSY[n] * elapsed_s for r, after in work.items())
                for n in range(len(_BUSY))
            ]
            self._work = work
            if elapsed_s > 5 * _LOOK_S:
                self._still.restart(now_s)  # this process was stopped, so perhaps all were
            still_s = self._still.look(nows, now_s, computes=any(moved[:2]), transfers=moved[2])
            self._decide(still_s, now_s)

    def _decide(self, still_s: float, now_s: float) -> None:
        limit_s = self._still.limit_s
        others = self._others(now_s)
        is_asked = any(other.get("ranks") for other in others.values())  # one reports already
        if self._reported_s is not None:
            if still_s < self._reported_s:
                _say(f"hang: over after {self._reported_s:.0f} s or more, the job goes on")
                self._reported_s = None
        elif (
            still_s > (limit_s / 2 if is_asked else limit_s)
            and all(not other or other["still_s"] > limit_s / 2 for other in others.values())
            and agreed([self._still.paused, *(o.get("paused") for o in others.values())]) is None
        ):
            self._report(still_s)
            return
        self._publish(still_s)

    def _publish(self, still_s: float, own: Sequence[RankEvidence] = ()) -> None:
        """Writes for other machines how still it is here, and what is known of the ranks."""
        if self._job["machines"] < 2:
            return
        self._beat += 1
        said = {"beat": self._beat, "still_s": still_s, "ranks": [vars(one) for one in own]}
        said["paused"] = self._still.paused
        path = self._folder / "machine.json"
        path.with_suffix(".part").write_text(json.dumps(said))
        path.with_suffix(".part").replace(path)

    def _others(self, now_s: float) -> dict[int, dict[str, Any]]:
        """Returns the last word of other machines; an empty one if that is long ago."""
        found = {}
        for machine in {*range(self._job["machines"])} - {self._job["machine"]}:
            said = _read_json(self._folder / f"machine_{machine}.json")
            beat, since_s = self._heard.get(machine, (None, now_s))
            if said.get("beat") != beat:
                since_s = now_s
            self._heard[machine] = (said.get("beat"), since_s)
            found[machine] = said if now_s - since_s < _WORDLESS_S else {}
        return found

    def _report(self, still_s: float) -> None:
        own = collect_evidence(self._folder, self._job)
        ranks = list(own)
        if self._job["machines"] > 1:
            ranks += self._wait_for_others(still_s, own)
        after = _read_nows(self._folder, self._pids)
        if any(one.now.get(name) != after[one.rank].get(name) for one in own for name in _MOVES):
            return  # it went on meanwhile
        self._reported_s = still_s
        ranks.sort(key=lambda one: one.rank)
        culprit = find_culprit(ranks)
        path = Path(self._job["page_folder"]) / (
            f"hang_{time.strftime('%Y%m%d_%H%M%S')}_machine_{self._job['machine']}.txt"
        )
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(format_page(culprit, ranks, still_s))
        ends = self._job["on_hang"] == "end"
        iteration = max(int(one.now.get("iteration", 0)) for one in ranks)
        at = f" in iteration {iteration}" if iteration else ""
        if self._job["machine"] == 0 or not self._others(time.monotonic()).get(0):
            _say(
                f"hang: nothing moved for {still_s:.0f} s{at}: {culprit.text}; {culprit.advice}; "
                f"stacks of all ranks: {path}{'; the job ends (--on-hang end)' if ends else ''}"
            )
        if ends:
            for pid in self._pids.values():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _wait_for_others(self, still_s: float, own: Sequence[RankEvidence]) -> list[RankEvidence]:
        """Returns what other machines know of their ranks; takes some seconds."""
        until_s = time.monotonic() + _OTHERS_S
        found: dict[int, dict[str, Any]] = {}
        while time.monotonic() < until_s:
            self._publish(still_s, own)
            found = self._others(time.monotonic())
            if all(not other or other["ranks"] for other in found.values()):
                break
            time.sleep(_LOOK_S)
        self._publish(still_s, own)
        heard = {
            one["rank"]: RankEvidence(**one)
            for other in found.values()
            for one in other.get("ranks", ())
        }
        missing = []
        for key, name in self._job["names"].items():
            rank = int(key)
            if rank not in heard and rank not in self._pids:
                word = found.get(self._job["machine_of"][key])
                missing.append(RankEvidence(rank=rank, name=name, state="S" if word else ""))
        return [*heard.values(), *missing]


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def main() -> int:
    """Watches until the parent ends."""
    folder = Path(sys.argv[1])
    with contextlib.suppress(OSError):
        os.nice(10)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # of the terminal and of launchers; it ends by itself
    try:
        _Watch(folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
