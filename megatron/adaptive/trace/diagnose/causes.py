"""Searches a trace for causes of slow steps, and adds a remedy and a cost to each finding.

Slow ranks: ``baselines`` compares each rank with its peers, the plan and its own past. The most
likely slowdown is reported if it is significant and large enough to matter. Then it is removed
from the data, and the search starts again. Links are compared with links of the same kind, and
the time of reading data with that of other ranks. Single actions are compared with the same action
in other microbatches or iterations.

``stage_costs`` finds the partition of layers that fits the measured speeds. The cost of a finding
is the time that the recorded steps would save without it, in a simulation by ``whatif``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.diagnose.baselines import RankBaselines, Shift, rank_baselines
from megatron.adaptive.trace.diagnose.finding import Diagnosis, Finding
from megatron.adaptive.trace.diagnose.samples import (
    Floats,
    Measured,
    best_interval,
    chance,
    measure,
    middle,
    noise,
    spread,
    thinned,
)
from megatron.adaptive.trace.diagnose.stage_costs import StageCosts, best_partition, stage_costs
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.span_columns import Ints
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, IterationStart
from megatron.adaptive.trace.whatif.operations import (
    FORWARD,
    WEIGHT,
    Graph,
    Operations,
    build_graph,
    pipelines_of,
    read_operations,
)
from megatron.adaptive.trace.whatif.replay import rule_saves_s

WORTH_MOVING = 0.03
"""Minimum reduction of the slowest rank's time, as a fraction, to suggest another partition."""

UNEVEN = 0.10
"""Minimum reduction of the slowest rank's time, as a fraction, to report the stages as uneven."""


def diagnose(run: RunTrace, iterations: Iterable[int] | None = None) -> Diagnosis:
    """Finds causes of slow steps, the affected ranks, and remedies.

    A finding must be statistically significant and large enough to matter; noise is not reported.

    Args:
        run: Run whose trace is diagnosed.
        iterations: Numbers of the iterations to use. ``None`` for all except the first, or for an
            evenly spaced sample of them if the run is long.

    Raises:
        TraceError: A file is damaged, an iteration does not exist, or there is nothing to diagnose.
    """
    measured = measure(run, iterations)
    times = stage_costs(measured)
    slow = find_slow_ranks(measured)
    findings = [
        *slow,
        *find_slow_links(measured),
        *find_slow_reading(measured),
        *find_spikes(measured),
        *find_overloaded_experts(measured),
    ]
    if not any(f.period.kind in ("lasting", "begun") for f in slow) and times is not None:
        findings += _uneven(measured, times)
    advised = [_advise(measured, times, finding) for finding in findings]
    costed = [
        finding
        for finding in _with_costs(run, measured, times, advised)
        if finding.cause != "overloaded experts" or finding.cost_fraction >= OVERLOAD_OF_STEP
    ]
    return Diagnosis(
        findings=tuple(sorted(costed, key=lambda finding: -finding.cost_ms)),
        iterations=tuple(measured.iterations.tolist()),
        num_ranks=len(measured.headers),
        counts={"actions": measured.num_actions, "messages": len(measured.messages)},
        step_ms=measured.step / 1e6,
        notes=tuple(run.notes()),
        pace_ns=_pace_ns(measured),
    )


SLOW = math.log(1.05)
"""Minimum slowdown to report, as a logarithm; smaller ones are usual between equal machines."""

SURE = 3.2
"""Minimum slowdown to report, in standard errors; random noise alone hardly reaches it."""

QUICKER = 0.7
"""Minimum ratio of the evidence for a slow rank to that for a fast rank to report the slow one.

Below this ratio, the fast rank is the exception, and the others only look slow next to it.
"""

AGREE = 0.4
"""Minimum fraction of a rank's slowdown that each kind of action (F, B, W) must show by itself."""

OWN_CHANGE = 0.5
"""Minimum fraction of a temporary slowdown that must show in the rank's own times.

The rest may come from the ranks it is compared with.
"""

MOST_FOUND = 20
"""Maximum number of slow ranks to report."""


def find_slow_ranks(m: Measured) -> list[Finding]:
    """Finds ranks whose actions take longer than expected, the slowest first."""
    baselines = rank_baselines(m)
    with np.errstate(divide="ignore"):
        # Entry [iteration, rank] is the logarithm of the rank's total computing time per
        # microbatch.
        log_work = np.log(np.nansum(m.median_ns.astype(np.float64), axis=(2, 3)))
    judged: set[int] = set()
    findings = []
    for _ in range(min(MOST_FOUND, max(1, len(m.headers) // 2))):
        shifts = [s for s in baselines.scan(SLOW, SURE) if s.column not in judged and s.excess > 0]
        slow = max(shifts, key=lambda shift: shift.excess, default=None)
        quick = _quickest(baselines, judged)
        if quick is not None and (slow is None or slow.excess < QUICKER * quick.excess):
            judged.add(quick.column)
            baselines.distrust(quick.column)
            continue
        if slow is None:
            break
        judged.add(slow.column)
        if _is_real(baselines, slow, log_work[:, slow.column]):
            findings.append(_slow_rank(m, baselines, slow))
        baselines.remove(slow)
        if slow.end - slow.first == len(m.iterations):
            baselines.distrust(slow.column)
    return sorted(findings, key=lambda finding: -(finding.factor or 0))


def _quickest(baselines: RankBaselines, judged: set[int]) -> Shift | None:
    """Returns the rank that is most certainly faster than expected, ``None`` if none is.

    The caller stops comparing other ranks with this one, because they would all look slow.
    """
    sizes, errors = baselines.errors()
    count, ranks = baselines.series.shape
    doubt = SURE**2 + 2 * math.log(max(1.0, ranks / 4))
    quick = [
        Shift(column, 0, count, float(sizes[column]), float(errors[column]), doubt)
        for column in range(ranks)
        if column not in judged and sizes[column] <= -SLOW
    ]
    best = max(quick, key=lambda shift: shift.excess, default=None)
    return best if best is not None and best.excess > 0 else None


def _is_real(baselines: RankBaselines, shift: Shift, log_work: Floats) -> bool:
    """Returns whether a slowdown shows in all kinds of action and in the rank's own times.

    A slowdown that does not is an effect of other ranks, or of noise.
    """
    if any(size < AGREE * shift.size for size in baselines.kinds(shift).values()):
        return False
    inside = log_work[shift.first : shift.end]
    outside = np.delete(log_work, np.s_[shift.first : shift.end])
    if not len(outside):
        return True
    error = 1.25 * noise(log_work) * math.sqrt(1 / len(inside) + 1 / len(outside))
    return float(np.median(inside) - np.median(outside)) >= OWN_CHANGE * shift.size - 2 * error


def _slow_rank(m: Measured, baselines: RankBaselines, shift: Shift) -> Finding:
    column = shift.column
    chosen = slice(shift.first, shift.end)
    kinds = baselines.kinds(shift)
    detail = ", ".join(f"{name} {math.exp(size):.2f}x" for name, size in kinds.items())
    lasting = shift.end - shift.first == len(m.iterations)
    peers = any(column in group and len(group) > 1 for group in m.peers.values())
    return m.finding(
        "slow rank",
        [column],
        m.iterations[chosen],
        against=("peers" if peers else "plan") if lasting else "history",
        confidence=chance((shift.size - SLOW / 2) / shift.error),
        factor=math.exp(shift.size),
        counts={"actions": int(np.isfinite(m.action_ns[chosen, column]).sum())},
        detail=f"{detail} the expected time",
    )


LINK_FEWEST = 6
"""Minimum number of messages needed to judge a link."""

LINK_TIMES = 2.0
"""Minimum ratio of a slow link's message time to that of other links.

A link is only reported if the limits below hold as well.
"""

LINK_OF_AN_ACTION = 0.05
"""Minimum delay of a slow link's messages, as a fraction of the median duration of an action."""

LINK_ERRORS = 5.0
"""Minimum delay of a slow link's messages, in standard deviations of their usual time."""

LINK_ALONE = 0.25
"""Like ``LINK_OF_AN_ACTION``, for a link with fewer than two others to compare it with."""

LINK_STEADY = 0.4
"""Minimum fraction of a slow link's delay that even its fastest messages must show."""

LINK_CHANGE_SURE = 7.0
"""Minimum size, in standard errors, of a link's change during the run to report it."""


@dataclass(frozen=True, eq=False)
class _Link:
    """Holds the messages from one rank to another.

    Attributes:
        ends: Columns of the sender and of the receiver in the arrays of ``Measured``.
        crosses: Whether the two ranks are on different machines.
        travel_ns: ``[messages]``, time from the start of the send to the arrival, in ns.
        iteration: ``[messages]``, number of each message's iteration.
    """

    ends: tuple[int, int]
    crosses: bool
    travel_ns: Floats
    iteration: Ints

    def levels_ns(self, chosen: Ints | None = None) -> tuple[float, float]:
        """Returns the median and the lower decile of the messages' travel times in ns.

        Args:
            chosen: Numbers of the iterations to use; ``None`` for all.
        """
        travel_ns = self.travel_ns
        if chosen is not None:
            travel_ns = travel_ns[np.isin(self.iteration, chosen)]
        return float(np.median(travel_ns)), float(np.quantile(travel_ns, 0.1))


def find_slow_links(m: Measured) -> list[Finding]:
    """Finds slow links, the slowest first; at most one direction for each pair of ranks."""
    links = _links(m)
    ends = np.array([link.ends for link in links]).reshape(-1, 2)
    crosses = np.array([link.crosses for link in links], dtype=np.bool_)
    levels = np.array([link.levels_ns() for link in links]).reshape(-1, 2)
    action = float(middle(m.median_ns))
    findings: dict[frozenset[int], Finding] = {}
    for link in links:
        same_pair = np.isin(ends, link.ends).all(axis=1)
        finding = _judge(m, link, levels[~same_pair & (crosses == link.crosses)], action)
        if finding is None:
            continue
        best = findings.get(frozenset(link.ends))
        if best is None or (finding.delay_ms or 0) > (best.delay_ms or 0):
            findings[frozenset(link.ends)] = finding
    return sorted(findings.values(), key=lambda finding: -(finding.delay_ms or 0))


def _links(m: Measured) -> list[_Link]:
    messages = m.messages
    if not len(messages):
        return []  # traces in the older text format have no messages
    pairs, owner = np.unique(
        np.stack([messages.source, messages.target]), axis=1, return_inverse=True
    )
    order = np.argsort(owner.reshape(-1), kind="stable")
    starts = np.searchsorted(owner.reshape(-1)[order], np.arange(1, pairs.shape[1]))
    links = []
    for pair, rows in zip(pairs.T.tolist(), np.split(order, starts), strict=True):
        exact = rows[messages.seen[rows]]
        rows = exact if len(exact) >= max(LINK_FEWEST, len(rows) // 4) else rows
        if len(rows) < LINK_FEWEST:
            continue
        source, target = (m.column[rank] for rank in pair)
        travel_ns = (messages.arrived_ns[rows] - messages.sent_ns[rows]).astype(np.float64)
        crosses = m.headers[source].host != m.headers[target].host
        links.append(_Link((source, target), crosses, travel_ns, messages.iteration[rows]))
    return links


def _judge(m: Measured, link: _Link, others: Floats, action: float) -> Finding | None:
    """Returns a finding if a link is slow, all the time or in some iterations; else ``None``.

    Args:
        m: Measured times of the run.
        link: Messages from one rank to another.
        others: ``[links, 2]``, median and lower decile of the travel time in ns on each other link
            of the same kind (within a machine, or between machines).
        action: Median duration of an action in ns.
    """
    alone = len(others) < 2
    usual, usually_fast = np.median(others, axis=0).tolist() if len(others) else (0.0, 0.0)
    # The error is the larger of two: the spread between links, and the standard error of this
    # link's median.
    differ = float(spread(others[:, 0])) if len(others) else 0.0
    error = max(differ, 1.25 * spread(link.travel_ns) / math.sqrt(len(link.travel_ns)), 1_000.0)
    least = max((LINK_ALONE if alone else LINK_OF_AN_ACTION) * action, LINK_ERRORS * error)
    least = max(least, (LINK_TIMES - 1) * usual)
    if link.crosses:
        least = max(least, 3 * m.clock_error_ns)
    iterations = np.unique(link.iteration)
    series = np.array([link.levels_ns(iterations[[i]])[0] for i in range(len(iterations))])
    floor = max(0.02 * action, noise(series))
    change = best_interval(series, floor, rise=least, score=LINK_CHANGE_SURE)
    if change is not None and np.median(np.delete(series, change.inside)) - usual < least:
        chosen = iterations[change.inside]
        return _slow_link(m, link, chosen, change.rise, change.rise / error, "history")
    median_ns, fast_ns = link.levels_ns()
    excess = median_ns - usual
    if excess < least or fast_ns - usually_fast < LINK_STEADY * excess:
        return None
    against = "history" if alone else "others"
    sure = excess / (error + least / 4)
    return _slow_link(m, link, m.iterations, excess, sure, against)


def _slow_link(
    m: Measured, link: _Link, chosen: Ints, excess: float, sure: float, against: str
) -> Finding:
    median_us, fast_us = (level / 1e3 for level in link.levels_ns(chosen))
    return m.finding(
        "slow link",
        link.ends,
        chosen,
        against=against,
        confidence=chance(sure),
        delay_ms=excess / 1e6,
        counts={"messages": int(np.isin(link.iteration, chosen).sum())},
        detail=f"median {median_us:.4g} us, fastest tenth below {fast_us:.4g} us, "
        f"other links {median_us - excess / 1e3:.4g} us",
    )


READING_OF_STEP = 0.03
"""Minimum fraction of a step that the reading of data must take to be reported."""

READING_TIMES = 1.5
"""Minimum ratio of a slow read's time to that of other ranks or other iterations."""

READING_CHANGE_SURE = 6.0
"""Minimum size, in standard errors, of a change of the read time during the run to report it."""


def find_slow_reading(m: Measured) -> list[Finding]:
    """Finds ranks that lose time by reading training data, the worst first."""
    each = np.where(m.reads > 0, m.read_ns / np.maximum(1, m.reads), np.nan)
    shares = m.read_ns / np.maximum(1, m.step_ns)[:, None]
    levels = middle(each, axis=0)
    findings = []
    for column in np.flatnonzero(np.isfinite(levels)).tolist():
        chosen = np.flatnonzero(each[:, column] > 0)
        if not len(chosen):
            continue
        others = np.delete(levels, column)
        others = others[np.isfinite(others)]
        # The fastest rank is the reference, because a shared disk may slow down most ranks.
        before = float(min(others, default=0.0))
        against = "others" if len(others) else "plan"
        series = each[chosen, column]
        change = best_interval(
            np.log(series), 0.05, rise=math.log(READING_TIMES), score=READING_CHANGE_SURE
        )
        if change is not None:
            before = float(np.median(np.delete(series, change.inside)))
            against = "history"
            chosen, series = chosen[change.inside], series[change.inside]
        level, share = float(np.median(series)), float(np.median(shares[chosen, column]))
        if share < READING_OF_STEP or level < READING_TIMES * before:
            # Twice the minimum fraction of the step is reported even if all ranks read equally
            # slowly. Then the whole read time counts as delay.
            if share < 2 * READING_OF_STEP:
                continue
            before = 0.0
        excess = level - before
        error = 1.25 * noise(series) / math.sqrt(len(series)) + 0.1 * level
        finding = m.finding(
            "slow data",
            [column],
            m.iterations[chosen],
            against=against,
            confidence=chance(excess / error),
            delay_ms=excess / 1e6,
            counts={"reads": int(m.reads[chosen, column].sum())},
            detail=f"a read takes {level / 1e6:.3g} ms, all reads {share:.1%} of the step",
        )
        findings.append(finding)
    return sorted(findings, key=lambda finding: -(finding.delay_ms or 0))


SPIKE_LEAST = math.log(1.4)
"""Minimum ratio of a spike's duration to the action's usual duration, as a logarithm."""

SPIKE_SPREADS = 5.0
"""Minimum distance of a spike from the action's usual duration, in standard deviations."""

SPIKE_FEWEST = 4
"""Minimum number of spikes to report; fewer may be chance."""

SPIKE_MOST = 0.25
"""Maximum fraction of a rank's actions that may be spikes; beyond that, they are not exceptions."""

SPIKE_BACKGROUND = 1e-3
"""Assumed rate of spikes per action on any rank; a prior that weighs as much as one spike."""

SPIKE_RARE = 3e-4
"""Maximum probability that chance alone causes that many spikes, for the rank to be reported."""

SPIKE_OF_STEP = 0.003
"""Minimum fraction of a step that spikes must cost to be reported."""

FEW_MICROBATCHES = 4
"""Number of microbatches per step below which actions are compared across all iterations."""

OF_PARTIAL = 3
"""Minimum number of ranks in a pipeline to distinguish long microbatches from spikes on a rank."""


def find_spikes(m: Measured) -> list[Finding]:
    """Finds ranks on which single actions take far too long more often than on other ranks."""
    odd = _oddness(m)
    of_rank = np.moveaxis(odd, 1, 0).reshape(len(m.headers), -1)
    widths = spread(of_rank, axis=1)
    if not np.isfinite(widths).any():
        return []
    # A rank whose times vary a lot in general gets a higher limit.
    limits = np.maximum(SPIKE_LEAST, SPIKE_SPREADS * np.fmax(widths, np.nanmedian(widths)))
    totals = np.isfinite(of_rank).sum(axis=1).tolist()
    counts = (of_rank > limits[:, None]).sum(axis=1).tolist()
    findings = []
    for column, (count, total) in enumerate(zip(counts, totals, strict=True)):
        if count < SPIKE_FEWEST or count > SPIKE_MOST * total:
            continue
        others = sorted(
            (counts[other], totals[other]) for other in range(len(counts)) if other != column
        )
        # The other rank with the most spikes may be faulty as well, so it is left out.
        others = others[:-1] if len(others) > 2 else others
        seen = 1 + sum(spikes for spikes, _ in others)
        part = total / (1 / SPIKE_BACKGROUND + sum(actions for _, actions in others))
        rare = _tail(count, seen, part) < SPIKE_RARE / len(counts)
        finding = _spikes(m, odd[:, column], column, limits[column], seen * part) if rare else None
        if finding is not None:
            findings.append(finding)
    return findings


def _oddness(m: Measured) -> Floats:
    """Returns the logarithm of each action's duration divided by its usual duration.

    In a pipeline of enough ranks, the part by which a microbatch takes longer on all ranks is
    subtracted: the microbatch is then larger, and no rank is to blame.

    Returns:
        ``[iterations, ranks, chunks, 3, microbatches]``.
    """
    usual = m.median_ns[..., None]
    if m.action_ns.shape[-1] < FEW_MICROBATCHES:
        usual = middle(m.median_ns, axis=0)[None, ..., None]
    log_ratio: Floats = np.log(m.action_ns.astype(np.float64) / usual)
    for pipeline in m.replicas.values():
        if len(pipeline) >= OF_PARTIAL:
            common = middle(log_ratio[:, pipeline], axis=(1, 2))
            log_ratio[:, pipeline] -= np.where(np.isfinite(common), common, 0.0)[:, None, None]
    return log_ratio


def _spikes(m: Measured, odd: Floats, column: int, limit: float, expected: float) -> Finding | None:
    hit = np.isfinite(odd) & (odd > limit)
    extra = m.action_ns[:, column][hit].astype(np.float64) * (1 - np.exp(-odd[hit]))
    count = int(hit.sum())
    if float(extra.sum()) < SPIKE_OF_STEP * m.step * len(m.iterations):
        return None
    return m.finding(
        "spikes",
        [column],
        m.iterations[np.unique(np.nonzero(hit)[0])],
        against="others",
        confidence=chance((count - expected) / math.sqrt(count + expected + 1)),
        delay_ms=float(np.median(extra)) / 1e6,
        counts={"spikes": count},
        detail=f"{count / int(np.isfinite(odd).sum()):.1%} of its actions, "
        f"which take {float(np.exp(np.median(odd[hit]))):.2f} times the usual time",
    )


def _tail(count: int, seen: float, part: float) -> float:
    """Returns the probability that chance alone causes at least ``count`` spikes on a rank.

    The distribution is negative binomial, because the rate is estimated from the other ranks.

    Args:
        count: Number of spikes on the rank.
        seen: Number of spikes on the ranks it is compared with, plus one from the prior.
        part: Number of actions on the rank divided by that on the others, prior included.
    """
    below = 0.0
    log_probability = -seen * math.log1p(part)
    for number in range(count):
        below += math.exp(log_probability)
        log_probability += math.log((seen + number) / (number + 1) * part / (1 + part))
    return max(0.0, 1 - below)


OVERLOADED = 1.1
"""Minimum ratio, to be reported, of the tokens a rank's experts get to the mean over ranks."""

OVERLOAD_OF_STEP = 0.01
"""Minimum fraction of a step that the overload must cost to be reported."""

OVERLOAD_ERRORS = 3.0
"""Minimum excess, in standard errors, of the other ranks' waiting time over the rank's own."""


def find_overloaded_experts(m: Measured) -> list[Finding]:
    """Finds ranks whose experts get so many tokens that the other ranks wait for them.

    Ranks are compared if the experts of the same layers are divided among them. The rank with the
    most tokens is the last to reach the exchange (all-to-all) after the experts, and the others
    wait there. The cost is the others' waiting time minus the rank's own, but no more than its
    additional tokens can explain.
    """
    layouts = [next((_layout(marker) for marker in markers.values()), ()) for markers in m.experts]
    layers = [tuple(layer for layer, *_ in layout) for layout in layouts]
    findings = []
    for shared in sorted(set(filter(None, layers))):
        group = [column for column, of_rank in enumerate(layers) if of_rank == shared]
        chosen = [
            i
            for i in m.iterations.tolist()
            if all(i in m.experts[c] and _layout(m.experts[c][i]) == layouts[c] for c in group)
        ]
        if not chosen or len({layouts[column] for column in group}) < 2:
            continue  # every rank has all experts of these layers, so none waits for another
        loads = [[m.experts[column][i] for column in group] for i in chosen]
        tokens = np.array(
            [[sum(sum(row[2:]) for row in load.tokens) for load in of_ranks] for of_ranks in loads]
        )
        waited_ns = np.array(
            [[load.exchange_ns for load in of_ranks] for of_ranks in loads], dtype=np.float64
        )
        shares = tokens.sum(axis=0) / max(1.0, float(tokens.sum(axis=0).mean()))
        most = int(np.argmax(shares))
        share = float(shares[most])
        column = group[most]
        behind = np.delete(waited_ns, most, axis=1).mean(axis=1) - waited_ns[:, most]
        excess = float(np.median(behind))
        error = 1.25 * noise(behind) / math.sqrt(len(behind)) + 1.0
        # The additional tokens cannot cost more than their fraction of the rank's computing time.
        explained = m.num_microbatches * float(m.microbatch_ns[column]) * (1 - 1 / share)
        excess = min(excess, explained)
        least = max(OVERLOAD_ERRORS * error, OVERLOAD_OF_STEP * m.step)
        if share < OVERLOADED or excess < least:
            continue
        finding = m.finding(
            "overloaded experts",
            [column],
            np.array(chosen),
            against="others",
            confidence=chance(excess / error),
            factor=share,
            delay_ms=excess / 1e6 / max(1, m.num_microbatches),
            counts={"tokens": int(tokens[:, most].sum())},
        )
        findings.append(finding)
    return findings


def _layout(marker: IterationStart) -> tuple[tuple[int, ...], ...]:
    """Returns (layer number, first expert, number of experts) for each MoE layer on a rank."""
    return tuple((layer, first, len(counts)) for layer, first, *counts in marker.tokens)


def _pace_ns(m: Measured) -> tuple[float, ...]:
    """Returns each rank's time for a microbatch in ns, divided by its planned work in layers.

    Empty if the planned work of a rank is unknown.
    """
    planned = m.work or m.layers
    works = [sum(planned[stage] for stage in stages) if planned else 0 for stages in m.stages]
    if not all(work > 0 for work in works):
        return ()
    return tuple(float(time) / work for time, work in zip(m.microbatch_ns, works, strict=True))


def _uneven(m: Measured, times: StageCosts) -> list[Finding]:
    """Returns a finding if another partition of layers would make the slowest rank much faster."""
    better = best_partition(times, sum(m.layers))
    ranks = times.rank_ns(m.layers)
    best = times.rank_ns(better).max()
    if ranks.max() <= 0 or 1 - best / ranks.max() < UNEVEN:
        return []
    worst = int(np.argmax(ranks))
    columns = [column for column, header in enumerate(m.headers) if header.pp_rank == worst]
    finding = m.finding(
        "uneven stages",
        columns,
        m.iterations,
        against="others",
        confidence=0.95,
        factor=float(ranks[worst] / np.median(np.delete(ranks, worst))) if len(ranks) > 1 else 1.0,
        counts={"actions": m.num_actions},
        detail=f"layers {format_partition(m.layers)}",
    )
    return [finding]


SIMULATED = 32
"""Maximum number of iterations to simulate for the cost of a finding."""

SIMULATED_SPANS = 300_000
"""Maximum total number of spans in the simulated iterations."""


def _with_costs(
    run: RunTrace, m: Measured, times: StageCosts | None, findings: Sequence[Finding]
) -> list[Finding]:
    """Simulates the last affected iterations without each finding, and adds the time saved as cost.

    If the trace cannot be simulated, no cost is added. A finding of uneven stages is dropped if
    the better partition saves nothing in the simulation.
    """

    @cache
    def recorded(iterations: tuple[int, ...]) -> tuple[Operations, Graph]:
        operations = read_operations(run, pipelines_of(run), iterations)
        return operations, build_graph(operations)

    costed = []
    for finding in findings:
        period, iterations = finding.period, m.iterations
        is_inside = (iterations >= period.first) & (iterations <= period.last)
        chosen = iterations[is_inside][-SIMULATED:]
        spans = run.num_spans(chosen.tolist())
        try:
            ops, graph = recorded(tuple(thinned(chosen, spans, SIMULATED_SPANS).tolist()))
            without = _without(m, times, finding, ops)
        except TraceError:
            costed.append(finding)
            continue
        before_s, after_s = graph.simulate([ops.duration_s, without]).mean(axis=0).tolist()
        saved_s = rule_saves_s(m.headers[0], ops, without, np.unique(ops.iteration).tolist())
        # Few steps have spikes, so for spikes the mean over all simulated steps is used.
        if saved_s is None or finding.cause == "spikes":
            saved_s = before_s - after_s
        if saved_s <= 0 and finding.cause == "uneven stages":
            continue
        share = max(0.0, saved_s / before_s) if before_s else 0.0
        costed.append(replace(finding, cost_fraction=share, cost_ms=share * m.step / 1e6))
    return costed


def _without(
    m: Measured, times: StageCosts | None, finding: Finding, ops: Operations
) -> npt.NDArray[np.float64]:
    """Returns the duration in seconds of each operation, as if the finding's cause were absent."""
    where = ops.where
    duration_s: npt.NDArray[np.float64] = ops.duration_s.copy()
    simulated = [m.headers[m.column[rank]] for rank in where.ranks.tolist()]
    # The simulation has one worker per tensor-parallel group (its first rank). A finding on
    # another rank of the group is applied to that worker.
    worker_of = {(header.pp_rank, header.dp_rank): n for n, header in enumerate(simulated)}
    headers = [m.headers[m.column[rank]] for rank in finding.ranks]
    workers = [worker_of.get((header.pp_rank, header.dp_rank), -1) for header in headers]
    delay_s = (finding.delay_ms or 0.0) / 1e3
    computes = ops.kind <= WEIGHT
    affected = computes & np.isin(ops.worker, workers)
    if finding.cause == "slow rank":
        duration_s[affected] /= finding.factor or 1.0
    elif finding.cause == "slow link":
        link = (ops.source == workers[0]) & (ops.worker == workers[1])
        duration_s[link] = np.maximum(duration_s[link] - delay_s, 0)
    elif finding.cause == "slow data":
        reads = affected & (ops.kind == FORWARD) & np.isin(ops.stage, (0, where.num_stages - 1))
        duration_s[reads] = np.maximum(duration_s[reads] - delay_s, 0)
    elif finding.cause == "spikes":
        for chunk in range(m.num_chunks):
            for kind in range(len(DRAWN_ACTIONS)):
                rows = np.flatnonzero(affected & (ops.chunk == chunk) & (ops.kind == kind))
                usual = float(np.median(duration_s[rows])) if len(rows) else 0.0
                duration_s[rows[duration_s[rows] > math.exp(SPIKE_LEAST) * usual]] = usual
    elif finding.cause == "overloaded experts":
        # All ranks of the same pipeline position wait for the overloaded one, so all get faster.
        column = m.column[finding.ranks[0]]
        stage = [n for n, header in enumerate(simulated) if header.pp_rank == headers[0].pp_rank]
        duration_s[computes & np.isin(ops.worker, stage)] *= max(
            0.0, 1 - delay_s * 1e9 / max(1.0, float(m.microbatch_ns[column]))
        )
    elif times is not None and finding.partition:
        now = times.stage_ns(m.layers)
        then = times.stage_ns(finding.partition)
        duration_s[computes] *= (then / np.maximum(now, 1))[ops.stage[computes]]
    return duration_s


def _advise(m: Measured, times: StageCosts | None, finding: Finding) -> Finding:
    """Returns the finding with remedies, the best first, and with a better partition if any."""
    advice: list[str] = []
    partition: tuple[int, ...] = ()
    hosts = " and ".join(sorted(set(finding.hosts)))
    if finding.cause in ("slow rank", "uneven stages"):
        if times is not None and finding.period.kind != "passed":
            better = best_partition(times, sum(m.layers))
            gain = 1 - times.rank_ns(better).max() / max(1.0, times.rank_ns(m.layers).max())
            if gain >= WORTH_MOVING:
                partition = better
                advice.append(
                    f"move layers, --partition {format_partition(better)} instead of "
                    f"{format_partition(m.layers)}: the slowest rank takes {gain:.0%} less time"
                )
        elif times is None:
            advice.append(f"give stage {finding.stages[0]} fewer layers (--partition)")
        if finding.cause == "slow rank":
            if len({header.dp_rank for header in m.headers}) > 1:
                advice.append("give its replica fewer microbatches, --balance-replicas speed")
            advice.append(f"look for other programs and throttling on {hosts}, or leave it out")
    elif finding.cause == "slow link":
        source, target = finding.ranks
        advice += [
            f"check the network of {hosts}, or leave one of them out",
            "choose an order with more microbatches in flight (--pipeline-schedule adaptive "
            f"or hinted, a larger --activation-cap): it hides the {finding.delay_ms:.3g} ms from "
            f"rank {source} to rank {target}",
        ]
    elif finding.cause == "slow data":
        advice += ["read ahead with more processes (--num-workers) or from a faster disk"]
    elif finding.cause == "overloaded experts":
        advice += [
            "balance the router: a larger --moe-aux-loss-coeff, or --moe-router-enable-expert-bias "
            "with --moe-router-score-function sigmoid",
            "limit the tokens of an expert, --moe-expert-capacity-factor 1.25; it drops the others",
        ]
    else:
        advice += [
            "choose the order at run time (--pipeline-schedule adaptive), which fills such gaps",
            f"look for other programs on {hosts}",
        ]
    return replace(finding, advice=tuple(advice), partition=partition)
