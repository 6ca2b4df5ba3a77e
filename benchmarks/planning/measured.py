"""The cost model against published runs: error, order, the best one found, memory.

python benchmarks/planning/measured.py --data DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.adaptive.planner.validate import Comparison, compare, read_sets  # noqa: E402


def rows(data: Path) -> list[dict[str, Any]]:
    """One row for each figure: what, measured, goal, and whether it is met.

    Args:
        data: folder of the published sets; those that are missing have no rows.
    """
    return [row for name, runs in read_sets(data).items() for row in _set(compare(name, runs))]


def _set(found: Comparison) -> Iterator[dict[str, Any]]:
    name = f"{found.name}, {len(found.timed)} runs"
    yield _row(f"{name}: median error of the time", found.median_error, "<=", 0.10)
    yield _row(f"{name}: rank correlation", found.correlation, ">=", 0.9)
    yield _row(f"{name}: predicted place of the fastest", found.place_of_best, "<=", 3)
    if errors := found.memory_errors:
        worst = max(abs(error) for error in errors)
        yield _row(f"{name}: worst error of the memory of {len(errors)} runs", worst, "<=", 0.15)


def _row(what: str, value: float, sign: str, limit: float) -> dict[str, Any]:
    met = value <= limit if sign == "<=" else value >= limit
    return {"what": what, "measured": value, "goal": f"{sign} {limit:g}", "met": bool(met)}


def main() -> int:
    """Print the rows; returns 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published sets")
    found = rows(parser.parse_args().data)
    for row in found:
        met = "met" if row["met"] else "MISSED"
        print(f"| {row['what']} | {row['measured']:.3f} | {row['goal']} | {met} |")
    return 0 if all(row["met"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
