"""Compares the planner with published searches and runs.

    python -m studies.planner --data DIR [--quick] [--part NAME ...] [--json FILE]
    python -m studies.planner --validate DIR ...

Parts: ``fasop``, FASOP's cases and Pareto run; ``measured``, predictions of published runs;
``literature``, predictions of runs in papers; ``memory``, memory peaks of 24 short runs on this
machine; ``large``, a cluster of 1,024 GPUs; ``small``, small problems against all of their plans;
``own``, plans of a small GPT that run on this otherwise idle machine, against predictions;
``experts``, the same for a GPT with experts and its ``profile``. ``DIR`` contains the published
sets (``fasop``, ``amp``, ``sailor``); missing sets are skipped. Rows are printed as soon as a part
is done. If a part fails, its row shows the reason, and the other parts run. Exits with status 1 if
a part fails or a goal is missed.
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
    """Solves small random problems; checks brute force, and that better clusters never do worse."""
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
    """Runs plans on this machine, or predicts runs that were kept again."""
    with tempfile.TemporaryDirectory() as temporary:
        place = options.keep or options.kept or Path(temporary)
        place = place / "experts" if experts else place
        again = options.kept is None
        return own_runs.measure(place, options.quick, again=again, experts=experts)


def published(folder: Path | None, read: Callable[[Path], list[Row]]) -> Result:
    """Returns the rows of the data sets in a folder; empty if they are missing."""
    return Result(rows=read(folder) if folder is not None and folder.is_dir() else [])


def main() -> int:
    """Runs the parts, and prints a table for each."""
    parser = parser_of(__doc__, PARTS, "fewer small problems, nodes, plans")
    parser.add_argument("--data", type=Path, help="folder of the published sets")
    parser.add_argument(
        "--validate", type=Path, nargs="+", metavar="DIR", help="only predict the runs of data sets"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--keep", type=Path, metavar="DIR", help="keep the traces of own runs here")
    where.add_argument("--kept", type=Path, metavar="DIR", help="predict runs kept there anew")
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
