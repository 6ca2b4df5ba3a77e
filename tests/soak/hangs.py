"""Runs jobs of the trainer that stall for a known reason, and jobs that do not stall.

In most kinds of hangs, one rank (``hanging_trainer.py``) produces the real cause. Two causes are
imitated: for a broken network, the sender drops its messages, and for a disk that does not
respond, the rank reads a pipe without a writer.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.report import Result, Row, one_line
from tests.multiprocess.launch import ROOT, SMALL_GPT, Forkserver, Ranks, forkserver

KINDS = (
    *("stopped", "collective", "reader", "disk", "schedule", "network", "lock"),
    *("interpreter lock", "disk behind"),
)
CAUSES = {
    "stopped": "is stopped",
    "collective": r"which this rank has not entered",
    "reader": "reads data",
    "disk": "reads or writes a checkpoint",
    "disk behind": "reads or writes a checkpoint",
    "schedule": "wait for each other",
    "network": "the message was lost",
    "lock": "waits for a lock",
    "interpreter lock": r"holds the interpreter lock",
}
SHAPES = ((2, 2, 1), (2, 1, 1), (4, 2, 1), (4, 4, 1), (4, 2, 2), (8, 4, 1), (8, 2, 2))
"""Shapes of jobs: number of ranks, of pipeline stages, and of tensor-parallel ranks."""
TRAINER = Path(__file__).with_name("hanging_trainer.py")
LIMIT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Job that hangs once, or that does not hang.

    Attributes:
        kind: Kind of the hang, or ``none`` for a job without a hang.
        shape: Shape of the job, an element of :data:`SHAPES`.
        rank: Rank that hangs.
        iteration: Index of the iteration in which the rank hangs.
        action: Index of the action within the iteration in which the rank hangs.
        after_s: Value of ``--hang-after-s``, in seconds.
        machines: Number of machines to which the ranks are assigned.
        program: ``trainer``, or ``pipeline`` for a user's loop around a ``Pipeline``.
    """

    kind: str
    shape: tuple[int, int, int]
    rank: int
    iteration: int = 4
    action: int = 0
    after_s: float = 10.0
    machines: int = 1
    program: str = "trainer"

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        job = f"{self.kind} on rank {self.rank} of {self.program} {sizes}"
        return f"{job}, machines: {self.machines}"


def cases(count: int, seed: int) -> list[Case]:
    """Returns ``count`` randomly drawn jobs that hang, cycling through all kinds of hangs.

    ``seed`` is the seed of all random choices.
    """
    draw = random.Random(seed)
    hangs = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        many = [shape for shape in SHAPES if shape[1] > 1] if kind in _OF_PIPELINES else SHAPES
        shape = many[number // len(KINDS) % len(many)]
        ranks, stages, _ = shape
        rank = draw.randrange(ranks)
        if kind == "reader":  # Only the first and the last stage read data.
            rank = draw.choice([rank % (ranks // stages), ranks - 1 - rank % (ranks // stages)])
        # A different schedule on the first stage would not cause a deadlock.
        if kind == "schedule":
            shape = (ranks, stages, 1)
            rank = draw.randrange(ranks // stages, ranks)
        program = "trainer"
        if kind in _ALSO_OF_A_LOOP and number // len(KINDS) % 3 == 2:
            program, shape = "pipeline", (shape[0], shape[1], 1)
        hangs.append(
            Case(
                kind=kind,
                shape=shape,
                rank=rank,
                iteration=draw.randrange(3, 6),
                action=draw.randrange(4),
                machines=1 + (number // len(KINDS)) % 2,
                program=program,
            )
        )
    return hangs


_OF_PIPELINES = ("schedule", "network")
_ALSO_OF_A_LOOP = ("stopped", "collective", "reader", "lock", "interpreter lock")


def run(
    case: Case,
    folder: Path,
    *,
    iterations: int = 1000,
    on_hang: str = "report",
    server: Forkserver | None = None,
) -> dict[str, Any]:
    """Runs the job ``case`` until the job reports that it hangs.

    Args:
        case: Description of the job.
        folder: New folder for the job's files.
        iterations: Number of iterations if the job does not hang.
        on_hang: Value of ``--on-hang``, ``report`` or ``end``.
        server: Fork server of the job's ranks, or ``None`` for the server of this process.

    Returns:
        Dict with ``said`` (line that reports the hang), ``waited_s`` (seconds from the end of the
        last iteration to this line), ``text`` (all output), ``ended`` (exit statuses of the ranks
        if ``on_hang`` is ``end``) and ``shares`` (fraction of a processor that each hang detector
        used).
    """
    log, ended = folder / "log.txt", {}
    job = start(case, folder, iterations, on_hang, server)
    try:
        said, waited_s = _until_said(log, job)
        shares = _shares(job)
        if on_hang == "end":
            for key in job.keys:
                ended |= job.server.wait([key], 30.0)
    finally:
        _end(job)
    text = log.read_text(errors="replace")
    return {"said": said, "waited_s": waited_s, "text": text, "ended": ended, "shares": shares}


def start(
    case: Case, folder: Path, iterations: int, on_hang: str, server: Forkserver | None
) -> Ranks:
    """Starts the ranks of the job ``case``, which write to ``log.txt`` in ``folder``.

    See :func:`run` for the other parameters.
    """
    folder.mkdir(parents=True)
    ranks, stages, tensor = case.shape
    limits = [str(case.after_s), on_hang]
    command = [str(TRAINER), *SMALL_GPT.split(), "--num-layers", str(stages), "--mock-data"]
    command += ["--train-iters", str(iterations), "--lr-decay-style", "constant"]
    command += ["--log-interval", "1", "--hang-after-s", limits[0], "--on-hang", on_hang]
    command += ["--pipeline-model-parallel-size", str(stages), "--progress-dir", str(folder)]
    command += ["--tensor-model-parallel-size", str(tensor)]
    command += ["--save", str(folder / "saved"), "--save-interval", str(case.iteration)]
    if case.kind == "schedule":
        command += _orders(folder, stages, 8 * stages * tensor // ranks)
    if case.kind == "disk behind":
        command += ["--async-save"]
    if case.kind == "network":
        command += ["--transport", "tcp"]
    if case.kind == "quiet":
        command += ["--keep-checkpoints", "1", "--eval-interval", "15"]
    if case.program == "pipeline":
        command = [str(TRAINER.with_name("hanging_pipeline.py")), str(folder), str(iterations)]
        command += limits
    hang = {**vars(case), "folder": str(folder), "step_s": 0.05}
    return Ranks(
        command,
        world_size=ranks,
        log=folder / "log.txt",
        limit_s=LIMIT_S,
        variables={"HANG": json.dumps(hang), "CUDA_VISIBLE_DEVICES": ""},
        server=server,
    )


def _end(job: Ranks) -> None:
    """Kills the ranks of ``job`` and all descendants, because ranks may ignore other signals."""
    for process in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    job.kill()


def _until_said(log: Path, job: Ranks) -> tuple[str, float]:
    seen, still_since_s, end_s = 0, time.monotonic(), time.monotonic() + LIMIT_S
    is_over = False
    while True:
        text = log.read_text(errors="replace")
        match = re.search("^hang: no progress.*", text, re.MULTILINE)
        if match or is_over or time.monotonic() > end_s:
            return match[0] if match else "", time.monotonic() - still_since_s
        if len(text) != seen:
            seen, still_since_s = len(text), time.monotonic()
        ended = job.wait(0.2)
        is_over = len(ended) == len(job.keys) or any(ended)


def _shares(job: Ranks) -> list[float]:
    """Returns the fraction of a processor's time that each rank's hang detector has used."""
    shares = []
    for process in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in process.children():
                if any(word.endswith("trace/hang_watch.py") for word in child.cmdline()):
                    used = child.cpu_times()
                    shares.append((used.user + used.system) / (time.time() - child.create_time()))
    return shares


def _orders(folder: Path, stages: int, count: int) -> list[str]:
    """Writes two valid schedules to ``folder``, and returns flags that select the first schedule.

    The schedules have ``stages`` stages and ``count`` microbatches. The job deadlocks if some ranks
    follow the first schedule and other ranks follow the second.
    """
    rows: dict[str, list[str]] = {"order": [], "other": []}
    for stage in range(stages):
        forwards = [f"{stage}F{m}" for m in range(count)]
        backwards = [f"{stage}B{m}" for m in range(count)]
        turns = [word for both in zip(forwards, backwards, strict=True) for word in both]
        rows["order"].append(",".join(turns))
        rows["other"].append(",".join(forwards + backwards))
    for name, lines in rows.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return ["--pipeline-schedule", "file", "--schedule-file", str(folder / "order.csv")]


def is_named_right(case: Case, said: str) -> bool:
    """Returns whether the line ``said`` states the right rank and reason for ``case``."""
    ranks = set(map(int, re.findall(r"rank (\d+) \(stage", said)))
    # If the rank that hangs is the only rank on its machine, other machines cannot know the reason.
    if not re.search(CAUSES[case.kind], said) and (
        case.machines < 2 or "did not receive a message" not in said
    ):
        return False
    return case.rank in ranks if case.kind in _OF_PIPELINES else ranks == {case.rank}


def measure(folder: Path, count: int, quiet_min: float, seed: int, beside: int = 1) -> Result:
    """Runs jobs that hang and jobs that do not hang, and returns the rows of the table.

    The result of each finished job is stored in ``hangs.jsonl`` or ``quiet.jsonl``. If ``folder``
    is used again, these jobs are not repeated.

    Args:
        folder: Folder for the files of all jobs.
        count: Number of hangs.
        quiet_min: Total duration of the jobs without a hang, in minutes.
        seed: Seed of all random numbers.
        beside: Number of concurrent hanging jobs.
    """
    kept = _Kept(folder / "hangs.jsonl")
    left = [
        outcomes
        for outcomes in enumerate(cases(count, seed))
        if f"{seed}/{outcomes[0]}" not in kept.rows
    ]
    servers = threading.local()

    def hang(numbered: tuple[int, Case]) -> None:
        if not hasattr(servers, "own"):
            servers.own = Forkserver(str(ROOT))
        number, case = numbered
        result = run(case, folder / f"{seed}-{number}-{time.time_ns()}", server=servers.own)
        said = result["said"] or one_line(result["text"][-300:])
        right = is_named_right(case, result["said"])
        more = {"after_limit_s": result["waited_s"] - case.after_s, "shares": result["shares"]}
        kept.add(f"{seed}/{number}", kind=case.kind, case=str(case), right=right, said=said, **more)

    with ThreadPoolExecutor(beside) as pool:
        list(pool.map(hang, left))
    rows = [kept.rows[f"{seed}/{number}"] for number in range(count)]
    wrong = [f"{row['case']}: {row['said']}" for row in rows if not row["right"]]
    waits = [row["after_limit_s"] for row in rows if row["right"]]
    shares = [share for row in rows for share in row["shares"]]
    minutes, alarms = quiet(folder, quiet_min, seed)
    kinds = {kind: [row["right"] for row in rows if row["kind"] == kind] for kind in KINDS}
    table = [
        Row(
            what=f"{count} hangs: correct rank and reason",
            value=count - len(wrong),
            goal=round(0.98 * count),
            least=True,
            note=one_line("; ".join(wrong)),
        ),
        *(
            Row(what=f"of {len(outcomes)}: {kind}", value=sum(outcomes))
            for kind, outcomes in kinds.items()
        ),
        Row(
            what="hangs reported more than 15 s after the limit",
            value=sum(w > 15 for w in waits),
            goal=0,
        ),
        Row(
            what="longest time from the limit to the report",
            value=max(waits, default=None),
            unit="s",
        ),
        Row(
            what="share of a processor for the hang detector, with reports and stacks",
            value=max(shares, default=None),
            goal=0.01 if rows else None,
        ),
        Row(what="minutes of jobs without hangs", value=minutes, goal=quiet_min, least=True),
        Row(
            what="false alarms in these minutes",
            value=len(alarms),
            goal=0,
            note=one_line("; ".join(alarms)),
        ),
    ]
    return Result(rows=table, facts={"hangs": {"wrong": wrong, "after_limit_s": waits}})


class _Kept:
    """Stores the results of finished jobs, so that a stopped soak test can resume.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: dict[str, dict[str, Any]] = {row["key"]: row for row in map(json.loads, lines)}

    def add(self, key: str, **row: Any) -> None:
        """Stores the results ``row`` of the job ``key``, in memory and in the file."""
        self.rows[key] = {"key": key, **row}
        with self._path.open("a") as file:
            file.write(json.dumps(self.rows[key]) + "\n")


QUIET_AT_ONCE = 30
QUIET_LIMITS_S = (8.0, 12.0, 20.0)
"""Possible values of ``--hang-after-s``, in seconds, for jobs without a hang."""


def quiet(folder: Path, minutes: float, seed: int) -> tuple[float, list[str]]:
    """Runs jobs that pause but do not hang, several at a time, with short hang timeouts.

    ``seed`` is the seed of all random numbers.

    The jobs run for ``minutes`` minutes in total, and write to ``folder``. Two thirds of the jobs
    are loops around a ``Pipeline``. The other jobs run the trainer with evaluations and
    checkpoints.

    Returns:
        Total minutes for which the jobs ran, and the false alarms.
    """
    kept = _Kept(folder / "quiet.jsonl")
    done_min = sum(row["minutes"] for row in kept.rows.values())
    draw = random.Random(f"{seed} {len(kept.rows)}")
    if done_min >= minutes:
        return done_min, [alarm for row in kept.rows.values() for alarm in row["alarms"]]
    server = forkserver()
    count = max(1, min(QUIET_AT_ONCE, round((minutes - done_min) / 5)))
    span_s = min(420.0, 60 * (minutes - done_min) / count + 5)
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(count):
            case = Case(
                kind="quiet",
                shape=(2, 2, 1),
                rank=draw.randrange(1 << 30),  # The rank is used as the seed of the pauses.
                after_s=draw.choice(QUIET_LIMITS_S),
                machines=draw.choice((1, 2)),
                iteration=20,
                program="trainer" if number % 3 == 2 else "pipeline",
            )
            work = folder / f"quiet-{len(kept.rows) + number}-{time.time_ns()}"
            job = start(case, work, 100_000, "report", server)
            stack.callback(_end, job)
            started.append((case, work, job, time.monotonic()))
            time.sleep(1.0)  # Starting a job takes processor time, so start one job at a time.
        end_s = time.monotonic() + span_s
        while (left_s := end_s - time.monotonic()) > 0:
            server.wait([key for entry in started for key in entry[2].keys], min(left_s, 1.0))
            time.sleep(0.5)
        now_s = time.monotonic()
        for case, work, job, since_s in started:
            text = (work / "log.txt").read_text(errors="replace")
            if job.wait(0.0):
                raise RuntimeError(f"{case} ended: {text[-2000:]}")
            steps = len(re.findall(r"^step |iteration +\d+/", text, re.MULTILINE))
            kept.add(
                f"{len(kept.rows)} {time.time_ns()}",
                case=str(case),
                minutes=(now_s - since_s) / 60,
                steps=steps,
                alarms=re.findall("^hang: no progress.*", text, re.MULTILINE),
            )
    return quiet(folder, minutes, seed)
