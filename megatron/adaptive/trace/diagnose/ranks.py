"""Ranks whose work takes longer than it should, all the time or for some of it.

``levels`` weighs what is known of each rank: peers, plan and past. Here the likeliest shift is
taken for a fault, if it is beyond chance and large enough to matter, then the next one without it.
"""

from __future__ import annotations

import math

import numpy as np

from megatron.adaptive.trace.diagnose.baselines import Levels, Shift, levels_of
from megatron.adaptive.trace.diagnose.finding import Finding, Period
from megatron.adaptive.trace.diagnose.measured import Measured
from megatron.adaptive.trace.diagnose.robust import Floats, chance, middle, noise
from megatron.adaptive.trace.table import Ints

__all__ = ["find_slow_ranks"]

SLOW = math.log(1.05)
"""What is slower by less than this is how machines differ."""

SURE = 3.2
"""Standard errors that chance does not reach, see ``Levels.scan``."""

QUICKER = 0.7
"""A rank is taken for slow rather than another for quick if it is so much as likely."""

AGREE = 0.4
"""F, B and W must each show so much of the whole."""

OWN = 0.5
"""A rank that became slow shows so much of it without regard to others."""

MOST_FOUND = 20
"""More ranks than this are not named one by one."""


def find_slow_ranks(m: Measured) -> list[Finding]:
    """Find slow ranks, the slowest first."""
    levels = levels_of(m)
    own = _own(m)
    judged: set[int] = set()
    found = []
    for _ in range(min(MOST_FOUND, max(1, len(m.places) // 2))):
        shifts = [s for s in levels.scan(SLOW, SURE) if s.column not in judged and s.excess > 0]
        slow = max(shifts, key=lambda shift: shift.excess, default=None)
        quick = _quickest(levels, judged)
        if quick is not None and (slow is None or slow.excess < QUICKER * quick.excess):
            judged.add(quick.column)
            levels.distrust(quick.column)
            continue
        if slow is None:
            break
        judged.add(slow.column)
        if _is_real(levels, slow, own[:, slow.column]):
            found.append(_finding(m, levels, slow))
        levels.remove(slow)
        if slow.end - slow.first == len(m.iterations):
            levels.distrust(slow.column)
    return sorted(found, key=lambda finding: -(finding.factor or 0))


def _quickest(levels: Levels, judged: set[int]) -> Shift | None:
    """The rank that is quicker than it should be beyond doubt: no measure for others."""
    sizes, errors = levels.errors()
    count, ranks = levels.series.shape
    doubt = SURE**2 + 2 * math.log(max(1.0, ranks / 4))
    quick = [
        Shift(column, 0, count, float(sizes[column]), float(errors[column]), doubt)
        for column in range(ranks)
        if column not in judged and sizes[column] <= -SLOW
    ]
    best = max(quick, key=lambda shift: shift.excess, default=None)
    return best if best is not None and best.excess > 0 else None


def _is_real(levels: Levels, shift: Shift, own: Floats) -> bool:
    """Whether F, B and W are all slow, and whether it is the rank that changed."""
    if any(size < AGREE * shift.size for size in levels.kinds(shift).values()):
        return False
    inside, outside = own[shift.first : shift.end], np.delete(own, np.s_[shift.first : shift.end])
    if not len(outside):
        return True
    error = 1.25 * noise(own) * math.sqrt(1 / len(inside) + 1 / len(outside))
    return float(np.median(inside) - np.median(outside)) >= OWN * shift.size - 2 * error


def _own(m: Measured) -> Floats:
    """``[iterations, ranks]``: logarithm of all work of a rank's microbatch."""
    with np.errstate(divide="ignore"):
        own: Floats = np.log(np.nansum(m.median_ns.astype(np.float64), axis=(2, 3)))
    return own


def _finding(m: Measured, levels: Levels, shift: Shift) -> Finding:
    column, place = shift.column, m.places[shift.column]
    chosen: Ints = np.arange(shift.first, shift.end)
    takes = float(np.nansum(middle(m.median_ns[chosen][:, column], axis=0)))
    cost_ns = m.cost_ns(column, takes * (1 - math.exp(-shift.size)))
    kinds = levels.kinds(shift)
    detail = ", ".join(f"{name} {math.exp(size):.2f}x" for name, size in kinds.items())
    lasting = len(chosen) == len(m.iterations)
    to_the_end = shift.end == len(m.iterations)
    peers = any(column in group and len(group) > 1 for group in m.peers.values())
    return Finding(
        cause="slow rank",
        ranks=(place.rank,),
        stages=place.stages,
        hosts=(place.host,),
        period=Period(
            first=int(m.iterations[chosen[0]]),
            last=int(m.iterations[chosen[-1]]),
            kind="lasting" if lasting else "begun" if to_the_end else "passed",
        ),
        against=("peers" if peers else "plan") if lasting else "history",
        confidence=chance((shift.size - SLOW / 2) / shift.error),
        factor=math.exp(shift.size),
        counts={
            "iterations": len(chosen),
            "actions": int(np.isfinite(m.action_ns[chosen][:, column]).sum()),
        },
        detail=f"{detail} of what was expected",
        cost_ms=cost_ns / 1e6,
        cost_fraction=cost_ns / m.step if m.step else 0.0,
    )
