"""Tests the search, in small problems by comparison with all plans, and on improved clusters."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.model import MODELS
from megatron.adaptive.config.plan_file import plan_flags, world_size_of
from megatron.adaptive.config.schedule_specs import selectable_names
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.chunk_partition import SEARCHED
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType, make_cluster
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.layer_costs import make_estimator
from megatron.adaptive.planner.model_file import arguments_model, preset
from megatron.adaptive.planner.plan import Plan, plan_document
from megatron.adaptive.planner.profile import PlanInputs, Profile
from megatron.adaptive.planner.propose import SCHEDULES, Request, complete_profile, pareto, propose
from megatron.adaptive.planner.search import Searcher
from megatron.adaptive.planner.search_options import Objective, SearchOptions
from tests.support.small_clusters import better, brute_force, random_problem, searcher_of, solve


@pytest.mark.parametrize("seed", range(8))
def test_small_problems_equal_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    result = solve(problem)
    seconds = result.plans[0].seconds if result.plans else math.inf
    assert seconds == pytest.approx(brute_force(problem), rel=1e-9)
    assert result.gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_small_problems_with_islands_equal_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    far = LinkSpeed(bytes_per_s=3e10)
    groups = [
        replace(group, type=replace(group.type, islands=((2 * group.type.gpus, far),)))
        for group in problem.cluster.groups
    ]
    cluster = replace(problem.cluster, groups=tuple(groups))
    result = solve(replace(problem, cluster=cluster))
    seconds = result.plans[0].seconds if result.plans else math.inf
    assert seconds == pytest.approx(brute_force(replace(problem, cluster=cluster)), rel=1e-9)


@pytest.mark.long
def test_tensor_parallelism_stays_in_an_island_and_rings_of_replicas_in_a_leaf() -> None:
    document = {
        "format": 1,
        "nodes": [
            {
                "gpu": "H100-80",
                "count": 12,
                "gpus_per_node": 8,
                "link": {"bandwidth": "16 GB/s", "latency": "8 us"},
                "islands": [
                    {"gpus": 4, "bandwidth": "400 GB/s", "latency": "3 us"},
                    {"nodes": 4, "bandwidth": "1600 Gbit/s", "latency": "5 us"},
                    {"nodes": 8, "bandwidth": "50 Gbit/s", "latency": "20 us"},
                ],
            }
        ],
        "network": {"bandwidth": "10 Gbit/s", "latency": "40 us"},
    }
    options = SearchOptions(tp=(1, 2, 4, 8), context_ranks=(1,), micro_batch=(1, 2), top=3)

    def plans(islands: bool) -> list[Plan]:
        (node,) = document["nodes"]
        kept = {key: value for key, value in node.items() if islands or key != "islands"}
        cluster = make_cluster({**document, "nodes": [kept]}, "cluster", {})
        model = preset("llama3-8b", "bf16")
        inputs = PlanInputs(model, cluster, complete_profile(None, model, cluster))
        searcher = Searcher(inputs, global_batch=96, options=options)
        ranked = searcher.search().plans
        for entry in ranked:
            assert entry.seconds == pytest.approx(predict(entry.plan, inputs).seconds)
        return [entry.plan for entry in ranked]

    best, *others = plans(islands=True)
    assert best.tp in (2, 4)
    assert all(entry.tp <= 4 for entry in others)
    stages = [{entry.node // 4 for entry in stage.replicas} for stage in best.places]
    assert all(len(leaves) == 1 for leaves in stages)
    # The replicas of a stage are on several nodes, but all of these are below one leaf switch.
    assert all(len({entry.node for entry in stage.replicas}) > 1 for stage in best.places)
    assert plans(islands=False)[0] != best


@pytest.mark.parametrize("seed", range(8, 14))
def test_no_plan_is_faster_than_the_bound_of_what_was_not_looked_at(seed: int) -> None:
    problem = random_problem(seed)
    options = replace(problem.options, schedules=SCHEDULES, most_cpu_s=0.0)
    unseen = solve(replace(problem, options=options))
    assert not unseen.plans
    looked = solve(replace(problem, options=replace(options, most_cpu_s=60.0)))
    fastest = min([plan.seconds for plan in looked.plans], default=math.inf)
    assert unseen.bound <= min(fastest, brute_force(problem)) * (1 + 1e-9)


def test_long_sequences_are_shared_and_the_trainer_takes_such_plans() -> None:
    model = arguments_model(
        f"{MODELS['llama3-8b'].replace('8192', '65536')} --num-layers 4".split(),
        *("long", "bf16"),
        attention="fused",
    )
    node = NodeType(
        name="n", gpu="h100-80", gpus=8, memory_bytes=80e9, intra=LinkSpeed(bytes_per_s=450e9)
    )
    cluster = Cluster(groups=(NodePool(type=node, count=2),), network=LinkSpeed(bytes_per_s=5e10))
    inputs = PlanInputs(model, cluster, complete_profile(None, model, cluster))
    # The batch has only two samples. To use 16 GPUs, several GPUs must share each sequence.
    request = Request(global_batch=2, options=SearchOptions(tp=(2,)))
    row = propose(inputs, request).rows[0]
    plan = row.plan
    assert plan.context_ranks > 1
    assert plan.sequence_parallel
    assert row.prediction.fits
    alone = replace(request, options=replace(request.options, context_ranks=(1,)))
    assert row.prediction.seconds < propose(inputs, alone).rows[0].prediction.seconds
    document = plan_document(plan, inputs, row.prediction)
    flags = [*model.arguments, "--train-iters", "1", "--lr", "1e-4", "--mock-data"]
    world_size = plan.tp * sum(len(stage.replicas) for stage in plan.places)
    installed = Installed(transformer_engine=True)
    config = parse(
        [*flags, *plan_flags(document, "plan")],
        world_size=world_size,
        last_wins=True,
        installed=installed,
    )
    assert config.parallel.context_parallel_size == plan.context_ranks
    assert world_size_of(document) == world_size
    with pytest.raises(ConfigError, match="--context-parallel-size 3 .* multiple of 6 tokens"):
        propose(inputs, replace(request, options=replace(request.options, context_ranks=(3,))))


@pytest.mark.parametrize("seed", range(12))
def test_a_better_cluster_never_has_a_worse_plan(seed: int) -> None:
    problem = random_problem(seed)
    before, after = solve(problem), solve(better(problem, seed))
    if before.plans:
        assert after.plans[0].seconds <= before.plans[0].seconds * (1 + 1e-9)


@pytest.mark.parametrize("unequal", [False, True])
def test_a_plan_takes_what_is_predicted_of_it(unequal: bool) -> None:
    problem = random_problem(3)
    options = replace(problem.options, top=5, unequal=unequal, schedules=("1f1b", "interleaved"))
    ranked = solve(replace(problem, options=options)).plans
    assert ranked
    for entry in ranked:
        seen = predict(entry.plan, problem)
        assert seen.seconds == pytest.approx(entry.seconds, rel=1e-9)
        assert seen.price_per_hour == pytest.approx(entry.price_per_hour)
        assert seen.fits


def test_unequal_stages_are_never_worse() -> None:
    for seed in range(8):
        problem = random_problem(seed)
        options = replace(problem.options, unequal=True)
        equal, unequal = solve(problem), solve(replace(problem, options=options))
        if equal.plans:
            assert unequal.plans[0].seconds <= equal.plans[0].seconds * (1 + 1e-9)


def test_front_has_the_fastest_and_no_plan_that_another_beats() -> None:
    problem = random_problem(5)
    searcher = searcher_of(problem)
    front, slack = pareto(searcher)
    assert slack == 0
    assert front[0].seconds == pytest.approx(solve(problem).plans[0].seconds)
    for entry in front:
        for other in front:
            assert other is entry or other.seconds > entry.seconds or other.value > entry.value
    for entry in front:
        # The search for the cheapest plan that is at least as fast must find the same cost.
        goal = Objective(least="cost", most_seconds_per_step=entry.seconds * (1 + 1e-12))
        assert searcher.search(goal).plans[0].value == pytest.approx(entry.value)


def test_limits_are_kept() -> None:
    problem = random_problem(5)
    free = solve(problem).plans[0]
    goal = Objective(most_price_per_hour=free.price_per_hour * 0.99)
    ranked = searcher_of(problem).search(goal).plans
    assert all(entry.price_per_hour < free.price_per_hour for entry in ranked)


@pytest.mark.parametrize("seed", range(6))
def test_limits_and_front_are_those_of_each_part_searched_alone(seed: int) -> None:
    problem = random_problem(seed)
    options = replace(problem.options, schedules=SCHEDULES)
    problem = replace(problem, options=options)
    alone = []
    groups = problem.cluster.groups
    for counts in itertools.product(*(range(group.count + 1) for group in groups)):
        kept = [replace(entry, count=n) for entry, n in zip(groups, counts, strict=True) if n]
        if kept:
            part = replace(problem.cluster, groups=tuple(kept))
            every = replace(options, all_nodes=True)
            alone += solve(replace(problem, cluster=part, options=every)).plans
    costs = [(entry.seconds, entry.seconds * entry.price_per_hour / 3600) for entry in alone]
    for limit_s in sorted(entry.seconds for entry in alone):
        goal = Objective(least="cost", most_seconds_per_step=limit_s * (1 + 1e-9))
        least = min(cost for s, cost in costs if s <= goal.most_seconds_per_step)
        fastest = searcher_of(problem).search(goal).plans[0]
        assert fastest.value == pytest.approx(least)
        assert fastest.seconds == pytest.approx(predict(fastest.plan, problem).seconds)
    front = [(entry.seconds, entry.value) for entry in pareto(searcher_of(problem))[0]]
    best = [
        entry
        for entry in sorted(set(costs))
        if not any(o[0] <= entry[0] and o[1] < entry[1] for o in costs)
    ]
    assert front == [pytest.approx(entry) for entry in best]


def test_a_given_partition_is_kept() -> None:
    problem = random_problem(2)
    layers = problem.model.num_layers
    options = replace(problem.options, partition=(1, layers - 1))
    ranked = solve(replace(problem, options=options)).plans
    assert ranked
    assert ranked[0].plan.partition == (1, layers - 1)


def test_measured_all_reduces_count_in_search_and_prediction_alike() -> None:
    node = NodeType(
        name="n", gpu="a100-40", gpus=2, memory_bytes=40e9, intra=LinkSpeed(bytes_per_s=300e9)
    )
    cluster = Cluster(
        groups=(NodePool(type=node, count=2),), network=LinkSpeed(bytes_per_s=10e9, shared=True)
    )
    model = preset("gpt2", "bf16")
    free = Profile(estimator=make_estimator(model))
    slow = replace(free, all_reduce={("n", 2): LinkSpeed(bytes_per_s=1e9, shared=False)})
    options = SearchOptions(dp=(2,), tp=(1,), micro_batch=(1,), recompute=("none",), top=3)

    def found(profile: Profile) -> list[tuple[float, float]]:
        searcher = Searcher(PlanInputs(model, cluster, profile), global_batch=8, options=options)
        return [
            (entry.seconds, predict(entry.plan, PlanInputs(model, cluster, profile)).seconds)
            for entry in searcher.search().plans
        ]

    for profile in (free, slow):
        for searched_s, predicted_s in found(profile):
            assert searched_s == pytest.approx(predicted_s)
    assert found(slow)[0][0] > found(free)[0][0]


def test_every_schedule_of_the_planner_can_be_searched() -> None:
    assert {*SEARCHED} == {*selectable_names(lambda spec: spec.planned != "no")}
