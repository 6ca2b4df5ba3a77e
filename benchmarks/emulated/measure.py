"""Runs the emulated pipeline in processes of its own and hands back the records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .scenarios import Times

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One column of the table.

    Attributes:
        scenario: name of a scenario.
        num_microbatches: microbatches per step.
        repetitions: steps of each competitor, each with draws of its own.
    """

    scenario: str
    num_microbatches: int
    repetitions: int


def run(
    *,
    num_ranks: int,
    cases: list[Case],
    competitors: list[str],
    times: Times,
    seed: int = 1,
    warmups: int = 1,
    limit_s: float = 3600.0,
) -> list[dict[str, Any]]:
    """Measure all competitors in all cases with one set of processes.

    Args:
        num_ranks: ranks of the pipeline.
        cases: what to run, in order.
        competitors: names of those that take turns.
        times: mean durations.
        seed: of all draws.
        warmups: repetitions that are not recorded, for each number of microbatches.
        limit_s: everything is killed after it.

    Returns:
        One record per step: what was run, ``makespan_s``, and ``peak``, the most activations that
        any rank held, in microbatches of a whole rank.

    Raises:
        RuntimeError: a rank failed, or the time limit passed.
    """
    plan = {
        "num_ranks": num_ranks,
        "cases": [asdict(case) for case in cases],
        "competitors": competitors,
        "times": asdict(times),
        "seed": seed,
        "warmups": warmups,
    }
    with tempfile.TemporaryDirectory() as folder:
        plan_file, output = Path(folder) / "plan.json", Path(folder) / "records.json"
        plan_file.write_text(json.dumps(plan), encoding="utf-8")
        job = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.emulated.worker", str(plan_file), str(output)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        try:
            status = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the emulated pipeline of {num_ranks} ranks took more than {limit_s:g} s"
            ) from None
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        if status:
            raise RuntimeError(
                f"the emulated pipeline of {num_ranks} ranks ended with status {status}"
            )
        records: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))
        return records
