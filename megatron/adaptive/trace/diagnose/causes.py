"""Finds the causes of a slow run: ranks, links, reading of data, spikes, uneven stages.

``baselines`` weighs what is known of each rank: peers, plan and past. The likeliest shift is taken
for a fault, if it is beyond chance and large enough to matter, then the next one without it. Links
are compared with links of the same kind, readers with other readers, and single actions with the
same action of other iterations. The partition that fits the measured speeds is worked out here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.adaptive.trace.diagnose.baselines import Levels, Shift, levels_of
from megatron.adaptive.trace.diagnose.finding import Finding, Period
from megatron.adaptive.trace.diagnose.measured import Measured, Place
from megatron.adaptive.trace.diagnose.robust import (
    Floats,
    best_interval,
    chance,
    middle,
    noise,
    spread,
)
from megatron.adaptive.trace.table import Ints

__all__ = [
    "StageCosts",
    "best_partition",
    "find_slow_links",
    "find_slow_ranks",
    "find_slow_reading",
    "find_spikes",
    "stage_costs",
]


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
            found.append(_slow_rank(m, levels, slow))
        levels.remove(slow)
        if slow.end - slow.first == len(m.iterations):
            levels.distrust(slow.column)
    return sorted(found, key=lambda finding: -(finding.factor or 0))


def _quickest(levels: Levels, judged: set[int]) -> Shift | None:
    """Returns the rank that is quicker than it should be beyond doubt: no measure for others."""
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


def _slow_rank(m: Measured, levels: Levels, shift: Shift) -> Finding:
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
        source: the sender.
        target: the receiver.
        travel_ns: ``[messages]``.
        iteration: ``[messages]``.
        numbers: ``[iterations]``, of all iterations that have messages.
        levels_ns: ``[iterations]``, the median of each, NaN for none.
        median_ns: of all of them.
        fast_ns: a tenth is faster.
    """

    source: Place
    target: Place
    travel_ns: Floats
    iteration: Ints
    numbers: Ints
    levels_ns: Floats
    median_ns: float
    fast_ns: float

    @property
    def pair(self) -> frozenset[int]:
        """The two ranks, whichever way."""
        return frozenset((self.source.rank, self.target.rank))

    @property
    def crosses(self) -> bool:
        """Whether it leaves the machine."""
        return self.source.host != self.target.host


def find_slow_links(m: Measured) -> list[Finding]:
    """Find slow links, the slowest first; of a pair that is slow both ways the slower way."""
    links = _links(m)
    columns = [(o.source.rank, o.target.rank, o.crosses, o.median_ns, o.fast_ns) for o in links]
    table = np.array(columns, dtype=np.float64).reshape(-1, 5)
    action = float(middle(m.median_ns))
    found: dict[frozenset[int], Finding] = {}
    for link in links:
        ends = [link.source.rank, link.target.rank]
        same_pair = np.isin(table[:, 0], ends) & np.isin(table[:, 1], ends)
        like = table[~same_pair & (table[:, 2] == link.crosses)]
        finding = _judge(m, link, like[:, 3], like[:, 4], action)
        if finding is None:
            continue
        best = found.get(link.pair)
        if best is None or (finding.delay_ms or 0) > (best.delay_ms or 0):
            found[link.pair] = finding
    return sorted(found.values(), key=lambda finding: -(finding.delay_ms or 0))


def _links(m: Measured) -> list[_Link]:
    messages = m.messages
    if not len(messages):
        return []  # the text form does not have them
    numbers = np.unique(messages.iteration)
    size = max(m.column, default=0) + 1
    keys = messages.source * size + messages.target
    order = np.argsort(keys, kind="stable")
    ends, starts = np.unique(keys[order], return_index=True)
    links = []
    for key, rows in zip(ends.tolist(), np.split(order, starts[1:]), strict=True):
        exact = rows[messages.seen[rows]]
        rows = exact if len(exact) >= max(LINK_FEWEST, len(rows) // 4) else rows
        if len(rows) < LINK_FEWEST:
            continue
        travel = (messages.arrived_ns[rows] - messages.sent_ns[rows]).astype(np.float64)
        places = np.searchsorted(numbers, messages.iteration[rows])
        levels = np.full(len(numbers), np.nan)
        for place in np.unique(places):
            levels[place] = np.median(travel[places == place])
        source, target = divmod(key, size)
        links.append(
            _Link(
                source=m.places[m.column[source]],
                target=m.places[m.column[target]],
                travel_ns=travel,
                iteration=messages.iteration[rows],
                numbers=numbers,
                levels_ns=levels,
                median_ns=float(np.median(travel)),
                fast_ns=float(np.quantile(travel, 0.1)),
            )
        )
    return links


def _judge(
    m: Measured, link: _Link, medians: Floats, fasts: Floats, action: float
) -> Finding | None:
    """Say whether a link is slow, all the time or for some of it.

    Args:
        m: the run.
        link: the link.
        medians: of the travel of links like it, ns.
        fasts: their fast messages' travel, ns.
        action: the median action, ns.
    """
    alone = len(medians) < 2
    usual = float(np.median(medians)) if len(medians) else 0.0
    # The others' medians, and how much the link's own messages differ from one another.
    differ = float(np.median(np.abs(medians - usual))) * 1.4826 if len(medians) else 0.0
    own = float(np.median(np.abs(link.travel_ns - link.median_ns))) * 1.4826
    error = max(differ, 1.25 * own / math.sqrt(len(link.travel_ns)), 1_000.0)
    least = max((LINK_ALONE if alone else LINK_OF_AN_ACTION) * action, LINK_ERRORS * error)
    least = max(least, (LINK_TIMES - 1) * usual)
    if link.crosses:
        least = max(least, 3 * m.clock_error_ns)
    known = np.flatnonzero(np.isfinite(link.levels_ns))
    series = link.levels_ns[known]
    change = best_interval(series, floor=max(0.02 * action, noise(series)))
    numbers = link.numbers
    if change is not None and change.rise >= least and change.score >= LINK_CHANGE_SURE:
        chosen = numbers[known[change.first : change.last + 1]]
        kind = "begun" if change.last == len(series) - 1 else "passed"
        rest_level = float(np.median(np.delete(series, np.s_[change.first : change.last + 1])))
        if rest_level - usual < least:
            excess = change.rise
            return _slow_link(m, link, chosen, excess, excess / error, kind, "history")
    excess = link.median_ns - usual
    usually_fast = float(np.median(fasts)) if len(fasts) else 0.0
    if excess < least or link.fast_ns - usually_fast < LINK_STEADY * excess:
        return None
    against = "history" if alone else "others"
    sure = excess / (error + least / 4)
    return _slow_link(m, link, numbers, excess, sure, "lasting", against)


def _slow_link(
    m: Measured, link: _Link, chosen: Ints, excess: float, sure: float, kind: str, against: str
) -> Finding:
    rows = np.isin(link.iteration, chosen)
    waits = m.waits[(m.waits[:, 0] == link.target.rank) & (m.waits[:, 1] == link.source.rank), 2]
    waited = float(np.minimum(waits, excess).sum()) / max(1, m.message_iterations)
    median_us = float(np.median(link.travel_ns[rows])) / 1e3
    fast_us = float(np.quantile(link.travel_ns[rows], 0.1)) / 1e3
    return Finding(
        cause="slow link",
        ranks=(link.source.rank, link.target.rank),
        stages=tuple(sorted({*link.source.stages, *link.target.stages})),
        hosts=(link.source.host, link.target.host),
        period=Period(first=int(chosen[0]), last=int(chosen[-1]), kind=kind),
        against=against,
        confidence=chance(sure),
        delay_ms=excess / 1e6,
        counts={"iterations": len(chosen), "messages": int(rows.sum())},
        detail=f"median {median_us:.4g} us, a tenth below {fast_us:.4g} us, "
        f"other links {median_us - excess / 1e3:.4g} us",
        cost_ms=waited / 1e6,
        cost_fraction=waited / m.step if m.step else 0.0,
    )


READING_OF_STEP = 0.03
"""Reading that takes less of a step than this starves nobody."""

READING_TIMES = 1.5
"""Slow reading takes so many times as long as that of others, or as before."""

READING_CHANGE_SURE = 6.0


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
        if (
            change is not None
            and change.score >= READING_CHANGE_SURE
            and change.rise >= math.log(READING_TIMES)
        ):
            inside = np.arange(change.first, change.last + 1)
            chosen = known[inside]
            share = share[inside]
            before = float(np.median(np.delete(series, inside)))
            kind = "begun" if change.last == len(series) - 1 else "passed"
            against = "history"
        level = float(np.median(each[chosen, column]))
        if float(np.median(share)) < READING_OF_STEP or level < READING_TIMES * before:
            # Starved all the same, if this much of the step goes into it on every reader.
            if float(np.median(share)) < 2 * READING_OF_STEP:
                continue
            before = 0.0
        found.append(_slow_reading(m, column, chosen, level, level - before, kind, against))
    return sorted(found, key=lambda finding: -(finding.delay_ms or 0))


def _slow_reading(
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
"""How unlikely it is that any rank has so many spikes of those that all have."""

SPIKE_OF_STEP = 0.003
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
        limits.append(max(SPIKE_LEAST, SPIKE_SPREADS * max(width, float(np.median(usual)))))
        counts.append(int((mine > limits[-1]).sum()))
        totals.append(len(mine))
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
        finding = _spikes(m, odd[:, column], column, limits[column], seen * part)
        rare = _tail(count, seen, part) < SPIKE_RARE / len(counts)
        if rare and finding.cost_fraction >= SPIKE_OF_STEP:
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


def _spikes(m: Measured, odd: Floats, column: int, limit: float, expected: float) -> Finding:
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


class StageCosts:
    """Holds nanoseconds of a layer on each stage, and of the stage beside its layers.

    Args:
        layer_ns: ``[stages]``.
        beside_ns: ``[stages]``, embedding, loss.
        rank_of: ``[stages]``, pipeline rank that holds it.
    """

    def __init__(self, layer_ns: Floats, beside_ns: Floats, rank_of: Sequence[int]) -> None:
        self.layer_ns = layer_ns
        self.beside_ns = beside_ns
        self.rank_of = tuple(rank_of)

    def pace_ns(self, layers: Sequence[int]) -> float:
        """Returns nanoseconds of the slowest rank for a microbatch under a partition."""
        stages = np.asarray(layers) * self.layer_ns + self.beside_ns
        return float(np.bincount(self.rank_of, weights=stages).max())


def stage_costs(m: Measured) -> StageCosts | None:
    """Derives what layers take from a run; ``None`` where it does not say how many there are."""
    if not m.layers or not sum(m.layers):
        return None
    stages = len(m.layers)
    takes = np.zeros(stages)
    rank_of = [0] * stages
    for column, place in enumerate(m.places):
        for chunk, stage in enumerate(place.stages):
            mine = float(np.nansum(middle(m.median_ns[:, column, chunk], axis=0)))
            takes[stage] = max(takes[stage], mine)  # all replicas wait for the slowest
            rank_of[stage] = place.pp_rank
    layers = np.array(m.layers, dtype=np.float64)
    beside = np.array(m.work or m.layers) - layers
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
