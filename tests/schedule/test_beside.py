"""Tests overlapping actions: how much communication they hide, their durations, and errors."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.catalog import make_candidate
from megatron.adaptive.schedule.choose_by_simulation import evaluate
from megatron.adaptive.schedule.policy import Follow, actions_of, codes_of
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.validate import validate
from megatron.adaptive.schedule.workload import StageProfile, StageTimes

from .conftest import actions

ALONE = Placement(num_ranks=1, num_chunks=1)
# A forward pass and a backward pass take 10 s each, including two communications of 2 s each. A
# weight gradient takes 5 s.
TIMES = StageTimes.equal(
    1, forward_s=10.0, backward_s=10.0, weight_s=5.0, exchange_s=4.0, exchanges=2
)


@pytest.mark.parametrize(
    ("order", "pieces", "ends"),
    [
        # F and B alternate: one computes while the other communicates. B computes 3 s at a time, or
        # 5.5 s if it includes the weight gradient. At the end, B waits 2 s for its last message.
        ("F0-0 F0-1+ B0-0 B0-1", 0, [10.0, 27.0, 29.0, 44.0]),
        ("F0-0 F0-1+ B0-0 W0-0 B0-1 W0-1", 1, [10.0, 22.0, 24.0, 29.0, 39.0, 44.0]),
    ],
)
def test_a_pair_takes_turns_at_computing(order: str, pieces: int, ends: list[float]) -> None:
    policy = Follow(actions(order))
    result = simulate(ALONE, 2, [policy], TIMES, weight_pieces=pieces, beside=True)
    assert [span.end_s for span in result.spans[0]] == pytest.approx(ends)
    if pieces:
        assert result.makespan_s == pytest.approx(result.busy_s[0]) == pytest.approx(44.0)
        assert result.hidden_fraction == pytest.approx(6 / 16)


def test_a_rule_fills_communication_and_loses_none_of_it_at_the_end_of_an_action() -> None:
    def outcome(name: str, ranks: int, microbatches: int, **options: Any) -> Any:
        times = StageTimes.equal(
            2 * ranks, forward_s=1.0, backward_s=1.0, weight_s=0.6, exchange_s=0.4, exchanges=4
        )
        profile = StageProfile(times=times, **options)
        candidate = make_candidate(name, ranks, 2, microbatches)
        return evaluate(candidate, microbatches, profile, range(4))

    for ranks, microbatches in ((2, 32), (8, 64)):
        shape = (ranks, microbatches)
        names = ("adaptive", "combined-1f1b", "dualpipe-v", "interleaved")
        adaptive, combined, dualpipe, plain = (outcome(name, *shape) for name in names)
        assert adaptive.example.hidden_fraction >= 0.9
        assert plain.mean_s / adaptive.mean_s >= 1.24
        assert combined.mean_s / adaptive.mean_s >= 0.99
        assert dualpipe.mean_s / adaptive.mean_s >= 0.99
        for least, options in (
            (1.08, {"action_sigma": 0.3}),
            (1.05, {"rank_factors": (1.0,) * (ranks - 1) + (1.3,)}),
        ):
            fixed, free = (outcome(name, *shape, **options) for name in ("combined-1f1b", names[0]))
            assert fixed.mean_s / free.mean_s >= least, (ranks, options)


def test_codes_say_which_actions_are_paired() -> None:
    order = actions("F0-0 F0-1+ B0-0 B0-1")
    codes = codes_of(order, 1)
    assert codes == (0, 3, 1, 1)
    assert [str(action) for action in actions_of(codes, 1, 0)] == ["F0-0", "F0-1+", "B0-0", "B0-1"]


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (["F0-0+ B0-0"], "rank 0, position 1: B0-0 cannot be here: its own forward F0-0"),
        (["F0-0+"], "F0-0[+] and the next action form a pair, which must consist of an F and a B"),
        # Rank 0 waits for a gradient from rank 1. However, rank 1 needs the output of the forward
        # pass that overlaps with this backward pass, so both ranks wait forever.
        (["F0-0 F0-1 F0-2+ B0-0 B0-1 B0-2", "F0-0 F0-1 F0-2 B0-0 B0-1 B0-2"], "deadlock"),
    ],
)
def test_a_pair_whose_second_needs_the_first_is_refused(orders: list[str], message: str) -> None:
    rows = tuple(actions(order) for order in orders)
    schedule = Schedule(
        name="pairs",
        placement=Placement(num_ranks=len(rows), num_chunks=1),
        num_microbatches=sum(action.kind == "F" for action in rows[0]),
        orders=rows,
    )
    with pytest.raises(ScheduleError, match=message):
        validate(schedule)
