"""Ranks whose work takes longer than it should.

What a rank should take is, from best to worst known: what its peers take, the ranks that do the
same work on other data; what the other stages take, scaled by the plan's work of each; what it
took itself in other iterations. All three are compared in logarithms of medians over the
microbatches of an iteration, so that a factor is a distance and a single long action is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from megatron.adaptive.trace.diagnose.finding import Finding, Period
from megatron.adaptive.trace.diagnose.measured import Measured
from megatron.adaptive.trace.diagnose.robust import (
    Floats,
    best_interval,
    chance,
    middle,
    noise,
    spread,
)
from megatron.adaptive.trace.table import Ints

__all__ = ["find_slow_ranks"]

SLOW = math.log(1.065)
"""What is slower by less than this is how machines differ."""

CHANGED = math.log(1.05)
"""A rank that changes by less than this has not changed."""

SURE = 4.0
"""Standard errors of a difference that is there all the time."""

CHANGE_SURE = 6.0
"""And of one that begins or ends: many intervals were tried."""

ALIKE = 0.015
"""How much ranks of one kind usually differ."""

CHANGE_LIKELY = 3.8
"""And of one that lasts to the end and makes the rank slower than it should be."""

AGREE = 0.4
"""F, B and W must each show so much of the whole."""

UNSURE_OF_PLAN = 0.5
"""By so much of it a plan may be wrong about what a stage holds beside its layers."""

SUPPORT = 0.6
"""Where a rank has one peer, the plan must show so much of what both show together."""

STEADY = 0.5
"""The lower quartile of iterations is below the median by so much of it at most."""

SURE_PLAN = 0.02
"""A plan that may be wrong by less than this is a measure for others."""

OF_PARTIAL = 3
"""So many stages are needed to tell a long microbatch from a slow rank."""

MANY_PEERS = 4
"""From so many on the median of all of them, the rank itself included, will do."""


@dataclass(frozen=True, eq=False)
class _Expected:
    """How far ranks are from what was expected of them.

    Attributes:
        deviation: ``[iterations, ranks, chunks, 3]``, logarithms.
        tolerance: ``[ranks]``, by how much the expectation may be wrong; infinite for no idea.
        against: what it comes from.
    """

    deviation: Floats
    tolerance: Floats
    against: str


def find_slow_ranks(m: Measured) -> list[Finding]:
    """Find slow ranks, the slowest first."""
    times = np.log(m.median_ns.astype(np.float64))
    plan = _from_plan(m, times)
    expected = _from_peers(m, times) or plan
    whole = _whole(m, expected.deviation)
    few = expected is not plan and min(map(len, m.peers.values())) < MANY_PEERS
    planned = middle(_whole(m, plan.deviation), axis=0)
    if few:
        # One peer is no crowd: where the plan is sure, both together are surer than either.
        sure = plan.tolerance <= SURE_PLAN
        whole[:, sure] = (whole[:, sure] + _whole(m, plan.deviation)[:, sure]) / 2
    # A slow rank must not make the spread of all of them: not with few, not by much with many.
    level = middle(whole, axis=0)
    others = float(spread(level)) if len(level) >= 6 else ALIKE
    others = min(max(others, ALIKE), (1.3 if few else 3.0) * ALIKE)
    rough = float(np.median([noise(_known(column)) for column in whole.T]))
    found = []
    for column in range(len(m.places)):
        finding = _judge(m, times, expected, whole[:, column], column, others, rough)
        if finding is not None and few and finding.period.kind == "lasting":
            # Of two peers that differ one is slow, or the other quick: the plan must not object.
            least = SUPPORT * math.log(finding.factor or 1.0)
            if planned[column] + plan.tolerance[column] < least:
                continue
        if finding is not None:
            found.append(finding)
    return sorted(found, key=lambda finding: -(finding.factor or 0))


def _from_peers(m: Measured, times: Floats) -> _Expected | None:
    """Against ranks that do the same work; ``None`` where there are none."""
    groups = [group for group in m.peers.values() if len(group) > 1]
    if not groups:
        return None
    plain = _against_group(times, groups)
    best = plain
    if max(len(pipeline) for pipeline in m.replicas.values()) >= OF_PARTIAL:
        # Microbatches of one pipeline may be longer than those of another: compare what is left
        # when all stages of a pipeline are taken down by what they have in common.
        rest = times.copy()
        for group in groups:
            rest[:, group] -= middle(times[:, group], axis=(0, 1))
        for pipeline in m.replicas.values():
            common = middle(rest[:, pipeline], axis=(1, 2))
            rest[:, pipeline] -= common[:, None, None, :]
        better = _against_group(rest, groups)
        if _roughness(m, better) < 0.6 * _roughness(m, plain):
            best = better
    return _Expected(best, np.zeros(len(m.places)), "peers")


def _against_group(times: Floats, groups: list[list[int]]) -> Floats:
    deviation = np.full(times.shape, np.nan)
    for group in groups:
        if len(group) >= MANY_PEERS:
            deviation[:, group] = times[:, group] - middle(times[:, group], axis=1)[:, None]
            continue
        for column in group:
            rest = [other for other in group if other != column]
            deviation[:, column] = times[:, column] - middle(times[:, rest], axis=1)
    return deviation


def _from_plan(m: Measured, times: Floats) -> _Expected:
    """Against the other stages of the same pipeline, by the work that each should have."""
    work = np.full((len(m.places), m.num_chunks), np.nan)
    tolerance = np.full(len(m.places), np.inf)
    for column, place in enumerate(m.places):
        for chunk, stage in enumerate(place.stages):
            planned = m.work[stage] if m.work else 1.0
            work[column, chunk] = planned or np.nan
        if m.work and m.layers:
            held = sum(m.work[stage] for stage in place.stages)
            beside = held - sum(m.layers[stage] for stage in place.stages)
            wrong = held + UNSURE_OF_PLAN * max(0.0, beside)
            tolerance[column] = math.log(wrong / held) if held else np.inf
    scaled = times - np.log(work)[None, :, :, None]
    deviation = np.full(times.shape, np.nan)
    own = tolerance.copy()
    for pipeline in m.replicas.values():
        for column in pipeline:
            rest = [other for other in pipeline if other != column]
            known = [other for other in rest if own[other] <= SURE_PLAN]
            rest = known if len(known) > 1 else rest
            if rest and not known:
                tolerance[column] += float(np.median(own[rest]))
            if rest:
                usual = middle(scaled[:, rest], axis=(1, 2))
                deviation[:, column] = scaled[:, column] - usual[:, None, :]
    return _Expected(deviation, tolerance, "plan")


def _whole(m: Measured, deviation: Floats) -> Floats:
    """``[iterations, ranks]``: of all work of a rank, from that of its chunks and kinds."""
    times = np.where(np.isfinite(deviation), m.median_ns, np.nan).astype(np.float64)
    should = times * np.exp(-np.where(np.isfinite(deviation), deviation, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        whole: Floats = np.log(np.nansum(times, axis=(2, 3)) / np.nansum(should, axis=(2, 3)))
    return whole


def _roughness(m: Measured, deviation: Floats) -> float:
    whole = _whole(m, deviation)
    return float(np.median([noise(_known(column)) for column in whole.T]))


def _known(series: Floats) -> Floats:
    return series[np.isfinite(series)]


def _judge(
    m: Measured,
    times: Floats,
    expected: _Expected,
    series: Floats,
    column: int,
    others: float,
    rough: float,
) -> Finding | None:
    """Say whether a rank is slow, all the time or for some of it."""
    known = np.isfinite(series)
    series = series[known]
    if not len(series):
        return None
    own = _own(m, times, column)[known]
    tolerance = float(expected.tolerance[column])
    level = float(np.median(series)) - (tolerance if math.isfinite(tolerance) else 0.0)
    error = _error(m, series, column)
    alike = max(ALIKE / 2, others)
    places = np.flatnonzero(known)
    always = math.isfinite(tolerance) and level >= max(SLOW, 3 * others)
    always = always and level >= SURE * math.hypot(error, ALIKE / 2)
    always = (
        always and float(np.quantile(series, 0.25)) - float(np.median(series)) >= -STEADY * level
    )
    change = best_interval(series, floor=max(0.004, rough))
    if change is not None:
        inside = slice(change.first, change.last + 1)
        rest = np.concatenate([own[: change.first], own[change.last + 1 :]])
        own_rise = float(np.median(own[inside]) - np.median(rest))
        there = float(np.median(series[inside])) - tolerance
        to_the_end = change.last == len(series) - 1
        needed = CHANGE_LIKELY if there >= SLOW / 2 and to_the_end else CHANGE_SURE
        changed = change.rise >= CHANGED and change.score >= needed
        changed = changed and own_rise >= 0.5 * change.rise
        before = level - change.rise
        if changed and not (always and before >= SLOW):
            sure = chance((change.rise - CHANGED / 2) / math.hypot(error, ALIKE / 2))
            kind = "begun" if to_the_end else "passed"
            chosen = places[inside]
            before_it = np.setdiff1d(places, chosen)
            if not _agree(m, expected, column, chosen, change.rise, before_it):
                return None
            finding = _finding(m, expected, column, chosen, change.rise, sure, kind, before_it)
            return replace(finding, against="history")
    if not always or not _agree(m, expected, column, places, level, None):
        return None
    sure = chance((level - SLOW / 2) / math.hypot(error, alike))
    return _finding(m, expected, column, places, level, sure, "lasting")


def _own(m: Measured, times: Floats, column: int) -> Floats:
    """``[iterations]``: logarithm of all work of a rank's microbatch."""
    with np.errstate(divide="ignore"):
        own: Floats = np.log(np.nansum(np.exp(times[:, column]), axis=(1, 2)))
    return own


def _error(m: Measured, series: Floats, column: int) -> float:
    """The standard error of the median of a series of iterations."""
    if len(series) >= 5:
        return 1.25 * noise(series) / math.sqrt(len(series))
    logs = np.log(m.action_ns[:, column].astype(np.float64))
    within = float(np.nanmean(spread(logs, axis=-1))) if np.isfinite(logs).any() else 0.0
    count = max(1, int(np.isfinite(logs).sum()))
    return 1.8 * within / math.sqrt(count)


def _agree(
    m: Measured,
    expected: _Expected,
    column: int,
    chosen: Ints,
    level: float,
    before: Ints | None,
) -> bool:
    """Whether F, B and W are all slow, as far as they matter."""
    parts = _by_kind(m, expected, column, chosen, before)
    return all(part >= AGREE * level for part in parts.values())


def _by_kind(
    m: Measured,
    expected: _Expected,
    column: int,
    chosen: Ints,
    before: Ints | None = None,
) -> dict[str, float]:
    """The deviation of each kind that takes a tenth of the rank's time or more."""
    share = np.nansum(middle(m.median_ns[:, column], axis=0), axis=0)
    levels = {}
    for kind in np.flatnonzero(share >= 0.1 * share.sum()):
        level = float(middle(expected.deviation[chosen][:, column, :, kind]))
        if before is not None and len(before):
            level -= float(middle(expected.deviation[before][:, column, :, kind]))
        if math.isfinite(level):
            levels["FBW"[kind]] = level
    return levels


def _finding(
    m: Measured,
    expected: _Expected,
    column: int,
    chosen: Ints,
    level: float,
    sure: float,
    kind: str,
    before: Ints | None = None,
) -> Finding:
    place = m.places[column]
    takes = float(np.nansum(middle(m.median_ns[chosen][:, column], axis=0)))
    excess_ns = takes * (1 - math.exp(-level))
    cost_ns = m.cost_ns(column, excess_ns)
    actions = int(np.isfinite(m.action_ns[chosen][:, column]).sum())
    parts = _by_kind(m, expected, column, chosen, before)
    detail = ", ".join(f"{name} {math.exp(part):.2f}x" for name, part in parts.items())
    return Finding(
        cause="slow rank",
        ranks=(place.rank,),
        stages=place.stages,
        hosts=(place.host,),
        period=Period(
            first=int(m.iterations[chosen[0]]), last=int(m.iterations[chosen[-1]]), kind=kind
        ),
        against=expected.against,
        confidence=sure,
        factor=math.exp(level),
        counts={"iterations": len(chosen), "actions": actions},
        detail=f"{detail} of what was expected",
        cost_ms=cost_ns / 1e6,
        cost_fraction=cost_ns / m.step if m.step else 0.0,
    )
