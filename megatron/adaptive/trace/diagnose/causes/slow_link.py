"""Finds links whose messages take longer than those of other links of the same kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, Floats64, RecordedSteps, Remedy
from megatron.adaptive.trace.diagnose.finding import Finding
from megatron.adaptive.trace.diagnose.machine_reasons import link_reason, turn_wait_ns
from megatron.adaptive.trace.diagnose.samples import (
    Floats,
    Measured,
    best_interval,
    chance,
    middle,
    noise,
    spread,
)
from megatron.adaptive.trace.span_columns import Ints


class SlowLink(Cause):
    """Finds links from one rank to another whose messages are late."""

    name = "slow link"
    order = 20

    def __init__(self) -> None:
        self._slow_ranks: frozenset[int] = frozenset()

    def find(self, evidence: Evidence, earlier: Sequence[Finding]) -> list[Finding]:
        self._slow_ranks = frozenset(
            rank for finding in earlier if finding.cause == "slow rank" for rank in finding.ranks
        )
        return find_slow_links(evidence.measured)

    def keeps(self, finding: Finding, *, is_simulated: bool) -> bool:
        # Messages also arrive late on a slow rank, because its receiving thread is slow. Such a
        # delay does not make the step longer.
        is_symptom = is_simulated and not self._slow_ranks.isdisjoint(finding.ranks)
        return not is_symptom or finding.cost_fraction >= LINK_OF_STEP

    def describe(self, finding: Finding) -> str:
        source, target = finding.ranks
        hosts = " to ".join(dict.fromkeys(finding.hosts))
        link = f"rank {source} to rank {target} ({hosts})"
        return f"messages from {link} are {finding.delay_text} late"

    def without(self, finding: Finding, steps: RecordedSteps) -> Floats64:
        ops, duration_s = steps.operations, steps.duration_s
        source, target = steps.workers
        link = (ops.source == source) & (ops.worker == target)
        duration_s[link] = np.maximum(duration_s[link] - steps.delay_s, 0)
        return duration_s

    def advise(self, finding: Finding, evidence: Evidence) -> Remedy:
        source, target = finding.ranks
        hosts = " and ".join(sorted(set(finding.hosts)))
        check = f"check the network of {hosts}, or exclude one of these machines"
        settings = evidence.settings
        more = (
            f"allow more microbatches in flight ({settings.more_in_flight})"
            if evidence.is_ordered_at_run_time
            else "choose a schedule with more microbatches in flight "
            f"({settings.at_run_time} or hinted, with {settings.more_in_flight})"
        )
        return Remedy(
            (
                finding.reason.remedy if finding.reason else check,
                f"{more}, which hides the delay of {finding.delay_text} from rank {source} to rank "
                f"{target}",
            )
        )


LINK_FEWEST = 6
"""Minimum number of messages on a link that is examined."""

LINK_TIMES = 2.0
"""Minimum ratio of the travel time on a slow link to the travel time on other links.

To be reported, a link must also exceed the minimum values below.
"""

LINK_OF_AN_ACTION = 0.05
"""Minimum delay of a slow link's messages, as a fraction of the median duration of an action."""

LINK_ERRORS = 5.0
"""Minimum delay of a slow link's messages, in standard deviations of their time."""

LINK_ALONE = 0.25
"""Value to use instead of ``LINK_OF_AN_ACTION`` if there are fewer than two other links."""

LINK_STEADY = 0.4
"""Minimum delay of a slow link's fastest messages, as a fraction of the link's median delay."""

LINK_OF_WAITS = 3.0
"""Minimum ratio of a slow link's delay to the time that its ranks wait for a processor.

Threads may have to wait for a processor before they send a message or notice its arrival.
"""

MOST_COMPARED = 1000
"""Maximum number of links with which a link is compared. If there are more, they are sampled."""

LINK_OF_STEP = 0.02
"""Minimum cost of a slow link to or from a slow rank, as a fraction of the step time."""

LINK_CHANGE_SURE = 7.0
"""Minimum score, in standard errors, of a reported change of a link during the run."""


@dataclass(frozen=True, eq=False)
class _Link:
    """Holds the messages from one rank to another.

    Attributes:
        ends: Indices of the sender and the receiver on the rank axis of ``Measured``.
        crosses: Whether the two ranks are on different machines.
        travel_ns: ``[messages]``, time in ns from the start of the send to the arrival.
        iteration: ``[messages]``, iteration number.
    """

    ends: tuple[int, int]
    crosses: bool
    travel_ns: Floats
    iteration: Ints

    def levels_ns(self, chosen: Ints | None = None) -> tuple[float, float]:
        """Returns the median and the 10th percentile of the messages' travel times in ns.

        Args:
            chosen: Numbers of the iterations to use, or ``None`` for all.
        """
        travel_ns = self.travel_ns
        if chosen is not None:
            travel_ns = travel_ns[np.isin(self.iteration, chosen)]
        return float(np.median(travel_ns)), float(np.quantile(travel_ns, 0.1))


def find_slow_links(m: Measured) -> list[Finding]:
    """Returns findings for slow links, at most one per pair of ranks, slowest first."""
    links = _links(m)
    action = float(middle(m.median_ns))
    compared = [
        _compared([link for link in links if link.crosses is kind]) for kind in (False, True)
    ]
    findings: dict[frozenset[int], Finding] = {}
    for link in links:
        pairs, levels = compared[link.crosses]
        is_same_pair = (pairs == sorted(link.ends)).all(axis=1)
        finding = _judge(m, link, levels[~is_same_pair], action)
        if finding is None:
            continue
        best = findings.get(frozenset(link.ends))
        if best is None or (finding.delay_ms or 0) > (best.delay_ms or 0):
            findings[frozenset(link.ends)] = finding
    return sorted(findings.values(), key=lambda finding: -(finding.delay_ms or 0))


def _compared(links: Sequence[_Link]) -> tuple[Ints, Floats]:
    """Returns the travel times of the links that are used for comparison.

    Args:
        links: Links of one kind: all within machines, or all between machines.

    Returns:
        Two arrays with the shape ``[links, 2]``. The first contains the indices of each link's two
        ranks, with the lower index first. The second contains the median and the 10th percentile of
        each link's travel time in ns.
    """
    links = links[:: max(1, -(-len(links) // MOST_COMPARED))]
    pairs = np.array([sorted(link.ends) for link in links], dtype=np.int64).reshape(-1, 2)
    return pairs, np.array([link.levels_ns() for link in links]).reshape(-1, 2)


def _links(m: Measured) -> list[_Link]:
    messages = m.messages
    links = []
    for pair, rows in messages.by_link():
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
    """Returns a finding if ``link`` is slow, always or only at times, and ``None`` otherwise.

    Args:
        m: Measured times of the run.
        link: Link from one rank to another, with its messages.
        others: ``[links, 2]``, median and 10th percentile of the travel time in ns on every other
            link of the same kind (within a machine, or between machines).
        action: Median duration of an action in ns.
    """
    alone = len(others) < 2
    usual, usually_fast = np.median(others, axis=0).tolist() if len(others) else (0.0, 0.0)
    # Use the spread between links as the error, or the standard error of this link's median if it
    # is larger.
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
) -> Finding | None:
    """Returns a finding for ``link``, or ``None`` if waits for processors may explain the delay.

    In the iterations ``chosen``, messages are ``excess`` nanoseconds late, which corresponds to
    ``sure`` standard errors. ``against`` is the reference of the comparison.
    """
    rows = np.flatnonzero(np.isin(m.iterations, chosen))
    if excess < LINK_OF_WAITS * turn_wait_ns(m, link.ends, rows):
        return None
    median_us, fast_us = (level / 1e3 for level in link.levels_ns(chosen))
    finding = m.finding(
        link.ends,
        chosen,
        against=against,
        confidence=chance(sure),
        delay_ms=excess / 1e6,
        counts={"messages": int(np.isin(link.iteration, chosen).sum())},
        detail=f"median {number_text(median_us, 4)} us, fastest tenth below "
        f"{number_text(fast_us, 4)} us, other links {number_text(median_us - excess / 1e3, 4)} us",
    )
    return replace(finding, reason=link_reason(m, link.ends, rows))
