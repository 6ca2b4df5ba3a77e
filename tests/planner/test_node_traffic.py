"""Tests that predicted steps are not shorter than the time of a node's network messages."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.planner.chunk_partition import CHUNKED
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, make_cluster
from megatron.adaptive.planner.cost import as_run, predict
from megatron.adaptive.planner.explain_plan import explain
from megatron.adaptive.planner.model_file import preset
from megatron.adaptive.planner.plan import Plan, PlanRow, Replica, StagePlace, place_ranks
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import complete_profile
from megatron.adaptive.schedule import catalog
from tests.support.small_clusters import Problem, random_problem, solve


def slow_between_fast(bandwidth: str) -> PlanInputs:
    """Returns inputs with two nodes of 4 A100, one of 8 V100, and a network of ``bandwidth``."""
    document = {
        "format": 1,
        "nodes": [
            {"gpu": "A100-80", "count": 2, "gpus_per_node": 4, "link": {"bandwidth": "250 GB/s"}},
            {"gpu": "V100-32", "count": 1, "gpus_per_node": 8, "link": {"bandwidth": "120 GB/s"}},
        ],
        "network": {"bandwidth": bandwidth},
    }
    model, cluster = (
        preset("llama-7b", "fp16", attention="kernel"),
        make_cluster(document, "c.yaml", {}),
    )
    return PlanInputs(model, cluster, complete_profile(None, model, cluster))


def v_of_two_chunks(inputs: PlanInputs, batch: int = 64) -> Plan:
    """Returns a plan in which the slow node holds the middle of both halves of a V."""
    return Plan(
        tp=1, dp=4, pp=4, chunks=2, micro_batch=1, global_batch=batch, schedule="adaptive",
        partition=(7, 3, 1, 7, 5, 3, 1, 7), recompute="none", slices=2,
        places=place_ranks(inputs.cluster, (0, 2, 1), tp=1, dp=4, pp=4, micro_batch=1),
    )  # fmt: skip


@pytest.mark.parametrize("batch", [64, 256])
def test_four_crossings_of_one_node_share_its_link(batch: int) -> None:
    inputs = slow_between_fast("10 Gbit/s")
    plan = v_of_two_chunks(inputs, batch)
    prediction = predict(plan, inputs)
    # The slow node sends the outputs of stages 2 and 6, and the gradients of stages 1 and 5.
    least_s = 4 * batch * 4096 * 4096 * 2 / 1.25e9
    assert prediction.seconds == pytest.approx(least_s)
    assert sum(prediction.parts.values()) == pytest.approx(prediction.seconds)
    assert prediction.limiting_node == 2
    lines = explain(PlanRow(plan=plan, prediction=prediction), inputs)
    reason = "the network link of node 2 (v100-32), which is busy during the whole step"
    assert lines.endswith(f"held back by {reason}")


def test_a_fast_network_does_not_limit_a_step() -> None:
    inputs = slow_between_fast("400 Gbit/s")
    plan = v_of_two_chunks(inputs)
    prediction = predict(plan, inputs)
    assert prediction.limiting_node is None
    assert "network link" not in explain(PlanRow(plan=plan, prediction=prediction), inputs)


def drawn_problem(rng: random.Random, seed: int) -> Problem:
    """Returns a random problem with several nodes of up to four GPUs and a random network."""
    problem = random_problem(seed)
    gpus = rng.choice((1, 2, 4))
    groups = tuple(
        NodePool(type=replace(group.type, gpus=gpus), count=max(2, group.count))
        for group in problem.cluster.groups
    )
    network = LinkSpeed(bytes_per_s=10 ** rng.uniform(7, 9))
    return replace(problem, cluster=Cluster(groups=groups, network=network))


def drawn_plan(problem: Problem, rng: random.Random) -> Plan:
    """Returns a plan for ``problem`` with random nodes, sizes, chunks and layers."""
    cluster = problem.cluster
    order = rng.sample(range(len(cluster.nodes)), len(cluster.nodes))
    gpus = len(order) * cluster.nodes[0].gpus
    schedule = rng.choice(("1f1b", "adaptive", "gpipe", *CHUNKED))
    chunks = 2 if schedule in CHUNKED or schedule == "adaptive" else 1
    tp = rng.choice([n for n in (1, 2) if cluster.nodes[0].gpus % n == 0])
    # Most of the drawn plans reduce gradients within nodes, so that messages between stages count.
    most = rng.choice((gpus, *[cluster.nodes[0].gpus] * 3)) // tp
    dp = rng.choice([n for n in range(1, most + 1) if gpus // tp % n == 0])
    pp = gpus // tp // dp
    layers = problem.model.num_layers
    stages = pp * chunks
    cuts = sorted(rng.sample(range(1, layers), min(stages, layers) - 1))
    partition = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    partition += [0] * (stages - len(partition))
    places = place_ranks(cluster, order, tp=tp, dp=dp, pp=pp, micro_batch=1)
    return Plan(
        tp=tp, dp=dp, pp=pp, chunks=chunks, schedule=schedule, partition=tuple(partition),
        places=places, micro_batch=1, global_batch=dp * 4 * pp,
    )  # fmt: skip


def busiest_s(plan: Plan, problem: Problem) -> float:
    """Returns the time of the busiest network link, if it transfers one message at a time."""
    sent, received = Counter[int](), Counter[int]()
    model = problem.model

    def send(source: Replica, target: Replica, size: float) -> None:
        if source.node != target.node:
            sent[source.node] += size * source.tp
            received[target.node] += size * source.tp

    placement = catalog.placement_for(plan.schedule, plan.pp, plan.chunks)
    rank_of = [placement.locate(stage)[0] for stage in range(len(plan.partition))]
    counts = [len(stage_place.replicas) for stage_place in plan.places]
    for stage in range(1, len(plan.partition)):
        size = model.layer(sum(plan.partition[:stage]) - 1).output_elements
        size *= model.precision.element_bytes
        before, after = rank_of[stage - 1], rank_of[stage]
        for sample in range(plan.global_batch):
            first = plan.places[before].replicas[sample % counts[before]]
            second = plan.places[after].replicas[sample % counts[after]]
            if before != after:
                send(first, second, size)
                send(second, first, size)
    for rank, stage_place in enumerate(plan.places):
        parameters = 0.0
        for layer, stage in enumerate(
            stage for stage, count in enumerate(plan.partition) for _ in range(count)
        ):
            if rank_of[stage] == rank:
                parameters += model.layer(layer).parameters / plan.tp
        part = parameters * model.precision.reduce_bytes / counts[rank]
        for replica, following in zip(
            stage_place.replicas, (*stage_place.replicas[1:], stage_place.replicas[0]), strict=True
        ):
            send(replica, following, 2 * (counts[rank] - 1) * part)
    assert problem.cluster.network is not None
    most = max([*sent.values(), *received.values()], default=0.0)
    return most / problem.cluster.network.bytes_per_s


def test_no_step_is_shorter_than_the_messages_of_a_node() -> None:
    limited = chunked = 0
    for seed in range(150):
        rng = random.Random(seed)
        problem = drawn_problem(rng, seed)
        plan = drawn_plan(problem, rng)
        try:
            prediction = predict(plan, problem)
        except ScheduleError:
            continue  # The schedule does not support this number of stages or microbatches.
        least_s = busiest_s(plan, problem)
        assert prediction.seconds >= least_s * (1 - 1e-9), plan
        if prediction.limiting_node is not None:
            assert prediction.seconds == pytest.approx(least_s)
            limited += 1
            chunked += plan.chunks > 1
        assert sum(prediction.parts.values()) == pytest.approx(prediction.seconds)
    assert limited >= 10
    assert chunked >= 5


def test_stages_with_unequal_numbers_of_replicas_count_all_messages() -> None:
    problem = next(
        drawn
        for drawn in map(random_problem, range(100))
        if len(drawn.cluster.nodes) >= 3 and drawn.cluster.nodes[0].gpus == 1
    )
    network = LinkSpeed(bytes_per_s=1e7)
    problem = replace(problem, cluster=replace(problem.cluster, network=network))
    layers = problem.model.num_layers
    places = tuple(
        StagePlace(
            replicas=tuple(Replica(node=node, gpu=0, tp=1) for node in nodes), micro_batch=size
        )
        for nodes, size in (((0, 1), 1), ((2,), 2))
    )
    searched = Plan(
        tp=1, dp=2, pp=2, micro_batch=1, global_batch=8, partition=(layers - 1, 1), places=places
    )
    for plan in (searched, as_run(searched)):
        assert predict(plan, problem).seconds >= busiest_s(plan, problem) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_search_ranks_plans_by_the_limited_step(seed: int) -> None:
    problem = random_problem(seed)
    network = LinkSpeed(bytes_per_s=5e7)
    cluster = replace(problem.cluster, network=network)
    options = replace(problem.options, top=5, schedules=("1f1b", "interleaved", "zb-v"))
    changed = replace(problem, cluster=cluster, options=options)
    for entry in solve(changed).plans:
        assert entry.seconds == pytest.approx(predict(entry.plan, changed).seconds, rel=1e-9)
