"""Generates small random planning problems, and finds the best plan of a problem by brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.layer_costs import CHANNELS_BYTES
from megatron.adaptive.planner.model_description import LayerKind, Model
from megatron.adaptive.planner.plan import Plan, place_ranks
from megatron.adaptive.planner.profile import LayerTimes, PlanInputs, Profile
from megatron.adaptive.planner.search import Searcher
from megatron.adaptive.planner.search_options import SearchOptions, SearchResult


@dataclass(frozen=True, kw_only=True)
class Problem(PlanInputs):
    """Inputs and options of a search for the best plan."""

    global_batch: int
    options: SearchOptions


def random_problem(seed: int) -> Problem:
    """Returns a random problem with at most four nodes, three node types and seven layers.

    ``seed`` is the seed of all random numbers.
    """
    rng, more = random.Random(seed), random.Random(-seed - 1)
    kinds = {
        name: LayerKind(
            name=name,
            parameters=rng.uniform(1e6, 2e8),
            output_elements=rng.uniform(1e5, 4e6),
            activation_bytes=rng.uniform(1e7, 1e9),
            tp_bytes=rng.uniform(0, 4e6),
            forward_flops=2.0,
            attention_flops=float(name in ("wide", "narrow")),
            attention_bytes=5e6 * more.choice((0, 1)),
            context_bytes=more.uniform(1e5, 4e6),
            replicated_activation_bytes=more.uniform(0, 1e7),
        )
        for name in ("embedding", "wide", "narrow", "head")
    }
    middle = [rng.choice(("wide", "narrow")) for _ in range(rng.randint(1, 5))]
    tied = rng.random() < 0.5
    model = Model(
        name="small",
        kinds=kinds,
        layers=("embedding", *middle, "head"),
        tied_parameters=1e7 if tied else 0.0,
        tied_layers=(0, len(middle) + 1) if tied else (),
        sequence=8,
    )
    gpus = rng.choice((1, 2))
    names = "abc"[: rng.randint(1, 3)]
    groups = tuple(
        NodePool(
            type=NodeType(
                name=name,
                gpu=name,
                gpus=gpus,
                memory_bytes=rng.uniform(3e9, 2e10) + CHANNELS_BYTES,
                intra=LinkSpeed(bytes_per_s=rng.uniform(5e9, 2e11), shared=rng.random() < 0.5),
                price_per_hour=rng.uniform(1, 10),
            ),
            count=1 if len(names) > 2 else rng.randint(1, 4 // len(names)),
        )
        for name in names
    )
    network = LinkSpeed(bytes_per_s=rng.uniform(1e8, 2e10), latency_s=rng.uniform(0, 1e-4))
    speeds = {name: rng.uniform(0.5, 2) for name in names}
    launch = rng.choice((0.0, 0.0005))
    layers = {
        (kind, name, tp, size): LayerTimes(
            forward_s=0.01 * factor * speeds[name] * size / tp,
            backward_input_s=0.01 * factor * speeds[name] * size / tp,
            backward_weight_s=0.01 * factor * speeds[name] * size / tp,
            launch_s=launch,
        )
        for kind, factor in ((kind, rng.uniform(0.1, 2)) for kind in kinds)
        for name in names
        for tp in (1, 2)
        for size in (1, 2, 4)
    }
    return Problem(
        model=model,
        cluster=Cluster(groups=groups, network=network),
        profile=Profile(layers=layers, launch_s=dict.fromkeys(names, launch / 5)),
        global_batch=rng.choice((2, 4, 6, 8)),
        options=SearchOptions(
            recompute=("none",),
            distributed_optimizer=(False,),
            micro_batch=(1, 2, 4),
            overlap_reduce=rng.random() < 0.5,
            context_ranks=(1, 2),
            schedules=("1f1b",),
            most_leaves=10**6,
        ),
    )


def solve(problem: Problem) -> SearchResult:
    """Searches for the best plan of ``problem``, and returns the result."""
    return searcher_of(problem).search()


def searcher_of(problem: Problem) -> Searcher:
    """Returns a searcher for the best plan of ``problem``."""
    return Searcher(problem, global_batch=problem.global_batch, options=problem.options)


def brute_force(problem: Problem) -> float:
    """Returns the predicted step time of the best plan for ``problem`` in seconds.

    Returns infinity if no plan fits.
    """
    best = float("inf")
    for plan in _plans(problem):
        prediction = predict(plan, problem)
        if prediction.fits:
            best = min(best, prediction.seconds)
    return best


def _plans(problem: Problem) -> Iterator[Plan]:
    cluster, model = problem.cluster, problem.model
    gpus = cluster.nodes[0].gpus
    for order in _orders(cluster):
        ways = itertools.product((1, 2), range(1, 9), (1, 2, 4), (1, 2), (False, True))
        for tp, dp, micro_batch, shared, split in ways:
            width = tp * dp * shared
            stages, rest = divmod(len(order) * gpus, width)
            whole = (gpus % width == 0 or width % gpus == 0) and tp >= 1 + split
            if rest or not whole or gpus % tp or stages > model.num_layers:
                continue
            if problem.global_batch % (dp * micro_batch):
                continue
            sizes = {"tp": tp, "dp": dp * shared, "pp": stages}
            places = place_ranks(cluster, order, **sizes, micro_batch=micro_batch)
            for inner in itertools.combinations(range(1, model.num_layers), stages - 1):
                cuts = (0, *inner, model.num_layers)
                yield Plan(
                    tp=tp,
                    dp=dp,
                    pp=stages,
                    micro_batch=micro_batch,
                    global_batch=problem.global_batch,
                    partition=tuple(b - a for a, b in itertools.pairwise(cuts)),
                    places=places,
                    overlap_reduce=problem.options.overlap_reduce,
                    sequence_parallel=split,
                    context_ranks=shared,
                )


def _orders(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Yields all orders of all subsets of the nodes of ``cluster``.

    Nodes of the same type are interchangeable, so only one of the orders with the same sequence of
    types is yielded.
    """
    seen = set()
    numbers = range(len(cluster.nodes))
    for count in range(1, len(cluster.nodes) + 1):
        for order in itertools.permutations(numbers, count):
            types = tuple(cluster.nodes[node].name for node in order)
            if types not in seen:
                seen.add(types)
                yield order


def better(problem: Problem, seed: int) -> Problem:
    """Returns a copy of ``problem`` with more memory, a faster link or a faster type of GPU.

    ``seed`` selects which of these changes is made.
    """
    rng = random.Random(seed)
    groups = list(problem.cluster.groups)
    index = rng.randrange(len(groups))
    node = groups[index].type
    part = rng.choice(("memory", "intra", "network", "gpu"))
    factor = rng.uniform(1, 3)
    profile = problem.profile
    network = problem.cluster.network
    assert network is not None
    if part == "memory":
        node = replace(node, memory_bytes=node.memory_bytes * factor)
    elif part == "intra":
        node = replace(node, intra=replace(node.intra, bytes_per_s=node.intra.bytes_per_s * factor))
    elif part == "network":
        network = replace(network, bytes_per_s=network.bytes_per_s * factor)
    else:
        layers = {
            key: times.scaled(1 / factor) if key[1] == node.gpu else times
            for key, times in profile.layers.items()
        }
        profile = replace(profile, layers=layers)
    groups[index] = replace(groups[index], type=node)
    cluster = replace(problem.cluster, groups=tuple(groups), network=network)
    return replace(problem, cluster=cluster, profile=profile)
