"""Classes of stages: on which nodes a stage may lie, with which widths.

Stages of a class are alike whatever nodes of those types they get. A class whose GPUs are part of
one node comes in blocks: as many stages of the class in a row as the node holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.plan import Replica, StagePlace

__all__ = ["StageClass", "place_on", "stage_classes"]

_MOST_MIXED = 8


@dataclass(frozen=True)
class StageClass:
    """One class of stages.

    Attributes:
        nodes: how many nodes of each type a block takes, in the order of the cluster's types.
        tp: tensor-parallel width.
        dp: replicas.
        micro_batch: samples of a microbatch of each replica.
        block: stages of a block.
    """

    nodes: tuple[int, ...]
    tp: int
    dp: int
    micro_batch: int
    block: int


def stage_classes(
    cluster: Cluster, *, tp: int, dp: int, micro_batch: int
) -> tuple[tuple[StageClass, ...], bool]:
    """All classes of one width.

    Nodes are used whole: a stage takes an equal part of one node, or several nodes.

    Returns:
        The classes, and whether these are all: of very many mixtures only those of one or two types
        are kept.
    """
    counts = [group.count for group in cluster.groups]
    gpus = [group.type.gpus for group in cluster.groups]
    usable = [group.type.gpus % tp == 0 for group in cluster.groups]
    size = tp * dp
    found = []
    for index, each in enumerate(gpus):
        if usable[index] and each % size == 0:
            nodes = tuple(int(i == index) for i in range(len(gpus)))
            found.append(StageClass(nodes, tp, dp, micro_batch, each // size))
    limits = [count if fits else 0 for count, fits in zip(counts, usable, strict=True)]
    whole = True
    mixed: list[StageClass] = []
    for nodes in _mixtures(size, gpus, limits):
        if sum(nodes) < 2:
            continue
        if len(mixed) >= 4 * _MOST_MIXED:
            whole = False
            break
        mixed.append(StageClass(nodes, tp, dp, micro_batch, 1))
    if len(mixed) > _MOST_MIXED:
        whole = False
        mixed.sort(key=lambda one: sum(count > 0 for count in one.nodes))
        mixed = mixed[:_MOST_MIXED]
    return (*found, *mixed), whole


def _mixtures(size: int, gpus: Sequence[int], limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of nodes of each type that have so many GPUs together, single types first."""
    if not gpus:
        if size == 0:
            yield ()
        return
    room = sum(limit * each for limit, each in zip(limits, gpus, strict=True))
    if room < size:
        return
    most = min(limits[0], size // gpus[0])
    for count in range(most, -1, -1):
        for rest in _mixtures(size - count * gpus[0], gpus[1:], limits[1:]):
            yield (count, *rest)


def place_on(
    cluster: Cluster, one: StageClass, nodes: Sequence[int], position: int = 0
) -> StagePlace:
    """A stage of a class on given nodes.

    Args:
        cluster: the nodes.
        one: the class.
        nodes: as many nodes of each type as the class takes, in the order of the ranks.
        position: which stage of the block.
    """
    slots = [(node, gpu) for node in nodes for gpu in range(cluster.nodes[node].gpus)]
    first = position * one.tp * one.dp
    replicas = tuple(
        Replica(node=slots[at][0], gpu=slots[at][1], tp=one.tp)
        for at in range(first, first + one.tp * one.dp, one.tp)
    )
    return StagePlace(replicas=replicas, micro_batch=one.micro_batch)
