"""Tests executors with simulated stages. The ranks are threads that are connected by queues."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.engine import executor as executor_module
from megatron.adaptive.engine.agreement import Agreement
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.errors import DeadlineError, PeerLostError, ScheduleError, TransportError
from megatron.adaptive.schedule.action import Action
from megatron.adaptive.schedule.catalog import make_policies, make_schedule
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.hang_watch import RankEvidence
from megatron.adaptive.transport.interface import CompletionQueue, Label

from .loopback import (
    B,
    Counting,
    F,
    Loopback,
    Picks,
    Ranks,
    TickingClock,
    W,
    forward_of,
    last_rank,
    make_executor,
    ready_first,
)

SHAPES = [(1, 1, 3), (1, 2, 2), (2, 1, 1), (2, 1, 5), (2, 2, 4), (3, 1, 4), (4, 1, 6), (4, 2, 8)]


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
        # The gradient of each microbatch must pass all other stages before it reaches the first
        # stage.
        expected = [[float(number), placement.num_stages - 1.0] for number in range(microbatches)]
        assert stages[0].last_gradients == expected


@pytest.mark.parametrize("name", ["adaptive", "hinted", "dfc", "bfc"])
def test_random_pipelines_run_each_action_once_within_the_cap(name: str) -> None:
    """Checks that random pipelines run each action once, even if the ranks differ in speed."""
    rng = random.Random(name)
    for case in range(50):
        chunks, microbatches = rng.choice([1, 2, 2, 3]), rng.randint(1, 8)
        kind: Any = rng.choice(["loop", "v"])
        placement = Placement(num_ranks=rng.choice([1, 2, 3, 4]), num_chunks=chunks, kind=kind)
        cap = rng.choice([1.0, rng.uniform(1.0, 3.0), default_cap(placement, microbatches), 8.0])
        pieces = rng.choice([0, 1, 3])
        means_s = [rng.choice([0.0, 1e-4, 6e-4]) for _ in range(placement.num_ranks)]

        def nap(rank: int, action: Action, means_s: list[float] = means_s) -> None:
            time.sleep(means_s[rank] * random.lognormvariate(0, 0.7))

        policies = make_policies(name, placement, microbatches, cap=cap, weight_pieces=pieces)
        pipeline = Ranks(placement, when_run=nap)
        for _ in range(1 + case % 2):
            stages, states = pipeline.step(policies, microbatches, cap=cap, weight_pieces=pieces)
            everything = sorted(
                str(Action(action, chunk, microbatch, piece))
                for action, count in ((F, 1), (B, 1), (W, pieces))
                for chunk in range(chunks)
                for microbatch in range(microbatches)
                for piece in range(count)
            )
            for stage, state in zip(stages, states, strict=True):
                assert sorted(stage.actions) == everything
                assert state.done
                assert state.peak_in_flight <= cap + 1e-3
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


def test_the_reduction_starts_after_the_gradient_was_sent() -> None:
    # The previous stage must not wait while this rank starts the data-parallel reduction.
    pipeline, completions = last_rank()
    transport = pipeline.transports[1]
    sent: list[list[int]] = []

    class Reducing(Counting):
        def after_backward(self, chunk: int, microbatch: int) -> None:
            sent.append([label.action.microbatch for label in transport.sent])

    for microbatch in range(2):
        completions.put(forward_of(0, microbatch))
    run_last(pipeline, 2, stages=Reducing)
    assert sent == [[0], [0, 1]]


def run_last(
    pipeline: Ranks,
    microbatches: int,
    policy: Policy | None = None,
    *,
    stages: type[Counting] = Counting,
    executor: Executor | None = None,
) -> Counting:
    made = stages(pipeline.placement, 1)
    executor = executor or pipeline.executors[1]
    executor.run(made, policy or Picks(ready_first), pipeline.state(1, microbatches))
    return made


def test_inputs_may_come_in_any_order() -> None:
    pipeline, completions = last_rank()
    for microbatch in (2, 0, 1):
        completions.put(forward_of(0, microbatch))
    stages = run_last(pipeline, 3, make_policies("1f1b", pipeline.placement, 3)[1])
    assert stages.actions == ["F0-0", "B0-0", "F0-1", "B0-1", "F0-2", "B0-2"]


def test_what_comes_early_is_kept_for_later_steps() -> None:
    # During evaluation, the first stage does not wait for the second. Therefore, its messages may
    # arrive several steps early.
    pipeline, completions = last_rank(timeout_s=0.5)
    for step, microbatch in ((2, 0), (0, 0), (1, 0), (1, 1), (2, 1), (0, 1)):
        completions.put(forward_of(step, microbatch))
    for _ in range(3):
        assert sorted(run_last(pipeline, 2).actions) == ["B0-0", "B0-1", "F0-0", "F0-1"]
    # All messages have been used. The next step must time out, because it waits for a message.
    with pytest.raises(DeadlineError):
        run_last(pipeline, 1)


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


def test_an_input_may_arrive_after_checks_of_the_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    # A waiting rank checks regularly whether the sender has closed the channel.
    monkeypatch.setattr(executor_module, "_CHECK_S", 0.01)
    checks = 0
    pipeline, completions = last_rank()

    def describe_links() -> dict[int, dict[str, Any]]:
        nonlocal checks
        checks += 1
        if checks == 3:
            completions.put(forward_of(0, 0))
        return {10: {"kind": "loopback"}}

    monkeypatch.setattr(pipeline.transports[1], "describe_links", describe_links)
    assert run_last(pipeline, 1).actions == ["F0-0", "B0-0"]
    assert checks >= 3


def test_a_pick_that_is_not_ready_is_named() -> None:
    # The error must be raised immediately. Waiting would not help, because the policy has already
    # made its choice.
    pipeline, completions = last_rank()
    with pytest.raises(ScheduleError) as info:
        run_last(pipeline, 2, Picks(lambda state: Action(F, 0, 0)))
    assert str(info.value) == (
        "policy made-up picked F0-0, which cannot start on rank 1 of the pipeline: its input from "
        "rank 0 (stage 0) has not arrived; ready: nothing; 0 of 4 actions finished, 0 in flight, "
        "no cap"
    )
    completions.put(forward_of(1, 0))
    with pytest.raises(ScheduleError, match="picked F0-0, .* it has already started"):
        run_last(pipeline, 2, Picks(lambda state: Action(F, 0, 0)))


class Following(Agreement):
    """Agreement of a process that follows the decisions of another process."""

    decides = False


def test_a_follower_without_decision_names_what_it_lacks() -> None:
    class Silent(Following):
        def next_action(self, *_: Any, **__: Any) -> Action | None:
            raise DeadlineError("no message from rank 4 within 1 s")

    pipeline, completions = last_rank()
    executor = make_executor(pipeline, agreement=Silent())
    with pytest.raises(DeadlineError) as info:
        run_last(pipeline, 2, executor=executor)
    assert str(info.value) == (
        "no message from rank 4 within 1 s; in step 0, rank 1 of the pipeline was also waiting for "
        "input of F0-0 from rank 0 (stage 0)"
    )
    completions.put(PeerLostError("rank 10 is gone"))
    with pytest.raises(PeerLostError, match="rank 10 is gone"):
        run_last(pipeline, 2, executor=executor)


def test_errors_of_channels_name_slices() -> None:
    pipeline, completions = last_rank()
    last = "rank 10 is gone; the last message from it was F chunk 0 microbatch 3 of step"
    completions.put(PeerLostError(f"{last} 0; seen by rank 11"))
    stages = Counting(pipeline.placement, 1)
    state = pipeline.state(1, 2, num_slices=2)
    with pytest.raises(PeerLostError, match=r"microbatch 1\.1 of step 0; seen by rank 11"):
        pipeline.executors[1].run(stages, Picks(ready_first), state)


class Slow(CpuClock):
    """Simulates a device that finishes an action only when the host waits for the action."""

    def __init__(self) -> None:
        self.launched = 0
        self.finished = 0
        self.waits = 0

    def mark(self) -> int:
        self.launched += 1
        return self.launched

    def wait(self, mark: int) -> None:
        self.waits += 1
        self.finished = max(self.finished, mark)

    def resolve_ns(self, mark: int) -> int:
        assert mark <= self.finished
        return mark


def test_a_rule_is_asked_when_the_device_has_caught_up() -> None:
    # The device's clock records a mark before and after each action.
    clock = Slow()
    pipeline = Ranks(Placement(num_ranks=1, num_chunks=2))
    executor = make_executor(pipeline, clock=clock, pp_rank=0)
    unfinished = []

    def pick(state: RankState) -> Action | None:
        unfinished.append((clock.launched - clock.finished) // 2)
        return ready_first(state)

    executor.run(Counting(pipeline.placement, 0), Picks(pick), pipeline.state(0, 3))
    assert unfinished == [min(1, number) for number in range(12)]


@pytest.mark.parametrize(
    ("action_ns", "ahead"), [(1_000_000, 1), (300_000, 1), (120_000, 3), (60_000, 5), (1, 9)]
)
def test_short_actions_leave_the_device_enough_to_do(action_ns: int, ahead: int) -> None:
    """Checks that the host runs further ahead of the device if actions are short.

    The executor measures the duration of actions in the first step. In the second step, it launches
    more actions in advance.
    """

    class Timed(Slow):
        def resolve_ns(self, mark: int) -> int:
            # The device's clock records a mark before and after each action.
            return mark * action_ns

    clock = Timed()
    pipeline = Ranks(Placement(num_ranks=1, num_chunks=2))
    executor = make_executor(pipeline, clock=clock, pp_rank=0)
    unfinished = []

    def pick(state: RankState) -> Action | None:
        unfinished.append((clock.launched - clock.finished) // 2)
        return ready_first(state)

    for _ in range(2):
        executor.run(Counting(pipeline.placement, 0), Picks(pick), pipeline.state(0, 6))
        executor.finish_step()
    first, second = unfinished[:24], unfinished[24:]
    assert max(first) == 1
    assert second == [min(ahead, number) for number in range(24)]


class Late(CpuClock):
    """Clock of a simulated device, whose progress the test controls.

    Attributes:
        marks: Number of marks in the device's queue of work.
        passed: Number of marks that the device has reached.
    """

    def __init__(self) -> None:
        self.marks = 0
        self.passed = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def is_passed(self, mark: int) -> bool:
        return mark <= self.passed


def test_a_rank_reports_the_oldest_action_that_its_device_has_not_finished() -> None:
    """Checks the reports of a rank that waits for an input while its device is still computing.

    If launched actions counted as finished, a report of a hang would not name this rank.
    """
    pipeline, _ = last_rank()
    clock = Late()
    reports: list[dict[str, Any]] = []

    class Watched(CompletionQueue):
        def wait(self, deadline_s: float) -> Any:
            if deadline_s < 0:
                return super().wait(deadline_s)  # The executor does not wait for an input.
            # The rank has launched F0-0, B0-0, F0-1 and B0-1. Each F has two marks in the device's
            # queue. Each B has three, because its result is sent.
            for clock.passed in (0, 2, 4, 5, 9, 10):
                assert {**executor.evidence(), **executor.snapshot()} == executor.evidence()
                reports.append(executor.evidence())
            clock.passed = 0
            self.put(forward_of(0, 2))
            return super().wait(deadline_s)

    completions = Watched()
    pipeline.transports[1].completions = completions
    executor = make_executor(pipeline, clock=clock)
    for microbatch in range(2):
        completions.put(forward_of(0, microbatch))
    policy = make_policies("1f1b", pipeline.placement, 3)[1]
    executor.run(Counting(pipeline.placement, 1), policy, pipeline.state(1, 3))
    assert [(report["doing"], report.get("microbatch")) for report in reports] == [
        ("F", 0),
        ("B", 0),
        ("B", 0),
        ("F", 1),
        ("B", 1),
        ("wait", None),
    ]
    counts = [(0, 0), (1, 0), (1, 0), (1, 1), (2, 1), (2, 2)]
    assert [report["done"][:2] for report in reports] == [list(count) for count in counts]
    for report, (forwards, backwards) in zip(reports, counts, strict=True):
        assert report["finished"] == {"F0": forwards, "B0": backwards}
        # The first rank waits for the first gradient until the device has computed it.
        rank = RankEvidence(rank=11, name="rank 11", now=report)
        assert rank.has_done("B", 0, 0, 0) is (backwards > 0)
        assert report["needs"] == [[10, "F", 0, 2, "2"]]
    # The program has finished the step, but the device has not.
    assert executor.snapshot() == {}
    assert executor.evidence() == {"step": 0, "finished": {"F0": 0, "B0": 0}}
    clock.passed = 5
    assert executor.evidence() == {"step": 0, "finished": {"F0": 1, "B0": 1}}
    clock.passed = clock.marks
    assert executor.evidence() == {"step": 1}


def test_a_static_order_waits_for_no_device() -> None:
    clock = Slow()
    pipeline = Ranks(Placement(num_ranks=1, num_chunks=1))
    executor = make_executor(pipeline, clock=clock, pp_rank=0)
    policy = make_policies("1f1b", pipeline.placement, 3)[0]
    executor.run(Counting(pipeline.placement, 0), policy, pipeline.state(0, 3))
    assert clock.waits == 0
    # Some actions are unfinished, so finish_step() must wait for the device to get their durations.
    assert executor.finish_step().busy_s > 0
    assert (clock.waits, clock.finished) == (1, clock.launched)


def test_a_blocked_send_is_no_computing_time() -> None:
    class Blocked(Loopback):
        def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
            time.sleep(0.05)
            super().send(peer, label, tensor)

    pipeline, completions = last_rank()
    for microbatch in range(2):
        completions.put(forward_of(0, microbatch))
    pipeline.transports[1] = Blocked(11, {11: completions})
    executor = make_executor(pipeline)
    stages = Counting(pipeline.placement, 1, lambda action: time.sleep(0.01))
    policy = make_policies("1f1b", pipeline.placement, 2)[1]
    executor.run(stages, policy, pipeline.state(1, 2))
    times = executor.finish_step()
    # After each of its two backward passes, the last rank sends the result, which takes 0.05 s.
    assert times.span_s >= 2 * (0.05 + 2 * 0.01)
    assert all(nanoseconds >= 10_000_000 for _, nanoseconds in times.actions)
    assert times.busy_s <= times.span_s - 2 * 0.05


def test_the_computing_time_on_a_device_ends_before_the_send() -> None:
    pipeline, completions = last_rank()
    completions.put(forward_of(0, 0))
    executor = make_executor(pipeline, clock=TickingClock())
    policy = make_policies("1f1b", pipeline.placement, 1)[1]
    executor.run(Counting(pipeline.placement, 1), policy, pipeline.state(1, 1))
    # The device's first two marks enclose F. The next two enclose the computation of B, and the
    # fifth follows the send of its result.
    assert [nanoseconds for _, nanoseconds in executor.finish_step().actions] == [1e9, 1e9]


def test_the_order_of_the_last_step_is_told_as_codes() -> None:
    placement = Placement(num_ranks=2, num_chunks=2, kind="v")
    pipeline = Ranks(placement)
    for pieces in (0, 2):
        policies = make_policies("adaptive", placement, 4)
        stages, _ = pipeline.step(policies, 4, weight_pieces=pieces)
        for stage, executor in zip(stages, pipeline.executors, strict=True):
            kinds = [f"{kind}{chunk}" for kind in (F, B, W) for chunk in range(2)]
            seen = [kinds.index(call.split("-")[0]) for call in stage.actions]
            assert executor.last_codes == tuple(seen)
            assert len(seen) == 2 * 4 * (2 + pieces)


def test_a_rank_alone_that_cannot_go_on_says_so() -> None:
    pipeline = Ranks(Placement(num_ranks=1, num_chunks=1))
    with pytest.raises(ScheduleError, match="no other rank can send an input: ready: F0-0"):
        pipeline.step([Picks(lambda state: None)], 1)


def test_a_missing_gradient_is_named() -> None:
    class Forgetful(Counting):
        def backward(self, *_: Any) -> None:
            return None

    pipeline, completions = last_rank()
    completions.put(forward_of(0, 0))
    with pytest.raises(ScheduleError, match="B0-0 on rank 1 of the pipeline returned no gradient"):
        run_last(pipeline, 1, stages=Forgetful)
