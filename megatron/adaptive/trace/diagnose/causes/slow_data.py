"""Finds ranks that lose time reading training data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, Floats64, RecordedSteps, Remedy
from megatron.adaptive.trace.diagnose.finding import Finding
from megatron.adaptive.trace.diagnose.machine_reasons import reading_reason, starved
from megatron.adaptive.trace.diagnose.samples import Measured, best_interval, chance, middle, noise
from megatron.adaptive.trace.whatif.operations import FORWARD


class SlowData(Cause):
    """Finds ranks that read the data of a microbatch slowly."""

    name = "slow data"
    order = 30

    def find(self, evidence: Evidence, earlier: Sequence[Finding]) -> list[Finding]:
        return find_slow_reading(evidence.measured)

    def describe(self, finding: Finding) -> str:
        return f"{finding.culprit} takes {finding.delay_text} longer to read each microbatch"

    def without(self, finding: Finding, steps: RecordedSteps) -> Floats64:
        ops, duration_s = steps.operations, steps.duration_s
        ends = np.isin(ops.stage, (0, ops.where.num_stages - 1))
        reads = steps.affected & (ops.kind == FORWARD) & ends
        duration_s[reads] = np.maximum(duration_s[reads] - steps.delay_s, 0)
        return duration_s

    def advise(self, finding: Finding, evidence: Evidence) -> Remedy:
        readers = evidence.settings.readers
        advice = [f"read data with more processes ({readers}), or from a faster disk"]
        if finding.reason:
            advice.insert(0, finding.reason.remedy)
        return Remedy(tuple(advice))


READING_OF_STEP = 0.03
"""Minimum fraction of the step time that a rank must spend reading data to be reported."""

READING_TIMES = 1.5
"""Minimum ratio of a slow read's duration to the duration on other ranks or in other iterations."""

READING_CHANGE_SURE = 6.0
"""Minimum score, in standard errors, of a reported change in read times during the run."""


READING_SURE = 3.0
"""Minimum difference between the durations of slow and usual reads, in standard errors."""

READS_FEWEST = 16
"""Minimum number of data reads by a rank that is examined."""

READING_ITERATIONS = 4
"""Minimum number of iterations in which an examined rank must have read data."""


def find_slow_reading(m: Measured) -> list[Finding]:
    """Returns findings for ranks that lose time reading training data, worst first."""
    each = np.where(m.reads > 0, m.read_ns / np.maximum(1, m.reads), np.nan)
    shares = m.read_ns / np.maximum(1, m.step_ns)[:, None]
    levels = middle(each, axis=0)
    fastest = np.sort(levels[np.isfinite(levels)])[:2].tolist()
    findings = []
    for column in np.flatnonzero(np.isfinite(levels)).tolist():
        chosen = np.flatnonzero(each[:, column] > 0)
        if len(chosen) < READING_ITERATIONS or m.reads[chosen, column].sum() < READS_FEWEST:
            continue
        # Compare with the fastest rank, because a shared disk may slow down most ranks.
        others = fastest[1:] if levels[column] == fastest[0] else fastest[:1]
        before = min(others, default=0.0)
        against = "others" if others else "plan"
        series = each[chosen, column]
        change = best_interval(
            np.log(series), 0.05, rise=math.log(READING_TIMES), score=READING_CHANGE_SURE
        )
        if change is not None:
            before = float(np.median(np.delete(series, change.inside)))
            against = "history"
            chosen, series = chosen[change.inside], series[change.inside]
        level, share = float(np.median(series)), float(np.median(shares[chosen, column]))
        # If a rank must wait for a processor, its reads take long even if the disk is fast.
        ready = 1 - starved(m, column, chosen)
        if share * ready < READING_OF_STEP or level * ready < READING_TIMES * before:
            # A rank that spends twice the minimum fraction on reading is reported even if all ranks
            # read equally slowly. In this case, the whole read time is its delay.
            if share * ready < 2 * READING_OF_STEP:
                continue
            before = 0.0
        excess = level - before
        error = 1.25 * noise(series) / math.sqrt(len(series)) + 0.1 * level
        if excess < READING_SURE * error:
            continue
        finding = m.finding(
            [column],
            m.iterations[chosen],
            against=against,
            confidence=chance(excess / error),
            delay_ms=excess / 1e6,
            counts={"reads": int(m.reads[chosen, column].sum())},
            detail=f"one read takes {number_text(level / 1e6)} ms, all reads take {share:.1%} of "
            "the step",
        )
        findings.append(replace(finding, reason=reading_reason(m, column, chosen)))
    return sorted(findings, key=lambda finding: -(finding.delay_ms or 0))
