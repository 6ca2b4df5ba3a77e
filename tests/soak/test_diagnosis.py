"""Tests the synthetic runs and the verdicts of ``tests.soak.diagnosis``."""

from typing import Any

from megatron.adaptive.trace.diagnose import Diagnosis, Finding
from megatron.adaptive.trace.diagnose.finding import Period
from tests.soak import diagnosis as trace
from tests.soak.tracing import cases
from tests.soak.tracing.cases import Outcome, judge
from tests.support.synthetic_trace import Fault


def finding(cause: str, *ranks: int) -> Finding:
    return Finding(
        cause=cause,
        ranks=ranks,
        stages=(0,),
        hosts=("here",) * len(ranks),
        period=Period(first=1, last=9),
        against="plan",
        confidence=0.9,
        factor=1.3,
    )


def diagnosis(*findings: Finding) -> Diagnosis:
    return Diagnosis(findings=findings, iterations=(1,), num_ranks=4, counts={}, step_ms=1.0)


def test_the_dearest_finding_has_to_be_right() -> None:
    fault = Fault(kind="slow-link", rank=1, to=2, seconds=0.1)
    right, wrong = finding("slow link", 1, 2), finding("slow link", 2, 1)
    case: dict[str, Any] = {"head": 0.0}
    assert judge("link delay", fault, diagnosis(right, wrong), case).right
    assert not judge("link delay", fault, diagnosis(wrong, right), case).right
    assert not judge("link delay", fault, diagnosis(), case).right
    assert judge("quiet", None, diagnosis(), case).right
    uneven = diagnosis(finding("uneven stages", 3))
    assert not judge("quiet", None, uneven, case).right
    assert judge("quiet", None, uneven, {"head": 1.0}).right


def test_rates_and_goals() -> None:
    def outcome(group: str, right: bool) -> Outcome:
        return Outcome(group, "", (), right, 0, {"number": 1})

    outcomes = [outcome("rank x2", True)] * 19 + [outcome("spikes", False)]
    outcomes += [outcome("rank x1.1", True)] * 3 + [outcome("rank x1.1", False)]
    outcomes += [outcome("quiet", True)] * 49 + [outcome("quiet", False)]
    strong, weak, quiet = trace._rates("made-up", outcomes)
    assert (strong.value, strong.met) == (0.95, True)
    assert (weak.value, weak.met) == (0.75, False)
    assert (quiet.value, quiet.met) == (0.02, True)


def test_a_few_runs_end_to_end() -> None:
    outcomes = list(cases.outcomes(2, 0, ["rank x2", "link delay"]))
    assert [o.group for o in outcomes] == ["rank x2"] * 2 + ["link delay"] * 2
    assert all(o.right for o in outcomes), outcomes
