"""The cost model against published runs: error, order, the best one found, memory.

python benchmarks/planning/measured.py --data DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.planning.published.amp import SETS, read_amp  # noqa: E402
from benchmarks.planning.published.sailor import read_sailor  # noqa: E402
from megatron.adaptive.errors import ConfigError  # noqa: E402
from megatron.adaptive.planner.calibrate import Comparison, MeasuredRun, compare  # noqa: E402

_SETS: dict[str, tuple[str, Callable[[Path], list[MeasuredRun]]]] = {
    **{f"amp {name}": (f"measured_{name}.csv", partial(read_amp, name=name)) for name in SETS},
    "sailor mit": ("measured_mit.json", read_sailor),
}
"""By name: the file by which a set is known, and its reader."""


def read_sets(folder: Path) -> dict[str, list[MeasuredRun]]:
    """Reads every published set in a folder or in the folders right below it.

    Args:
        folder: of one set, or of several folders of sets.

    Raises:
        ConfigError: none is there, or a file of one is damaged.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder: give the folder of the data set")
    found: dict[str, list[MeasuredRun]] = {}
    below = sorted(one for one in folder.iterdir() if one.is_dir())
    for place in (folder, *below):
        for name, (file, read) in _SETS.items():
            if (place / file).is_file():
                found[name] = read(place)
    if not found:
        files = ", ".join(file for file, _ in _SETS.values())
        raise ConfigError(f"{folder}: no data set: it has none of {files}, nor a folder below it")
    return found


def rows(data: Path) -> list[dict[str, Any]]:
    """Returns one row for each figure: what, measured, goal, and whether it is met.

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
