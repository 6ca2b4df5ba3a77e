"""Runs pairs of jobs on one folder, kills or pauses some jobs, and checks all checkpoints.

A job here is two processes, forked from a process that has imported torch. They save small tensors
with the saver of the trainer and ``Pipeline``, at random times, directly or in a thread. All
elements of a tensor encode job, step and rank, so that the files of a checkpoint show which job
wrote them. A job on another machine is simulated by another boot ID. Some pairs are real trainers.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.report import Result, Row, measured, one_line
from megatron.adaptive.checkpoint.folder import CheckpointFolder
from megatron.adaptive.engine.folder_lease import STALE_S
from tests.cluster.jobs import FLAGS, TRAINER, environment
from tests.multiprocess.launch import ROOT

RANKS, AT_ONCE = 2, 12
REFUSED_S = 5.0
_NUMBERS = 4096  # Each tensor has this number of elements.
_LIMIT_S = 90.0
_EXIT_EXPECTED = 2
_STATUSES = threading.Lock()
"""Guards the exit statuses of child processes.

Starting a process also collects the statuses of other children, so only one thread at a time may do
this.
"""


@dataclass
class Seen:
    """Observations of one or more tests. Each list of strings describes faults."""

    mixed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    takeover_s: list[float] = field(default_factory=list)
    checkpoints: int = 0
    deposed: int = 0

    def add(self, other: Seen) -> None:
        """Adds the observations in ``other`` to these observations."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class SmallJob:
    """Job with one process per rank that saves small checkpoints.

    Args:
        folder: Folder of checkpoints.
        number: Index of the job, from 1.
        saves: Number of checkpoints that the job saves.
        seed: Seed of the times at which the job saves.
        is_far: Whether the job appears to be on a different machine.
    """

    def __init__(self, folder: Path, number: int, saves: int, seed: int, *, is_far: bool) -> None:
        self.number = number
        self.log = folder.parent / f"job-{number}"
        self.log.mkdir()
        context = multiprocessing.get_context("forkserver")
        arguments = str(folder), str(self.log), number, saves, seed, is_far
        self.ranks = [
            context.Process(target=run_rank, args=(rank, *arguments), daemon=True)
            for rank in range(RANKS)
        ]
        with _STATUSES:
            for process in self.ranks:
                process.start()

    def signal(self, number: signal.Signals, ranks: int = RANKS) -> None:
        """Sends the signal ``number`` to the first ``ranks`` ranks that are still running."""
        for process in self.ranks[:ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)

    def end(self, limit_s: float = _LIMIT_S) -> int | None:
        """Waits until the job exits, and returns the exit status of rank 0.

        Kills the job after ``limit_s`` seconds, and then returns ``None``.
        """
        end_s = time.monotonic() + limit_s
        while None in (statuses := self.statuses()) and time.monotonic() < end_s:
            time.sleep(0.02)
        if None in statuses:
            self.signal(signal.SIGKILL)
            return None
        return statuses[0]

    def statuses(self) -> list[int | None]:
        """Returns the exit status of each rank, or ``None`` for a rank that is still running."""
        with _STATUSES:
            return [process.exitcode for process in self.ranks]

    def said(self) -> list[dict[str, Any]]:
        """Returns the lines that rank 0 has written, each as a dict."""
        path = self.log / "said.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def of(self, name: str) -> list[Any]:
        """Returns all values that rank 0 has written to its log under the key ``name``."""
        return [line[name] for line in self.said() if name in line]


def run_rank(
    rank: int, folder: str, log: str, number: int, saves: int, seed: int, is_far: bool
) -> None:
    """Runs the rank ``rank`` of a :class:`SmallJob`.

    ``folder`` is the folder of checkpoints, and ``log`` is the folder for logs. See
    :class:`SmallJob` for the other parameters.
    """
    import torch
    import torch.distributed as dist

    from megatron.adaptive.checkpoint.collective_errors import RankGroup
    from megatron.adaptive.checkpoint.node_local import hold
    from megatron.adaptive.checkpoint.saver import CheckpointSaver
    from megatron.adaptive.config.environment import Environment
    from megatron.adaptive.engine import folder_lease
    from megatron.adaptive.engine.process_context import Job
    from megatron.adaptive.errors import CheckpointError

    torch.set_num_threads(1)
    os.dup2(os.open(f"{log}/rank-{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    if is_far:
        here = folder_lease._here()
        folder_lease._here = lambda: {**here, "host": f"far-{number}", "boot": f"far-{number}"}
    store = f"file://{log}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    group = dist.new_group(backend="gloo")
    accelerator: Any = None
    job = Job(
        environment=Environment(rank=rank, world_size=RANKS),
        accelerator=accelerator,
        control_group=group,
        places=[{"host": "here"}] * RANKS,
    )
    ranks, chance = RankGroup(rank, group), random.Random(seed)

    def say(**line: object) -> None:
        if rank == 0:
            with open(f"{log}/said.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

    saver, begin_s = CheckpointSaver(job), time.monotonic()
    try:
        checkpoints = CheckpointFolder(folder)
        hold(checkpoints, job, ranks)
        say(held=time.monotonic() - begin_s)
        latest = ranks.on_first(checkpoints.latest) or 0
        if latest and rank == 0:
            checkpoints.open(latest)
        for step in range(latest + 1, latest + saves + 1):
            time.sleep(chance.random() * 0.4)
            behind = chance.random() < 0.5
            state = partial(_state, number, step, rank)
            saver.save(CheckpointFolder(folder), step, state, remedy="", behind=behind)
            if behind:
                time.sleep(chance.random() * 0.1)
                saver.finish()
            say(saved=step)
        saver.close()
        job.close()
    except CheckpointError as error:
        say(error=str(error), after=time.monotonic() - begin_s)
        os._exit(_EXIT_EXPECTED)


def _state(number: int, step: int, rank: int) -> Any:
    """Returns a small state whose values encode the job's ``number``, ``step`` and ``rank``."""
    import torch

    from megatron.adaptive.checkpoint.writer import Piece, TakenState, pickled

    tensor = torch.full((_NUMBERS,), _stamp(number, step, rank), dtype=torch.int64)
    piece = Piece(tensor=tensor, size=[_NUMBERS], whole=[_NUMBERS])
    manifest = {
        "progress": {"iteration": step, "job": number},
        "config": {},
        "shape": {},
        "padded_vocab_size": 1,
        "has_optimizer": False,
        "has_rng": False,
    }
    return TakenState(
        pieces={(f"weight.{rank}", (0,)): piece},
        once={"metadata.json": b"{}", "common.pt": pickled({"job": number})},
        manifest=lambda save_id, _: {**manifest, "save_id": save_id},
    )


def _stamp(number: int, step: int, rank: int) -> int:
    return number << 40 | step << 8 | rank | 0x55 << 56


def look(folder: Path, jobs: Sequence[SmallJob], seen: Seen) -> None:
    """Checks that each checkpoint in ``folder`` is from one job, and that no checkpoint is missing.

    ``jobs`` are the jobs that saved checkpoints. Faults are added to ``seen``.
    """
    checkpoints, owners = CheckpointFolder(folder), {}
    for step in checkpoints.steps():
        try:
            path, manifest = checkpoints.open(step)
        except Exception as error:
            seen.mixed.append(f"{folder}: step {step}: {error}")
            continue
        number = owners[step] = manifest["progress"]["job"]
        for rank in range(RANKS):
            content = (path / f"__{rank}_0.distcp").read_bytes()
            expected = _stamp(number, step, rank).to_bytes(8, "little") * _NUMBERS
            if expected not in content:
                seen.mixed.append(f"{path}: the part of rank {rank} is not from job {number}")
    seen.checkpoints += len(owners)
    for job in jobs:
        gone = [step for step in job.of("saved") if owners.get(step) != job.number]
        seen.lost += [f"{folder}: step {step} of job {job.number}" for step in gone]
    newest = checkpoints.latest()
    if owners and newest != max(owners):
        seen.lost.append(f"{folder}: the newest checkpoint is {newest}, expected {max(owners)}")


def _refused(job: SmallJob, seen: Seen) -> None:
    """Checks the error message of ``job``, which was not allowed to use a folder of another job.

    Adds the time until the message, or a fault, to ``seen``.
    """
    lines, after = job.of("error"), job.of("after")
    text = lines[0] if lines else "no line"
    if "is written by process" not in text or "since 20" not in text or "\n" in text:
        seen.failed.append(f"{job.log}: {text}")
    else:
        seen.refused_s += after


def pair(folder: Path, seed: int) -> Seen:
    """Starts two jobs at random times on the same ``folder``, and returns the observations.

    ``seed`` selects the start times and the numbers of checkpoints.
    """
    chance, seen = random.Random(seed), Seen()
    is_far = chance.random() < 0.5
    jobs = []
    for number in (1, 2):
        saves = chance.randint(2, 14)
        job = SmallJob(folder, number, saves, chance.randrange(1 << 30), is_far=is_far)
        jobs.append(job)
        time.sleep(chance.random() * 2.0 * (number == 1) * chance.choice((0, 1)))
    statuses = [job.end() for job in jobs]
    if 0 not in statuses or not set(statuses) <= {0, _EXIT_EXPECTED}:
        seen.failed.append(
            f"{folder}: the jobs ended with {statuses}: {[job.said()[-1:] for job in jobs]}"
        )
    for job, status in zip(jobs, statuses, strict=True):
        if status == _EXIT_EXPECTED:
            _refused(job, seen)
    look(folder, jobs, seen)
    return seen


def kill(folder: Path, seed: int) -> Seen:
    """Kills a job that owns ``folder``, or only its rank 0, and checks that a second job can start.

    ``seed`` is the seed of all random numbers. Returns the observations.
    """
    chance, seen = random.Random(seed), Seen()
    is_far = chance.random() < 0.1
    first = SmallJob(folder, 1, 1000, chance.randrange(1 << 30), is_far=is_far)
    _wait_for(lambda: bool(first.of("held")), first, seen)
    time.sleep(chance.random() * 1.5)
    first.signal(signal.SIGKILL, chance.choice((1, RANKS)))
    next_job = SmallJob(folder, 2, 2, chance.randrange(1 << 30), is_far=is_far)
    _succeeded(next_job, STALE_S + REFUSED_S if is_far else REFUSED_S, seen)
    first.end(_LIMIT_S)
    look(folder, (first, next_job), seen)
    return seen


def pause(folder: Path, seed: int) -> Seen:
    """Pauses a job that owns ``folder`` until a second job takes over the folder.

    ``seed`` is the seed of all random numbers. Returns the observations.

    After the pause, the first job must not save any checkpoint.
    """
    chance, seen = random.Random(seed), Seen()
    first = SmallJob(folder, 1, 1000, chance.randrange(1 << 30), is_far=True)
    _wait_for(lambda: bool(first.of("held")), first, seen)
    time.sleep(chance.random() * 1.5)
    first.signal(signal.SIGSTOP)
    next_job = SmallJob(folder, 2, 12, chance.randrange(1 << 30), is_far=True)
    _wait_for(lambda: bool(next_job.of("saved")), next_job, seen)
    first.signal(signal.SIGCONT)
    _succeeded(next_job, STALE_S + REFUSED_S, seen)
    status, lines = first.end(), first.of("error")
    if status != _EXIT_EXPECTED or "was taken over by process" not in "".join(lines):
        seen.failed.append(f"{folder}: the paused job ended with {status}: {lines}")
    seen.deposed += 1
    look(folder, (first, next_job), seen)
    return seen


def _wait_for(condition: Callable[[], bool], job: SmallJob, seen: Seen) -> None:
    end_s = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > end_s or job.statuses()[0] is not None:
            seen.failed.append(f"{job.log}: the job ended or timed out: {job.said()[-1:]}")
            return
        time.sleep(0.05)


def _succeeded(job: SmallJob, limit_s: float, seen: Seen) -> None:
    status, held = job.end(), job.of("held")
    if status != 0 or not held or held[0] > limit_s:
        seen.failed.append(
            f"{job.log}: the job ended with {status} after {held}: {job.said()[-1:]}"
        )
    seen.takeover_s += held


def trainers(folder: Path, seed: int) -> Seen:
    """Starts two trainers with ``folder`` as ``--save``, kills one, and starts a third trainer.

    ``seed`` is the seed of all random numbers. Returns the observations.

    The trainer that is killed is the owner of the folder.
    """
    chance, seen = random.Random(seed), Seen()
    flags = [*FLAGS, "--pipeline-model-parallel-size", "1", "--save", str(folder)]
    flags += ["--save-interval", "2", "--async-save", "--keep-checkpoints", "3"]
    last = str(folder / "latest_checkpointed_iteration.txt")

    def start(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(TRAINER), *flags, *more]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=environment(), stdout=subprocess.DEVNULL, stderr=pipe, text=True
        )

    both = [start("--train-iters", "99999")]
    try:
        time.sleep(chance.random() * 3.0)
        both.append(start("--train-iters", "99999"))
        end_s = time.monotonic() + _LIMIT_S
        while all(trainer.poll() is None for trainer in both) and time.monotonic() < end_s:
            time.sleep(0.05)
        refused = [trainer for trainer in both if trainer.poll() is not None]
        if len(refused) != 1 or refused[0].returncode != _EXIT_EXPECTED:
            seen.failed.append(f"{folder}: {[trainer.poll() for trainer in both]}")
            return seen
        said = refused[0].communicate()[1]
        if said.count("is written by process") != 1 or "Traceback" in said:
            seen.failed.append(f"{folder}: {said[-300:]}")
        while not os.path.exists(last) and time.monotonic() < end_s:
            time.sleep(0.05)
        time.sleep(chance.random())
    finally:
        for trainer in both:
            trainer.kill()
            trainer.wait()
    checkpoints = CheckpointFolder(folder)
    before = checkpoints.latest() or 0
    flags += ["--load", str(folder), "--exit-interval", str(before + 3)]
    again = start("--train-iters", "99999")
    try:
        said = again.communicate(timeout=_LIMIT_S)[1]
    finally:
        again.kill()
    if again.returncode:
        seen.failed.append(f"{folder}: the next start ended with {again.returncode}: {said[-300:]}")
    if not before or checkpoints.latest() != before + 3:
        seen.lost.append(f"{folder}: from {before} to {checkpoints.latest()}")
    for step in checkpoints.steps():
        checkpoints.open(step)
        seen.checkpoints += 1
    return seen


def measure(folder: Path, pairs: int, kills: int, seed: int, real: int = 3) -> Result:
    """Tests jobs that share a folder, with a new folder for each test, and returns table rows.

    Args:
        folder: Empty folder.
        pairs: Number of pairs of jobs that start at random times.
        kills: Number of jobs that are killed while they own a folder. In addition, a tenth of this
            number are paused until a second job takes over.
        seed: Seed of all random numbers.
        real: Number of pairs of trainers.
    """
    work: list[tuple[str, Callable[[Path, int], Seen]]] = [
        *(("pair", pair) for _ in range(pairs)),
        *(("kill", kill) for _ in range(kills)),
        *(("pause", pause) for _ in range(max(1, kills // 10))),
    ]
    random.Random(seed).shuffle(work)

    def run(number: int) -> Seen:
        name, part = work[number]
        job_folder = folder / f"{name}-{number}"
        job_folder.mkdir()
        return part(job_folder / "checkpoints", seed * 100_000 + number)

    seen = Seen()
    # The fork server imports the modules of the jobs once, before it forks jobs.
    os.environ["PYTHONPATH"], os.environ["OMP_NUM_THREADS"] = str(ROOT), "1"
    needed = ["megatron.adaptive.checkpoint.saver", "megatron.adaptive.accelerator"]
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, *needed])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for result in pool.map(run, range(len(work))):
            seen.add(result)
    for number in range(real):
        job_folder = folder / f"trainers-{number}"
        job_folder.mkdir()
        seen.add(trainers(job_folder / "checkpoints", seed + number))
    title = f"{pairs} pairs of jobs on one folder, {kills} killed, {seen.deposed} stopped"
    late = sum(seconds > REFUSED_S for seconds in seen.refused_s)
    rows = [
        _count(f"{title}: mixed checkpoints of {seen.checkpoints}", seen.mixed),
        _count("checkpoints lost", seen.lost),
        _count("jobs that ended in an unexpected way", seen.failed),
        Row(what=f"second jobs rejected after more than {REFUSED_S:g} s", value=late, goal=0),
        measured("time until a second job is rejected", seen.refused_s, unit="s", goal=REFUSED_S),
        measured("time until the next job owns the folder", seen.takeover_s, unit="s"),
    ]
    return Result(rows=rows, facts={"leases": vars(seen)})


def _count(title: str, lines: Sequence[str]) -> Row:
    return Row(what=title, value=len(lines), goal=0, note=one_line("; ".join(lines)))
