"""Trains while other programs run, and counts moves of layers that were caused only by noise.

    python -m tests.soak.noisy_jobs [--minutes N] [--only NAME ...] [--json FILE]

All ranks are equally fast, because their layers sleep for the same time
(``support/timed_layers.py``). Other programs use random processors for random times. A job with
``--repartition auto`` or ``--pipeline-schedule auto`` may move layers, but must move them back
at the next decision, unless the job ends first. A job that distributes microbatches by speed
must give each replica about half of them. Exits with status 1 if layers or the shares of replicas
stay uneven.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harness.report import Result, Row, measure, parser_of  # noqa: E402
from megatron.adaptive.engine.schedule_record import ScheduleRecord  # noqa: E402
from tests.multiprocess.launch import TIMED_LAYERS, Ranks, tail  # noqa: E402

LIMIT_S = 400.0
ITERATIONS, INTERVAL, BATCH = 48, 6, 20
PATIENCE = 2 * INTERVAL + 2
AUTO_PATIENCE = 2 * (8 + 1) + 2
"""Number of iterations within which a move of layers that gains nothing must be undone.

Two checks take place within this number of iterations. With ``--pipeline-schedule auto``, the first
checks are 8 measured iterations apart.
"""
MOST_MORE = 2
"""Maximum deviation of a replica's median number of microbatches from an equal share."""
COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --lr 1e-3 --mock-data --vocab-size 63 --tokenizer-type NullTokenizer "
    f"--eval-iters 0 --log-interval 1 --train-iters {ITERATIONS} --num-workers 0 "
    "--distributed-timeout-minutes 2"
).split()
REPARTITION = (
    "--num-layers 6 --global-batch-size 4 --pipeline-model-parallel-size 2 --repartition auto "
    f"--repartition-interval {INTERVAL}"
).split()
AUTO = (
    "--num-layers 8 --model-chunks 2 --global-batch-size 4 --pipeline-model-parallel-size 2 "
    "--pipeline-schedule auto"
).split()
DEALING = f"--num-layers 2 --global-batch-size {BATCH} --balance-replicas speed".split()
LAYER_MS = ("4", "7", "10")
"""Possible durations of a layer in milliseconds, one of which is drawn for each job.

Noise has a larger effect on shorter layers.
"""
_MOVED = re.compile(
    r"iteration +(\d+)/|repartition: [0-9-]+ -> ([0-9-]+):|the stages of ([0-9-]+) layers are now"
)
# The program also ends if its parent is killed.
_BUSY = """\
import os
os.sched_setaffinity(0, {{{}}})
parent = os.getppid()
while os.getppid() == parent:
    pass
"""


@dataclass(frozen=True)
class NoisyJob:
    """Results of a job that ran at the same time as other programs.

    Attributes:
        name: Name of the kind of job.
        minutes: Duration in minutes.
        moves: Number of moves of layers, including moves back.
        kept: Descriptions of moves that were not undone, and of shares of microbatches that
            remained uneven.
    """

    name: str
    minutes: float
    moves: int
    kept: tuple[str, ...]


@contextlib.contextmanager
def noise(seed: int) -> Iterator[None]:
    """Runs busy programs on random processors for random times, until the context exits.

    ``seed`` selects the processors and the times.
    """
    draw = random.Random(seed)
    done = threading.Event()
    processors = sorted(os.sched_getaffinity(0))

    def disturb() -> None:
        while not done.wait(draw.uniform(0.5, 4.0)):
            code = _BUSY.format(draw.choice(processors))
            programs = [
                subprocess.Popen([sys.executable, "-c", code]) for _ in range(draw.randint(1, 2))
            ]
            done.wait(draw.uniform(0.3, 4.0))
            for program in programs:
                program.kill()
                program.wait()

    thread = threading.Thread(target=disturb, name="noise")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def kept_moves(log: str, patience: int = PATIENCE) -> tuple[int, tuple[str, ...]]:
    """Returns the number of moves of layers in ``log``, and the moves that were not undone in time.

    Args:
        log: Log of a job whose ranks are equally fast.
        patience: Number of iterations within which a move must be undone.
    """
    iteration = moves = 0
    uneven_since: int | None = None
    partition = ""
    kept: list[str] = []
    for match in _MOVED.finditer(log):
        if match[1]:
            iteration = int(match[1])
            if uneven_since is not None and iteration - uneven_since == patience:
                kept.append(f"{partition} from iteration {uneven_since} to {iteration}")
            continue
        partition = match[2] or match[3]
        layers = [int(count) for count in partition.split("-")]
        if match[2] or len(set(layers)) > 1:
            moves += 1
        is_even = _of_ranks(layers, is_v="placed in a v" in log[match.start() : match.end() + 40])
        uneven_since = None if is_even else iteration
    return moves, tuple(kept)


def _of_ranks(layers: list[int], *, is_v: bool) -> bool:
    """Returns whether the first rank has half of all layers.

    Args:
        layers: Number of layers of each stage.
        is_v: Whether the last stage is on the first rank.
    """
    ranks = [0, 1, 1, 0] if is_v and len(layers) == 4 else [n % 2 for n in range(len(layers))]
    of_first = sum(count for count, rank in zip(layers, ranks, strict=True) if rank == 0)
    return 2 * of_first == sum(layers)


def moving_job(
    flags: list[str], patience: int, folder: Path, seed: int
) -> tuple[int, tuple[str, ...]]:
    """Trains a job with ``flags``, which may move layers.

    Returns the number of moves, and descriptions of moves that were not undone within ``patience``
    iterations. ``seed`` selects the noise. The log is written to ``folder``.
    """
    return kept_moves(_train(flags, folder, seed), patience)


def dealing_job(flags: list[str], folder: Path, seed: int) -> tuple[int, tuple[str, ...]]:
    """Trains a job with ``flags``, which distributes microbatches.

    Returns 0, because no layers move, and a description of the shares if they are uneven. ``seed``
    selects the noise. The log is written to ``folder``.
    """
    path = folder / "record.json"
    _train([*flags, "--record-schedule", str(path)], folder, seed)
    record = ScheduleRecord.load(path)
    more = [abs(len(record.dealt(step, BATCH)[0]) - BATCH // 2) for step in record.steps]
    half = statistics.median(more)
    return 0, (
        f"half of the steps deviate by {half:g} microbatches or more",
    ) if half > MOST_MORE else ()


def _train(flags: list[str], folder: Path, seed: int) -> str:
    """Trains a job with ``flags`` while other programs run, and returns the log of the job.

    ``seed`` selects the other programs. The log is written to ``folder``.
    """
    log = folder / "log.txt"
    command = [str(TIMED_LAYERS), *COMMON, *flags]
    variables = {"LAYER_MS": random.Random(seed).choice(LAYER_MS), "EACH_LAYER": "1"}
    with noise(seed):
        ranks = Ranks(command, world_size=2, log=log, limit_s=LIMIT_S, variables=variables)
        try:
            if ranks.wait(LIMIT_S) != [0, 0]:
                raise RuntimeError(f"the job failed: {tail(log)}")
        finally:
            ranks.kill()
    return log.read_text()


KINDS: dict[str, Callable[[Path, int], tuple[int, tuple[str, ...]]]] = {
    "repartition": partial(moving_job, REPARTITION, PATIENCE),
    "auto": partial(moving_job, AUTO, AUTO_PATIENCE),
    "dealing": partial(dealing_job, DEALING),
}
"""Maps the name of each kind of job to the function that runs it."""


def run_jobs(names: list[str], minutes: float, seed: int) -> list[NoisyJob]:
    """Runs one job of each kind in ``names``, and repeats this until ``minutes`` have passed.

    ``seed`` is the seed of the first job. Later jobs use the next seeds.
    """
    jobs: list[NoisyJob] = []
    end_s = time.monotonic() + 60 * minutes
    while time.monotonic() < end_s or len(jobs) < len(names):
        name = names[len(jobs) % len(names)]
        begin_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="noisy-") as folder:
            moves, kept = KINDS[name](Path(folder), seed + len(jobs))
        jobs.append(NoisyJob(name, (time.monotonic() - begin_s) / 60, moves, kept))
        print(f"{name}: {jobs[-1].minutes:.1f} minutes, {moves} moves, kept {kept}", flush=True)
    return jobs


def of_noise(options: argparse.Namespace) -> Result:
    """Runs jobs at the same time as other programs, and returns the rows of the table.

    With ``options.quick``, runs one job of each kind.
    """
    names = options.only or list(KINDS)
    jobs = run_jobs(names, 0 if options.quick else options.minutes, options.seed)
    rows = []
    for name in names:
        of_kind = [job for job in jobs if job.name == name]
        minutes, moves = sum(job.minutes for job in of_kind), sum(job.moves for job in of_kind)
        rows.append(
            Row(
                what=f"noise: {name}, moves without gain that were kept",
                value=sum(len(job.kept) for job in of_kind),
                goal=0,
                note=f"{len(of_kind)} jobs, {minutes:.1f} minutes, {moves} moves",
            )
        )
    return Result(rows, {"noise": [vars(job) for job in jobs]})


def main() -> int:
    """Runs the jobs and prints the results. Returns 1 if layers or shares stayed uneven."""
    parser = parser_of(__doc__, {"noise": of_noise}, "one job of each kind")
    parser.add_argument("--minutes", type=float, default=60, help="minimum total time in minutes")
    parser.add_argument("--only", nargs="+", choices=KINDS, help="kinds of jobs")
    parser.add_argument("--seed", type=int, default=500, help="seed of the noise")
    options = parser.parse_args()
    return measure({"noise": partial(of_noise, options)}, options)


if __name__ == "__main__":
    sys.exit(main())
