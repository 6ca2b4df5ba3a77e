"""Checks that the events for Perfetto contain all spans, messages and counters of the trace."""

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.kernels import KernelFile, StepKernels, TimedKernel, read_steps, summed
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.span_columns import match_messages
from megatron.adaptive.trace.step_view import pipeline_step
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, Span, trace_file_name
from megatron.adaptive.trace.views import perfetto
from megatron.adaptive.trace.views.perfetto import perfetto_events, write_perfetto
from tests.support.synthetic_trace import SyntheticRun, write_synthetic
from tests.trace.conftest import make_header, record, write_spans
from tests.trace.views import event_rules as rules


@pytest.fixture
def run(tmp_path: Path) -> RunTrace:
    """Returns a run on two hosts, with two replicas of three ranks and two chunks per rank."""
    shape = SyntheticRun(
        num_ranks=3,
        replicas=2,
        num_chunks=2,
        num_microbatches=5,
        iterations=3,
        weight_pieces=2,
        hosts=2,
        clock_offset_s=3.0,
        clock_drift_ppm=40.0,
    )
    write_synthetic(tmp_path / "traces", shape)
    return read_run(tmp_path / "traces")


def of_phase(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    """Returns the events with the phase ``phase``, except for the slices of ideal steps."""
    return [event for event in events if event["ph"] == phase and event.get("cat") != "ideal"]


def test_the_rules_of_the_format_are_kept(run: RunTrace) -> None:
    events = list(perfetto_events(run, run.iterations))
    assert len(events) > 2000
    assert rules.broken_rules(events) == []


def test_every_span_is_a_slice_with_its_times_and_figures(run: RunTrace) -> None:
    events = list(perfetto_events(run, run.iterations))
    first = min(int(trace.table().start_ns.min()) for trace in run.ranks.values())
    for rank, trace in run.ranks.items():
        table = trace.table()
        slices = [event for event in of_phase(events, "X") if event["pid"] == rank + 1]
        expected = sorted(
            (start - first, max(end - start, 1))
            for start, end in zip(table.start_ns.tolist(), table.end_ns.tolist(), strict=True)
        )
        times = [(rules.nanoseconds(e["ts"]), rules.nanoseconds(e["dur"])) for e in slices]
        assert sorted(times) == expected
        forwards = [event for event in slices if event["cat"] == "forward"]
        spans = table.of_kind("F").spans()
        names = Counter(f"forward {span.chunk}-{span.microbatch}" for span in spans)
        assert Counter(event["name"] for event in forwards) == names
        held = sum(event["args"]["in_flight_bytes"] for event in forwards)
        assert held == int(table.of_kind("F").in_flight_bytes.sum())
    causes = {e["args"].get("cause") for e in of_phase(events, "X") if e["cat"] == "wait"}
    assert causes
    assert causes <= {"input", "memory", "order", "group"}


def test_a_thread_has_the_step_as_it_would_be_with_nobody_slower(run: RunTrace) -> None:
    events = list(perfetto_events(run, [2]))
    for rank, trace in run.ranks.items():
        ideal = [e for e in events if e["pid"] == rank + 1 and e.get("cat") == "ideal"]
        recorded = trace.table([2]).of_kind(*DRAWN_ACTIONS)
        assert len(ideal) == len(recorded)
        lengths = {e["dur"] for e in ideal if e["name"].startswith("forward")}
        # All forward passes of the ideal step have the same duration. The durations are in
        # microseconds.
        assert max(lengths) - min(lengths) < 0.002


def test_a_flow_leads_from_each_send_to_its_input(run: RunTrace) -> None:
    events = list(perfetto_events(run, [2]))
    messages = match_messages({rank: t.table([2]) for rank, t in run.ranks.items()})
    begins = {event["id"]: event for event in of_phase(events, "s")}
    ends = {event["id"]: event for event in of_phase(events, "f")}
    assert len(begins) == len(ends) == len(messages) > 50
    pairs = Counter((begins[key]["pid"] - 1, ends[key]["pid"] - 1) for key in begins)
    assert pairs == Counter(zip(messages.source.tolist(), messages.target.tolist(), strict=True))
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in of_phase(events, "X")}
    for key, begin in begins.items():
        sent = slices[begin["pid"], begin["tid"], begin["ts"]]
        got = slices[ends[key]["pid"], ends[key]["tid"], ends[key]["ts"]]
        assert sent.removeprefix("send ") == got.removeprefix("receive ")


def test_counters_follow_the_memory_and_the_queue(run: RunTrace) -> None:
    events = list(perfetto_events(run, [1, 2]))
    peaks: dict[tuple[int, str], float] = defaultdict(float)
    for event in of_phase(events, "C"):
        key = (event["pid"] - 1, event["name"])
        peaks[key] = max(peaks[key], *event["args"].values())
    for rank, trace in run.ranks.items():
        actions = trace.table([1, 2]).of_kind(*DRAWN_ACTIONS)
        assert peaks[rank, "activation bytes in flight"] == actions.in_flight_bytes.max()
        assert peaks[rank, "inputs queued"] == actions.queue_depth.max()
        assert 1 <= peaks[rank, "microbatches in flight"] <= 2 * 5


def test_names_and_order_of_processes(run: RunTrace) -> None:
    events = list(perfetto_events(run, [1]))
    metadata = of_phase(events, "M")
    names = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    assert names[1] == "rank 0: stages 0, 5, replica 0"
    assert names[6] == "rank 5: stages 2, 3, replica 1"
    order = [e["args"]["sort_index"] for e in metadata if e["name"] == "process_sort_index"]
    assert order == list(range(6))


def test_spans_that_overlap_lie_on_threads_of_their_own(tmp_path: Path) -> None:
    spans = [
        Span("F", 0, 0, 1_000, 5_000, 1),
        # These spans overlap, as in a trace of a device on which two streams run at the same time.
        Span("F", 0, 1, 3_000, 8_000, 1),
        # A span with a duration of zero must be shown with a minimum duration.
        Span("B", 0, 0, 8_000, 8_000, 1),
        Span("B", 0, 1, 8_000, 9_000, 1),
        Span("receive", 0, 0, 100, 1_000, 1, of="F", peer=1, reason="seen"),
        Span("receive", 0, 1, 200, 900, 1, of="F", peer=1, reason="seen"),
        Span("step", -1, -1, 0, 10_000, 1),
        Span("optimizer", -1, -1, 9_000, 10_000, 1),
    ]
    write_spans(tmp_path, make_header(0, 1), spans)
    events = list(perfetto_events(read_run(tmp_path), [1]))
    assert rules.broken_rules(events) == []
    names = [e["args"]["name"] for e in of_phase(events, "M") if e["name"] == "thread_name"]
    assert sorted(names) == [
        *("compute", "compute 2"),
        *("ideal: no rank slower than others", "ideal: no rank slower than others 2"),
        *("inputs", "inputs 2", "step"),
    ]


def test_what_microbatches_hold_is_with_their_actions(tmp_path: Path) -> None:
    with Recorder(tmp_path, make_header(0, 1)) as recorder:
        for iteration, lengths in ((1, ((16, 9, 4), (8, 8))), (2, ())):
            start = 1000 * iteration
            recorder.begin_iteration(iteration, 2, start_ns=start, lengths=lengths)
            for microbatch in range(2):
                start_ns = start + 100 * microbatch
                record(recorder, "data", -1, microbatch, start_ns, start_ns + 5)
                record(recorder, "F", 0, microbatch, start_ns + 10, start_ns + 20)
            recorder.end_iteration()
    run = read_run(tmp_path)
    assert pipeline_step(run, 1).lengths == ((16, 9, 4), (8, 8))
    assert pipeline_step(run, 2).lengths == ()
    shown = defaultdict(list)
    for event in of_phase(list(perfetto_events(run, [1, 2])), "X"):
        arguments = event["args"]
        shown[event["cat"]].append([arguments.get(n) for n in ("tokens", "padding", "lengths")])
    expected = [[13, 3, [9, 4]], [8, 0, [8]], [None] * 3, [None] * 3]
    assert shown == {"forward": expected, "data": expected}


def test_times_survive_rounding_and_cutting_off() -> None:
    numbers = np.random.default_rng(0).integers(0, 10**14, 200_000)
    numbers = np.concatenate([numbers, np.arange(50_000)])
    again = np.array(perfetto._microseconds(numbers)) * 1000
    assert (np.floor(again) == numbers).all()
    assert (np.rint(again) == numbers).all()


def test_a_file_holds_the_events_compressed_or_plain(run: RunTrace, tmp_path: Path) -> None:
    assert write_perfetto(run, tmp_path / "a.json.gz", [1, 2]) == []
    assert write_perfetto(run, tmp_path / "a.json", [1, 2]) == []
    with gzip.open(tmp_path / "a.json.gz", "rt") as file:
        packed = json.load(file)
    assert packed == json.loads((tmp_path / "a.json").read_text())
    assert packed["traceEvents"] == list(perfetto_events(run, [1, 2]))
    assert packed["otherData"]["iterations"] == "1-2"


def test_one_replica_and_missing_ranks(run: RunTrace, tmp_path: Path) -> None:
    write_perfetto(run, tmp_path / "a.json", [1], dp_rank=1)
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {2, 4, 6}
    (run.origin / trace_file_name(2)).unlink()
    events = list(perfetto_events(read_run(run.origin), [1]))
    assert rules.broken_rules(events) == []
    assert {event["pid"] for event in events} == {1, 2, 4, 5, 6}


def test_what_is_too_much_is_left_out_and_said(
    run: RunTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = sum(len(trace.table([3])) for trace in run.ranks.values())
    monkeypatch.setattr(perfetto, "MAX_SPANS", count + count // 2)
    (note,) = write_perfetto(run, tmp_path / "a.json", run.iterations)
    assert "the last 1 of 3 iterations" in note
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert len(of_phase(events, "X")) == count


def test_kernels_are_read_once_however_much_is_left_out(
    run: RunTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = KernelFile(run.origin, 0)
    for iteration in run.iterations:
        file.add(summed(iteration, "cpu", [TimedKernel("a", 5, 9)] * 1000, ()))
    file.close()
    reads = Counter[int]()

    def counted(run: RunTrace, rank: int) -> list[StepKernels]:
        reads[rank] += 1
        return read_steps(run, rank)

    monkeypatch.setattr(perfetto, "read_steps", counted)
    count = sum(len(trace.table([3])) for trace in run.ranks.values())
    monkeypatch.setattr(perfetto, "MAX_SPANS", count + 1500)
    (note,) = write_perfetto(run, tmp_path / "a.json", run.iterations)
    assert "the last 1 of 3 iterations" in note
    # The file of each rank is read twice: first to decide how many iterations fit within the limit,
    # then to write the kernels.
    assert reads == dict.fromkeys(run.ranks, 2)


def test_what_is_not_there_is_refused(run: RunTrace, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="iteration 9 is not in .* which has iterations 1-3"):
        write_perfetto(run, tmp_path / "a.json.gz", [9])
    with pytest.raises(TraceError, match="data-parallel rank 7"):
        write_perfetto(run, tmp_path / "a.json.gz", [1], dp_rank=7)
    with pytest.raises(TraceError, match="do not contain any spans"):
        write_perfetto(run, tmp_path / "a.json.gz", [])
    assert not list(tmp_path.glob("*.json*"))
