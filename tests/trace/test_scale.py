"""Checks that reading large runs or damaged numbers needs limited time and memory.

The tests count calls and sizes instead of measuring time, which depends on the load of the machine.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron.adaptive.cli import top
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace import clock, monitor
from megatron.adaptive.trace.clock import Alignment, settle
from megatron.adaptive.trace.compare_runs import compare_runs
from megatron.adaptive.trace.diagnose import diagnose, find_causes
from megatron.adaptive.trace.diagnose.cause import Cause, Evidence
from megatron.adaptive.trace.diagnose.causes import slow_link
from megatron.adaptive.trace.diagnose.finding import Finding
from megatron.adaptive.trace.diagnose.samples import measure
from megatron.adaptive.trace.diagnose.stage_costs import StageCosts, best_partition
from megatron.adaptive.trace.monitor import LiveRun
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.status_files import now_file_name, read_now
from megatron.adaptive.trace.trace_format import parse_line, trace_file_name
from megatron.adaptive.trace.whatif import answers, replay
from megatron.adaptive.trace.whatif.answers import what_if
from tests.support.enlarged_trace import write_enlarged
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

STAGES, REPLICAS = 4, 150
WIDE = SyntheticRun(num_ranks=STAGES, replicas=2, num_microbatches=4, iterations=4, schedule="1f1b")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> RunTrace:
    """Returns the trace of a run with 600 ranks on 150 machines."""
    folder = tmp_path_factory.mktemp("wide") / "traces"
    assert write_enlarged(folder, WIDE, replicas=REPLICAS, ranks_per_host=4) == STAGES * REPLICAS
    return read_run(folder)


def test_a_wide_run_is_read_on_one_clock(wide: RunTrace) -> None:
    assert (len(wide.ranks), len(wide.alignment.clocks)) == (STAGES * REPLICAS, REPLICAS)
    assert wide.alignment.contradiction_ns == 0
    assert wide.complete_iterations(None) == (1, 2, 3, 4)


def test_links_are_compared_with_a_bounded_number_of_others(
    wide: RunTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_link, "MOST_COMPARED", 50)
    compared: list[int] = []
    judge = slow_link._judge

    def counting(m: Any, link: Any, others: Any, action: float) -> Any:
        compared.append(len(others))
        return judge(m, link, others, action)

    monkeypatch.setattr(slow_link, "_judge", counting)
    measured = measure(wide)
    assert slow_link.find_slow_links(measured) == []
    assert len(compared) == 2 * (STAGES - 1) * REPLICAS
    assert max(compared) <= 50


class EveryRank(Cause):
    """Cause of slowness that reports every rank. The last rank has the largest delay."""

    name = "every rank"

    def find(self, evidence: Evidence, earlier: Any) -> list[Finding]:
        m = evidence.measured
        return [
            m.finding([n], m.iterations, against="others", confidence=0.9, delay_ms=float(n))
            for n in range(len(m.headers))
        ]


def test_the_worst_findings_are_examined_and_the_others_counted(wide: RunTrace) -> None:
    report = diagnose(wide, own_causes=[EveryRank()])
    of_every_rank = [finding for finding in report.findings if finding.cause == "every rank"]
    assert {rank for finding in of_every_rank for rank in finding.ranks} == set(
        range(STAGES * REPLICAS - find_causes.MOST_FINDINGS, STAGES * REPLICAS)
    )
    left_out = STAGES * REPLICAS - find_causes.MOST_FINDINGS
    assert any(f"; {left_out} others are omitted" in n for n in report.notes)


def test_what_if_simulates_a_bounded_number_of_replicas(
    wide: RunTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MOST_GROUPS", 8)
    result = what_if(wide, [2])
    assert len(result.slowdowns["replica"]) == 8
    assert len(result.slowdowns["stage"]) == STAGES
    every = what_if(wide, [3])
    assert every.slowdown == pytest.approx(result.slowdown, rel=0.05)


def test_a_rule_is_simulated_again_only_where_durations_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SyntheticRun(replicas=6, iterations=4, schedule="adaptive")
    write_synthetic(tmp_path, run)
    simulated: Counter[str] = Counter()
    whole = replay.RecordedStep.simulated_s

    def counting(self: Any, *arguments: Any) -> float:
        simulated["steps"] += 1
        return whole(self, *arguments)

    monkeypatch.setattr(replay.RecordedStep, "simulated_s", counting)
    trace = read_run(tmp_path)
    where = answers.pipelines_of(trace)
    ops = answers.read_operations(trace, where, [2, 3])
    rule = replay.RuleReplay(trace.ranks[0].header, ops)
    assert rule.saved_s(ops.duration_s) == 0
    assert simulated["steps"] == 6 * 2
    halved = np.where(where.replica[ops.worker] == 3, ops.duration_s / 2, ops.duration_s)
    assert rule.saved_s(halved) is not None
    assert simulated["steps"] == 6 * 2 + 2


def test_a_long_run_is_analyzed_at_equal_distances(
    wide: RunTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MOST_SPANS", 2 * wide.num_spans([1]))
    result = what_if(wide)
    assert result.iterations.tolist() == [1, 4]
    assert any(
        "only 2 of 4 iterations, evenly spaced, are analyzed" in note for note in result.notes
    )


def test_a_comparison_of_wide_runs_keeps_no_mask_for_each_part(tmp_path: Path) -> None:
    runs = []
    for name, factor in (("a", 1.0), ("b", 1.1)):
        run = replace(WIDE, iterations=8, forward_s=0.01 * factor, seed=len(runs))
        write_enlarged(tmp_path / name, run, replicas=20)
        runs.append(read_run(tmp_path / name))
    changes = compare_runs(*runs).changes
    assert changes[0].kind == "action"
    assert changes[0].action == "F"
    assert changes[0].relative == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_clocks_of_many_machines_are_settled_in_few_comparisons(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = 400
    rng = np.random.default_rng(seed)
    true_ns = np.append(0, rng.integers(-(10**9), 10**9, clocks - 1))
    slack: dict[tuple[int, int], int] = {}
    for a in range(clocks):
        for b in (a + 1, a + 20):
            if b < clocks:
                there, back = rng.integers(1_000, 50_000, 2).tolist()
                slack[a, b] = int(true_ns[b] - true_ns[a]) + there
                slack[b, a] = int(true_ns[a] - true_ns[b]) + back
    moves, left = settle(slack, clocks, unsure=range(1, clocks))
    assert left <= 1
    assert np.abs(np.array(moves) + true_ns).max() < 1_000_000
    monkeypatch.setattr(clock, "MOST_COMPARED", 0)
    contradiction = {**slack, (0, 1): -(10**9), (1, 0): -(10**9)}
    _, left = settle(contradiction, clocks, unsure=())
    assert left > 0


def test_the_fit_of_a_clock_is_looked_up_once() -> None:
    states = tuple(clock._state(f"c{n}", [n], "samples", clock.shift(n)) for n in range(3))
    alignment = Alignment(states)
    assert alignment.fit_of("c2") is states[2].fit
    assert alignment._fits is alignment._fits


def damaged(folder: Path, line: int, **values: Any) -> str:
    """Sets the fields ``values`` in line ``line`` of rank 0's trace, and returns the new line."""
    path = folder / trace_file_name(0)
    lines = path.read_text().splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **values})
    path.write_text("\n".join(lines) + "\n")
    return lines[line]


@pytest.mark.parametrize(
    ("line", "values", "said"),
    [
        (0, {"layers": [2**40, 4, 4, 4]}, "layers must be at most 65,536 in total, got"),
        (0, {"work": [1e300, 4, 4, 4]}, "work must be numbers up to 1e"),
        (0, {"layer_work": [1] * 70_000}, "layer_work must have at most 65,536 values, got 70,000"),
        (0, {"layer_kinds": [1] * 70_000}, "layer_kinds must have at most 65,536 values"),
        (
            1,
            {"num_microbatches": 2**40},
            "num_microbatches must be from 0 to .*, got 1099511627776",
        ),
        (1, {"num_microbatches": -1}, "num_microbatches must be from 0 to .*, got -1"),
        (
            1,
            {"begin_iteration": 2**50},
            "'begin_iteration' must be from 0 to .*, got 1125899906842624",
        ),
    ],
)
def test_huge_numbers_in_a_file_are_refused_before_use(
    tmp_path: Path, line: int, values: dict[str, Any], said: str
) -> None:
    write_synthetic(tmp_path, SyntheticRun(iterations=2))
    text = damaged(tmp_path, line, **values)
    with pytest.raises(TraceError, match=said):
        parse_line(text, "file:1")
    with pytest.raises(TraceError, match=said):
        read_run(tmp_path)


def test_a_number_of_microbatches_takes_no_more_memory_than_spans(tmp_path: Path) -> None:
    write_synthetic(tmp_path, SyntheticRun(iterations=3, num_microbatches=4))
    damaged(tmp_path, 1, num_microbatches=2**20, counts=[2**60] * 14)
    run = read_run(tmp_path)
    assert run.num_spans([1]) < 500
    assert measure(run, [1, 2, 3]).action_ns.shape[-1] < 500


def test_layers_are_dealt_in_few_steps() -> None:
    class Counted(list):  # type: ignore[type-arg]
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.reads += 1
            return super().__getitem__(index)

    stages, layers = 64, 4096
    rng = np.random.default_rng(0)
    costs = StageCosts(rng.uniform(1, 2, stages), np.zeros(stages), Counted(range(stages)))
    best = best_partition(costs, layers)
    assert sum(best) == layers
    times = np.array(best) * costs.layer_ns
    assert times.max() - times.min() <= costs.layer_ns.max()
    assert Counted.reads < 10 * (stages + layers)


def test_top_reads_less_of_each_file_of_many_and_shows_a_line_per_stage(
    wide: RunTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "ALL_TAILS_BYTES", 4096 * len(wide.ranks))
    monkeypatch.setattr(monitor, "LEAST_TAIL_BYTES", 1024)
    monkeypatch.setattr(top, "PIPE_ROWS", 100)
    live = LiveRun(wide.origin)
    snapshot = live.refresh()
    assert {tail._tail_bytes for tail in live._tails.values()} == {4096}
    assert all(rank.iteration == 4 for rank in snapshot.ranks)
    console = Console(width=120, file=io.StringIO())
    console.print(top.draw(snapshot, 120))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert len(text.splitlines()) < 20
    assert f"{REPLICAS}" in text


@pytest.mark.parametrize(
    "values",
    [
        {"done": []},
        {"done": [1]},
        {"done": [1, 10**400]},
        {"unix_ns": -(10**30)},
        {"since_s": 1e300},
        {"microbatch": 2**70},
    ],
)
def test_a_damaged_report_of_a_rank_is_ignored(tmp_path: Path, values: dict[str, Any]) -> None:
    report = {"unix_ns": 1, "doing": "F", "done": [1, 0, 0], "since_s": 0.5}
    path = tmp_path / now_file_name(0)
    path.write_text(json.dumps(report))
    assert read_now(tmp_path, 0) is not None
    path.write_text(json.dumps({**report, **values}))
    assert read_now(tmp_path, 0) is None
