"""Predicted against measured: how far off, whether plans rank right, whether the best is found.

Owns the comparison and which folder holds which published set. Reading a set is ``datasets``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.datasets.amp import SETS, read_amp
from megatron.adaptive.planner.datasets.measured import Measured
from megatron.adaptive.planner.datasets.sailor import read_sailor
from megatron.adaptive.planner.plan import Prediction

__all__ = ["Comparison", "Row", "compare", "rank_correlation", "read_sets"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run beside its prediction."""

    measured: Measured
    predicted: Prediction

    @property
    def time_error(self) -> float | None:
        """Predicted over measured seconds, less 1; None where no time counts."""
        seconds = self.measured.seconds
        return None if seconds is None else self.predicted.seconds / seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured bytes of the fullest GPU, less 1; None where none count."""
        peak = self.measured.peak_bytes
        return None if peak is None else self.predicted.peak_bytes / peak - 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A set of runs beside their predictions.

    Attributes:
        name: of the set.
        rows: all runs, also those that do not count.
    """

    name: str
    rows: tuple[Row, ...]

    @cached_property
    def timed(self) -> tuple[Row, ...]:
        """Runs whose time counts."""
        return tuple(row for row in self.rows if row.measured.seconds is not None)

    @property
    def median_error(self) -> float:
        """Of the times, without sign."""
        return median(abs(row.time_error or 0.0) for row in self.timed)

    @property
    def worst_error(self) -> float:
        """Of the times, without sign."""
        return max(abs(row.time_error or 0.0) for row in self.timed)

    @property
    def correlation(self) -> float:
        """Of the ranks by predicted and by measured time; 1 for the same order."""
        return rank_correlation(
            [row.predicted.seconds for row in self.timed],
            [row.measured.seconds or 0.0 for row in self.timed],
        )

    @property
    def place_of_best(self) -> int:
        """Where the fastest run is in the predicted order, 1 for first."""
        order = sorted(self.timed, key=lambda row: row.predicted.seconds)
        best = min(self.timed, key=lambda row: row.measured.seconds or 0.0)
        return order.index(best) + 1

    @property
    def loss_of_choice(self) -> float:
        """How much longer the run predicted fastest took than the fastest, as a fraction."""
        chosen = min(self.timed, key=lambda row: row.predicted.seconds).measured.seconds or 0.0
        return chosen / min(row.measured.seconds or 0.0 for row in self.timed) - 1

    @property
    def memory_errors(self) -> tuple[float, ...]:
        """Of the runs whose memory counts, with sign."""
        found = (row.memory_error for row in self.rows)
        return tuple(error for error in found if error is not None)


def compare(name: str, runs: Sequence[Measured], fewest: int = 2) -> Comparison:
    """Predict every run of a set.

    Args:
        name: of the set.
        runs: what was measured.
        fewest: runs that must have a time.

    Raises:
        ConfigError: fewer runs have a time, or one cannot be predicted.
    """
    rows = tuple(
        Row(
            measured=one,
            predicted=predict(one.plan, one.model, one.cluster, one.profile, one.runtime),
        )
        for one in runs
    )
    found = Comparison(name=name, rows=rows)
    if len(found.timed) < fewest:
        raise ConfigError(f"{name}: {len(found.timed)} runs have a time: comparing needs {fewest}")
    return found


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, equal values sharing the mean of theirs."""
    a, b = _ranks(one), _ranks(other)
    if a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    ranks: np.ndarray = below + (equal - 1) / 2
    return ranks


def read_sets(folder: Path, needed: bool = True) -> dict[str, list[Measured]]:
    """Every published set in a folder or in the folders right below it.

    Args:
        folder: of one set, or of several folders of sets.
        needed: whether there must be one.

    Raises:
        ConfigError: none is there, or a file of one is damaged.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder: give the folder of the data set")
    found: dict[str, list[Measured]] = {}
    below = sorted(one for one in folder.iterdir() if one.is_dir())
    for place in (folder, *below):
        for name, (file, read) in _SETS.items():
            if (place / file).is_file():
                found[name] = read(place)
    if needed and not found:
        files = ", ".join(file for file, _ in _SETS.values())
        raise ConfigError(f"{folder}: no data set: it has none of {files}, nor a folder below it")
    return found


def _amp(name: str) -> Callable[[Path], list[Measured]]:
    return lambda folder: read_amp(folder, name)


_SETS: dict[str, tuple[str, Callable[[Path], list[Measured]]]] = {
    **{f"amp {name}": (f"measured_{name}.csv", _amp(name)) for name in SETS},
    "sailor mit": ("measured_mit.json", read_sailor),
}
"""By name: the file by which a set is known, and its reader."""
