"""Tests that a run can be monitored while it writes, even if files are missing or damaged."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace import monitor
from megatron.adaptive.trace.metrics import run_figures
from megatron.adaptive.trace.monitor import LiveRun, RankTail, Snapshot, find_live
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.status_files import ENDED, NowFile, read_now
from megatron.adaptive.trace.trace_format import TraceHeader, header_line, trace_file_name
from tests.support.synthetic_trace import SyntheticRun, write_synthetic
from tests.trace.conftest import make_header, record

Header = Callable[..., TraceHeader]


def report(folder: Path, *lines: dict[str, Any]) -> None:
    """Appends ``lines`` to the file in ``folder`` in which the trainer reports its progress."""
    with (folder / "progress.jsonl").open("a", encoding="ascii") as file:
        file.writelines(json.dumps({"unix_ns": time.time_ns(), **line}) + "\n" for line in lines)


@pytest.fixture
def ended_pid() -> int:
    """Returns the ID of a process that has exited."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def recorders(tmp_path: Path) -> Iterator[list[Recorder]]:
    """Yields recorders of two ranks that write to the folder ``traces``."""
    made = [Recorder(tmp_path / "traces", make_header(rank)) for rank in range(2)]
    yield made
    for recorder in made:
        recorder.close()


def run_iteration(recorders: list[Recorder], iteration: int, slow: float = 1.0) -> None:
    """Records an iteration with two microbatches.

    In the first action, rank 1 waits for rank 0. The actions of rank 0 take ``slow`` * 10 ms, and
    those of rank 1 take 10 ms.
    """
    start_ns = 10**12 + iteration * 10**9
    for rank, recorder in enumerate(recorders):
        recorder.begin_iteration(iteration, 2, start_ns=start_ns)
        begin = start_ns + rank * 10**7
        for microbatch in range(2):
            for kind in ("F", "B"):
                end = begin + round(10**7 * (slow if rank == 0 else 1.0))
                record(recorder, kind, 0, microbatch, begin, end, in_flight_bytes=1 << 20)
                begin = end
        record(recorder, "wait", 0, 0, start_ns, start_ns + rank * 10**7, of="F", reason="input")
        recorder.end_iteration()


def iterations_of(tail: RankTail) -> list[int]:
    return [] if tail.figures is None else tail.figures.iterations.tolist()


def until(run: LiveRun, is_so: Callable[[Snapshot], bool], limit_s: float = 20.0) -> Snapshot:
    """Takes snapshots of the run until ``is_so`` accepts one, and returns this snapshot.

    Polling is necessary because threads write the files.
    """
    end_s = time.monotonic() + limit_s
    while not is_so(snapshot := run.refresh()):
        assert time.monotonic() < end_s, snapshot
        time.sleep(0.02)
    return snapshot


def test_a_run_is_followed_from_before_its_start_to_its_end(tmp_path: Path) -> None:
    run, traces = LiveRun(tmp_path), tmp_path / "traces"
    snapshot = run.refresh()
    assert (snapshot.state, snapshot.ranks, snapshot.header) == ("waiting", [], None)

    doing: dict[str, Any] = {"iteration": 1, "num_microbatches": 2}
    first = Recorder(traces, make_header(0))
    first.watch(lambda: {**doing, "doing": "F", "microbatch": 1, "done": [1, 0, 0]})
    snapshot = until(run, lambda s: bool(s.ranks) and s.ranks[0].now is not None)
    assert snapshot.state == "running"
    assert [rank.header is None for rank in snapshot.ranks] == [False, True]
    now = snapshot.ranks[0].now
    assert now is not None
    assert (now.doing, now.microbatch, [*now.done], snapshot.iteration) == ("F", 1, [1, 0, 0], 1)

    recorders = [first, Recorder(traces, make_header(1))]
    for iteration in (1, 2, 3):
        run_iteration(recorders, iteration)
    report(traces, {"total_iterations": 4, "start_iteration": 0})
    report(traces, {"iteration": 3, "step_ms": 70.0, "loss": 2.5, "tokens_per_s": 900.0})
    snapshot = until(run, lambda s: [rank.iteration for rank in s.ranks] == [3, 3])
    assert (snapshot.iteration, snapshot.total_iterations, snapshot.step_ms) == (3, 4, 70.0)
    assert (snapshot.last("loss"), snapshot.last("tokens_per_s")) == (2.5, 900.0)
    assert [rank.busy for rank in snapshot.ranks] == [pytest.approx(0.8)] * 2
    assert snapshot.bubble == pytest.approx(0.2)
    assert snapshot.ranks[1].waits == {"input": pytest.approx(0.2)}
    assert [rank.compute_ms for rank in snapshot.ranks] == [40.0, 40.0]

    for recorder in recorders:
        recorder.close()
    report(traces, {"ended": "all iterations are done"})
    snapshot = run.refresh()
    assert (snapshot.state, snapshot.detail) == ("ended", "all iterations are done")
    assert snapshot.ranks[0].is_ended


def test_figures_are_those_of_the_whole_reader(tmp_path: Path) -> None:
    made = SyntheticRun(num_ranks=4, replicas=2, num_chunks=2, iterations=6, hosts=1)
    write_synthetic(tmp_path, made)
    figures = run_figures(read_run(tmp_path))
    for index, rank in enumerate(LiveRun(tmp_path).refresh().ranks):
        assert rank.iteration == 6
        assert rank.busy is not None
        usual = sorted(1 - figures.bubble_fraction[:, index])
        assert usual[0] <= rank.busy <= usual[-1]
        assert rank.held_bytes == figures.peak_in_flight_bytes[-1, index]


def test_only_what_is_new_is_read(tmp_path: Path, recorders: list[Recorder]) -> None:
    run_iteration(recorders, 1)
    run = LiveRun(tmp_path)
    until(run, lambda s: bool(s.ranks) and s.ranks[0].iteration == 1)
    path = recorders[0].path
    read = path.read_bytes()
    # The part of the file that has been read is replaced by invalid text of the same length. The
    # monitor must not read this part again.
    path.write_bytes(b"x" * len(read))
    os.utime(path)
    run_iteration(recorders, 2)
    snapshot = until(run, lambda s: s.ranks[0].iteration == 2)
    assert snapshot.ranks[0].problem == ""


def test_half_written_iterations_wait(tmp_path: Path, recorders: list[Recorder]) -> None:
    for iteration in (1, 2):
        run_iteration(recorders, iteration)
    recorders[0].close()
    whole = recorders[0].path.read_bytes()
    other = tmp_path / "other" / trace_file_name(0)
    other.parent.mkdir()
    tail = RankTail(other, kept=8)
    assert not tail.refresh()
    seen = []
    with other.open("ab", buffering=0) as file:
        for begin in range(0, len(whole), 50):
            file.write(whole[begin : begin + 50])
            tail.refresh()
            seen.append(len(iterations_of(tail)))
    assert tail.problem == ""
    assert iterations_of(tail) == [1, 2]
    assert seen == sorted(seen)
    assert {0, 1, 2} == set(seen)


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path, recorders: list[Recorder]) -> None:
    for iteration in range(1, 101):
        run_iteration(recorders, iteration)
    for recorder in recorders:
        recorder.close()
    tail = RankTail(recorders[0].path, kept=32, tail_bytes=2000)
    tail.refresh()
    assert max(iterations_of(tail)) == 100
    assert 1 < len(iterations_of(tail)) < 10
    # Each iteration is longer than 10 bytes, but at least the last iteration must be read.
    tail = RankTail(recorders[0].path, kept=32, tail_bytes=10)
    tail.refresh()
    assert max(iterations_of(tail)) == 100


def test_another_start_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    run, traces = LiveRun(tmp_path), tmp_path / "traces"
    for number in (1, 2):
        if number == 2:
            traces.rename(tmp_path / "traces-1")
        with Recorder(traces, make_header(0, run=f"run-{number}", world_size=1, num_ranks=1)) as r:
            run_iteration([r], 10 // number)
        report(traces, {"total_iterations": 10 * number, "start_iteration": 0})
        snapshot = run.refresh()
        assert snapshot.header is not None
        assert snapshot.header.run == f"run-{number}"
        assert (snapshot.iteration, snapshot.total_iterations) == (10 // number, 10 * number)


def test_a_process_that_is_gone_was_killed(
    tmp_path: Path, ended_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "SILENT_S", 0.0)
    for rank, pid in enumerate((os.getpid(), ended_pid)):
        header = replace(make_header(rank), pid=pid, host=socket.gethostname())
        (tmp_path / trace_file_name(rank)).write_text(header_line(header))
    snapshot = LiveRun(tmp_path).refresh()
    assert (snapshot.state, snapshot.detail) == ("killed", "the process of rank 1 no longer exists")
    assert [rank.is_gone for rank in snapshot.ranks] == [False, True]


def test_ranks_of_another_machine_fall_silent(
    tmp_path: Path, ended_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        header = replace(make_header(rank), pid=ended_pid, host="another")
        (tmp_path / trace_file_name(rank)).write_text(header_line(header))
        file = NowFile(tmp_path, rank)
        file.write({"doing": "wait"})
    assert LiveRun(tmp_path).refresh().state == "running"
    monkeypatch.setattr(monitor, "SILENT_S", -1.0)
    assert LiveRun(tmp_path).refresh().state == "silent"


def test_damage_is_told_and_does_not_end_the_view(
    tmp_path: Path, recorders: list[Recorder]
) -> None:
    run_iteration(recorders, 1)
    for recorder in recorders:
        recorder.close()
    recorders[0].path.write_text("{nonsense\n")
    (tmp_path / "traces" / "now_rank_00001.json").write_text("half a li")
    report(tmp_path / "traces", {"iteration": 1, "loss": None})
    with (tmp_path / "traces" / "progress.jsonl").open("a") as file:
        file.write('{"iteration": 2, "lo')
    snapshot = LiveRun(tmp_path).refresh()
    assert "is not valid JSON" in snapshot.ranks[0].problem
    assert snapshot.ranks[1].iteration == 1
    assert snapshot.ranks[1].now is None
    assert snapshot.last("loss") is None


def test_a_run_without_traces_has_its_progress(tmp_path: Path) -> None:
    report(tmp_path, {"total_iterations": 9}, {"iteration": 4, "step_ms": 3.0, "loss": 1.0})
    snapshot = LiveRun(tmp_path).refresh()
    assert (snapshot.state, snapshot.detail) == ("running", "no traces")
    assert (snapshot.iteration, snapshot.step_ms, len(snapshot.ranks)) == (4, 3.0, 0)


def test_the_latest_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match="no run in .*; pass the folder of a run"):
        find_live(None)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("one")
    assert find_live(None) == tmp_path / "runs" / "one"
    with pytest.raises(TraceError, match="gone does not exist; pass the folder of a run"):
        find_live(tmp_path / "gone")


class TestNow:
    def test_says_for_how_long(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = NowFile(tmp_path, 0)
        clock = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        for doing, passed_s, since_s in (("F", 0.0, 0.0), ("F", 2.5, 2.5), ("B", 1.0, 0.0)):
            clock[0] += passed_s
            file.write({"doing": doing})
            now = read_now(tmp_path, 0)
            assert now is not None
            assert (now.doing, now.since_s) == (doing, since_s)
        file.end(None)

    def test_a_short_report_replaces_a_long_one(self, tmp_path: Path) -> None:
        file = NowFile(tmp_path, 0)
        for doing in ("F", "F" * 1000, "B"):
            file.write({"doing": doing})
            now = read_now(tmp_path, 0)
            assert now is not None
            assert now.doing == doing
        file.end(None)

    def test_a_look_that_fails_ends_the_looking_alone(self, tmp_path: Path) -> None:
        def look() -> dict[str, Any]:
            raise RuntimeError("a bug")

        with Recorder(tmp_path, make_header(0)) as recorder:
            recorder.watch(look)
            run_iteration([recorder], 1)
        now = read_now(tmp_path, 0)
        assert now is not None
        # The function failed and reported nothing, so only the end of the run is known.
        assert (now.iteration, now.doing) == (0, ENDED)
        assert read_run(tmp_path).iterations == (1,)

    def test_a_look_that_keeps_failing_is_named_once_and_asked_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file, clock = NowFile(tmp_path, 0), [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        failures = [
            KeyError("step"),
            None,
            KeyError("step"),
            KeyError("step"),
            KeyError("step"),
            None,
        ]
        for failure in failures:

            def look(failure: Exception | None = failure) -> dict[str, Any]:
                if failure is not None:
                    raise failure
                return {"doing": "F"}

            clock[0] += 1.0
            assert file.report(look) is not None
        said = capsys.readouterr().err
        assert (
            said.count(
                "now_rank_00000.json: cannot read the rank's current action: KeyError('step')"
            )
            == 1
        )
        now = read_now(tmp_path, 0)
        assert now is not None
        assert now.doing == "F"
        file.end(None)
