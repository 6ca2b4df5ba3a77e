"""Compares the memory and the step times that ``plan --try`` measures with those of a real job.

    python -m tests.soak.tried_ranks [--quick] [--vocab-size N ...] [--json FILE]

For each vocabulary size, a job of two pipeline ranks trains with a plan. Then ``plan --try`` runs
each of its ranks alone. Each row has the ratios of the values in these trials to those in the real
job. The last rank has the logits, whose size depends on the vocabulary. Small logits are allocated
from the heap, and large logits directly from the system. Exits with status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from harness.families import children_of
from harness.processes import environment, kill_tree
from harness.report import ROOT, Result, Row, measure, measured, parser_of

LIMIT_S = 600.0
RANKS = 2
WARM_UP = 2
"""Number of initial steps whose times are ignored."""
MOST_MEMORY = 0.05
"""Maximum relative difference between a rank's memory when it is tried and in the real job."""
MOST_STEP = 0.1
"""Maximum relative difference between the step times of a trial and of the real job."""
PLAN: dict[str, Any] = {
    "format": 1,
    "degrees": {"tensor": 1, "pipeline": RANKS, "data": 1, "chunks": 1},
    "placement": [{"nodes": 1, "processes_per_node": RANKS}],
    "partition": [2, 2],
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "schedule": "1f1b",
    "precision": "fp32",
}
STEP = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")


def model_of(vocabulary: int) -> str:
    """Returns the flags of a model with a vocabulary of ``vocabulary`` tokens."""
    return (
        "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128"
        f" --max-position-embeddings 128 --vocab-size {vocabulary}"
    )


def peak_bytes(pid: int) -> int:
    """Returns the peak resident memory of the process ``pid`` in bytes, or 0 if it has exited."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def rank_of(pid: int) -> int | None:
    """Returns the rank of the process ``pid``, or ``None`` if the process is not a rank."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ranks = [int(value[5:]) for value in variables if value.startswith(b"RANK=")]
    return ranks[0] if ranks else None


def run_job(plan: Path, model: str, steps: int) -> tuple[dict[int, int], list[float]]:
    """Trains a job with the plan file ``plan`` and the flags ``model`` for ``steps`` steps.

    Returns each rank's peak memory in bytes, and the step times in ms.

    Raises:
        RuntimeError: The job failed or took too long.
    """
    flags = "--mock-data --tokenizer-type NullTokenizer --eval-iters 0 --lr 1e-4 --log-interval 1"
    command = f"-m torch.distributed.run --standalone --nproc-per-node {RANKS} pretrain_gpt.py"
    arguments = [*command.split(), "--plan", str(plan), *model.split(), *flags.split()]
    log = plan.with_name("job.txt")
    with log.open("w") as output:
        job = subprocess.Popen(
            [sys.executable, *arguments, "--train-iters", str(steps)],
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    peaks = dict.fromkeys(range(RANKS), 0)
    end_s = time.monotonic() + LIMIT_S
    try:
        while job.poll() is None and time.monotonic() < end_s:
            for pid in children_of(job.pid):
                if (rank := rank_of(pid)) is not None:
                    peaks[rank] = max(peaks[rank], peak_bytes(pid))
            time.sleep(0.05)
    finally:
        kill_tree(job)
    text = log.read_text()
    steps_ms = [float(number) for number in STEP.findall(text)]
    if job.wait() != 0 or len(steps_ms) != steps:
        raise RuntimeError(f"the job failed; its output: {text[-500:]}")
    return peaks, steps_ms[WARM_UP:]


def try_ranks(plan: Path, model: str) -> dict[str, Any]:
    """Tries each rank of the plan file ``plan`` in a separate process.

    ``model`` contains the flags of the model.

    Returns the results, which the processes write to the plan file.

    Raises:
        RuntimeError: A trial failed.
    """
    for rank in range(RANKS):
        command = ["-m", "megatron.adaptive", "plan", "--try", str(plan)]
        done = subprocess.run(
            [sys.executable, *command, "--model", model, "--rank", str(rank)],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the trial of rank {rank} failed: {done.stderr[-500:]}")
    entry: dict[str, Any] = json.loads(plan.read_text(encoding="utf-8"))["tried"]
    return entry


def of_vocabulary(options: argparse.Namespace, vocabulary: int) -> Result:
    """Compares a job's memory and step time with the results of ``plan --try``.

    ``vocabulary`` is the vocabulary size of the job.
    """
    model = model_of(vocabulary)
    memory: dict[int, list[float]] = {rank: [] for rank in range(RANKS)}
    steps: list[float] = []
    peaks: dict[int, int] = {}
    for _ in range(1 if options.quick else 5):
        with tempfile.TemporaryDirectory() as folder:
            plan = Path(folder, "plan.json")
            plan.write_text(json.dumps(PLAN), encoding="utf-8")
            peaks, steps_ms = run_job(plan, model, WARM_UP + (2 if options.quick else 8))
            entry = try_ranks(plan, model)
        for row in entry["ranks"]:
            memory[row["rank"]].append(row["memory_bytes"] / peaks[row["rank"]])
        steps.append(entry["step_s"] * 1e3 / statistics.median(steps_ms))
    name = f"vocabulary {vocabulary}"
    rows: list[Row] = []
    for rank, quotients in memory.items():
        note = f"{peaks[rank] / 1e6:,.0f} MB in the job"
        rows += rows_of(f"{name}: memory of rank {rank}", quotients, MOST_MEMORY, note)
    rows += rows_of(f"{name}: step", steps, MOST_STEP)
    return Result(rows=rows, facts={name: {"memory": memory, "step": steps}})


def rows_of(title: str, quotients: list[float], goal: float, note: str = "") -> list[Row]:
    """Returns two rows about ``quotients``, the ratios of values in trials to values in real jobs.

    The first row has the ratios and the note ``note``. The second row has the difference between
    their median and 1, which must be at most ``goal``.
    """
    distance = abs(statistics.median(quotients) - 1)
    return [
        measured(title, quotients, note=note),
        measured(f"{title}, difference from 1", [distance], goal=goal),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Tries the ranks and prints the results. Returns 1 if a goal is missed."""
    parser = parser_of(__doc__, (), "one turn instead of five")
    parser.add_argument("--vocab-size", type=int, nargs="+", default=[16384, 32768], metavar="N")
    options = parser.parse_args(arguments)
    options.part = None
    parts = {f"{size}": partial(of_vocabulary, options, size) for size in options.vocab_size}
    return measure(parts, options)


if __name__ == "__main__":
    sys.exit(main())
