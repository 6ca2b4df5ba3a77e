"""Searches a trace for all causes of slow steps, and adds a cost and remedies to each finding.

The cost of a finding is the time that a step would save without the cause. It is computed by
simulating the recorded steps with ``whatif``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.adaptive.config.own_code import line_of_error
from megatron.adaptive.errors import AdaptiveError, TraceError
from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, RecordedSteps, built_in_causes
from megatron.adaptive.trace.diagnose.finding import Diagnosis, Finding
from megatron.adaptive.trace.diagnose.samples import Measured, measure, thinned
from megatron.adaptive.trace.diagnose.stage_costs import stage_costs
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.whatif.operations import (
    Graph,
    Operations,
    build_graph,
    pipelines_of,
    read_operations,
)
from megatron.adaptive.trace.whatif.replay import RuleReplay

SIMULATED = 32
"""Maximum number of iterations that are simulated to compute the cost of a finding."""

SIMULATED_SPANS = 300_000
"""Maximum total number of spans in the simulated iterations."""

MOST_RECORDED = 4
"""Maximum number of sets of simulated iterations to keep in memory for later findings."""

MOST_FINDINGS = 20
"""Maximum number of findings per cause. The number is limited, because each needs a simulation."""


def diagnose(
    run: RunTrace, iterations: Iterable[int] | None = None, own_causes: Iterable[Cause] = ()
) -> Diagnosis:
    """Finds causes of slow steps, with the affected ranks and remedies.

    Only findings that are statistically significant and large enough to matter are returned, so
    noise is not reported.

    Args:
        run: Trace of the run.
        iterations: Numbers of the iterations to use. ``None`` means all except the first, or an
            evenly spaced sample if there are too many.
        own_causes: User-defined causes to search for, in addition to the causes of this package.

    Raises:
        TraceError: A file is damaged, an iteration does not exist, there is nothing to diagnose, or
            a user-defined cause raised an error.
    """
    measured = measure(run, iterations)
    search = _Search(run, Evidence(measured, stage_costs(measured)))
    findings: list[Finding] = []
    for cause in built_in_causes():
        findings += search.find(cause, findings)
    for cause in own_causes:
        try:
            findings += search.find(cause, findings)
        except AdaptiveError:
            raise
        except Exception as error:  # The user's own class may raise any exception.
            line = line_of_error(error, type(cause))
            raise TraceError(
                f"cause {cause.name}: {line} raised {type(error).__name__}: {error}"
            ) from error
    return Diagnosis(
        findings=tuple(sorted(findings, key=lambda finding: -finding.cost_ms)),
        iterations=tuple(measured.iterations.tolist()),
        num_ranks=len(measured.headers),
        counts={"actions": measured.num_actions, "messages": len(measured.messages)},
        step_ms=measured.step / 1e6,
        notes=(*run.notes(), *_uncounted(run), *search.notes),
        pace_ns=_pace_ns(measured),
    )


def _uncounted(run: RunTrace) -> list[str]:
    """Returns a list with a note about the counters that are missing on some machines.

    Returns an empty list if no counters are missing.
    """
    names = {name for trace in run.ranks.values() for name in trace.header.uncounted}
    if not names:
        return []
    return [
        f"these counters are missing or not readable on some machines: {', '.join(sorted(names))};"
        " the diagnosis cannot use them"
    ]


class _Search:
    """Searches a run for causes, and simulates the steps of the run without each cause.

    Args:
        run: Trace of the run.
        evidence: Measured times of the run.
    """

    def __init__(self, run: RunTrace, evidence: Evidence) -> None:
        self._run = run
        self._evidence = evidence
        self._recorded: dict[tuple[int, ...], _Recorded] = {}
        self.notes: list[str] = []

    def find(self, cause: Cause, earlier: Sequence[Finding]) -> list[Finding]:
        """Returns the findings of ``cause``, with their descriptions, remedies and costs.

        Args:
            cause: Cause to search for.
            earlier: Findings of causes that have already been searched.
        """
        reported = []
        bare_findings = list(cause.find(self._evidence, earlier))
        worst = sorted(bare_findings, key=_badness)[:MOST_FINDINGS]
        if len(worst) < len(bare_findings):
            self.notes.append(
                f"{cause.name}: only the {MOST_FINDINGS} worst findings are examined; "
                f"{len(bare_findings) - MOST_FINDINGS:,} others are omitted"
            )
            bare_findings = [bare for bare in bare_findings if any(bare is each for each in worst)]
        for bare in bare_findings:
            named = replace(bare, cause=cause.name)
            remedy = cause.advise(named, self._evidence)
            finding = replace(
                named,
                description=cause.describe(named),
                advice=remedy.advice,
                partition=remedy.partition,
            )
            fraction = self._cost_fraction(cause, finding)
            if fraction is not None:
                cost_ms = fraction * self._evidence.measured.step / 1e6
                finding = replace(finding, cost_fraction=fraction, cost_ms=cost_ms)
            if cause.keeps(finding, is_simulated=fraction is not None):
                reported.append(finding)
        return reported

    def _cost_fraction(self, cause: Cause, finding: Finding) -> float | None:
        """Returns the fraction of the step time that the cause of ``finding`` costs.

        To compute it, the last affected iterations are simulated without the cause.

        Returns:
            Fraction of the step time that the cause costs, or ``None`` if the trace cannot be
            simulated.
        """
        m = self._evidence.measured
        is_inside = (m.iterations >= finding.period.first) & (m.iterations <= finding.period.last)
        chosen = m.iterations[is_inside][-SIMULATED:]
        spans = self._run.num_spans(chosen.tolist())
        try:
            recorded = self._read(tuple(thinned(chosen, spans, SIMULATED_SPANS).tolist()))
            ops = recorded.operations
            steps = RecordedSteps(self._evidence, finding, ops, ops.duration_s.copy())
            without = cause.without(finding, steps)
        except TraceError:
            return None
        after_s = float(recorded.graph.simulate([without]).mean())
        before_s = recorded.step_s
        saved_s = recorded.replay.saved_s(without)
        if saved_s is None or cause.is_rare:
            saved_s = before_s - after_s
        return max(0.0, saved_s / before_s) if before_s else 0.0

    def _read(self, iterations: tuple[int, ...]) -> _Recorded:
        if iterations not in self._recorded:
            if len(self._recorded) >= MOST_RECORDED:
                del self._recorded[next(iter(self._recorded))]
            operations = read_operations(self._run, pipelines_of(self._run), iterations)
            graph = build_graph(operations)
            self._recorded[iterations] = _Recorded(
                operations=operations,
                graph=graph,
                replay=RuleReplay(self._evidence.measured.headers[0], operations),
                step_s=float(graph.simulate([operations.duration_s]).mean()),
            )
        return self._recorded[iterations]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Recorded:
    """Contains recorded steps, prepared for simulation with other durations.

    Attributes:
        operations: Operations of the steps.
        graph: Dependencies between these operations.
        replay: Simulation of the steps under the run's scheduling rule.
        step_s: Mean time in seconds of a step, simulated with the recorded durations.
    """

    operations: Operations
    graph: Graph
    replay: RuleReplay
    step_s: float


def _badness(finding: Finding) -> tuple[float, float]:
    """Returns the key for sorting findings so that the worst come first."""
    return -(finding.delay_ms or 0.0), -(finding.factor or 0.0)


def _pace_ns(m: Measured) -> tuple[float, ...]:
    """Returns each rank's time in ns per microbatch, divided by its planned work in layers.

    Returns an empty result if the planned work of any rank is unknown.
    """
    planned = m.work or m.layers
    works = [sum(planned[stage] for stage in stages) if planned else 0 for stages in m.stages]
    if not all(work > 0 for work in works):
        return ()
    return tuple(float(time) / work for time, work in zip(m.microbatch_ns, works, strict=True))
