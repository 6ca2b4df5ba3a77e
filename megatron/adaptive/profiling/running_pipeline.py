"""Measures a running pipeline for ``auto``: times of its stages, their spread, its links.

Owns measuring and telling all ranks; what to make of it is ``schedule.auto``'s. Everything here
happens between two steps and is collective over the ranks named.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron.adaptive.errors import DeadlineError
from megatron.adaptive.profiling.memory import KEPT_FREE
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.profile import Profile
from megatron.adaptive.schedule.workload import Link, StageTimes
from megatron.adaptive.transport.interface import Arrival, Label, Transport

__all__ = ["Sample", "measure_link", "most_of", "profile_of", "rank_factors", "spread_of"]

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
        free_bytes: memory that activations may take.
        kept_bytes: what one microbatch keeps in each chunk.
        held_bytes: weights, gradients and optimizer state of each chunk.
        links: to the neighbours that it measured, by their position in the pipeline.
    """

    pp_rank: int
    free_bytes: int = 0
    kept_bytes: tuple[int, ...] = ()
    held_bytes: tuple[int, ...] = ()
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


def profile_of(
    samples: Sequence[Sample], placement: Placement, layers: Sequence[int] | None = None
) -> Profile:
    """Put the ranks' samples together; replicas of a stage count alike.

    Args:
        samples: at least one of every rank of the pipeline.
        placement: where stages live.
        layers: transformer layers of each stage; with them the profile also tells what other
            placements would take, for the slowness of a rank is told apart from that of a stage.

    Returns:
        The profile; links that were not measured are as slow as the slowest that was.
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
    factors = None
    if layers is not None:
        factors = rank_factors(times, placement, layers)
        ranks = [placement.locate(stage)[0] for stage in range(placement.num_stages)]
        for kind, values in times.items():
            pairs = zip(values, ranks, strict=True)
            times[kind] = tuple(value / factors[rank] for value, rank in pairs)
    return Profile(
        times=StageTimes(forward_s=times[F], backward_s=times[B], weight_s=times[W]),
        link=Link(
            latency_s=max((link.latency_s for link in links.values()), default=0.0),
            occupancy_s=max((link.occupancy_s for link in links.values()), default=0.0),
        ),
        links=links,
        rank_factors=factors,
        action_sigma=spread_of(samples),
    )


def rank_factors(
    times: Mapping[ActionKind, Sequence[float]], placement: Placement, layers: Sequence[int]
) -> tuple[float, ...]:
    """Estimate how much slower each rank is than the typical one, from transformer layers alone.

    A rank's stages in the middle of the pipeline hold nothing but layers, so that their time per
    layer tells its speed. In a V the first rank has the first and the last stage: there it is the
    backward of the first stage that tells, if split, for the embedding has no gradient of inputs;
    else its forward, as the look-up takes little.

    Args:
        times: measured seconds of each stage, by kind.
        placement: where the stages lay.
        layers: transformer layers of each stage.

    Returns:
        A factor per rank, 1 where nothing can be told.
    """
    middle = [stage for stage in range(1, placement.num_stages - 1) if layers[stage]]

    def paces(kinds: Sequence[ActionKind], stages: Iterable[int]) -> list[float]:
        found = [sum(times[kind][stage] for kind in kinds) / layers[stage] for stage in stages]
        return [pace for pace in found if pace > 0]

    first_kinds = (B,) if any(times[W]) else (F,)
    factors = []
    for rank in range(placement.num_ranks):
        stages = [placement.stage_of(rank, chunk) for chunk in range(placement.num_chunks)]
        kinds: Sequence[ActionKind] = (F, B, W)
        own = paces(kinds, [stage for stage in stages if stage in middle])
        if not own and 0 in stages and layers[0]:
            kinds = first_kinds
            own = paces(kinds, [0])
        typical = paces(kinds, middle)
        known = own and typical
        factors.append(statistics.fmean(own) / statistics.median(typical) if known else 1.0)
    return tuple(factors)


def most_of(samples: Sequence[Sample], present: Placement, wanted: Placement) -> float:
    """Activations that memory allows under a placement, in whole-rank microbatches.

    Args:
        samples: at least one of every rank, under ``present``.
        present: where stages live.
        wanted: where they would live.

    Returns:
        That of the rank with the least room; below 1, even negative, where stages do not fit.
    """
    free = [math.inf] * present.num_ranks
    kept, held = [0] * present.num_stages, [0] * present.num_stages
    for sample in samples:
        free[sample.pp_rank] = min(free[sample.pp_rank], sample.free_bytes)
        for chunk in range(present.num_chunks):
            stage = present.stage_of(sample.pp_rank, chunk)
            kept[stage] = max(kept[stage], sample.kept_bytes[chunk])
            held[stage] = max(held[stage], sample.held_bytes[chunk])

    def total(sizes: Sequence[int], placement: Placement, rank: int) -> int:
        chunks = range(placement.num_chunks)
        return sum(sizes[placement.stage_of(rank, chunk)] for chunk in chunks)

    return min(
        (free[rank] * (1 - KEPT_FREE) + total(held, present, rank) - total(held, wanted, rank))
        / max(1, total(kept, wanted, rank))
        for rank in range(present.num_ranks)
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
