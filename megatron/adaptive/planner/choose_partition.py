"""Finds layers per stage for ranks whose speed was measured while they train.

Layers and stages keep their order and stages their ranks, so a partition is a number of layers for
each stage. The quickest pace, that of the slowest rank, is found by halving::

    rank takes beside + layers x its layer     8  8  8  8  on ranks 1, 1.5, 1, 1: 12
    at pace T it holds (T - beside) / layer    9  6  9  8                          9

Stages are filled in order as far as a pace and memory allow, the stages of a rank sharing its time
evenly. That is exact where layers are alike, and for one stage per rank. Then layers are moved one
by one while that makes the slowest rank quicker.

What a step takes also depends on the order of work, so the partitions near it are simulated under
the job's own schedule. Of those that are as quick as the quickest, the one for which fewest layers
change their rank is taken.

Source: the minimal bottleneck of a chain of tasks on ranks of given speed, by bisection over the
pace as in Iqbal 1991, "Approximate algorithms for partitioning and assignment problems".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.catalog import Candidate
from megatron.adaptive.schedule.choose_by_simulation import ScheduleChoice, choose, evaluate
from megatron.adaptive.schedule.memory_caps import with_rounding
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind
from megatron.adaptive.schedule.workload import StageProfile, StageTimes

Partition = tuple[int, ...]
Times = tuple[float, float, float]
"""Seconds of forward, backward and weight gradients of one microbatch."""

_ALIKE = 0.005
"""Steps that differ by less are as quick as each other: simulated and measured differ by more."""
PLACEMENT_GAIN = 0.03
"""Least gain of another placement over the present one: to move there, weights must be moved."""
_SIMULATIONS = 24
_ORDERS = 6
_LEAST_S = 1e-9
_ROUNDING = 1e-6
_UNLIMITED = 1e9
_HALVINGS = 40


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Seconds of a pipeline's stages for one microbatch, and the layers that its ranks can hold.

    Attributes:
        placement: which rank holds which stage.
        partition: layers of each stage as they were measured.
        layer_s: what a layer of each kind takes, per rank.
        beside_s: what a stage takes beside its layers, per stage.
        most_layers: layers that a rank's memory allows, per rank, in its mean ones.
        kinds: of all layers in order, from 0; empty where they are alike.
        sizes: what a layer of each kind takes of ``most_layers``, per rank; empty for 1.
    """

    placement: Placement
    partition: Partition
    layer_s: tuple[tuple[Times, ...], ...]
    beside_s: tuple[Times, ...]
    most_layers: tuple[float, ...]
    kinds: tuple[int, ...] = ()
    sizes: tuple[tuple[float, ...], ...] = ()

    @property
    def slowness(self) -> tuple[float, ...]:
        """Time of all layers on each rank, over that on the middle one of them."""
        layers = self.whole()
        middle = sorted(layers)[(len(layers) - 1) // 2]
        return tuple(layer / max(middle, _LEAST_S) for layer in layers)

    def whole(self) -> list[float]:
        """Returns the seconds that all layers would take on each rank."""
        return (self._each.sum(axis=2) @ self._before[-1]).tolist()  # type: ignore[no-any-return]

    def stage_times(self, partition: Sequence[int]) -> StageTimes:
        """Returns the seconds of each stage under a partition."""
        forward, backward, weight = map(tuple, self._seconds(partition).T.tolist())
        return StageTimes(forward_s=forward, backward_s=backward, weight_s=weight)

    def lying(self, kind: PlacementKind) -> Loads:
        """Returns the loads under another placement; what slows a rank stays with it."""
        if kind == self.placement.kind:
            return self
        wanted, slowness = replace(self.placement, kind=kind), self.slowness
        beside = []
        for stage, (forward, backward, weight) in enumerate(self.beside_s):
            now, then = self._ranks[stage], wanted.locate(stage)[0]
            factor = slowness[then] / max(slowness[now], _LEAST_S)
            beside.append((forward * factor, backward * factor, weight * factor))
        return replace(self, placement=wanted, beside_s=tuple(beside))

    def paces(self, partition: Sequence[int]) -> list[float]:
        """Returns the seconds that each rank takes for a microbatch under a partition."""
        return self._by_rank(self._seconds(partition).sum(axis=1))

    def beside(self) -> list[float]:
        """Returns the seconds of each rank outside its layers."""
        return self._by_rank(np.array(self.beside_s).sum(axis=1))

    def fits(self, partition: Sequence[int]) -> bool:
        """Returns whether every rank's memory allows a partition."""
        sizes = np.array(self.sizes) if self.sizes else np.ones(self._each.shape[:2])
        taken = self._by_rank((self._counts(partition) * sizes[self._ranks]).sum(axis=1))
        pairs = zip(taken, self.most_layers, strict=True)
        return all(layers <= most + _ROUNDING for layers, most in pairs)

    @cached_property
    def _ranks(self) -> Any:
        """Rank of each stage."""
        stages = range(self.placement.num_stages)
        return np.array([self.placement.locate(stage)[0] for stage in stages])

    @cached_property
    def _each(self) -> Any:
        """``layer_s``, ``[ranks, kinds, 3]``."""
        return np.array(self.layer_s)

    @cached_property
    def _before(self) -> Any:
        """Layers of each kind before every layer and behind the last, ``[layers + 1, kinds]``."""
        every = np.eye(self._each.shape[1])
        kinds = list(self.kinds) or [0] * sum(self.partition)
        return np.concatenate([0 * every[:1], every[kinds].cumsum(axis=0)])

    def _counts(self, partition: Sequence[int]) -> Any:
        """Returns the layers of each kind in every stage, ``[stages, kinds]``."""
        ends = np.cumsum(partition)
        return self._before[ends] - self._before[ends - partition]

    def _seconds(self, partition: Sequence[int]) -> Any:
        """Returns the seconds of each stage, ``[stages, 3]``."""
        layers = self._counts(partition)[:, :, None] * self._each[self._ranks]
        return np.array(self.beside_s) + layers.sum(axis=1)

    def _by_rank(self, values: Any) -> list[float]:
        sums = np.bincount(self._ranks, weights=values, minlength=self.placement.num_ranks)
        return sums.tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class PartitionMove:
    """A partition that is worth a move.

    Attributes:
        partition: layers of each stage.
        present_s: the step as it is, simulated.
        step_s: the step under ``partition``, simulated.
    """

    partition: Partition
    present_s: float
    step_s: float

    @property
    def gain(self) -> float:
        """Share of a step that the move saves."""
        return 1 - self.step_s / self.present_s


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Holds what ``auto`` lets all ranks run from here on.

    Attributes:
        text: what was chosen and why, for the log.
        stay: what to run with the stages as they are, ``None`` to leave it as it is.
        move: what to run after moving the stages or their layers, ``None`` to stay.
        partition: layers of each stage then, ``None`` for those at present.
    """

    text: str
    stay: Candidate | None = None
    move: Candidate | None = None
    partition: Partition | None = None


def travelling(old: Sequence[int], new: Sequence[int], placement: Placement) -> int:
    """Returns the layers that lie on another rank under ``new`` than under ``old``."""
    ranks = [placement.locate(stage)[0] for stage in range(placement.num_stages)]
    return int((np.repeat(ranks, old) != np.repeat(ranks, new)).sum())


def simulated_step(
    loads: Loads, candidate: Candidate, num_microbatches: int
) -> Callable[[Partition], float]:
    """Returns a function that simulates a step under a partition and the job's order of work.

    Args:
        loads: of the stages.
        candidate: what runs.
        num_microbatches: microbatches per step.
    """
    known: dict[Partition, float] = {}

    def step_s(partition: Partition) -> float:
        if partition not in known:
            profile = StageProfile(times=loads.stage_times(partition))
            outcome = evaluate(candidate, num_microbatches, profile, (0,))
            known[partition] = outcome.mean_s
        return known[partition]

    return step_s


def propose(
    loads: Loads, step_s: Callable[[Partition], float], gain: float
) -> PartitionMove | None:
    """Finds the partition to move to.

    Args:
        loads: of the stages.
        step_s: seconds of a step under a partition, see :func:`simulated_step`.
        gain: least share of a step that a move must save.

    Returns:
        The proposal, ``None`` to stay.
    """
    present = loads.partition
    start = balanced(loads)
    if not max(loads.paces(start)) < max(loads.paces(present)) * (1 - gain / 2):
        return None  # nothing is simulated on a quiet job
    choice, seconds = _quickest(loads, start, step_s)
    found = PartitionMove(partition=choice, present_s=step_s(present), step_s=seconds)
    return found if choice != present and found.gain >= gain else None


def choose_together(
    loads: Loads,
    profile: StageProfile,
    limits: Mapping[PlacementKind, Callable[[Partition], float]],
    *,
    halves: Sequence[Loads] = (),
    gain: float | None = None,
    num_microbatches: int,
    **options: Any,
) -> Decision:
    """Finds placement, layers per stage, order of work and cap together.

    What is best for equal stages need not be for those at hand, nor layers that suit one order
    another. So under each placement partitions are compared by the fastest of several orders, those
    that lead where ranks are as even as they can be; the choice is then made anew for the best.

    Args:
        loads: of the stages as they are.
        profile: spreads, lengths and links.
        limits: how stages may lie, as they do first, and the most activations that memory allows
            then under a partition, in whole-rank microbatches.
        halves: loads of parts of the measured steps, each of which must promise the gain too.
        gain: least share of a step that moving layers must save, ``None`` where they stay.
        num_microbatches, options: see
        :func:`~megatron.adaptive.schedule.choose_by_simulation.choose`.

    Raises:
        ScheduleError: memory does not allow any candidate.

    Source: AdaPtis, arXiv 2509.23722, for choosing these together; the search is ours.
    """

    def times_of(lying: Loads, partition: Partition) -> StageProfile:
        return replace(profile, times=lying.stage_times(partition))

    def fastest(lying: Loads, partition: Partition, *, quick: bool = False) -> ScheduleChoice:
        return choose(
            times_of(lying, partition),
            placement=lying.placement,
            num_microbatches=num_microbatches,
            most=limits[lying.placement.kind](partition),
            quick=quick,
            **options,
        )

    def near(lying: Loads, orders: list[Candidate]) -> Partition:
        start, limit = balanced(lying), limits[lying.placement.kind]
        leading = fastest(lying, start, quick=True).outcomes[:_ORDERS]
        orders += [one.candidate for one in leading]

        @cache
        def step_s(partition: Partition) -> float:
            times, most = times_of(lying, partition), with_rounding(limit(partition))
            runs = (evaluate(one, num_microbatches, times, (0,)) for one in orders)
            return min((run.mean_s for run in runs if run.peak_units <= most), default=math.inf)

        return _quickest(lying, start, step_s)[0]

    def step_of(choice: ScheduleChoice, of: Loads, partition: Partition) -> float:
        times = times_of(of.lying(choice.best.placement.kind), partition)
        return evaluate(choice.best, num_microbatches, times, (0,)).mean_s

    present, errors = loads.partition, []
    stay: ScheduleChoice | None = None
    choice: ScheduleChoice | None = None
    found: list[tuple[float, Partition, ScheduleChoice]] = []
    for kind, cuts in product(limits, (False, True) if gain is not None else (False,)):
        if stay is not None and time.monotonic() >= options.get("until_s", math.inf):
            break
        lying = loads.lying(kind)
        try:
            known = [one.best for one in (stay, choice) if one is not None]
            orders = [one for one in known if one.placement == lying.placement]
            partition = near(lying, orders) if cuts else present
            if cuts and partition == present:
                continue
            choice = fastest(lying, partition)
        except ScheduleError as error:
            errors.append(error)
            continue
        if lying is loads and not cuts:
            stay = choice
            continue
        least = gain if cuts and gain is not None else PLACEMENT_GAIN
        if stay is None or all(
            step_of(choice, of, partition) < step_of(stay, of, present) * (1 - least)
            for of in (loads, *halves)
        ):
            found.append((step_of(choice, loads, partition), partition, choice))
    if not found:
        if stay is None:
            raise errors[0]
        return Decision(text=stay.reason, stay=stay.best)
    _, partition, choice = min(found, key=lambda one: one[0])
    text, cut = choice.reason, None if partition == present else partition
    if stay is not None:
        was = "" if cut is None else f" of {'-'.join(map(str, present))} layers"
        text += f"; in a {loads.placement.kind}{was} at best {stay.step_s * 1e3:.4g} ms"
    best = None if stay is None else stay.best
    return Decision(text=text, stay=best, move=choice.best, partition=cut)


def balanced(loads: Loads) -> Partition:
    """Returns a partition under which the slowest rank is about as quick as it can be."""
    every = loads.beside(), loads.whole()
    slowest, quickest = max(map(sum, zip(*every, strict=True))), max(loads.beside())
    filled = loads.partition
    for _ in range(_HALVINGS):
        pace = (slowest + quickest) / 2
        found = _filled(loads, pace)
        if found is None:
            quickest = pace
        else:
            filled, slowest = found, pace
    ends = [one for one in (_descended(loads, loads.partition), filled) if loads.fits(one)]
    return min(ends, key=lambda partition: max(loads.paces(partition)), default=loads.partition)


def _quickest(
    loads: Loads, start: Partition, step_s: Callable[[Partition], float]
) -> tuple[Partition, float]:
    """Returns the quickest partition near two, or one as quick for which fewer layers travel."""
    present = loads.partition
    tried = {one: step_s(one) for one in (present, start)}
    best = min(tried, key=tried.__getitem__)
    while len(tried) < _SIMULATIONS:
        better = None
        for near in _neighbours(loads, best):
            if near in tried or len(tried) >= _SIMULATIONS:
                continue
            tried[near] = step_s(near)
            if tried[near] < tried[best] * (1 - 1e-3):
                better = near
                break
        if better is None:
            break
        best = better
    limit = min(tried.values()) * (1 + _ALIKE)
    choice = min(
        (partition for partition, seconds in tried.items() if seconds <= limit),
        key=lambda partition: (travelling(present, partition, loads.placement), tried[partition]),
    )
    return choice, tried[choice]


def _filled(loads: Loads, pace: float) -> Partition | None:
    """Fills stages in order as far as a pace and memory allow, ``None`` if layers are left."""
    placement, kinds = loads.placement, loads.kinds or (0,) * sum(loads.partition)
    seconds = [pace - beside for beside in loads.beside()]
    space = [min(most, _UNLIMITED) for most in loads.most_layers]
    open_stages = [placement.num_chunks] * placement.num_ranks
    layers, next_one = [0] * placement.num_stages, 0
    for stage in range(placement.num_stages):
        rank = placement.locate(stage)[0]
        others = 1 - 1 / open_stages[rank]
        least_s, least = seconds[rank] * others - _LEAST_S, space[rank] * others - _ROUNDING
        open_stages[rank] -= 1
        while next_one < len(kinds):
            left_s = seconds[rank] - sum(loads.layer_s[rank][kinds[next_one]])
            left = space[rank] - (loads.sizes[rank][kinds[next_one]] if loads.sizes else 1.0)
            if left_s < least_s or left < least:
                break
            seconds[rank], space[rank] = left_s, left
            layers[stage] += 1
            next_one += 1
    return tuple(layers) if next_one == len(kinds) else None


def _descended(loads: Loads, partition: Partition) -> Partition:
    """Moves layers one by one while that makes the slowest rank quicker."""
    pace, better = max(loads.paces(partition)), True
    while better:
        better = False
        for near in _neighbours(loads, partition, pace):
            if (found := max(loads.paces(near))) < pace * (1 - _ROUNDING):
                partition, pace, better = near, found, True
                break
    return partition


def _neighbours(loads: Loads, partition: Partition, least: float = 0.0) -> Iterator[Partition]:
    """Yields partitions with one layer moved, slowest giver and quickest taker first.

    ``least``: pace of the givers, for nothing gets quicker where others give.
    """
    paces = loads.paces(partition)

    def pace(stage: int) -> float:
        return paces[loads.placement.locate(stage)[0]]

    stages = range(loads.placement.num_stages)
    for giver in sorted(stages, key=pace, reverse=True):
        for taker in sorted(stages, key=pace):
            if giver == taker or not partition[giver] or pace(giver) < least:
                continue
            layers = list(partition)
            layers[giver] -= 1
            layers[taker] += 1
            if loads.fits(layers):
                yield tuple(layers)
