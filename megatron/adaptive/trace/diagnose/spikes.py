"""Single actions of a rank that take far longer than its others of the same iteration."""

from __future__ import annotations

import math

import numpy as np

from megatron.adaptive.trace.diagnose.finding import Finding, Period
from megatron.adaptive.trace.diagnose.measured import Measured
from megatron.adaptive.trace.diagnose.robust import Floats, chance, middle, spread

__all__ = ["find_spikes"]

LEAST = math.log(1.4)
"""A spike takes at least so many times as long as usual."""

SPREADS = 5.0
"""And is so many standard deviations away."""

FEWEST = 4
"""Fewer spikes are chance."""

MOST = 0.25
"""More than this part of all actions are no spikes."""

BACKGROUND = 1e-3
"""Part of all actions that is always somewhat odd."""

RARE = 1e-6
"""How unlikely so many spikes are to be those that all ranks have."""

OF_STEP = 0.003
"""Spikes that cost less of a step than this are not told."""

FEW_MICROBATCHES = 4
OF_PARTIAL = 3


def find_spikes(m: Measured) -> list[Finding]:
    """Find ranks with spikes that others do not have, the dearest first."""
    odd = _oddness(m)
    # The widest usual spread of any rank: one that is noisy all the time has no spikes.
    usual = [
        float(spread(odd[:, column][np.isfinite(odd[:, column])]))
        for column in range(len(m.places))
        if np.isfinite(odd[:, column]).any()
    ]
    if not usual:
        return []
    counts, rates, limits = [], [], []
    for column in range(len(m.places)):
        mine = odd[:, column][np.isfinite(odd[:, column])]
        width = float(spread(mine)) if len(mine) else 0.0
        limit = max(LEAST, SPREADS * max(width, float(np.median(usual))))
        limits.append(limit)
        counts.append(int((mine > limit).sum()))
        rates.append(counts[-1] / max(1, len(mine)))
    found = []
    for column in range(len(m.places)):
        others = rates[:column] + rates[column + 1 :]
        # With very few ranks the highest other rate, so that what all have is nobody's.
        rest = float(np.median(others)) if len(others) > 2 else max(others, default=0.0)
        total = round(counts[column] / rates[column]) if rates[column] else 0
        expected = total * max(BACKGROUND, 1.5 * rest)
        if counts[column] < FEWEST or rates[column] > MOST:
            continue
        unlikely = _tail(counts[column], expected)
        finding = _finding(m, odd[:, column], column, limits[column], expected)
        if unlikely < RARE and finding.cost_fraction >= OF_STEP:
            found.append(finding)
    return sorted(found, key=lambda finding: -finding.cost_ms)


def _oddness(m: Measured) -> Floats:
    """``[iterations, ranks, chunks, 3, microbatches]``: logarithm of an action by its usual length.

    Where there are stages enough, a microbatch that is long on all of them is not odd.
    """
    usual = m.median_ns[..., None]
    if m.action_ns.shape[-1] < FEW_MICROBATCHES:
        usual = middle(m.median_ns, axis=0)[None, ..., None]
    odd: Floats = np.log(m.action_ns.astype(np.float64) / usual)
    for pipeline in m.replicas.values():
        if len(pipeline) >= OF_PARTIAL:
            common = middle(odd[:, pipeline], axis=(1, 2))
            odd[:, pipeline] -= np.where(np.isfinite(common), common, 0.0)[:, None, None]
    return odd


def _finding(m: Measured, odd: Floats, column: int, limit: float, expected: float) -> Finding:
    place = m.places[column]
    hit = np.isfinite(odd) & (odd > limit)
    takes = m.action_ns[:, column][hit].astype(np.float64)
    extra = takes * (1 - np.exp(-odd[hit]))
    iterations = m.iterations[np.unique(np.nonzero(hit)[0])]
    cost_ns = float(extra.sum()) / len(m.iterations)
    count = int(hit.sum())
    return Finding(
        cause="spikes",
        ranks=(place.rank,),
        stages=place.stages,
        hosts=(place.host,),
        period=Period(
            first=int(iterations[0]) if len(iterations) else 0,
            last=int(iterations[-1]) if len(iterations) else 0,
            kind="spikes",
        ),
        against="others",
        confidence=chance((count - expected) / math.sqrt(count + expected + 1)),
        delay_ms=float(np.median(extra)) / 1e6 if count else 0.0,
        counts={"iterations": len(iterations), "spikes": count},
        detail=f"{count / max(1, int(np.isfinite(odd).sum())):.1%} of its actions, "
        f"{float(np.exp(np.median(odd[hit]))) if count else 1:.2f} times as long as usual",
        cost_ms=cost_ns / 1e6,
        cost_fraction=cost_ns / m.step if m.step else 0.0,
    )


def _tail(count: int, expected: float) -> float:
    """How likely ``count`` or more are where so many are expected (Poisson)."""
    if expected <= 0:
        return 0.0 if count else 1.0
    term = math.exp(-expected + count * math.log(expected) - math.lgamma(count + 1))
    total, number = 0.0, count
    while term > 1e-18 and number < count + 1000:
        total += term
        number += 1
        term *= expected / number
    return min(1.0, total) if count > expected else 1.0
