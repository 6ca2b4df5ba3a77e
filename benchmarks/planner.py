"""The planner against published searches and runs, in one run.

    python benchmarks/planner.py --data DIR [--quick] [--json FILE]

Parts: FASOP's cases and Pareto run, a cluster of 1,024 GPUs, small problems against every plan of
theirs, and predictions against measured runs. ``DIR`` holds the published sets (``fasop``, ``amp``,
``sailor``); those that are missing are left out. Exits with status 1 where a goal is missed.
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

from benchmarks.planning import fasop, large, measured  # noqa: E402
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


def main() -> int:
    """Run all parts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of the published sets")
    parser.add_argument("--quick", action="store_true", help="fewer small problems and nodes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.data is not None:
        if (options.data / "fasop").is_dir():
            rows += fasop.rows(options.data / "fasop")
        rows += measured.rows(options.data)
    rows += large.rows(options.quick)
    rows += small_rows(options.quick)
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
