"""Made-up runs are runs: complete, consistent, and wrong only where they are told to be."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.tracing import synthetic as synthetic_module
from benchmarks.tracing.synthetic import Fault, SyntheticRun, write_synthetic
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.figures import RunFigures, run_figures
from megatron.adaptive.trace.messages import match_messages
from megatron.adaptive.trace.read import RunTrace, read_run

Make = Callable[..., tuple[RunTrace, RunFigures]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A function that writes a run and reads it, with its figures."""

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
    found = match_messages(tables)
    for kind in ("send", "receive"):
        assert sum(int(t.where(kind).sum()) for t in tables.values()) == len(found)
    assert (found.sent_ns <= found.arrived_ns).all()
    assert (found.arrived_ns <= found.taken_ns).all()
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
    assert (figures.peak_queue < 50).all()
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
    found = match_messages({rank: trace.table() for rank, trace in read.ranks.items()})
    assert (found.arrived_ns >= found.sent_ns).mean() > 0.99
    assert max(abs(offset) for offset, _ in truth.clocks) > 10**9


def test_a_slow_rank(make: Make) -> None:
    _, figures = make(faults=(Fault(kind="slow-rank", rank=2, factor=1.5, first=3),))
    forward = figures.median_ns[:, :, 0, 0] / 1e6
    assert forward[:2] == pytest.approx(10, rel=0.1)
    assert forward[2:, 2] == pytest.approx(15, rel=0.1)
    assert forward[2:, [0, 1, 3]] == pytest.approx(10, rel=0.1)


def test_a_slow_link(make: Make) -> None:
    run, _ = make(replicas=2, faults=(Fault(kind="slow-link", rank=3, to=5, seconds=0.02),))
    found = match_messages({rank: trace.table() for rank, trace in run.ranks.items()})
    way = (found.arrived_ns - found.sent_ns) / 1e6
    slow = (found.source == 3) & (found.target == 5)
    assert np.median(way[slow]) == pytest.approx(20.1, rel=0.3)
    assert np.median(way[~slow]) < 0.2


def test_spikes(make: Make) -> None:
    fault = Fault(kind="spikes", rank=1, factor=5, probability=0.2)
    run, figures = make(iterations=10, faults=(fault,))
    assert np.median(figures.median_ns[:, 1, 0, 0]) / 1e6 == pytest.approx(10, rel=0.1)
    lengths = run.ranks[1].table().of_kind("F").duration_ns / 1e6
    assert 0.05 < (lengths > 30).mean() < 0.4
    assert (run.ranks[2].table().of_kind("F").duration_ns / 1e6).max() < 15


def test_slow_data(make: Make) -> None:
    run, figures = make(faults=(Fault(kind="slow-data", rank=0, seconds=0.03),))
    reads = run.ranks[0].table().of_kind("data").duration_ns / 1e6
    assert np.median(reads) == pytest.approx(30, rel=0.2)
    assert figures.median_ns[:, 0, 0, 0] / 1e6 == pytest.approx(10, rel=0.1)
    assert (figures.mean_ns[:, 0, 0, 0] / 1e6).min() > 30


def test_large_runs_are_compiled(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_module, "COMPILE_FROM", 0)
    run, _ = make(iterations=1)
    assert run.complete_iterations() == (1,)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kind": "slow-rank", "rank": 9}, "rank beyond 0..3"),
        ({"kind": "slow-rank", "rank": 0, "factor": 0.5}, "a factor of 1 or more"),
        ({"kind": "gremlins", "rank": 0}, "expected one of slow-rank"),
    ],
)
def test_faults_that_make_no_sense(tmp_path: Path, fault: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        write_synthetic(tmp_path, SyntheticRun(faults=(Fault(**fault),)))


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot write traces"):
        write_synthetic(tmp_path / "file" / "x", SyntheticRun())


def test_the_last_stage_has_a_head_and_the_plan_may_be_wrong(make: Make) -> None:
    run, figures = make(action_sigma=0.0, head=2.0, planned_head=1.0)
    header = run.ranks[0].header
    assert header.layers == (4, 4, 4, 4)
    assert header.work == (4, 4, 4, 5)
    forward = figures.median_ns[0, :, 0, 0]
    assert forward[3] == pytest.approx(1.5 * forward[1], rel=0.01)


def test_ranks_differ_alike_in_all_iterations(make: Make) -> None:
    _, figures = make(rank_sigma=0.2, action_sigma=0.0, replicas=2)
    forward = figures.median_ns[:, :, 0, 0]
    assert np.ptp(forward, axis=0).max() < 1e5
    assert np.ptp(forward, axis=1).min() > 1e6


def test_stray_actions_and_iterations_differ(make: Make) -> None:
    _, quiet = make(action_sigma=0.0, schedule="1f1b")
    _, strays = make(action_sigma=0.0, schedule="1f1b", stray_probability=0.1)
    ratio = strays.std_ns[:, 1:, 0, 0] / quiet.mean_ns[:, 1:, 0, 0]
    assert (ratio > 0.05).any(axis=0).all()
    _, uneven = make(action_sigma=0.0, iteration_sigma=0.1)
    assert (np.ptp(uneven.median_ns[:, :, 0, 0], axis=0) > 0.02 * 1e7).all()
