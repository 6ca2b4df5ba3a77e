"""What copies of the state in memory cost a step, and how many steps a lost node costs with them.

    python benchmarks/copies.py [--quick] [--json FILE]

A small GPT on two ranks with a copy at every step, or at one in ten, in turns with none; then a job
on three nodes with a copy at every step, of which one is killed at a random moment, again and
again. Takes about five minutes on two cores, two with ``--quick``. Exits with status 1 where a goal
is missed.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import gpt_turns  # noqa: E402
from benchmarks.report import Result, Row, finish, measured, parser_of, run  # noqa: E402
from tests.cluster.jobs import ElasticJob  # noqa: E402

LIMIT_S = 180.0
GOAL_LOST, GOAL_COST = 1, 0.05
FLAGS = "--train-iters 99999 --save-interval 99999".split()


def main() -> int:
    """Measure as the command line says; returns the exit status."""
    options = parser_of(__doc__, (), "fewer turns").parse_args()
    print(f"on {os.cpu_count()} cores, {gpt_turns.RANKS['copying']} ranks and their keepers\n")
    with tempfile.TemporaryDirectory(prefix="copies-") as folder:
        total = run(
            {
                "cost": lambda: cost(3 if options.quick else 8),
                "losses": lambda: losses(Path(folder), times=1 if options.quick else 4),
            }
        )
    return finish(total, options.json)


def cost(rounds: int) -> Result:
    """How much longer steps are for copies."""
    result = gpt_turns.measure("copying", rounds)
    steps_ms = [1e3 * step_s for name in ("each", "tenth") for step_s in result[name]["plain_s"]]
    note = result["notice"].removeprefix("every step ")
    rows = [measured("a step without copies", steps_ms, unit="ms", note=note)]
    for name, text in (("tenth", "one step in ten"), ("each", "every step")):
        goal = GOAL_COST if name == "tenth" else None
        longer, more = (gpt_turns.costs(result[name], "copying", unit) for unit in ("s", "cpu_s"))
        rows.append(measured(f"{text}: longer steps", longer, goal=goal))
        rows.append(measured(f"{text}: more processor time", more))
    return Result(rows=rows, facts={"copies": result})


def losses(folder: Path, *, times: int) -> Result:
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
    rows = [
        Row(what="nodes killed", value=len(lost)),
        Row(what="restored from copies", value=restored),
        Row(what="steps lost with a node, at most", value=max(lost), goal=GOAL_LOST),
    ]
    return Result(rows=rows, facts={"lost": lost})


def is_present(job: ElasticJob, name: str) -> bool:
    """Whether a node takes part, as the state tells."""
    machines = job.state().get("machines", [])
    return any(one["name"] == name and one["status"] == "present" for one in machines)


if __name__ == "__main__":
    sys.exit(main())
