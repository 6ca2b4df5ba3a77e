"""Tests traces of ``Pipeline`` jobs with moving segments, kernels, collectors, and predictions."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron.adaptive import __main__ as program
from megatron.adaptive.cli import trace as trace_command
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.trace.kernels import kernel_figures, read_steps
from megatron.adaptive.trace.monitor import LiveRun
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.whatif.answers import what_if

from ..multiprocess.launch import free_port, run_ranks, tail
from ..support.otlp_collector import serving
from .traced_worker import MOVES_STEPS, OBSERVED_STEPS, PROFILED, PROFILED_RANK

pytestmark = pytest.mark.multiprocess

WORKER = Path(__file__).with_name("traced_worker.py")
LIMIT_S = 200.0


def run(folder: Path, name: str, ranks: int, *arguments: str) -> str:
    """Runs the worker's program ``name`` on ``ranks`` ranks, and returns the output.

    The worker writes to ``folder``, and also gets ``arguments``.
    """
    log = folder / "log"
    command = [str(WORKER), str(folder), name, *arguments]
    status = run_ranks(command, world_size=ranks, log=log, limit_s=LIMIT_S)
    assert status == 0, tail(log)
    return log.read_text()


def timed_segments(trace: RunTrace, rank: int) -> set[int]:
    """Returns the indices of the segments for which ``trace`` contains times of rank ``rank``."""
    of_rank = trace.ranks[rank]
    return {row[0] for iteration in of_rank.iterations for row in of_rank.layers(iteration)}


@pytest.mark.long
def test_each_partition_has_a_trace_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that each partition of a run has a separate folder with a correct trace."""
    output = run(tmp_path, "moves", 2)
    used, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert used == other
    partitions = [tuple(partition) for partition in used]
    changes = [n for n in range(1, len(used)) if used[n] != used[n - 1]]
    assert changes
    begins, ends = [0, *changes], [*changes, len(used)]
    # The newest trace has the requested name. Earlier traces are renamed, numbered from 1.
    folders = [tmp_path / f"traces-{n + 1}" for n in range(len(changes))] + [tmp_path / "traces"]
    assert sorted(path.name for path in tmp_path.glob("traces*")) == sorted(
        path.name for path in folders
    )
    for folder, begin, end in zip(folders, begins, ends, strict=True):
        trace = read_run(folder)
        partition = partitions[begin]
        cuts = np.cumsum([0, *partition])
        for rank, of_rank in trace.ranks.items():
            assert of_rank.header.layers == partition
            assert list(of_rank.iterations) == list(range(begin + 1, end + 1))
            assert timed_segments(trace, rank) == set(range(cuts[rank], cuts[rank + 1]))
        # Each folder has its own progress file.
        assert LiveRun(folder).refresh().total_iterations == MOVES_STEPS
        if end - begin < 3:
            continue
        answer = what_if(trace)
        named = [repair for repair in answer.repairs if "partition " in repair.description]
        if begin == 0:
            assert any(f"instead of {format_partition(partition)}" in r.description for r in named)
        monkeypatch.setattr("sys.argv", ["megatron.adaptive", "trace", str(folder)])
        assert program.main() == 0
        page = capsys.readouterr().out
        table = page[page.index("layer ") :].splitlines()[1 : 1 + sum(partition)]
        rows = [line.split() for line in table]
        owners = [rank for rank, size in enumerate(partition) for _ in range(size)]
        assert [row[:2] for row in rows] == [[str(n), str(rank)] for n, rank in enumerate(owners)]
    assert "Traceback" not in output


def test_kernels_and_spans_of_a_job_are_told_while_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that a job records kernels, sends spans to a collector and writes progress."""
    with serving() as collector:
        run(tmp_path, "observed", 2, collector.url)
    plain, traced = json.loads((tmp_path / "0.json").read_text())
    assert len(plain) == OBSERVED_STEPS
    assert traced == plain
    trace = read_run(tmp_path / "traces")
    require_kernels(trace)
    folder = str(tmp_path / "traces")
    page = [folder, "--format", "perfetto", "--output-dir", str(tmp_path)]
    assert trace_command.main([*page, "--iteration", str(PROFILED.start)]) == 0
    kernel = rf"^ *aten::\w+ +{PROFILED_RANK} +[FB] +\d+ +\d+\.\d\d ms"
    assert re.search(kernel, capsys.readouterr().out, re.MULTILINE)
    recorded = Counter(
        "megatron.train_step" if span.action == "step" else span.action
        for of_rank in trace.ranks.values()
        for iteration in of_rank.iterations
        for span in of_rank.spans(iteration)
    )
    names = Counter(span["name"] for span in collector.spans)
    assert names.total() == recorded.total() == len({s["spanId"] for s in collector.spans})
    assert names["megatron.train_step"] == 2 * OBSERVED_STEPS
    assert names["megatron.microbatch.forward"] == recorded["F"] == 2 * OBSERVED_STEPS * 6
    assert names["megatron.save_checkpoint"] == recorded["checkpoint"] == 2 * 2
    assert names["megatron.evaluate"] == recorded["evaluate"] == 2
    assert collector.ranks == {"0", "1"}
    snapshot = LiveRun(tmp_path / "traces").refresh()
    assert (snapshot.state, snapshot.detail) == ("ended", "all iterations are done")
    assert (snapshot.iteration, snapshot.total_iterations) == (OBSERVED_STEPS, OBSERVED_STEPS)
    assert snapshot.last("loss") == pytest.approx(plain[-1])


def require_kernels(trace: RunTrace) -> None:
    """Checks that ``trace`` contains operators of the profiled steps, within the steps' actions."""
    other = 1 - PROFILED_RANK
    assert read_steps(trace, other) == []
    steps = read_steps(trace, PROFILED_RANK)
    assert [(step.iteration, step.device) for step in steps] == [(n, "cpu") for n in PROFILED]
    for iteration in PROFILED:
        figures = kernel_figures(trace, iteration)
        assert {figure.rank for figure in figures} == {PROFILED_RANK}
        spans = trace.ranks[PROFILED_RANK].spans(iteration)
        for kind in ("F", "B", "optimizer"):
            whole_ms = sum(span.duration_ns for span in spans if span.action == kind) / 1e6
            assert 0 < sum(f.total_ms for f in figures if f.action == kind) <= whole_ms, kind
        # The rank has three blocks, and each block computes a linear layer for each of six
        # microbatches.
        assert [f.count for f in figures if f.action == "F" and "linear" in f.name] == [3 * 6]
        assert any("SGD" in figure.name for figure in figures if figure.action == "optimizer")


def test_a_collector_that_is_down_loses_only_spans(tmp_path: Path) -> None:
    """Checks that a job trains to its end if the collector of its spans cannot be reached.

    The job must report how many spans were not sent.
    """
    url = f"http://127.0.0.1:{free_port()}"
    output = run(tmp_path, "observed", 2, url)
    plain, traced = json.loads((tmp_path / "0.json").read_text())
    assert traced == plain
    trace = read_run(tmp_path / "traces")
    assert trace.complete_iterations() == tuple(range(1, OBSERVED_STEPS + 1))
    for rank, of_rank in trace.ranks.items():
        lost = sum(len(of_rank.spans(iteration)) for iteration in of_rank.iterations)
        begin = f"warning: rank {rank}"
        assert (
            output.count(f"{begin} cannot send spans to {url}/v1/traces: Connection refused;") == 1
        )
        assert f"{begin} sent 0 spans to {url}/v1/traces, and dropped {lost:,} spans" in output


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("schedule", ["1f1b", "adaptive"])
def test_predicted_settings_save_what_was_predicted(tmp_path: Path, schedule: str) -> None:
    """Checks that real runs with predicted settings have the predicted step times.

    The settings are an order and a distribution of microbatches, a partition, and all of these
    together.
    """
    run(tmp_path, "predicted", 4, schedule)
    base, *others = json.loads((tmp_path / "report.json").read_text())
    assert {tuple(sorted(other["settings"])) for other in others} >= {
        ("partition",),
        ("dealing", "order", "partition"),
    }
    for other in others:
        assert other["predicted_s"] == pytest.approx(other["real_s"], rel=0.1), other
    whole = next(other for other in others if len(other["settings"]) == 3)
    # The settings must save more than 10%, because otherwise a tolerance of 10% would prove
    # nothing.
    assert whole["real_s"] < 0.85 * base["real_s"]
