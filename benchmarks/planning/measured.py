"""The cost model against published runs: error, order, the best one found, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.planning.published.amp import SETS, read_amp
from benchmarks.planning.published.sailor import read_sailor
from benchmarks.report import Row
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.calibrate import Comparison, MeasuredRun, compare

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


def rows(data: Path) -> list[Row]:
    """Returns one row for each figure.

    Args:
        data: folder of the published sets; those that are missing have no rows.
    """
    return [row for name, runs in read_sets(data).items() for row in _set(compare(name, runs))]


def _set(found: Comparison) -> Iterator[Row]:
    name = f"{found.name}, {len(found.timed)} runs"
    yield Row(what=f"{name}: median error of the time", value=found.median_error, goal=0.10)
    yield Row(what=f"{name}: rank correlation", value=found.correlation, goal=0.9, least=True)
    yield Row(what=f"{name}: predicted place of the fastest", value=found.place_of_best, goal=3)
    if errors := found.memory_errors:
        what = f"{name}: worst error of the memory of {len(errors)} runs"
        yield Row(what=what, value=max(abs(error) for error in errors), goal=0.15)
