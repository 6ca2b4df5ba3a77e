"""Tests steps in which microbatches have different numbers of slices."""

from __future__ import annotations

import random

import pytest

from megatron.adaptive.engine.policy_factory import Orders
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import (
    Action,
    ActionKind,
    action_table,
    item_count,
    item_label,
    mean_slices,
    mirrored,
    place_of,
    with_slices,
)
from megatron.adaptive.schedule.catalog import make_policies
from megatron.adaptive.schedule.memory_caps import with_rounding
from megatron.adaptive.schedule.policy import Policy, actions_of, codes_of
from megatron.adaptive.schedule.rank_state import RankState, whole_sizes
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.transport.interface import Label

F, B, W = ActionKind
COUNTS = (2, 1, 3)


def test_items_are_counted_through_all_microbatches() -> None:
    assert item_count(3, COUNTS) == 6
    assert [item_label(item, COUNTS) for item in range(6)] == "0.0 0.1 1.0 2.0 2.1 2.2".split()
    assert [mirrored(item, COUNTS) for item in range(6)] == [1, 0, 2, 5, 4, 3]
    assert place_of(4, COUNTS) == (2, 1, 3)
    assert Action(B, 0, 4).label(COUNTS) == "B0-2.1"
    (backwards,) = action_table(B, 1, 3, 1, COUNTS)
    assert actions_of(codes_of(backwards, 1, COUNTS), 1, 0, COUNTS) == backwards
    equal = [place_of(item, 3) for item in range(6)]
    assert equal == [place_of(item, (3, 3)) for item in range(6)]


def test_texts_of_transports_name_slices() -> None:
    text = "the last message from it was F chunk 3 microbatch 4 of step 7; seen by rank 1"
    assert with_slices(text, 7, COUNTS) == text.replace("microbatch 4", "microbatch 2.1")
    assert with_slices(text, 7, 3) == text.replace("microbatch 4", "microbatch 1.1")
    assert with_slices(text, 7, 1) == text
    # ``COUNTS`` has the slice counts of step 7, and step 8 may have other counts. A text about
    # step 8 must therefore not change.
    assert with_slices(text, 8, COUNTS) == text
    late = text.replace("microbatch 4", "microbatch 6")
    assert with_slices(late, 7, COUNTS) == late
    assert Label(7, Action(F, 3, 4), COUNTS).name == "F3-2.1"
    assert Label(7, Action(F, 3, 4), COUNTS) == Label(7, Action(F, 3, 4))


def test_the_first_backward_of_a_microbatch_waits_for_its_own_slices_only() -> None:
    state = RankState(
        placement=Placement(num_ranks=1, num_chunks=1),
        rank=0,
        num_microbatches=3,
        num_slices=COUNTS,
    )
    order = [Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 1), Action(B, 0, 0), Action(F, 0, 2)]
    for action in (*order, Action(B, 0, 2), Action(F, 0, 3), Action(F, 0, 4)):
        assert state.start(action), state.why_not(action)
        state.finish(action)
    assert state.ready() == (Action(F, 0, 5),)
    assert "its own forward F0-2.2 has not finished" in state.why_not(Action(B, 0, 5))


def run(states: list[RankState], policies: tuple[Policy, ...], rng: random.Random) -> list[str]:
    """Simulates a step of ``states`` with ``policies``. Returns labels of the first rank's actions.

    ``rng`` generates the durations of actions. The labels are in the order of execution.
    """
    placement = states[0].placement
    free_at = [0.0] * len(states)
    running: list[tuple[float, int, Action]] = []
    labels: list[str] = []
    now = 0.0
    while True:
        busy = {rank for _, rank, _ in running}
        for rank, state in enumerate(states):
            if rank in busy or (action := policies[rank].pick(state)) is None:
                continue
            assert state.start(action), state.why_not(action)
            running.append((now + rng.random(), rank, action))
            if rank == 0:
                labels.append(action.label(state.num_slices))
        if not running:
            return labels
        now, rank, action = running.pop(running.index(min(running, key=lambda entry: entry[0])))
        free_at[rank] = now
        states[rank].finish(action)
        target = placement.target_of(action.kind, rank, action.chunk)
        if target is not None:
            states[target[0]].arrive(action.kind, target[1], action.microbatch)


def test_rules_run_random_numbers_of_slices_without_deadlock_within_the_cap() -> None:
    rng = random.Random(40)
    for _ in range(150):
        ranks = rng.randint(1, 4)
        chunks = rng.randint(1, 3) if ranks > 1 else 1
        kind = "v" if chunks == 2 and rng.random() < 0.5 else "loop"
        placement = Placement(num_ranks=ranks, num_chunks=chunks, kind=kind)
        counts = tuple(rng.choice((1, 1, 1, 2, 5)) for _ in range(rng.randint(1, 6)))
        items = item_count(len(counts), counts)
        is_sized = rng.random() < 0.8
        drawn = [rng.choice((0.5, 1.0, 3.0)) if is_sized else 1.0 for _ in range(items)]
        sizes = [size * items / sum(drawn) for size in drawn]
        cap = max(whole_sizes(sizes, counts)) * rng.choice((1.0, 1.0, 1.5, 3.0))
        cap = max(1.0, cap)
        pieces = rng.randint(0, 2)
        options = {"weight_pieces": pieces, "cap": cap, "num_slices": counts}
        states = [
            RankState(
                placement=placement,
                rank=rank,
                num_microbatches=len(counts),
                sizes=sizes if is_sized else None,
                **options,
            )
            for rank in range(ranks)
        ]
        orders = [
            Orders(
                schedule=rng.choice(("adaptive", "dfc", "bfc")),
                placement=placement,
                pp_rank=rank,
                cap=cap,
                splits=pieces > 0,
                pieces=pieces,
            )
            for rank in range(ranks)
        ]
        for of_rank in orders:
            of_rank.recut(counts)
        policies = tuple(of_rank.policy(len(counts), forward_only=False) for of_rank in orders)
        labels = run(states, policies, rng)
        case = (placement, counts, sizes, cap, pieces)
        assert all(state.done for state in states), (case, [s.describe() for s in states])
        assert all(state.peak_in_flight <= with_rounding(cap) + 1e-3 for state in states), case
        if counts[0] > 1:
            assert labels[0] == "F0-0.0"


def test_the_state_of_a_step_counts_memory_in_microbatches_of_mean_size() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    orders = Orders(schedule="adaptive", placement=placement, pp_rank=0, cap=1.0)
    orders.recut((1, 4, 1))
    assert mean_slices((1, 4, 1)) == 2
    state = orders.state(3, forward_only=False, sizes=[16.0] * 6)
    assert state.cap == 2.0  # The cap is raised so that the largest microbatch fits.
    assert state.num_items == 6
    orders.recut(2)
    state = orders.state(3, forward_only=False, sizes=[16.0] * 6)
    assert (state.cap, state.num_slices) == (1.0, 2)
    evaluation = orders.state(3, forward_only=True)
    assert evaluation.cap is None
    orders.recut((1, 4, 1))
    (state,) = [orders.state(3, forward_only=True)]
    policy = orders.policy(3, forward_only=True)
    assert policy.pick(state) == Action(F, 0, 0)


@pytest.mark.parametrize("schedule", ["seq-1f1b", "hinted"])
def test_an_order_made_before_the_step_needs_equal_numbers(schedule: str) -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    orders = Orders(schedule=schedule, placement=placement, pp_rank=0)
    orders.recut(COUNTS)
    with pytest.raises(
        ScheduleError, match=f"schedule {schedule} requires the same .* use adaptive"
    ):
        orders.policy(3, forward_only=False)


def test_a_number_for_each_microbatch_is_needed() -> None:
    placement = Placement(num_ranks=1, num_chunks=1)
    with pytest.raises(ScheduleError, match="for each of the 3 microbatches, got 2"):
        RankState(placement=placement, rank=0, num_microbatches=3, num_slices=(1, 2))
    assert len(make_policies("adaptive", placement, 3, num_slices=2)) == 1
