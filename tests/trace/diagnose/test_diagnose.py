"""Checks that the diagnosis finds the fault of a run, and finds nothing without a fault."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.diagnose import Diagnosis, diagnose
from megatron.adaptive.trace.diagnose.cause import built_in_causes
from megatron.adaptive.trace.diagnose.causes import slow_link
from megatron.adaptive.trace.diagnose.finding import Finding
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.trace_format import trace_file_name
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic

Say = Callable[..., Diagnosis]


@pytest.mark.parametrize(("replicas", "factor"), [(1, 1.3), (2, 1.3), (2, 2.0)])
def test_a_slow_rank_is_named(say: Say, replicas: int, factor: float) -> None:
    rank = 2 * replicas  # This is the first rank of the third stage.
    said = say(Fault(kind="slow-rank", rank=rank, factor=factor), replicas=replicas)
    (finding,) = said.findings
    assert (finding.cause, finding.ranks, finding.stages) == ("slow rank", (rank,), (2,))
    assert finding.factor == pytest.approx(factor, rel=0.07)
    assert finding.against == ("plan" if replicas == 1 else "peers")
    assert str(finding.period) == "in all iterations"
    assert finding.confidence > 0.95
    # The step time minus the cost of the fault must be the step time of the same run without the
    # fault.
    without_ms = say(replicas=replicas).step_ms
    assert said.step_ms - finding.cost_ms == pytest.approx(without_ms, rel=0.05)
    assert finding.counts == {"iterations": 15, "actions": 15 * 8 * 2}


@pytest.mark.parametrize(
    ("when", "text"), [({"first": 10}, "from iteration 10 on"), ({"first": 6, "last": 12}, "6-12")]
)
def test_it_says_when_a_rank_became_slow(say: Say, when: dict[str, int], text: str) -> None:
    (finding,) = say(Fault(kind="slow-rank", rank=0, factor=1.3, **when), iterations=20).findings
    assert (finding.cause, finding.ranks, finding.against) == ("slow rank", (0,), "history")
    assert text in str(finding.period)
    assert finding.factor == pytest.approx(1.3, rel=0.05)


@pytest.mark.parametrize(
    ("forward_s", "factor", "is_named"), [(0.01, 1.3, True), (0.001, 1.3, False), (0.001, 2, True)]
)
def test_a_brief_slowdown_without_a_reason_must_be_large(
    say: Say, forward_s: float, factor: float, is_named: bool
) -> None:
    """Checks that slowdowns are not reported if they are so small that they also occur normally."""
    times = dict.fromkeys(("forward_s", "backward_s", "weight_s"), forward_s)
    fault = Fault(kind="slow-rank", rank=0, factor=factor, first=10)
    findings = say(fault, iterations=20, **times, data_s=0).findings
    assert [finding.cause for finding in findings] == ["slow rank"] * is_named


def test_a_slow_stage_without_a_plan_is_not_blamed_on_its_rank(tmp_path: Path) -> None:
    fault = Fault(kind="slow-rank", rank=3, factor=1.5)
    write_synthetic(tmp_path, SyntheticRun(faults=(fault,)))
    for path in tmp_path.iterdir():
        header, rest = path.read_text().split("\n", 1)
        kept = {k: v for k, v in json.loads(header).items() if k not in ("layers", "work")}
        path.write_text(f"{json.dumps(kept)}\n{rest}")
    assert diagnose(read_run(tmp_path)).findings == ()


def say_experts(folder: Path, heavy: int, stood_ms: tuple[int, int]) -> list[Finding]:
    """Returns the findings about experts in a run with two replicas and one expert layer per stage.

    The two replicas of a stage share its experts. The last stage is the slowest.

    Args:
        folder: Folder for the traces.
        heavy: Number of tokens of the busiest expert on the last stage. Each of the other experts
            gets 100 tokens.
        stood_ms: Milliseconds per step that each of the two ranks of the last stage waits for the
            exchange of tokens.
    """
    slow = tuple(Fault(kind="slow-rank", rank=rank, factor=1.2) for rank in (6, 7))
    write_synthetic(folder, SyntheticRun(replicas=2, faults=slow))
    for rank in range(8):
        path = folder / trace_file_name(rank)
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if line.startswith('{"begin_iteration"'):
                stage, replica = divmod(rank, 2)
                tokens = [100, heavy if rank == 7 else 100]
                more = {
                    "exchange_ns": stood_ms[replica] * 10**6 if stage == 3 else 10**6,
                    "tokens": [[stage, 2 * replica, *tokens]],
                }
                lines[number] = json.dumps({**json.loads(line), **more})
        path.write_text("\n".join([*lines, ""]))
    findings = diagnose(read_run(folder)).findings
    return [finding for finding in findings if finding.cause == "overloaded experts"]


def test_overloaded_experts_are_named_where_others_wait_for_them(tmp_path: Path) -> None:
    (finding,) = say_experts(tmp_path, 400, (40, 10))
    assert (finding.ranks, finding.stages) == ((7,), (3,))
    assert finding.factor == pytest.approx(500 / 350)
    assert finding.cost_ms == pytest.approx(30, rel=0.05)
    assert "rank 7 (stage 3, " in finding.headline
    assert "has 1.43 times the mean number of tokens" in finding.headline
    assert "--moe-aux-loss-coeff" in finding.advice[0]


@pytest.mark.parametrize(("heavy", "stood_ms"), [(400, (10, 10)), (100, (40, 10)), (400, (10, 40))])
def test_a_load_that_nobody_waits_for_is_no_finding(
    tmp_path: Path, heavy: int, stood_ms: tuple[int, int]
) -> None:
    assert say_experts(tmp_path, heavy, stood_ms) == []


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_slow_link_is_named(say: Say, replicas: int) -> None:
    source, target = 2 * replicas, replicas
    fault = Fault(kind="slow-link", rank=source, to=target, seconds=0.01)
    (finding,) = say(fault, replicas=replicas, hosts=2, clock_offset_s=5).findings
    assert (finding.cause, finding.ranks) == ("slow link", (source, target))
    assert finding.delay_ms == pytest.approx(10, rel=0.1)
    assert finding.counts["messages"] == 15 * 8
    assert finding.cost_ms > 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_slow_reading_is_named(say: Say, replicas: int) -> None:
    fault = Fault(kind="slow-data", rank=replicas - 1, seconds=0.006)
    (finding,) = say(fault, replicas=replicas).findings
    assert (finding.cause, finding.ranks) == ("slow data", (replicas - 1,))
    assert finding.delay_ms == pytest.approx(6, rel=0.2)


def test_a_few_slow_reads_are_no_finding(say: Say) -> None:
    fault = Fault(kind="slow-data", rank=0, seconds=0.006)
    assert say(fault, iterations=3, num_microbatches=2).findings == ()


@pytest.mark.parametrize("replicas", [1, 2])
def test_spikes_are_named_and_not_taken_for_slowness(say: Say, replicas: int) -> None:
    fault = Fault(kind="spikes", rank=replicas, factor=4, probability=0.05)
    (finding,) = say(fault, replicas=replicas).findings
    assert (finding.cause, finding.ranks) == ("spikes", (replicas,))
    assert str(finding.period) == "now and then"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="spikes", rank=1, factor=4, probability=0.05),
        Fault(kind="slow-link", rank=2, to=3, seconds=0.02),
    ],
    ids=lambda fault: fault.kind,
)
def test_advice_does_not_suggest_the_schedule_that_runs(say: Say, fault: Fault) -> None:
    (finding,) = say(fault, schedule="adaptive").findings
    assert "--activation-cap" in finding.advice[1]
    assert "--pipeline-schedule" not in finding.format()
    (finding,) = say(fault, schedule="1f1b").findings
    assert "--pipeline-schedule adaptive" in finding.format()


def test_two_faults_are_both_named_the_dearer_first(say: Say) -> None:
    findings = say(
        Fault(kind="slow-rank", rank=1, factor=1.6),
        Fault(kind="slow-link", rank=2, to=3, seconds=0.008),
    ).findings
    assert [f.cause for f in findings] == ["slow rank", "slow link"]


def test_late_messages_to_a_slow_rank_are_named_only_if_they_cost_time(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = (
        Fault(kind="slow-rank", rank=1, factor=2.0),
        Fault(kind="slow-link", rank=0, to=1, seconds=0.008),
    )
    assert [finding.cause for finding in say(*faults).findings] == ["slow rank"]
    monkeypatch.setattr(slow_link, "LINK_OF_STEP", -1.0)
    assert [finding.cause for finding in say(*faults).findings] == ["slow rank", "slow link"]


@pytest.mark.parametrize(("seed", "replicas"), [(0, 1), (1, 1), (4, 2), (5, 2)])
def test_a_quiet_run_raises_no_alarm(say: Say, seed: int, replicas: int) -> None:
    lengths = 0.3 * (seed % 2)  # If the seed is odd, some microbatches take longer on all stages.
    said = say(seed=seed, replicas=replicas, microbatch_sigma=lengths, iterations=12)
    assert said.findings == ()
    assert said.format().startswith("no findings in iterations 2-12")


def test_uneven_stages_get_another_partition(say: Say) -> None:
    (finding,) = say(head=3.0, replicas=2).findings
    assert (finding.cause, finding.stages) == ("uneven stages", (3,))
    assert sum(finding.partition) == 16
    assert finding.partition[3] == 2
    assert "--partition 5-5-4-2" in finding.format() or finding.partition in {
        (5, 4, 5, 2),
        (4, 5, 5, 2),
        (5, 5, 4, 2),
    }


def test_uneven_stages_that_cost_almost_nothing_are_no_finding(say: Say) -> None:
    """Checks that no partition is suggested if the waits for messages hide its gain."""
    said = say(head=3.0, latency_s=0.3, iterations=8)
    assert said.findings == ()
    assert "a step takes 4,4" in said.format()


@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        (Fault(kind="slow-rank", rank=1, factor=2.0), ["move segments with partition="]),
        (
            Fault(kind="slow-link", rank=1, to=2, seconds=0.02),
            ['schedule="adaptive"', "activation_cap"],
        ),
        (Fault(kind="slow-data", rank=0, seconds=0.006), ["num_workers of the data loader"]),
    ],
)
def test_remedies_for_a_pipeline_are_its_settings(
    tmp_path: Path, fault: Fault, settings: list[str]
) -> None:
    write_synthetic(tmp_path, SyntheticRun(faults=(fault,), schedule="1f1b"))
    for path in tmp_path.iterdir():
        header, rest = path.read_text().split("\n", 1)
        path.write_text(f"{json.dumps(json.loads(header) | {'order': 'given'})}\n{rest}")
    said = diagnose(read_run(tmp_path)).format()
    assert all(setting in said for setting in settings)
    assert "--" not in said


def test_a_slow_rank_gets_fewer_layers(say: Say) -> None:
    (finding,) = say(Fault(kind="slow-rank", rank=1, factor=2.0)).findings
    assert sum(finding.partition) == 16
    assert finding.partition[1] < 4
    assert "--partition" in finding.advice[0]


def test_one_rank_one_iteration_and_no_messages(say: Say) -> None:
    assert say(num_ranks=1, iterations=1).findings == ()
    assert say(num_ranks=1, replicas=2, iterations=2).findings == ()


def test_only_what_was_asked_for(tmp_path: Path) -> None:
    fault = Fault(kind="slow-rank", rank=1, factor=1.5, first=9)
    write_synthetic(tmp_path, SyntheticRun(faults=(fault,), iterations=16))
    run = read_run(tmp_path)
    assert diagnose(run, range(2, 9)).findings == ()
    (finding,) = diagnose(run, range(9, 17)).findings
    assert finding.period.kind == "lasting"
    with pytest.raises(TraceError, match=r"iteration 17 is not in .* which has iterations 1-16"):
        diagnose(run, [16, 17])


def test_a_missing_rank_is_noted_and_the_others_judged(tmp_path: Path) -> None:
    fault = Fault(kind="slow-rank", rank=1, factor=1.5)
    write_synthetic(tmp_path, SyntheticRun(replicas=2, faults=(fault,), iterations=12))
    (tmp_path / trace_file_name(6)).unlink()
    said = diagnose(read_run(tmp_path))
    assert [f.ranks for f in said.findings] == [(1,)]
    assert any("no trace of ranks 6" in note for note in said.notes)


def test_a_diagnosis_is_json(say: Say) -> None:
    said = say(Fault(kind="slow-link", rank=0, to=1, seconds=0.01))
    written: dict[str, Any] = json.loads(json.dumps(said.to_json()))
    (finding,) = written["findings"]
    assert finding["cause"] in {cause.name for cause in built_in_causes()}
    assert finding["headline"] == said.findings[0].headline
    assert finding["period"]["text"] == "in all iterations"
    assert written["counts"]["messages"] == 15 * 6 * 8


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    write_synthetic(tmp_path, SyntheticRun(iterations=1))
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().split("\n", 1)[0] + "\n")
    with pytest.raises(TraceError, match="does not contain iterations"):
        diagnose(read_run(tmp_path))
