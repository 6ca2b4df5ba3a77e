"""Tests random durations of simulated actions, and profiles that are read from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.catalog import make_policies
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import Link, StageTimes, draw, load_profile, order_by_cost

TWO = Placement(num_ranks=2, num_chunks=1)
TIMES = StageTimes.equal(2, forward_s=1.0, backward_s=2.0, weight_s=1.0)
PS = 10**12


def test_times_without_jitter_are_what_was_given() -> None:
    workload = draw(TWO, 3, TIMES, rank_factors=(1.0, 2.0))
    assert workload.durations_ps[:, 0].tolist() == [[PS] * 3, [2 * PS] * 3, [PS] * 3]
    assert workload.durations_ps[:, 1].tolist() == [[2 * PS] * 3, [4 * PS] * 3, [2 * PS] * 3]


def test_recomputation_is_part_of_the_backward() -> None:
    times = StageTimes(forward_s=(1.0, 1.0), backward_s=(2.0, 2.0), recompute_s=(1.0, 0.0))
    assert draw(TWO, 1, times).durations_ps[1].tolist() == [[3 * PS], [2 * PS]]


def test_factors_have_mean_one_and_microbatches_share_theirs() -> None:
    durations = draw(TWO, 20000, TIMES, seed=3, microbatch_sigma=0.5).durations_ps / PS
    assert durations[0, 0].mean() == pytest.approx(1.0, rel=0.02)
    assert np.allclose(durations[1], 2 * durations[0], atol=1e-9)
    noisy = draw(TWO, 20000, TIMES, seed=3, action_sigma=0.5).durations_ps / PS
    assert noisy[1].mean() == pytest.approx(2.0, rel=0.02)
    assert abs(np.corrcoef(noisy[0, 0], noisy[1, 0])[0, 1]) < 0.05


def test_a_seed_and_one_sigma_do_not_change_the_other_draws() -> None:
    delayed = draw(TWO, 5, TIMES, link=Link(latency_s=1.0), seed=1, latency_sigma=0.4)
    both = draw(
        TWO, 5, TIMES, link=Link(latency_s=1.0), seed=1, latency_sigma=0.4, action_sigma=0.2
    )
    assert delayed.delays_ps.tolist() == both.delays_ps.tolist()


def test_a_message_waits_for_its_link() -> None:
    times = StageTimes.equal(2, forward_s=1.0, backward_s=1.0)
    workload = draw(TWO, 2, times, link=Link(latency_s=0.5, occupancy_s=3.0))
    result = simulate(TWO, 2, make_policies("gpipe", TWO, 2), workload)
    second = [span.start_s for span in result.spans[1] if str(span.action).startswith("F")]
    # The messages are ready at 1 s and 2 s. The link transfers the first from 1 s to 4 s and the
    # second from 4 s to 7 s.
    assert second == [4.5, 7.5]


def test_one_link_may_differ() -> None:
    three = Placement(num_ranks=3, num_chunks=1)
    times = StageTimes.equal(3, forward_s=1.0, backward_s=1.0)
    workload = draw(three, 1, times, links={(1, 2): Link(latency_s=7.0)})
    result = simulate(three, 1, make_policies("1f1b", three, 1), workload)
    assert [spans[0].start_s for spans in result.spans] == [0.0, 1.0, 9.0]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: draw(TWO, 1, TIMES, action_sigma=-0.1), "action_sigma must be .* got -0.1"),
        (
            lambda: draw(TWO, 1, TIMES, latency_sigma=float("nan")),
            "latency_sigma must be .* got nan",
        ),
        (lambda: Link(latency_s=-1.0), "latency_s must be .* got -1.0"),
        (
            lambda: draw(TWO, 1, TIMES, rank_factors=(1.0,)),
            "2 rank factors, one for each rank, got 1",
        ),
        (
            lambda: draw(TWO, 1, StageTimes(forward_s=(1.0,), backward_s=(1.0, 1.0))),
            "one forward time for each of the 2 stages, got 1",
        ),
        (
            lambda: draw(TWO, 1, StageTimes(forward_s=(1.0, float("nan")), backward_s=(1.0, 1.0))),
            "forward time of stage 1 must be .* got nan",
        ),
    ],
)
def test_bad_numbers_are_refused(make: object, match: str) -> None:
    assert callable(make)
    with pytest.raises(ScheduleError, match=match):
        make()


GOOD: dict[str, Any] = {"version": 1, "forward_s": [0.1, 0.2], "backward_s": [0.3, 0.4]}


def loaded(tmp_path: Path, **changes: Any) -> Any:
    path = tmp_path / "p.json"
    content = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    path.write_text(json.dumps(content))
    return load_profile(path, num_stages=2)


def test_what_is_left_out_is_nothing(tmp_path: Path) -> None:
    profile = loaded(tmp_path)
    assert profile.times.forward_s == (0.1, 0.2)
    assert profile.times.weight_s == ()
    assert profile.link == Link()
    assert profile.rank_factors is None


def test_everything(tmp_path: Path) -> None:
    profile = loaded(
        tmp_path,
        weight_s=[0.1, 0],
        recompute_s=[0.1, 0.1],
        latency_s=0.5,
        occupancy_s=0.25,
        rank_factors=[1, 1.5],
        action_sigma=0.1,
        links=[{"from": 1, "to": 0, "occupancy_s": 2}],
    )
    assert profile.times.weight_s == (0.1, 0.0)
    assert profile.link == Link(latency_s=0.5, occupancy_s=0.25)
    assert profile.links == {(1, 0): Link(latency_s=0.5, occupancy_s=2.0)}
    assert profile.rank_factors == (1.0, 1.5)
    assert profile.action_sigma == 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version must be 1.*got 2"),
        ({"forward_s": None}, "forward_s is missing"),
        ({"forward_s": [0.1]}, "forward_s has 1 values: it needs 2, one per stage"),
        ({"backward_s": [0.1, -0.2]}, r"backward_s\[1\] must be .* got -0.2"),
        ({"backward_s": [0.1, float("nan")]}, "NaN is not a finite number"),
        ({"backward_s": [0.1, "slow"]}, r"backward_s\[1\] must be .* got 'slow'"),
        ({"weight_s": [0.1, 0.2, 0.3]}, "weight_s has 3 values"),
        ({"latency_s": float("inf")}, "Infinity is not a finite number"),
        ({"latencies": 1}, "latencies is not a key; the nearest is latency_s"),
        ({"links": [{"from": 0}]}, r"links\[0\]"),
        ({"links": 3}, "links must be a list.*got 3"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        loaded(tmp_path, **changes)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("{")
    with pytest.raises(ScheduleError, match="not valid JSON|No such file"):
        load_profile(path, num_stages=2)
    path.write_text("[]")
    with pytest.raises(ScheduleError, match="must be keys with values"):
        load_profile(path, num_stages=2)


def test_long_microbatches_are_taken_in_the_middle() -> None:
    assert [(5, 1, 4, 2, 3, 6)[index] for index in order_by_cost([5, 1, 4, 2, 3, 6], 2)] == [
        *(1, 3, 5),
        *(6, 4, 2),
    ]
    assert order_by_cost([5, 1, 4, 2], 4) == [1, 3, 2, 0]
    assert order_by_cost([2.0] * 5, 2) == list(range(5))
    assert order_by_cost([], 2) == []


@pytest.mark.parametrize("microbatches", [4, 16])
def test_in_that_order_a_step_takes_less_time(microbatches: int) -> None:
    placement = Placement(num_ranks=4, num_chunks=2, kind="v")
    times = StageTimes.equal(8, forward_s=1.0, backward_s=1.0, weight_s=1.0)
    policies = make_policies("adaptive", placement, microbatches)
    total_s = {"given": 0.0, "ordered": 0.0}
    for seed in range(10):
        drawn = draw(placement, microbatches, times, seed=seed, microbatch_sigma=0.8)
        costs = drawn.durations_ps.sum(axis=(0, 1)).tolist()
        taken = drawn.durations_ps[:, :, order_by_cost(costs, 4)]
        for name, durations in (("given", drawn.durations_ps), ("ordered", taken)):
            work = replace(drawn, durations_ps=np.ascontiguousarray(durations))
            result = simulate(placement, microbatches, policies, work, cap=6.0, weight_pieces=4)
            total_s[name] += result.makespan_s
    assert total_s["ordered"] < 0.97 * total_s["given"]
