"""Finds machines on which all ranks wait, for example because other programs use the processors.

All ranks on such a machine are equally slow, so the cause cannot be found by comparing them with
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, Floats64, RecordedSteps, Remedy
from megatron.adaptive.trace.diagnose.finding import Finding
from megatron.adaptive.trace.diagnose.machine_reasons import COUNTS, reason_by, waits_of
from megatron.adaptive.trace.diagnose.samples import Floats, Measured, best_interval, chance, noise

SURE = 3.2
"""Minimum increase of the waiting time to report an interval of the run, in standard errors."""

MOST_OF = 0.75
"""Minimum fraction of iterations in which ranks must wait for the waits to count as permanent."""

LEAST_NOISE = 0.005
"""Minimum standard deviation assumed for the noise, as a fraction of an iteration."""

LEAST_BUSY = 0.1
"""Lower limit for the computing time without waits, as a fraction of the computing time."""


class BusyMachineCause(Cause):
    """Finds machines on which all ranks wait for processors or memory, or are stopped by quotas."""

    name = "busy machine"
    order = 40

    def find(self, evidence: Evidence, earlier: Sequence[Finding]) -> list[Finding]:
        m = evidence.measured
        explained = [f for f in earlier if f.cause == "slow rank" and f.reason is not None]
        named = {rank for finding in explained for rank in finding.ranks}
        hosts: dict[str, list[int]] = {}
        for column, header in enumerate(m.headers):
            if header.rank not in named:
                hosts.setdefault(header.host, []).append(column)
        findings = [_busy_machine(m, columns) for columns in hosts.values()]
        return [finding for finding in findings if finding is not None]

    def describe(self, finding: Finding) -> str:
        hosts = " and ".join(dict.fromkeys(finding.hosts))
        return f"something keeps the ranks on {hosts} from computing"

    def advise(self, finding: Finding, evidence: Evidence) -> Remedy:
        return Remedy((finding.reason.remedy,) if finding.reason else ())

    def without(self, finding: Finding, steps: RecordedSteps) -> Floats64:
        steps.duration_s[steps.affected] /= finding.factor or 1.0
        return steps.duration_s


def _busy_machine(m: Measured, columns: Sequence[int]) -> Finding | None:
    """Returns a finding if the ranks on a machine often wait, for example for processors or memory.

    Otherwise returns ``None``. ``columns`` contains the indices of all ranks on the machine.
    """
    for counter, series in waits_of(m, columns):
        period = _period(series)
        if period is None:
            continue
        chosen, kind = period
        busy_ns = float(np.nansum(m.action_ns[chosen][:, columns].astype(np.float64)))
        waited_ns = float(np.nansum(m.machine[counter][chosen][:, columns]))
        finding = m.finding(
            columns,
            m.iterations[chosen],
            against="others" if kind == "lasting" else "history",
            confidence=chance(float(np.mean(series[chosen])) / max(1e-3, noise(series))),
            factor=busy_ns / max(busy_ns - waited_ns, LEAST_BUSY * busy_ns),
            kind=kind,
        )
        return replace(finding, reason=reason_by(m, counter, columns, chosen))
    return None


def _period(series: Floats) -> tuple[slice, str | None] | None:
    """Returns the iterations in which ranks wait, and the kind of this period.

    Args:
        series: ``[iterations]``, fraction of each iteration that the ranks waited.

    Returns:
        Tuple of a slice of the iterations in which ranks wait, and the kind of the :class:`Period`.
        The kind is ``None`` if the slice is only a part of the run. If ranks hardly ever wait,
        returns ``None`` instead of the tuple.
    """
    everything = slice(0, len(series))
    if len(series) and float(np.mean(series >= COUNTS)) >= MOST_OF:
        return everything, "lasting"
    interval = best_interval(series, LEAST_NOISE, rise=COUNTS, score=SURE)
    if interval is not None:
        return interval.inside, None
    if len(series) and float(np.mean(series)) >= COUNTS:
        return everything, "spikes"
    return None
