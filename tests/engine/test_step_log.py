"""Tests which waits and messages are recorded in the trace of a step."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.adaptive.engine.step_log import SHORT_NS, ActionInput, StepLog
from megatron.adaptive.schedule.action import Action
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.trace_format import COLUMNS, KINDS, REASONS
from megatron.adaptive.transport.interface import Label, Notice

from .loopback import B, F, forward_of

PLACEMENT = Placement(num_ranks=2, num_chunks=1)
LONG_NS = 10 * SHORT_NS


def state_of(rank: int, **options: Any) -> RankState:
    return RankState(placement=PLACEMENT, rank=rank, num_microbatches=2, **options)


class TimedLog(StepLog):
    """Step log with a clock that the test sets."""

    def at(self, now_ns: int) -> TimedLog:
        self.now = now_ns
        return self

    def now_ns(self) -> int:
        return self.now


def new_log() -> TimedLog:
    return TimedLog(Follow((), "1f1b"), 1)


def rows_of(log: StepLog) -> list[dict[str, Any]]:
    """Returns the rows of ``log`` as dicts. Kinds and reasons are names instead of numbers."""
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in log.rows([], [], [])]
    for row in rows:
        row["kind"], row["reason"] = KINDS[row["kind"]], REASONS[row["reason"]]
    return rows


def wait_of(log: StepLog) -> tuple[int, int, str, int]:
    """Returns the start, duration, reason and peer of the only wait in ``log``. Times are in ns."""
    (wait,) = [row for row in rows_of(log) if row["kind"] == "wait"]
    return wait["start_ns"], wait["duration_ns"], wait["reason"], wait["peer"]


def notice() -> Notice:
    return Notice(Label(0, Action(F, 0, 0)), 5)


def test_several_arrivals_end_one_wait() -> None:
    log, state = new_log(), state_of(1)
    log.wait_begins(100, state)
    log.at(150).wait_ends(forward_of(0, 1))
    log.wait_begins(160, state)
    log.at(200).wait_ends(forward_of(0, 0))
    log.at(205).begins(Action(F, 0, 0), ActionInput(None, 8, 10, 199, True))
    assert wait_of(log) == (100, 200, "input", 10)
    log.at(300).begins(Action(F, 0, 1), ActionInput(None, 8, 10, 149, True))
    assert [row["kind"] for row in rows_of(log)] == ["wait", "receive", "receive"]


@pytest.mark.parametrize(("arrived_ns", "cause", "peer"), [(90, "group", 5), (150, "input", 10)])
def test_a_member_is_to_blame_only_if_the_input_was_here(
    arrived_ns: int, cause: str, peer: int
) -> None:
    log = new_log()
    log.wait_begins(100, state_of(1))
    log.at(200).wait_ends(notice())
    log.at(205).begins(Action(F, 0, 0), ActionInput(None, 8, 10, arrived_ns, True))
    assert wait_of(log) == (100, 200, cause, peer)


def test_an_action_without_input_names_who_woke_the_rank() -> None:
    log = new_log()
    # A forward pass is possible, but the schedule does not allow it yet.
    log.wait_begins(100, state_of(0))
    log.at(200).wait_ends(forward_of(0, 0))
    log.at(205).begins(Action(F, 0, 0), ActionInput(None, 0, -1, 0, True))
    assert wait_of(log) == (100, 200, "order", 10)


@pytest.mark.parametrize(
    ("rank", "options", "cause"), [(0, {}, "group"), (1, {}, "input"), (0, {"cap": 1.0}, "memory")]
)
def test_a_followers_wait_for_a_decision(rank: int, options: dict[str, Any], cause: str) -> None:
    state = state_of(rank, **options)
    if cause == "memory":
        # The first forward pass uses the whole limit on activations, so the second forward pass has
        # to wait.
        state.start(Action(F, 0, 0))
        state.finish(Action(F, 0, 0))
    log = new_log()
    log.at(100 + LONG_NS).decision(100, state)
    log.at(200 + LONG_NS).begins(Action(F, 0, 0), ActionInput(None, 0, -1, 0, True))
    assert wait_of(log) == (100, 100 + LONG_NS, cause, -1)


def test_a_quick_decision_is_no_wait() -> None:
    log = new_log()
    log.at(100 + SHORT_NS // 2).decision(100, state_of(0))
    log.at(200 + SHORT_NS).begins(Action(F, 0, 0), ActionInput(None, 0, -1, 0, True))
    assert rows_of(log) == []


def test_a_message_is_named_alike_on_both_ends() -> None:
    log = new_log()
    log.at(510).sent(Action(B, 0, 1), 10, 64, 500)
    log.at(700).begins(Action(B, 0, 1), ActionInput(None, 64, 11, 600, False))
    sent, received = rows_of(log)
    both = ("chunk", "microbatch", "of", "bytes")
    assert [sent[name] for name in both] == [received[name] for name in both]
    assert (sent["kind"], sent["peer"], sent["start_ns"], sent["duration_ns"]) == (
        *("send", 10),
        *(500, 510),
    )
    assert (received["kind"], received["peer"], received["reason"]) == ("receive", 11, "found")
