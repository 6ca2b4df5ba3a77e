"""Finds stages that take longer than others because the layers are divided unevenly.

``stage_costs`` computes the best partition of layers for the measured speeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.trace.diagnose.cause import (
    WORTH_REPORTING,
    Cause,
    Evidence,
    Floats64,
    RecordedSteps,
    Remedy,
)
from megatron.adaptive.trace.diagnose.finding import Finding
from megatron.adaptive.trace.diagnose.machine_reasons import starved
from megatron.adaptive.trace.diagnose.samples import Measured
from megatron.adaptive.trace.diagnose.stage_costs import StageCosts, best_partition

UNEVEN = 0.10
"""Minimum fraction of the slowest rank's time that another partition must save.

If it would save less, uneven stages are not reported.
"""


class UnevenStages(Cause):
    """Finds pipelines whose partition of layers into stages does not match the ranks' speeds."""

    name = "uneven stages"
    order = 60

    def find(self, evidence: Evidence, earlier: Sequence[Finding]) -> list[Finding]:
        # Stages may be uneven only because a rank or a layer is slow.
        is_slow = any(
            finding.cause in ("slow rank", "slow layer")
            and finding.period.kind in ("lasting", "begun")
            for finding in earlier
        )
        if is_slow or evidence.times is None:
            return []
        m = evidence.measured
        return [
            finding
            for finding in find_uneven_stages(m, evidence.times)
            # If ranks wait for a processor most of the time, the differences between their times
            # are random.
            if (finding.factor or 0)
            >= 1 / (1 - max(starved(m, m.column[rank], slice(None)) for rank in finding.ranks))
        ]

    def keeps(self, finding: Finding, *, is_simulated: bool) -> bool:
        return finding.cost_fraction >= WORTH_REPORTING or not is_simulated

    def describe(self, finding: Finding) -> str:
        verb = "take" if len(finding.stages) > 1 else "takes"
        return f"{finding.stages_text} {verb} {finding.factor:.2f} times as long"

    def without(self, finding: Finding, steps: RecordedSteps) -> Floats64:
        return steps.with_partition(finding.partition)

    def advise(self, finding: Finding, evidence: Evidence) -> Remedy:
        return evidence.move_layers(finding)


def find_uneven_stages(m: Measured, times: StageCosts) -> list[Finding]:
    """Returns a finding if another partition of the layers would make the slowest rank faster.

    The difference must be at least the fraction :data:`UNEVEN`.
    """
    better = best_partition(times, sum(m.layers))
    ranks = times.rank_ns(m.layers)
    best = times.rank_ns(better).max()
    if ranks.max() <= 0 or 1 - best / ranks.max() < UNEVEN:
        return []
    worst = int(np.argmax(ranks))
    columns = [column for column, header in enumerate(m.headers) if header.pp_rank == worst]
    finding = m.finding(
        columns,
        m.iterations,
        against="others",
        confidence=0.95,
        factor=float(ranks[worst] / np.median(np.delete(ranks, worst))) if len(ranks) > 1 else 1.0,
        counts={"actions": m.num_actions},
        detail=f"layers {format_partition(m.layers)}",
    )
    return [finding]
