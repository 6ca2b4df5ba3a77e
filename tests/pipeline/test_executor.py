"""The engine on made-up stages: several ranks in threads, joined by queues."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.errors import DeadlineError, PeerLostError, ScheduleError, TransportError
from megatron.adaptive.pipeline.agreement import Alone
from megatron.adaptive.pipeline.executor import Executor
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.memory import default_cap
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.registry import make_policies, make_schedule
from megatron.adaptive.schedule.state import RankState
from megatron.adaptive.trace.event import TraceHeader
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.transport.interface import Arrival, CompletionQueue, Label

from .loopback import (
    BACKWARD_BYTES,
    FORWARD_BYTES,
    WATCHDOG_S,
    B,
    Counting,
    F,
    Ranks,
    arrival,
)

SHAPES = [(1, 1, 3), (1, 2, 2), (2, 1, 1), (2, 1, 5), (2, 2, 4), (3, 1, 4), (4, 1, 6), (4, 2, 8)]


class Picks:
    """A policy that is a function of the state."""

    name = "made-up"

    def __init__(self, pick: Callable[[RankState], Action | None]) -> None:
        self.pick = pick


def ready_first(state: RankState) -> Action | None:
    return next(iter(state.ready()), None)


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), SHAPES)
@pytest.mark.parametrize("name", ["static", "gpipe"])
def test_static_schedule_is_run_as_listed(
    name: str, ranks: int, chunks: int, microbatches: int
) -> None:
    if name == "static":
        name = "1f1b" if chunks == 1 else "interleaved"
    placement = Placement(num_ranks=ranks, num_chunks=chunks)
    schedule = make_schedule(name, placement, microbatches)
    pipeline = Ranks(placement)
    for _ in range(2):
        stages, states = pipeline.step(make_policies(name, placement, microbatches), microbatches)
        for rank in range(ranks):
            assert stages[rank].actions == [str(action) for action in schedule.orders[rank]]
            assert states[rank].done
        # Every microbatch came back to the first stage after passing all the others.
        expected = [[float(number), placement.num_stages - 1.0] for number in range(microbatches)]
        assert stages[0].last_gradients == expected


@pytest.mark.parametrize("kind", ["loop", "v"])
@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), SHAPES)
@pytest.mark.parametrize("least", [False, True])
def test_adaptive_runs_each_action_once_within_the_cap(
    least: bool, ranks: int, chunks: int, microbatches: int, kind: Any
) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=chunks, kind=kind)
    cap = 1.0 if least else default_cap(placement, microbatches)
    pipeline = Ranks(placement)
    for _ in range(2):
        stages, states = pipeline.step(
            make_policies("adaptive", placement, microbatches), microbatches, cap=cap
        )
        everything = {
            str(Action(action, chunk, microbatch))
            for action in (F, B)
            for chunk in range(chunks)
            for microbatch in range(microbatches)
        }
        for stage, state in zip(stages, states, strict=True):
            assert len(stage.actions) == len(everything)
            assert set(stage.actions) == everything
            assert state.done
            assert state.peak_in_flight <= cap + 1e-6
        assert [mb for mb, _ in stages[0].last_gradients] == list(range(microbatches))


def test_evaluation_has_forwards_only() -> None:
    placement = Placement(num_ranks=2, num_chunks=2)
    stages, _ = Ranks(placement).step(
        make_policies("forward-only", placement, 4), 4, forward_only=True
    )
    for stage in stages:
        assert sorted(stage.actions) == sorted(
            f"F{chunk}-{microbatch}" for chunk in range(2) for microbatch in range(4)
        )


def test_an_output_is_released_after_it_was_handed_on() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    pipeline = Ranks(placement)
    sent_at_release = []
    transport = pipeline.transports[0]

    class Watching(Counting):
        def release(self, chunk: int, microbatch: int) -> None:
            sent_at_release.append([label.action.microbatch for label in transport.sent])
            super().release(chunk, microbatch)

    pipeline.executors[0].run(
        Watching(placement, 0),
        make_policies("forward-only", placement, 3)[0],
        pipeline.state(0, 3, forward_only=True),
    )
    assert sent_at_release == [[0], [0, 1], [0, 1, 2]]


def last_rank(timeout_s: float = WATCHDOG_S) -> tuple[Ranks, CompletionQueue]:
    """Rank 1 of two, to be fed by hand."""
    pipeline = Ranks(Placement(num_ranks=2, num_chunks=1), timeout_s=timeout_s)
    return pipeline, pipeline.transports[1].completions


def forward_of(step: int, microbatch: int) -> Arrival:
    return arrival(
        Label(step, Action(F, 0, microbatch)), 10, torch.tensor([microbatch, 1], dtype=torch.float)
    )


def run_last(pipeline: Ranks, microbatches: int, policy: Policy | None = None) -> Counting:
    stages = Counting(pipeline.placement, 1)
    pipeline.executors[1].run(stages, policy or Picks(ready_first), pipeline.state(1, microbatches))
    return stages


def test_inputs_may_come_in_any_order() -> None:
    pipeline, completions = last_rank()
    for microbatch in (2, 0, 1):
        completions.put(forward_of(0, microbatch))
    stages = run_last(pipeline, 3, make_policies("1f1b", pipeline.placement, 3)[1])
    assert stages.actions == ["F0-0", "B0-0", "F0-1", "B0-1", "F0-2", "B0-2"]


def test_what_comes_early_is_kept_for_the_next_step() -> None:
    pipeline, completions = last_rank(timeout_s=0.5)
    # The neighbour runs ahead: it is in the next step before this rank has finished the first.
    for step, microbatch in ((0, 0), (1, 0), (1, 1), (0, 1)):
        completions.put(forward_of(step, microbatch))
    for _ in range(2):
        assert sorted(run_last(pipeline, 2).actions) == ["B0-0", "B0-1", "F0-0", "F0-1"]
    # Nothing is left over for a third one.
    with pytest.raises(DeadlineError):
        run_last(pipeline, 1)


def test_a_neighbour_may_be_several_steps_ahead() -> None:
    # In evaluation the first stage waits for nobody; its messages once ended the run.
    pipeline, completions = last_rank(timeout_s=0.5)
    for step in (2, 1, 3, 0):
        completions.put(forward_of(step, 0))
    for _ in range(4):
        assert sorted(run_last(pipeline, 1).actions) == ["B0-0", "F0-0"]


@pytest.mark.parametrize("step", [-1, 0])
def test_messages_of_another_step_are_refused(step: int) -> None:
    pipeline, completions = last_rank()
    completions.put(forward_of(0, 0))
    run_last(pipeline, 1)
    completions.put(forward_of(step, 0))
    with pytest.raises(TransportError, match=f"rank 10 sent F0-0 of step {step} to rank 1") as info:
        run_last(pipeline, 1)
    assert "which is in step 1" in str(info.value)


def test_the_same_input_twice_is_refused() -> None:
    pipeline, completions = last_rank()
    completions.put(forward_of(0, 0))
    completions.put(forward_of(0, 0))
    with pytest.raises(ScheduleError, match="F0-0 arrived twice"):
        run_last(pipeline, 2)


def test_deadline_names_what_is_missing() -> None:
    pipeline, completions = last_rank(timeout_s=0.05)
    completions.put(forward_of(0, 0))
    with pytest.raises(DeadlineError) as info:
        run_last(pipeline, 2)
    text = str(info.value)
    assert "rank 1 of the pipeline waited 0.05 s in step 0" in text
    assert "input of F0-1 from rank 0 (stage 0)" in text
    assert "--pipeline-timeout-s" in text
    assert len(text.splitlines()) == 1


def test_a_lost_peer_ends_the_step() -> None:
    pipeline, completions = last_rank()
    completions.put(forward_of(0, 0))
    completions.put(PeerLostError("rank 10 is gone"))
    with pytest.raises(PeerLostError, match="rank 10 is gone"):
        run_last(pipeline, 2)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Action(B, 0, 0), "its own forward F0-0 has not finished"),
        (Action(F, 0, 1), "F0-0 comes before it"),
        (Action(F, 1, 0), "there is no such action"),
        (Action(ActionKind.W, 0, 0), "this step has no W"),
    ],
)
def test_an_impossible_pick_is_named(action: Action, reason: str) -> None:
    pipeline, _ = last_rank()
    with pytest.raises(ScheduleError) as info:
        run_last(pipeline, 2, Picks(lambda state: action))
    text = str(info.value)
    assert f"policy made-up picked {action} on rank 1 of the pipeline" in text
    assert reason in text
    assert len(text.splitlines()) == 1


def test_an_action_that_was_done_is_not_done_again() -> None:
    pipeline, completions = last_rank()
    completions.put(forward_of(0, 0))
    with pytest.raises(ScheduleError, match="picked F0-0 .* it was started before"):
        run_last(pipeline, 2, Picks(lambda state: Action(F, 0, 0)))


def test_a_pick_whose_input_is_on_its_way_is_waited_for() -> None:
    # A follower's picks come from another rank, whose inputs arrived earlier.
    pipeline, completions = last_rank()
    order = [Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)]
    for microbatch in range(2):
        completions.put(forward_of(0, microbatch))
    stages = run_last(pipeline, 2, Picks(lambda state: order[state.num_started]))
    assert stages.actions == [str(action) for action in order]


def test_a_rank_alone_that_cannot_go_on_says_so() -> None:
    pipeline = Ranks(Placement(num_ranks=1, num_chunks=1))
    with pytest.raises(ScheduleError, match="no other rank could change that: ready: F0-0"):
        pipeline.step([Picks(lambda state: None)], 1)


def test_a_missing_gradient_is_named() -> None:
    class Forgetful(Counting):
        def backward(self, *_: Any) -> None:
            return None

    pipeline, completions = last_rank()
    completions.put(forward_of(0, 0))
    with pytest.raises(ScheduleError, match="B0-0 on rank 1 of the pipeline gave no gradient"):
        pipeline.executors[1].run(
            Forgetful(pipeline.placement, 1), Picks(ready_first), pipeline.state(1, 1)
        )


def test_an_error_of_a_stage_passes_through() -> None:
    class Broken(Counting):
        def forward(self, *_: Any) -> torch.Tensor:
            raise ZeroDivisionError("in the model")

    pipeline, completions = last_rank()
    completions.put(forward_of(0, 0))
    with pytest.raises(ZeroDivisionError, match="in the model"):
        pipeline.executors[1].run(
            Broken(pipeline.placement, 1), Picks(ready_first), pipeline.state(1, 1)
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
    executor = Executor(
        placement=pipeline.placement,
        pp_rank=1,
        peer_of=lambda position: 10 + position,
        transport=pipeline.transports[1],
        agreement=Alone(),
        clock=CpuClock(),
        recorder=recorder,
        timeout_s=WATCHDOG_S,
    )
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
