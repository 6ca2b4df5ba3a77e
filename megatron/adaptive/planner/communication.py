"""Times messages and collectives: between stages, tensor-parallel ranks and replicas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from megatron.adaptive.planner.cluster import LinkSpeed
from megatron.adaptive.planner.plan import Replica, StagePlace
from megatron.adaptive.planner.profile import PlanInputs

__all__ = [
    "all_reduce_s",
    "boundary_s",
    "embedding_s",
    "exposed_reduce_s",
    "link_between",
    "reduce_s",
    "measured_all_reduce",
    "ring_segments",
]


def all_reduce_s(link: LinkSpeed, message_bytes: float, ranks: int, pairs: int = 1) -> float:
    """Returns the seconds of a ring all-reduce: ``2 (n - 1)`` messages of one n-th each.

    Args:
        link: the slowest on the ring.
        message_bytes: of the tensor.
        ranks: on the ring.
        pairs: rings that share the link.
    """
    if ranks < 2 or message_bytes <= 0:
        return 0.0
    return 2 * (ranks - 1) * link.seconds(message_bytes / ranks, pairs)


def link_between(inputs: PlanInputs, one: int, other: int) -> LinkSpeed:
    """Returns the link of two nodes as measured, or as the cluster file has it."""
    a, b = inputs.cluster.nodes[one], inputs.cluster.nodes[other]
    if one == other:
        return inputs.profile.intra_links.get(a.name, a.intra)
    for pair in ((a.name, b.name), (b.name, a.name)):
        if pair in inputs.profile.links:
            return inputs.profile.links[pair]
    return inputs.cluster.link_of_types(a, b)


def boundary_s(
    sender: StagePlace,
    receiver: StagePlace,
    inputs: PlanInputs,
    bytes_per_sample: float,
    *,
    sliced: bool = False,
) -> tuple[float, float]:
    """Times one message of every replica from one stage to the next.

    All replicas send at about the same time; those that leave a node together share its way out.

    Args:
        sender: the stage that sends.
        receiver: the stage that receives.
        inputs: what is trained where, and how long it takes.
        bytes_per_sample: of the tensor between the stages.
        sliced: whether each tensor-parallel rank sends its part, as with sequence parallelism;
            otherwise each sends the whole tensor.

    Returns:
        Latency, and seconds that the link is busy, of the slowest replica.
    """
    flows = _flows(sender, receiver, bytes_per_sample, sliced)
    leaving: dict[tuple[int, bool], int] = {}
    for (one, other), (count, _) in flows.items():
        key = (one, one == other)
        leaving[key] = leaving.get(key, 0) + count
    worst = (0.0, 0.0)
    for (one, other), (_, size) in flows.items():
        if size <= 0:
            continue
        link = link_between(inputs, one, other)
        busy = size / link.bandwidth(size, leaving[one, one == other])
        if link.latency_s + busy > sum(worst):
            worst = (link.latency_s, busy)
    return worst


def _flows(
    sender: StagePlace, receiver: StagePlace, bytes_per_sample: float, sliced: bool
) -> dict[tuple[int, int], tuple[int, float]]:
    """Counts messages, with bytes of the largest, by sending and receiving node.

    Samples of a wave of microbatches are numbered over the replicas of a stage; where the stages
    have different numbers of replicas, a replica sends each receiver the samples they share.
    """
    flows: dict[tuple[int, int], tuple[int, float]] = {}
    for i, source in enumerate(sender.replicas):
        begin, end = i * sender.micro_batch, (i + 1) * sender.micro_batch
        first = begin // receiver.micro_batch
        last = (end - 1) // receiver.micro_batch
        for j in range(first, last + 1):
            target = receiver.replicas[j]
            low = max(begin, j * receiver.micro_batch)
            high = min(end, (j + 1) * receiver.micro_batch)
            size = (high - low) * bytes_per_sample
            width = max(source.tp, target.tp)
            if sliced:
                size /= width
            count, largest = flows.get((source.node, target.node), (0, 0.0))
            flows[source.node, target.node] = (count + width, max(largest, size))
    return flows


def reduce_s(
    places: tuple[StagePlace, ...],
    rank: int,
    inputs: PlanInputs,
    parameters: float,
) -> float:
    """Returns the seconds of one pipeline rank's gradient reduction between its replicas.

    A ring over the replicas; every tensor-parallel rank has its own. Rings of all pipeline ranks
    that leave a node share its way out. Within a node a measured all-reduce is taken instead.

    Args:
        places: where all pipeline ranks lie.
        rank: the one asked for.
        inputs: what is trained where, and how long it takes.
        parameters: that one GPU of the rank holds.
    """
    size = max(parameters, 0.0) * inputs.model.precision.reduce_bytes
    ranks = len(places[rank].replicas)
    measured = measured_all_reduce(places[rank], inputs)
    if measured is not None:
        link, pairs = measured
        return link.seconds(size, pairs)
    segments = ring_segments(places, rank, inputs)
    return max((all_reduce_s(link, size, ranks, pairs) for link, pairs in segments), default=0.0)


def measured_all_reduce(place: StagePlace, inputs: PlanInputs) -> tuple[LinkSpeed, int] | None:
    """Returns the measured all-reduce between replicas on one node, and the number at a time."""
    replicas = place.replicas
    if len(replicas) < 2 or any(one.node != replicas[0].node for one in replicas):
        return None
    found = inputs.profile.all_reduce.get(
        (inputs.cluster.nodes[replicas[0].node].name, len(replicas))
    )
    return None if found is None else (found, max(one.tp for one in replicas))


def ring_segments(
    places: tuple[StagePlace, ...], rank: int, inputs: PlanInputs
) -> set[tuple[LinkSpeed, int]]:
    """Returns the links of a ring over a pipeline rank's replicas, and the rings on each."""
    crossing: dict[int, int] = {}
    for place in places:
        for one, other in _ring(place.replicas):
            if one.node != other.node:
                crossing[one.node] = crossing.get(one.node, 0) + max(one.tp, other.tp)
    segments = set()
    for one, other in _ring(places[rank].replicas):
        pairs = max(one.tp, other.tp) if one.node == other.node else crossing[one.node]
        segments.add((link_between(inputs, one.node, other.node), pairs))
    return segments


def exposed_reduce_s(whole_s: Any, backward_s: Any, layers: Any) -> Any:
    """Returns the part of a gradient reduction that no backward hides; numbers or arrays.

    Overlapped, it starts in the last microbatch's backward, layer by layer; what was not sent by
    its end remains, and at least the last layer's share.

    Args:
        whole_s: seconds of the reduction on its own.
        backward_s: of one microbatch's backward.
        layers: of the pipeline rank, at least 1.
    """
    return np.maximum(whole_s - backward_s, whole_s / layers)


def _ring(replicas: tuple[Replica, ...]) -> list[tuple[Replica, Replica]]:
    if len(replicas) < 2:
        return []
    return list(zip(replicas, (*replicas[1:], replicas[0]), strict=True))


def embedding_s(places: tuple[StagePlace, ...], inputs: PlanInputs, tp: int) -> float:
    """Returns the seconds in which first and last stage add up the gradients of tied embeddings."""
    if len(places) < 2 or not inputs.model.tied_parameters:
        return 0.0
    # They are added up as they were accumulated, whatever replicas exchange.
    size = inputs.model.tied_parameters / tp * inputs.model.precision.gradient_bytes
    pairs = list(zip(places[0].replicas, places[-1].replicas, strict=False))
    leaving = Counter(one.node for one, other in pairs if one.node != other.node)
    segments = {
        (
            inputs.cluster.link(one.node, other.node),
            (leaving[one.node] if one.node != other.node else 1) * max(one.tp, other.tp),
        )
        for one, other in pairs
    }
    return max(all_reduce_s(link, size, 2, sharing) for link, sharing in segments)
