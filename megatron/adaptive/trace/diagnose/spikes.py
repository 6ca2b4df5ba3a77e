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
"""Part of all actions that is always somewhat odd: believed as if one such had been seen."""

RARE = 3e-4
"""How unlikely it is that any rank has so many spikes of those that all have."""

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
    counts, totals, limits = [], [], []
    for column in range(len(m.places)):
        mine = odd[:, column][np.isfinite(odd[:, column])]
        width = float(spread(mine)) if len(mine) else 0.0
        limits.append(max(LEAST, SPREADS * max(width, float(np.median(usual)))))
        counts.append(int((mine > limits[-1]).sum()))
        totals.append(len(mine))
    found = []
    for column, (count, total) in enumerate(zip(counts, totals, strict=True)):
        if count < FEWEST or count > MOST * total:
            continue
        others = sorted(
            (counts[other], totals[other]) for other in range(len(counts)) if other != column
        )
        # Another rank may have spikes of its own, and says then nothing about what all have.
        others = others[:-1] if len(others) > 2 else others
        seen = 1 + sum(number for number, _ in others)
        part = total / (1 / BACKGROUND + sum(all_of_it for _, all_of_it in others))
        finding = _finding(m, odd[:, column], column, limits[column], seen * part)
        rare = _tail(count, seen, part) < RARE / len(counts)
        if rare and finding.cost_fraction >= OF_STEP:
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


def _tail(count: int, seen: float, part: float) -> float:
    """How likely ``count`` or more are chance (negative binomial: a rate that is itself uncertain).

    Args:
        count: spikes of a rank.
        seen: those of other ranks.
        part: the rank's actions by those of the others.
    """
    below = 0.0
    for number in range(count):
        below += math.exp(
            math.lgamma(seen + number)
            - math.lgamma(seen)
            - math.lgamma(number + 1)
            - seen * math.log1p(part)
            + number * math.log(part / (1 + part))
        )
    return max(0.0, 1 - below)
