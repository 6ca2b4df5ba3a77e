"""Checks that spans are kept if the process is killed, and that lost spans are reported."""

import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.recorder import QUEUE_ITERATIONS, Recorder
from megatron.adaptive.trace.trace_format import (
    COLUMNS,
    KINDS,
    ClockSamples,
    Gap,
    IterationStart,
    Span,
    SpanRow,
    gap_line,
    parse_line,
)
from tests.trace.conftest import make_header, record

HEADER = make_header(0, 1, num_microbatches=2, schedule="1f1b")


def records(path: Path) -> list[object]:
    """Returns the lines of ``path``: spans as lists, and other lines as parsed records."""
    lines = path.read_text().splitlines()
    return [
        json.loads(line) if line.startswith("[") else parse_line(line, str(path)) for line in lines
    ]


def spans_of(path: Path) -> list[list[int]]:
    return [record for record in records(path) if isinstance(record, list)]


def markers_of(path: Path) -> list[IterationStart]:
    return [record for record in records(path) if isinstance(record, IterationStart)]


def test_the_writer_thread_begins_with_the_given_function(tmp_path: Path) -> None:
    """Checks that ``begin_thread`` runs first in the writer thread, so that it can select a GPU."""
    events: list[tuple[str, str]] = []

    def note(event: str) -> None:
        events.append((event, threading.current_thread().name))

    def read_state() -> dict[str, str]:
        note("read")
        return {"doing": "F"}

    with Recorder(tmp_path, HEADER, begin_thread=lambda: note("begin")) as recorder:
        recorder.watch(read_state)
    assert events[0] == ("begin", "trace-writer")
    assert {event for event, _ in events[1:]} == {"read"}


def test_everything_recorded_is_written_in_order(tmp_path: Path) -> None:
    with Recorder(tmp_path / "new" / "traces", HEADER) as recorder:
        recorder.begin_iteration(1, 2, start_ns=5)
        record(recorder, "F", 0, 0, 10, 20)
        record(recorder, "B", 0, 0, 25, 40, bytes=64, in_flight_bytes=128, queue_depth=2)
        recorder.begin_iteration(2, 4, start_ns=45)
        record(recorder, "wait", 0, 1, 46, 48, of="F", peer=3, reason="memory")
        record(recorder, "optimizer", -1, -1, 50, 60)
    assert recorder.path == tmp_path / "new" / "traces" / "trace_rank_00000.jsonl"
    header, first, *_ = records(recorder.path)
    assert header == HEADER
    assert isinstance(first, IterationStart)
    assert (first.iteration, first.num_microbatches, first.counts[:2]) == (1, 2, (1, 1))
    spans = read_run(recorder.path.parent).ranks[0].spans
    assert spans(1) == (
        Span("F", 0, 0, 10, 20, 1),
        Span("B", 0, 0, 25, 40, 1, bytes=64, in_flight_bytes=128, queue_depth=2),
    )
    assert spans(2) == (
        Span("wait", 0, 1, 46, 48, 2, of="F", peer=3, reason="memory"),
        Span("optimizer", -1, -1, 50, 60, 2),
    )


def test_rows_go_in_many_at_a_time(tmp_path: Path) -> None:
    rows = [
        SpanRow(KINDS.index("W"), 0, 1, 3, 10, 30, in_flight_bytes=9, queue_depth=1),
        SpanRow(KINDS.index("send"), 1, 1, 0, 30, 35, bytes=4096, peer=7, of=1),
    ]
    with Recorder(tmp_path, HEADER) as recorder:
        assert not recorder.is_recording
        recorder.extend(rows)
        recorder.begin_iteration(1, 2, start_ns=0)
        assert recorder.is_recording
        recorder.extend(rows)
    assert spans_of(recorder.path) == [[*row[:5], row[5] - row[4], *row[6:]] for row in rows]
    assert len(COLUMNS) == len(rows[0])


def test_late_spans_and_clock_samples_follow(tmp_path: Path) -> None:
    row = SpanRow(KINDS.index("checkpoint"), start_ns=900, end_ns=950)
    samples = ClockSamples(0, ((1, 2, 3, 4),))
    with Recorder(tmp_path, HEADER) as recorder:
        recorder.begin_iteration(1, 2)
        record(recorder, "F", 0, 0, 1, 2)
        recorder.end_iteration()
        recorder.add_late(1, 2, [row])
        recorder.add_late(1, 2, [])
        recorder.add_clock_samples(samples)
        recorder.begin_iteration(2, 2)
    assert [marker.is_late for marker in markers_of(recorder.path)] == [False, True, False]
    assert samples in records(recorder.path)
    trace = read_run(tmp_path).ranks[0]
    assert [span.action for span in trace.spans(1)] == ["F", "checkpoint"]
    assert trace.spans(1)[1].start_ns == 900
    recorder.add_late(1, 2, [row])
    recorder.add_clock_samples(samples)


def test_more_iterations_than_the_queue_holds(tmp_path: Path) -> None:
    count = 10 * QUEUE_ITERATIONS
    with Recorder(tmp_path, HEADER) as recorder:
        for iteration in range(count):
            recorder.begin_iteration(iteration, 2)
            record(recorder, "F", 0, 0, iteration, iteration + 1)
    assert [marker.iteration for marker in markers_of(recorder.path)] == list(range(count))
    assert len(spans_of(recorder.path)) == count


def test_closing_twice_and_recording_after_it_do_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, HEADER)
    recorder.close()
    size = recorder.path.stat().st_size
    recorder.close()
    recorder.begin_iteration(1, 2)
    record(recorder, "F", 0, 0, 1, 2)
    recorder.end_iteration()
    assert recorder.path.stat().st_size == size


def test_the_trace_of_another_start_is_refused(tmp_path: Path) -> None:
    Recorder(tmp_path, HEADER).close()
    before = (tmp_path / "trace_rank_00000.jsonl").read_bytes()
    with pytest.raises(TraceError, match="contains the trace of another start"):
        Recorder(tmp_path, HEADER)
    assert (tmp_path / "trace_rank_00000.jsonl").read_bytes() == before


def test_an_unusable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot write the trace file"):
        Recorder(tmp_path / "file", HEADER)


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a new process that defines ``folder``, ``header`` and ``row`` before it."""
    prelude = f"""
        from pathlib import Path
        from megatron.adaptive.errors import TraceError
        from megatron.adaptive.trace.trace_format import TraceHeader
        from megatron.adaptive.trace.recorder import Recorder
        folder = Path({str(folder)!r})
        header = TraceHeader(run="r", rank=0, world_size=1, pp_rank=0, num_ranks=1,
                                    num_chunks=1, num_microbatches=2, schedule="1f1b")
        row = (0, 0, 0, 0, 1, 2, 0, 0, 0, -1, -1, 0)
    """
    program = textwrap.dedent(prelude) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_full_disk_costs_iterations_which_the_trace_knows_of(tmp_path: Path) -> None:
    # Limit the file size, so that a write fails after some bytes, like on a full disk.
    result = run_python(
        """
        import resource, shutil, time
        def limit(size):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        recorder = Recorder(folder, header)
        def trace(iterations):
            for iteration in iterations:
                recorder.begin_iteration(iteration, 2)
                recorder.extend([row] * 10)
                recorder.end_iteration()
            while recorder._queue.qsize():
                time.sleep(0.001)
            time.sleep(0.1)
        trace(range(4))
        limit(recorder.path.stat().st_size + 9)
        trace(range(4, 14))
        limit(resource.RLIM_INFINITY)
        trace(range(14, 18))
        shutil.rmtree(folder)
        trace(range(18, 20))
        recorder.close()
        """,
        tmp_path / "traces",
    )
    assert result.returncode == 0, result.stderr
    path = tmp_path / "traces" / "trace_rank_00000.jsonl"
    assert result.stderr.splitlines() == [
        f"warning: cannot write {path}: File too large; the run continues and drops the data",
        f"note: {path} can be written again; 10 iterations were lost",
    ]
    # The program deleted the folder after iteration 17. For later iterations, the recorder must
    # have created it again.
    assert read_run(path.parent).ranks[0].iterations == (18, 19)


@pytest.mark.parametrize("flag", [[], ["-u"]])
def test_output_that_takes_nothing_ends_nobody(flag: list[str]) -> None:
    program = """if True:
        import sys
        from megatron.adaptive.trace.files import keep_printing
        keep_printing()
        for _ in range(3):
            print("iteration 1", flush=True)
        sys.stderr.write("done\\n")
    """
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, *flag, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 0, ended.stderr
    warning, done = ended.stderr.splitlines()
    assert warning.startswith("warning: cannot write stdout: No space left on device")
    assert done == "done"


def test_a_gap_is_read_and_said(tmp_path: Path) -> None:
    with Recorder(tmp_path, HEADER) as recorder:
        recorder.begin_iteration(1, 2)
        record(recorder, "F", 0, 0, 1, 2)
    with recorder.path.open("a") as file:
        file.write(gap_line(Gap(2, 9, 7)))
    run = read_run(tmp_path)
    assert run.ranks[0].iterations == (1,)
    assert (
        "7 iterations of rank 0 (from 2 to 9) are missing, because its trace file could not be "
        "written at that time" in run.notes()
    )


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    result = run_python(
        """
        import os, signal
        recorder = Recorder(folder, header)
        path = recorder.path
        for iteration in range(1, 31):
            recorder.begin_iteration(iteration, 2)
            recorder.extend([row] * 20)
        while b'"begin_iteration": 20,' not in path.read_bytes():
            pass
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert result.returncode == -9
    spans = spans_of(tmp_path / "trace_rank_00000.jsonl")
    assert len(spans) >= 20 * 20
    assert len(spans) % 20 == 0


def test_an_exit_without_close_writes_the_rest_and_needs_no_heavy_package(tmp_path: Path) -> None:
    result = run_python(
        """
        import sys
        heavy = {"torch", "numpy", "openpyxl", "matplotlib"} & set(sys.modules)
        assert not heavy, heavy
        recorder = Recorder(folder, header)
        recorder.begin_iteration(1, 2)
        recorder.extend([row])
        raise SystemExit(3)
        """,
        tmp_path,
    )
    assert result.returncode == 3, result.stderr
    assert len(records(tmp_path / "trace_rank_00000.jsonl")) == 3
