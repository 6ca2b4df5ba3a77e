"""The whole diagnosis of a run: every test, and what to do about what they find.

``baselines`` weighs the evidence on each rank: peers, plan and past. The likeliest shift is taken
for a fault, if it is beyond chance and large enough to matter, then the next one without it. Links
are compared with links of the same kind, readers with other readers, and single actions with the
same action of other iterations. The partition that fits the measured speeds is worked out here too.
What a finding costs is what the recorded steps lose in a simulation without it, see ``whatif``.
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
"""Least gain of pace for which another partition is named."""

UNEVEN = 0.10
"""Least gain of pace for which the stages are called uneven."""


def diagnose(run: RunTrace, iterations: Iterable[int] | None = None) -> Diagnosis:
    """Say what slows a run, who causes it, and what to do.

    Noise is not a cause: a finding must be significant and large enough to matter.

    Args:
        run: the run.
        iterations: only these; ``None`` for all but the first, or, of a long run, some of them
            evenly spread.

    Raises:
        TraceError: a file is damaged, an iteration does not exist, or nothing is there to look at.
    """
    measured = measure(run, iterations)
    times = stage_costs(measured)
    slow = find_slow_ranks(measured)
    found = [*slow, *find_slow_links(measured), *find_slow_reading(measured)]
    found += [*find_spikes(measured), *find_overloaded_experts(measured)]
    if not any(f.period.kind in ("lasting", "begun") for f in slow) and times is not None:
        found += _uneven(measured, times)
    advised = [_advise(measured, times, finding) for finding in found]
    costed = [
        finding
        for finding in _with_costs(run, measured, times, advised)
        if finding.cause != "overloaded experts" or finding.cost_fraction >= OVERLOAD_OF_STEP
    ]
    return Diagnosis(
        findings=tuple(sorted(costed, key=lambda finding: -finding.cost_ms)),
        iterations=tuple(measured.iterations.tolist()),
        num_ranks=len(measured.places),
        counts={"actions": measured.num_actions, "messages": len(measured.messages)},
        step_ms=measured.step / 1e6,
        notes=tuple(run.notes()),
        pace_ns=_pace_ns(measured),
    )


SLOW = math.log(1.05)
"""Machines differ by so much; less is no finding."""

SURE = 3.2
"""Standard errors that chance does not reach, see ``RankBaselines.scan``."""

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
    baselines = rank_baselines(m)
    with np.errstate(divide="ignore"):
        own = np.log(np.nansum(m.median_ns.astype(np.float64), axis=(2, 3)))  # all work of a rank
    judged: set[int] = set()
    found = []
    for _ in range(min(MOST_FOUND, max(1, len(m.places) // 2))):
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
        if _is_real(baselines, slow, own[:, slow.column]):
            found.append(_slow_rank(m, baselines, slow))
        baselines.remove(slow)
        if slow.end - slow.first == len(m.iterations):
            baselines.distrust(slow.column)
    return sorted(found, key=lambda finding: -(finding.factor or 0))


def _quickest(baselines: RankBaselines, judged: set[int]) -> Shift | None:
    """Returns the rank that is quicker than it should be beyond doubt: no measure for others."""
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


def _is_real(baselines: RankBaselines, shift: Shift, own: Floats) -> bool:
    """Whether F, B and W are all slow, and whether it is the rank that changed."""
    if any(size < AGREE * shift.size for size in baselines.kinds(shift).values()):
        return False
    inside, outside = own[shift.first : shift.end], np.delete(own, np.s_[shift.first : shift.end])
    if not len(outside):
        return True
    error = 1.25 * noise(own) * math.sqrt(1 / len(inside) + 1 / len(outside))
    return float(np.median(inside) - np.median(outside)) >= OWN * shift.size - 2 * error


def _slow_rank(m: Measured, baselines: RankBaselines, shift: Shift) -> Finding:
    column, chosen = shift.column, slice(shift.first, shift.end)
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
        detail=f"{detail} of what was expected",
    )


LINK_FEWEST = 6
"""A link with fewer messages is not judged."""

LINK_TIMES = 2.0
"""A slow link takes so many times as long as others, and on top of that:"""

LINK_OF_AN_ACTION = 0.05
"""so much of the median action,"""

LINK_ERRORS = 5.0
"""so many spreads of the others' medians, and more than the clocks may be wrong."""

LINK_ALONE = 0.25
"""A link that no other is like is slow from so much of the median action on."""

LINK_STEADY = 0.4
"""Its fastest messages show so much of the delay too."""

LINK_CHANGE_SURE = 7.0


@dataclass(frozen=True, eq=False)
class _Link:
    """The messages from one rank to another.

    Attributes:
        ends: columns of the sender and the receiver.
        crosses: whether it leaves the machine.
        travel_ns: ``[messages]``.
        iteration: ``[messages]``.
    """

    ends: tuple[int, int]
    crosses: bool
    travel_ns: Floats
    iteration: Ints

    def levels_ns(self, chosen: Ints | None = None) -> tuple[float, float]:
        """The median travel, and the one that a tenth is faster than; in some iterations only."""
        travel_ns = self.travel_ns
        if chosen is not None:
            travel_ns = travel_ns[np.isin(self.iteration, chosen)]
        return float(np.median(travel_ns)), float(np.quantile(travel_ns, 0.1))


def find_slow_links(m: Measured) -> list[Finding]:
    """Find slow links, the slowest first; of a pair that is slow both ways the slower way."""
    links = _links(m)
    ends = np.array([link.ends for link in links]).reshape(-1, 2)
    crosses = np.array([link.crosses for link in links], dtype=np.bool_)
    levels = np.array([link.levels_ns() for link in links]).reshape(-1, 2)
    action = float(middle(m.median_ns))
    found: dict[frozenset[int], Finding] = {}
    for link in links:
        same_pair = np.isin(ends, link.ends).all(axis=1)
        finding = _judge(m, link, levels[~same_pair & (crosses == link.crosses)], action)
        if finding is None:
            continue
        best = found.get(frozenset(link.ends))
        if best is None or (finding.delay_ms or 0) > (best.delay_ms or 0):
            found[frozenset(link.ends)] = finding
    return sorted(found.values(), key=lambda finding: -(finding.delay_ms or 0))


def _links(m: Measured) -> list[_Link]:
    messages = m.messages
    if not len(messages):
        return []  # the text form does not have them
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
        crosses = m.places[source].host != m.places[target].host
        links.append(_Link((source, target), crosses, travel_ns, messages.iteration[rows]))
    return links


def _judge(m: Measured, link: _Link, others: Floats, action: float) -> Finding | None:
    """Say whether a link is slow, all the time or for some of it.

    ``others`` are the levels of the links like it, ``[links, 2]`` ns; ``action`` is the median one.
    """
    alone = len(others) < 2
    usual, usually_fast = np.median(others, axis=0).tolist() if len(others) else (0.0, 0.0)
    # The others' medians, and how much the link's own messages differ from one another.
    differ = float(spread(others[:, 0])) if len(others) else 0.0
    error = max(differ, 1.25 * spread(link.travel_ns) / math.sqrt(len(link.travel_ns)), 1_000.0)
    least = max((LINK_ALONE if alone else LINK_OF_AN_ACTION) * action, LINK_ERRORS * error)
    least = max(least, (LINK_TIMES - 1) * usual)
    if link.crosses:
        least = max(least, 3 * m.clock_error_ns)
    known = np.unique(link.iteration)
    series = np.array([link.levels_ns(known[[place]])[0] for place in range(len(known))])
    floor = max(0.02 * action, noise(series))
    change = best_interval(series, floor, rise=least, score=LINK_CHANGE_SURE)
    if change is not None and np.median(np.delete(series, change.inside)) - usual < least:
        chosen, sure = known[change.inside], change.rise / error
        return _slow_link(m, link, chosen, change.rise, sure, "history")
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
        detail=f"median {median_us:.4g} us, a tenth below {fast_us:.4g} us, "
        f"other links {median_us - excess / 1e3:.4g} us",
    )


READING_OF_STEP = 0.03
"""Reading that takes less of a step than this starves nobody."""

READING_TIMES = 1.5
"""Slow reading takes so many times as long as that of others, or as before."""

READING_CHANGE_SURE = 6.0


def find_slow_reading(m: Measured) -> list[Finding]:
    """Find ranks that lose time to the reading of data, the worst first."""
    each = np.where(m.reads > 0, m.read_ns / np.maximum(1, m.reads), np.nan)
    shares = m.read_ns / np.maximum(1, m.step_ns)[:, None]
    levels = middle(each, axis=0)
    found = []
    for column in np.flatnonzero(np.isfinite(levels)).tolist():
        chosen = np.flatnonzero(each[:, column] > 0)
        if not len(chosen):
            continue
        others = np.delete(levels, column)
        others = others[np.isfinite(others)]
        # Where all are slow, none of them is a measure for the others.
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
            # Starved all the same, if this much of the step goes into it on every reader.
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
            detail=f"a read takes {level / 1e6:.3g} ms, all of them {share:.1%} of the step",
        )
        found.append(finding)
    return sorted(found, key=lambda finding: -(finding.delay_ms or 0))


SPIKE_LEAST = math.log(1.4)
"""A spike takes at least so many times as long as usual."""

SPIKE_SPREADS = 5.0
"""And is so many standard deviations away."""

SPIKE_FEWEST = 4
"""Fewer spikes are chance."""

SPIKE_MOST = 0.25
"""More than this part of all actions are no spikes."""

SPIKE_BACKGROUND = 1e-3
"""Part of all actions that is always somewhat odd: believed as if one such had been seen."""

SPIKE_RARE = 3e-4
"""Probability below which a rank's number of spikes, of those that all have, is no chance."""

SPIKE_OF_STEP = 0.003
"""Spikes that cost less of a step than this are not reported."""

FEW_MICROBATCHES = 4
OF_PARTIAL = 3


def find_spikes(m: Measured) -> list[Finding]:
    """Find ranks with spikes that others do not have."""
    odd = _oddness(m)
    of_rank = np.moveaxis(odd, 1, 0).reshape(len(m.places), -1)
    widths = spread(of_rank, axis=1)
    if not np.isfinite(widths).any():
        return []
    # One that is noisy all the time has no spikes.
    limits = np.maximum(SPIKE_LEAST, SPIKE_SPREADS * np.fmax(widths, np.nanmedian(widths)))
    totals = np.isfinite(of_rank).sum(axis=1).tolist()
    counts = (of_rank > limits[:, None]).sum(axis=1).tolist()
    found = []
    for column, (count, total) in enumerate(zip(counts, totals, strict=True)):
        if count < SPIKE_FEWEST or count > SPIKE_MOST * total:
            continue
        others = sorted(
            (counts[other], totals[other]) for other in range(len(counts)) if other != column
        )
        # Another rank may have spikes of its own, and says then nothing about what all have.
        others = others[:-1] if len(others) > 2 else others
        seen = 1 + sum(number for number, _ in others)
        part = total / (1 / SPIKE_BACKGROUND + sum(all_of_it for _, all_of_it in others))
        rare = _tail(count, seen, part) < SPIKE_RARE / len(counts)
        finding = _spikes(m, odd[:, column], column, limits[column], seen * part) if rare else None
        if finding is not None:
            found.append(finding)
    return found


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
        f"{float(np.exp(np.median(odd[hit]))):.2f} times as long as usual",
    )


def _tail(count: int, seen: float, part: float) -> float:
    """Returns the probability of ``count`` or more (negative binomial: an uncertain rate).

    Args:
        count: spikes of a rank.
        seen: those of other ranks.
        part: the rank's actions by those of the others.
    """
    below, likely = 0.0, -seen * math.log1p(part)  # the latter of a number, logarithm
    for number in range(count):
        below += math.exp(likely)
        likely += math.log((seen + number) / (number + 1) * part / (1 + part))
    return max(0.0, 1 - below)


OVERLOADED = 1.1
"""Experts of a rank have at least so many times the mean of tokens to be called overloaded."""

OVERLOAD_OF_STEP = 0.01
"""A load that costs less of a step than this is not reported."""

OVERLOAD_ERRORS = 3.0
"""Others wait longer than the rank by so many standard errors."""


def find_overloaded_experts(m: Measured) -> list[Finding]:
    """Find, among ranks that share the experts of the same layers, those that others wait for.

    A rank with more tokens than the others comes last to the exchange behind its experts, where
    the others stand. What they stand there longer than it, as far as its tokens explain it, is
    what the load costs.
    """
    layouts = [next((_layout(marker) for marker in known.values()), ()) for known in m.experts]
    layers = [tuple(layer for layer, *_ in layout) for layout in layouts]
    found = []
    for shared in sorted(set(filter(None, layers))):
        group = [column for column, own in enumerate(layers) if own == shared]
        chosen = [
            i
            for i in m.iterations.tolist()
            if all(i in m.experts[c] and _layout(m.experts[c][i]) == layouts[c] for c in group)
        ]
        if not chosen or len({layouts[column] for column in group}) < 2:
            continue  # each has all experts
        markers = [[m.experts[column][i] for column in group] for i in chosen]
        tokens = np.array(
            [[sum(sum(row[2:]) for row in one.tokens) for one in own] for own in markers]
        )
        stood_ns = np.array([[one.exchange_ns for one in row] for row in markers], dtype=np.float64)
        shares = tokens.sum(axis=0) / max(1.0, float(tokens.sum(axis=0).mean()))
        place = int(np.argmax(shares))
        share, column = float(shares[place]), group[place]
        behind = np.delete(stood_ns, place, axis=1).mean(axis=1) - stood_ns[:, place]
        excess = float(np.median(behind))
        error = 1.25 * noise(behind) / math.sqrt(len(behind)) + 1.0
        # Of all microbatches, as far as tokens explain it.
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
            counts={"tokens": int(tokens[:, place].sum())},
        )
        found.append(finding)
    return found


def _layout(marker: IterationStart) -> tuple[tuple[int, ...], ...]:
    """Returns the layers of experts of a rank, of each the first expert there and their number."""
    return tuple((layer, first, len(counts)) for layer, first, *counts in marker.tokens)


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Holds nanoseconds of a layer on each stage, and of the stage beside its layers.

    Attributes:
        layer_ns: ``[stages]``.
        beside_ns: ``[stages]``, embedding, loss.
        rank_of: ``[stages]``, pipeline rank that holds it.
    """

    layer_ns: Floats
    beside_ns: Floats
    rank_of: Sequence[int]

    def stage_ns(self, layers: Sequence[int]) -> Floats:
        """Returns ``[stages]``: nanoseconds of a microbatch under a partition."""
        return np.asarray(np.asarray(layers) * self.layer_ns + self.beside_ns)

    def rank_ns(self, layers: Sequence[int]) -> Floats:
        """Returns ``[pipeline ranks]``: likewise."""
        ranks: Floats = np.bincount(self.rank_of, weights=self.stage_ns(layers)).astype(np.float64)
        return ranks


def stage_costs(m: Measured) -> StageCosts | None:
    """Derives what layers take from a run; ``None`` where it does not say how many there are."""
    if not m.layers or not sum(m.layers):
        return None
    takes, rank_of = np.zeros(len(m.layers)), [0] * len(m.layers)
    for column, place in enumerate(m.places):
        for chunk, stage in enumerate(m.stages[column]):
            mine = float(np.nansum(middle(m.median_ns[:, column, chunk], axis=0)))
            takes[stage] = max(takes[stage], mine)  # all replicas wait for the slowest
            rank_of[stage] = place.pp_rank
    return split_costs(takes, m.layers, m.work, rank_of)


def split_costs(
    takes: Floats, layers_of: Sequence[int], work: Sequence[float], rank_of: Sequence[int]
) -> StageCosts:
    """Splits what stages take into layers and what they hold beside them.

    Args:
        takes: ``[stages]``, nanoseconds of a microbatch.
        layers_of: layers of each stage, some of them with one.
        work: layers of each stage and, in layers, what it holds beside; empty where not known.
        rank_of: ``[stages]``, pipeline rank that holds it.
    """
    layers = np.array(layers_of, dtype=np.float64)
    beside = np.array(work or layers_of) - layers
    pure = (layers > 0) & (beside <= 0)
    pure = pure if pure.any() else layers > 0
    usual = float(np.median(takes[pure] / layers[pure]))
    # What a stage holds beside its layers is what it takes longer, as far as the plan explains it.
    extra = np.where(beside > 0, np.clip(takes - layers * usual, 0, 2 * beside * usual), 0.0)
    each = np.where(layers > 0, (takes - extra) / np.maximum(layers, 1), usual)
    return StageCosts(each, extra, rank_of)


def best_partition(times: StageCosts, num_layers: int) -> tuple[int, ...]:
    """Layers per stage under which the slowest rank is as quick as it can be.

    Layer by layer to the rank that is done first with it; on it to the stage that has fewer.

    Args:
        times: of layers.
        num_layers: of the model.
    """
    stages = len(times.rank_of)
    given = [0] * stages
    busy = np.bincount(times.rank_of, weights=times.beside_ns).astype(np.float64)
    for _ in range(num_layers):
        after = [busy[times.rank_of[stage]] + times.layer_ns[stage] for stage in range(stages)]
        best = min(range(stages), key=lambda stage: (after[stage], given[stage]))
        given[best] += 1
        busy[times.rank_of[best]] = after[best]
    return tuple(given)


def _pace_ns(m: Measured) -> tuple[float, ...]:
    """Returns each rank's time for a microbatch, by the work that it should have."""
    held = m.work or m.layers
    works = [sum(held[stage] for stage in stages) if held else 0 for stages in m.stages]
    if not all(work > 0 for work in works):
        return ()
    return tuple(float(takes) / work for takes, work in zip(m.microbatch_ns, works, strict=True))


def _uneven(m: Measured, times: StageCosts) -> list[Finding]:
    """Stages that have more work than others by the partition itself."""
    better = best_partition(times, sum(m.layers))
    ranks, best = times.rank_ns(m.layers), times.rank_ns(better).max()
    if ranks.max() <= 0 or 1 - best / ranks.max() < UNEVEN:
        return []
    worst = int(np.argmax(ranks))
    columns = [number for number, place in enumerate(m.places) if place.pp_rank == worst]
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


SIMULATED, SIMULATED_SPANS = 32, 300_000
"""Most iterations, and spans of them, that are simulated for what a finding costs."""


def _with_costs(
    run: RunTrace, m: Measured, times: StageCosts | None, findings: Sequence[Finding]
) -> list[Finding]:
    """Adds what the last iterations of each finding would save without it, by simulation.

    Where the trace cannot be simulated nothing is added. A partition that gains nothing in the
    simulation is no finding.
    """

    @cache
    def recorded(iterations: tuple[int, ...]) -> tuple[Operations, Graph]:
        operations = read_operations(run, pipelines_of(run), iterations)
        return operations, build_graph(operations)

    found = []
    for finding in findings:
        period, known = finding.period, m.iterations
        mine = known[(known >= period.first) & (known <= period.last)][-SIMULATED:]
        spans = run.num_spans(mine.tolist())
        try:
            ops, graph = recorded(tuple(thinned(mine, spans, SIMULATED_SPANS).tolist()))
            without = _without(m, times, finding, ops)
        except TraceError:
            found.append(finding)
            continue
        before_s, after_s = graph.simulate([ops.duration_s, without]).mean(axis=0).tolist()
        saved_s = rule_saves_s(m.places[0], ops, without, np.unique(ops.iteration).tolist())
        if saved_s is None or finding.cause == "spikes":  # these are in few of the steps
            saved_s = before_s - after_s
        if saved_s <= 0 and finding.cause == "uneven stages":
            continue
        share = max(0.0, saved_s / before_s) if before_s else 0.0
        found.append(replace(finding, cost_fraction=share, cost_ms=share * m.step / 1e6))
    return found


def _without(
    m: Measured, times: StageCosts | None, finding: Finding, ops: Operations
) -> npt.NDArray[np.float64]:
    """Returns seconds of the operations as if a finding were mended."""
    where = ops.where
    takes: npt.NDArray[np.float64] = ops.duration_s.copy()
    at = [m.places[m.column[rank]] for rank in where.ranks.tolist()]
    # Of a tensor-parallel group only the first rank is simulated.
    worker = {(place.pp_rank, place.dp_rank): number for number, place in enumerate(at)}
    places = [m.places[m.column[rank]] for rank in finding.ranks]
    workers = [worker.get((place.pp_rank, place.dp_rank), -1) for place in places]
    delay_s = (finding.delay_ms or 0.0) / 1e3
    computes = ops.kind <= WEIGHT
    mine = computes & np.isin(ops.worker, workers)
    if finding.cause == "slow rank":
        takes[mine] /= finding.factor or 1.0
    elif finding.cause == "slow link":
        link = (ops.source == workers[0]) & (ops.worker == workers[1])
        takes[link] = np.maximum(takes[link] - delay_s, 0)
    elif finding.cause == "slow data":
        reads = mine & (ops.kind == FORWARD) & np.isin(ops.stage, (0, where.num_stages - 1))
        takes[reads] = np.maximum(takes[reads] - delay_s, 0)
    elif finding.cause == "spikes":
        for chunk in range(m.num_chunks):
            for kind in range(len(DRAWN_ACTIONS)):
                rows = np.flatnonzero(mine & (ops.chunk == chunk) & (ops.kind == kind))
                usual = float(np.median(takes[rows])) if len(rows) else 0.0
                takes[rows[takes[rows] > math.exp(SPIKE_LEAST) * usual]] = usual
    elif finding.cause == "overloaded experts":
        # All ranks of the stage wait for it.
        column = m.column[finding.ranks[0]]
        stage = [n for n, place in enumerate(at) if place.pp_rank == places[0].pp_rank]
        takes[computes & np.isin(ops.worker, stage)] *= max(
            0.0, 1 - delay_s * 1e9 / max(1.0, float(m.microbatch_ns[column]))
        )
    elif times is not None and finding.partition:
        now, then = times.stage_ns(m.layers), times.stage_ns(finding.partition)
        takes[computes] *= (then / np.maximum(now, 1))[ops.stage[computes]]
    return takes


def _advise(m: Measured, times: StageCosts | None, finding: Finding) -> Finding:
    """Add what to do."""
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
                    f"{format_partition(m.layers)}: a pace {gain:.0%} quicker"
                )
        elif times is None:
            advice.append(f"give stage {finding.stages[0]} fewer layers (--partition)")
        if finding.cause == "slow rank":
            if len({place.dp_rank for place in m.places}) > 1:
                advice.append("deal its replica fewer microbatches, --balance-replicas speed")
            advice.append(f"look for other programs and throttling on {hosts}, or leave it out")
    elif finding.cause == "slow link":
        source, target = finding.ranks
        advice += [
            f"check the network of {hosts}, or leave one of them out",
            "choose an order that keeps more microbatches on the way (--pipeline-schedule adaptive "
            f"or hinted, a larger --activation-cap): it hides {finding.delay_ms:.3g} ms from "
            f"rank {source} to rank {target}",
        ]
    elif finding.cause == "slow data":
        advice += ["read ahead with more processes (--num-workers) or from a faster disk"]
    elif finding.cause == "overloaded experts":
        advice += [
            "balance the router: a larger --moe-aux-loss-coeff, or --moe-router-enable-expert-bias "
            "with --moe-router-score-function sigmoid",
            "limit the tokens of an expert, --moe-expert-capacity-factor 1.25: the rest is dropped",
        ]
    else:
        advice += [
            "choose the order at run time (--pipeline-schedule adaptive), which fills such gaps",
            f"look for other programs on {hosts}",
        ]
    return replace(finding, advice=tuple(advice), partition=partition)
