"""Candidates and the comparison of schedules on the same work."""

from __future__ import annotations

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.compare import evaluate, make_candidate
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.workload import StageProfile, StageTimes

EQUAL = StageProfile(times=StageTimes.equal(8, forward_s=0.5, backward_s=0.5, weight_s=0.5))


def test_what_a_name_stands_for() -> None:
    adaptive = make_candidate("adaptive", 4, 2, 16)
    assert adaptive.placement == Placement(num_ranks=4, num_chunks=2, kind="v")
    assert (adaptive.weight_pieces, adaptive.cap) == (4, 6.0)
    assert str(adaptive) == "adaptive (v, 2 chunks, W in 4, cap 6)"
    static = make_candidate("1f1b", 4, 2, 16)
    assert (static.placement.num_chunks, static.weight_pieces, static.cap) == (1, 0, None)
    assert str(static) == "1f1b (loop, 1 chunk)"
    assert make_candidate("zb-v", 4, 2, 16).weight_pieces == 1
    chosen = make_candidate("adaptive", 4, 2, 16, placement_kind="loop", cap=3, weight_pieces=0)
    assert (chosen.placement.kind, chosen.cap, chosen.weight_pieces) == ("loop", 3, 0)


def test_one_and_two_chunks_get_the_same_work() -> None:
    spread = StageProfile(times=EQUAL.times, action_sigma=0.3)
    work = []
    for name in ("1f1b", "interleaved", "zb-v"):
        outcome = evaluate(make_candidate(name, 4, 2, 16), 16, spread, [5])
        work.append(int(outcome.example.workload.durations_ps.sum()))
    assert max(work) - min(work) < 1000  # picoseconds of rounding


def test_figures_of_known_schedules() -> None:
    one = evaluate(make_candidate("1f1b", 4, 2, 16), 16, EQUAL, [0])
    assert one.mean_s == pytest.approx((16 + 3) * 3)
    assert one.peak_units == 4
    assert one.bubble_fraction == pytest.approx(3 / 19)
    assert evaluate(make_candidate("zb-v", 4, 2, 16), 16, EQUAL, [0]).mean_s == pytest.approx(
        16 * 3 + 3 * 0.5
    )


def test_unknown_names_and_no_draws() -> None:
    with pytest.raises(ScheduleError, match="unknown policy 'best'"):
        make_candidate("best", 4, 2, 16)
    with pytest.raises(ScheduleError, match="no seeds"):
        evaluate(make_candidate("1f1b", 4, 2, 16), 16, EQUAL, [])
