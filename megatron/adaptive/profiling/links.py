"""Measures links between ranks and all-reduces within nodes, as a run would use them.

:func:`measure_link` is the one meter: ``auto``, profiles and ``transport --check`` call it.

::

    round with a burst of 1      leader ──> follower ──> leader      2 (latency + occupancy)
    round with a burst of n      leader ══> follower ──> leader      (n - 1) occupancy more

For a profile, messages go over the transport that a run chooses for the pair. Each link is measured
with one pair of ranks, and with as many at the same time as the nodes have processes, for a network
card is shared and a switch between GPUs is not.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.errors import DeadlineError
from megatron.adaptive.profiling.action_timing import now
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.workload import Link
from megatron.adaptive.transport.connect import Connector, Payloads
from megatron.adaptive.transport.interface import Arrival, Label, Transport

SIZES = (1 << 10, 1 << 16, 1 << 19, 1 << 22, 1 << 25)
"""Bytes of messages. The smallest stands for the latency."""
NO_STEP = -1
"""Step of messages that belong to none."""
_ROUNDS = 8
_BURST = 4
_GO, _STOP = 0, 1  # chunk of a label: whether another round follows
_LONG_S = 0.2  # a message that takes longer is the last: larger ones add nothing new
_LIMIT_S = 60.0
_SLOT_BYTES = 4 << 20
_REPEATS = 6

Pair = tuple[int, int]
Points = list[tuple[int, float]]
"""Bytes and seconds, ascending."""


def measure_link(
    transport: Transport,
    peer: int,
    *,
    leads: bool,
    payload: torch.Tensor,
    timeout_s: float,
    burst: int = _BURST,
    rounds: int = _ROUNDS,
    seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Link:
    """Sends messages to and fro between two ranks that do nothing else meanwhile.

    Args:
        transport: the channels; nothing may be under way on them.
        peer: global rank of the other one, which calls this too.
        leads: whether this rank sends first; exactly one of the two does.
        payload: a tensor as it travels in a step.
        timeout_s: limit of each wait.
        burst: messages of a long round, at least 2.
        rounds: short and long ones each, at least 2; the first does not count.
        seconds: more rounds of each are added for so long. Rounds and seconds of the leader count.
        clock: seconds.

    Raises:
        DeadlineError: the peer did not answer.
        TransportError: the peer is gone.
    """
    medians = []
    for count in (1, burst):
        taken_s: list[float] = []
        first_s = clock()
        is_last = False
        while not is_last:
            begin_s = clock()
            if leads:
                is_last = len(taken_s) + 1 >= rounds and begin_s - first_s >= seconds
                _send(transport, peer, payload, count, _STOP if is_last else _GO)
                receive(transport, peer, timeout_s).take()
            else:
                for _ in range(count):
                    arrival = receive(transport, peer, timeout_s)
                    arrival.take()
                is_last = arrival.label.action.chunk == _STOP
                _send(transport, peer, payload, 1, _GO)
            taken_s.append(clock() - begin_s)
        medians.append(statistics.median(taken_s[1:]))
    there_and_back_s, burst_s = medians
    occupancy_s = max(0.0, (burst_s - there_and_back_s) / (burst - 1))
    occupancy_s = min(occupancy_s, there_and_back_s / 2)
    return Link(latency_s=there_and_back_s / 2 - occupancy_s, occupancy_s=occupancy_s)


def _send(transport: Transport, peer: int, payload: torch.Tensor, count: int, chunk: int) -> None:
    for index in range(count):
        transport.send(peer, Label(NO_STEP, Action(ActionKind.F, chunk, index)), payload)


def receive(transport: Transport, peer: int, timeout_s: float) -> Arrival:
    """Waits for the next message of a measurement.

    Raises:
        DeadlineError: none came in time.
    """
    arrival = transport.completions.wait(time.monotonic() + timeout_s)
    if arrival is None:
        raise DeadlineError(
            f"rank {peer} did not answer within {timeout_s:g} s while links were measured"
        )
    assert isinstance(arrival, Arrival), "members of a group report only during steps"
    return arrival


def process_groups(
    job: Job, *, in_flight: int = 2 * _BURST, timeout_s: float = _LIMIT_S
) -> Connector:
    """Returns what connects ranks for a measurement, as a run would."""

    def describe(other: int) -> str:
        return f"rank {other} on {job.places[other]['host']}"

    return Connector(
        members=list(range(dist.get_world_size())),
        gather=job.gather,
        accelerator=job.accelerator,
        payloads=Payloads(shape=None, dtype=torch.uint8, in_flight=in_flight),
        describe=describe,
        timeout_s=timeout_s,
    )


def pairings(machines: Sequence[str], names: Sequence[str]) -> list[tuple[bool, Pair, list[Pair]]]:
    """Chooses which pairs of ranks to measure, one after the other.

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
    nodes = list(members.values())
    found: list[tuple[bool, Pair, list[Pair]]] = []
    seen: set[tuple[bool, str, str]] = set()
    for one, other in [*zip(nodes, nodes, strict=True), *itertools.combinations(nodes, 2)]:
        within = one is other
        first, second = sorted((names[one[0]], names[other[0]]))
        ends = (one[::2], one[1::2]) if within else (one, other)
        together = list(zip(*ends, strict=False))
        if not together or (within, first, second) in seen:
            continue
        seen.add((within, first, second))
        one_and_all = [together[:1], together] if len(together) > 1 else [together]
        found += [(within, together[0], pairs) for pairs in one_and_all]
    return found


def measure_links(
    job: Job, names: Sequence[str], *, most_bytes: float = math.inf
) -> list[dict[str, Any]]:
    """Measures every kind of link once. Collective over all ranks.

    Args:
        job: this process within the job.
        names: node type of each rank.
        most_bytes: size of the largest message that matters.

    Returns:
        Rows of ``links`` as a profile file holds them.
    """
    options = TransportConfig(transport_slot_bytes=_SLOT_BYTES)
    groups, rows = process_groups(job), []
    own = groups.own_end(job.places, options, job.environment.master_addr)
    for within, ends, pairs in pairings([str(place["machine"]) for place in job.places], names):
        peer = next((sum(pair) - job.rank for pair in pairs if job.rank in pair), None)
        leads = any(job.rank == pair[0] for pair in pairs)
        transport = groups.connect(own, [] if peer is None else [peer], options)
        mine = _measure(job, transport, peer, leads, sizes_up_to(most_bytes))
        measured = [points for points in job.gather(mine if leads else None) if points]
        if transport is not None:
            transport.close()
        rows.append(
            {
                "nodes": [names[end] for end in ends],
                "within": within,
                "pairs": len(pairs),
                **as_curve(_mean(measured)),
            }
        )
    return rows


def sizes_up_to(most_bytes: float) -> tuple[int, ...]:
    """Returns the sizes to measure where messages have at most so many bytes; two at least."""
    needed = sum(size < most_bytes for size in SIZES) + 1
    return SIZES[: max(2, needed)]


def _measure(
    job: Job, transport: Transport | None, peer: int | None, leads: bool, sizes: Sequence[int]
) -> Points:
    points: Points = []
    for size in sizes:
        dist.barrier(group=job.control_group)
        seconds = 0.0
        if transport is not None and peer is not None:
            payload = torch.zeros(size, dtype=torch.uint8, device=job.accelerator.device)
            link = measure_link(transport, peer, leads=leads, payload=payload, timeout_s=_LIMIT_S)
            seconds = link.latency_s + link.occupancy_s
            points.append((size, seconds))
        if max(job.gather(seconds)) > _LONG_S:
            break
    return points


def _mean(measured: Sequence[Points]) -> Points:
    columns = zip(*measured, strict=True)
    return [(column[0][0], statistics.fmean(s for _, s in column)) for column in columns]


def measure_reductions(
    job: Job, names: Sequence[str], widths: Sequence[int], *, most_bytes: float = math.inf
) -> list[dict[str, Any]]:
    """Measures all-reduces of neighbouring ranks within nodes. Collective over all ranks.

    Args:
        job: this process within the job.
        names: node type of each rank.
        widths: numbers of ranks, each dividing the ranks of every node.
        most_bytes: size of the largest tensor that matters.

    Returns:
        Rows of ``all_reduce`` as a profile file holds them.
    """
    rows = []
    for width in widths:
        group = None
        for first in range(0, dist.get_world_size(), width):
            ranks = list(range(first, first + width))
            made = dist.new_group(ranks)
            if job.rank in ranks:
                group = made
        measured = job.gather(_reduce(job, group, sizes_up_to(most_bytes)))
        dist.destroy_process_group(group)
        by_node: dict[str, list[Points]] = {}
        for rank, points in enumerate(measured):
            by_node.setdefault(names[rank], []).append(points)
        rows += [
            {"node": node, "ranks": width, **as_curve(_mean(points))}
            for node, points in by_node.items()
        ]
    return rows


def _reduce(job: Job, group: Any, sizes: Sequence[int]) -> Points:
    points: Points = []
    device = job.accelerator.device
    for size in sizes:
        payload = torch.zeros(size // 4, device=device)
        times = []
        for _ in range(_REPEATS):
            dist.barrier(group=job.control_group)
            begin_s = now(device)
            dist.all_reduce(payload, group=group)
            times.append(now(device) - begin_s)
        points.append((size, statistics.median(times[1:])))
        if max(job.gather(points[-1][1])) > _LONG_S:
            break
    return points


def as_curve(points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Turns sizes and seconds into latency and bandwidths, as a profile file holds them.

    The smallest message is taken for the latency; what larger ones take beyond it is their size
    over a bandwidth.
    """
    (_, latency_s), *others = points
    curve = [
        [size, size / (seconds - latency_s)] for size, seconds in others if seconds > latency_s
    ]
    if not curve:
        curve = [[size, size / max(seconds, 1e-9)] for size, seconds in points[-1:]]
    return {"latency_s": latency_s, "sizes": curve}
