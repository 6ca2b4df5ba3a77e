"""What copies of the state in memory cost a step, and how many steps a lost node costs with them.

    python benchmarks/copies.py [--quick] [--json FILE]

A small GPT on two ranks with a copy at every step, or at one in ten, in turns with none; then a job
on three nodes with a copy at every step, of which one is killed at a random moment, again and
again. Takes about five minutes on two cores, two with ``--quick``. Exits with status 1 where a goal
is missed.
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
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.elasticity import copying  # noqa: E402
from tests.cluster.jobs import ElasticJob  # noqa: E402

LIMIT_S = 180.0
GOAL_LOST, GOAL_COST = 1, 0.05
FLAGS = "--train-iters 99999 --save-interval 99999".split()


class Row(NamedTuple):
    """A figure of the table; without a goal it is only shown."""

    what: str
    figure: str
    goal: str = ""
    met: bool | None = None


def main() -> int:
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    figures = cost(3 if options.quick else 8)
    with tempfile.TemporaryDirectory(prefix="copies-") as folder:
        figures |= losses(Path(folder), times=1 if options.quick else 4)
    rows = table(figures)
    print_table(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(row.met is not False for row in rows) else 1


def cost(rounds: int) -> dict[str, Any]:
    """How much longer steps are for copies."""
    result = copying.measure(rounds)
    figures: dict[str, Any] = {"copies": result["notice"]}
    for name in ("each", "tenth"):
        for unit in ("s", "cpu_s"):
            told = result[name]
            pairs = zip(told[f"copying_{unit}"], told[f"plain_{unit}"], strict=True)
            costs = [with_copies / without - 1 for with_copies, without in pairs]
            figures[f"{name}_{unit}"] = statistics.median(costs)
    figures["step_s"] = statistics.median(result["each"]["plain_s"] + result["tenth"]["plain_s"])
    return figures


def table(figures: dict[str, Any]) -> list[Row]:
    """Figures beside their goals."""
    lost, tenth = figures["lost_steps"], figures["tenth_s"]
    return [
        Row("a step without copies", f"{figures['step_s'] * 1e3:.0f} ms"),
        Row("copies", figures["copies"].removeprefix("every step ")),
        Row(
            "one step in ten: longer steps", f"{tenth:+.1%}", f"{GOAL_COST:.0%}", tenth <= GOAL_COST
        ),
        Row("one step in ten: more processor time", f"{figures['tenth_cpu_s']:+.1%}"),
        Row("every step: longer steps", f"{figures['each_s']:+.1%}"),
        Row("every step: more processor time", f"{figures['each_cpu_s']:+.1%}"),
        Row("nodes killed", f"{len(figures['lost'])}"),
        Row("restored from copies", f"{figures['restored']}"),
        Row("steps lost with a node, at most", f"{lost}", f"{GOAL_LOST}", lost <= GOAL_LOST),
    ]


def print_table(rows: list[Row]) -> None:
    """Print what was measured."""
    wide = max(len(row.what) for row in rows)
    print(f"on {os.cpu_count()} cores, {copying.RANKS} ranks and their keepers\n")
    print(f"{'':{wide}}  {'measured':>8}  {'goal':>6}")
    for row in rows:
        told = "" if row.met is None else "met" if row.met else "MISSED"
        print(f"{row.what:{wide}}  {row.figure:>8}  {row.goal:>6}  {told}".rstrip())


def losses(folder: Path, *, times: int) -> dict[str, Any]:
    """Kill a node at a random moment of a step, and let another come in its place."""
    (here := folder / "losses").mkdir()
    moments = random.Random(1)
    job = ElasticJob(here, ["a", "b", "c0"], FLAGS, ["--replicate-every", "1"])
    lost = []
    try:
        for number in range(times):
            epoch, name = 2 * number + 1, f"c{number}"
            job.trained(epoch, 6)
            job.until(lambda name=name: is_present(job, name), f"node {name}", LIMIT_S)
            time.sleep(moments.random() * 0.2)
            job.lose(name)
            job.trained(epoch + 1, 2)
            lost.append(max(job.steps(epoch)) - job.steps(epoch + 1)[0] + 1)
            job.change(["a", "b", f"c{number + 1}"])
    finally:
        job.close()
    restored = job.said().count("was restored from copies in memory")
    return {"lost_steps": max(lost), "lost": lost, "restored": restored}


def is_present(job: ElasticJob, name: str) -> bool:
    """Whether a node takes part, as the state tells."""
    machines = job.state().get("machines", [])
    return any(one["name"] == name and one["status"] == "present" for one in machines)


if __name__ == "__main__":
    sys.exit(main())
