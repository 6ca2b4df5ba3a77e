"""Measures links between ranks and all-reduces within nodes, as a run would use them.

Messages go over the transport that a run chooses for the pair. Each link is measured with one pair
of ranks, and with as many at the same time as the nodes have processes, for a network card is
shared and a switch between GPUs is not.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.engine.job import Job
from megatron.adaptive.profiling.running_pipeline import measure_link
from megatron.adaptive.transport.connect import (
    Payloads,
    connect_ranks,
    network_address,
    own_endpoint,
)
from megatron.adaptive.transport.groups import ProcessGroups
from megatron.adaptive.transport.interface import Transport

__all__ = [
    "SIZES",
    "LinkSample",
    "ReduceSample",
    "as_curve",
    "link_rows",
    "measure_links",
    "measure_reductions",
    "pairings",
    "reduce_rows",
    "sizes_up_to",
]

SIZES = (1 << 10, 1 << 16, 1 << 19, 1 << 22, 1 << 25)
"""Bytes of messages. The smallest stands for the latency."""
_LONG_S = 0.2  # a message that takes longer is the last: larger ones tell nothing new
_LIMIT_S = 60.0
_IN_FLIGHT = 8
_SLOT_BYTES = 4 << 20
_REPEATS = 6
_NO_STEP = -1

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LinkSample:
    """One kind of link.

    Attributes:
        nodes: names of the node types at its ends.
        within: both ends are on one node.
        pairs: pairs of ranks that sent at the same time.
        points: message bytes and seconds from the start of a message to its arrival, ascending.
    """

    nodes: tuple[str, str]
    within: bool
    pairs: int
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class ReduceSample:
    """All-reduces within nodes of one type.

    Attributes:
        node: name of the node type.
        ranks: of the group.
        points: bytes and seconds, ascending.
    """

    node: str
    ranks: int
    points: tuple[tuple[int, float], ...]


def pairings(machines: Sequence[str], names: Sequence[str]) -> list[tuple[bool, Pair, list[Pair]]]:
    """Choose which pairs of ranks to measure, one after the other.

    Args:
        machines: of each rank.
        names: node type of each rank.

    Returns:
        Whether a link is within a node, the ranks whose node types it stands for, and the pairs
        that send at the same time.
    """
    members: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        members.setdefault(machine, []).append(rank)
    found: list[tuple[bool, Pair, list[Pair]]] = []
    seen: set[tuple[str, str]] = set()
    for ranks in members.values():
        name = names[ranks[0]]
        if len(ranks) < 2 or (name, name) in seen:
            continue
        seen.add((name, name))
        together = list(zip(ranks[::2], ranks[1::2], strict=False))
        found += [(True, together[0], pairs) for pairs in _one_and_all(together)]
    nodes = list(members.values())
    seen.clear()
    for index, one in enumerate(nodes):
        for other in nodes[index + 1 :]:
            kinds = tuple(sorted((names[one[0]], names[other[0]])))
            if (kinds[0], kinds[1]) in seen:
                continue
            seen.add((kinds[0], kinds[1]))
            together = list(zip(one, other, strict=False))
            found += [(False, together[0], pairs) for pairs in _one_and_all(together)]
    return found


def _one_and_all(pairs: list[Pair]) -> list[list[Pair]]:
    return [pairs[:1]] if len(pairs) == 1 else [pairs[:1], pairs]


def measure_links(
    job: Job, names: Sequence[str], *, most_bytes: float = math.inf
) -> list[LinkSample]:
    """Measure every kind of link once. Collective over all ranks.

    Args:
        job: this process within the job.
        names: node type of each rank.
        most_bytes: size of the largest message that matters.
    """
    machines = [str(place["machine"]) for place in job.places]
    samples = []
    for within, ends, pairs in pairings(machines, names):
        peer = next((sum(pair) - job.rank for pair in pairs if job.rank in pair), None)
        leads = any(job.rank == pair[0] for pair in pairs)
        transport = _connect(job, [] if peer is None else [peer])
        mine = _measure(job, transport, peer, leads, sizes_up_to(most_bytes))
        told = [points for points in job.gather(mine if leads else None) if points]
        if transport is not None:
            transport.close()
        samples.append(
            LinkSample(
                nodes=(names[ends[0]], names[ends[1]]),
                within=within,
                pairs=len(pairs),
                points=_mean(told),
            )
        )
    return samples


def sizes_up_to(most_bytes: float) -> tuple[int, ...]:
    """Return the sizes to measure where messages have at most so many bytes; two at least."""
    needed = sum(size < most_bytes for size in SIZES) + 1
    return SIZES[: max(2, needed)]


def _measure(
    job: Job, transport: Transport | None, peer: int | None, leads: bool, sizes: Sequence[int]
) -> list[tuple[int, float]]:
    points: list[tuple[int, float]] = []
    for size in sizes:
        dist.barrier(group=job.control_group)
        seconds = 0.0
        if transport is not None and peer is not None:
            payload = torch.zeros(size, dtype=torch.uint8, device=job.accelerator.device)
            link = measure_link(
                transport, peer, leads=leads, payload=payload, step=_NO_STEP, timeout_s=_LIMIT_S
            )
            seconds = link.latency_s + link.occupancy_s
            points.append((size, seconds))
        if max(job.gather(seconds)) > _LONG_S:
            break
    return points


def _mean(told: Sequence[list[tuple[int, float]]]) -> tuple[tuple[int, float], ...]:
    columns = zip(*told, strict=True)
    return tuple((column[0][0], statistics.fmean(s for _, s in column)) for column in columns)


def _connect(job: Job, peers: list[int]) -> Transport | None:
    """Connect this rank with its peer, as a run would. Collective over all ranks."""
    payloads = Payloads(shape=None, dtype=torch.uint8, in_flight=_IN_FLIGHT)
    options = TransportConfig(transport_slot_bytes=_SLOT_BYTES)
    accelerator, rank = job.accelerator, job.rank

    def describe(other: int) -> str:
        return f"rank {other} on {job.places[other]['host']}"

    return connect_ranks(
        own=own_endpoint(
            rank,
            job.places[rank],
            device=accelerator.device,
            own_gpu=accelerator.backend == "nccl",
            options=options,
            address=network_address(
                job.environment.socket_interface,
                job.environment.master_addr,
                alone=len({place["machine"] for place in job.places}) == 1,
            ),
        ),
        peers=peers,
        gather=job.gather,
        groups=ProcessGroups(
            members=list(range(dist.get_world_size())),
            gather=job.gather,
            accelerator=accelerator,
            payloads=payloads,
            describe=describe,
            timeout_s=_LIMIT_S,
        ),
        options=options,
        payloads=payloads,
        device=accelerator.device,
        describe=describe,
        timeout_s=_LIMIT_S,
    )


def measure_reductions(
    job: Job, names: Sequence[str], widths: Sequence[int], *, most_bytes: float = math.inf
) -> list[ReduceSample]:
    """Measure all-reduces of neighbouring ranks within nodes. Collective over all ranks.

    Args:
        job: this process within the job.
        names: node type of each rank.
        widths: numbers of ranks, each dividing the ranks of every node.
        most_bytes: size of the largest tensor that matters.
    """
    samples = []
    for width in widths:
        group = None
        for first in range(0, dist.get_world_size(), width):
            ranks = list(range(first, first + width))
            made = dist.new_group(ranks)
            if job.rank in ranks:
                group = made
        told = job.gather(_reduce(job, group, sizes_up_to(most_bytes)))
        dist.destroy_process_group(group)
        by_node: dict[str, list[list[tuple[int, float]]]] = {}
        for rank, points in enumerate(told):
            by_node.setdefault(names[rank], []).append(points)
        samples += [
            ReduceSample(node=node, ranks=width, points=_mean(points))
            for node, points in by_node.items()
        ]
    return samples


def _reduce(job: Job, group: Any, sizes: Sequence[int]) -> list[tuple[int, float]]:
    points = []
    accelerator = job.accelerator
    for size in sizes:
        payload = torch.zeros(size // 4, device=accelerator.device)
        times = []
        for _ in range(_REPEATS):
            dist.barrier(group=job.control_group)
            accelerator.synchronize()
            begin_s = time.perf_counter()
            dist.all_reduce(payload, group=group)
            accelerator.synchronize()
            times.append(time.perf_counter() - begin_s)
        points.append((size, statistics.median(times[1:])))
        if max(job.gather(points[-1][1])) > _LONG_S:
            break
    return points


def as_curve(points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Turn sizes and seconds into latency and bandwidths, as a profile file holds them.

    The smallest message is taken for the latency; what larger ones take beyond it is their size
    over a bandwidth.
    """
    (_, latency_s), *others = points
    curve = [
        [size, size / (seconds - latency_s)] for size, seconds in others if seconds > latency_s
    ]
    if not curve:
        curve = [[size, size / max(seconds, 1e-9)] for size, seconds in points[-1:]]
    told: Mapping[str, Any] = {"latency_s": latency_s, "sizes": curve}
    return dict(told)


def link_rows(samples: Sequence[LinkSample]) -> list[dict[str, Any]]:
    """Return links as a profile file holds them."""
    return [
        {
            "nodes": list(one.nodes),
            "within": one.within,
            "pairs": one.pairs,
            **as_curve(one.points),
        }
        for one in samples
    ]


def reduce_rows(samples: Sequence[ReduceSample]) -> list[dict[str, Any]]:
    """Return all-reduces as a profile file holds them."""
    return [{"node": one.node, "ranks": one.ranks, **as_curve(one.points)} for one in samples]
