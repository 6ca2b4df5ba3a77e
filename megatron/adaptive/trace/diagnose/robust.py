"""Statistics that a few odd numbers do not move, and when a series of numbers changed."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]

NORMAL = 1.4826
"""Standard deviation by median absolute deviation, for a normal distribution."""

LEAST = 4
"""Fewer numbers than this, inside or outside, are no interval."""

PASSED = 6
"""And fewer than this that do not last to the end: something else ran for a moment."""

TO_THE_END = 0.85
"""A shift that lasts to the end is preferred to one that ended, if it is nearly as likely."""

APART = 0.2
"""The lower quartile inside is above the upper one outside by so much of the rise."""

TAME = 1.75
"""Plain numbers are within so many standard deviations."""

_MOST_POINTS = 300


@dataclass(frozen=True)
class Interval:
    """Locates a part of a series whose numbers were higher.

    Attributes:
        inside: its places.
        kind: of the period, ``begun`` where it lasts to the end of the series, else ``passed``.
        rise: median within minus median outside.
        score: that difference in standard errors.
    """

    inside: slice
    kind: str
    rise: float
    score: float


def middle(values: Floats, axis: int | tuple[int, ...] | None = None) -> Any:
    """The median without NaN; NaN where there is nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of an empty slice
        return np.nanmedian(values, axis=axis)


def spread(values: Floats, axis: int | None = None) -> Any:
    """The standard deviation that the median absolute deviation stands for."""
    centre = middle(values, axis)
    centre = centre if axis is None else np.expand_dims(centre, axis)
    return NORMAL * middle(np.abs(values - centre), axis)


def tame_mean(values: Floats) -> Floats:
    """The mean over the last axis, wild numbers taken for as far off as plain ones get.

    Of plain numbers it is surer than the median, and of some wild ones as sure.

    Args:
        values: ``[n, ..., m]``; NaN for none. How far plain numbers get is the same along the first
            axis.

    Returns:
        ``[n, ...]``, NaN where there is nothing.
    """
    centre = middle(values, axis=-1)[..., None]
    reach = TAME * middle(spread(values, axis=-1), axis=0)[None, ..., None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of an empty slice
        return np.asarray(np.nanmean(np.clip(values, centre - reach, centre + reach), axis=-1))


def noise(series: Floats) -> float:
    """The standard deviation of a series around whatever level it has at a time.

    From differences of neighbours, so that a change of the level does not count.

    Args:
        series: ``[n]`` without NaN; 0 is returned for fewer than three.
    """
    if len(series) < 3:
        return 0.0
    return float(NORMAL * np.median(np.abs(np.diff(series))) / math.sqrt(2))


def best_interval(series: Floats, floor: float = 0.0) -> Interval | None:
    """The interval in which a series is higher than elsewhere with the least doubt.

    Args:
        series: ``[n]`` without NaN.
        floor: least standard deviation to believe in.

    Returns:
        ``None`` where the series is too short for an inside and an outside, or where these overlap.
    """
    count = len(series)
    if count < 2 * LEAST or count > _MOST_POINTS:
        return None
    sigma = max(noise(series), floor, 1e-12)
    centre = np.median(series)
    tame = np.clip(series, centre - 8 * sigma, np.median(np.sort(series)[-LEAST:]) + 8 * sigma)
    sums = np.concatenate([[0.0], np.cumsum(tame)])
    first, end = np.triu_indices(count + 1, LEAST)
    inside = end - first
    outside = count - inside
    keep = (outside >= LEAST) & ((inside >= PASSED) | (end == count))
    first, end, inside, outside = first[keep], end[keep], inside[keep], outside[keep]
    within = (sums[end] - sums[first]) / inside
    without = (sums[-1] - sums[end] + sums[first]) / outside
    scores = (within - without) / (sigma * np.sqrt(1 / inside + 1 / outside))
    best = int(np.argmax(scores))
    to_end = np.flatnonzero(end == count)
    lasting = int(to_end[np.argmax(scores[to_end])])
    if scores[lasting] >= TO_THE_END * scores[best]:
        best = lasting
    a, b = int(first[best]), int(end[best])
    rest = np.concatenate([series[:a], series[b:]])
    rise = float(np.median(series[a:b]) - np.median(rest))
    # A few wild numbers are no level: most of the inside must lie above most of the outside.
    if np.quantile(series[a:b], 0.25) < np.quantile(rest, 0.75) + APART * rise:
        return None
    kind = "begun" if b == count else "passed"
    return Interval(slice(a, b), kind, rise, float(scores[best]))


def chance(deviations: float) -> float:
    """Returns how likely a normal number so many deviations up is above 0, 0.5 to 0.99."""
    return min(0.99, max(0.5, 0.5 * (1 + math.erf(deviations / math.sqrt(2)))))
