"""What copies of the state in memory cost a step, and how many steps a lost node costs with them.

    python benchmarks/copies.py [--quick] [--json FILE]

A small GPT on two nodes of this machine, with a copy every tenth step; then on three with one at
each, of which one is killed at other and other moments. Exits with status 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.elastic.jobs import ElasticJob  # noqa: E402

LIMIT_S = 400.0
GOAL_LOST, GOAL_COST = 1, 0.05
EVERY = 10
FLAGS = "--train-iters 9999 --save-interval 9999".split()
# Steps that are longer than what is to be seen beside them.
LARGER = "--num-layers 8 --hidden-size 128 --seq-length 128 --max-position-embeddings 128".split()


def main() -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="copies-") as folder:
        figures = cost(Path(folder), cycles=8 if options.quick else 30)
        figures |= losses(Path(folder), times=2 if options.quick else 10)
    goals = [
        (f"{GOAL_LOST} step lost at most", figures["lost_steps"] <= GOAL_LOST),
        (f"steps at most {GOAL_COST:.0%} longer", figures["cost"] <= GOAL_COST),
    ]
    for text, met in goals:
        print(f"{'met   ' if met else 'MISSED'}  {text}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(met for _, met in goals) else 1


def cost(folder: Path, *, cycles: int) -> dict[str, Any]:
    """How much longer a step is for a copy: steps with one among steps without, in one job."""
    (here := folder / "cost").mkdir()
    words = [*FLAGS, *LARGER, "--exit-interval", str(EVERY * (cycles + 1) + 1)]
    job = ElasticJob(here, "ab", words, ["--replicate-every", str(EVERY)])
    try:
        job.end(LIMIT_S)
    finally:
        job.close()
    lines = job.lines()
    ended_ms = {line["iteration"]: line["unix_ns"] / 1e6 for line in lines if "iteration" in line}
    told = next(line["copies"] for line in lines if "copies" in line)
    plain, more = [], []
    for first in range(EVERY, EVERY * cycles + 1, EVERY):
        steps = [ended_ms[at + 1] - ended_ms[at] for at in range(first, first + EVERY)]
        usual = statistics.median(steps[3:-1])
        plain.append(usual)
        # It is copied and sent behind the first of them, and waited for at the end of the last.
        more.append(sum(steps[:2]) + steps[-1] - 3 * usual)
    step, copy = statistics.median(plain), statistics.median(more)
    print(
        f"steps of {step:.1f} ms take {copy:.2f} ms more with a copy, {copy / step:+.1%}"
        f" ({told}; {os.cpu_count()} cores for 2 processes and what they are sent by)"
    )
    return {"step_ms": step, "copy_ms": copy, "cost": copy / step, "copies": told}


def losses(folder: Path, *, times: int) -> dict[str, Any]:
    """Kill a node at a random moment of a step, and let another come in its place."""
    (here := folder / "losses").mkdir()
    moments = random.Random(1)
    job = ElasticJob(here, ["a", "b", "c0"], FLAGS)
    lost = []
    try:
        for number in range(times):
            epoch, name = 2 * number + 1, f"c{number}"
            wait_for_steps(job, epoch, 6)
            job.until(lambda name=name: is_present(job, name), f"node {name}", LIMIT_S)
            time.sleep(moments.random() * 0.2)
            agent = psutil.Process(job.agent(name))
            for one in [agent, *agent.children(recursive=True)]:
                one.kill()
            wait_for_steps(job, epoch + 1, 2)
            lost.append(max(job.steps(epoch)) - job.steps(epoch + 1)[0] + 1)
            job.change(["a", "b", f"c{number + 1}"])
    finally:
        job.close()
    restored = job.said().count("was restored from copies in memory")
    print(f"{times} nodes lost without notice, {restored} restored from copies: {lost} steps lost")
    return {"lost_steps": max(lost), "lost": lost, "restored": restored}


def wait_for_steps(job: ElasticJob, epoch: int, count: int) -> None:
    """Wait until an epoch has done some steps."""
    job.until(lambda: len(job.steps(epoch)) >= count, f"steps of epoch {epoch}", LIMIT_S)


def is_present(job: ElasticJob, name: str) -> bool:
    """Whether a node takes part, as the state tells."""
    machines = job.state().get("machines", [])
    return any(one["name"] == name and one["status"] == "present" for one in machines)


if __name__ == "__main__":
    sys.exit(main())
