"""Compares each rank with all other ranks, the plan and its own past.

One model for all evidence. The logarithm of what a rank's work takes in an iteration, by the work
that the plan gives it, is a sum of

    a level that all have  +  the rank's own level     (machines differ: ALIKE)
                           +  its stage's level        (the plan may be wrong; peers share it)
                           +  the iteration's, of its replica   (long microbatches; stages share it)
                           +  noise                    (estimated from the run)

A fault is a shift of one rank in all iterations or in some. Its size and standard error follow by
generalized least squares from everything else: peers, other stages and the rank's other iterations
count as much as each is worth. Where there is no peer, no plan or no past, it counts for nothing.
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
"""Usual difference between ranks of one kind."""

SEEN_BEFORE = 16
"""That is believed as if so many ranks had been seen."""

UNSURE_OF_PLAN = 0.25
"""By so much of it a plan may be wrong about what a stage holds beside its layers."""

UNKNOWN = 10.0
"""Standard deviation of what nothing is known about."""

LEAST_NOISE = 0.004
"""Least noise of an iteration to believe in."""

OF_TIME = 0.1
"""A kind of action that takes less than this part of the work does not count."""

MOST_INTERVALS = 20_000_000
"""Intervals of all ranks; with more, only those that last to the end are tried."""


@dataclass(frozen=True)
class Shift:
    """A rank that takes longer than expected.

    Attributes:
        column: of the rank.
        first: place of the first iteration that has it.
        end: place after the last one.
        size: by how much, logarithm.
        error: its standard error.
        doubt: square of the standard errors that chance alone reaches, as many places were tried.
    """

    column: int
    first: int
    end: int
    size: float
    error: float
    doubt: float

    @property
    def excess(self) -> float:
        """Squared standard errors beyond doubt."""
        return (self.size / self.error) ** 2 - self.doubt


@dataclass(eq=False)
class RankBaselines:
    """The model of a run's ranks.

    Attributes:
        series: ``[iterations, ranks]``, logarithms.
        by_kind: ``[iterations, ranks, 3]``, the same of F, B and W; NaN where that is little.
        lasting: ``[ranks, ranks]``, covariance of the ranks' levels.
        passing: ``[ranks, ranks]``, covariance of an iteration.
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
        """Let a rank's level say nothing about others."""
        self.lasting[column, column] += 1.0
        self._invert()

    def remove(self, shift: Shift) -> None:
        """Take a shift off the series, as if it had not been."""
        self.series[shift.first : shift.end, shift.column] -= shift.size

    def errors(self) -> tuple[Floats, Floats]:
        """``[ranks]`` twice: each rank's shift in all iterations, and its standard error."""
        known = np.diagonal(self._level)
        return self._level @ self.series.mean(axis=0) / known, 1 / np.sqrt(known)

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
        found = inside / count * (self._level[column] @ mean) + scores.sum()
        return float(found * self._information(column, inside) ** -1.0)

    def _information(self, column: int, inside: Ints | int) -> Floats | float:
        """Returns the precision (1 / variance) of a shift over so many iterations."""
        count = len(self.series)
        level, each = self._level[column, column], self._each[column, column]
        known: Floats | float = (inside / count) ** 2 * level + inside * (1 - inside / count) * each
        return known

    def scan(self, least: float, sure: float) -> list[Shift]:
        """The likeliest shift of each rank, whether it is likely or not.

        Args:
            least: smaller ones do not count, logarithm.
            sure: standard errors from which one that is there all the time is no chance, for a
                few ranks; more is asked of what is one of many.
        """
        count, ranks = self.series.shape
        mean = self.series.mean(axis=0)
        level, each = self._level @ mean, (self.series - mean) @ self._each
        first, end = intervals(count, ended=count * count * ranks <= 2 * MOST_INTERVALS)
        first, end = np.append(0, first), np.append(count, end)  # or all iterations
        inside = end - first
        doubt = np.full(len(first), sure**2 + 2 * math.log(max(1.0, ranks / 4)))
        doubt += np.where(inside < count, 2 * math.log(count), 0.0)
        doubt += np.where(end < count, 2 * math.log(count), 0.0)
        found = []
        for column in range(ranks):
            sums = np.concatenate([[0.0], np.cumsum(each[:, column])])
            scores = inside / count * level[column] + sums[end] - sums[first]
            known = np.asarray(self._information(column, inside))
            size = scores / known
            excess = np.where(size >= least, size * scores - doubt, -np.inf)
            best = int(np.argmax(excess))
            found.append(
                Shift(
                    column=column,
                    first=int(first[best]),
                    end=int(end[best]),
                    size=float(size[best]),
                    error=float(known[best] ** -0.5),
                    doubt=float(doubt[best]) if excess[best] > -np.inf else math.inf,
                )
            )
        return found


def rank_baselines(m: Measured) -> RankBaselines:
    """Fit the model to a run."""
    planned, unsure = _plan(m)
    logs = np.log(m.action_ns.astype(np.float64)) - planned[:, :, None, None]
    _level_microbatches(m, logs)
    medians = tame_mean(logs)
    share = np.nansum(middle(m.median_ns, axis=0), axis=(0, 1))
    share = np.where(share >= OF_TIME * share.sum(), share, 0.0)
    # A chunk whose work is not known counts for as little as that is worth.
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
        lasting=together + ALIKE**2 * np.eye(len(m.places)),
        passing=passing,
    )
    if len(m.places) >= SEEN_BEFORE:
        sizes, errors = baselines.errors()
        wide = min(9.0, max(1.0, float(spread(sizes / errors)) ** 2))
        part = len(m.places) / (SEEN_BEFORE + len(m.places))
        baselines.lasting += part * (wide - 1) * ALIKE**2 * np.eye(len(m.places))
        baselines._invert()
    return baselines


def _plan(m: Measured) -> tuple[Floats, Floats]:
    """``[ranks, chunks]`` twice: logarithm of planned work, and how far it may be off."""
    planned = np.zeros((len(m.places), m.num_chunks))
    unsure = np.full(planned.shape, UNKNOWN)
    for column, stages in enumerate(m.stages):
        for chunk, stage in enumerate(stages[: m.num_chunks]):
            held = m.work[stage] if m.work else 0.0
            if held <= 0:
                continue
            planned[column, chunk] = math.log(held)
            if m.layers:
                beside = max(0.0, held - m.layers[stage])
                unsure[column, chunk] = math.log1p(UNSURE_OF_PLAN * beside / held)
    return planned, unsure


def _level_microbatches(m: Measured, logs: Floats) -> None:
    """Take off what a microbatch is longer than others of its iteration on all stages.

    The mean over an iteration stays: it has its place in the model.
    """
    usual = middle(logs, axis=(0, 4))
    for pipeline in m.replicas.values():
        rest = logs[:, pipeline] - usual[pipeline][None, :, :, :, None]
        common = middle(rest, axis=(1, 2, 3))
        entries = max(1, int(np.isfinite(usual[pipeline]).sum()))
        alone = 1.57 * float(middle(spread(rest, axis=-1))) ** 2 / entries
        all_of_it = float(spread(common.ravel())) ** 2
        believed = max(0.0, 1 - alone / all_of_it) if all_of_it > 0 else 0.0
        known = np.isfinite(common)
        mean = np.nansum(common, axis=1) / np.maximum(1, known.sum(axis=1))
        common = np.where(known, common - mean[:, None], 0.0)
        logs[:, pipeline] -= believed * common[:, None, None, None, :]


def _passing(m: Measured, series: Floats, sampling: Floats) -> Floats:
    """Covariance of an iteration: noise of each rank, and what a replica's ranks share."""
    ranks = len(m.places)
    own = np.zeros(ranks)
    shared = []
    for pipeline in m.replicas.values():
        count = len(pipeline)
        rest = series[:, pipeline] - np.median(series[:, pipeline], axis=0)
        common = rest.mean(axis=1, keepdims=True) if count > 1 else np.zeros((len(rest), 1))
        part = math.sqrt(count / (count - 1)) if count > 1 else 1.0
        own[pipeline] = [noise(column) * part for column in (rest - common).T]
        shared.append((noise(common[:, 0]), count))
    usual = float(np.sqrt(np.mean(own**2))) if ranks else 0.0
    usual = min(usual, 1.3 * float(np.median(own)))
    least = np.maximum(max(usual, LEAST_NOISE), sampling)
    sigma = np.where(own > 2 * usual, np.maximum(own, least), least)
    common_var = float(np.mean([max(0.0, rough**2 - usual**2 / count) for rough, count in shared]))
    covariance: Floats = np.diag(sigma**2) + common_var * _same(m, m.replicas)
    return covariance


def _sampling(logs: Floats) -> Floats:
    """``[ranks]``: the noise of an iteration that its actions' own noise makes."""
    within = middle(spread(logs, axis=-1), axis=(0, 2, 3))
    entries = np.isfinite(logs).sum(axis=(2, 3, 4)).mean(axis=0)
    found: Floats = np.nan_to_num(within) / np.sqrt(np.maximum(1.0, entries))
    return found


def _same(m: Measured, groups: dict[tuple[int, int], list[int]]) -> Floats:
    """``[ranks, ranks]``: 1 where two ranks are of one group."""
    same = np.zeros((len(m.places), len(m.places)))
    for group in groups.values():
        same[np.ix_(group, group)] = 1.0
    return same


def _weighted(values: Floats, weights: Floats, axis: int) -> Floats:
    """The weighted mean of what is known, NaN where nothing is."""
    known = np.isfinite(values) * weights
    sums = (np.nan_to_num(values) * known).sum(axis=axis)
    total = known.sum(axis=axis)
    found: Floats = np.where(total > 0, sums / np.where(total > 0, total, 1.0), np.nan)
    return found


def _filled(series: Floats) -> Floats:
    """Fills gaps with the rank's usual value and replaces momentary outliers by their neighbours.

    A rank of which nothing is known is as usual for all.
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
