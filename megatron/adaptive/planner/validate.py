"""Compares predictions with measured runs: error, order of the plans, and the place of the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.layers import OURS, Runtime
from megatron.adaptive.planner.model import Model
from megatron.adaptive.planner.plan import Plan, Prediction
from megatron.adaptive.planner.profile import Profile

__all__ = ["Comparison", "ComparedRun", "compare", "MeasuredRun", "rank_correlation"]


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A measured run, with all that is needed to predict it.

    Attributes:
        name: of the run within its set.
        plan: what ran where.
        model: its layers.
        cluster: the nodes and links.
        profile: durations, measured apart from the run.
        seconds: of one step; None where only memory counts.
        peak_bytes: on the fullest GPU; None where unknown.
        doubt: why a figure is left out; empty for none.
        runtime: behaviour of the training program.
    """

    name: str
    plan: Plan
    model: Model
    cluster: Cluster
    profile: Profile
    seconds: float | None
    peak_bytes: float | None = None
    doubt: str = ""
    runtime: Runtime = OURS


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run beside its prediction."""

    measured: MeasuredRun
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
    rows: tuple[ComparedRun, ...]

    @cached_property
    def timed(self) -> tuple[ComparedRun, ...]:
        """Runs whose time counts."""
        return tuple(row for row in self.rows if row.measured.seconds is not None)

    @property
    def median_error(self) -> float:
        """Median error of the times, without sign."""
        return median(abs(row.time_error or 0.0) for row in self.timed)

    @property
    def worst_error(self) -> float:
        """Largest error of the times, without sign."""
        return max(abs(row.time_error or 0.0) for row in self.timed)

    @property
    def correlation(self) -> float:
        """Correlation of the ranks by predicted and by measured time; 1 for the same order."""
        return rank_correlation(
            [row.predicted.seconds for row in self.timed],
            [row.measured.seconds or 0.0 for row in self.timed],
        )

    @property
    def place_of_best(self) -> int:
        """Place of the fastest run in the predicted order, 1 for first."""
        order = sorted(self.timed, key=lambda row: row.predicted.seconds)
        best = min(self.timed, key=lambda row: row.measured.seconds or 0.0)
        return order.index(best) + 1

    @property
    def loss_of_choice(self) -> float:
        """Time of the run predicted fastest over that of the fastest, less 1."""
        chosen = min(self.timed, key=lambda row: row.predicted.seconds).measured.seconds or 0.0
        return chosen / min(row.measured.seconds or 0.0 for row in self.timed) - 1

    @property
    def memory_errors(self) -> tuple[float, ...]:
        """Errors of the runs whose memory counts, with sign."""
        found = (row.memory_error for row in self.rows)
        return tuple(error for error in found if error is not None)


def compare(name: str, runs: Sequence[MeasuredRun]) -> Comparison:
    """Predicts every run of a set.

    Args:
        name: of the set.
        runs: what was measured.

    Raises:
        ConfigError: no run has a time, or one cannot be predicted.
    """
    rows = tuple(
        ComparedRun(
            measured=one,
            predicted=predict(one.plan, one.model, one.cluster, one.profile, one.runtime),
        )
        for one in runs
    )
    found = Comparison(name=name, rows=rows)
    if not found.timed:
        raise ConfigError(f"{name}: no run has a time: comparing needs one")
    return found


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns Spearman's correlation of ranks; equal values share the mean of theirs."""
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
