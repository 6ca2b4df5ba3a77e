"""Compares the planner with published searches and runs, in one run.

    python benchmarks/planner.py --data DIR [--quick] [--part NAME ...] [--json FILE]
    python benchmarks/planner.py --validate DIR ...

Parts: ``fasop``, its cases and Pareto run; ``measured``, predictions against published runs;
``literature``, against runs that papers print; ``memory``, peaks of 24 short runs on this machine;
``large``, a cluster of 1,024 GPUs; ``small``, problems against every plan of theirs; ``own``, plans
of a small GPT run on this machine against their predictions, which wants a machine that does
nothing else; ``experts``, the same of one with experts, by what ``profile`` measures of it.
``DIR`` holds the published sets (``fasop``, ``amp``, ``sailor``); those that are missing are left
out. Rows are printed as soon as a part is done; a part that fails has a row that says why, and
those of the others stay. Exits with status 1 where a part failed or a goal is missed.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.planning import fasop, large, measured, memory, own_runs  # noqa: E402
from benchmarks.planning.small import better, brute_force, random_problem, solve  # noqa: E402
from benchmarks.report import Result, Row, finish, one_line, parser_of, run  # noqa: E402

PARTS = ("fasop", "measured", "literature", "large", "small", "memory", "own", "experts")


def small_rows(quick: bool) -> list[Row]:
    """Solves random small problems: equal to brute force, and never worse on a better cluster."""
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
    found = solve(problem).found
    return found[0].seconds if found else math.inf


def own(options: argparse.Namespace, *, experts: bool) -> Result:
    """Runs plans on this machine, or predicts those anew that were kept."""
    with tempfile.TemporaryDirectory() as temporary:
        place = options.keep or options.kept or Path(temporary)
        place = place / "experts" if experts else place
        again = options.kept is None
        return own_runs.measure(place, options.quick, again=again, experts=experts)


def measure(part: str, options: argparse.Namespace) -> Result:
    """Returns the rows of one of ``PARTS``; none for published sets that are missing."""
    try:
        if part in ("own", "experts"):
            return own(options, experts=part == "experts")
        if part == "memory":
            return memory.measure(options.quick)
        if part == "literature":
            return Result(rows=measured.literature_rows())
        if part in ("large", "small"):
            rows = {"large": large.rows, "small": small_rows}[part](options.quick)
        elif options.data is None:
            rows = []
        elif part == "measured":
            rows = measured.rows(options.data)
        else:
            folder = options.data / "fasop"
            rows = fasop.rows(folder) if folder.is_dir() else []
    except Exception as error:
        # Such as runs that others on the machine disturbed: the other parts still count.
        traceback.print_exc()
        text = one_line(f"{type(error).__name__}: {error}")
        rows = [Row(what=f"part {part} failed", value=None, goal=0, note=text)]
    return Result(rows=rows)


def validate(folder: Path) -> Result:
    """Returns the rows of the data sets in a folder."""
    return Result(rows=measured.rows(folder))


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
    if options.validate:
        parts = {str(folder): partial(validate, folder) for folder in options.validate}
        return finish(run(parts), options.json)
    return finish(
        run({part: partial(measure, part, options) for part in options.part}), options.json
    )


if __name__ == "__main__":
    sys.exit(main())
