"""The whole diagnosis of a run: every test, and what to do about what they find."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.trace.diagnose.causes import (
    StageCosts,
    best_partition,
    find_slow_links,
    find_slow_ranks,
    find_slow_reading,
    find_spikes,
    stage_costs,
)
from megatron.adaptive.trace.diagnose.finding import Diagnosis, Finding
from megatron.adaptive.trace.diagnose.measured import Measured, measure
from megatron.adaptive.trace.read import RunTrace

__all__ = ["diagnose"]

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
    found += find_spikes(measured)
    if not any(f.period.kind in ("lasting", "begun") for f in slow) and times is not None:
        found += _uneven(measured, times)
    advised = [_advise(measured, times, finding) for finding in found]
    return Diagnosis(
        findings=tuple(sorted(advised, key=lambda finding: -finding.cost_ms)),
        iterations=tuple(measured.iterations.tolist()),
        num_ranks=len(measured.places),
        counts={"actions": measured.num_actions, "messages": len(measured.messages)},
        step_ms=measured.step / 1e6,
        notes=tuple(run.notes()),
        pace_ns=_pace_ns(measured),
    )


def _pace_ns(m: Measured) -> tuple[float, ...]:
    """Returns each rank's time for a microbatch, by the work that it should have."""
    held = m.work or m.layers
    works = [sum(held[stage] for stage in place.stages) if held else 0 for place in m.places]
    if not all(work > 0 for work in works):
        return ()
    return tuple(float(takes) / work for takes, work in zip(m.microbatch_ns, works, strict=True))


def _uneven(m: Measured, times: StageCosts) -> list[Finding]:
    """Stages that have more work than others by the partition itself."""
    better = best_partition(times, sum(m.layers))
    pace, best = times.pace_ns(m.layers), times.pace_ns(better)
    if pace <= 0 or 1 - best / pace < UNEVEN:
        return []
    stages = np.asarray(m.layers) * times.layer_ns + times.beside_ns
    ranks = np.bincount(times.rank_of, weights=stages)
    worst = int(np.argmax(ranks))
    columns = [number for number, place in enumerate(m.places) if place.pp_rank == worst]
    finding = m.finding(
        "uneven stages",
        columns,
        m.iterations,
        "lasting",
        against="others",
        confidence=0.95,
        factor=float(ranks[worst] / np.median(np.delete(ranks, worst))) if len(ranks) > 1 else 1.0,
        counts={"actions": m.num_actions},
        detail=f"layers {format_partition(m.layers)}",
        cost_ns=(pace - best) * m.num_microbatches,
    )
    return [finding]


def _advise(m: Measured, times: StageCosts | None, finding: Finding) -> Finding:
    """Add what to do."""
    advice: list[str] = []
    partition: tuple[int, ...] = ()
    hosts = " and ".join(sorted(set(finding.hosts)))
    if finding.cause in ("slow rank", "uneven stages"):
        if times is not None and finding.period.kind != "passed":
            better = best_partition(times, sum(m.layers))
            gain = 1 - times.pace_ns(better) / max(1.0, times.pace_ns(m.layers))
            if gain >= WORTH_MOVING:
                partition = better
                advice.append(
                    f"move layers, --partition {format_partition(better)} instead of "
                    f"{format_partition(m.layers)}: a pace {gain:.0%} quicker"
                )
        elif times is None:
            advice.append(f"give stage {finding.stages[0]} fewer layers (--partition)")
        if finding.cause == "slow rank":
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
    else:
        advice += [
            "choose the order at run time (--pipeline-schedule adaptive), which fills such gaps",
            f"look for other programs on {hosts}",
        ]
    return replace(finding, advice=tuple(advice), partition=partition)
