"""Computes seconds and bytes of layers on one type of node, and of messages and collectives.

Seconds come from a profile, or are estimated from what vendors publish of a GPU: matrix products
run at a share of the arithmetic peak, everything else moves its operands through memory at a share
of the bandwidth, and nothing takes less than the launches of its kernels. An estimate knows no
kernel library and no driver; its source says that it is one.

Weights, gradients and optimizer state follow from the parameters of the layers; activations from
how many microbatches the schedule holds at its worst moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, Gpu, LinkSpeed, NodeType, find_gpu, link_in
from megatron.adaptive.planner.model_description import LayerKind, Model
from megatron.adaptive.planner.plan import Replica, StageMemory, StagePlace, StageSettings
from megatron.adaptive.planner.profile import LayerTimes, PlanInputs
from megatron.adaptive.schedule import catalog
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.validate import peak_units

CHANNELS_BYTES = 4 * 0.1e9
"""Memory that NCCL takes for a rank's channels: a communicator to and from each of two neighbours
in the pipeline, about 100 MB each. Ranks at its ends and those of two stages take half of it."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Behaviour of the program that runs a plan, where the plan does not say.

    The planner predicts for this project's own trainer. Comparisons with runs of other programs
    give another runtime.

    Attributes:
        context_bytes: memory that no tensor accounts for: the context of the device, buffers and
            code of its libraries, and NCCL's channels.
        parameter_copies_bytes: for each parameter that a rank holds, bytes of copies that are made
            while gradients are reduced and while the optimizer runs.
        sliced_messages: whether tensor-parallel ranks send a part of a stage's output each, and
            gather it after it arrived.
        pipeline: times the pipeline of a plan in place of the planner, given the plan and its
            ``cost.StageSums``; returns ``timing.ScheduleTimes``, or None to leave it to
            the planner.
    """

    context_bytes: float = 0.5e9 + CHANNELS_BYTES
    parameter_copies_bytes: float = 0.0
    sliced_messages: bool = False
    pipeline: Callable[[Any, Any], Any] | None = None


OURS = Runtime()
"""This project's trainer."""
PLAIN = StageSettings()
_HOST_MESSAGES = 8
"""Room for them in the host's memory that nothing fills: free slots of the channels of a rank and
its neighbour, see ``transport.select.size_of_channel``."""
_HOST_BLOCK_BYTES = 2**25
"""From this size on, the C library takes a block from the system and gives it back."""
_HOST_FREE_BYTES = 2 * _HOST_BLOCK_BYTES
"""It leaves so much free at the end of its heap."""


@lru_cache(maxsize=4096)
def in_flight(schedule: str, pp: int, chunks: int, num_microbatches: int) -> tuple[float, ...]:
    """Returns the microbatches that each pipeline rank holds at the schedule's worst moment.

    Counted in whole ranks: a chunk's microbatch is ``1 / chunks``.
    """
    if schedule == "1f1b":
        return tuple(float(min(pp - rank, num_microbatches)) for rank in range(pp))
    placement = catalog.placement_for(schedule, pp, chunks)
    if catalog.is_rule(schedule):
        cap = default_cap(placement, num_microbatches)
        return (min(cap, float(num_microbatches)),) * pp
    return peak_units(catalog.make_schedule(schedule, placement, num_microbatches))


@lru_cache(maxsize=4096)
def waiting(schedule: str, pp: int, chunks: int, num_microbatches: int) -> tuple[float, ...]:
    """Returns the microbatches of each pipeline rank whose weight gradients wait, at most.

    Counted as in :func:`in_flight`; a rule may let all wait that it holds.
    """
    if catalog.is_rule(schedule):
        return in_flight(schedule, pp, chunks, num_microbatches)
    if not catalog.splits_backward(schedule):
        return (0.0,) * pp
    placement = catalog.placement_for(schedule, pp, chunks)
    most = []
    for order in catalog.make_schedule(schedule, placement, num_microbatches).orders:
        steps = [{ActionKind.B: 1, ActionKind.W: -1}.get(action.kind, 0) for action in order]
        most.append(max(accumulate(steps)) / placement.num_chunks)
    return tuple(most)


def stage_memory(
    model: Model,
    *,
    parameters: Any,
    expert_parameters: Any = 0.0,
    kept_bytes: Any = 0.0,
    held: float = 0.0,
    workspace_bytes: Any = 0.0,
    dp: int = 1,
    settings: StageSettings = PLAIN,
    limit_bytes: float = 0.0,
    runtime: Runtime = OURS,
    context_bytes: float | None = None,
) -> StageMemory:
    """Adds up the memory of a stage, or of many: numbers or arrays.

    Args:
        model: for the bytes of numbers.
        parameters: that one GPU of the rank holds.
        expert_parameters: those of them that belong to experts.
        kept_bytes: of one microbatch over all layers of the rank.
        held: microbatches in flight, see ``in_flight``.
        workspace_bytes: the largest that a layer needs while it runs.
        dp: replicas.
        settings: say what of it they divide.
        limit_bytes: usable memory of the GPU.
        runtime: what the training program needs besides.
        context_bytes: of the process as measured; None for the runtime's.
    """
    context = runtime.context_bytes if context_bytes is None else context_bytes
    besides = context + parameters * runtime.parameter_copies_bytes
    sizes = model.precision
    return StageMemory(
        # In fp8 each weight is there as it is and transposed.
        parameter_bytes=parameters * (sizes.parameter_bytes + 2 * sizes.fp8),
        gradient_bytes=parameters * sizes.gradient_bytes,
        optimizer_bytes=settings.state_parameters(parameters, expert_parameters, dp)
        * sizes.optimizer_bytes,
        activation_bytes=kept_bytes * held,
        workspace_bytes=workspace_bytes + besides,
        limit_bytes=limit_bytes,
    )


@dataclass(frozen=True, eq=False)
class LayerTable:
    """Every layer of the model as one GPU of one replica has it; arrays ``[layers] float64``.

    Attributes:
        estimated: whether a duration was estimated.
        forward_s: of one microbatch, tensor-parallel communication included.
        backward_s: gradient by the inputs, recompute included.
        weight_s: gradient by the weights; 0 where the profile has both in one.
        launch_s: part of ``forward_s``, and as much of ``backward_s``, that needs no input.
        tp_s: communication within ``forward_s`` and ``backward_s``, of tensor-parallel ranks where
            the profile does not have it in its durations, and tokens on their way to experts.
        parameters: that the GPU holds.
        expert_parameters: those of them that belong to experts.
        kept_bytes: of one microbatch from forward to backward.
        workspace_bytes: of one microbatch while the layer runs.
        waiting_bytes: of one microbatch between gradients by inputs and by weights, beyond
            ``kept_bytes``.
    """

    estimated: bool
    forward_s: Any
    backward_s: Any
    weight_s: Any
    launch_s: Any
    tp_s: Any
    parameters: Any
    expert_parameters: Any
    kept_bytes: Any
    workspace_bytes: Any
    waiting_bytes: Any


def layer_table(
    inputs: PlanInputs,
    node: NodeType,
    *,
    tp: int,
    micro_batch: int,
    settings: StageSettings = PLAIN,
    others: Sequence[NodeType] = (),
) -> LayerTable:
    """Returns durations and bytes of every layer on one type of node, computed once.

    Args:
        inputs: what is trained where, and how long it takes.
        node: that the layers are on.
        tp: tensor-parallel ranks.
        micro_batch: samples of a microbatch.
        settings: of the plan.
        others: types of the nodes that ranks which share experts or sequences are on, of which the
            farthest counts.

    Raises:
        ConfigError: the profile lacks a duration.
    """
    recompute, sequence_parallel = settings.recompute, settings.sequence_parallel
    expert_ranks, context_ranks = settings.expert_ranks, settings.context_ranks
    key: Any = (node.name, tp, micro_batch, recompute, sequence_parallel)
    if expert_ranks * context_ranks > 1:
        key = (*key, expert_ranks, context_ranks, *(other.name for other in others or (node,)))
    if key in inputs.layer_tables:
        found: LayerTable = inputs.layer_tables[key]
        return found
    exchange = exchange_of(inputs, node, others or (node,), tp, expert_ranks)
    ring = context_ring(inputs, node, others or (node,), tp, context_ranks)
    # Of a part of each sequence a rank computes as for a part of the samples.
    samples, is_estimated = micro_batch / context_ranks, False
    rows = {}
    for name in dict.fromkeys(inputs.model.layers):
        kind = inputs.model.kinds.get(f"{name}/{expert_ranks}", inputs.model.kinds[name])
        # Of experts that are not spread over ranks, all ranks have as much to do.
        load = kind.forward_flops / (inputs.model.kinds[name].forward_flops or 1)
        # Seconds that tokens are on their way to experts and back in a forward, and those in which
        # each of the ranks that share a sequence sends its keys and values to the next.
        once = 2 * exchange(kind.routed_bytes * samples / tp)
        part_s = ring(kind.context_bytes * samples / tp)
        times = inputs.profile.times(kind.name, node.gpu, tp, samples, load or 1.0)
        times = times.slowed(node.slowness)
        if tp > 1 and not times.tp_included and kind.tp_bytes:
            once += all_reduce_s(link_within(inputs, node, tp), kind.tp_bytes * samples, tp)
        attention = times.forward_s * kind.attention_flops / (kind.forward_flops or 1)
        is_ring = not kind.attention_bytes and not inputs.model.has_own_kernels
        # Transformer Engine sends a part while it computes the one before; a backward sends and
        # computes twice as much. Other attention gathers all parts before it computes, and its
        # backward sends back as many gradients.
        turns = context_ranks - 1
        passed = turns * (max(part_s - attention / context_ranks, 0.0) if is_ring else part_s)
        passed_back = passed * (2 if is_ring else 1)
        forward = times.forward_s + once + passed
        backward = times.backward_input_s + once + passed_back
        comm = 2 * once + passed + passed_back
        if recompute == "full" and kind.counted:
            backward += forward
            comm += once + passed
        elif recompute == "selective":
            backward += attention + passed
            comm += passed
        shared = tp if sequence_parallel else 1
        whole = times.kept_bytes
        if whole is None or not inputs.model.has_experts:
            # Models with experts were measured with sequence parallelism.
            whole = kind.kept_bytes(tp) * samples if whole is None else whole
            whole -= kind.replicated_activation_bytes * samples * (1 - 1 / shared)
        # Gathered parts are kept in the same cases as scores: selective recomputation drops both.
        whole += 0.0 if is_ring else kind.context_bytes / tp * samples * turns
        kept = kind.kept_bytes(tp, recompute, sequence_parallel=sequence_parallel) * samples
        if recompute == "none" or not kind.counted:
            kept = whole
        # While a backward repeats a layer, all that the layer keeps is there, once.
        working = kind.workspace_bytes / tp * samples + max(whole - kept, 0.0)
        share = inputs.profile.allocator_share.get(node.gpu)
        messages = 0 if share is None else _HOST_MESSAGES
        # With sequence parallelism, sequences are gathered before every product.
        whole_outputs = messages / shared + (shared > 1 and kind.forward_flops > 0)
        output = kind.output_elements * inputs.model.precision.element_bytes * samples
        working += whole_outputs * output
        waiting = kind.weight_bytes / tp + kind.replicated_activation_bytes / shared
        if share:
            # Large blocks go back to the system once they are free; small ones lie between others.
            block = kind.attention_bytes / tp * samples
            large = block >= _HOST_BLOCK_BYTES
            kept = whole if recompute == "selective" and not large else kept
            kept += share * (kept - block * (large and recompute == "none"))
            working *= 1.0 if large else 1 + share
            working += min(working, _HOST_FREE_BYTES)
        is_estimated |= times.source == "estimated"
        rows[name] = (
            forward,
            backward,
            times.backward_weight_s,
            min(times.launch_s, times.forward_s, times.backward_input_s),
            comm,
            kind.held_parameters(tp),
            kind.expert_parameters / tp,
            max(kept, 0.0),
            working,
            waiting * samples if recompute == "full" and kind.counted else 0.0,
        )
    table = np.array([rows[name] for name in inputs.model.layers], dtype=np.float64).T
    made = inputs.layer_tables[key] = LayerTable(is_estimated, *table)
    return made


def range_sums(values: Any) -> Any:
    """Returns ``[begin, end]`` sums of a row, ``[n + 1, n + 1]``."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[None, :] - total[:, None]


def range_largest(values: Any) -> Any:
    """Returns ``[begin, end]`` the largest of a row, ``[n + 1, n + 1]``; 0 for none."""
    count = len(values)
    found = np.zeros((count + 1, count + 1))
    for begin in range(count if np.any(values) else 0):
        found[begin, begin + 1 :] = np.maximum.accumulate(values[begin:])
    return found


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


def exchange_of(
    inputs: PlanInputs, node: NodeType, others: Sequence[NodeType], tp: int, ranks: int
) -> Callable[[float], float]:
    """Returns the seconds in which each rank sends every other its part, by bytes of all parts.

    Ranks within a node exchange at the same time as those of different nodes, which share each
    node's way out.

    Args:
        inputs: for the links.
        node: type of a node of the ranks.
        others: types of the nodes that all of them are on.
        tp: GPUs of each rank, side by side.
        ranks: how many.
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
    """Returns the seconds in which each of a sequence's ranks sends bytes to the next.

    Args:
        inputs: for the links.
        node: type of a node of the ranks.
        others: types of the nodes that all of them are on, of which the farthest counts.
        tp: GPUs of each rank, side by side.
        ranks: that share a sequence; those of one node do not leave it.
    """
    links = [(link_within(inputs, node, min(ranks * tp, node.gpus)), tp)]
    if any((one.gpus // tp) % ranks for one in (node, *others)):
        nodes = -(-ranks * tp // node.gpus)
        links += [(link, tp) for link in links_out(inputs, node, others, nodes)]

    def seconds(part_bytes: float) -> float:
        if ranks < 2 or part_bytes <= 0:
            return 0.0
        return max(link.seconds(part_bytes, pairs) for link, pairs in links)

    return seconds


def link_within(inputs: PlanInputs, node: NodeType, gpus: int) -> LinkSpeed:
    """Returns the link of so many neighbouring GPUs of nodes of a type: of their least island."""
    if (found := node.island(gpus)) is not None:
        return found[1]
    if gpus <= node.gpus:
        return inputs.profile.intra_links.get(node.link_name, node.intra)
    return link_of_types(inputs, node, node)


def links_out(
    inputs: PlanInputs, node: NodeType, others: Sequence[NodeType], nodes: int
) -> list[LinkSpeed]:
    """Returns the links from a node to those of a group: types of its nodes, and how many."""
    if {other.name for other in others} == {node.name}:
        return [link_within(inputs, node, nodes * node.gpus)]
    return [link_of_types(inputs, node, other) for other in others]


def link_of_types(inputs: PlanInputs, one: NodeType, other: NodeType) -> LinkSpeed:
    """Returns the link between nodes of two types as measured, or as the cluster file has it."""
    measured = link_in(inputs.profile.links, one, other)
    return inputs.cluster.link_of_types(one, other) if measured is None else measured


def link_between(inputs: PlanInputs, one: Replica, other: Replica) -> LinkSpeed:
    """Returns the link between two replicas: that of the least island which holds both."""
    return _link_at(inputs, one.node, other.node, _common_island(inputs.cluster, one, other))


def _common_island(cluster: Cluster, one: Replica, other: Replica) -> int | None:
    """Returns which of their type's islands is the least that holds both, if one does.

    Replicas of one node are in one of its parts, those of two nodes below the same switch.
    """
    kind = cluster.nodes[one.node]
    if not kind.islands or kind != cluster.nodes[other.node]:
        return None
    begin = cluster.first[kind.name]
    here, there = ((at.node - begin) * kind.gpus + at.gpu for at in (one, other))
    for index, (size, _) in enumerate(kind.islands):
        inner = size < kind.gpus
        if inner == (one.node == other.node) and here // size == there // size:
            return index
    return None


def _link_at(inputs: PlanInputs, one: int, other: int, island: int | None) -> LinkSpeed:
    node = inputs.cluster.nodes[one]
    if island is not None:
        return node.islands[island][1]
    if one == other:
        return inputs.profile.intra_links.get(node.link_name, node.intra)
    return link_of_types(inputs, node, inputs.cluster.nodes[other])


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
    flows = _flows(sender, receiver, inputs.cluster, bytes_per_sample, sliced)
    leaving = Counter[tuple[int, bool]]()
    for (one, other, _), (count, _) in flows.items():
        leaving[one, one == other] += count
    worst = (0.0, 0.0)
    for (one, other, island), (_, size) in flows.items():
        if size <= 0:
            continue
        link = _link_at(inputs, one, other, island)
        busy = size / link.bandwidth(size, leaving[one, one == other])
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
    """Counts messages, with bytes of the largest, by sending and receiving node and their island.

    Samples of a wave of microbatches are numbered over the replicas of a stage; where the stages
    have different numbers of replicas, a replica sends each receiver the samples they share.
    """
    flows: dict[tuple[int, int, int | None], tuple[int, float]] = {}
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
            key = source.node, target.node, _common_island(cluster, source, target)
            count, largest = flows.get(key, (0, 0.0))
            flows[key] = (count + width, max(largest, size))
    return flows


def reduce_s(
    places: tuple[StagePlace, ...],
    rank: int,
    inputs: PlanInputs,
    parameters: float,
    expert_parameters: float = 0.0,
    expert_ranks: int = 1,
) -> float:
    """Returns the seconds of one pipeline rank's gradient reduction between its replicas.

    Args:
        places: where all pipeline ranks lie.
        rank: the one asked for.
        inputs: what is trained where, and how long it takes.
        parameters: that one GPU of the rank holds.
        expert_parameters: those of experts that are spread over ranks.
        expert_ranks: over how many.
    """
    each = inputs.model.precision.reduce_bytes
    alike = expert_parameters if expert_ranks > 1 else 0.0
    whole = reduction(places, rank, inputs)(max(parameters - alike, 0.0) * each)
    if alike:
        whole += reduction(places, rank, inputs, expert_ranks)(alike * each)
    return whole


def reduction(
    places: tuple[StagePlace, ...], rank: int, inputs: PlanInputs, stride: int = 1
) -> Callable[[float], float]:
    """Returns the seconds of one pipeline rank's gradient reduction by bytes on each GPU.

    A ring over the replicas; every tensor-parallel rank has its own. Rings of all pipeline ranks
    that leave a node share its way out. Within a node a measured all-reduce is taken instead.

    Args:
        places: where all pipeline ranks lie.
        rank: the one asked for.
        inputs: what is trained where, and how long it takes.
        stride: replicas that hold different experts, side by side: each has its own ring.
    """
    replicas = places[rank].replicas[::stride]
    if len(replicas) < 2:
        return lambda size: 0.0
    if all(one.node == replicas[0].node for one in replicas):
        node = inputs.cluster.nodes[replicas[0].node]
        measured = inputs.profile.all_reduce.get((node.link_name, len(replicas)))
        if measured is not None:
            at_once = stride * max(one.tp for one in replicas)
            return lambda size: measured.seconds(size, at_once)
    crossing = Counter[int]()
    for place in places:
        for first in range(stride):
            for one, other in _ring(place.replicas[first::stride]):
                if one.node != other.node:
                    crossing[one.node] += max(one.tp, other.tp)
    segments = set()
    here = Counter(one.node for one in places[rank].replicas)
    alike = len({inputs.cluster.nodes[node].name for node in here}) == 1
    for one, other in _ring(replicas):
        node = inputs.cluster.nodes[one.node]
        same = one.node == other.node
        pairs = max(one.tp, other.tp) if same else crossing[one.node]
        span = here[one.node] * one.tp if same else len(here) * node.gpus
        link = link_between(inputs, one, other)
        if same or alike:
            link = link_within(inputs, node, span)
        segments.add((link, pairs))
    return lambda size: max(
        all_reduce_s(link, size, len(replicas), pairs) for link, pairs in segments
    )


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
            link_between(inputs, one, other),
            (leaving[one.node] if one.node != other.node else 1) * max(one.tp, other.tp),
        )
        for one, other in pairs
    }
    return max(all_reduce_s(link, size, 2, sharing) for link, sharing in segments)


MATRIX_SHARE = 0.7
"""Of the arithmetic peak that large matrix products of a layer reach together.

Source: Narayanan et al. 2021 (arXiv:2104.04473), table 1, and Korthikanti et al. 2022
(arXiv:2205.05198), table 5, report 44-57% of the peak for whole training steps on A100, in which
matrix products take about three quarters of the time.
"""
MEMORY_SHARE = 0.8
"""Of the memory bandwidth that element-wise kernels reach. Source: BabelStream's figures for V100,
A100 and H100 are between 0.8 and 0.93 of the data sheets'."""
LAUNCH_S = 5e-6
"""Of one kernel. Source: NVIDIA's CUDA programming guides name some microseconds."""
_KERNELS = 20
"""Of a transformer layer's forward without fusion: 4 products, 2 of the attention, 2 norms, and
bias, activation, softmax, dropout, addition."""
_FEW_KERNELS = 4
_OPTIMIZER_MOVES = 7
"""Numbers of four bytes that Adam moves for each parameter: it reads gradient, master weight and
two moments, and writes master weight and moments."""


def make_estimator(model: Model) -> Callable[[str, str, int, float], LayerTimes]:
    """Returns a function that estimates layers of a model that a profile does not hold.

    Returns:
        A function of layer kind, GPU, tensor-parallel ranks and samples of a microbatch, which
        raises ``ConfigError`` for an unknown GPU or kind, and for a GPU that does not compute in
        the model's precision. Communication between tensor-parallel ranks is not part of it.
    """

    @cache
    def estimate(kind: str, gpu: str, tp: int, micro_batch: float) -> LayerTimes:
        if kind not in model.kinds:
            raise ConfigError(f"model {model.name} has no layers of kind {kind!r}")
        return _estimate(model, model.kinds[kind], find_gpu(gpu, "cluster"), tp, micro_batch)

    return estimate


def _estimate(model: Model, kind: LayerKind, gpu: Gpu, tp: int, micro_batch: float) -> LayerTimes:
    sizes = model.precision
    pace = gpu.peak(sizes.name) * MATRIX_SHARE
    moving = gpu.memory_bytes_per_s * MEMORY_SHARE
    linear_s = micro_batch * (kind.forward_flops - kind.attention_flops) / tp / pace
    if sizes.fp8 and kind.counted:
        linear_s *= gpu.peak(sizes.name) / gpu.peak("fp8")
    attention_s = micro_batch * kind.attention_flops / tp / pace
    # What is kept was written once and read once at least, as is the output.
    kept = micro_batch * kind.kept_bytes(tp)
    output = micro_batch * kind.output_elements * sizes.element_bytes
    elements_s = 2 * (kept + output) / moving
    weights = kind.held_parameters(tp)
    # A lookup reads few rows; matrix products read all weights, however few samples there are.
    read_s = weights * sizes.parameter_bytes / moving if kind.forward_flops else 0.0
    gradient_s = (
        weights * (sizes.parameter_bytes * sizes.trained + 2 * sizes.gradient_bytes) / moving
    )
    launches_s = LAUNCH_S * (_KERNELS if kind.attention_flops else _FEW_KERNELS)
    input_s = max(linear_s, read_s) + 2 * attention_s + 1.5 * elements_s
    return LayerTimes(
        forward_s=max(launches_s, max(linear_s, read_s) + attention_s + elements_s),
        backward_input_s=max(launches_s, input_s) if kind.forward_flops else launches_s,
        backward_weight_s=max(LAUNCH_S * _FEW_KERNELS, linear_s * sizes.trained + gradient_s),
        source="estimated",
    )


def estimate_optimizer_s(model: Model, gpu: Gpu) -> float:
    """Estimates the optimizer's seconds for each parameter that a rank updates.

    Args:
        model: for its precision.
        gpu: what it runs on.
    """
    moved = (4 * _OPTIMIZER_MOVES + model.precision.parameter_bytes) * model.precision.trained
    return moved / (gpu.memory_bytes_per_s * MEMORY_SHARE)
