"""Computes the times of messages, all-reduces, all-to-all exchanges and rings.

A link has a latency and a bandwidth (``cluster.LinkSpeed``). Sending a message takes latency +
bytes / bandwidth. If several GPUs of a node send over its network link at the same time, they share
the bandwidth. In this example, 4 GPUs of a node each send 100 MB to a different node, over one
network link with a bandwidth of 12.5 GB/s and a latency of 10 us::

    bandwidth of each    12.5 / 4 = 3.125 GB/s
    seconds              10 us + 100 MB / 3.125 GB/s = 32 ms

Neighbouring GPUs may have a faster link within a node, within a part of a node, or on a switch.
Such groups of GPUs are called *islands*. A group of ranks communicates over the smallest island
that contains all its GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodeType, link_in
from megatron.adaptive.planner.model_description import Model
from megatron.adaptive.planner.plan import Replica, StagePlace
from megatron.adaptive.planner.profile import PlanInputs


def all_reduce_s(link: LinkSpeed, message_bytes: float, ranks: int, pairs: int = 1) -> float:
    """Returns the time in seconds of a ring all-reduce of a tensor with ``message_bytes`` bytes.

    On a ring of n ranks, each rank sends ``2 (n - 1)`` messages one after the other. Each message
    contains 1/n of the tensor.

    Args:
        link: Slowest link on the ring.
        message_bytes: Size of the tensor in bytes.
        ranks: Number of ranks on the ring.
        pairs: Number of rings that share the link at the same time.
    """
    if ranks < 2 or message_bytes <= 0:
        return 0.0
    return 2 * (ranks - 1) * link.seconds(message_bytes / ranks, pairs)


def exchange_of(
    inputs: PlanInputs, node: NodeType, others: Sequence[NodeType], tp: int, ranks: int
) -> Callable[[float], float]:
    """Returns a function that computes the time of an all-to-all exchange between ranks.

    Messages within a node overlap with messages between nodes. The GPUs of a node share its network
    link.

    Args:
        inputs: Model, cluster and profile. The links come from the cluster and the profile.
        node: Type of one node whose ranks participate.
        others: Types of all nodes whose ranks participate.
        tp: Number of neighbouring GPUs that form one rank (tensor-parallel size).
        ranks: Number of ranks in the exchange.

    Returns:
        Function that takes the number of bytes that each rank distributes (including the part that
        it keeps), and returns the time in seconds.
    """
    near = min(ranks, max(node.gpus // tp, 1))
    far = ranks - near
    inside = link_within(inputs, node, near * tp)
    outside = links_out(inputs, node, others, -(-ranks // near)) if far else []

    def seconds(whole_bytes: float) -> float:
        if ranks < 2 or whole_bytes <= 0:
            return 0.0
        part = whole_bytes / ranks
        ways = [(inside, near - 1, near * tp), *((link, far, node.gpus) for link in outside)]
        return max(
            link.latency_s + count * part / link.bandwidth(part, pairs) if count else 0.0
            for link, count, pairs in ways
        )

    return seconds


def context_ring(
    inputs: PlanInputs, node: NodeType, others: Sequence[NodeType], tp: int, ranks: int
) -> Callable[[float], float]:
    """Returns a function that computes the time to send data to the next rank on a ring.

    Args:
        inputs: Model, cluster and profile. The links come from the cluster and the profile.
        node: Type of one node whose ranks participate.
        others: Types of all nodes whose ranks participate. The slowest link between these nodes is
            used.
        tp: Number of neighbouring GPUs that form one rank (tensor-parallel size).
        ranks: Number of ranks that share a sequence. If a node has room for all of these ranks, the
            ring stays within the node.

    Returns:
        Function that takes the number of bytes that each rank sends, and returns the time in
        seconds.
    """
    links = [(link_within(inputs, node, min(ranks * tp, node.gpus)), tp)]
    if any((kind.gpus // tp) % ranks for kind in (node, *others)):
        nodes = -(-ranks * tp // node.gpus)
        links += [(link, tp) for link in links_out(inputs, node, others, nodes)]

    def seconds(part_bytes: float) -> float:
        if ranks < 2 or part_bytes <= 0:
            return 0.0
        return max(link.seconds(part_bytes, pairs) for link, pairs in links)

    return seconds


def link_within(inputs: PlanInputs, node: NodeType, gpus: int) -> LinkSpeed:
    """Returns the link between ``gpus`` neighbouring GPUs of a node type.

    If these GPUs are in an island, the link of the smallest such island is returned.
    """
    if (island := node.island(gpus)) is not None:
        return island[1]
    if gpus <= node.gpus:
        return inputs.profile.intra_links.get(node.link_name, node.intra)
    return link_of_types(inputs, node, node)


def links_out(
    inputs: PlanInputs, node: NodeType, others: Sequence[NodeType], nodes: int
) -> list[LinkSpeed]:
    """Returns the links that ``node`` uses to send to the other nodes of a group.

    Args:
        inputs: Model, cluster and profile. The links come from the cluster and the profile.
        node: Type of the node.
        others: Node types of the group.
        nodes: Number of nodes in the group.
    """
    if {other.name for other in others} == {node.name}:
        return [link_within(inputs, node, nodes * node.gpus)]
    return [link_of_types(inputs, node, other) for other in others]


def link_of_types(inputs: PlanInputs, node: NodeType, other: NodeType) -> LinkSpeed:
    """Returns the measured link between two node types, or the link in the cluster file."""
    measured = link_in(inputs.profile.links, node, other)
    return inputs.cluster.link_of_types(node, other) if measured is None else measured


def link_between(inputs: PlanInputs, replica: Replica, other: Replica) -> LinkSpeed:
    """Returns the link between two replicas, which is the link of their smallest common island."""
    return _link_at(
        inputs, replica.node, other.node, _common_island(inputs.cluster, replica, other)
    )


def _common_island(cluster: Cluster, replica: Replica, other: Replica) -> int | None:
    """Returns the index of the smallest island that contains both replicas.

    An island is a part of a node, or several nodes on the same switch. The result is ``None`` if
    the replicas share no island.
    """
    kind = cluster.nodes[replica.node]
    if not kind.islands or kind != cluster.nodes[other.node]:
        return None
    begin = cluster.first[kind.name]
    ends = (replica, other)
    gpu, other_gpu = ((end.node - begin) * kind.gpus + end.gpu for end in ends)
    for index, (size, _) in enumerate(kind.islands):
        is_inner = size < kind.gpus
        if is_inner == (replica.node == other.node) and gpu // size == other_gpu // size:
            return index
    return None


def _link_at(inputs: PlanInputs, sender: int, receiver: int, island: int | None) -> LinkSpeed:
    node = inputs.cluster.nodes[sender]
    if island is not None:
        return node.islands[island][1]
    if sender == receiver:
        return inputs.profile.intra_links.get(node.link_name, node.intra)
    return link_of_types(inputs, node, inputs.cluster.nodes[receiver])


def boundary_s(
    sender: StagePlace,
    receiver: StagePlace,
    inputs: PlanInputs,
    bytes_per_sample: float,
    *,
    sliced: bool = False,
) -> tuple[float, float]:
    """Returns the time to send one message from every replica of a stage to the next stage.

    All replicas send at about the same time. Replicas on the same node share the node's network
    link.

    Args:
        sender: GPUs of the pipeline rank that holds the sending stage.
        receiver: GPUs of the pipeline rank that holds the receiving stage.
        inputs: Model, cluster and profile of layer times.
        bytes_per_sample: Size in bytes per sample of the tensor that is sent between the stages.
        sliced: Whether each tensor-parallel rank sends only its part of the tensor, as with
            sequence parallelism. Otherwise, each rank sends the whole tensor.

    Returns:
        Latency for the slowest replica, and the time during which this replica's link is busy, both
        in seconds.
    """
    flows = _flows(sender, receiver, inputs.cluster, bytes_per_sample, sliced)
    leaving = Counter[tuple[int, bool]]()
    for (source, target, _), (count, _) in flows.items():
        leaving[source, source == target] += count
    worst = (0.0, 0.0)
    for (source, target, island), (_, size) in flows.items():
        if size <= 0:
            continue
        link = _link_at(inputs, source, target, island)
        busy = size / link.bandwidth(size, leaving[source, source == target])
        if link.latency_s + busy > sum(worst):
            worst = (link.latency_s, busy)
    return worst


def _flows(
    sender: StagePlace,
    receiver: StagePlace,
    cluster: Cluster,
    bytes_per_sample: float,
    sliced: bool,
) -> dict[tuple[int, int, int | None], tuple[int, float]]:
    """Returns the number of messages between two stages, and the largest message size in bytes.

    The result contains both values for each group of messages. Messages are grouped by sending
    node, receiving node, and the index of the island (group of directly linked GPUs) that contains
    both replicas, if any.
    """
    flows: dict[tuple[int, int, int | None], tuple[int, float]] = {}
    for source, target, samples in shares(sender, receiver):
        size = samples * bytes_per_sample
        width = max(source.tp, target.tp)
        if sliced:
            size /= width
        key = source.node, target.node, _common_island(cluster, source, target)
        count, largest = flows.get(key, (0, 0.0))
        flows[key] = (count + width, max(largest, size))
    return flows


def shares(sender: StagePlace, receiver: StagePlace) -> Iterator[tuple[Replica, Replica, int]]:
    """Yields each pair of replicas that exchange samples, and the number of samples they exchange.

    Each stage numbers its samples consecutively over its replicas, with one microbatch per replica.
    If the stages have different numbers of replicas, each receiver gets its samples from the
    replicas that computed them::

        3 senders, 2 samples each      | 0 1 | 2 3 | 4 5 |
        2 receivers, 3 samples each    | 0 1 2 | 3 4 5   |    the second sender sends one to each
    """
    for i, source in enumerate(sender.replicas):
        begin, end = i * sender.micro_batch, (i + 1) * sender.micro_batch
        first = begin // receiver.micro_batch
        last = (end - 1) // receiver.micro_batch
        for j in range(first, last + 1):
            low = max(begin, j * receiver.micro_batch)
            high = min(end, (j + 1) * receiver.micro_batch)
            yield source, receiver.replicas[j], high - low


def reduce_s(
    places: tuple[StagePlace, ...],
    rank: int,
    inputs: PlanInputs,
    parameters: float,
    expert_parameters: float = 0.0,
    expert_ranks: int = 1,
) -> float:
    """Returns the time in seconds that a pipeline rank's replicas need to reduce their gradients.

    Args:
        places: GPUs of all pipeline ranks.
        rank: Index of the pipeline rank.
        inputs: Model, cluster and profile of layer times.
        parameters: Number of parameters on one GPU of the rank, including experts.
        expert_parameters: Number of parameters on the GPU that belong to experts.
        expert_ranks: Number of replicas over which the experts are distributed.
    """
    each = inputs.model.precision.reduce_bytes
    spread = expert_parameters if expert_ranks > 1 else 0.0
    whole = reduction(places, rank, inputs)(max(parameters - spread, 0.0) * each)
    if spread:
        whole += reduction(places, rank, inputs, expert_ranks)(spread * each)
    return whole


def reduction(
    places: tuple[StagePlace, ...], rank: int, inputs: PlanInputs, stride: int = 1
) -> Callable[[float], float]:
    """Returns a function that computes the time of a pipeline rank's gradient reduction.

    The replicas form one ring per tensor-parallel rank. All rings that leave a node share its
    network link. If all replicas are on one node and the profile contains an all-reduce measured on
    this node type, the measured time is used instead.

    Args:
        places: GPUs of all pipeline ranks.
        rank: Index of the pipeline rank.
        inputs: Model, cluster and profile of layer times.
        stride: Number of consecutive replicas that hold different experts. A ring contains every
            ``stride``-th replica.

    Returns:
        Function that takes the size in bytes of the gradients on each GPU, and returns the time in
        seconds.
    """
    replicas = places[rank].replicas[::stride]
    if len(replicas) < 2:
        return lambda size: 0.0
    if all(replica.node == replicas[0].node for replica in replicas):
        node = inputs.cluster.nodes[replicas[0].node]
        measured = inputs.profile.all_reduce.get((node.link_name, len(replicas)))
        if measured is not None:
            at_once = stride * max(replica.tp for replica in replicas)
            return lambda size: measured.seconds(size, at_once)
    crossing = Counter[int]()
    for stage_place in places:
        for first in range(stride):
            for sender, receiver in ring(stage_place.replicas[first::stride]):
                if sender.node != receiver.node:
                    crossing[sender.node] += max(sender.tp, receiver.tp)
    segments = set()
    replicas_on = Counter(replica.node for replica in places[rank].replicas)
    is_one_type = len({inputs.cluster.nodes[node].name for node in replicas_on}) == 1
    for sender, receiver in ring(replicas):
        node = inputs.cluster.nodes[sender.node]
        is_one_node = sender.node == receiver.node
        pairs = max(sender.tp, receiver.tp) if is_one_node else crossing[sender.node]
        gpus = replicas_on[sender.node] * sender.tp if is_one_node else len(replicas_on) * node.gpus
        link = link_between(inputs, sender, receiver)
        if is_one_node or is_one_type:
            link = link_within(inputs, node, gpus)
        segments.add((link, pairs))
    return lambda size: max(
        all_reduce_s(link, size, len(replicas), pairs) for link, pairs in segments
    )


def exposed_reduce_s(whole_s: Any, backward_s: Any, layers: Any) -> Any:
    """Returns the part of a gradient reduction that does not overlap with the backward pass.

    The reduction of a layer starts after the last microbatch's backward pass through this layer.
    Reductions that are still running when the whole backward pass ends take additional time. The
    reduction of at least one layer does not overlap. The arguments are numbers, or arrays of the
    same shape. The result is in seconds.

    Args:
        whole_s: Duration of the whole reduction without overlap, in seconds.
        backward_s: Duration of one microbatch's backward pass, in seconds.
        layers: Number of layers of the pipeline rank. It must be at least 1.
    """
    return np.maximum(whole_s - backward_s, whole_s / layers)


def ring(replicas: tuple[Replica, ...]) -> list[tuple[Replica, Replica]]:
    """Returns pairs of each replica and its successor on a ring of ``replicas``."""
    return list(zip(replicas, (*replicas[1:], replicas[0]), strict=True))


def embedding_s(places: tuple[StagePlace, ...], inputs: PlanInputs, tp: int) -> float:
    """Returns the time in seconds to add up the gradients of embeddings that two stages share.

    The first and the last stage each compute a part of these gradients. ``tp`` is the
    tensor-parallel size.
    """
    if len(places) < 2 or not inputs.model.tied_parameters:
        return 0.0
    size = tied_bytes(inputs.model, tp)
    pairs = list(zip(places[0].replicas, places[-1].replicas, strict=False))
    leaving = Counter(first.node for first, last in pairs if first.node != last.node)
    segments = {
        (
            link_between(inputs, first, last),
            (leaving[first.node] if first.node != last.node else 1) * max(first.tp, last.tp),
        )
        for first, last in pairs
    }
    names = {inputs.cluster.nodes[first.node].link_name for first, _ in pairs}
    measured = [inputs.profile.all_reduce.get((name, 2)) for name in names]
    if not leaving and None not in measured:
        # Use the time that was measured for an all-reduce. The bandwidth of messages between stages
        # would not predict it well, because an all-reduce uses a different transport.
        sharing = max(sharing for _, sharing in segments)
        return max(curve.seconds(size, sharing) for curve in measured if curve is not None)
    return max(all_reduce_s(link, size, 2, sharing) for link, sharing in segments)


def tied_bytes(model: Model, tp: int) -> float:
    """Returns the size in bytes of the gradients of tied embeddings on one rank.

    Stages exchange these gradients in the precision in which gradients are accumulated, even if
    replicas reduce gradients in a different precision.
    """
    return model.tied_parameters / tp * model.precision.gradient_bytes
