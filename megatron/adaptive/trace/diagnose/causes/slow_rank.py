"""Finds ranks whose actions take longer than expected.

``baselines`` compares each rank with its peers, with the plan and with its earlier iterations. If
the most likely slowdown is significant and large enough to matter, it is reported and subtracted
from the data. Then the search is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron.adaptive.trace.diagnose.baselines import RankBaselines, Shift, rank_baselines
from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, Floats64, RecordedSteps, Remedy
from megatron.adaptive.trace.diagnose.finding import Finding
from megatron.adaptive.trace.diagnose.machine_reasons import reasons_of, starved
from megatron.adaptive.trace.diagnose.samples import Floats, Measured, chance, noise
from megatron.adaptive.trace.read import describe_numbers


class SlowRankCause(Cause):
    """Finds ranks on which all actions take longer than expected."""

    name = "slow rank"
    order = 10

    def find(self, evidence: Evidence, earlier: Sequence[Finding]) -> list[Finding]:
        layers = [finding for finding in earlier if finding.cause == "slow layer"]
        return [
            finding
            for finding in one_of_each_group(evidence.measured, find_slow_ranks(evidence.measured))
            if not any(_is_of_layer(evidence.measured, finding, layer) for layer in layers)
        ]

    def describe(self, finding: Finding) -> str:
        if len(finding.ranks) == 1:
            return super().describe(finding)
        hosts = ", ".join(dict.fromkeys(finding.hosts))
        return (
            f"one of ranks {describe_numbers(finding.ranks)} ({finding.stages_text}, {hosts}), "
            f"which share every layer, takes {finding.factor:.2f} times as long"
        )

    def without(self, finding: Finding, steps: RecordedSteps) -> Floats64:
        steps.duration_s[steps.affected] /= finding.factor or 1.0
        return steps.duration_s

    def advise(self, finding: Finding, evidence: Evidence) -> Remedy:
        remedy = evidence.move_layers(finding)
        advice = [*remedy.advice]
        if finding.reason:
            advice.insert(0, finding.reason.remedy)
        hosts = " and ".join(sorted(set(finding.hosts)))
        has_replicas = len({header.dp_rank for header in evidence.measured.headers}) > 1
        if has_replicas and evidence.settings.slow_replica:
            advice.append("assign fewer microbatches to its replica (--balance-replicas speed)")
        if not finding.reason:
            advice.append(f"look for other programs and throttling on {hosts}, or exclude it")
        return Remedy(tuple(advice), remedy.partition)


SLOW = math.log(1.05)
"""Minimum slowdown to report, as a logarithm. Smaller differences are common between machines."""

SURE = 3.2
"""Minimum slowdown to report, in standard errors. Noise rarely reaches this value."""

QUICKER = 0.7
"""Minimum ratio of the evidence for a slow rank to the evidence for an unusually fast rank.

Below this ratio, the fast rank is considered the exception, and the other ranks only appear slow in
comparison.
"""

AGREE = 0.4
"""Minimum slowdown of each kind of action (F, B, W), as a fraction of the rank's slowdown.

If one kind is slowed down less, the slowdown is attributed to noise and not reported.
"""

OWN_CHANGE = 0.5
"""Minimum fraction of a temporary slowdown that must appear in the times of the rank itself.

The rest may come from changes on the ranks with which the rank is compared.
"""

OF_LAYER = 0.5
"""Minimum fraction of a slow rank's lost time that a slow layer must explain to be the cause."""

HOLDS_UP = 2.0
"""Minimum ratio of the time that a group waits for a slow rank to its wait for any other member."""

MOST_FOUND = 20
"""Maximum number of slow ranks to report."""

BRIEF_S = 1.0
"""Time in seconds for which a rank may be slower without a fault.

Even on a machine without other programs, the speed of a processor can change by up to 30% for some
tenths of a second.
"""

BRIEF_FACTOR = 1.5
"""Minimum factor to report a slowdown that is shorter than :data:`BRIEF_S` and unexplained."""


def _is_of_layer(m: Measured, finding: Finding, layer: Finding) -> bool:
    """Returns whether the slow layer in ``layer`` explains why the rank in ``finding`` is slow."""
    if finding.ranks != layer.ranks:
        return False
    lost_ns = float(m.microbatch_ns[m.column[finding.ranks[0]]]) * (
        1 - 1 / max(1.0, finding.factor or 1.0)
    )
    return (layer.delay_ms or 0.0) * 1e6 >= OF_LAYER * lost_ns


def find_slow_ranks(m: Measured) -> list[Finding]:
    """Returns findings for ranks whose actions take longer than expected, slowest first."""
    baselines = rank_baselines(m)
    with np.errstate(divide="ignore"):
        # Logarithm of each rank's computing time per microbatch, [iterations, ranks].
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
            finding = _slow_rank(m, baselines, slow)
            if finding.reason or (finding.factor or 0) >= _least_factor(m, slow):
                findings.append(finding)
        baselines.remove(slow)
        if slow.end - slow.first == len(m.iterations):
            baselines.distrust(slow.column)
    return sorted(findings, key=lambda finding: -(finding.factor or 0))


def _least_factor(m: Measured, shift: Shift) -> float:
    """Returns the minimum slowdown to report for a rank, if no reason for it is known."""
    chosen = slice(shift.first, shift.end)
    # If ranks wait for a processor most of the time, the differences between their times are
    # random.
    least = 1 / (1 - starved(m, shift.column, chosen))
    is_brief = m.step_ns[chosen].sum() < BRIEF_S * 1e9
    return max(least, BRIEF_FACTOR) if is_brief else least


def one_of_each_group(m: Measured, findings: Sequence[Finding]) -> list[Finding]:
    """Combines the findings for slow ranks of each tensor-parallel group into one finding.

    The ranks of a group share each layer. If one rank is slow, the other ranks wait for it during
    their actions, so all of them seem slow. The combined finding names the rank whose machine
    provides a reason or, if there is none, the rank for which the others wait in collectives. If
    neither is known, the finding names all slow ranks of the group.
    """
    groups: dict[tuple[int, int, int, int], list[Finding]] = {}
    for finding in findings:
        header = m.headers[m.column[finding.ranks[0]]]
        period = finding.period
        key = header.pp_rank, header.dp_rank, period.first, period.last
        groups.setdefault(key, []).append(finding)
    merged = []
    for alike in groups.values():
        explained = [finding for finding in alike if finding.reason is not None]
        if len(alike) == 1 or explained:
            merged += explained or alike
            continue
        ranks = tuple(sorted(finding.ranks[0] for finding in alike))
        last = _last_member(m, ranks)
        if last is not None:
            merged += [finding for finding in alike if finding.ranks == (last,)]
            continue
        hosts = tuple(m.headers[m.column[rank]].host for rank in ranks)
        merged.append(replace(alike[0], ranks=ranks, hosts=hosts))
    return sorted(merged, key=lambda finding: -(finding.factor or 0))


def _last_member(m: Measured, ranks: tuple[int, ...]) -> int | None:
    """Returns the rank for which the other ranks wait in collectives, or ``None`` if unknown.

    Args:
        m: Measured times of the run.
        ranks: Global ranks of a tensor-parallel group that are slow.
    """
    held_ns: dict[int, float] = dict.fromkeys(ranks, 0.0)
    for joined in m.collectives:
        if joined.kind == "tensor" and set(ranks) <= set(joined.ranks):
            means = joined.per_step_ns(joined.held_up_ns).mean(axis=0)
            for rank, mean in zip(joined.ranks, means.tolist(), strict=True):
                held_ns[rank] = held_ns.get(rank, 0.0) + mean
    *others, most = sorted(held_ns, key=lambda rank: held_ns[rank])
    is_clear = held_ns[most] >= HOLDS_UP * max((held_ns[rank] for rank in others), default=0.0)
    return most if most in ranks and held_ns[most] > 0 and is_clear else None


def _quickest(baselines: RankBaselines, judged: set[int]) -> Shift | None:
    """Returns the deviation of the rank that is most clearly faster than expected, or ``None``.

    Skips the ranks whose indices are in ``judged``. The caller stops using the fast rank as a
    reference, because all other ranks would seem slow in comparison.
    """
    sizes, errors = baselines.errors()
    count, ranks = baselines.series.shape
    doubt = SURE**2 + 2 * math.log(max(1.0, ranks / 4))
    evidence = np.where(sizes <= -SLOW, (sizes / errors) ** 2, -np.inf)
    evidence[list(judged)] = -np.inf
    column = int(evidence.argmax())
    if evidence[column] <= doubt:
        return None
    return Shift(column, 0, count, float(sizes[column]), float(errors[column]), doubt)


def _is_real(baselines: RankBaselines, shift: Shift, log_work: Floats) -> bool:
    """Returns whether the slowdown ``shift`` appears in all actions and in the rank's own times.

    If it does not, it is caused by other ranks or by noise. ``log_work`` contains the
    logarithm of the rank's computing time in each iteration.
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
    finding = m.finding(
        [column],
        m.iterations[chosen],
        against=("peers" if peers else "plan") if lasting else "history",
        confidence=chance((shift.size - SLOW / 2) / shift.error),
        factor=math.exp(shift.size),
        counts={"actions": int(np.isfinite(m.action_ns[chosen, column]).sum())},
        detail=f"{detail} the expected time",
    )
    reasons = reasons_of(m, column, chosen, math.exp(shift.size))
    if not reasons:
        return finding
    return replace(finding, reason=reasons[0], more_reasons=tuple(reasons[1:]))
