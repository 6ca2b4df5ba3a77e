"""What the engine tells about the actions of a step."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from megatron.adaptive.pipeline.agreement import Alone
from megatron.adaptive.schedule.action import Action
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.registry import make_policies
from megatron.adaptive.schedule.state import RankState
from megatron.adaptive.trace.event import TraceHeader
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.recorder import Recorder

from .loopback import (
    BACKWARD_BYTES,
    FORWARD_BYTES,
    Counting,
    Picks,
    Ranks,
    forward_of,
    last_rank,
    make_executor,
)


def recorder_of(folder: Path, rank: int, placement: Placement, microbatches: int) -> Recorder:
    return Recorder(
        folder,
        TraceHeader.create(
            run="test",
            rank=rank,
            world_size=placement.num_ranks,
            pp_rank=rank,
            num_ranks=placement.num_ranks,
            num_chunks=placement.num_chunks,
            num_microbatches=microbatches,
            schedule="1f1b",
        ),
    )


def test_spans_tell_times_bytes_and_memory(tmp_path: Path) -> None:
    # stage 0:  F0 F1 B0 B1      stage 1:  F0 B0 F1 B1
    placement = Placement(num_ranks=2, num_chunks=1)
    recorders = [recorder_of(tmp_path, rank, placement, 2) for rank in range(2)]
    pipeline = Ranks(placement, recorders)
    for iteration in (4, 5):
        for recorder in recorders:
            recorder.begin_iteration(iteration, 2)
        pipeline.step(make_policies("1f1b", placement, 2), 2)
        times = [executor.finish_step() for executor in pipeline.executors]
        for recorder in recorders:
            recorder.end_iteration()
    for recorder in recorders:
        recorder.close()
    run = read_run(tmp_path)
    first, second = run.replica()
    assert first is not None
    assert second is not None
    for iteration in (4, 5):
        seen = [
            (span.action, span.microbatch, span.bytes, span.in_flight_bytes)
            for span in first.spans[iteration]
        ]
        assert seen == [
            ("F", 0, FORWARD_BYTES, 100),
            ("F", 1, FORWARD_BYTES, 200),
            ("B", 0, BACKWARD_BYTES, 200),
            ("B", 1, BACKWARD_BYTES, 100),
        ]
        seen = [
            (span.action, span.microbatch, span.bytes, span.in_flight_bytes)
            for span in second.spans[iteration]
        ]
        assert seen == [
            ("F", 0, FORWARD_BYTES, 100),
            ("B", 0, BACKWARD_BYTES, 100),
            ("F", 1, FORWARD_BYTES, 100),
            ("B", 1, BACKWARD_BYTES, 100),
        ]
    for trace, time in zip((first, second), times, strict=True):
        spans = trace.spans[5]
        assert all(span.start_ns <= span.end_ns for span in spans)
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(spans))
        assert all(b.wait_ns <= b.start_ns - a.end_ns for a, b in itertools.pairwise(spans))
        busy_ns = sum(span.end_ns - span.start_ns for span in spans)
        assert time.busy_s == pytest.approx(busy_ns / 1e9)
        assert time.span_s == pytest.approx((spans[-1].end_ns - spans[0].start_ns) / 1e9)


def test_waiting_is_charged_to_the_action_that_follows(tmp_path: Path) -> None:
    pipeline, completions = last_rank()
    recorder = recorder_of(tmp_path, 1, pipeline.placement, 2)
    executor = make_executor(pipeline, Alone(), recorder=recorder)
    follow = make_policies("1f1b", pipeline.placement, 2)[1]

    def pick(state: RankState) -> Action | None:
        action = follow.pick(state)
        if action is None and state.num_started == 2:
            # Nothing is on its way yet: whatever comes now is waited for.
            threading.Timer(0.2, completions.put, [forward_of(0, 1)]).start()
        return action

    completions.put(forward_of(0, 0))
    recorder.begin_iteration(1, 2)
    executor.run(Counting(pipeline.placement, 1), Picks(pick), pipeline.state(1, 2))
    executor.finish_step()
    recorder.end_iteration()
    recorder.close()
    trace = read_run(tmp_path).replica()[1]
    assert trace is not None
    waits = {f"{span.action}{span.microbatch}": span.wait_ns for span in trace.spans[1]}
    assert waits["F1"] > 100_000_000 > waits["F0"]


def test_what_stays_on_the_rank_is_no_traffic(tmp_path: Path) -> None:
    placement = Placement(num_ranks=1, num_chunks=3)
    recorder = recorder_of(tmp_path, 0, placement, 2)
    pipeline = Ranks(placement, [recorder])
    recorder.begin_iteration(1, 2)
    stages, _ = pipeline.step(make_policies("interleaved", placement, 2), 2)
    pipeline.executors[0].finish_step()
    recorder.end_iteration()
    recorder.close()
    assert stages[0].last_gradients == [[0.0, 2.0], [1.0, 2.0]]
    trace = read_run(tmp_path).replica()[0]
    assert trace is not None
    assert len(trace.spans[1]) == 12
    assert all(span.bytes == 0 for span in trace.spans[1])


def test_a_step_without_trace_still_tells_its_times() -> None:
    pipeline = Ranks(Placement(num_ranks=1, num_chunks=1))
    pipeline.step(make_policies("1f1b", pipeline.placement, 3), 3)
    times = pipeline.executors[0].finish_step()
    assert 0 < times.busy_s <= times.span_s
    # Spans are handed over once.
    assert pipeline.executors[0].finish_step().busy_s == 0


def test_a_split_backward_keeps_memory_until_its_last_piece(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path, 0, Placement(num_ranks=1, num_chunks=1), 1)
    pipeline = Ranks(Placement(num_ranks=1, num_chunks=1), [recorder])
    recorder.begin_iteration(1, 1)
    policies = [Picks(lambda state: next(iter(state.ready())))]
    stages, _ = pipeline.step(policies, 1, weight_pieces=2)
    pipeline.executors[0].finish_step()
    recorder.end_iteration()
    recorder.close()
    assert stages[0].actions == ["F0-0", "B0-0", "W0-0", "W0-0.1"]
    trace = read_run(tmp_path).replica()[0]
    assert trace is not None
    seen = [(span.action, span.in_flight_bytes) for span in trace.spans[1]]
    assert seen == [("F", 100), ("B", 100), ("W", 30), ("W", 30)]
