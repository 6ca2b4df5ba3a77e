"""Finds the best number of layers per stage for a running job from its measured rank speeds.

The search has three steps:

1. :func:`balanced` finds a partition whose slowest rank is as fast as possible. The *pace* of a
   rank is its time per microbatch in seconds. Bisection finds the smallest pace T at which the
   ranks can hold all layers. At pace T, a rank holds (T - time outside of layers) / (time per
   layer) layers. In this example, 32 layers run on 4 ranks, and a layer takes 1.5 s on rank 1 and 1
   s on all other ranks::

       layers of each stage    8  8  8  8    slowest pace 8 x 1.5 = 12 s
       fit at T = 9 s          9  6  9  9    33 layers, enough
       layers of each stage    9  6  9  8    slowest pace 9 s

2. Stages are filled with layers in order. If a rank has several stages, each stage gets an equal
   share of the rank's time. This is optimal if all layers are equal, or if each rank has one stage.
   Afterwards, single layers are moved between stages as long as this makes the slowest rank faster.
3. The step time also depends on the order in which ranks run their actions. Therefore, partitions
   near the balanced partition are simulated under the job's schedule. Of the partitions that are
   about as fast as the fastest, the one that moves the fewest layers to a different rank is chosen.

Layers and stages keep their order, and stages stay on their ranks. :func:`choose_together` also
chooses the schedule and the placement of stages.

Source: Iqbal 1991, "Approximate algorithms for partitioning and assignment problems". It describes
the bisection that assigns a chain of tasks to ranks with the smallest bottleneck.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import permutations, product
from typing import Any

import numpy as np

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.catalog import DEFAULT_PIECES, Candidate
from megatron.adaptive.schedule.choose_by_simulation import (
    CandidateOutcome,
    ScheduleChoice,
    choose,
    evaluate,
    loop_of,
    num_actions,
)
from megatron.adaptive.schedule.memory_caps import with_rounding
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind, frozen_stages_of
from megatron.adaptive.schedule.workload import StageProfile, StageTimes

Partition = tuple[int, ...]
Times = tuple[float, float, float]
"""Times of one microbatch in seconds: forward pass, backward pass, and weight gradients."""

_ALIKE = 0.005
"""Maximum relative difference between two step times that are treated as equal. Simulated step
times have larger errors."""
PLACEMENT_GAIN = 0.03
"""Minimum fraction of the step time that a different stage placement must save. This minimum is
larger than the minimum for other changes, because a different placement requires moving weights."""
_SIMULATIONS = 24
"""Maximum number of partitions that a search simulates."""
_MOST_TRIED = 60
"""Maximum number of partitions that :func:`improved` tries per initial partition. :func:`improved`
runs before the first training step, so a longer search would delay the training.
"""
_WHOLE = 3
"""Typical ratio of a layer's forward plus backward time to its forward time."""
_LEAST_GAIN = 1e-3
"""Minimum fraction of the step time that moving a single layer must save."""
_ORDERS = 6
"""Number of schedules, starting with the best, under which each partition is simulated."""
_LEAST_S = 1e-9
"""Time in seconds used as the minimum for divisors and as the tolerance for rounding errors."""
_ROUNDING = 1e-6
"""Maximum relative error of a value due to rounding."""
_UNLIMITED = 1e9
"""Number of layers that fit on a rank with unlimited memory. Infinity cannot be used here, because
infinity times zero is NaN.
"""
_HALVINGS = 40
"""Number of bisection steps, which determine the time per microbatch to 12 digits."""


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Measured times per microbatch in a pipeline, and the number of layers that fit on each rank.

    Attributes:
        placement: Assignment of stages to ranks.
        partition: Number of layers in each stage during the measurement.
        layer_s: Times of a layer in seconds (forward pass, backward pass, weight gradients), for
            each rank and kind of layer.
        beside_s: Times in seconds of each stage's work outside of its layers, such as embedding and
            loss.
        most_layers: Number of layers of average size that fit into the memory of each rank.
        kinds: Index of each layer's kind, in model order, or empty if all layers are equal.
        sizes: Memory size of a layer relative to the average, for each rank and kind of layer,
            or empty if all sizes are equal.
        frozen_layers: Number of leading layers through which no gradient flows. Stages that consist
            of such layers have no backward passes.
    """

    placement: Placement
    partition: Partition
    layer_s: tuple[tuple[Times, ...], ...]
    beside_s: tuple[Times, ...]
    most_layers: tuple[float, ...]
    kinds: tuple[int, ...] = ()
    sizes: tuple[tuple[float, ...], ...] = ()
    frozen_layers: int = 0

    @property
    def slowness(self) -> tuple[float, ...]:
        """Time that each rank would need for all layers, divided by the median over all ranks."""
        layers = self.whole()
        middle = sorted(layers)[(len(layers) - 1) // 2]
        return tuple(layer / max(middle, _LEAST_S) for layer in layers)

    def whole(self) -> list[float]:
        """Returns the time in seconds that each rank would need for all layers of the model."""
        seconds: list[float] = (self._each.sum(axis=2) @ self._before[-1]).tolist()
        return seconds

    def stage_times(self, partition: Sequence[int]) -> StageTimes:
        """Returns the times of each stage in seconds if stage ``i`` has ``partition[i]`` layers."""
        forward, backward, weight = map(tuple, self._seconds(partition).T.tolist())
        return StageTimes(forward_s=forward, backward_s=backward, weight_s=weight)

    def placed(self, kind: PlacementKind) -> Loads:
        """Returns the loads for the placement ``kind``, assuming that rank speeds stay the same."""
        if kind == self.placement.kind:
            return self
        placement = replace(self.placement, kind=kind)
        slowness = self.slowness
        beside = []
        for stage, (forward, backward, weight) in enumerate(self.beside_s):
            old_rank, new_rank = self._ranks[stage], placement.locate(stage)[0]
            factor = slowness[new_rank] / max(slowness[old_rank], _LEAST_S)
            beside.append((forward * factor, backward * factor, weight * factor))
        return replace(self, placement=placement, beside_s=tuple(beside))

    def scaled(self, factor: float) -> Loads:
        """Returns a copy of the loads with all times multiplied by ``factor``."""
        if factor == 1:
            return self

        def multiplied(times: Times) -> Times:
            forward, backward, weight = times
            return forward * factor, backward * factor, weight * factor

        return replace(
            self,
            layer_s=tuple(tuple(map(multiplied, row)) for row in self.layer_s),
            beside_s=tuple(map(multiplied, self.beside_s)),
        )

    def paces(self, partition: Sequence[int]) -> list[float]:
        """Returns the time in seconds that each rank needs per microbatch under ``partition``."""
        return self._by_rank(self._seconds(partition).sum(axis=1))

    def beside(self) -> list[float]:
        """Returns each rank's time per microbatch outside of its layers, in seconds."""
        return self._by_rank(np.array(self.beside_s).sum(axis=1))

    def fits(self, partition: Sequence[int]) -> bool:
        """Returns whether every rank has enough memory for its layers under ``partition``."""
        sizes = np.array(self.sizes) if self.sizes else np.ones(self._each.shape[:2])
        taken = self._by_rank((self._counts(partition) * sizes[self._ranks]).sum(axis=1))
        pairs = zip(taken, self.most_layers, strict=True)
        return all(layers <= most + _ROUNDING for layers, most in pairs)

    @cached_property
    def _ranks(self) -> Any:
        """Index of the rank that runs each stage, ``[stages]``."""
        stages = range(self.placement.num_stages)
        return np.array([self.placement.locate(stage)[0] for stage in stages])

    @cached_property
    def _each(self) -> Any:
        """Layer times ``layer_s`` as an array, ``[ranks, kinds, 3]``."""
        return np.array(self.layer_s)

    @cached_property
    def _before(self) -> Any:
        """Array whose row ``i`` contains the number of layers of each kind before layer ``i``.

        The shape is ``[layers + 1, kinds]``.
        """
        one_hot = np.eye(self._each.shape[1])
        kinds = list(self.kinds) or [0] * sum(self.partition)
        return np.concatenate([0 * one_hot[:1], one_hot[kinds].cumsum(axis=0)])

    def _counts(self, partition: Sequence[int]) -> Any:
        """Returns an array with the number of layers per stage and kind, ``[stages, kinds]``."""
        ends = np.cumsum(partition)
        return self._before[ends] - self._before[ends - partition]

    def _seconds(self, partition: Sequence[int]) -> Any:
        """Returns the forward, backward and weight-gradient time of each stage.

        The array has shape ``[stages, 3]`` and contains times in seconds per microbatch.
        """
        layers = self._counts(partition)[:, :, None] * self._each[self._ranks]
        return np.array(self.beside_s) + layers.sum(axis=1)

    def _by_rank(self, values: Any) -> list[float]:
        """Sums ``values``, which has one value per stage, over the stages of each rank."""
        ranks = self.placement.num_ranks
        sums: list[float] = np.bincount(self._ranks, weights=values, minlength=ranks).tolist()
        return sums


@dataclass(frozen=True, kw_only=True)
class PartitionMove:
    """A partition that is faster than the job's current partition.

    Attributes:
        partition: Number of layers of each stage.
        present_s: Simulated step time in seconds under the current partition.
        step_s: Simulated step time in seconds under ``partition``.
    """

    partition: Partition
    present_s: float
    step_s: float

    @property
    def gain(self) -> float:
        """Fraction of the step time that this partition saves, compared to the current one."""
        return 1 - self.step_s / self.present_s


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Schedule, placement and partition that ``--pipeline-schedule auto`` chooses for a job.

    Attributes:
        text: Description of the choice and its reason, in a single line for the log.
        stay: Schedule to use while all layers stay on their ranks, or ``None`` to keep the current
            schedule.
        move: Schedule to use after layers or whole stages have moved to other ranks, or ``None`` if
            nothing should be moved.
        partition: Number of layers in each stage after the move, or ``None`` to keep the current
            partition.
        present_s: Simulated step time in seconds without a move, or ``None`` if no schedule fits
            into memory without a move.
        step_s: Simulated step time in seconds after the move, or ``None`` if nothing should be
            moved.
    """

    text: str
    stay: Candidate | None = None
    move: Candidate | None = None
    partition: Partition | None = None
    present_s: float | None = None
    step_s: float | None = None


def travelling(old: Sequence[int], new: Sequence[int], placement: Placement) -> int:
    """Returns how many layers change ranks if the partition ``new`` replaces ``old``."""
    ranks = [placement.locate(stage)[0] for stage in range(placement.num_stages)]
    return int((np.repeat(ranks, old) != np.repeat(ranks, new)).sum())


def simulated_step(
    loads: Loads, candidate: Candidate, num_microbatches: int
) -> Callable[[Partition], float]:
    """Returns a function that takes a partition and returns the simulated step time in seconds.

    Args:
        loads: Measured times of the stages.
        candidate: Schedule of the job.
        num_microbatches: Number of microbatches per step.
    """
    step_s_of: dict[Partition, float] = {}
    runs = _Runs(num_microbatches)

    def step_s(partition: Partition) -> float:
        if partition not in step_s_of:
            profile = StageProfile(times=loads.stage_times(partition))
            frozen = frozen_stages_of(partition, loads.frozen_layers)
            under = replace(candidate, frozen_stages=frozen)
            step_s_of[partition] = runs.evaluate(under, profile).mean_s
        return step_s_of[partition]

    return step_s


def charged_wholly(costs: Sequence[float], frozen_layers: int) -> list[float]:
    """Returns the costs of layers as if frozen layers also had backward passes.

    A partition that balances these costs distributes frozen layers over more ranks. These ranks can
    run frozen layers in time that they would otherwise spend waiting.

    Args:
        costs: Cost of each layer, in any unit.
        frozen_layers: Number of leading layers through which no gradient flows.
    """
    return [cost * (_WHOLE if layer < frozen_layers else 1) for layer, cost in enumerate(costs)]


def improved(
    starts: Iterable[Partition], step_s: Callable[[Partition], float]
) -> tuple[Partition, float]:
    """Improves partitions by moving single layers between stages as long as the step gets faster.

    Args:
        starts: Initial partitions. A search starts from each of them, and the best result is
            returned.
        step_s: Function that returns the step time in seconds under a partition, or infinity if the
            partition cannot be used.

    Returns:
        Fastest partition that was found, and its step time in seconds.
    """
    tried: dict[Partition, float] = {}
    for start in dict.fromkeys(starts):
        best: Partition | None = start
        most = len(tried) + _MOST_TRIED
        tried[start] = step_s(start)
        while best is not None and len(tried) < most:
            limit_s = tried[best] * (1 - _LEAST_GAIN)
            best = _better(best, limit_s, tried, step_s)
    fastest = min(tried, key=tried.__getitem__)
    return fastest, tried[fastest]


def _better(
    partition: Partition,
    limit_s: float,
    tried: dict[Partition, float],
    step_s: Callable[[Partition], float],
) -> Partition | None:
    """Moves one layer of ``partition`` to another stage to get a step time below ``limit_s``.

    Returns the new partition, or ``None`` if no move makes the step fast enough.

    Args:
        partition: Number of layers of each stage.
        limit_s: Step time in seconds that the new partition must stay below.
        tried: Step time in seconds of each partition tried so far. This function adds the
            partitions that it tries.
        step_s: Function that returns the step time in seconds under a partition.
    """
    for giver, taker in permutations(range(len(partition)), 2):
        layers = list(partition)
        layers[giver] -= 1
        layers[taker] += 1
        near = tuple(layers)
        if min(near) < 0 or near in tried:
            continue
        tried[near] = step_s(near)
        if tried[near] < limit_s:
            return near
    return None


def propose(
    loads: Loads, step_s: Callable[[Partition], float], gain: float
) -> PartitionMove | None:
    """Finds a faster partition for a job whose schedule stays the same.

    Args:
        loads: Measured times and memory of the stages.
        step_s: Function that returns the step time in seconds under a partition, such as the result
            of :func:`simulated_step`.
        gain: Minimum fraction of the step time that a new partition must save.

    Returns:
        Faster partition, or ``None`` if no partition saves enough time.
    """
    present = loads.partition
    start = balanced(loads)
    is_slower = max(loads.paces(start)) < max(loads.paces(present)) * (1 - gain / 2)
    # Skip the simulations if the ranks are balanced well enough and no layers are frozen. Frozen
    # layers can fill time in which their rank would otherwise wait, so with frozen layers, the
    # fastest partition may not be the balanced one.
    if not is_slower and not loads.frozen_layers:
        return None
    choice, seconds = _quickest(loads, start, step_s)
    move = PartitionMove(partition=choice, present_s=step_s(present), step_s=seconds)
    return move if choice != present and move.gain >= gain else None


def choose_together(
    loads: Loads,
    profile: StageProfile,
    limits: Mapping[PlacementKind, Callable[[Partition], float]],
    *,
    halves: Sequence[Loads] = (),
    gain: float | None = None,
    num_microbatches: int,
    splittable: bool,
    pieces: int = DEFAULT_PIECES,
    also: Sequence[str] = (),
    until_s: float = math.inf,
    num_slices: int = 1,
) -> Decision:
    """Jointly chooses the placement, partition, schedule and activation limit of a job.

    For each placement, partitions near a balanced partition are compared under a few good
    schedules. Then all schedules are compared under the best partition.

    Args:
        loads: Measured times and memory of the stages under the current placement and partition.
        profile: Measured times of actions, including their variation, and times of messages.
        limits: For each placement, a function that takes a partition and returns the maximum amount
            of activations that a rank may hold. The current placement comes first. The unit is the
            size of one microbatch's activations in all stages of a rank.
        halves: Loads measured in separate subsets of the steps. A move must save enough time under
            each of these loads.
        gain: Minimum fraction of the step time that moving layers must save, or ``None`` if layers
            must not be moved.
        num_microbatches: Number of microbatches per step.
        splittable: Whether the model can compute weight gradients as separate actions (W).
        pieces: Maximum number of W actions per weight gradient.
        also: Names of additional schedules and run-time scheduling rules to simulate.
        until_s: Deadline as a value of ``time.monotonic``. No candidates are simulated after the
            deadline.
        num_slices: Number of slices per microbatch, or 1 for whole microbatches.

    Raises:
        ScheduleError: No schedule fits into memory.

    Source: AdaPtis, arXiv 2509.23722, which also chooses placement, partition and schedule
    together, but with a different search algorithm.
    """
    job = _Job(
        profile=profile,
        limits=limits,
        num_microbatches=num_microbatches,
        splittable=splittable,
        pieces=pieces,
        also=also,
        until_s=until_s,
        num_slices=num_slices,
    )
    present = loads.partition
    errors = []
    stay: ScheduleChoice | None = None
    choice: ScheduleChoice | None = None
    moves: list[tuple[float, Partition, ScheduleChoice]] = []
    for kind, moves_layers in product(limits, (False, True) if gain is not None else (False,)):
        if stay is not None and time.monotonic() >= until_s:
            break
        placed = loads.placed(kind)
        try:
            chosen = job.choose_for(placed, present, (stay, choice), moves_layers)
        except ScheduleError as error:
            errors.append(error)
            continue
        if chosen is None:
            continue
        partition, choice = chosen
        if placed is loads and not moves_layers:
            stay = choice
            continue
        least = gain if moves_layers and gain is not None else PLACEMENT_GAIN
        if stay is None or all(
            job.step_s(choice, part, partition) < job.step_s(stay, part, present) * (1 - least)
            for part in (loads, *halves)
        ):
            moves.append((job.step_s(choice, loads, partition), partition, choice))
    if not moves and stay is None:
        raise errors[0]
    return _decision(loads, moves, stay)


def _decision(
    loads: Loads, moves: list[tuple[float, Partition, ScheduleChoice]], stay: ScheduleChoice | None
) -> Decision:
    """Chooses the move with the shortest step time, or no move if ``moves`` is empty.

    Args:
        loads: Measured times and memory under the current placement and partition.
        moves: Possible moves of stages or layers to other ranks. Each entry contains the step time
            in seconds after the move, the new partition and the schedule.
        stay: Best schedule without a move, or ``None`` if no schedule fits into memory.
    """
    if not moves:
        assert stay is not None
        return Decision(text=stay.reason, stay=stay.best)
    step_s, partition, choice = min(moves, key=lambda move: move[0])
    text = choice.reason
    new_partition = None if partition == loads.partition else partition
    if stay is not None:
        layers = "-".join(map(str, loads.partition))
        layers_text = "" if new_partition is None else f" of {layers} layers"
        step_ms = number_text(stay.step_s * 1e3, 4)
        text += f"; with the {loads.placement.kind}{layers_text}, a step takes {step_ms} ms at best"
    best = None if stay is None else stay.best
    return Decision(
        text=text,
        stay=best,
        move=choice.best,
        partition=new_partition,
        present_s=None if stay is None else stay.step_s,
        step_s=step_s,
    )


class _Runs:
    """Simulates steps. Each simulation loop is compiled after it has simulated enough actions.

    Args:
        num_microbatches: Number of microbatches per step.
    """

    def __init__(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        # Maps the name of each simulation loop to the number of actions that it has simulated.
        self._actions: Counter[str] = Counter()

    def evaluate(self, candidate: Candidate, profile: StageProfile) -> CandidateOutcome:
        """Simulates one step of ``candidate`` with the times in ``profile``."""
        loop = loop_of(candidate)
        self._actions[loop] += num_actions(candidate, self._num_microbatches)
        return evaluate(candidate, self._num_microbatches, profile, (0,), self._actions[loop])


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Inputs that are constant during a call of :func:`choose_together`, and methods that use them.

    Attributes:
        profile: Measured times of actions, including their variation, and times of messages.
        limits: For each placement, a function that takes a partition and returns the maximum amount
            of activations that a rank may hold.
        num_microbatches: Number of microbatches per step.
        splittable: Whether the model can compute weight gradients as separate actions (W).
        pieces: Maximum number of W actions per weight gradient.
        also: Names of additional schedules and run-time scheduling rules to simulate.
        until_s: Deadline as a value of ``time.monotonic``. No candidates are simulated after the
            deadline.
        num_slices: Number of slices per microbatch, or 1 for whole microbatches.
    """

    profile: StageProfile
    limits: Mapping[PlacementKind, Callable[[Partition], float]]
    num_microbatches: int
    splittable: bool
    pieces: int
    also: Sequence[str]
    until_s: float
    num_slices: int

    @cached_property
    def _runs(self) -> _Runs:
        return _Runs(self.num_microbatches)

    def _profile_of(self, loads: Loads, partition: Partition) -> StageProfile:
        """Returns a copy of the measured profile with the stage times for ``partition``."""
        return replace(self.profile, times=loads.stage_times(partition))

    def fastest(self, loads: Loads, partition: Partition, *, quick: bool = False) -> ScheduleChoice:
        """Returns the fastest schedule for ``partition`` with the measured times in ``loads``.

        If ``quick`` is true, fewer simulations are run.
        """
        return choose(
            self._profile_of(loads, partition),
            placement=loads.placement,
            num_microbatches=self.num_microbatches,
            most=self.limits[loads.placement.kind](partition),
            splittable=self.splittable,
            pieces=self.pieces,
            also=self.also,
            quick=quick,
            until_s=self.until_s,
            num_slices=self.num_slices,
        )

    def choose_for(
        self,
        loads: Loads,
        present: Partition,
        earlier: Sequence[ScheduleChoice | None],
        moves_layers: bool,
    ) -> tuple[Partition, ScheduleChoice] | None:
        """Chooses a partition and its fastest schedule for the placement of ``loads``.

        Args:
            loads: Measured times and memory, converted to the placement to use.
            present: Current number of layers of each stage.
            earlier: Choices made earlier for other placements or partitions. Their schedules are
                also compared.
            moves_layers: Whether to choose a new partition.

        Returns:
            Partition and schedule, or ``None`` if the best partition is the current partition.
        """
        bests = [choice.best for choice in earlier if choice is not None]
        candidates = [best for best in bests if best.placement == loads.placement]
        partition = self.best_partition(loads, candidates) if moves_layers else present
        if moves_layers and partition == present:
            return None
        return partition, self.fastest(loads, partition)

    def best_partition(self, loads: Loads, candidates: list[Candidate]) -> Partition:
        """Returns the partition with the shortest simulated step, among those near a balanced one.

        Args:
            loads: Measured times and memory of the stages.
            candidates: Schedules under which partitions are compared. The best few schedules for a
                balanced partition are also used.
        """
        start = balanced(loads)
        limit = self.limits[loads.placement.kind]
        leading = self.fastest(loads, start, quick=True).outcomes[:_ORDERS]
        candidates = [*candidates, *(outcome.candidate for outcome in leading)]

        @cache
        def step_s(partition: Partition) -> float:
            times = self._profile_of(loads, partition)
            most = with_rounding(limit(partition))
            runs = (self._runs.evaluate(candidate, times) for candidate in candidates)
            return min((run.mean_s for run in runs if run.peak_units <= most), default=math.inf)

        return _quickest(loads, start, step_s)[0]

    def step_s(self, choice: ScheduleChoice, loads: Loads, partition: Partition) -> float:
        """Returns the simulated step time of ``choice`` under ``partition``, in seconds."""
        times = self._profile_of(loads.placed(choice.best.placement.kind), partition)
        return self._runs.evaluate(choice.best, times).mean_s


def balanced(loads: Loads) -> Partition:
    """Returns a partition under which the slowest rank is about as fast as possible."""
    outside_and_layers = loads.beside(), loads.whole()
    slowest = max(map(sum, zip(*outside_and_layers, strict=True)))
    quickest = max(loads.beside())
    filled = loads.partition
    for _ in range(_HALVINGS):
        pace = (slowest + quickest) / 2
        partition = _filled(loads, pace)
        if partition is None:
            quickest = pace
        else:
            filled, slowest = partition, pace
    ends = [end for end in (_descended(loads, loads.partition), filled) if loads.fits(end)]
    return min(ends, key=lambda partition: max(loads.paces(partition)), default=loads.partition)


def _quickest(
    loads: Loads, start: Partition, step_s: Callable[[Partition], float]
) -> tuple[Partition, float]:
    """Finds a fast partition by moving single layers of the current partition or of ``start``.

    If several partitions are about equally fast, the one that moves the fewest layers to a
    different rank is returned.

    Returns:
        Partition, and its step time in seconds.
    """
    present = loads.partition
    tried = {partition: step_s(partition) for partition in (present, start)}
    best = min(tried, key=tried.__getitem__)
    while len(tried) < _SIMULATIONS:
        better = None
        for near in _neighbours(loads, best):
            if near in tried or len(tried) >= _SIMULATIONS:
                continue
            tried[near] = step_s(near)
            if tried[near] < tried[best] * (1 - _LEAST_GAIN):
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
    """Assigns to each stage, in order, as many layers as ``pace`` and the memory allow.

    ``pace`` is the maximum time per microbatch of each rank, in seconds.

    Returns:
        Number of layers in each stage, or ``None`` if the stages cannot hold all layers.
    """
    placement = loads.placement
    kinds = loads.kinds or (0,) * sum(loads.partition)
    seconds = [pace - beside for beside in loads.beside()]
    space = [min(most, _UNLIMITED) for most in loads.most_layers]
    open_stages = [placement.num_chunks] * placement.num_ranks
    layers = [0] * placement.num_stages
    next_layer = 0
    for stage in range(placement.num_stages):
        rank = placement.locate(stage)[0]
        # A rank's remaining time and memory are divided equally among its remaining stages, so
        # reserve a share for the later stages.
        others = 1 - 1 / open_stages[rank]
        least_s, least = seconds[rank] * others - _LEAST_S, space[rank] * others - _ROUNDING
        open_stages[rank] -= 1
        while next_layer < len(kinds):
            left_s = seconds[rank] - sum(loads.layer_s[rank][kinds[next_layer]])
            left = space[rank] - (loads.sizes[rank][kinds[next_layer]] if loads.sizes else 1.0)
            if left_s < least_s or left < least:
                break
            seconds[rank], space[rank] = left_s, left
            layers[stage] += 1
            next_layer += 1
    return tuple(layers) if next_layer == len(kinds) else None


def _descended(loads: Loads, partition: Partition) -> Partition:
    """Moves single layers of ``partition`` between stages as long as the slowest rank improves."""
    pace = max(loads.paces(partition))
    better = True
    while better:
        better = False
        for near in _neighbours(loads, partition, pace):
            if (near_pace := max(loads.paces(near))) < pace * (1 - _ROUNDING):
                partition = near
                pace = near_pace
                better = True
                break
    return partition


def _neighbours(loads: Loads, partition: Partition, least: float = 0.0) -> Iterator[Partition]:
    """Yields the partitions that result from moving one layer of ``partition`` to another stage.

    Partitions that do not fit into memory are skipped. Moves from the slowest rank come first, and
    among these, moves to the fastest rank.

    Args:
        loads: Measured times and memory of the stages.
        partition: Number of layers of each stage.
        least: Minimum time per microbatch, in seconds, of a rank that may lose a layer. Moving a
            layer away from a faster rank would not help the slowest rank.
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
