"""Finds ranks on which single actions take much longer than usual.

An action is compared with the same action in other microbatches or iterations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, Floats64, RecordedSteps, Remedy
from megatron.adaptive.trace.diagnose.finding import Finding
from megatron.adaptive.trace.diagnose.samples import Floats, Measured, chance, middle, spread
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS


class Spikes(Cause):
    """Finds ranks on which single actions occasionally take much longer than usual."""

    name = "spikes"
    order = 40
    is_rare = True

    def find(self, evidence: Evidence, earlier: Sequence[Finding]) -> list[Finding]:
        return find_spikes(evidence.measured)

    def describe(self, finding: Finding) -> str:
        return f"some actions of {finding.culprit} take {finding.delay_text} longer"

    def without(self, finding: Finding, steps: RecordedSteps) -> Floats64:
        ops, duration_s = steps.operations, steps.duration_s
        for chunk in range(steps.evidence.measured.num_chunks):
            for kind in range(len(DRAWN_ACTIONS)):
                rows = np.flatnonzero(steps.affected & (ops.chunk == chunk) & (ops.kind == kind))
                usual = float(np.median(duration_s[rows])) if len(rows) else 0.0
                duration_s[rows[duration_s[rows] > math.exp(SPIKE_LEAST) * usual]] = usual
        return duration_s

    def advise(self, finding: Finding, evidence: Evidence) -> Remedy:
        hosts = " and ".join(sorted(set(finding.hosts)))
        search = f"look for other programs on {hosts}"
        if evidence.is_ordered_at_run_time:
            more = f"allow more microbatches in flight ({evidence.settings.more_in_flight})"
            return Remedy((search, f"{more}, so that waiting ranks can run other actions"))
        return Remedy(
            (
                f"choose the order at run time ({evidence.settings.at_run_time}), so that waiting "
                "ranks can run other actions",
                search,
            )
        )


SPIKE_LEAST = math.log(1.4)
"""Minimum ratio of a spike's duration to the action's usual duration, as a logarithm."""

SPIKE_SPREADS = 5.0
"""Minimum difference between a spike's and a usual duration, in standard deviations."""

SPIKE_FEWEST = 4
"""Minimum number of spikes to report. Fewer spikes may be random."""

SPIKE_MOST = 0.25
"""Maximum fraction of slow actions on a rank. If more are slow, they are not spikes."""

SPIKE_BACKGROUND = 1e-3
"""Prior rate of spikes per action on any rank. The prior has the weight of one observed spike."""

SPIKE_RARE = 3e-4
"""Maximum probability that the spikes of a reported rank are random."""

SPIKE_OF_STEP = 0.003
"""Minimum fraction of the step time that spikes must cost to be reported."""

MOST_WITH_ALL = 3
"""Maximum number of ranks in a run for which each rank is compared with all other ranks.

In larger runs, the other rank with the most spikes is excluded from the comparison.
"""

FEW_MICROBATCHES = 4
"""Minimum number of microbatches per step for comparing actions within a single iteration.

With fewer microbatches, actions are compared across all iterations.
"""

OF_PARTIAL = 3
"""Minimum number of ranks in a pipeline to distinguish long microbatches from spikes of a rank."""


def find_spikes(m: Measured) -> list[Finding]:
    """Returns findings for ranks on which slow actions are more frequent than on other ranks."""
    odd = _oddness(m)
    of_rank = np.moveaxis(odd, 1, 0).reshape(len(m.headers), -1)
    widths = spread(of_rank, axis=1)
    if not np.isfinite(widths).any():
        return []
    # Use a higher threshold for ranks whose times vary a lot.
    limits = np.maximum(SPIKE_LEAST, SPIKE_SPREADS * np.fmax(widths, np.nanmedian(widths)))
    totals = np.isfinite(of_rank).sum(axis=1).tolist()
    counts = (of_rank > limits[:, None]).sum(axis=1).tolist()
    ordered = sorted(range(len(counts)), key=lambda other: (counts[other], totals[other]))
    all_spikes, all_actions = sum(counts), sum(totals)
    findings = []
    for column, (count, total) in enumerate(zip(counts, totals, strict=True)):
        if count < SPIKE_FEWEST or count > SPIKE_MOST * total:
            continue
        seen, actions = 1 + all_spikes - count, all_actions - total
        if len(counts) > MOST_WITH_ALL:
            # Exclude the other rank with the most spikes, because it may also be faulty.
            worst = ordered[-1] if ordered[-1] != column else ordered[-2]
            seen, actions = seen - counts[worst], actions - totals[worst]
        part = total / (1 / SPIKE_BACKGROUND + actions)
        rare = _tail(count, seen, part) < SPIKE_RARE / len(counts)
        finding = _spikes(m, odd[:, column], column, limits[column], seen * part) if rare else None
        if finding is not None:
            findings.append(finding)
    return findings


def _oddness(m: Measured) -> Floats:
    """Returns the logarithm of the ratio of each action's duration to its usual duration.

    If the pipeline has enough ranks, the additional time that a microbatch takes on all ranks is
    subtracted, because it means that the microbatch is large, not that a rank is slow.

    Returns:
        Array ``[iterations, ranks, chunks, 3, microbatches]``.
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
        [column],
        m.iterations[np.unique(np.nonzero(hit)[0])],
        kind="spikes",
        against="others",
        confidence=chance((count - expected) / math.sqrt(count + expected + 1)),
        delay_ms=float(np.median(extra)) / 1e6,
        counts={"spikes": count},
        detail=f"{count / int(np.isfinite(odd).sum()):.1%} of its actions, "
        f"which take {float(np.exp(np.median(odd[hit]))):.2f} times the usual time",
    )


def _tail(count: int, seen: float, part: float) -> float:
    """Returns the probability that at least ``count`` spikes occur on a rank by chance.

    The distribution is negative binomial, because the rate of spikes is estimated from other ranks.

    Args:
        count: Number of spikes on the rank.
        seen: Number of spikes on the ranks used for comparison, plus one for the prior.
        part: Number of actions on the rank divided by the number of actions on the other ranks,
            including the prior.
    """
    below = 0.0
    log_probability = -seen * math.log1p(part)
    for number in range(count):
        below += math.exp(log_probability)
        log_probability += math.log((seen + number) / (number + 1) * part / (1 + part))
    return max(0.0, 1 - below)
