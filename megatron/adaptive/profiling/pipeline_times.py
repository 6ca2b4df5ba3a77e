"""Measures a pipeline while it trains, for ``auto`` and ``--repartition``.

Each rank measures its stages. The measurements of all ranks are combined into a
:class:`~megatron.adaptive.schedule.workload.StageProfile`, which the planner and
``schedule.choose_by_simulation`` use. Actions of the first stage include the embedding, and actions
of the last stage include the loss. Therefore, :class:`LayerShare` measures the time of the layers
alone, with hooks on the modules.
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
_ALIKE = 0.05
"""Maximum relative spread of the times of microbatches that are treated as equally long."""
F = ActionKind.F
B = ActionKind.B
W = ActionKind.W


@dataclass(kw_only=True)
class Sample:
    """Measurements of one rank in some steps.

    Attributes:
        pp_rank: Position of the rank in the pipeline.
        durations_ns: Durations of the actions on all microbatches, keyed by kind and chunk. If a
            weight gradient (W) was computed in several parts, or a microbatch in several slices,
            the durations of the parts are added up.
        free_bytes: Memory that is available for activations, in bytes.
        kept_bytes: Size of the activations that a microbatch keeps, in bytes, per chunk.
        held_bytes: Size of weights, gradients and optimizer state, in bytes, per chunk.
        links: Measured links to neighbours, keyed by the neighbour's position in the pipeline.
    """

    pp_rank: int
    free_bytes: int = 0
    kept_bytes: tuple[int, ...] = ()
    held_bytes: tuple[int, ...] = ()
    durations_ns: dict[tuple[ActionKind, int], list[int]] = field(default_factory=dict)
    links: dict[int, Link] = field(default_factory=dict)

    def add(self, actions: Iterable[tuple[Action, int]], num_slices: int = 1) -> None:
        """Adds the durations of one step.

        Args:
            actions: Pairs of an action and its duration in nanoseconds.
            num_slices: Number of slices of each microbatch, or 1 for whole microbatches.
        """
        totals: dict[tuple[ActionKind, int, int], int] = defaultdict(int)
        for action, duration_ns in actions:
            totals[action.kind, action.chunk, action.microbatch // num_slices] += duration_ns
        for (kind, chunk, _), duration_ns in totals.items():
            self.durations_ns.setdefault((kind, chunk), []).append(duration_ns)


def profile_of(
    samples: Sequence[Sample], placement: Placement, num_microbatches: int = 0
) -> StageProfile:
    """Combines the measurements of all ranks into a profile of the pipeline's stages.

    Args:
        samples: Measurements, at least one from every rank of the pipeline. Data-parallel replicas
            of a stage have equal weight.
        placement: Assignment of stages to ranks and chunks.
        num_microbatches: Number of microbatches in each measured step, or 0 if it is unknown. It is
            needed to detect microbatches of unequal length.

    Returns:
        Times of stages and links. A link without a measurement gets the times of the slowest
        measured link.
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
            # Use the median, because a few actions take longer if the operating system interrupts
            # them.
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
    """Separates the effect of microbatch lengths on durations from random variation.

    All ranks of a replica process the same microbatches. A longer microbatch takes longer on all of
    them, while noise differs between ranks. For each rank, chunk and kind of action, the time of a
    microbatch is divided by the median time. The factor of the microbatch is the median of these
    ratios. The n-th sample of each pipeline rank belongs to the n-th replica.

    Returns:
        Tuple of two results. The first is the factor of each microbatch for each replica. It is
        empty if the factors do not vary more than noise, or if the number of microbatches was not
        constant. The second is the relative standard deviation of the durations, after division by
        these factors if there are any.
    """
    seen = [0] * placement.num_ranks
    replicas: dict[int, list[list[int]]] = defaultdict(list)
    for sample in samples:
        lanes_of_rank = sample.durations_ns.values()
        replicas[seen[sample.pp_rank]] += [lane for lane in lanes_of_rank if min(lane) > 0]
        seen[sample.pp_rank] += 1
    plain = spread(lane for lanes in replicas.values() for lane in lanes)
    lengths = {len(lane) for lanes in replicas.values() for lane in lanes}
    if not num_microbatches or len(lengths) != 1 or lengths.pop() % num_microbatches:
        return [], plain
    all_factors = []
    rest = []
    for lanes in replicas.values():
        middles = [statistics.median(lane) for lane in lanes]
        factors = [
            statistics.median(map(truediv, values, middles)) for values in zip(*lanes, strict=True)
        ]
        all_factors.append(factors)
        rest += [
            [value / factor for value, factor in zip(lane, factors, strict=True)] for lane in lanes
        ]
    sigma = spread(rest)
    noise = sigma / math.sqrt(min(map(len, replicas.values())))
    is_unequal = spread(all_factors) > max(_ALIKE, 3 * noise)
    return (all_factors, sigma) if is_unequal else ([], plain)


def most_of(
    samples: Sequence[Sample],
    present: Placement,
    target: Placement,
    layers: Sequence[int] = (),
    others: Sequence[int] = (),
) -> float:
    """Returns the number of microbatches that fit into the memory of every rank in another layout.

    Args:
        samples: Measurements in the layout ``present``, at least one from every rank.
        present: Current assignment of stages to ranks.
        target: Assignment of stages to ranks in the other layout.
        layers: Current number of layers of each stage. Required with ``others``.
        others: Number of layers of each stage in the other layout, or empty for the current
            numbers. The estimate is conservative: removing a layer from a stage frees the smallest
            mean layer size of any stage, and adding a layer needs the largest mean layer size of a
            middle stage.

    Returns:
        Number of microbatches that fit on the rank with the least room. It is below 1, or even
        negative, if the stages themselves do not fit.
    """
    free = [math.inf] * present.num_ranks
    kept = [0.0] * present.num_stages
    held = [0.0] * present.num_stages
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
        (free[rank] * (1 - KEPT_FREE) + total(held_now, present, rank) - total(held, target, rank))
        / max(1, total(kept, target, rank))
        for rank in range(present.num_ranks)
    )


class LayerShare:
    """Measures the fraction of a forward pass spent in the layers, not in the embedding or loss.

    Hooks on the modules read the device's clock during the first forward passes after each call of
    :meth:`begin`.

    Args:
        models: Model and its block of layers, for each chunk to measure.
        clock: Clock that records times in the device's work queue.
        layers: Layers to measure separately, keyed by chunk. Other chunks are measured as a whole.
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
        """Discards all measurements and starts measuring again."""
        for marks in self._marks.values():
            marks.clear()

    def share(self, chunk: int) -> float:
        """Returns the median fraction of a forward pass that is spent in the layers of ``chunk``.

        The result is 1 for a chunk that is not measured. The device must have completed the forward
        passes, so call this method between two steps.
        """
        shares = [
            (times[-2] - times[1]) / max(1, times[-1] - times[0]) for times in self._times(chunk)
        ]
        return statistics.median(shares) if shares else 1.0

    def parts(self, chunk: int) -> tuple[float, ...]:
        """Returns the time of each layer in ``chunk`` as a fraction of the time of all its layers.

        The result is empty if the chunk's layers are not measured separately.
        """
        forwards = [
            [end - start for start, end in pairwise(times[1:-2])] for times in self._times(chunk)
        ]
        layers = [statistics.median(durations) for durations in zip(*forwards, strict=True)]
        return tuple(layer / max(1, sum(layers)) for layer in layers)

    def close(self) -> None:
        """Removes the hooks from the modules."""
        for handle in self._handles:
            handle.remove()

    def _complete(self, chunk: int) -> int:
        return 4 + len(self._layers.get(chunk, ()))

    def _times(self, chunk: int) -> list[list[int]]:
        """Returns the recorded times of each complete forward pass through ``chunk``, in ns.

        The times are, in order: start of the model, start of the block of layers, end of each
        measured layer, end of the block, end of the model.
        """
        resolve = self._clock.resolve_ns
        complete = self._complete(chunk)
        forwards = self._marks.get(chunk, ())
        return [[*map(resolve, marks)] for marks in forwards if len(marks) == complete]

    def _marking(self, chunk: int, begins: bool = False) -> Any:
        """Returns a hook that records the time of each call of a module in ``chunk``.

        If ``begins`` is true, each call of the hook starts a new forward pass.
        """
        complete = self._complete(chunk)

        def note(module: torch.nn.Module, *_: Any) -> None:
            marks = self._marks[chunk]
            if begins and module.training and len(marks) <= _FORWARDS:
                marks.append([])
            # If activations are recomputed, the hooks are called again. By then, all times of the
            # forward pass are recorded, so ignore these calls.
            if marks and len(marks) <= _FORWARDS and len(marks[-1]) < complete:
                marks[-1].append(self._clock.mark())

        return note
