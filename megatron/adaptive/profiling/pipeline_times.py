"""Measures a pipeline while it trains, for ``auto`` and ``--repartition``.

Owns what a rank measures of its own stages and how samples of all ranks become a
:class:`~megatron.adaptive.schedule.workload.StageProfile`; what follows from that is the planner's
and ``schedule.choose_by_simulation``'s. The first stage also looks tokens up, the last one computes
the loss: times of actions alone do not say what a layer takes there, so :class:`LayerShare`
measures around the modules themselves.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import truediv
from typing import Any

import torch

from megatron.adaptive.profiling.action_timing import spread
from megatron.adaptive.profiling.free_memory import KEPT_FREE
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import Link, StageProfile, StageTimes

_FORWARDS = 16
_ALIKE = 0.05  # spread of microbatches that is taken for none
F, B, W = ActionKind.F, ActionKind.B, ActionKind.W


@dataclass(kw_only=True)
class Sample:
    """Collects what one rank measured in some steps.

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
        """Adds the actions of a step with their durations in nanoseconds."""
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
    samples: Sequence[Sample], placement: Placement, num_microbatches: int = 0
) -> StageProfile:
    """Puts the ranks' samples together; replicas of a stage count alike.

    Args:
        samples: at least one of every rank of the pipeline.
        placement: where stages live.
        num_microbatches: of each step measured; with it unequal microbatches are found.

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
    unequal, sigma = _microbatch_factors(samples, placement, num_microbatches)
    return StageProfile(
        times=StageTimes(forward_s=times[F], backward_s=times[B], weight_s=times[W]),
        link=Link(
            latency_s=max((link.latency_s for link in links.values()), default=0.0),
            occupancy_s=max((link.occupancy_s for link in links.values()), default=0.0),
        ),
        links=links,
        action_sigma=sigma,
        microbatch_factors=tuple(
            tuple(factors[first : first + num_microbatches])
            for factors in unequal
            for first in range(0, len(factors), num_microbatches)
        ),
    )


def _microbatch_factors(
    samples: Sequence[Sample], placement: Placement, num_microbatches: int
) -> tuple[list[list[float]], float]:
    """Separates the lengths of microbatches from the spread of actions.

    The n-th samples of all pipeline ranks are those of one replica, which sees the same
    microbatches everywhere: the median over their lanes is a microbatch's factor. Where factors
    differ no more than the noise of so many lanes, and where steps had other numbers of
    microbatches, there are none.

    Returns:
        Per replica, how many times the median each microbatch of its steps took, or nothing; and
        the spread of actions beside that.
    """
    seen = [0] * placement.num_ranks
    replicas: dict[int, list[list[int]]] = defaultdict(list)
    for sample in samples:
        own_lanes = sample.durations_ns.values()
        replicas[seen[sample.pp_rank]] += [lane for lane in own_lanes if min(lane) > 0]
        seen[sample.pp_rank] += 1
    plain = spread(lane for lanes in replicas.values() for lane in lanes)
    lengths = {len(lane) for lanes in replicas.values() for lane in lanes}
    if not num_microbatches or len(lengths) != 1 or lengths.pop() % num_microbatches:
        return [], plain
    found, rest = [], []
    for lanes in replicas.values():
        middles = [statistics.median(lane) for lane in lanes]
        own = [
            statistics.median(map(truediv, values, middles)) for values in zip(*lanes, strict=True)
        ]
        found.append(own)
        rest += [[value / one for value, one in zip(lane, own, strict=True)] for lane in lanes]
    sigma = spread(rest)
    noise = sigma / math.sqrt(min(map(len, replicas.values())))
    return (found, sigma) if spread(found) > max(_ALIKE, 3 * noise) else ([], plain)


def most_of(
    samples: Sequence[Sample],
    present: Placement,
    wanted: Placement,
    layers: Sequence[int] = (),
    others: Sequence[int] = (),
) -> float:
    """Returns activations that memory allows under a placement, in whole-rank microbatches.

    Args:
        samples: at least one of every rank, under ``present``.
        present: where stages live.
        wanted: where they would live.
        layers: of each stage as they are, where they would change.
        others: of each stage as they would be. A layer is taken for the smallest mean of a stage
            where it goes, for the largest of those in the middle where it comes.

    Returns:
        That of the rank with the least room; below 1, even negative, where stages do not fit.
    """
    free = [math.inf] * present.num_ranks
    kept, held = [0.0] * present.num_stages, [0.0] * present.num_stages
    for sample in samples:
        free[sample.pp_rank] = min(free[sample.pp_rank], sample.free_bytes)
        for chunk in range(present.num_chunks):
            stage = present.stage_of(sample.pp_rank, chunk)
            kept[stage] = max(kept[stage], sample.kept_bytes[chunk])
            held[stage] = max(held[stage], sample.held_bytes[chunk])
    held_now = tuple(held)
    for sizes in (kept, held) if others else ():
        means = [size / count if count else 0.0 for size, count in zip(sizes, layers, strict=True)]
        least = min(filter(None, means), default=0.0)
        most = max([*means[1:-1], least])
        for stage, (count, other) in enumerate(zip(layers, others, strict=True)):
            sizes[stage] += (other - count) * (most if other > count else least)

    def total(sizes: Sequence[float], placement: Placement, rank: int) -> float:
        chunks = range(placement.num_chunks)
        return sum(sizes[placement.stage_of(rank, chunk)] for chunk in chunks)

    return min(
        (free[rank] * (1 - KEPT_FREE) + total(held_now, present, rank) - total(held, wanted, rank))
        / max(1, total(kept, wanted, rank))
        for rank in range(present.num_ranks)
    )


class LayerShare:
    """Measures the share of layers in the forward of some chunks.

    On the clock of the device, in the first forwards after each :meth:`begin`.

    Args:
        models: the model and its block of layers, by local chunk.
        clock: of the device.
        layers: the layers of chunks in which each is measured.
    """

    def __init__(
        self,
        models: Mapping[int, tuple[torch.nn.Module, torch.nn.Module]],
        clock: Any,
        layers: Mapping[int, Sequence[torch.nn.Module]] | None = None,
    ) -> None:
        self._clock = clock
        self._layers = layers or {}
        self._marks: dict[int, list[list[Any]]] = {chunk: [] for chunk in models}
        self._handles = []
        for chunk, (model, block) in models.items():
            for module in (model, block):
                self._handles += [
                    module.register_forward_pre_hook(self._marking(chunk, module is model)),
                    module.register_forward_hook(self._marking(chunk)),
                ]
            for layer in self._layers.get(chunk, ()):
                self._handles.append(layer.register_forward_hook(self._marking(chunk)))

    def begin(self) -> None:
        """Measures anew."""
        for marks in self._marks.values():
            marks.clear()

    def share(self, chunk: int) -> float:
        """Returns the median share of the layers in a forward, 1 for a chunk that is not measured.

        The device must have passed the forwards, as it has between two steps.
        """
        shares = [
            (times[-2] - times[1]) / max(1, times[-1] - times[0]) for times in self._times(chunk)
        ]
        return statistics.median(shares) if shares else 1.0

    def parts(self, chunk: int) -> tuple[float, ...]:
        """Returns the share of each layer in that of all, empty where they are not measured."""
        forwards = [
            [end - start for start, end in pairwise(times[1:-2])] for times in self._times(chunk)
        ]
        layers = [statistics.median(durations) for durations in zip(*forwards, strict=True)]
        return tuple(one / max(1, sum(layers)) for one in layers)

    def close(self) -> None:
        """Leaves the modules as they were."""
        for handle in self._handles:
            handle.remove()

    def _complete(self, chunk: int) -> int:
        return 4 + len(self._layers.get(chunk, ()))

    def _times(self, chunk: int) -> list[list[int]]:
        """Returns the times of complete forwards: start, block, each layer, block, end."""
        resolve = self._clock.resolve_ns
        marks, complete = self._marks.get(chunk, ()), self._complete(chunk)
        return [[*map(resolve, own)] for own in marks if len(own) == complete]

    def _marking(self, chunk: int, begins: bool = False) -> Any:
        """Returns a hook that notes the time; ``begins``: of a new forward."""
        complete = self._complete(chunk)

        def note(module: torch.nn.Module, *_: Any) -> None:
            marks = self._marks[chunk]
            if begins and module.training and len(marks) <= _FORWARDS:
                marks.append([])
            # A layer that a backward computes again comes after its forward.
            if marks and len(marks) <= _FORWARDS and len(marks[-1]) < complete:
                marks[-1].append(self._clock.mark())

        return note
