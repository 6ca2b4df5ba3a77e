"""Tests that synthetic runs are complete and consistent, except for faults that were added."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.trace.metrics import RunFigures, run_figures
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.span_columns import match_messages
from tests.support import synthetic_trace as synthetic_module
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

Make = Callable[..., tuple[RunTrace, RunFigures]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Returns a function that writes a run and returns its trace and its measured figures."""

    def write(**options: Any) -> tuple[RunTrace, RunFigures]:
        write_synthetic(tmp_path, SyntheticRun(**{"iterations": 4, **options}))
        run = read_run(tmp_path)
        return run, run_figures(run)

    return write


@pytest.mark.parametrize(
    "options",
    [
        {"num_ranks": 1},
        {"schedule": "1f1b", "replicas": 2},
        {"schedule": "zb-h1", "occupancy_s": 0.001},
        {"num_chunks": 2, "weight_pieces": 3},
        {"schedule": "hinted", "num_chunks": 2, "latency_s": 0.002},
    ],
)
def test_every_action_and_message_is_there_and_in_its_place(
    make: Make, options: dict[str, Any]
) -> None:
    run, figures = make(**options)
    assert run.complete_iterations() == (1, 2, 3, 4)
    assert run.notes() == []
    tables = {rank: trace.table() for rank, trace in run.ranks.items()}
    matches = match_messages(tables)
    for kind in ("send", "receive"):
        assert sum(int(t.where(kind).sum()) for t in tables.values()) == len(matches)
    assert (matches.sent_ns <= matches.arrived_ns).all()
    assert (matches.arrived_ns <= matches.taken_ns).all()
    starts = {
        (rank, s.iteration, s.action, s.chunk, s.microbatch): s
        for rank, table in tables.items()
        for s in table.of_kind("F", "B").spans()
    }
    receives = {rank: table.of_kind("receive").spans() for rank, table in tables.items()}
    for rank, spans in receives.items():
        for span in spans:
            action = starts[rank, span.iteration, span.of, span.chunk, span.microbatch]
            assert span.end_ns == action.start_ns
    waits = [table.of_kind("wait") for table in tables.values()]
    assert all((wait.end_ns > wait.start_ns).all() for wait in waits)
    assert (figures.step_ns > 0).all()


def test_a_seed_repeats_a_run_and_another_does_not(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate((3, 3, 4)):
        write_synthetic(tmp_path / str(number), SyntheticRun(iterations=2, seed=seed))
        texts.append((tmp_path / str(number) / "trace_rank_00001.jsonl").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_clocks_of_hosts_are_found_again(tmp_path: Path) -> None:
    run = SyntheticRun(
        replicas=2, hosts=4, clock_offset_s=5, clock_drift_ppm=50, iterations=12, seed=5
    )
    truth = write_synthetic(tmp_path, run)
    read = read_run(tmp_path)
    assert len(read.alignment.clocks) == 4
    figures = run_figures(read)
    starts = figures.step_start_ns[:, 0] - synthetic_module.BOOT_UNIX_NS
    assert starts == pytest.approx(truth.start_ns, abs=50_000)
    assert (figures.step_ns[:, :2] / 1e9) == pytest.approx(truth.step_s, abs=5e-5)
    matches = match_messages({rank: trace.table() for rank, trace in read.ranks.items()})
    assert (matches.arrived_ns >= matches.sent_ns).mean() > 0.99
    assert max(abs(offset) for offset, _ in truth.clocks) > 10**9


def test_large_runs_are_compiled(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_module, "COMPILE_FROM", 0)
    run, _ = make(iterations=1)
    assert run.complete_iterations() == (1,)
