"""Finds ranks whose experts receive so many tokens that other ranks have to wait."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron.adaptive.trace.diagnose.cause import (
    WORTH_REPORTING,
    Cause,
    Evidence,
    Floats64,
    RecordedSteps,
    Remedy,
)
from megatron.adaptive.trace.diagnose.finding import Finding
from megatron.adaptive.trace.diagnose.samples import Measured, chance, noise
from megatron.adaptive.trace.trace_format import IterationStart


class OverloadedExperts(Cause):
    """Finds ranks whose experts receive many more tokens than the mean over ranks."""

    name = "overloaded experts"
    order = 50

    def find(self, evidence: Evidence, earlier: Sequence[Finding]) -> list[Finding]:
        return find_overloaded_experts(evidence.measured)

    def keeps(self, finding: Finding, *, is_simulated: bool) -> bool:
        return finding.cost_fraction >= WORTH_REPORTING

    def describe(self, finding: Finding) -> str:
        return f"{finding.culprit} has {finding.factor:.2f} times the mean number of tokens"

    def without(self, finding: Finding, steps: RecordedSteps) -> Floats64:
        # All ranks with the same pipeline rank wait for the overloaded rank, so all of them would
        # be faster without the cause.
        m = steps.evidence.measured
        column = m.column[finding.ranks[0]]
        workers = steps.workers_at(m.headers[column].pp_rank)
        faster = steps.computes & np.isin(steps.operations.worker, workers)
        steps.duration_s[faster] *= max(
            0.0, 1 - steps.delay_s * 1e9 / max(1.0, float(m.microbatch_ns[column]))
        )
        return steps.duration_s

    def advise(self, finding: Finding, evidence: Evidence) -> Remedy:
        return Remedy(
            (
                "balance the router with a larger --moe-aux-loss-coeff, or with "
                "--moe-router-enable-expert-bias and --moe-router-score-function sigmoid",
                "limit the tokens of each expert (--moe-expert-capacity-factor 1.25), which drops "
                "tokens above the limit",
            )
        )


OVERLOADED = 1.1
"""Minimum ratio of an overloaded rank's number of tokens to the mean over ranks."""

OVERLOAD_ERRORS = 3.0
"""Minimum additional waiting time of the other ranks, in standard errors, to report the overload.
"""


def find_overloaded_experts(m: Measured) -> list[Finding]:
    """Returns findings for ranks whose experts receive so many tokens that other ranks wait.

    Ranks are compared if the experts of the same layers are divided among them. The rank with the
    most tokens is the last to reach the all-to-all exchange after the experts, where the other
    ranks wait for it. The cost is how much longer the other ranks wait than the overloaded rank,
    but at most the time that the overloaded rank needs for its additional tokens.
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
            continue  # Every rank has all experts of these layers, so no rank waits.
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
        # The time for the additional tokens is at most their fraction of the rank's computing time.
        explained = m.num_microbatches * float(m.microbatch_ns[column]) * (1 - 1 / share)
        excess = min(excess, explained)
        least = max(OVERLOAD_ERRORS * error, WORTH_REPORTING * m.step)
        if share < OVERLOADED or excess < least:
            continue
        finding = m.finding(
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
    """Returns (layer index, index of first expert, number of experts) per layer in ``marker``."""
    return tuple((layer, first, len(counts)) for layer, first, *counts in marker.tokens)
