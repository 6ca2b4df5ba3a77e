"""Messages that travel longer than others.

A message's travel is from when its sender begins to hand it over to its arrival. Arrivals that were
only ``found`` are upper bounds; a link is judged by the exact ones where it has some.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron.adaptive.trace.diagnose.finding import Finding, Period
from megatron.adaptive.trace.diagnose.measured import Measured, Place
from megatron.adaptive.trace.diagnose.robust import Floats, best_interval, chance, middle, noise
from megatron.adaptive.trace.table import Ints

__all__ = ["find_slow_links"]

FEWEST = 6
"""A link with fewer messages is not judged."""

TIMES = 2.0
"""A slow link takes so many times as long as others, and on top of that:"""

OF_AN_ACTION = 0.05
"""so much of the median action,"""

ERRORS = 5.0
"""so many spreads of the others' medians, and more than the clocks may be wrong."""

ALONE = 0.25
"""A link that no other is like is slow from so much of the median action on."""

STEADY = 0.4
"""Its fastest messages show so much of the delay too."""

CHANGE_SURE = 7.0


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
        return []  # the text form and version 1 do not have them
    numbers = np.unique(messages.iteration)
    size = max(m.column, default=0) + 1
    keys = messages.source * size + messages.target
    order = np.argsort(keys, kind="stable")
    ends, starts = np.unique(keys[order], return_index=True)
    links = []
    for key, rows in zip(ends.tolist(), np.split(order, starts[1:]), strict=True):
        exact = rows[messages.seen[rows]]
        rows = exact if len(exact) >= max(FEWEST, len(rows) // 4) else rows
        if len(rows) < FEWEST:
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
    least = max((ALONE if alone else OF_AN_ACTION) * action, ERRORS * error)
    least = max(least, (TIMES - 1) * usual)
    if link.crosses:
        least = max(least, 3 * m.clock_error_ns)
    known = np.flatnonzero(np.isfinite(link.levels_ns))
    series = link.levels_ns[known]
    change = best_interval(series, floor=max(0.02 * action, noise(series)))
    numbers = link.numbers
    if change is not None and change.rise >= least and change.score >= CHANGE_SURE:
        chosen = numbers[known[change.first : change.last + 1]]
        kind = "begun" if change.last == len(series) - 1 else "passed"
        rest_level = float(np.median(np.delete(series, np.s_[change.first : change.last + 1])))
        if rest_level - usual < least:
            excess = change.rise
            return _finding(m, link, chosen, excess, excess / error, kind, "history")
    excess = link.median_ns - usual
    usually_fast = float(np.median(fasts)) if len(fasts) else 0.0
    if excess < least or link.fast_ns - usually_fast < STEADY * excess:
        return None
    against = "history" if alone else "others"
    sure = excess / (error + least / 4)
    return _finding(m, link, numbers, excess, sure, "lasting", against)


def _finding(
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
