"""Measures a running pipeline for ``auto``: times of its stages, their spread, its links.

Owns measuring and telling all ranks; what to make of it is ``schedule.auto``'s. Everything here
happens between two steps and is collective over the ranks named.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megatron.adaptive.errors import DeadlineError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.profile import Profile
from megatron.adaptive.schedule.workload import Link, StageTimes
from megatron.adaptive.transport.interface import Arrival, Label, Transport

__all__ = ["Sample", "measure_link", "profile_of", "spread_of"]

_ROUNDS = 8
_BURST = 4
_LEAST_NS = 1
F, B, W = ActionKind.F, ActionKind.B, ActionKind.W


@dataclass(kw_only=True)
class Sample:
    """What one rank saw in the measured steps.

    Attributes:
        pp_rank: its position in the pipeline.
        durations_ns: per (kind, chunk), the durations of all its microbatches; the pieces of one
            weight gradient count as one.
        most: activations that its memory allows, in whole-rank microbatches.
        links: to the neighbours that it measured, by their position in the pipeline.
    """

    pp_rank: int
    most: float = math.inf
    durations_ns: dict[tuple[ActionKind, int], list[int]] = field(default_factory=dict)
    links: dict[int, Link] = field(default_factory=dict)

    def add(self, actions: Iterable[tuple[Action, int]]) -> None:
        """Add the actions of a step with their durations in nanoseconds."""
        weights: dict[tuple[int, int], int] = defaultdict(int)
        for action, duration_ns in actions:
            if action.kind is W:
                weights[action.chunk, action.microbatch] += duration_ns
            else:
                lane = self.durations_ns.setdefault((action.kind, action.chunk), [])
                lane.append(duration_ns)
        for (chunk, _), duration_ns in weights.items():
            self.durations_ns.setdefault((W, chunk), []).append(duration_ns)


def profile_of(samples: Sequence[Sample], placement: Placement) -> Profile:
    """Put the ranks' samples together; replicas of a stage count alike.

    Args:
        samples: at least one of every rank of the pipeline.
        placement: where stages live.
    """
    times: dict[ActionKind, tuple[float, ...]] = {}
    for kind in (F, B, W):
        means = []
        for stage in range(placement.num_stages):
            pp_rank, chunk = placement.locate(stage)
            lanes = [
                value
                for sample in samples
                if sample.pp_rank == pp_rank
                for value in sample.durations_ns.get((kind, chunk), ())
            ]
            # A median per stage: one action that the system interrupted must not count for all.
            means.append(statistics.median(lanes) / 1e9 if lanes else 0.0)
        times[kind] = tuple(means)
    links = {
        (sample.pp_rank, neighbour): link
        for sample in samples
        for neighbour, link in sample.links.items()
    }
    links.update({(to, source): link for (source, to), link in list(links.items())})
    return Profile(
        times=StageTimes(forward_s=times[F], backward_s=times[B], weight_s=times[W]),
        links=links,
        action_sigma=spread_of(samples),
    )


def spread_of(samples: Sequence[Sample]) -> float:
    """Sigma of the logarithm of a duration around the typical one of its lane.

    From quartiles, so that a few outliers do not count as the rule.
    """
    logs = []
    for sample in samples:
        for values in sample.durations_ns.values():
            middle = max(_LEAST_NS, statistics.median(values))
            logs += [math.log(max(_LEAST_NS, value) / middle) for value in values]
    if len(logs) < 4:
        return 0.0
    low, _, high = statistics.quantiles(logs, n=4)
    return (high - low) / 1.349


def measure_link(
    transport: Transport,
    peer: int,
    *,
    leads: bool,
    payload: torch.Tensor,
    step: int,
    timeout_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Link:
    """Send messages to and fro between two ranks that do nothing else meanwhile.

    One message there and one back takes twice latency and occupancy; each further one there takes
    the occupancy once more.

    Args:
        transport: the channels; nothing may be under way on them.
        peer: global rank of the other one, which calls this too.
        leads: whether this rank sends first; exactly one of the two does.
        payload: a tensor as it travels in a step.
        step: a number that no step has.
        timeout_s: limit of each wait.
        clock: seconds.

    Raises:
        DeadlineError: the peer did not answer.
        TransportError: the peer is gone.
    """
    medians = []
    for burst in (1, _BURST):
        rounds = []
        for _ in range(_ROUNDS):
            begin = clock()
            if leads:
                _send(transport, peer, payload, step, burst)
                _take(transport, peer, 1, timeout_s)
            else:
                _take(transport, peer, burst, timeout_s)
                _send(transport, peer, payload, step, 1)
            rounds.append(clock() - begin)
        medians.append(statistics.median(rounds[1:]))
    there_and_back_s, burst_s = medians
    occupancy_s = max(0.0, (burst_s - there_and_back_s) / (_BURST - 1))
    occupancy_s = min(occupancy_s, there_and_back_s / 2)
    return Link(latency_s=there_and_back_s / 2 - occupancy_s, occupancy_s=occupancy_s)


def _send(transport: Transport, peer: int, payload: torch.Tensor, step: int, count: int) -> None:
    for index in range(count):
        transport.send(peer, Label(step, Action(F, 0, index)), payload)


def _take(transport: Transport, peer: int, count: int, timeout_s: float) -> None:
    for _ in range(count):
        arrival = transport.completions.wait(time.monotonic() + timeout_s)
        if arrival is None:
            raise DeadlineError(
                f"rank {peer} did not answer within {timeout_s:g} s while links were measured"
            )
        assert isinstance(arrival, Arrival), "members of a group report only during steps"
        arrival.take()
