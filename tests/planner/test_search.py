"""The search against all plans of small problems, and against itself on better clusters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.planning.small import better, brute_force, random_problem, solve
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.front import pareto
from megatron.adaptive.planner.search import Searcher, search
from megatron.adaptive.planner.search_space import Objective


@pytest.mark.parametrize("seed", range(8))
def test_small_problems_equal_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    result = solve(problem)
    seconds = result.found[0].seconds if result.found else math.inf
    assert seconds == pytest.approx(brute_force(problem), rel=1e-9)
    assert result.whole
    assert result.gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_a_better_cluster_never_has_a_worse_plan(seed: int) -> None:
    problem = random_problem(seed)
    before, after = solve(problem), solve(better(problem, seed))
    if before.found:
        assert after.found[0].seconds <= before.found[0].seconds * (1 + 1e-9)


@pytest.mark.parametrize("unequal", [False, True])
def test_a_plan_takes_what_is_predicted_of_it(unequal: bool) -> None:
    problem = random_problem(3)
    options = replace(problem.options, top=5, unequal=unequal, schedules=("1f1b", "interleaved"))
    found = solve(replace(problem, options=options)).found
    assert found
    for one in found:
        seen = predict(one.plan, problem.model, problem.cluster, problem.profile)
        assert seen.seconds == pytest.approx(one.seconds, rel=1e-9)
        assert seen.price_per_hour == pytest.approx(one.price_per_hour)
        assert seen.fits


def test_unequal_stages_are_never_worse() -> None:
    for seed in range(8):
        problem = random_problem(seed)
        options = replace(problem.options, unequal=True)
        equal, unequal = solve(problem), solve(replace(problem, options=options))
        if equal.found:
            assert unequal.found[0].seconds <= equal.found[0].seconds * (1 + 1e-9)


def test_front_has_the_fastest_and_no_plan_that_another_beats() -> None:
    problem = random_problem(5)
    searcher = Searcher(
        problem.model,
        problem.cluster,
        problem.profile,
        global_batch=problem.global_batch,
        options=problem.options,
    )
    front = pareto(searcher)
    assert front.slack == 0
    assert front.found[0].seconds == pytest.approx(solve(problem).found[0].seconds)
    for one in front.found:
        for other in front.found:
            assert other is one or other.seconds > one.seconds or other.value > one.value
    for one in front.found:
        # The same by a search for the cheapest within that time.
        goal = Objective(least="cost", most_seconds_per_step=one.seconds * (1 + 1e-12))
        assert searcher.search(goal).found[0].value == pytest.approx(one.value)


def test_limits_are_kept() -> None:
    problem = random_problem(5)
    free = solve(problem).found[0]
    goal = Objective(most_price_per_hour=free.price_per_hour * 0.99)
    options = problem.options
    found = search(
        problem.model,
        problem.cluster,
        problem.profile,
        global_batch=problem.global_batch,
        options=options,
        objective=goal,
    ).found
    assert all(one.price_per_hour < free.price_per_hour for one in found)


def test_a_given_partition_is_kept() -> None:
    problem = random_problem(2)
    layers = problem.model.num_layers
    options = replace(problem.options, partition=(1, layers - 1))
    found = solve(replace(problem, options=options)).found
    assert found
    assert found[0].plan.partition == (1, layers - 1)
