"""The planner against published searches and runs, in one run.

    python benchmarks/planner.py --data DIR [--quick] [--part NAME ...] [--json FILE]

Parts: ``fasop``, its cases and Pareto run; ``measured``, predictions against published runs;
``large``, a cluster of 1,024 GPUs; ``small``, problems against every plan of theirs; ``own``, plans
of a small GPT run on this machine against their predictions, which wants a machine that does
nothing else. ``DIR`` holds the published sets (``fasop``, ``amp``, ``sailor``); those that are
missing are left out. Exits with status 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.planning import fasop, large, measured, own_runs  # noqa: E402
from benchmarks.planning.small import better, brute_force, random_problem, solve  # noqa: E402


def small_rows(quick: bool) -> list[dict[str, Any]]:
    """Random small problems: equal to brute force, and never worse on a better cluster."""
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
        _count(f"{number} small clusters: unlike brute force", unlike),
        _count(f"{pairs} better clusters: worse plans", worse),
    ]


OF_THIS_MACHINE = {"large": large.rows, "small": small_rows, "own": own_runs.rows}
PARTS = ("fasop", "measured", *OF_THIS_MACHINE)


def _seconds(problem: Any) -> float:
    found = solve(problem).found
    return found[0].seconds if found else math.inf


def _count(what: str, number: int) -> dict[str, Any]:
    return {"what": what, "value": number, "goal": "0", "met": number == 0, "note": ""}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| figure | value | goal | met | |", "|---|---|---|---|---|"]
    for row in rows:
        met = "yes" if row["met"] else "no"
        value = row.get("value", row.get("measured"))
        cells = (row["what"], f"{value:.5g}", row["goal"], met, row.get("note", ""))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _of_sets(data: Path | None, part: str) -> list[dict[str, Any]]:
    """Rows of a part that needs published sets; none without them."""
    if data is None:
        return []
    if part == "measured":
        return measured.rows(data)
    return fasop.rows(data / "fasop") if (data / "fasop").is_dir() else []


def main() -> int:
    """Run all parts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the published sets")
    parser.add_argument("--quick", action="store_true", help="fewer small problems, nodes, plans")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS, help="only these")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for part in options.part:
        if part in ("fasop", "measured"):
            rows += _of_sets(options.data, part)
        else:
            rows += OF_THIS_MACHINE[part](options.quick)
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
