"""Measures links between ranks and all-reduces within nodes, as a training run uses them.

``auto``, profiles and ``transport --check`` all measure with :func:`measure_link`. This function
sends bursts of messages, one directly after another. It separates the latency of a message from its
occupancy: the time that each further message adds to a burst::

    round with a burst of 1      leader ──> follower ──> leader      2 (latency + occupancy)
    round with a burst of n      leader ══> follower ──> leader      plus (n - 1) occupancy

For a profile, messages use the transport that a run would choose for the pair. Each kind of link is
measured twice: with one pair of ranks, and with the maximum number of pairs at the same time. This
shows whether pairs share the bandwidth, as on a network card, or not, as on a switch between GPUs.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.errors import DeadlineError
from megatron.adaptive.profiling.action_timing import now
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.workload import Link
from megatron.adaptive.transport.connect import Connector
from megatron.adaptive.transport.interface import Arrival, Endpoint, Label, Transport
from megatron.adaptive.transport.kind import Payloads

SIZES = (1 << 10, 1 << 16, 1 << 19, 1 << 22, 1 << 25)
"""Message sizes to measure, in bytes. The time of the smallest message is the latency."""

NO_STEP = -1
"""Step index in the labels of messages outside of training steps."""

_BURST = 4
_GO = 0
"""Chunk index in the label of a message after which another round follows."""

_STOP = 1
"""Chunk index in the labels of the leader's messages in the last round."""

_LONG_S = 0.2
"""Time limit of a message in seconds.

If a message takes longer, larger messages are not measured, because this message already shows the
link's bandwidth.
"""

_LIMIT_S = 60.0
_SLOT_BYTES = 4 << 20
"""Minimum size in bytes of a channel's slots. Each slot is a buffer for one message.

A channel for larger messages has slots of the size of these messages.
"""
_REPEATS = 6

Pair = tuple[int, int]
Points = list[tuple[int, float]]
"""Measured messages as tuples (size in bytes, time in seconds), in ascending order of sizes."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Number and duration of the repetitions in the measurement of a link.

    In a short round, the leader sends one message and gets a reply. In a long round, it sends a
    burst of messages and gets one reply. The first round of each kind is warm-up. The leader's
    values of ``least`` and ``seconds`` apply to both ranks.

    Attributes:
        burst: Number of messages in a long round, at least 2.
        least: Minimum number of rounds of each kind, including warm-up. At least 2.
        seconds: Minimum total duration of the rounds of each kind, in seconds.
    """

    burst: int = _BURST
    least: int = 8
    seconds: float = 0.0


def measure_link(
    transport: Transport,
    peer: int,
    *,
    leads: bool,
    payload: torch.Tensor,
    timeout_s: float,
    rounds: Rounds | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Link:
    """Measures latency and occupancy of the link between two ranks that are otherwise idle.

    The occupancy is the time that each further message adds to a burst of messages.

    Args:
        transport: Message channels of this rank. No messages may be in flight.
        peer: Global rank of the peer, which must call this function at the same time.
        leads: Whether this rank sends first and decides when to stop. Must be true on exactly one
            of the two ranks.
        payload: Tensor to send, with the size and dtype of the messages in a training step.
        timeout_s: Maximum time in seconds to wait for a message.
        rounds: Number and length of the repetitions. ``burst`` must be equal on both ranks.
        clock: Function that returns the time in seconds.

    Raises:
        DeadlineError: The peer did not respond in time.
        TransportError: The peer has exited.
    """
    rounds = rounds or Rounds()
    medians = []
    for count in (1, rounds.burst):
        taken_s: list[float] = []
        first_s = clock()
        is_last = False
        while not is_last:
            begin_s = clock()
            if leads:
                is_enough = begin_s - first_s >= rounds.seconds
                is_last = len(taken_s) + 1 >= rounds.least and is_enough
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
    round_trip_s, burst_s = medians
    occupancy_s = max(0.0, (burst_s - round_trip_s) / (rounds.burst - 1))
    occupancy_s = min(occupancy_s, round_trip_s / 2)
    return Link(latency_s=round_trip_s / 2 - occupancy_s, occupancy_s=occupancy_s)


def _send(transport: Transport, peer: int, payload: torch.Tensor, count: int, chunk: int) -> None:
    for index in range(count):
        transport.send(peer, Label(NO_STEP, Action(ActionKind.F, chunk, index)), payload)


def receive(transport: Transport, peer: int, timeout_s: float) -> Arrival:
    """Waits for the next message from ``peer`` during a measurement, and returns it.

    Raises:
        DeadlineError: No message arrived within ``timeout_s``.
    """
    arrival = transport.completions.wait(time.monotonic() + timeout_s)
    if arrival is None:
        raise DeadlineError(
            f"rank {peer} did not respond within {timeout_s:g} s while links were measured"
        )
    assert isinstance(arrival, Arrival), "members of a group report only during steps"
    return arrival


def make_connector(
    job: Job, *, in_flight: int = 2 * _BURST, timeout_s: float = _LIMIT_S
) -> Connector:
    """Creates an object that connects ranks for measurements as in a training run.

    Args:
        job: Environment of this process: ranks, device, process groups.
        in_flight: Maximum number of messages in flight in one direction.
        timeout_s: Maximum time in seconds to wait for a connection or a message.
    """

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
    """Chooses the pairs of ranks that send at the same time in each link measurement.

    Links between the same types of nodes are measured only once.

    Args:
        machines: ID of each rank's machine.
        names: Type of each rank's node.

    Returns:
        A tuple for each measurement: whether the link is within a node, one pair of ranks as an
        example of the link, and the pairs that send at the same time.
    """
    members: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        members.setdefault(machine, []).append(rank)
    nodes = list(members.values())
    measurements: list[tuple[bool, Pair, list[Pair]]] = []
    seen: set[tuple[bool, str, str]] = set()
    for node, other in [*zip(nodes, nodes, strict=True), *itertools.combinations(nodes, 2)]:
        within = node is other
        first, second = sorted((names[node[0]], names[other[0]]))
        ends = (node[::2], node[1::2]) if within else (node, other)
        together = list(zip(*ends, strict=False))
        if not together or (within, first, second) in seen:
            continue
        seen.add((within, first, second))
        one_and_all = [together[:1], together] if len(together) > 1 else [together]
        measurements += [(within, together[0], pairs) for pairs in one_and_all]
    return measurements


def measure_links(
    job: Job, names: Sequence[str], *, most_bytes: float = math.inf
) -> list[dict[str, Any]]:
    """Measures every kind of link: within each type of node, and between types of nodes.

    All ranks must call this function together.

    Args:
        job: Environment of this process: ranks, device, process groups.
        names: Type of each rank's node.
        most_bytes: Size in bytes of the largest message in a training run.

    Returns:
        Entries of ``links`` for a profile file.
    """
    connector = make_connector(job)
    rows = []
    machines = [str(process["machine"]) for process in job.places]
    endpoint = connector.own_end(job.places, TransportConfig(), job.environment.master_addr)
    for within, ends, pairs in pairings(machines, names):
        peer = next((sum(pair) - job.rank for pair in pairs if job.rank in pair), None)
        leads = any(job.rank == pair[0] for pair in pairs)
        curve = _curve(job, connector, endpoint, peer, leads, sizes_up_to(most_bytes))
        measured = [points for points in job.gather(curve if leads else None) if points]
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
    """Returns the message sizes to measure if messages have at most ``most_bytes`` bytes."""
    needed = sum(size < most_bytes for size in SIZES) + 1
    return SIZES[: max(2, needed)]


def _curve(
    job: Job,
    connector: Connector,
    endpoint: Endpoint,
    peer: int | None,
    leads: bool,
    sizes: Sequence[int],
) -> Points:
    """Measures messages of all ``sizes`` between this rank and ``peer``. All ranks must call this.

    Messages of at most 4 MiB share a channel. A larger message gets a separate channel whose slots
    have the size of this message, as in a training run. Otherwise, a GPU message that does not fit
    in a slot would be copied through the host, although the training run sends it directly.
    """
    points: Points = []
    small = [size for size in sizes if size <= _SLOT_BYTES]
    for group in (small, *([size] for size in sizes[len(small) :])):
        options = TransportConfig(transport_slot_bytes=max(_SLOT_BYTES, *group))
        transport = connector.connect(endpoint, [] if peer is None else [peer], options)
        is_slow = _measure(job, transport, peer, leads, group, points)
        if transport is not None:
            transport.close()
        if is_slow:
            break
    return points


def _measure(
    job: Job,
    transport: Transport | None,
    peer: int | None,
    leads: bool,
    sizes: Sequence[int],
    points: Points,
) -> bool:
    """Measures messages of all ``sizes`` over ``transport``, and adds them to ``points``.

    All ranks must call this. Returns whether a message was so slow that larger messages are not
    measured. The result is equal on all ranks.
    """
    for size in sizes:
        dist.barrier(group=job.control_group)
        seconds = 0.0
        if transport is not None and peer is not None:
            payload = torch.zeros(size, dtype=torch.uint8, device=job.accelerator.device)
            link = measure_link(transport, peer, leads=leads, payload=payload, timeout_s=_LIMIT_S)
            seconds = link.latency_s + link.occupancy_s
            points.append((size, seconds))
        if max(job.gather(seconds)) > _LONG_S:
            return True
    return False


def _mean(measured: Sequence[Points]) -> Points:
    columns = zip(*measured, strict=True)
    return [(column[0][0], statistics.fmean(s for _, s in column)) for column in columns]


def measure_reductions(
    job: Job, names: Sequence[str], widths: Sequence[int], *, most_bytes: float = math.inf
) -> list[dict[str, Any]]:
    """Measures all-reduces among consecutive ranks of a node.

    All ranks must call this function together.

    Args:
        job: Environment of this process: ranks, device, process groups.
        names: Type of each rank's node.
        widths: Numbers of ranks for which an all-reduce is measured. Each of them must divide the
            number of ranks on every node.
        most_bytes: Size in bytes of the largest tensor that a training run reduces.

    Returns:
        Entries of ``all_reduce`` for a profile file.
    """
    rows = []
    for width in widths:
        group = None
        for first in range(0, dist.get_world_size(), width):
            ranks = list(range(first, first + width))
            new_group = dist.new_group(ranks)
            if job.rank in ranks:
                group = new_group
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
    """Converts measured message times to the latency and bandwidths of a profile file.

    The time of the smallest message is used as the latency. The bandwidth of a larger message is
    its size divided by the difference between its time and the latency.

    Args:
        points: (Size in bytes, time in seconds) of each message, in ascending order of sizes.

    Returns:
        Latency in seconds, and a list of (size in bytes, bandwidth in bytes per second).
    """
    (_, latency_s), *others = points
    curve = [
        [size, size / (seconds - latency_s)] for size, seconds in others if seconds > latency_s
    ]
    if not curve:
        curve = [[size, size / max(seconds, 1e-9)] for size, seconds in points[-1:]]
    return {"latency_s": latency_s, "sizes": curve}
