"""Finds links with packet loss, on which some messages are late because of retransmissions.

Most messages on such a link are as fast as on other links, so a comparison of links finds nothing.
However, the late messages occur in the iterations in which the machine retransmitted more TCP
segments than usual. Links within a machine are skipped, unless all messages are known to use TCP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, Floats64, RecordedSteps, Remedy
from megatron.adaptive.trace.diagnose.finding import Finding, Reason
from megatron.adaptive.trace.diagnose.machine_reasons import lost_packets, may_use_tcp, starved
from megatron.adaptive.trace.diagnose.samples import Measured, chance, middle
from megatron.adaptive.trace.machine_counters import PROCESSOR_WAIT
from megatron.adaptive.trace.network_counters import RESENT_SEGMENTS
from megatron.adaptive.trace.span_columns import Ints

LATE_TIMES = 3.0
"""Minimum ratio of a late message's travel time to the link's median travel time."""

LATE_OF_AN_ACTION = 0.25
"""Minimum delay of a late message, as a fraction of the median duration of an action."""

LATE_FEWEST = 3
"""Minimum number of late messages on a link that is reported."""

LATE_OF_STEP = 0.03
"""Minimum total delay per step of a link's late messages, as a fraction of the step time."""

LATE_TOGETHER = 0.8
"""Minimum fraction of a link's delay that occurs in iterations with retransmitted TCP segments.

Links with a smaller fraction are not reported.
"""

RANDOMLY = 0.02
"""Maximum probability that delays and retransmissions coincide by chance on a reported link."""

DRAWS = 1000
"""Number of random orders of the iterations that are compared with the real order.

The comparison estimates the probability that delays and retransmissions coincide by chance.
"""

LINK_FEWEST = 20
"""Minimum number of messages on a link that is examined."""


class LossyLink(Cause):
    """Finds links on which some messages are late because packets were lost."""

    name = "lossy link"
    order = 25
    is_rare = True

    def find(self, evidence: Evidence, earlier: Sequence[Finding]) -> list[Finding]:
        explained = {
            frozenset(finding.ranks)
            for finding in earlier
            if finding.cause == "slow link" and finding.reason is not None
        }
        if explained:
            # A slow link with a known reason has already been found. It may have lost the packets,
            # because lost packets are counted per machine, not per link.
            return []
        return find_lossy_links(evidence.measured)

    def describe(self, finding: Finding) -> str:
        source, target = finding.ranks
        hosts = " to ".join(dict.fromkeys(finding.hosts))
        return (
            f"some messages from rank {source} to rank {target} ({hosts}) are "
            f"{finding.delay_text} late"
        )

    def without(self, finding: Finding, steps: RecordedSteps) -> Floats64:
        ops, duration_s = steps.operations, steps.duration_s
        source, target = steps.workers
        rows = np.flatnonzero((ops.source == source) & (ops.worker == target))
        usual = float(np.median(duration_s[rows])) if len(rows) else 0.0
        duration_s[rows[duration_s[rows] > LATE_TIMES * usual]] = usual
        return duration_s

    def advise(self, finding: Finding, evidence: Evidence) -> Remedy:
        return Remedy((finding.reason.remedy,) if finding.reason else ())


@dataclass(frozen=True, eq=False)
class _Link:
    """Holds the late messages from one rank to another.

    Attributes:
        ends: Indices of the sender and the receiver on the rank axis.
        count: Total number of messages.
        late_ns: ``[late messages]``, travel time in ns minus the link's median travel time.
        rows: ``[late messages]``, index of each message's iteration.
        reason: Reason for the delay: packet loss on the link's machines.
    """

    ends: tuple[int, int]
    count: int
    late_ns: Floats64
    rows: Ints
    reason: Reason


def find_lossy_links(m: Measured) -> list[Finding]:
    """Returns a list with a finding for the lossy link with the largest total delay.

    The list is empty if no link is lossy.
    """
    links = _lossy_links(m)
    worst = max(links, key=lambda link: float(link.late_ns.sum()), default=None)
    if worst is None:
        return []
    affected = np.unique(worst.rows)
    finding = m.finding(
        worst.ends,
        m.iterations[affected],
        kind="spikes",
        against="history",
        confidence=chance(math.sqrt(len(worst.late_ns))),
        delay_ms=float(np.median(worst.late_ns)) / 1e6,
        counts={"late messages": len(worst.late_ns)},
        detail=f"{len(worst.late_ns) / worst.count:.1%} of the link's messages",
    )
    return [replace(finding, reason=worst.reason)]


def _lossy_links(m: Measured) -> list[_Link]:
    messages = m.messages
    action_ns = float(middle(m.median_ns))
    resent = np.nan_to_num(m.machine[RESENT_SEGMENTS])
    links = []
    for (source, target), chosen in messages.by_link():
        ends = (m.column[source], m.column[target])
        if len(chosen) < LINK_FEWEST or not may_use_tcp(m, ends):
            continue
        travel_ns = (messages.arrived_ns[chosen] - messages.sent_ns[chosen]).astype(np.float64)
        rows = np.searchsorted(m.iterations, messages.iteration[chosen])
        usual_ns = float(np.median(travel_ns))
        least_ns = max(LATE_TIMES * usual_ns, usual_ns + LATE_OF_AN_ACTION * action_ns)
        is_late = travel_ns > least_ns
        late_ns = travel_ns[is_late] - usual_ns
        num_iterations = len(np.unique(rows))
        if len(late_ns) < LATE_FEWEST:
            continue
        if float(late_ns.sum()) < LATE_OF_STEP * m.step * num_iterations:
            continue
        lost = resent[:, list(ends)].max(axis=1)
        together = float(late_ns[lost[rows[is_late]] > 0].sum()) / float(late_ns.sum())
        if _is_starved(m, ends, np.unique(rows[is_late]), float(late_ns.sum())):
            continue
        reason = lost_packets(m, ends, np.arange(len(m.iterations)))
        if reason is None or together < LATE_TOGETHER:
            continue
        used = np.unique(rows)
        late_of_ns = np.zeros(len(m.iterations))
        np.add.at(late_of_ns, rows[is_late], late_ns)
        if _chance_of_meeting(late_of_ns[used], lost[used]) <= RANDOMLY:
            links.append(_Link(ends, len(chosen), late_ns, rows[is_late], reason))
    return links


def _chance_of_meeting(late_ns: Floats64, lost: Floats64) -> float:
    """Returns the probability that delays and retransmissions coincide only by chance.

    Args:
        late_ns: ``[iterations]``, total delay of late messages in ns.
        lost: ``[iterations]``, number of retransmitted segments.
    """
    orders = np.random.default_rng(0).permuted(np.tile(lost, (DRAWS, 1)), axis=1)
    # The factor slightly below 1 allows for rounding errors in the sums.
    return float((orders @ late_ns >= (1 - 1e-9) * float(lost @ late_ns)).mean())


def _is_starved(m: Measured, ends: tuple[int, int], affected: Ints, late_ns: float) -> bool:
    """Returns whether the ranks of a link waited longer than ``late_ns`` for processors.

    Args:
        m: Measured times of the run.
        ends: Indices of the sender and the receiver on the rank axis.
        affected: Indices of the iterations with late messages.
        late_ns: Total delay of the late messages in ns.
    """
    if not any(starved(m, column, affected) for column in ends):
        return False
    waited_ns = np.nan_to_num(m.machine[PROCESSOR_WAIT][affected][:, list(ends)]).sum()
    return late_ns < float(waited_ns)
