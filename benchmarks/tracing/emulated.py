"""Real runs whose work is slept: what the diagnosis and the figures make of them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tracing.cases import RANKS, Outcome, judge
from benchmarks.tracing.synthetic import Fault
from megatron.adaptive.trace.diagnose import diagnose
from megatron.adaptive.trace.figures import run_figures
from megatron.adaptive.trace.read import RunTrace, read_run

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("rank x1.3", "rank x2", "link delay", "spikes", "slow data", "rank x1.1", "quiet")
"""In turn; one in seven runs has no fault."""

HALF_S = {"F 50 ms, B 100 ms": 0.025, "F 20 ms, B 40 ms": 0.010}
"""Of a half-rank's F, B and W where bubbles are compared."""


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """One run.

    Attributes:
        folder: for its traces.
        num_ranks: pipeline ranks.
        replicas: data-parallel replicas, each a pipeline of its own.
        num_microbatches: per step.
        iterations: steps.
        schedule: name of the order.
        sigma: spread of each action.
        times: of a half-rank, see ``emulated.scenarios.Times``.
        seed: of all draws.
        fault: what is wrong.
    """

    folder: str
    num_ranks: int = RANKS
    replicas: int = 1
    num_microbatches: int = 8
    iterations: int = 16
    schedule: str = "1f1b"
    sigma: float = 0.07
    times: dict[str, float]
    seed: int = 0
    fault: Fault | None = None


def measure(runs: int, seed: int, limit_s: float) -> list[Outcome]:
    """Run and diagnose.

    Args:
        runs: how many; half with one replica, half with two.
        seed: of all draws.
        limit_s: everything is killed after it.

    Raises:
        RuntimeError: a rank failed, or the time limit passed.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = [_draw(Path(folder), number, seed) for number in range(runs)]
        execute([run for _, run in plan], limit_s)
        outcomes = []
        for group, run in plan:
            trace = read_run(run.folder)
            said = diagnose(trace)
            outcomes.append(judge(group, run.fault, said, {**asdict(run), "real": True}))
        return outcomes


def bubble_errors(runs: int, seed: int, half_s: float) -> list[float]:
    """Run without fault.

    Args:
        runs: how many.
        seed: of all draws.
        half_s: of a half-rank's F, B and W.

    Returns:
        Per run the mean over the ranks of the trace's bubble minus the true one, percentage points.

    Raises:
        RuntimeError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = [
            RealRun(
                folder=str(Path(folder) / str(number)),
                schedule=("1f1b", "adaptive")[number % 2],
                iterations=5,
                times={"forward_s": half_s, "backward_s": half_s, "weight_s": half_s},
                seed=seed + number,
            )
            for number in range(runs)
        ]
        execute(plan, limit_s=60.0 * runs)
        return [bubble_error(read_run(run.folder), run) for run in plan]


def execute(runs: Sequence[RealRun], limit_s: float) -> None:
    """Run some runs one after the other; their traces and truths lie in their folders.

    Raises:
        RuntimeError: a rank failed, or the time limit passed.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps([asdict(run) for run in runs]), encoding="utf-8")
        job = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.tracing.worker", str(plan)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        try:
            status = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{len(runs)} traced runs took more than {limit_s:g} s") from None
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        if status:
            raise RuntimeError(f"the traced runs ended with status {status}")


def bubble_error(trace: RunTrace, run: RealRun) -> float:
    """Bubble of the trace minus the stages' own, median of the iterations' means, in points."""
    figures = run_figures(trace)
    ranks = sorted(trace.ranks)
    truths = [json.loads((Path(run.folder) / f"truth_{r}.json").read_text()) for r in ranks]
    errors = []
    for number, iteration in enumerate(figures.iterations.tolist()):
        spans = [np.array(truth[iteration - 1]) for truth in truths]
        true = []
        for rank in ranks:
            replica = [
                s for r, s in zip(ranks, spans, strict=True) if (r - rank) % run.replicas == 0
            ]
            step_s = max(s[:, 1].max() for s in replica) - min(s[:, 0].min() for s in replica)
            own = spans[ranks.index(rank)]
            true.append(1 - (own[:, 1] - own[:, 0]).sum() / step_s)
        errors.append(float(np.mean(figures.bubble_fraction[number] - np.array(true))) * 100)
    return float(np.median(errors))


def _draw(folder: Path, number: int, seed: int) -> tuple[str, RealRun]:
    rng = random.Random(f"real {seed}/{number}")
    group = GROUPS[number % len(GROUPS)]
    replicas = 1 + number // len(GROUPS) % 2
    half_s = rng.uniform(0.003, 0.005)
    run = RealRun(
        folder=str(folder / str(number)),
        replicas=replicas,
        schedule=rng.choice(("1f1b", "adaptive")),
        sigma=rng.uniform(0.05, 0.1),
        times={"forward_s": half_s, "backward_s": half_s, "weight_s": half_s},
        seed=rng.randrange(2**31),
        fault=_fault(group, replicas, 2 * half_s, rng),
    )
    return group, run


def _fault(group: str, replicas: int, forward_s: float, rng: random.Random) -> Fault | None:
    rank = rng.randrange(RANKS * replicas)
    options: dict[str, Any] = {"first": rng.choice((1, 1, 7))}
    if group == "quiet":
        return None
    if group.startswith("rank x"):
        return Fault(kind="slow-rank", rank=rank, factor=float(group[6:]), **options)
    if group == "spikes":
        return Fault(kind="spikes", rank=rank, factor=4.0, probability=0.08, **options)
    if group == "slow data":
        return Fault(kind="slow-data", rank=rank % replicas, seconds=forward_s * 0.6, **options)
    position, replica = divmod(rank, replicas)
    to = position + 1 if position + 1 < RANKS else position - 1
    return Fault(
        kind="slow-link", rank=rank, to=to * replicas + replica, seconds=forward_s, **options
    )
