"""Compares each rank's computing time with other ranks, with the plan and with earlier iterations.

The plan is the expected work of each stage, which is stored in the trace header. A single
statistical model combines all evidence. It considers the ratio of a rank's computing time in an
iteration to the rank's planned work. The logarithm of this ratio is modelled as the sum of

    a mean over all ranks  +  a deviation of the rank     (machines differ: ALIKE)
                           +  a deviation of its stage    (the plan may be wrong for all peers)
                           +  a deviation of its replica in the iteration
                                                          (long microbatches slow all stages)
                           +  noise                       (estimated from the run)

A slow rank has a higher ratio in some or all iterations (a shift). The size of the shift and its
standard error are estimated with generalized least squares. This method weights the evidence from
peers, from other stages and from the rank's other iterations by certainty. Evidence that does not
exist, for example because there are no peers or no plan, has no weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from megatron.adaptive.trace.diagnose.covariance import Covariance, InverseCovariance, Shared
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
"""Prior standard deviation of the relative speeds of identical machines."""

SEEN_BEFORE = 16
"""Weight of the prior :data:`ALIKE`, expressed as an equivalent number of observed ranks."""

UNSURE_OF_PLAN = 0.25
"""Relative uncertainty of the planned work for embedding and loss."""

UNKNOWN = 10.0
"""Standard deviation of unknown values. It is so large that these values have no weight."""

LEAST_NOISE = 0.004
"""Minimum relative standard deviation to assume for a rank's times in different iterations."""

OF_TIME = 0.1
"""Minimum fraction of the computing time for a kind of action (F, B, W) to be examined."""

MOST_INTERVALS = 20_000_000
"""Maximum number of intervals that are searched for slowdowns, summed over all ranks.

If there are more intervals, only those that last until the end of the run are searched.
"""

INTERVALS_AT_ONCE = 500_000
"""Maximum number of scores (one per interval and rank) to keep in memory at the same time."""


@dataclass(frozen=True)
class Shift:
    """Describes how much slower or faster than expected a rank is during consecutive iterations.

    Attributes:
        column: Index of the rank on the rank axis of :class:`Measured`.
        first: Index of the first affected iteration.
        end: Index of the last affected iteration, plus one.
        size: Logarithm of the ratio of the rank's time to the expected time.
        error: Standard error of ``size``.
        doubt: Threshold for ``(size / error) ** 2``, above which the shift is significant. The
            threshold is higher if more intervals were searched, because noise then reaches higher
            values.
    """

    column: int
    first: int
    end: int
    size: float
    error: float
    doubt: float

    @property
    def excess(self) -> float:
        """Difference ``(size / error) ** 2 - doubt``, which is positive for a significant shift."""
        return (self.size / self.error) ** 2 - self.doubt


@dataclass(eq=False)
class RankBaselines:
    """Models the ranks' computing times, and searches for ranks that became slower or faster.

    Attributes:
        series: ``[iterations, ranks]``, logarithm of the ratio of the rank's time to its planned
            work.
        by_kind: ``[iterations, ranks, 3]``, same as ``series`` for each kind of action: forward
            passes, backward passes and separate weight-gradient passes. NaN for kinds that take
            little time.
        lasting: Covariance of the deviations that are constant over the run.
        passing: Covariance of the deviations that vary between iterations.
    """

    series: Floats
    by_kind: Floats
    lasting: Covariance
    passing: Covariance
    _level: InverseCovariance = field(init=False)
    _each: InverseCovariance = field(init=False)

    def __post_init__(self) -> None:
        self._each = self.passing.inverse()
        self.doubt(np.zeros(self.series.shape[1]))

    def doubt(self, variances: Floats) -> None:
        """Increases the uncertainty of each rank's constant deviation.

        Args:
            variances: ``[ranks]``, variance to add for each rank.
        """
        self.lasting = self.lasting.with_own(variances)
        self._level = self.lasting.plus(self.passing, 1 / len(self.series)).inverse()

    def distrust(self, column: int) -> None:
        """Stops using the rank with index ``column`` as a reference for other ranks.

        To do so, increases the uncertainty of this rank's constant deviation.
        """
        self.doubt(np.eye(1, self.series.shape[1], column)[0])

    def remove(self, shift: Shift) -> None:
        """Subtracts ``shift`` from the rank's times, so that it is not found again."""
        self.series[shift.first : shift.end, shift.column] -= shift.size

    def errors(self) -> tuple[Floats, Floats]:
        """Returns each rank's mean deviation over the whole run, and the standard errors.

        Both arrays have the shape ``[ranks]``.
        """
        precision = self._level.diagonal
        return self._level @ self.series.mean(axis=0) / precision, 1 / np.sqrt(precision)

    def kinds(self, shift: Shift) -> dict[str, float]:
        """Returns the size of ``shift`` for each kind of action (F, B, W), as a logarithm.

        Omits kinds of actions that take little time.
        """
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
        scores = (series[shift.first : shift.end] - mean) @ self._each.column(column)
        score = inside / count * (self._level.column(column) @ mean) + scores.sum()
        precision = self._information(np.array([inside]), slice(column, column + 1))
        return float(score / precision[0, 0])

    def _information(self, inside: Ints, columns: slice) -> Floats:
        """Returns the precision (1 / variance) of estimated shifts, ``[intervals, columns]``.

        Args:
            inside: ``[intervals]``, number of iterations in each interval.
            columns: Indices of the ranks for which the precision is returned.
        """
        part = (inside / len(self.series))[:, None]
        level, each = self._level.diagonal[columns], self._each.diagonal[columns]
        precision: Floats = part**2 * level + inside[:, None] * (1 - part) * each
        return precision

    def scan(self, least: float, sure: float) -> list[Shift]:
        """Returns each rank's most likely slowdown or speedup (shift), even if not significant.

        Args:
            least: Minimum size of a shift, as a logarithm.
            sure: Minimum ratio of a shift's size to its standard error for the shift to be
                significant, if it lasts the whole run and there are few ranks. With more ranks or
                intervals, the threshold is higher, because noise then causes more false findings.
        """
        count, ranks = self.series.shape
        mean = self.series.mean(axis=0)
        level, each = self._level @ mean, (self._each @ (self.series - mean).T).T
        first, end = intervals(count, ended=count * count * ranks <= 2 * MOST_INTERVALS)
        # intervals() does not include the interval with all iterations, so add it at index 0.
        first = np.append(0, first)
        end = np.append(count, end)
        inside = end - first
        doubt = np.full(len(first), sure**2 + 2 * math.log(max(1.0, ranks / 4)))
        doubt += np.where(inside < count, 2 * math.log(count), 0.0)
        doubt += np.where(end < count, 2 * math.log(count), 0.0)
        sums = np.concatenate([np.zeros((1, ranks)), np.cumsum(each, axis=0)])
        shifts = []
        at_once = max(1, INTERVALS_AT_ONCE // len(first))
        for columns in (slice(low, low + at_once) for low in range(0, ranks, at_once)):
            of_ranks = sums[:, columns]
            scores = (inside / count)[:, None] * level[columns] + of_ranks[end] - of_ranks[first]
            precision = self._information(inside, columns)
            size = scores / precision
            excess = np.where(size >= least, size * scores - doubt[:, None], -np.inf)
            best = excess.argmax(axis=0)
            for offset, row in enumerate(best.tolist()):
                is_large = excess[row, offset] > -np.inf
                shifts.append(
                    Shift(
                        column=columns.start + offset,
                        first=int(first[row]),
                        end=int(end[row]),
                        size=float(size[row, offset]),
                        error=float(precision[row, offset] ** -0.5),
                        doubt=float(doubt[row]) if is_large else math.inf,
                    )
                )
        return shifts


def rank_baselines(m: Measured) -> RankBaselines:
    """Fits the statistical model to ``m``, the measured times of a run."""
    num_ranks = len(m.headers)
    planned, unsure = _plan(m)
    logs = np.log(m.action_ns.astype(np.float64)) - planned[:, :, None, None]
    _level_microbatches(m, logs)
    medians = tame_mean(logs)
    share = np.nansum(middle(m.median_ns, axis=0), axis=(0, 1))
    share = np.where(share >= OF_TIME * share.sum(), share, 0.0)
    # Average over the chunks of a rank. Chunks with less certain planned work have less weight.
    weights = 1 / (unsure**2 + ALIKE**2)
    weights /= weights.sum(axis=1, keepdims=True)
    by_kind = _weighted(medians, weights[None, :, :, None], axis=2)
    by_kind[:, :, share == 0] = np.nan
    series = _filled(_weighted(by_kind, share[None, None, :], axis=2))
    of_stage = np.sqrt((weights**2 * unsure**2).sum(axis=1))
    passing = _passing(m, series, _sampling(logs))
    everyone = Shared(np.zeros(num_ranks, dtype=np.int64), np.full(num_ranks, UNKNOWN))
    peers = Shared(_index_of_group(m, m.peers), of_stage)
    baselines = RankBaselines(
        series=series,
        by_kind=np.stack([_filled(by_kind[:, :, k]) for k in range(3)], axis=2),
        lasting=Covariance(np.full(num_ranks, ALIKE**2), (everyone, peers)),
        passing=passing,
    )
    if num_ranks >= SEEN_BEFORE:
        sizes, errors = baselines.errors()
        wide = min(9.0, max(1.0, float(spread(sizes / errors)) ** 2))
        part = num_ranks / (SEEN_BEFORE + num_ranks)
        baselines.doubt(np.full(num_ranks, part * (wide - 1) * ALIKE**2))
    return baselines


def _plan(m: Measured) -> tuple[Floats, Floats]:
    """Returns the logarithm of each rank's planned work, and its uncertainty.

    Both arrays have the shape ``[ranks, chunks]``.
    """
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
    """Removes the effect of long microbatches on the durations.

    Long microbatches take longer on all stages. Without this correction, they could be mistaken for
    slow stages. Only the difference from the iteration's mean is subtracted, because the model
    already has a term for the mean (the replica's deviation).

    Args:
        m: Measured times of the run.
        logs: Logarithms of the durations of all actions. The array is modified in place.
    """
    usual = middle(logs, axis=(0, 4))
    for pipeline in m.replicas.values():
        rest = logs[:, pipeline] - usual[pipeline][None, :, :, :, None]
        common = middle(rest, axis=(1, 2, 3))
        entries = max(1, int(np.isfinite(usual[pipeline]).sum()))
        alone = 1.57 * float(middle(spread(rest, axis=-1))) ** 2 / entries
        variance = float(spread(common.ravel())) ** 2
        # Because of noise, microbatches seem to differ even if they have the same length. The
        # weight is therefore the fraction of the variance of ``common`` that is not caused by
        # noise.
        weight = max(0.0, 1 - alone / variance) if variance > 0 else 0.0
        is_measured = np.isfinite(common)
        mean = np.nansum(common, axis=1) / np.maximum(1, is_measured.sum(axis=1))
        common = np.where(is_measured, common - mean[:, None], 0.0)
        logs[:, pipeline] -= weight * common[:, None, None, None, :]


def _passing(m: Measured, series: Floats, sampling: Floats) -> Covariance:
    """Returns the covariance of the deviations that vary between iterations.

    These deviations consist of the noise of each rank, and a deviation that all ranks of a replica
    share.

    Args:
        m: Measured times of the run.
        series: ``[iterations, ranks]``, logarithm of the ratio of the rank's time to its planned
            work.
        sampling: ``[ranks]``, lower bound on the standard deviation of the rank's noise.
    """
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
    replicas = Shared(_index_of_group(m, m.replicas), np.full(ranks, math.sqrt(common_var)))
    return Covariance(sigma**2, (replicas,))


def _sampling(logs: Floats) -> Floats:
    """Returns the standard deviation of the noise in each rank's time per iteration.

    Returns:
        Standard deviations with shape ``[ranks]``, estimated from the noise of single actions. The
        noise of the mean of n actions is the noise of one action divided by sqrt(n).
    """
    within = middle(spread(logs, axis=-1), axis=(0, 2, 3))
    entries = np.isfinite(logs).sum(axis=(2, 3, 4)).mean(axis=0)
    sampling: Floats = np.nan_to_num(within) / np.sqrt(np.maximum(1.0, entries))
    return sampling


def _index_of_group(m: Measured, groups: dict[tuple[int, ...], list[int]]) -> Ints:
    """Returns the index of each rank's group in ``groups``, ``[ranks]``."""
    index = np.zeros(len(m.headers), dtype=np.int64)
    for number, columns in enumerate(groups.values()):
        index[columns] = number
    return index


def _weighted(values: Floats, weights: Floats, axis: int) -> Floats:
    """Returns the weighted mean of the finite values along ``axis``, or NaN if none is finite."""
    used = np.isfinite(values) * weights
    sums = (np.nan_to_num(values) * used).sum(axis=axis)
    total = used.sum(axis=axis)
    mean: Floats = np.where(total > 0, sums / np.where(total > 0, total, 1.0), np.nan)
    return mean


def _filled(series: Floats) -> Floats:
    """Replaces missing values with the rank's median, and clips outliers in single iterations.

    A value is clipped if it is too far from the median of the five surrounding iterations. A rank
    without any values gets the median of all ranks.
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
