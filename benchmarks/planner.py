"""Compares the planner with published searches and runs, in one run.

    python benchmarks/planner.py --data DIR [--quick] [--part NAME ...] [--json FILE]

Parts: ``fasop``, its cases and Pareto run; ``measured``, predictions against published runs;
``large``, a cluster of 1,024 GPUs; ``small``, problems against every plan of theirs; ``own``, plans
of a small GPT run on this machine against their predictions, which wants a machine that does
nothing else. ``DIR`` holds the published sets (``fasop``, ``amp``, ``sailor``); those that are
missing are left out. Rows are printed as soon as a part is done; a part that fails is named at the
end, and the rows of the others stay. Exits with status 1 where a part failed or a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.planning import fasop, goal_row, large, measured, own_runs, table  # noqa: E402
from benchmarks.planning.small import better, brute_force, random_problem, solve  # noqa: E402


def small_rows(quick: bool) -> list[dict[str, Any]]:
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
        goal_row(f"{number} small clusters: unlike brute force", unlike, "<=", 0),
        goal_row(f"{pairs} better clusters: worse plans", worse, "<=", 0),
    ]


OF_THIS_MACHINE = {"large": large.rows, "small": small_rows, "own": own_runs.rows}
PARTS = ("fasop", "measured", *OF_THIS_MACHINE)


def _seconds(problem: Any) -> float:
    found = solve(problem).found
    return found[0].seconds if found else math.inf


def part_rows(part: str, data: Path | None, quick: bool) -> list[dict[str, Any]]:
    """Returns the rows of a part; none for published sets that are missing.

    Args:
        part: one of ``PARTS``.
        data: folder of the published sets.
        quick: whether to measure less.
    """
    if part in OF_THIS_MACHINE:
        return OF_THIS_MACHINE[part](quick)
    if data is None:
        return []
    if part == "measured":
        return measured.rows(data)
    return fasop.rows(data / "fasop") if (data / "fasop").is_dir() else []


def main() -> int:
    """Runs the parts, and prints a table for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the published sets")
    parser.add_argument("--quick", action="store_true", help="fewer small problems, nodes, plans")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS, help="only these")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    rows, failed = [], {}
    for part in options.part:
        try:
            found = part_rows(part, options.data, options.quick)
        except Exception as error:
            # Such as runs that others on the machine disturbed: the other parts still count.
            traceback.print_exc()
            failed[part] = f"{type(error).__name__}: {error}"
            continue
        rows += found
        print(table(found), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for part, text in failed.items():
        print(f"part {part} failed: {text}", flush=True)
    return 1 if failed or not all(row["met"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
