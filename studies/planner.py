"""Compares the planner with published planners, published runs, and runs on this machine.

    python -m studies.planner --data DIR [--quick] [--part NAME ...] [--json FILE]
    python -m studies.planner --validate DIR ...

The parts are:

- ``fasop``: Compares plans for FASOP's cases and its Pareto run.
- ``measured``: Predicts published runs.
- ``literature``: Predicts runs that are described in papers.
- ``memory``: Predicts the peak memory of 24 short runs on this machine.
- ``large``: Searches plans for a cluster of 1,024 GPUs.
- ``small``: Compares plans for small problems with brute force.
- ``own``: Predicts plans of a small GPT, and runs them on this otherwise idle machine.
- ``experts``: Measures a profile of a GPT with experts, predicts its plans, and runs them.

``DIR`` is a folder with the published data sets (``fasop``, ``amp``, ``sailor``); missing sets are
skipped. Each part prints its rows when it is done. If a part fails, its row shows the reason, and
the other parts still run. The command exits with status 1 if a part fails or a goal is missed.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harness.report import Result, Row, measure, parser_of  # noqa: E402
from studies.planning import fasop, large, measured, memory, own_runs  # noqa: E402
from tests.support.small_clusters import better, brute_force, random_problem, solve  # noqa: E402

PARTS = ("fasop", "measured", "literature", "large", "small", "memory", "own", "experts")


def small_rows(quick: bool) -> list[Row]:
    """Compares plans for small random problems with the optimum that brute force finds.

    Also checks that a better cluster never gets a slower plan.
    """
    number, pairs = (50, 100) if quick else (500, 1000)
    unlike = worse = 0
    for seed in range(pairs):
        problem = random_problem(seed)
        seconds = _seconds(problem)
        worse += _seconds(better(problem, seed)) > seconds * (1 + 1e-9)
        if seed < number:
            best = brute_force(problem)
            unlike += not (seconds == best or abs(seconds - best) <= 1e-9 * best)
    return [
        Row(what=f"{number} small clusters: unlike brute force", value=unlike, goal=0),
        Row(what=f"{pairs} better clusters: worse plans", value=worse, goal=0),
    ]


def _seconds(problem: Any) -> float:
    found = solve(problem).plans
    return found[0].seconds if found else math.inf


def own(options: argparse.Namespace, *, experts: bool) -> Result:
    """Runs plans of a small GPT on this machine, or predicts the plans of stored runs again."""
    with tempfile.TemporaryDirectory() as temporary:
        place = options.keep or options.kept or Path(temporary)
        place = place / "experts" if experts else place
        again = options.kept is None
        return own_runs.measure(place, options.quick, again=again, experts=experts)


def published(folder: Path | None, read: Callable[[Path], list[Row]]) -> Result:
    """Returns the rows of ``read(folder)``, or no rows if the folder does not exist."""
    return Result(rows=read(folder) if folder is not None and folder.is_dir() else [])


def main() -> int:
    """Runs the selected parts, and prints a table for each part."""
    parser = parser_of(__doc__, PARTS, "smaller studies: fewer problems, nodes, and plans")
    parser.add_argument("--data", type=Path, help="folder with the published data sets")
    parser.add_argument(
        "--validate",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="data sets whose runs are predicted; no parts are run",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--keep", type=Path, metavar="DIR", help="folder in which to store the traces of the runs"
    )
    where.add_argument(
        "--kept", type=Path, metavar="DIR", help="folder with stored runs to predict again"
    )
    options = parser.parse_args()
    data, quick = options.data, options.quick
    parts: dict[str, Callable[[], Result]] = {
        "fasop": lambda: published(data and data / "fasop", fasop.rows),
        "measured": lambda: published(data, measured.rows),
        "literature": lambda: Result(rows=measured.literature_rows()),
        "large": lambda: Result(rows=large.rows(quick)),
        "small": lambda: Result(rows=small_rows(quick)),
        "memory": lambda: memory.measure(quick),
        "own": lambda: own(options, experts=False),
        "experts": lambda: own(options, experts=True),
    }
    if options.validate:
        options.part = None
        parts = {
            str(folder): lambda folder=folder: Result(rows=measured.rows(folder))  # type: ignore[misc]
            for folder in options.validate
        }
    return measure(parts, options)


if __name__ == "__main__":
    sys.exit(main())
