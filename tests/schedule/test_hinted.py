"""Tests that the policy ``hinted`` follows its hint within the memory cap, and shortens steps."""

from __future__ import annotations

import pytest

from megatron.adaptive.schedule.catalog import hint_codes, hint_for, make_policies, make_schedule
from megatron.adaptive.schedule.policy import Follow
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.validate import peak_units, validate
from megatron.adaptive.schedule.workload import Link, StageTimes, draw


def v(ranks: int) -> Placement:
    return Placement(num_ranks=ranks, num_chunks=2, kind="v")


def test_codes_say_which_occurrence_they_are() -> None:
    order = make_schedule("zb-v", v(1), 1).orders[0]
    assert " ".join(map(str, order)) == "F0-0 F1-0 B1-0 W1-0 B0-0 W0-0"
    assert hint_codes(order, 2, 1) == (0, 1, 3, 5, 2, 4)
    assert hint_codes(order, 2, 2) == (0, 1, 3, 5, 5 + 6, 2, 4, 4 + 6)
    assert hint_codes(order, 2, 0) == (0, 1, 3, 2)


def test_a_hint_without_weight_gradients_gets_them_behind_its_backwards() -> None:
    placement = Placement(num_ranks=1, num_chunks=1)
    order = hint_for(placement, 2, None).orders[0]
    plain = [action for action in order if action.kind.value != "W"]
    assert hint_codes(plain, 1, 1) == (0, 1, 2, 3, 4, 5)


def test_undisturbed_it_does_what_the_hint_says() -> None:
    for ranks, microbatches in ((2, 4), (4, 16), (8, 32)):
        placement = v(ranks)
        times = StageTimes.equal(2 * ranks, forward_s=1.0, backward_s=1.0, weight_s=1.0)
        policies = make_policies("hinted", placement, microbatches, cap=ranks, weight_pieces=1)
        result = simulate(
            placement, microbatches, policies, times, cap=float(ranks), weight_pieces=1
        )
        hint = make_schedule("zb-v", placement, microbatches)
        static = [Follow(order) for order in hint.orders]
        expected = simulate(placement, microbatches, static, times, weight_pieces=1)
        assert result.makespan_s <= expected.makespan_s


@pytest.mark.parametrize("kind", ["jitter", "lengths", "latency", "slow rank", "fast rank"])
def test_never_slower_than_its_hint_with_the_same_memory(kind: str) -> None:
    placement = v(4)
    times = StageTimes.equal(8, forward_s=1.0, backward_s=1.0, weight_s=1.0)
    hint = make_schedule("zb-v", placement, 16)
    total, static_total = 0.0, 0.0
    for seed in range(20):
        workload = draw(
            placement,
            16,
            times,
            seed=seed,
            action_sigma=0.3 * (kind == "jitter"),
            microbatch_sigma=0.5 * (kind == "lengths"),
            link=Link(latency_s=0.4 * (kind == "latency")),
            rank_factors={"slow rank": (1.3, 1, 1, 1), "fast rank": (1, 1, 0.7, 1)}.get(kind),
        )
        policies = make_policies("hinted", placement, 16, cap=4.0, weight_pieces=4)
        result = simulate(
            placement, 16, policies, workload, cap=4.0, weight_pieces=4, compiled=True
        )
        assert max(result.peak_units) <= 4.0
        total += result.makespan_s
        followers = [Follow(order) for order in hint.orders]
        static_total += simulate(
            placement, 16, followers, workload, weight_pieces=1, compiled=True
        ).makespan_s
    assert total <= static_total * 1.0001


def test_the_hint_is_the_best_that_the_cap_allows() -> None:
    assert hint_for(v(4), 16, None).name == "zb-v"
    assert hint_for(v(4), 16, 4.0).name == "zb-v"
    assert hint_for(v(4), 16, 3.0).name == "v-half"
    assert hint_for(v(4), 16, 1.0).name == "adaptive"
    single_chunk = Placement(num_ranks=4, num_chunks=1)
    assert hint_for(single_chunk, 16, 4.0).name == "zb-h1"
    assert hint_for(Placement(num_ranks=4, num_chunks=2), 16, 9.0).name == "interleaved"
    for placement in (v(4), single_chunk, Placement(num_ranks=4, num_chunks=2)):
        for cap in (1.0, 2.0, 3.5):
            hint = hint_for(placement, 16, cap)
            validate(hint)
            assert max(peak_units(hint)) <= cap
