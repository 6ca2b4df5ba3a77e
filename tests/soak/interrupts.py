"""Interrupts and kills processes of jobs at random times, and checks how each job ends.

A chain is a sequence of jobs on one folder of checkpoints. Each job continues from the newest
checkpoint, and one of its processes gets a signal at a random time. After the job, no process or
file may be left. No process may have printed a traceback, a native stack or more than one line with
the reason. The next job must begin at the newest intact checkpoint, and all losses must equal those
of an undisturbed job.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from harness.families import children_of
from harness.report import Result, Row, one_line
from megatron.adaptive.checkpoint.folder import CheckpointFolder, PipelineFolder, StepFolders
from tests.cluster.jobs import FLAGS, TRAINER
from tests.multiprocess.forked_nodes.sitecustomize import fork_of
from tests.multiprocess.launch import ROOT, environment, forking, start, tail

SCRIPT = ROOT / "tests" / "cluster" / "pipeline_script.py"
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "SIGKILL", "SIGSTOP")
"""Names of the signals that are sent. A process that gets SIGSTOP resumes later."""
STOPPED_S = (0.5, 4.0)
"""Minimum and maximum time for which a process is stopped, in seconds."""
SPAN = 1.6
"""Latest time of a signal, as a multiple of the duration of an undisturbed job.

An undisturbed job consists of startup, a few steps and shutdown. Many signals before this time
already arrive during a step, so later signals would test nothing new. They would also make jobs
longer, and the undisturbed reference job must repeat all their steps.
"""
END_LIMIT_S = 240.0
AGAIN_LIMIT_S = 6.0
"""Time in seconds after which a job that continues despite a signal gets SIGTERM."""
LEFT_LIMIT_S = 20.0
HITS_OF_A_CHAIN = 8
"""Maximum number of signals per chain of jobs.

The undisturbed reference job repeats all steps of the chain, so more signals would take too long.
"""
TOLERANCE, LEAST = 1e-5, 1e-6
"""Maximum relative and absolute differences of losses, which change with an elastic job's shape."""
_BAD = re.compile(
    r"Traceback|InvalidStateError|did not prove|^frame #|C\+\+ CapturedTraceback|Fatal Python"
    r"|Exception ignored|Exception in|terminate called|Segmentation|\*\*\* "
)
_REASON = re.compile(
    r"^(\[?rank ?\d+\]?:? |\[elastic\] )?(error|stopped by|fatal|complete|training ends: signal)\b",
    re.IGNORECASE,
)
_SHOWN_LINES = 40
"""Number of log lines that a report shows, beginning with the first line that matches ``_BAD``."""
_LOST = "errors.PeerLostError: "
_SHARED = Path("/dev/shm")
_LAUNCH = [sys.executable, "-m", "megatron.adaptive", "job", "launch", "--standalone"]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
_TRAINING = [*FLAGS, "--train-iters", "2000", "--save-interval", "3", "--num-workers", "1"]

_BIT_FOR_BIT = ("launch", "torchrun", "pipeline")
KINDS = ("launch", "torchrun", "machines", "pipeline", "single")


@dataclass(kw_only=True)
class Chain:
    """Runs jobs of one kind, each continuing from the previous job's checkpoints.

    Attributes:
        kind: Kind of the jobs, an element of :data:`KINDS`.
        folder: Folder of all files of the chain.
        is_async: Whether checkpoints are written in the background.
        is_fresh: Whether each process starts a new interpreter instead of being forked from a
            server.
    """

    kind: str
    folder: Path
    is_async: bool = False
    is_fresh: bool = False

    @property
    def checkpoints(self) -> StepFolders:
        """Returns the folder with the checkpoints of all jobs of the chain."""
        path = self.folder / "checkpoints"
        return PipelineFolder(path) if self.kind == "pipeline" else CheckpointFolder(path)

    def newest_whole(self) -> int:
        """Returns the step of the newest intact checkpoint, or 0 if no checkpoint is intact."""
        checkpoints = self.checkpoints
        whole = (step for step in reversed(checkpoints.steps()) if not checkpoints.verify(step))
        return next(whole, 0)

    def progress(self, number: int) -> Path:
        """Creates the folder for the progress files of job ``number``, and returns the folder."""
        made = self.folder / f"progress-{number}"
        made.mkdir(exist_ok=True)
        return made

    def command(self, number: int, last: int | None = None) -> list[str]:
        """Returns the command line that starts job ``number``.

        Args:
            number: Index of the job in the chain.
            last: Step after which the job ends, or ``None`` for a job that is not expected to end.
        """
        saved, progress = str(self.folder / "checkpoints"), str(self.progress(number))
        if self.kind == "pipeline":
            more = {"folder": saved, "save_interval": 3, "async_save": self.is_async}
            # Jobs that choose the microbatch size themselves could choose different sizes. Losses
            # would differ, because dropout is drawn for each microbatch.
            more["micro_batch_size"] = 2
            arguments = [str(SCRIPT), str(last or 20_000), "4", progress, json.dumps(more)]
            return [*_LAUNCH, "--nproc-per-node", "2", *arguments]
        arguments = [*_TRAINING, *(["--async-save"] if self.is_async else [])]
        if last is not None:
            arguments += ["--exit-interval", str(last)]
        if self.kind == "machines":
            (self.folder / "machines.txt").write_text("localhost name=a\nlocalhost name=b\n")
            run = [
                sys.executable,
                "-m",
                "megatron.adaptive",
                "train",
                "elastic",
                "--checkpoint",
                saved,
            ]
            run += ["--machines", str(self.folder / "machines.txt")]
            return [*run, str(TRAINER), *arguments]
        arguments += ["--progress-dir", progress, "--save", saved, "--load", saved]
        if self.kind == "single":
            run = [sys.executable, "-m", "megatron.adaptive", "train", "single", "--runs-dir"]
            # ``train single`` creates its own corpus and vocabulary, so remove the flags for these.
            text = " ".join(arguments).replace("--tokenizer-type NullTokenizer --vocab-size 63", "")
            arguments = text.replace("--mock-data", "").split()
            return [*run, str(self.folder / "runs"), "--", *arguments]
        start_words = _LAUNCH if self.kind == "launch" else _TORCHRUN
        return [*start_words, "--nproc-per-node", "2", str(TRAINER), *arguments]

    def losses(self, number: int) -> list[tuple[int, float]]:
        """Returns the (step, loss) pairs of all steps that job ``number`` completed, in order."""
        files = [self.progress(number) / "progress.jsonl"]
        if self.kind == "pipeline":
            files = sorted(self.progress(number).glob("epoch-*-1.jsonl"))
        if self.kind == "machines":
            files = sorted((self.folder / "checkpoints").glob("elastic/epoch-*/progress.jsonl"))
            files = [file for file in files if file not in self._seen.get(number, files)]
        losses = []
        for path in files:
            for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
                if self.kind == "pipeline":
                    losses.append((line["step"] + 1, line["loss"]))
                elif "iteration" in line and "loss" in line:
                    losses.append((line["iteration"], line["loss"]))
        return losses

    _seen: dict[int, list[Path]] = field(default_factory=dict, init=False)

    def begin(self, number: int, last: int | None = None) -> RunningJob:
        """Starts job ``number`` of the chain. See :meth:`command` for ``last``."""
        pattern = "elastic/epoch-*/progress.jsonl"
        self._seen[number] = sorted((self.folder / "checkpoints").glob(pattern))
        temporary = self.folder / f"tmp-{number}"
        temporary.mkdir()
        # A Pipeline watches its parent process to detect that the launcher has exited. If the
        # process was forked, its parent is the fork server instead of the launcher.
        is_fresh = self.is_fresh or self.kind == "pipeline"
        variables = environment() if is_fresh else forking()
        variables |= {"TMPDIR": str(temporary)}
        log = self.folder / f"log-{number}.txt"
        return RunningJob(self.command(number, last), log, variables)


class RunningJob:
    """Runs a job and tracks all its processes.

    Args:
        command: Command line.
        log: New file for the output of all processes of the job.
        variables: Complete environment of the job.
    """

    def __init__(self, command: list[str], log: Path, variables: Mapping[str, str]) -> None:
        self.log = log
        self.begun_s = time.monotonic()
        self._shared = set(os.listdir(_SHARED))
        self.root = start(command, log, variables)
        self.family: dict[int, psutil.Process] = {}
        self._forks = variables.get("TESTS_NODE_FORKSERVERS")

    def processes(self) -> dict[int, str]:
        """Returns the role of each live process, keyed by the ID of the process.

        Skips stand-in processes, which only wait for a process that a fork server has forked.
        """
        roles: dict[int, str] = {}
        left = [(self.root.pid, 0)]
        while left:
            pid, depth = left.pop()
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() == psutil.STATUS_ZOMBIE or pid in roles:
                    continue
                self.family[pid] = process
                roles[pid] = f"{_role(process)} of depth {depth}"
                left += [(child, depth + 1) for child in children_of(pid)]
                if self._forks and (forked := fork_of(self._forks, pid)):
                    roles[pid] = "stand-in"
                    left.append((forked, depth))
        return {pid: role for pid, role in roles.items() if role != "stand-in"}

    def wait(self, limit_s: float) -> int | None:
        """Waits for the job, and returns its exit status, or ``None`` after ``limit_s`` seconds."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            self.processes()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.root.wait(0.1)
        return None

    def left(self) -> list[str]:
        """Returns descriptions of the processes and shared memory that are left after the job."""
        _, alive = psutil.wait_procs(list(self.family.values()), timeout=LEFT_LIMIT_S)
        lines = []
        for process in alive:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    lines.append(f"{process.pid} {' '.join(process.cmdline())[-100:]}")
        # The hang detector removes its folder one second after its rank was killed.
        end_s = time.monotonic() + LEFT_LIMIT_S
        while (shared := self._shared_memory()) and time.monotonic() < end_s:
            time.sleep(0.1)
        return [*lines, *shared]

    def _shared_memory(self) -> list[str]:
        """Returns new shared-memory files whose names contain the ID of a process of the job."""
        names = set(os.listdir(_SHARED)) - self._shared
        return [
            f"{_SHARED}/{name}"
            for name in names
            if set(map(int, re.findall(r"\d+", name)[-4:])) & set(self.family)
        ]

    def close(self) -> None:
        """Kills all processes of the job that are still running."""
        self.processes()
        for process in self.family.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.root.wait(20)


def _role(process: psutil.Process) -> str:
    """Returns a name that describes what ``process`` does, such as the end of its command line."""
    name, text = process.name(), " ".join(process.cmdline()[1:5])
    if "rank_forkserver" in text:  # The command lines of forks also contain this text.
        return f"fork {name.rstrip('0123456789')}"
    return text[-60:] or name


@dataclass(kw_only=True)
class Outcome:
    """Signal that a job received, and how the job then exited.

    Attributes:
        description: Kind of the job, the signal, the process that received it, and the time, as
            text.
        faults: Descriptions of all faults.
        status: Exit status of the job.
        steps: Number of steps that the job completed.
    """

    description: str
    faults: list[str]
    status: int | None
    steps: int


def run_chain(chain: Chain, seed: int, hits: int, report: Callable[[str], None]) -> list[Outcome]:
    """Runs the jobs of a chain, each with one signal, and a last job without a signal.

    Args:
        chain: Chain with an empty folder.
        seed: Seed of all random choices.
        hits: Number of signals.
        report: Function to which each line of the report is passed.
    """
    draw = random.Random(seed)
    (chain.folder / "reference").mkdir(parents=True)
    outcomes: list[Outcome] = []
    losses: dict[int, set[float]] = {}
    span_s = 0.0
    for number in range(hits + 1):
        before = chain.newest_whole()
        job = chain.begin(number)
        try:
            if number == hits or not span_s:
                outcome, span_s = _undisturbed_end(chain, job, number)
            else:
                outcome = _hit(chain, job, number, draw, span_s)
        finally:
            job.close()
        done = chain.losses(number)
        if done and done[0][0] != before + 1:
            outcome.faults.append(
                f"the job began after step {done[0][0] - 1}, but "
                f"the newest intact checkpoint is {before}"
            )
        for step, loss in done:
            losses.setdefault(step, set()).add(loss)
        outcomes.append(outcome)
        report(
            f"{outcome.description}: status {outcome.status}, {outcome.steps} steps, from {before}"
        )
        for fault in outcome.faults:
            report(f"    FAULT {fault}")
    if losses:
        outcomes[-1].faults += _unlike(chain, losses)
        for fault in outcomes[-1].faults:
            report(f"    FAULT {fault}")
    return outcomes


def run_chains(chain: Chain, seed: int, hits: int, report: Callable[[str], None]) -> list[Outcome]:
    """Runs several chains of jobs, each in a subfolder, until ``hits`` signals have been sent.

    Args:
        chain: Settings of the chains, with an empty folder.
        seed: Seed of the first chain. The following chains use the next seeds.
        hits: Number of signals in all chains together.
        report: Function to which each line of the report is passed.
    """
    outcomes: list[Outcome] = []
    for number, first in enumerate(range(0, hits, HITS_OF_A_CHAIN)):
        part = Chain(
            kind=chain.kind,
            folder=chain.folder / f"chain-{number}",
            is_async=chain.is_async,
            is_fresh=chain.is_fresh,
        )
        outcomes += run_chain(part, seed + number, min(HITS_OF_A_CHAIN, hits - first), report)
    return outcomes


def _undisturbed_end(chain: Chain, job: RunningJob, number: int) -> tuple[Outcome, float]:
    """Stops ``job`` with SIGTERM after some steps. It is job number ``number`` of ``chain``.

    Returns the job's outcome, and the latest time at which later jobs get a signal, in seconds.
    """
    end_s = time.monotonic() + END_LIMIT_S
    while len(chain.losses(number)) < 4 and job.wait(0.2) is None and time.monotonic() < end_s:
        pass
    span_s = SPAN * (time.monotonic() - job.begun_s)
    job.root.send_signal(signal.SIGTERM)
    outcome = _judge(chain, job, number, f"{chain.kind} undisturbed", job.wait(END_LIMIT_S))
    return outcome, span_s


def _hit(chain: Chain, job: RunningJob, number: int, draw: random.Random, span_s: float) -> Outcome:
    name, after_s = draw.choice(SIGNALS), draw.uniform(0.0, span_s)
    ended = job.wait(after_s)
    processes = job.processes()
    by_role: dict[str, list[int]] = {}
    for pid, role in processes.items():
        by_role.setdefault(role, []).append(pid)
    if ended is not None or not by_role:
        return _judge(chain, job, number, f"{chain.kind} ended by itself", ended)
    role = draw.choice(sorted(by_role))
    pid = draw.choice(sorted(by_role[role]))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, getattr(signal, name))
    if name == "SIGSTOP":
        job.wait(draw.uniform(*STOPPED_S))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    description = (
        f"{chain.kind}{' async' * chain.is_async} {name} to {role} {pid} after {after_s:.2f} s"
    )
    status = job.wait(AGAIN_LIMIT_S)
    if status is None:  # The job may continue despite the signal, so ask it to exit.
        job.root.send_signal(signal.SIGTERM)
        description += ", then SIGTERM"
        status = job.wait(END_LIMIT_S)
    return _judge(chain, job, number, description, status)


def _judge(
    chain: Chain, job: RunningJob, number: int, description: str, status: int | None
) -> Outcome:
    faults = [f"the job did not end within {END_LIMIT_S:g} s"] if status is None else []
    left = job.left() if status is not None else []
    faults += [f"left: {text}" for text in left]
    lines = job.log.read_text(errors="replace").splitlines()
    bad = [line for line in lines if _BAD.search(line)]
    if chain.kind == "pipeline" and any(_LOST in line for line in lines):
        # These errors are allowed, because a library raises them and a user's script does not catch
        # them.
        bad = []
    is_early = not chain.losses(number) and any("KeyboardInterrupt" in line for line in lines)
    if chain.kind == "pipeline" and is_early and "SIGINT" in description:
        bad = []  # Python prints a traceback for SIGINT before the user's script trains.
    if chain.kind == "torchrun" and not any("[rank" in line for line in bad):
        bad = []  # The launcher of PyTorch prints a traceback if it receives a signal.
    if any("init_import_site" in line for line in lines):
        bad = []  # The signal arrived before the interpreter started a program.
    if bad:
        first = lines.index(bad[0])
        faults.append("\n".join([f"in {job.log}:", *lines[first : first + _SHOWN_LINES]]))
    reasons = [line for line in lines if _REASON.search(line)]
    # Each rank, the launcher or manager, and each agent may print a reason.
    if len(reasons) > 5:
        faults.append(f"{len(reasons)} lines state a reason in {job.log}")
    is_ours = chain.kind != "torchrun" and "SIGKILL" not in description
    # If a signal arrives before a program of this project runs, the interpreter exits without a
    # message.
    has_begun = bool(lines) or "to fork" in description
    if status not in (0, None, -signal.SIGKILL) and not reasons and is_ours and has_begun:
        faults.append(
            f"the status is {status}, but no line states a reason: {tail(job.log, 300)!r}"
        )
    done = chain.losses(number)
    # If the signal asks the whole job to stop, instead of one process, no completed step may be
    # lost.
    is_asked = description.endswith(("then SIGTERM", "undisturbed")) or re.search(
        r"SIG(INT|TERM|HUP) to .* of depth 0 ", description
    )
    # If a rank or its data worker is killed, and SIGTERM arrives before the other ranks have
    # exited, the other ranks cannot save.
    is_whole = not re.search(
        r"SIGKILL to (fork (python-|pt_elastic|pt_data_worker)|.*pipeline_script)", description
    )
    is_saved = is_whole and (status == 128 + signal.SIGTERM or "then" not in description)
    if (
        is_asked
        and is_saved
        and done
        and status is not None
        and chain.newest_whole() != done[-1][0]
    ):
        faults.append(
            f"the job completed step {done[-1][0]}, but saved step {chain.newest_whole()}"
        )
    return Outcome(description=description, faults=faults, status=status, steps=len(done))


def _unlike(chain: Chain, losses: dict[int, set[float]]) -> list[str]:
    """Returns descriptions of up to three ``losses`` that differ from those of a reference job.

    No signals are sent to the reference job. ``losses`` contains the losses of each step of
    ``chain``.
    """
    alone = Chain(
        kind="launch" if chain.kind == "machines" else chain.kind,
        folder=chain.folder / "reference",
        is_fresh=chain.is_fresh,
    )
    job = alone.begin(0, max(losses))
    try:
        status = job.wait(END_LIMIT_S + max(losses) / 10)
    finally:
        job.close()
    expected = dict(alone.losses(0))
    if status != 0 or not set(losses) <= set(expected):
        return [
            (
                f"reference: status {status}, steps {sorted(set(losses) - set(expected))[:3]} were "
                "not completed"
            )
        ]
    most, least = (0.0, 0.0) if chain.kind in _BIT_FOR_BIT else (TOLERANCE, LEAST)
    return [
        f"the loss of step {step} is {loss!r}, expected {expected[step]!r}"
        for step, values in sorted(losses.items())
        for loss in values
        if abs(loss - expected[step]) > max(most * abs(expected[step]), least)
    ][:3]


def measure(folder: Path, hits: int, seed: int) -> Result:
    """Runs chains of each kind of job, and returns the rows of the table.

    Args:
        folder: Empty folder for all files of the jobs.
        hits: Number of signals for each kind.
        seed: Seed of all random choices.
    """
    outcomes: list[Outcome] = []
    for kind in KINDS:
        chain = Chain(kind=kind, folder=folder / kind, is_async=kind != "torchrun")
        outcomes += run_chains(chain, seed, hits, partial(print, flush=True))
    wrong = [f"{outcome.description}: {fault}" for outcome in outcomes for fault in outcome.faults]
    title = f"{hits * len(KINDS)} signals at random times: faults"
    row = Row(what=title, value=len(wrong), goal=0, note=one_line("; ".join(wrong)))
    return Result(rows=[row], facts={"interrupts": wrong})


def main() -> int:
    """Runs chains of jobs, and returns 1 if a job showed a fault.

    Usage: ``interrupts.py KIND[,KIND...] SEED HITS [async] [fresh]``.
    """
    kinds, seed, hits = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3])
    base = Path(os.environ.get("INTERRUPTS_FOLDER", tempfile.gettempdir()))
    has_fault = False
    for kind in kinds:
        folder = base / f"interrupts-{kind}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        is_async, is_fresh = "async" in sys.argv, "fresh" in sys.argv
        chain = Chain(kind=kind, folder=folder, is_async=is_async, is_fresh=is_fresh)
        outcomes = run_chains(chain, seed, hits, partial(print, flush=True))
        has_fault |= any(outcome.faults for outcome in outcomes)
    return int(has_fault)


if __name__ == "__main__":
    sys.exit(main())
