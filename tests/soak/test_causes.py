"""Tests that the diagnosis reports causes that are planted in real jobs."""

from __future__ import annotations

import os

import pytest

from megatron.adaptive.trace.diagnose import Finding
from megatron.adaptive.trace.diagnose.finding import Period, Reason
from megatron.adaptive.trace.machine_counters import PROCESSOR_WAIT, THROTTLED
from tests.soak.causes import CASES, FAILED, MISSED, RIGHT, WRONG, Answer, answers, judge, rows_of

COUNT = int(os.environ.get("CAUSES", "0"))
"""Number of jobs per cause.

The default is 0, because concurrent tests could also slow down the jobs.
"""


def finding(cause: str, counter: str = "", ranks: tuple[int, ...] = (1,)) -> Finding:
    return Finding(
        cause=cause,
        ranks=ranks,
        stages=(1,),
        hosts=("here",),
        period=Period(first=1, last=9),
        against="plan",
        confidence=0.9,
        reason=Reason(counter=counter, text="", remedy="") if counter else None,
    )


def test_verdicts() -> None:
    quota = CASES["quota"]
    throttled, busy = finding("slow rank", THROTTLED), finding("busy machine", PROCESSOR_WAIT)
    assert judge(quota, [throttled, busy])[0] == RIGHT
    assert judge(quota, [busy, finding("spikes")])[0] == MISSED
    assert judge(quota, [throttled, finding("slow data")])[0] == WRONG
    assert judge(CASES["quiet"], [busy])[0] == RIGHT
    assert judge(CASES["quiet"], [throttled])[0] == WRONG


def test_the_planted_cause_on_another_rank_is_wrong() -> None:
    assert judge(CASES["slow reader"], [finding("slow data")])[0] == RIGHT
    assert judge(CASES["slow reader"], [finding("slow data", ranks=(0,))])[0] == WRONG
    assert judge(CASES["delayed link"], [finding("slow link", ranks=(0, 1))])[0] == RIGHT
    assert judge(CASES["delayed link"], [finding("slow link", ranks=(1, 0))])[0] == WRONG
    busy = finding("busy machine", THROTTLED, ranks=(0, 1))
    assert judge(CASES["quota"], [busy])[0] == RIGHT


def test_rows_have_the_goals() -> None:
    judged = [Answer("quota", RIGHT, (), "")] * 19 + [Answer("quota", WRONG, (), "")]
    quota, layer, right, wrong = rows_of(judged, ["quota", "slow layer"])
    assert (quota.value, layer.value) == (0.95, None)
    assert (right.met, wrong.met) == (True, False)


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.skipif(not COUNT, reason="CAUSES=N plants each cause N times, on a quiet machine")
@pytest.mark.timeout(200 * max(1, COUNT))
@pytest.mark.parametrize("name", CASES)
def test_a_planted_cause_is_named(name: str) -> None:
    judged = answers([name], COUNT, seed=1)
    if not judged:
        pytest.skip("this machine cannot plant this cause")
    assert [answer.text for answer in judged if answer.verdict == WRONG] == []
    assert [answer.text for answer in judged if answer.verdict == FAILED] == []
    missed = [answer.text for answer in judged if answer.verdict == MISSED]
    assert len(missed) <= 0.05 * COUNT, missed
