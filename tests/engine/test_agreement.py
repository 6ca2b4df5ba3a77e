"""Tests that all processes that share a pipeline rank run the same actions in the same order."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from megatron.adaptive.engine.agreement import Follower, decode, encode
from megatron.adaptive.errors import DeadlineError, PeerLostError, ScheduleError
from megatron.adaptive.schedule import runtime_rules
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.policy import RulePolicy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.transport.interface import Arrival, CompletionQueue, HeldArrival, Label

from . import groups
from .conftest import BOARDS, WATCHDOG_S, Start

F, B = ActionKind.F, ActionKind.B
ADAPTIVE = RulePolicy("adaptive", runtime_rules.ready_first)


@pytest.mark.multiprocess
@pytest.mark.parametrize("board", BOARDS)
def test_members_do_what_is_ready_on_all(board: str, start: Start) -> None:
    results = start("agree", board, 3)
    leader = results[0]
    assert [len(step) for step in leader["taken"]] == [48, 48, 120, 120, 48, 48]
    # The last two steps have a static order, so members do not need the leader's decisions.
    assert leader["taken"][4] == leader["taken"][5] == leader["static"]
    for result in results:
        assert result["taken"] == leader["taken"]
        assert result["threads"] == ["MainThread"]
        if board == "memory":
            assert result["words"] == 48 + 48 + 120 + 120
        # The leader must not start an action before all members have its input. Otherwise, the
        # leader would wait for the other members in a collective.
        arrived = {name: ns for name, ns in result["arrived"].items() if name[0] in "0123"}
        assert len(arrived) == 4 * 40
        for name, arrived_ns in arrived.items():
            assert leader["started"][name] > arrived_ns, name


@pytest.mark.long
def test_no_random_group_deadlocks_or_disagrees() -> None:
    # Run ``python -m tests.engine.groups`` to simulate ten thousand cases.
    assert groups.failures(300) == []


@pytest.mark.multiprocess
@pytest.mark.parametrize("board", BOARDS)
def test_who_lacks_an_input_is_named(board: str, start: Start) -> None:
    # The leader has the input of F0-1, but must wait until the follower also has this input.
    leader, follower = start("lacking", board, 2)
    assert leader[0] == "DeadlineError"
    assert "rank 1 of the pipeline waited 0.5 s in step 0 for " in leader[1]
    assert "the input of F0-1 has not arrived on rank 1 (stage 1)" in leader[1]
    assert "was also waiting for input of F0-1 from rank 0 (stage 0)" in follower[1] or (
        board == "message" and follower[0] == "PeerLostError"
    )
    assert len(leader[1].splitlines()) == len(follower[1].splitlines()) == 1


@pytest.mark.multiprocess
@pytest.mark.parametrize("board", BOARDS)
def test_a_broken_channel_of_a_follower_ends_the_step(board: str, start: Start) -> None:
    # One follower loses a connection. The other members must not keep waiting for it.
    size = 3 if board == "memory" else 2
    leader, *others, last = start("broken", board, size)
    assert leader == [
        "PeerLostError",
        f"rank {size - 1} (stage 1), of the same decision group, lost its channel to another stage",
        "soon",
    ]
    assert last == ["PeerLostError", "the connection to rank 9 broke", "soon"]
    for other in others:
        assert other == [
            "PeerLostError",
            "rank 2 (stage 1) stopped the step of its decision group, because it lost the "
            "connection to another rank",
            "soon",
        ]


@pytest.mark.multiprocess
@pytest.mark.parametrize("board", BOARDS)
def test_numbers_keep_their_order_and_silence_is_an_error(board: str, start: Start) -> None:
    # The writer of this program sends more numbers than fit into the channel.
    writer, *readers = start("many", board, 3)
    for reader in readers:
        assert reader["read"] == writer["read"]
        kind, text = reader["error"]
        assert text.splitlines() == [text]
        assert text.startswith("no message from rank 0 (stage 1)")
        if board == "memory":
            assert kind == "DeadlineError"
        else:
            assert kind == "PeerLostError"
            assert "within 0.2 s" in text


@pytest.mark.multiprocess
@pytest.mark.parametrize("board", BOARDS)
def test_a_reader_that_takes_nothing_is_an_error(board: str, start: Start) -> None:
    (kind, text), _ = start("deaf", board, 2)
    assert text.splitlines() == [text]
    assert "rank 1 (stage 1)" in text
    assert "within 0.2 s" in text
    assert kind == ("DeadlineError" if board == "memory" else "PeerLostError")


def test_actions_travel_as_numbers() -> None:
    for kind, (chunk, microbatch), rest in itertools.product(
        ActionKind, [(0, 0), (3, 17), (1023, 2**20 - 2)], [0, 5, 2**31 - 1]
    ):
        word = encode(Action(kind, chunk, microbatch), rest)
        assert decode(word) == (kind, chunk, microbatch, rest)
        assert 0 <= word < 2**63 - 1


@pytest.mark.parametrize(
    ("action", "rest"),
    [(Action(F, 1 << 10, 0), 0), (Action(F, 0, 1 << 20), 0), (Action(F, 0, 0), 1 << 31)],
)
def test_what_no_number_says_is_refused(action: Action, rest: int) -> None:
    with pytest.raises(ScheduleError, match="cannot be encoded for a decision group"):
        encode(action, rest)


class Paper:
    """Imitates a channel between processes, within this process."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.taken = 0
        self.calls: list[str] = []
        self.closed = threading.Event()

    def publish(self, value: int, timeout_s: float) -> None:
        self.values.append(value)

    def next(self, timeout_s: float) -> int | None:
        if self.taken < len(self.values):
            self.taken += 1
            return self.values[self.taken - 1]
        self.closed.wait(WATCHDOG_S)
        return None

    def give_up(self) -> None:
        self.calls.append("give up")

    def close(self) -> None:
        self.closed.set()


def fresh(rank: int) -> RankState:
    return RankState(placement=Placement(num_ranks=2, num_chunks=1), rank=rank, num_microbatches=2)


def message(step: int, microbatch: int) -> Arrival:
    label = Label(step, Action(F, 0, microbatch))
    return HeldArrival(label, 9, 4, lambda: torch.zeros(1))


def label_of(word: int) -> Label:
    kind, chunk, microbatch, step = decode(word)
    return Label(step, Action(kind, chunk, microbatch))


def test_each_input_of_the_step_is_reported_once() -> None:
    reports, queue = Paper(), CompletionQueue()
    queue.put(message(0, 0))  # This input arrives before the follower is created.
    follower = Follower(Paper(), reports, queue, 1.0)
    queue.put(message(0, 1))  # This input arrives before the step begins.
    follower.begin(0, is_static=False)
    queue.put(message(0, 2))
    queue.put(message(1, 0))
    reported = [message(0, 2).label]
    assert [label_of(word) for word in reports.values] == reported
    while (item := queue.poll()) is not None:
        assert follower.is_everywhere(item)
    reported += [message(0, 0).label, message(0, 1).label]
    assert [label_of(word) for word in reports.values] == reported
    follower.begin(1, is_static=True)
    assert follower.decides
    assert follower.is_everywhere(message(1, 0))
    queue.put(message(1, 1))
    follower.begin(2, is_static=False)
    assert follower.is_everywhere(message(2, 0))
    reported.append(message(2, 0).label)
    assert [label_of(word) for word in reports.values] == reported
    follower.close()
    assert reports.closed.is_set()


def test_a_report_that_cannot_go_out_is_an_error_of_the_follower() -> None:
    class Full(Paper):
        def publish(self, value: int, timeout_s: float) -> None:
            raise DeadlineError(f"no room within {timeout_s:g} s")

    decisions, queue = Paper(), CompletionQueue()
    follower = Follower(decisions, Full(), queue, 0.5)
    follower.begin(0, is_static=False)
    queue.put(message(0, 0))
    assert decisions.calls
    assert queue.poll() is not None
    with pytest.raises(DeadlineError, match="no room within 0.5 s"):
        queue.poll()


def test_a_leader_that_has_ended_is_an_error() -> None:
    decisions = Paper()
    decisions.close()
    follower = Follower(decisions, Paper(), CompletionQueue(), 1.0)
    follower.begin(0, is_static=False)
    with pytest.raises(PeerLostError, match="ran different numbers of steps"):
        follower.next_action(ADAPTIVE, fresh(1), 1.0)
