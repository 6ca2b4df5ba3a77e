"""Tests the spans that the executor records in a trace for the actions of a step."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.schedule.action import Action
from megatron.adaptive.schedule.catalog import make_policies
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, Span
from megatron.adaptive.transport.interface import HeldArrival, Label

from .loopback import (
    BACKWARD_BYTES,
    FORWARD_BYTES,
    B,
    Counting,
    Picks,
    Ranks,
    arrival,
    forward_of,
    last_rank,
    make_executor,
    recorder_of,
)


def traced_step(
    folder: Path,
    policies: Sequence[Policy],
    placement: Placement,
    microbatches: int,
    **options: Any,
) -> tuple[RunTrace, list[RankTimes], list[Counting]]:
    """Runs iteration 1 on all ranks, and returns the trace and each rank's times and stages.

    The trace is written to ``folder``. ``policies`` contains the policy of each rank.
    """
    ranks = range(placement.num_ranks)
    recorders = [recorder_of(folder, rank, placement, microbatches) for rank in ranks]
    for recorder in recorders:
        recorder.begin_iteration(1, microbatches)
    pipeline = Ranks(placement, recorders)
    stages, _ = pipeline.step(policies, microbatches, **options)
    times = [executor.finish_step() for executor in pipeline.executors]
    for recorder in recorders:
        recorder.end_iteration()
        recorder.close()
    return read_run(folder), times, stages


def traced_rank(
    folder: Path, pipeline: Ranks, rank: int, policy: Policy, microbatches: int, **options: Any
) -> list[Span]:
    """Runs iteration 1 on ``rank``, for which the test provides all inputs. Returns its spans.

    The trace is written to ``folder``. ``policy`` chooses the actions.
    """
    recorder = recorder_of(folder, rank, pipeline.placement, microbatches)
    recorder.begin_iteration(1, microbatches)
    executor = make_executor(pipeline, pp_rank=rank, recorder=recorder)
    stages = Counting(pipeline.placement, rank)
    executor.run(stages, policy, pipeline.state(rank, microbatches, **options))
    executor.finish_step()
    recorder.close()
    return list(read_run(folder).ranks[rank].spans(1))


def actions(run: RunTrace, rank: int) -> list[Span]:
    return [span for span in run.ranks[rank].spans(1) if span.action in DRAWN_ACTIONS]


def test_spans_tell_times_bytes_and_memory(tmp_path: Path) -> None:
    # The first stage runs F0 F1 B0 B1, and the second stage runs F0 B0 F1 B1.
    placement = Placement(num_ranks=2, num_chunks=1)
    run, times, _ = traced_step(tmp_path, make_policies("1f1b", placement, 2), placement, 2)
    sizes = {"F": FORWARD_BYTES, "B": BACKWARD_BYTES}
    expected = [
        [("F", 0, 100), ("F", 1, 200), ("B", 0, 200), ("B", 1, 100)],
        [("F", 0, 100), ("B", 0, 100), ("F", 1, 100), ("B", 1, 100)],
    ]
    for rank, step_times in enumerate(times):
        spans = actions(run, rank)
        assert [(s.action, s.microbatch, s.in_flight_bytes) for s in spans] == expected[rank]
        assert all(span.bytes == sizes[span.action] for span in spans)
        assert all(span.reason == "order" for span in spans)
        assert all(span.start_ns <= span.end_ns for span in spans)
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(spans))
        assert all(b.wait_ns <= b.start_ns - a.end_ns for a, b in itertools.pairwise(spans))
        busy_ns = sum(span.end_ns - span.start_ns for span in spans)
        sends = [span for span in run.ranks[rank].spans(1) if span.action == "send"]
        sends_ns = sum(span.end_ns - span.start_ns for span in sends)
        # The compute time of an action ends before its result is sent.
        assert 0 < step_times.busy_s <= (busy_ns - sends_ns) / 1e9
        assert step_times.busy_s == pytest.approx(sum(ns for _, ns in step_times.actions) / 1e9)
        assert step_times.span_s == pytest.approx((spans[-1].end_ns - spans[0].start_ns) / 1e9)


def awaited_later(tmp_path: Path, put: Callable[[Any], None], pipeline: Ranks) -> list[Span]:
    """Runs 1F1B on the second of two ranks, and returns the spans of this rank.

    The input of the second microbatch arrives late. The function ``put`` passes inputs to the rank.
    """
    follow = make_policies("1f1b", pipeline.placement, 2)[1]

    def pick(state: RankState) -> Action | None:
        action = follow.pick(state)
        if action is None and state.num_started == 2:
            # All messages so far have been received, so the rank now waits. Send the next message
            # during this wait.
            threading.Timer(0.2, put, [forward_of(0, 1)]).start()
        return action

    put(forward_of(0, 0))
    return traced_rank(tmp_path, pipeline, 1, Picks(pick), 2)


def test_waiting_is_charged_to_the_action_that_follows(tmp_path: Path) -> None:
    pipeline, completions = last_rank()
    spans = awaited_later(tmp_path, completions.put, pipeline)
    waits = {f"{span.action}{span.microbatch}": span.wait_ns for span in spans}
    assert waits["F1"] > 100_000_000 > waits["F0"]
    wait = max((span for span in spans if span.action == "wait"), key=lambda s: s.duration_ns)
    assert (wait.of, wait.chunk, wait.microbatch, wait.peer) == ("F", 0, 1, 10)
    assert wait.reason == "input"
    receives = [span for span in spans if span.action == "receive"]
    # The first message had arrived before the rank looked for messages. The second message arrived
    # while the rank waited for it.
    assert [(span.microbatch, span.reason) for span in receives] == [(0, "found"), (1, "seen")]
    assert receives[1].start_ns == pytest.approx(wait.end_ns, abs=50_000_000)


def test_others_see_what_it_does() -> None:
    # The first stage runs F0 F1 B0 B1. The test provides the gradients of the second stage, which
    # runs F0 B0 F1 B1.
    placement = Placement(num_ranks=2, num_chunks=1)
    pipeline = Ranks(placement)
    executor = make_executor(pipeline, pp_rank=0)
    completions = pipeline.transports[0].completions
    seen: list[dict[str, Any]] = []

    class Watched(Counting):
        def forward(self, *arguments: Any) -> Any:
            seen.append(executor.snapshot())
            return super().forward(*arguments)

        def backward(self, *arguments: Any) -> Any:
            seen.append(executor.snapshot())
            return super().backward(*arguments)

    def pick(state: RankState) -> Action | None:
        action = policy.pick(state)
        if action is None:
            seen.append(executor.snapshot())
            microbatch = state.num_started - 2
            payload = torch.tensor([microbatch, 1], dtype=torch.float64)
            completions.put(arrival(Label(0, Action(B, 0, microbatch)), 11, payload))
        return action

    policy = make_policies("1f1b", placement, 2)[0]
    assert executor.snapshot() == {}
    executor.run(Watched(placement, 0), Picks(pick), pipeline.state(0, 2))
    assert executor.snapshot() == {}
    assert [(now["doing"], now.get("microbatch", -1), now["done"]) for now in seen] == [
        ("F", 0, [0, 0, 0]),
        ("F", 1, [1, 0, 0]),
        ("wait", -1, [2, 0, 0]),
        ("B", 0, [2, 0, 0]),
        ("wait", -1, [2, 1, 0]),
        ("B", 1, [2, 1, 0]),
    ]
    assert [now["held_bytes"] for now in seen] == [0, 100, 200, 200, 100, 100]


def test_a_transport_may_tell_when_a_message_arrived(tmp_path: Path) -> None:
    pipeline, completions = last_rank()
    early = time.monotonic_ns()

    def put(item: Any) -> None:
        completions.put(HeldArrival(item.label, item.peer, item.nbytes, item.take, early))

    spans = awaited_later(tmp_path, put, pipeline)
    receives = [span for span in spans if span.action == "receive"]
    assert [(span.start_ns, span.reason) for span in receives] == [(early, "seen")] * 2


def test_inputs_that_wait_are_counted(tmp_path: Path) -> None:
    pipeline, completions = last_rank()
    for microbatch in range(4):
        completions.put(forward_of(0, microbatch))
    policy = make_policies("1f1b", pipeline.placement, 4)[1]
    spans = traced_rank(tmp_path, pipeline, 1, policy, 4)
    assert [(s.action, s.queue_depth) for s in spans if s.action in DRAWN_ACTIONS] == [
        *[("F", 3), ("B", 3), ("F", 2), ("B", 2)],
        *[("F", 1), ("B", 1), ("F", 0), ("B", 0)],
    ]


def test_a_split_backward_keeps_memory_until_its_last_piece(tmp_path: Path) -> None:
    placement = Placement(num_ranks=1, num_chunks=2)
    policies = make_policies("adaptive", placement, 1)
    run, _, stages = traced_step(tmp_path, policies, placement, 1, weight_pieces=2)
    expected = ["F0-0", "F1-0", "B1-0", "B0-0", "W1-0", "W1-0.1", "W0-0", "W0-0.1"]
    assert stages[0].actions == expected
    spans = run.ranks[0].spans(1)
    held = [100, 200, 200, 130, 60, 60, 30, 30]
    assert [span.in_flight_bytes for span in spans] == held
    # There is only one rank, so no tensors are sent, and the spans have no bytes.
    assert all(span.bytes == 0 for span in spans)


def test_others_see_the_slice() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    pipeline = Ranks(placement)
    executor = make_executor(pipeline, pp_rank=0)
    policy = make_policies("seq-1f1b", placement, 2, num_slices=2)[0]
    seen: list[tuple[Any, ...]] = []
    needs: list[Any] = []

    class Watched(Counting):
        def forward(self, *arguments: Any) -> Any:
            seen.append(shown())
            return super().forward(*arguments)

        def backward(self, *arguments: Any) -> Any:
            seen.append(shown())
            return super().backward(*arguments)

    def shown() -> tuple[Any, ...]:
        now = executor.snapshot()
        return now["doing"], now["microbatch"], now["slice"]

    def pick(state: RankState) -> Action | None:
        action = policy.pick(state)
        if action is None:
            needs.extend(executor.evidence()["needs"])
            due = policy.order[state.num_started]
            payload = torch.tensor([due.microbatch, 1], dtype=torch.float64)
            label = Label(0, Action(B, 0, due.microbatch))
            pipeline.transports[0].completions.put(arrival(label, 11, payload))
        return action

    executor.run(Watched(placement, 0), Picks(pick), pipeline.state(0, 2, num_slices=2))
    assert [item for item in seen if item[0] == "F"] == [
        ("F", m, p) for m in (0, 1) for p in (0, 1)
    ]
    assert [item for item in seen if item[0] == "B"] == [
        ("B", m, p) for m in (0, 1) for p in (1, 0)
    ]
    # The sender begins its backward passes with the last slice of a microbatch.
    assert needs[0][1:] == [B, 0, 0, "0.1"]
