"""Finds ranks that arrive late at collectives, and groups whose transfers take longer than usual.

Both causes require the times of collectives (``--trace-detail collectives``). Late ranks are
searched for only in groups whose members do the same work at the same time. In a data-parallel
group, for example, waits mean that a whole replica is late, which other causes explain. In a group
of experts, the rank with the most tokens is the last to arrive (see ``overloaded_experts``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.trace.collectives import JoinedCollectives
from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, Floats64, RecordedSteps, Remedy
from megatron.adaptive.trace.diagnose.finding import Finding
from megatron.adaptive.trace.diagnose.samples import (
    Floats,
    Measured,
    best_interval,
    chance,
    noise,
    spread,
)
from megatron.adaptive.trace.read import describe_numbers
from megatron.adaptive.trace.span_columns import Ints, Mask
from megatron.adaptive.trace.whatif.operations import OPTIMIZER, REDUCE

EQUAL_WORK = ("tensor", "context")
"""Kinds of groups whose members do the same work at the same time."""

IN_STEP = (*EQUAL_WORK, "expert")
"""Kinds of groups whose members run the same actions at the same time."""

OF_STEP = 0.05
"""Minimum cost per step of a reported finding, as a fraction of the step time."""

ERRORS = 5.0
"""Minimum cost per step of a reported finding, in standard errors."""

CHANGE_SURE = 7.0
"""Minimum score, in standard errors, of a reported change during the run."""

TIMES = 1.7
"""Minimum ratio of a slow transfer's time to the time in other groups or iterations."""

FEWEST_GROUPS = 2
"""Minimum number of other groups needed for a comparison."""

_LEAST_LEFT = 0.1
"""Lower limit for the duration of an operation after the delay was subtracted from it.

The unit is the recorded duration.
"""


class SlowMember(Cause):
    """Finds ranks for which the other members of a process group wait."""

    name = "slow collective member"
    order = 25

    def find(self, evidence: Evidence, earlier: Sequence[Finding]) -> list[Finding]:
        m = evidence.measured
        groups: dict[tuple[str, tuple[int, ...]], list[JoinedCollectives]] = {}
        for joined in m.collectives:
            if joined.kind in EQUAL_WORK:
                groups.setdefault((joined.kind, joined.ranks), []).append(joined)
        findings = [
            _slow_member(m, kind, ranks, of_group) for (kind, ranks), of_group in groups.items()
        ]
        return [finding for finding in findings if finding is not None]

    def describe(self, finding: Finding) -> str:
        group = finding.detail.partition(":")[0]
        return (
            f"other {group}-parallel ranks wait {finding.delay_text} per step for {finding.culprit}"
        )

    def advise(self, finding: Finding, evidence: Evidence) -> Remedy:
        host = finding.hosts[0]
        return Remedy((f"look for other programs and throttling on {host}, or exclude it",))

    def without(self, finding: Finding, steps: RecordedSteps) -> Floats64:
        return _shortened(steps, steps.affected)


class CongestedCollectives(Cause):
    """Finds process groups whose transfers take longer than in other groups or iterations."""

    name = "congested collectives"
    order = 26

    def find(self, evidence: Evidence, earlier: Sequence[Finding]) -> list[Finding]:
        m = evidence.measured
        groups: dict[tuple[str, int, int], list[JoinedCollectives]] = {}
        for joined in m.collectives:
            kind = joined.name, len(joined.ranks), _num_hosts(m, joined)
            groups.setdefault(kind, []).append(joined)
        findings = []
        for alike in groups.values():
            medians = np.array([np.median(of.transfer_ns.min(axis=1)) for of in alike])
            findings += [
                _congestion(m, joined, np.delete(medians, number))
                for number, joined in enumerate(alike)
            ]
        return [finding for finding in findings if finding is not None]

    def describe(self, finding: Finding) -> str:
        hosts = ", ".join(dict.fromkeys(finding.hosts))
        return (
            f"{finding.detail.partition(':')[0]} of ranks {describe_numbers(finding.ranks)} "
            f"({hosts}) takes {finding.factor:.2f} times as long as others, "
            f"{finding.delay_text} more per step"
        )

    def advise(self, finding: Finding, evidence: Evidence) -> Remedy:
        hosts = list(dict.fromkeys(finding.hosts))
        if len(hosts) == 1:
            return Remedy(
                (f"look for other programs on {hosts[0]} that use its memory, bus or links",)
            )
        return Remedy(
            (
                f"check the network between {' and '.join(hosts)}, and look for other traffic",
                "place the ranks of this group on fewer machines",
            )
        )

    def without(self, finding: Finding, steps: RecordedSteps) -> Floats64:
        kind = finding.detail.partition(" ")[0]
        if kind in IN_STEP:
            return _shortened(steps, steps.affected)
        # Groups of all other kinds, such as data-parallel groups, communicate at the end of a step.
        ops = steps.operations
        at_end = np.isin(ops.kind, (OPTIMIZER, REDUCE)) & np.isin(ops.worker, steps.workers)
        return _shortened(steps, at_end)


def _shortened(steps: RecordedSteps, chosen: Mask) -> Floats64:
    """Returns the durations of all operations, with the delay subtracted from those in ``chosen``.

    Args:
        steps: Operations of recorded steps, and the finding with the delay per step.
        chosen: ``[operations]``, whether the delay affects each operation.
    """
    num_steps = max(1, len(np.unique(steps.operations.iteration)))
    workers = max(1, len(np.unique(steps.operations.worker[chosen])))
    total_s = float(steps.duration_s[chosen].sum()) / num_steps / workers
    if total_s:
        steps.duration_s[chosen] *= max(_LEAST_LEFT, 1 - steps.delay_s / total_s)
    return steps.duration_s


def _per_step(joined: JoinedCollectives, values_ns: Floats, iterations: Ints) -> Floats:
    """Returns the total time in ns of the collectives per iteration, ``[iterations, ...]``.

    Args:
        joined: Collectives of a group.
        values_ns: ``[collectives, ...]``, time in ns of each collective.
        iterations: Numbers of the iterations. The time of an iteration without collectives is 0.
    """
    totals = [
        values_ns[inside].mean(axis=0)
        if (inside := joined.iteration == number).any()
        else np.zeros(values_ns.shape[1:])
        for number in iterations.tolist()
    ]
    return np.array(totals, dtype=np.float64) * joined.per_step


def _slow_member(
    m: Measured, kind: str, ranks: tuple[int, ...], groups: Sequence[JoinedCollectives]
) -> Finding | None:
    """Returns a finding about the member of a group for which the other members wait.

    ``kind`` is the kind of the group, and ``ranks`` contains its members. ``groups`` contains the
    group's collectives, with one object per operation. If the other members wait only briefly,
    returns ``None``.
    """
    # All members leave a collective together, so the member that arrives last spends the least time
    # in it. If ranks are late at random, each of them is sometimes last, and their totals are
    # equal.
    spent_ns = np.zeros((len(m.iterations), len(ranks)))
    for joined in groups:
        if joined.operation == "broadcast":
            continue  # The sender of a broadcast does not wait for the other members.
        rows = np.searchsorted(m.iterations, joined.step_iteration)
        spent_ns[rows] += joined.step_ns
    worst = int(spent_ns.mean(axis=0).argmin())
    excess_ns = np.delete(spent_ns, worst, axis=1).min(axis=1) - spent_ns[:, worst]
    number = sum(joined.per_step for joined in groups)
    period = _period(m, excess_ns, _least_ns(m, ranks, number), 0.0)
    if period is None:
        return None
    iterations, delay_ns, sure, against = period
    return m.finding(
        [m.column[ranks[worst]]],
        iterations,
        against="peers" if against == "others" else against,
        confidence=chance(sure),
        delay_ms=delay_ns / 1e6,
        counts={"collectives": sum(len(joined.iteration) for joined in groups)},
        detail=f"{kind}: ranks {describe_numbers(ranks)} synchronize "
        f"{number_text(number, 4)} times per step",
    )


def _congestion(m: Measured, joined: JoinedCollectives, others: Floats) -> Finding | None:
    """Returns a finding if the transfers of a group take too long, and ``None`` otherwise.

    Args:
        m: Measured times of the run.
        joined: Collectives of the group.
        others: ``[groups]``, median transfer time in ns of each other group with the same
            collectives, size and number of machines.
    """
    transfer_ns = joined.transfer_ns.min(axis=1).astype(np.float64)
    series = _per_step(joined, transfer_ns, m.iterations)
    usual_ns = None
    differ_ns = 0.0
    if len(others) >= FEWEST_GROUPS:
        usual_ns = float(np.median(others)) * joined.per_step
        differ_ns = float(spread(others)) * joined.per_step
    least_ns = _least_ns(m, joined.ranks, joined.per_step)
    period = _period(m, series - (usual_ns or 0.0), least_ns, differ_ns)
    if period is None or (usual_ns is None and period[3] == "others"):
        return None
    iterations, delay_ns, sure, against = period
    inside = np.isin(m.iterations, iterations)
    if usual_ns is None or against == "history":
        usual_ns = float(np.median(series[~inside]))
    factor = float(np.median(series[inside])) / max(usual_ns, 1.0)
    if factor < TIMES:
        return None
    return m.finding(
        [m.column[rank] for rank in joined.ranks],
        iterations,
        against=against,
        confidence=chance(sure),
        factor=factor,
        delay_ms=delay_ns / 1e6,
        counts={"collectives": len(joined.iteration)},
        detail=f"{joined.name}: {number_text(joined.per_step, 4)} in a step, "
        f"{number_text(joined.size_bytes / 1024, 4)} KiB each, usual transfer "
        f"{number_text(usual_ns / max(joined.per_step, 1e-9) / 1e3, 4)} us",
    )


def _period(
    m: Measured, series_ns: Floats, least_ns: float, differ_ns: float
) -> tuple[Ints, float, float, str] | None:
    """Finds the iterations in which the transfers of a group take too long.

    Args:
        m: Measured times of the run.
        series_ns: ``[iterations]``, excess of each iteration's transfer time over the usual time in
            ns.
        least_ns: Minimum time in ns for a finding.
        differ_ns: Standard deviation in ns of the usual times of groups of the same kind.

    Returns:
        Tuple of the numbers of the iterations, the additional time in ns, the additional time in
        standard errors, and the reference of the comparison (``history`` or ``others``). If the
        additional time is too short or may be random, returns ``None``.
    """
    change = best_interval(series_ns, 0.1 * least_ns, rise=least_ns, score=CHANGE_SURE)
    if change is not None:
        return m.iterations[change.inside], change.rise, change.score, "history"
    usual_ns = float(np.median(series_ns))
    error_ns = 1.25 * max(float(spread(series_ns)), noise(series_ns)) / math.sqrt(len(series_ns))
    error_ns = max(math.hypot(error_ns, differ_ns), 0.02 * least_ns)
    if usual_ns < max(least_ns, ERRORS * error_ns):
        return None
    return m.iterations, usual_ns, usual_ns / error_ns, "others"


def _least_ns(m: Measured, ranks: Sequence[int], number: float) -> float:
    """Returns the minimum time in ns that a group must lose per step to be reported.

    Args:
        m: Measured times of the run.
        ranks: Global ranks of the group.
        number: Number of the group's collectives per step.
    """
    clocks = {m.headers[m.column[rank]].clock for rank in ranks}
    error_ns = 3 * m.clock_error_ns * number if len(clocks) > 1 else 0.0
    return max(OF_STEP * m.step, error_ns)


def _num_hosts(m: Measured, joined: JoinedCollectives) -> int:
    """Returns the number of machines on which the members of a process group run."""
    return len({m.headers[m.column[rank]].host for rank in joined.ranks})
