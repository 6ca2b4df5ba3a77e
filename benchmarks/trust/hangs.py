"""Jobs of the trainer that stand still, each for one known reason, and jobs that do not.

Each kind is brought about in one rank (``hanging_trainer.py``) by what really causes it, but for
two: a cut network, whose messages the sender drops, and disks of data and checkpoints that do not
answer, for which a pipe that nobody writes to stands.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from benchmarks.report import Result, Row, one_line
from tests.multiprocess.launch import ROOT, SMALL_GPT, Forkserver, environment, forkserver

KINDS = (
    *("stopped", "collective", "reader", "disk", "schedule", "network", "lock"),
    "interpreter lock",
)
CAUSES = {
    "stopped": "is stopped",
    "collective": r"which it has not entered",
    "reader": "reads data",
    "disk": "reads or writes a checkpoint",
    "schedule": "wait for each other",
    "network": "lost on the way",
    "lock": "waits for a lock",
    "interpreter lock": "holds the interpreter's lock",
}
SHAPES = ((2, 2, 1), (2, 1, 1), (4, 2, 1), (4, 4, 1), (4, 2, 2), (8, 4, 1), (8, 2, 2))
"""Ranks, pipeline ranks, tensor-parallel ranks."""
TRAINER = Path(__file__).with_name("hanging_trainer.py")
LIMIT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job with one hang.

    Attributes:
        kind: of the hang; ``none`` for a job without one.
        shape: of :data:`SHAPES`.
        rank: where it is.
        iteration: when.
        action: position within the step's actions.
        after_s: ``--hang-after-s``.
        machines: that the ranks count as of.
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
    """Returns so many hangs, of all kinds in turn."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        many = [one for one in SHAPES if one[1] > 1] if kind in _OF_PIPELINES else SHAPES
        shape = many[number // len(KINDS) % len(many)]
        ranks, stages, _ = shape
        rank = draw.randrange(ranks)
        if kind == "reader":  # of the first stage or the last
            rank = draw.choice([rank % (ranks // stages), ranks - 1 - rank % (ranks // stages)])
        if kind == "schedule":
            shape, rank = (2, 2, 1), 1
        program = "trainer"
        if kind in _ALSO_OF_A_LOOP and number // len(KINDS) % 3 == 2:
            program, shape = "pipeline", (shape[0], shape[1], 1)
        found.append(
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
    return found


_OF_PIPELINES = ("schedule", "network")
_ALSO_OF_A_LOOP = ("stopped", "collective", "reader", "lock", "interpreter lock")


def run(
    case: Case, folder: Path, *, iterations: int = 1000, on_hang: str = "report"
) -> dict[str, Any]:
    """Runs a job until it says that it hangs.

    Returns:
        ``said``, the line; ``waited_s``, from the last iteration's end to it; ``text``, all output;
        ``ended``, the statuses of the ranks where they are to end; ``shares``, of a processor,
        that the processes beside the ranks took, each.
    """
    folder.mkdir(parents=True)
    log, server = folder / "log.txt", forkserver()
    log.write_text("")
    ranks, stages, tensor = case.shape
    limits = [str(case.after_s), on_hang]
    words = [str(TRAINER), *SMALL_GPT.split(), "--num-layers", str(stages), "--mock-data"]
    words += ["--train-iters", str(iterations), "--lr-decay-style", "constant"]
    words += ["--log-interval", "1", "--hang-after-s", limits[0], "--on-hang", on_hang]
    words += ["--pipeline-model-parallel-size", str(stages), "--progress-dir", str(folder)]
    words += ["--tensor-model-parallel-size", str(tensor)]
    words += ["--save", str(folder / "saved"), "--save-interval", str(case.iteration)]
    if case.kind == "schedule":
        words += _orders(folder)
    if case.kind == "network":
        words += ["--transport", "tcp"]
    if case.program == "pipeline":
        words = [str(TRAINER.with_name("hanging_pipeline.py")), str(folder), str(iterations)]
        words += limits
    hang = {**vars(case), "folder": str(folder), "step_s": 0.05}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "HANG": json.dumps(hang),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    keys: list[str] = []
    ended: dict[str, int] = {}
    try:
        for rank in range(ranks):
            variables = environment(**common, RANK=str(rank), LOCAL_RANK=str(rank))
            keys.append(server.start(words, output=log, error=log, variables=variables))
        said, waited_s = _until_said(log, server, keys)
        shares = _shares(server, keys)
        if on_hang == "end":
            for key in keys:
                ended |= server.wait([key], 30.0)
    finally:
        _end(server, keys)
    text = log.read_text(errors="replace")
    return {"said": said, "waited_s": waited_s, "text": text, "ended": ended, "shares": shares}


def _until_said(log: Path, server: Forkserver, keys: list[str]) -> tuple[str, float]:
    seen, still_since_s, end_s = 0, time.monotonic(), time.monotonic() + LIMIT_S
    is_over = False
    while True:
        text = log.read_text(errors="replace")
        found = re.search("^hang: nothing.*", text, re.MULTILINE)
        if found or is_over or time.monotonic() > end_s:
            return found[0] if found else "", time.monotonic() - still_since_s
        if len(text) != seen:
            seen, still_since_s = len(text), time.monotonic()
        ended = server.wait(keys, 0.2)
        is_over = len(ended) == len(keys) or any(ended.values())


def _shares(server: Forkserver, keys: list[str]) -> list[float]:
    """Returns what share of a processor each process that watches has taken."""
    found = []
    for key in keys:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(server._pids[key]).children():
                if any(word.endswith("trace/hang.py") for word in child.cmdline()):
                    used = child.cpu_times()
                    found.append((used.user + used.system) / (time.time() - child.create_time()))
    return found


def _end(server: Forkserver, keys: list[str]) -> None:
    for key in keys:
        try:
            psutil.Process(server._pids[key]).kill()
        except psutil.NoSuchProcess:
            continue
    server.kill(keys)


def _orders(folder: Path) -> list[str]:
    """Writes two schedules, each possible, but not one on one rank and the other on another."""
    rows: dict[str, list[str]] = {"order": [], "other": []}
    for rank in range(2):
        turns = [word for m in range(8) for word in (f"{rank}F{m}", f"{rank}B{m}")]
        first = [f"{rank}F{m}" for m in range(8)] + [f"{rank}B{m}" for m in range(8)]
        rows["order"].append(",".join(turns))
        rows["other"].append(",".join(first))
    for name, lines in rows.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return ["--pipeline-schedule", "file", "--schedule-file", str(folder / "order.csv")]


def is_named_right(case: Case, said: str) -> bool:
    """Whether a line names rank and reason."""
    ranks = set(map(int, re.findall(r"rank (\d+) \(stage", said)))
    # Of a machine whose only rank hangs the others know no more.
    if not re.search(CAUSES[case.kind], said) and (case.machines < 2 or "no word" not in said):
        return False
    return case.rank in ranks if case.kind in _OF_PIPELINES else ranks == {case.rank}


def measure(folder: Path, count: int, quiet_min: float, seed: int) -> Result:
    """Runs hangs, and a job without one.

    Args:
        folder: for what they write.
        count: hangs.
        quiet_min: minutes of the other.
        seed: of where they are.
    """
    right, late, wrong, waits = 0, 0, [], []
    shares: list[float] = []
    for number, case in enumerate(cases(count, seed)):
        found = run(case, folder / str(number))
        shares += found["shares"]
        if not is_named_right(case, found["said"]):
            wrong.append(f"{case}: {found['said'] or found['text'][-300:]}")
            continue
        right += 1
        waits.append(found["waited_s"] - case.after_s)
        late += waits[-1] > 15
    false = quiet(folder / "quiet", quiet_min)
    rows = [
        Row(
            what=f"{count} hangs: rank and reason named right",
            value=right,
            goal=round(0.98 * count),
            least=True,
            note=one_line("; ".join(wrong)),
        ),
        Row(what="of them later than the limit + 15 s", value=late, goal=0),
        Row(what="longest after the limit", value=max(waits, default=None), unit="s"),
        Row(
            what="of a processor for the watch of a machine, reports and stacks included",
            value=max(shares, default=None),
            goal=0.01,
        ),
        Row(what=f"false alarms in {quiet_min:g} quiet minutes", value=false, goal=0),
    ]
    return Result(rows=rows, facts={"hangs": {"wrong": wrong, "after_limit_s": waits}})


def quiet(folder: Path, minutes: float) -> int:
    """Returns alarms of jobs that train, evaluate and save for so long, with short limits."""
    alarms, number, end_s = 0, 0, time.monotonic() + 60 * minutes
    while time.monotonic() < end_s:
        case = Case(kind="none", shape=SHAPES[number % 4], rank=0, iteration=5)
        found = run(case, folder / str(number), iterations=60)
        alarms += found["text"].count("hang: nothing")
        number += 1
    return alarms
