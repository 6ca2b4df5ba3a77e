"""Tests how the state of a rank keeps track of ready actions, received inputs and memory."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import rank_kernel
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement

from .conftest import run

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W


def make_state(
    ranks: int = 2,
    chunks: int = 1,
    rank: int = 0,
    microbatches: int = 4,
    cap: float | None = None,
    **more: Any,
) -> RankState:
    return RankState(
        placement=Placement(num_ranks=ranks, num_chunks=chunks),
        rank=rank,
        num_microbatches=microbatches,
        cap=cap,
        **more,
    )


def names(state: RankState) -> list[str]:
    return [str(action) for action in state.ready()]


def test_a_forward_leaves_room_for_every_later_chunk() -> None:
    state = make_state(chunks=2, cap=1.0)
    assert state.fits(Action(F, 0, 0))
    run(state, Action(F, 0, 0))
    assert not state.fits(Action(F, 0, 1)), (
        "the action would use memory that is reserved for chunk 1"
    )
    assert state.fits(Action(F, 1, 0))
    assert state.fits(Action(B, 0, 0))


def test_thirds_add_up_to_the_cap() -> None:
    state = make_state(ranks=3, chunks=3, microbatches=9, cap=4 / 3)
    run(state, Action(F, 0, 0))
    assert state.fits(Action(F, 0, 1))
    run(state, Action(F, 0, 1))
    assert not state.fits(Action(F, 0, 2))


def test_a_split_backward_keeps_its_microbatch_until_the_last_piece() -> None:
    state = make_state(chunks=2, weight_pieces=3)
    state.arrive(B, 0, 0)
    held = []
    for action in (
        Action(F, 0, 0),
        Action(B, 0, 0),
        *(Action(W, 0, 0, piece) for piece in range(3)),
    ):
        assert state.is_ready(action)
        run(state, action)
        held.append(state.in_flight)
    assert held == [0.5, 0.5, 0.5, 0.5, 0.0]
    assert not state.is_ready(Action(W, 0, 0, 3))


def test_one_microbatch_through_a_rank_that_holds_both_ends() -> None:
    placement = Placement(num_ranks=2, num_chunks=2, kind="v")
    state = RankState(placement=placement, rank=0, num_microbatches=1, weight_pieces=2)
    assert state.num_actions == 2 * (1 + 1 + 2)
    for expected, arrival in (
        ("F0-0", None),
        ("F1-0", (F, 1, 0)),
        # The backward pass of the last stage needs no input, because it starts from the loss.
        ("B1-0", None),
        ("W1-0", None),
        ("W1-0.1", None),
        ("B0-0", (B, 0, 0)),
        ("W0-0", None),
        ("W0-0.1", None),
    ):
        if arrival is not None:
            assert names(state) == []
            state.arrive(*arrival)
        assert names(state) == [expected]
        run(state, *state.ready())
    assert state.done
    assert state.in_flight == 0


def test_forward_only_holds_nothing_and_ends_after_the_forwards() -> None:
    state = make_state(rank=1, microbatches=2, cap=1.0, forward_only=True)
    for microbatch in range(2):
        state.arrive(F, 0, microbatch)
        assert state.fits(Action(F, 0, microbatch))
        run(state, Action(F, 0, microbatch))
    assert state.done
    assert state.peak_in_flight == 0.0
    assert names(state) == []
    with pytest.raises(ScheduleError, match="no input"):
        make_state(forward_only=True).arrive(B, 0, 0)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Action(F, 0, 0), "it has already started"),
        (Action(F, 0, 2), "F0-1 comes before it"),
        (Action(F, 0, 4), "no such action with 1 chunks and 4 microbatches"),
        (Action(F, 1, 0), "no such action"),
        (Action(F, 0, -1), "no such action"),
        (Action(B, 0, 0), r"its input from rank 1 \(stage 1\) has not arrived"),
        (Action(B, 0, 1), "B0-0 comes before it"),
        (Action(W, 0, 0), "this step has no W"),
    ],
)
def test_starting_what_is_not_ready_says_why(action: Action, reason: str) -> None:
    state = make_state()
    run(state, Action(F, 0, 0))
    assert not state.start(action)
    assert re.search(reason, state.why_not(action))
    assert state.describe().startswith("ready: F0-1; 1 of 8 actions finished")


def test_a_backward_before_its_forward_says_why() -> None:
    state = make_state()
    state.arrive(B, 0, 0)
    assert state.start(Action(F, 0, 0))
    assert not state.start(Action(B, 0, 0))
    assert state.why_not(Action(B, 0, 0)) == "its own forward F0-0 has not finished"


def test_finishing_what_does_not_run_is_refused() -> None:
    state = make_state()
    with pytest.raises(ScheduleError, match="F0-0 finished, but"):
        state.finish(Action(F, 0, 0))
    assert state.start(Action(F, 0, 0))
    assert not state.start(Action(F, 0, 1))
    with pytest.raises(ScheduleError, match="F0-1 finished, but"):
        state.finish(Action(F, 0, 1))


@pytest.mark.parametrize(
    ("kind", "chunk", "microbatch", "message"),
    [
        (F, 0, 0, "takes no input"),
        (B, 0, 4, "the step has 4 microbatches"),
        (B, 0, -1, "the step has 4 microbatches"),
        (B, 3, 0, "takes no input"),
        (W, 0, 0, "takes no input"),
    ],
)
def test_impossible_arrivals_are_refused(
    kind: ActionKind, chunk: int, microbatch: int, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        make_state().arrive(kind, chunk, microbatch)


def test_missing_names_sender_and_stage() -> None:
    state = make_state(ranks=3, chunks=2, rank=1, cap=2.0)
    assert state.missing() == (
        "input of F0-0 from rank 0 (stage 0), input of F1-0 from rank 0 (stage 3)"
    )
    state.arrive(F, 0, 0)
    run(state, Action(F, 0, 0))
    assert state.missing() == (
        "input of F0-1 from rank 0 (stage 0), input of B0-0 from rank 2 (stage 2),"
        " input of F1-0 from rank 0 (stage 3)"
    )


def test_missing_names_memory_running_work_and_the_end() -> None:
    state = make_state(microbatches=2, cap=1.0)
    state.start(Action(F, 0, 0))
    assert state.missing() == "the end of a running action"
    assert state.why_not(Action(F, 0, 1)) == "another F is running"
    state.finish(Action(F, 0, 0))
    assert "memory for F0-1 (holds 1, cap 1)" in state.missing()
    assert "input of B0-0 from rank 1 (stage 1)" in state.missing()
    assert make_state().missing() == "nothing for F0-0, which is ready"
    done = make_state(ranks=1, microbatches=1)
    run(done, Action(F, 0, 0), Action(B, 0, 0))
    assert done.missing() == "nothing, every action is finished"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2}, "rank 2"),
        ({"microbatches": 0}, "number of microbatches must be at least 1, got 0"),
        ({"cap": 0.9}, "cap must be at least 1 "),
        ({"weight_pieces": -1}, "W actions per weight gradient must not be negative, got -1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make_state(**arguments)  # type: ignore[arg-type]


@given(chunks=st.integers(1, 3), microbatches=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_ready_agrees_with_is_ready_along_any_walk(
    chunks: int, microbatches: int, seed: int
) -> None:
    rng = random.Random(seed)
    state = make_state(ranks=3, chunks=chunks, rank=1, microbatches=microbatches)
    everything = [
        Action(kind, chunk, microbatch)
        for kind in (F, B)
        for chunk in range(chunks)
        for microbatch in range(microbatches)
    ]
    inputs = list(everything)
    rng.shuffle(inputs)
    while not state.done:
        ready = state.ready()
        assert set(ready) == {action for action in everything if state.is_ready(action)}
        assert all(state.is_possible(action) for action in ready)
        if ready and (not inputs or rng.random() < 0.5):
            run(state, rng.choice(ready))
        else:
            arrival = inputs.pop()
            state.arrive(arrival.kind, arrival.chunk, arrival.microbatch)
    assert not any(state.is_possible(action) for action in everything)


def test_the_table_of_slots_shows_the_state_of_its_example() -> None:
    state = make_state(ranks=2, chunks=2, rank=1, microbatches=3, cap=2.0, weight_pieces=1)
    for chunk, microbatch in ((0, 0), (0, 1), (1, 0)):
        state.arrive(F, chunk, microbatch)
        run(state, Action(F, chunk, microbatch))
    assert state.start(Action(B, 1, 0))
    state.arrive(F, 0, 2)
    rows = re.findall(
        r"^ +(\d+) (?:[A-Z_]+)? +(\d+(?: \d+)*)   \S", str(rank_kernel.__doc__), re.MULTILINE
    )
    table = {int(slot): [int(number) for number in example.split()] for slot, example in rows}
    assert [number for _, numbers in sorted(table.items()) for number in numbers] == state.numbers
    for slot, numbers in table.items():
        assert state.numbers[slot : slot + len(numbers)] == numbers
