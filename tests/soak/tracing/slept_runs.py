"""Runs jobs of processes that sleep instead of computing, and diagnoses their traces."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.processes import fork_ranks
from megatron.adaptive.trace.diagnose import diagnose
from megatron.adaptive.trace.metrics import run_figures
from megatron.adaptive.trace.read import read_run
from tests.soak.tracing.cases import RANKS, Outcome, draw_fault, judge
from tests.support.synthetic_trace import SyntheticRun

GROUPS = ("rank x1.3", "rank x2", "link delay", "spikes", "slow data", "rank x1.1", "quiet")
"""Faults of successive runs, in rotation. The name ``quiet`` stands for a run without a fault.
"""

HALF_S = {"F 50 ms, B 100 ms": 0.025, "F 20 ms, B 40 ms": 0.010}
"""Time in seconds that each kind of pass takes for half of a rank's layers.

The kinds are forward pass, input gradient and weight gradient.
"""


def measure(runs: int, seed: int, limit_s: float) -> list[Outcome]:
    """Runs jobs of sleeping processes, and compares the diagnosis of each with its fault.

    Args:
        runs: Number of jobs. Jobs have one or two replicas.
        seed: Seed of all random numbers.
        limit_s: Timeout in seconds, after which all processes are killed.

    Raises:
        RuntimeError: A rank failed, or the timeout passed.
    """
    outcomes = []
    for number in range(runs):
        group, run = _draw(number, seed)
        fault = run.faults[0] if run.faults else None
        with tempfile.TemporaryDirectory() as folder:
            execute(Path(folder), run, limit_s / runs)
            said = diagnose(read_run(folder))
        outcomes.append(judge(group, fault, said, {**asdict(run), "real": True}))
    return outcomes


def bubble_errors(runs: int, seed: int, half_s: float) -> list[float]:
    """Measures the errors of the bubbles in the traces of runs without a fault.

    Args:
        runs: Number of runs.
        seed: Seed of all random numbers.
        half_s: Time in seconds that a forward pass, an input gradient and a weight gradient each
            take for half of a rank's layers.

    Returns:
        For each run, the bubble in the trace minus the true bubble, averaged over ranks, in
        percentage points.

    Raises:
        RuntimeError: A rank failed.
    """
    errors = []
    for number in range(runs):
        schedule = ("1f1b", "adaptive")[number % 2]
        run = real_run(half_s, schedule=schedule, iterations=5, seed=seed + number)
        with tempfile.TemporaryDirectory() as folder:
            truths = execute(Path(folder), run, limit_s=60.0)
            errors.append(bubble_error(Path(folder), truths))
    return errors


def execute(folder: Path, run: SyntheticRun, limit_s: float) -> list[Any]:
    """Runs a job with one sleeping process per rank.

    Args:
        folder: Folder for the traces of the run.
        run: Description of the run.
        limit_s: Timeout in seconds, after which all processes are killed.

    Returns:
        Start and end times in seconds of all actions, by rank and iteration.

    Raises:
        RuntimeError: A rank failed, or the timeout passed.
    """
    plan = {"folder": str(folder), "run": asdict(run)}
    return list(fork_ranks("tests.soak.tracing.slept_rank", run.world_size, limit_s, plan))


def bubble_error(folder: Path, truths: Sequence[Any]) -> float:
    """Returns the bubble in the trace in ``folder`` minus the true bubble, in percentage points.

    ``truths`` contains the true times of the actions of each rank, by iteration.

    The difference is averaged over ranks. The result is the median over iterations.
    """
    figures = run_figures(read_run(folder))
    errors = []
    for number, iteration in enumerate(figures.iterations.tolist()):
        spans = [np.array(truth[iteration - 1]) for truth in truths]
        ends = np.array([(s[:, 0].min(), s[:, 1].max()) for s in spans])
        busy = np.array([(s[:, 1] - s[:, 0]).sum() for s in spans])
        for pipeline in figures.pipelines:
            step_s = ends[pipeline, 1].max() - ends[pipeline, 0].min()
            true = 1 - busy[pipeline] / step_s
            errors.append(figures.bubble_fraction[number, pipeline] - true)
    means = np.reshape(errors, (len(figures.iterations), -1)).mean(axis=1)
    return float(np.median(means)) * 100


def real_run(half_s: float, **options: Any) -> SyntheticRun:
    """Returns the settings of a job whose ranks sleep.

    A forward pass, an input gradient and a weight gradient each take ``half_s`` seconds for half of
    a stage, and ``options`` replace other settings.
    """
    times = dict.fromkeys(("forward_s", "backward_s", "weight_s"), 2 * half_s)
    return SyntheticRun(
        **{
            "num_ranks": RANKS,
            "schedule": "1f1b",
            "action_sigma": 0.07,
            "data_s": 0.02 * half_s,
            **times,
            **options,
        }
    )


def _draw(number: int, seed: int) -> tuple[str, SyntheticRun]:
    rng = random.Random(f"real {seed}/{number}")
    group = GROUPS[number % len(GROUPS)]
    replicas = 1 + number // len(GROUPS) % 2
    half_s = rng.uniform(0.003, 0.005)
    run = real_run(
        half_s,
        replicas=replicas,
        iterations=16,
        schedule=rng.choice(("1f1b", "adaptive")),
        action_sigma=rng.uniform(0.05, 0.1),
        seed=rng.randrange(2**31),
    )
    if group == "quiet":
        return group, run
    fault = draw_fault(group, run, rng)
    fault = replace(fault, first=rng.choice((1, 1, 7)))
    if group == "spikes":
        fault = replace(fault, factor=4.0, probability=0.08)
    elif fault.seconds:
        fault = replace(fault, seconds=2 * half_s * (0.6 if group == "slow data" else 1.0))
    return group, replace(run, faults=(fault,))
