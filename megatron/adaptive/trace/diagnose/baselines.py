"""Compares each rank with all other ranks, the plan and its own past.

One model covers all evidence. A rank's time for its work in an iteration is divided by the planned
work. The logarithm of this ratio is the sum of

    a level that all ranks share  +  the rank's level      (machines differ: ALIKE)
                                  +  its stage's level     (the plan may be wrong; shared by peers)
                                  +  its replica's level in the iteration
                                                           (long microbatches; shared by stages)
                                  +  noise                 (estimated from the run)

A fault is a shift of one rank in all or some iterations. Generalized least squares gives its size
and standard error; they weight peers, other stages and the rank's other iterations by their
certainty. Missing evidence (no peers, no plan or no past) gets no weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from megatron.adaptive.trace.diagnose.samples import (
    Floats,
    Measured,
    intervals,
    middle,
    noise,
    spread,
    tame_mean,
)
from megatron.adaptive.trace.span_columns import Ints

ALIKE = 0.015
"""Standard deviation between ranks of the same kind, relative."""

SEEN_BEFORE = 16
"""Number of ranks as many as which the assumption :data:`ALIKE` counts against the data."""

UNSURE_OF_PLAN = 0.25
"""Relative uncertainty of the planned work of embedding and loss."""

UNKNOWN = 10.0
"""Standard deviation of a quantity about which nothing is known."""

LEAST_NOISE = 0.004
"""Least standard deviation of an iteration that is assumed."""

OF_TIME = 0.1
"""Least fraction of the work that a kind of action must take to be used."""

MOST_INTERVALS = 20_000_000
"""Largest number of intervals of all ranks; above it, only intervals up to the end are tried."""


@dataclass(frozen=True)
class Shift:
    """Describes a rank that takes longer than expected in consecutive iterations.

    Attributes:
        column: Column of the rank.
        first: Index of the first affected iteration.
        end: Index after the last affected iteration.
        size: Logarithm of the ratio of its time to the expected one.
        error: Standard error of ``size``.
        doubt: Square of the number of standard errors that chance reaches in all the intervals
            tried.
    """

    column: int
    first: int
    end: int
    size: float
    error: float
    doubt: float

    @property
    def excess(self) -> float:
        """Square of ``size`` in standard errors, less ``doubt``; above 0 it exceeds chance."""
        return (self.size / self.error) ** 2 - self.doubt


@dataclass(eq=False)
class RankBaselines:
    """Models the times of a run's ranks.

    Attributes:
        series: ``[iterations, ranks]``, logarithm of each rank's time by its planned work.
        by_kind: ``[iterations, ranks, 3]``, the same for F, B and W; NaN for a kind that takes
            little time.
        lasting: ``[ranks, ranks]``, covariance of the ranks' levels.
        passing: ``[ranks, ranks]``, covariance within an iteration.
    """

    series: Floats
    by_kind: Floats
    lasting: Floats
    passing: Floats
    _level: Floats = field(init=False)
    _each: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._invert()

    def _invert(self) -> None:
        self._level = np.linalg.inv(self.lasting + self.passing / len(self.series))
        self._each = np.linalg.inv(self.passing)

    def distrust(self, column: int) -> None:
        """Removes the influence of a rank's level on the expectation for other ranks."""
        self.lasting[column, column] += 1.0
        self._invert()

    def remove(self, shift: Shift) -> None:
        """Subtracts a shift from the series."""
        self.series[shift.first : shift.end, shift.column] -= shift.size

    def errors(self) -> tuple[Floats, Floats]:
        """Returns each rank's shift and its standard error over all iterations, ``[ranks]``."""
        precision = np.diagonal(self._level)
        return self._level @ self.series.mean(axis=0) / precision, 1 / np.sqrt(precision)

    def kinds(self, shift: Shift) -> dict[str, float]:
        """Returns the size of a shift in each kind of action."""
        sizes = {}
        for number, kind in enumerate("FBW"):
            series = self.by_kind[:, :, number]
            if np.isfinite(series).all():
                sizes[kind] = self._size(series, shift)
        return sizes

    def _size(self, series: Floats, shift: Shift) -> float:
        count, column = len(series), shift.column
        mean = series.mean(axis=0)
        inside = shift.end - shift.first
        scores = (series[shift.first : shift.end] - mean) @ self._each[:, column]
        score = inside / count * (self._level[column] @ mean) + scores.sum()
        return float(score * self._information(column, inside) ** -1.0)

    def _information(self, column: int, inside: Ints | int) -> Floats | float:
        """Returns the precision (1 / variance) of a shift over ``inside`` iterations."""
        count = len(self.series)
        level = self._level[column, column]
        each = self._each[column, column]
        part = inside / count
        precision: Floats | float = part**2 * level + inside * (1 - part) * each
        return precision

    def scan(self, least: float, sure: float) -> list[Shift]:
        """Returns the most likely shift of each rank, even if it may be chance.

        Args:
            least: Least size of a shift, as a logarithm.
            sure: Number of standard errors that chance does not reach, for a shift over all
                iterations of few ranks. The limit rises with the number of ranks and intervals.
        """
        count, ranks = self.series.shape
        mean = self.series.mean(axis=0)
        level, each = self._level @ mean, (self.series - mean) @ self._each
        first, end = intervals(count, ended=count * count * ranks <= 2 * MOST_INTERVALS)
        # The first interval contains all iterations.
        first = np.append(0, first)
        end = np.append(count, end)
        inside = end - first
        doubt = np.full(len(first), sure**2 + 2 * math.log(max(1.0, ranks / 4)))
        doubt += np.where(inside < count, 2 * math.log(count), 0.0)
        doubt += np.where(end < count, 2 * math.log(count), 0.0)
        shifts = []
        for column in range(ranks):
            sums = np.concatenate([[0.0], np.cumsum(each[:, column])])
            scores = inside / count * level[column] + sums[end] - sums[first]
            precision = np.asarray(self._information(column, inside))
            size = scores / precision
            excess = np.where(size >= least, size * scores - doubt, -np.inf)
            best = int(np.argmax(excess))
            shifts.append(
                Shift(
                    column=column,
                    first=int(first[best]),
                    end=int(end[best]),
                    size=float(size[best]),
                    error=float(precision[best] ** -0.5),
                    doubt=float(doubt[best]) if excess[best] > -np.inf else math.inf,
                )
            )
        return shifts


def rank_baselines(m: Measured) -> RankBaselines:
    """Fits the model to a run."""
    num_ranks = len(m.headers)
    planned, unsure = _plan(m)
    logs = np.log(m.action_ns.astype(np.float64)) - planned[:, :, None, None]
    _level_microbatches(m, logs)
    medians = tame_mean(logs)
    share = np.nansum(middle(m.median_ns, axis=0), axis=(0, 1))
    share = np.where(share >= OF_TIME * share.sum(), share, 0.0)
    # The weight of a chunk follows from the uncertainty of its planned work.
    weights = 1 / (unsure**2 + ALIKE**2)
    weights /= weights.sum(axis=1, keepdims=True)
    by_kind = _weighted(medians, weights[None, :, :, None], axis=2)
    by_kind[:, :, share == 0] = np.nan
    series = _filled(_weighted(by_kind, share[None, None, :], axis=2))
    of_stage = np.sqrt((weights**2 * unsure**2).sum(axis=1))
    passing = _passing(m, series, _sampling(logs))
    together = _same(m, m.peers) * np.outer(of_stage, of_stage) + UNKNOWN**2
    baselines = RankBaselines(
        series=series,
        by_kind=np.stack([_filled(by_kind[:, :, k]) for k in range(3)], axis=2),
        lasting=together + ALIKE**2 * np.eye(num_ranks),
        passing=passing,
    )
    if num_ranks >= SEEN_BEFORE:
        sizes, errors = baselines.errors()
        wide = min(9.0, max(1.0, float(spread(sizes / errors)) ** 2))
        part = num_ranks / (SEEN_BEFORE + num_ranks)
        baselines.lasting += part * (wide - 1) * ALIKE**2 * np.eye(num_ranks)
        baselines._invert()
    return baselines


def _plan(m: Measured) -> tuple[Floats, Floats]:
    """Returns the logarithm of the planned work and its uncertainty, ``[ranks, chunks]`` each."""
    planned = np.zeros((len(m.headers), m.num_chunks))
    unsure = np.full(planned.shape, UNKNOWN)
    for column, stages in enumerate(m.stages):
        for chunk, stage in enumerate(stages[: m.num_chunks]):
            work = m.work[stage] if m.work else 0.0
            if work <= 0:
                continue
            planned[column, chunk] = math.log(work)
            if m.layers:
                extra = max(0.0, work - m.layers[stage])
                unsure[column, chunk] = math.log1p(UNSURE_OF_PLAN * extra / work)
    return planned, unsure


def _level_microbatches(m: Measured, logs: Floats) -> None:
    """Subtracts the part of a microbatch's duration that is common to all stages.

    Only the difference from the iteration's mean is subtracted; the model has a term for the mean.
    """
    usual = middle(logs, axis=(0, 4))
    for pipeline in m.replicas.values():
        rest = logs[:, pipeline] - usual[pipeline][None, :, :, :, None]
        common = middle(rest, axis=(1, 2, 3))
        entries = max(1, int(np.isfinite(usual[pipeline]).sum()))
        alone = 1.57 * float(middle(spread(rest, axis=-1))) ** 2 / entries
        variance = float(spread(common.ravel())) ** 2
        # Noise alone also gives a common part, so only the share beyond it is subtracted.
        weight = max(0.0, 1 - alone / variance) if variance > 0 else 0.0
        is_measured = np.isfinite(common)
        mean = np.nansum(common, axis=1) / np.maximum(1, is_measured.sum(axis=1))
        common = np.where(is_measured, common - mean[:, None], 0.0)
        logs[:, pipeline] -= weight * common[:, None, None, None, :]


def _passing(m: Measured, series: Floats, sampling: Floats) -> Floats:
    """Returns the covariance within an iteration: each rank's noise and the replica's noise."""
    ranks = len(m.headers)
    own_noise = np.zeros(ranks)
    shared = []
    for pipeline in m.replicas.values():
        count = len(pipeline)
        rest = series[:, pipeline] - np.median(series[:, pipeline], axis=0)
        common = rest.mean(axis=1, keepdims=True) if count > 1 else np.zeros((len(rest), 1))
        part = math.sqrt(count / (count - 1)) if count > 1 else 1.0
        own_noise[pipeline] = [noise(column) * part for column in (rest - common).T]
        shared.append((noise(common[:, 0]), count))
    usual = float(np.sqrt(np.mean(own_noise**2))) if ranks else 0.0
    usual = min(usual, 1.3 * float(np.median(own_noise)))
    least = np.maximum(max(usual, LEAST_NOISE), sampling)
    sigma = np.where(own_noise > 2 * usual, np.maximum(own_noise, least), least)
    common_var = float(np.mean([max(0.0, rough**2 - usual**2 / count) for rough, count in shared]))
    covariance: Floats = np.diag(sigma**2) + common_var * _same(m, m.replicas)
    return covariance


def _sampling(logs: Floats) -> Floats:
    """Returns the noise of an iteration that follows from the noise of its actions, ``[ranks]``."""
    within = middle(spread(logs, axis=-1), axis=(0, 2, 3))
    entries = np.isfinite(logs).sum(axis=(2, 3, 4)).mean(axis=0)
    sampling: Floats = np.nan_to_num(within) / np.sqrt(np.maximum(1.0, entries))
    return sampling


def _same(m: Measured, groups: dict[tuple[int, ...], list[int]]) -> Floats:
    """Returns a matrix ``[ranks, ranks]`` that is 1 if two ranks are in the same group."""
    same = np.zeros((len(m.headers), len(m.headers)))
    for group in groups.values():
        same[np.ix_(group, group)] = 1.0
    return same


def _weighted(values: Floats, weights: Floats, axis: int) -> Floats:
    """Returns the weighted mean of the finite values, NaN if there are none."""
    used = np.isfinite(values) * weights
    sums = (np.nan_to_num(values) * used).sum(axis=axis)
    total = used.sum(axis=axis)
    mean: Floats = np.where(total > 0, sums / np.where(total > 0, total, 1.0), np.nan)
    return mean


def _filled(series: Floats) -> Floats:
    """Fills gaps with the rank's median and clips momentary outliers to their neighbours.

    A rank without any value gets the median of all ranks.
    """
    usual = middle(series, axis=0)
    usual = np.where(np.isfinite(usual), usual, middle(series))
    filled: Floats = np.where(np.isfinite(series), series, usual)
    if len(filled) < 5:
        return filled
    edge = [filled[2:0:-1], filled, filled[-2:-4:-1]]
    windows = np.lib.stride_tricks.sliding_window_view(np.concatenate(edge), 5, axis=0)
    near = np.median(windows, axis=-1)
    wide = 3 * np.array([noise(column) for column in filled.T])
    return np.asarray(np.clip(filled, near - wide, near + wide))
