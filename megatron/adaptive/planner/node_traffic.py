r"""Computes how long the messages of a step keep the network link of a node busy.

The simulation of a pipeline assumes a separate link for every pair of stages. However, all messages
that leave a node share the node's network link. In this example, 64 samples of 32 MiB cross the
boundaries of a pipeline with two chunks per rank and a V-shaped placement. Rank 1 is alone on a
node with a link of 1.25 GB/s, and sends each sample four times::

    rank 0    0 \               7
    rank 1       1 \         6 /       forward 1->2 and 6->7, backward 1->0 and 6->5
    rank 2          2     5 /
    rank 3            3-4

    4 * 64 * 32 MiB / 1.25 GB/s = 6.87 s

No schedule can make the step shorter than this time. Messages of tensor-, context- and
expert-parallel groups and of tied embeddings are not counted, so the result remains a lower bound.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron.adaptive.planner.cluster import LinkSpeed, link_in
from megatron.adaptive.planner.link_costs import link_between, ring, shares
from megatron.adaptive.planner.plan import Plan, Replica, StagePlace
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.schedule import catalog
from megatron.adaptive.schedule.stage_placement import frozen_stages_of


class BusyLink(NamedTuple):
    """The network link that the messages of a step keep busy for the longest time.

    Attributes:
        node: Index of the node that the link belongs to, or ``None`` if no message leaves a node.
        seconds: Time in seconds that the messages keep the link busy, which is a lower bound of the
            step time.
    """

    node: int | None
    seconds: float


IDLE_LINK = BusyLink(None, 0.0)
"""Result for plans whose messages stay within nodes."""


class _Transfer(NamedTuple):
    """Messages of a step from one replica to another.

    Attributes:
        source: Replica that sends.
        target: Replica that receives.
        whole_bytes: Total size of all messages in bytes.
        message_bytes: Size of each message in bytes.
    """

    source: Replica
    target: Replica
    whole_bytes: float
    message_bytes: float


def busiest_link(
    plan: Plan, inputs: PlanInputs, parameters: Sequence[tuple[float, float]], *, sliced: bool
) -> BusyLink:
    """Returns the network link that a step of ``plan`` keeps busy for the longest time.

    Args:
        plan: Plan whose messages between stages and gradient reductions are counted.
        inputs: Model, cluster and profile. The links come from the cluster and the profile.
        parameters: Number of trained parameters on one GPU of each pipeline rank, and how many of
            them belong to experts, ``[ranks]``.
        sliced: Whether each tensor-parallel rank sends only its part of a message between stages.
    """
    if len(plan.nodes) < 2:
        return IDLE_LINK
    leaving: dict[int, list[tuple[LinkSpeed, _Transfer]]] = defaultdict(list)
    entering: dict[int, list[tuple[LinkSpeed, _Transfer]]] = defaultdict(list)
    between: dict[tuple[int, int], list[tuple[LinkSpeed, _Transfer]]] = defaultdict(list)
    for transfer in (*_messages(plan, inputs, sliced), *_reductions(plan, inputs, parameters)):
        source, target = transfer.source.node, transfer.target.node
        if source == target or transfer.whole_bytes <= 0:
            continue
        link = link_between(inputs, transfer.source, transfer.target)
        if link.shared:
            leaving[source].append((link, transfer))
            entering[target].append((link, transfer))
            between[source, target].append((link, transfer))
    busy = [BusyLink(source, _seconds(sent)) for (source, _), sent in between.items()]
    for node, sent in (*leaving.items(), *entering.items()):
        # A link between two nodes may be slow because of the other node, so also consider the speed
        # of the node's own link.
        busy.append(BusyLink(node, _seconds(sent, _own_links(inputs, node))))
    return max(busy, key=lambda link: link.seconds, default=IDLE_LINK)


def message_sizes(plan: Plan, inputs: PlanInputs) -> list[tuple[float, float]]:
    """Returns the sizes of the messages between each stage and the next one.

    If sequences are cut into slices, a message contains one slice.

    Returns:
        Size in bytes per sample of each forward message and of each backward message,
        ``[stages - 1]``.
    """
    frozen = frozen_stages_of(plan.partition, inputs.model.frozen_layers)
    sizes = []
    end = 0
    for stage, layers in enumerate(plan.partition[:-1]):
        end += layers
        size = inputs.model.layer(max(end - 1, 0)).output_elements
        size *= inputs.model.precision.element_bytes / plan.context_ranks
        size *= plan.share_of(inputs.model.sequence)
        # No gradients are sent to a frozen stage.
        sizes.append((size, 0.0 if stage < frozen else size))
    return sizes


def _messages(plan: Plan, inputs: PlanInputs, sliced: bool) -> Iterator[_Transfer]:
    """Yields all messages that stages send to each other in a step."""
    placement = catalog.placement_for(plan.schedule, plan.pp, plan.chunks)
    # Convert the tokens of a step to a number of whole sequences, because packed documents may be
    # shorter than a sequence.
    tokens = inputs.step_tokens(plan.global_batch) / inputs.model.tokens_per_sample
    slices = 1 / plan.share_of(inputs.model.sequence)
    for stage, (forward, backward) in enumerate(message_sizes(plan, inputs)):
        ranks = placement.locate(stage)[0], placement.locate(stage + 1)[0]
        if ranks[0] == ranks[1]:
            continue
        ends = plan.places[ranks[0]], plan.places[ranks[1]]
        for (first, second), size in ((ends, forward), (ends[::-1], backward)):
            parts = list(_parts(plan, first, second))
            # Each context-parallel rank has a part of the same samples.
            step = tokens * slices * plan.context_ranks / sum(samples for *_, samples in parts)
            for source, target, samples in parts:
                width = max(source.tp, target.tp)
                message_bytes = samples * size / (width if sliced else 1)
                yield _Transfer(source, target, message_bytes * width * step, message_bytes)


def _parts(
    plan: Plan, sender: StagePlace, receiver: StagePlace
) -> Iterator[tuple[Replica, Replica, int]]:
    """Yields the sender, receiver and number of samples of each message between two stages."""
    samples = len(sender.replicas) * sender.micro_batch
    if samples == len(receiver.replicas) * receiver.micro_batch:
        yield from shares(sender, receiver)
        return
    # The trainer gives microbatch m to replica m modulo the number of replicas.
    for m in range(math.lcm(len(sender.replicas), len(receiver.replicas))):
        source = sender.replicas[m % len(sender.replicas)]
        yield source, receiver.replicas[m % len(receiver.replicas)], plan.micro_batch


def _reductions(
    plan: Plan, inputs: PlanInputs, parameters: Sequence[tuple[float, float]]
) -> Iterator[_Transfer]:
    """Yields the messages of the gradient reductions, in which replicas form rings."""
    each_bytes = inputs.model.precision.reduce_bytes
    for stage_place, (whole, experts) in zip(plan.places, parameters, strict=True):
        spread = experts if plan.expert_ranks > 1 else 0.0
        rings = [(stage_place.replicas, max(whole - spread, 0.0))]
        stride = plan.expert_ranks
        rings += [(stage_place.replicas[i::stride], spread) for i in range(stride) if spread]
        for replicas, count in rings:
            part_bytes = count * each_bytes / len(replicas)
            for source, target in ring(replicas):
                width = max(source.tp, target.tp)
                sent = 2 * (len(replicas) - 1) * part_bytes * width
                yield _Transfer(source, target, sent, part_bytes)


def _own_links(inputs: PlanInputs, node: int) -> tuple[LinkSpeed, ...]:
    """Returns a tuple with the network link of a node, or an empty tuple if it is unknown."""
    kind = inputs.cluster.nodes[node]
    link = link_in(inputs.profile.links, kind, kind) or kind.network or inputs.cluster.network
    return () if link is None else (link,)


def _seconds(
    sent: Iterable[tuple[LinkSpeed, _Transfer]], more_links: tuple[LinkSpeed, ...] = ()
) -> float:
    """Returns the time in seconds to send all messages at the speed of the fastest link.

    Args:
        sent: Messages, each with the link that it uses.
        more_links: Links to consider in addition to the links in ``sent``.
    """
    sent = list(sent)
    links = {*more_links, *(link for link, _ in sent)}
    sizes: dict[float, float] = defaultdict(float)
    for _, transfer in sent:
        sizes[transfer.message_bytes] += transfer.whole_bytes
    return sum(
        whole_bytes / max(link.total_bandwidth(size) for link in links)
        for size, whole_bytes in sizes.items()
    )
