"""Input starvation: ranks that wait for their data."""

from __future__ import annotations

import math

import numpy as np

from megatron.adaptive.trace.diagnose.finding import Finding, Period
from megatron.adaptive.trace.diagnose.measured import Measured
from megatron.adaptive.trace.diagnose.robust import best_interval, chance, noise
from megatron.adaptive.trace.table import Ints

__all__ = ["find_slow_reading"]

OF_STEP = 0.03
"""Reading that takes less of a step than this starves nobody."""

TIMES = 1.5
"""Slow reading takes so many times as long as that of others, or as before."""

CHANGE_SURE = 6.0


def find_slow_reading(m: Measured) -> list[Finding]:
    """Find ranks that lose time to the reading of data, the worst first."""
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(m.reads > 0, m.read_ns / np.maximum(1, m.reads), np.nan)
    readers = [column for column in range(len(m.places)) if np.isfinite(each[:, column]).any()]
    usual_of = {column: float(np.nanmedian(each[:, column])) for column in readers}
    found = []
    for column in readers:
        known = np.flatnonzero(np.isfinite(each[:, column]) & (each[:, column] > 0))
        if not len(known):
            continue
        series = each[known, column]
        share = m.read_ns[known, column] / np.maximum(1, m.step_ns[known])
        others = [level for other, level in usual_of.items() if other != column]
        # Where all are slow, none of them is a measure for the others.
        usual = min(others) if others else 0.0
        change = best_interval(np.log(series), floor=0.05)
        chosen, before, kind, against = known, usual, "lasting", "others" if others else "plan"
        if change is not None and change.score >= CHANGE_SURE and change.rise >= math.log(TIMES):
            inside = np.arange(change.first, change.last + 1)
            chosen = known[inside]
            share = share[inside]
            before = float(np.median(np.delete(series, inside)))
            kind = "begun" if change.last == len(series) - 1 else "passed"
            against = "history"
        level = float(np.median(each[chosen, column]))
        if float(np.median(share)) < OF_STEP or level < TIMES * before:
            # Starved all the same, if this much of the step goes into it on every reader.
            if float(np.median(share)) < 2 * OF_STEP:
                continue
            before = 0.0
        found.append(_finding(m, column, chosen, level, level - before, kind, against))
    return sorted(found, key=lambda finding: -(finding.delay_ms or 0))


def _finding(
    m: Measured,
    column: int,
    chosen: Ints,
    level: float,
    excess: float,
    kind: str,
    against: str,
) -> Finding:
    place = m.places[column]
    cost_ns = m.cost_ns(column, min(excess, float(m.microbatch_ns[column])))
    reads = int(m.reads[chosen, column].sum())
    series = m.read_ns[chosen, column] / np.maximum(1, m.reads[chosen, column])
    error = 1.25 * noise(series) / math.sqrt(len(series)) + 0.1 * level
    share = float(np.median(m.read_ns[chosen, column] / np.maximum(1, m.step_ns[chosen])))
    return Finding(
        cause="slow data",
        ranks=(place.rank,),
        stages=place.stages,
        hosts=(place.host,),
        period=Period(
            first=int(m.iterations[chosen[0]]), last=int(m.iterations[chosen[-1]]), kind=kind
        ),
        against=against,
        confidence=chance(excess / error),
        delay_ms=excess / 1e6,
        counts={"iterations": len(chosen), "reads": reads},
        detail=f"a read takes {level / 1e6:.3g} ms, all of them {share:.1%} of the step",
        cost_ms=cost_ns / 1e6,
        cost_fraction=cost_ns / m.step if m.step else 0.0,
    )
