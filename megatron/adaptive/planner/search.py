"""Searches for the best plan for a model on a cluster, and bounds its distance from the optimum.

The search is a branch and bound over three levels of choices::

    shape       tensor-parallel size, replicas, microbatch, recompute, optimizer, ...
      level     nodes in use, number of stages, class of the first stage
        plan    class and layers of every stage

1. A quick lower bound is computed for every shape (:meth:`Searcher._work_s`): the total work
   divided evenly among all GPUs.
2. A first pass goes through the shapes in ascending order of their estimated step time. It computes
   the bounds of all levels of each shape (``search_kernel``), and searches the most promising
   level. This finds good plans early.
3. Then shapes are searched completely, starting with the lowest bound. A shape or level is skipped
   if its bound is not below the time of the best plan so far. If all remaining shapes and levels
   have been skipped or searched, the best plan is optimal.

The search simulates a limited number of pipelines within a limited CPU time. If a limit ends the
search early, the result states how much better the skipped plans can be at most. For example,
:attr:`SearchResult.gap` is 0.03 if the best plan takes 100 ms and the lowest bound of the skipped
plans is 97 ms. If too many orders of nodes are possible, only some of them are searched. A weaker
bound over all orders then applies (``stage_classes.capacity_bound``).

The search itself simulates only 1F1B. The actions of 1F1B run in a fixed order, so shorter
durations never make a plan slower, and lower bounds are valid. If other schedules are allowed, the
fastest 1F1B pipeline of each shape and set of nodes is also timed under each of these schedules,
and the fastest result is kept. For schedules with several chunks per rank, the pipeline's layers
are partitioned again. The search then uses a bound that holds for every schedule
(:meth:`Searcher._work_s`).

If sequences may be cut into slices, shapes with slices are searched after all other shapes, in the
same way. Such a shape is searched as a 1F1B pipeline whose microbatches are the slices. The
backward passes of a microbatch start after the forward passes of all its n slices, so rank r of p
holds p - r - 1 + n slices. For comparison, rank r holds p - r microbatches under 1F1B without
slices. The resulting pipelines are timed under run-time rules that order slices. If documents are
packed into rows and cut, the search assumes that all slices of a step have the mean cost, and n is
the number of slices in the longest row. The resulting pipelines are timed with the real rows
(``row_times``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megatron.adaptive.config.schedule_specs import selectable_names
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.planner import search_kernel
from megatron.adaptive.planner.chunk_partition import (
    CHUNKED,
    ChunkedPipeline,
    hand_over,
    handed_over,
    scheduled,
)
from megatron.adaptive.planner.cost import StageSums, predict
from megatron.adaptive.planner.layer_costs import OURS, in_flight, known_documents
from megatron.adaptive.planner.plan import Plan, StagePlace, place_stage
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.search_kernel import LevelBounds, search_s
from megatron.adaptive.planner.search_levels import DpStates, make_dp_states
from megatron.adaptive.planner.search_options import (
    LEAST_TOKENS,
    Best,
    Found,
    Objective,
    SearchOptions,
    SearchResult,
    best_of_each,
)
from megatron.adaptive.planner.stage_classes import (
    ShapeChoice,
    StageClass,
    Tables,
    capacity_bound,
    most_rate,
    only_partition,
    stage_classes,
    take_nodes,
)
from megatron.adaptive.schedule.catalog import is_rule

_FEW_LEVELS = 2000
"""Maximum number of levels (sets of nodes) per combination of parallel sizes in the first pass."""
_SMALL_LEVELS = 200
"""Maximum number of levels of a combination of sizes that the first pass searches completely."""
_WHOLE_BACKWARD = selectable_names(
    lambda spec: spec.planned != "no" and spec.splits_backward == "never"
)
_MOST_SLICES = 1024
"""Maximum total number of slices per step. With this many slices, pipelines already have almost no
idle time."""
_ROW_STEPS = 500_000
"""Maximum number of actions to simulate for each combination of sizes, nodes and stages."""
_FORWARD_BACK = 2.5
"""A pipeline is also timed under other schedules if its 1F1B step is shorter than this multiple of
the best step time. A 1F1B step takes at most the time of one microbatch through all stages plus the
work of the busiest rank. Each of these two times is a lower bound for every schedule, so no
schedule takes less than half of the 1F1B step time.
"""
_NO_HOPE = 1.08
"""Maximum ratio of the step time of an initial partition into chunks to the best step time so far.
Slower partitions are not improved."""
_HAND_OVERS = 30
"""Maximum number of pipelines to simulate while moving layers between stages."""


@dataclass(kw_only=True, eq=False)
class SearchShape:
    """A combination of parallel sizes, microbatch size and memory settings, with lower bounds.

    Attributes:
        classes: Stage classes (parallel sizes and node types) that pipelines of the shape can use.
        choice: Settings that all stages share.
        bound_s: Lower bound of the step time in seconds, known before the shape is searched.
        least_s: Lower bound of the step time in seconds, known after :meth:`Searcher.visit` ran.
        least_value: Lower bound of the objective (time or price), known after the first pass.
        partial: Whether :meth:`Searcher.visit` skipped some orders of nodes.
    """

    classes: tuple[StageClass, ...]
    choice: ShapeChoice
    bound_s: float
    least_s: float = 0.0
    least_value: float = math.inf
    partial: bool = False

    def key(self, used: tuple[int, ...], stages: int) -> Any:
        """Returns a key that is equal for plans that differ only in how they save memory."""
        widths = tuple(stage_class.widths for stage_class in self.classes)
        return widths, self.choice.context_ranks, used, stages, self.choice.slice_tokens


class _Goal(NamedTuple):
    """A level (set of nodes and class of first stage) that may contain one of the best pipelines.

    Attributes:
        value: Lower bound of the objective's value (step time or price).
        seconds: Lower bound of the step time in seconds.
        level: Index of the level in ``DpStates``.
        price: Price per hour of the level's nodes.
        likely_s: Estimated step time in seconds. If schedules other than 1F1B are allowed, the
            estimate is lower than the bound for 1F1B.
    """

    value: float
    seconds: float
    level: int
    price: float
    likely_s: float


class _Bounded(NamedTuple):
    """A shape (combination of parallel sizes) and the bounds of all its levels.

    Attributes:
        shape: Parallel sizes and settings that all pipelines of the shape have in common.
        levels: Levels of the shape. Each level is a set of nodes with the class of its first stage.
        arrays: Costs of all possible stages, and graph of levels, as ``search_kernel.ShapeArrays``.
        bounds: Lower bounds of all levels, computed by ``search_kernel.bound_levels``.
        goals: Levels that may contain a better plan, starting with the lowest bound.
    """

    shape: SearchShape
    levels: DpStates
    arrays: Any
    bounds: LevelBounds
    goals: list[_Goal]


class _Cutting(NamedTuple):
    """One option for cutting the microbatches of a step into slices.

    Attributes:
        num_items: Number of slices in all microbatches of a replica. If microbatches are not cut,
            this is the number of microbatches.
        slices: Number of slices of each sequence.
        tokens: Number of tokens per slice of packed documents, or ``None`` if all sequences have
            the same length.
    """

    num_items: int
    slices: int = 1
    tokens: int | None = None


class _Widths(NamedTuple):
    """Parallel sizes and microbatch size of a stage.

    Attributes:
        tp: Tensor-parallel size, which is the number of GPUs per replica.
        dp: Number of data-parallel replicas.
        micro_batch: Number of samples per microbatch.
        context_ranks: Context-parallel size, which is the number of ranks that share a sequence.
    """

    tp: int
    dp: int
    micro_batch: int
    context_ranks: int


class Searcher:
    """Searches for plans on a cluster. All searches of an object share its cached cost tables.

    Args:
        inputs: Model, cluster and profile of layer times.
        global_batch: Number of samples per step.
        options: Settings from which the search may choose, and limits of the search.
    """

    def __init__(
        self, inputs: PlanInputs, *, global_batch: int, options: SearchOptions | None = None
    ) -> None:
        self.inputs = inputs
        self.model, self.cluster, self.profile = inputs.model, inputs.cluster, inputs.profile
        self.options = options or SearchOptions()
        self.global_batch = global_batch
        self._tables = Tables(inputs)
        self._levels: dict[Any, DpStates] = {}
        self._counts = tuple(group.count for group in inputs.cluster.groups)
        self._least_price = min(group.type.price_per_hour for group in inputs.cluster.groups)
        self._islands = any(group.type.islands for group in inputs.cluster.groups)
        self._exact = self.options.schedules == ("1f1b",)
        # Other schedules idle less than 1F1B. Assume a third of the idle time of 1F1B.
        self._idle = 1.0 if self._exact else 1 / 3
        self._slack = 1.0 if self._exact else _FORWARD_BACK
        self._whole_backward = set(self.options.schedules) <= set(_WHOLE_BACKWARD)
        self._until = math.inf
        self.timed = 0
        self.configurations = 0
        self.placements = 0

    def search(self, objective: Objective | None = None) -> SearchResult:
        """Finds the best plans for ``objective``.

        Args:
            objective: Quantity to minimize, and limits. Defaults to the step time without limits.
        """
        goal = objective or Objective()
        best = Best(self.options.top * max(1, len(self.options.slice_tokens)), goal)
        left_out = math.inf
        for slices in sorted({number > 1 for number in self.options.slices}):
            shapes = [shape for shape in self.shapes() if (shape.choice.slices > 1) == slices]
            left_out = min(left_out, self._search_shapes(shapes, best))
        plans = best_of_each(map(self._handed_over, best.sorted()), self.options.top)
        bound = min(left_out, plans[0].value) if plans else left_out
        return SearchResult(
            plans=plans, bound=bound, timed=self.timed, configurations=self.configurations
        )

    def _search_shapes(self, shapes: Sequence[SearchShape], best: Best) -> float:
        """Searches ``shapes`` until all of them are searched or the CPU time limit is reached.

        Args:
            shapes: Shapes to search, starting with the lowest estimated step time.
            best: Best plans so far. The search adds better plans to it.

        Returns:
            Lower bound of the objective (step time or price) of all plans that were not searched.
        """
        visited = []
        self._until = search_s() + self.options.most_cpu_s * len(self._counts)
        left_out = math.inf
        skipped = []
        for shape in shapes:
            if search_s() > self._until:
                skipped.append(shape)
            elif shape.bound_s < best.most_seconds(self._least_price):
                self._visit_first(shape, best)
                visited.append(shape)
        for shape in sorted(visited, key=lambda visited_shape: visited_shape.least_value):
            if search_s() > self._until:
                left_out = min(left_out, shape.least_value)
            else:
                left_out = min(left_out, self._exhaust(shape, best))
        for shape in sorted(skipped, key=lambda skipped_shape: skipped_shape.bound_s):
            if best.value(shape.bound_s, self._least_price) >= left_out:
                break
            left_out = min(left_out, best.value(self._capacity_s(shape), self._least_price))
        return left_out

    def _handed_over(self, entry: Found) -> Found:
        """Moves layers between the stages of the plan in ``entry`` as long as the step gets faster.

        The plan is returned unchanged if 1F1B is the only schedule, because the search has already
        found the best partition in this case.
        """
        plan = entry.plan
        if self._exact or self.options.partition or not plan.uniform or self.model.splits:
            return entry
        plan, seconds = handed_over(plan, entry.seconds, self.inputs, _HAND_OVERS)
        value = entry.value * seconds / entry.seconds
        return replace(entry, plan=plan, seconds=seconds, value=value)

    def shapes(self) -> list[SearchShape]:
        """Returns all shapes (combinations of parallel sizes), sorted by estimated step time."""
        options = self.options
        shapes = []
        for classes, microbatches, shared in self._class_sets():
            measured = tuple(stage_class for stage_class in classes if self._known(stage_class))
            spreads = [
                spread
                for spread in self.model.expert_ranks
                if spread in (options.expert_ranks or self.model.expert_ranks)
                and all(stage_class.dp % spread == 0 for stage_class in classes)
            ]
            parallel_choices = self._sequence_parallel(classes, shared)
            sharding = options.distributed_optimizer
            cuts = self._cuts(classes, microbatches, shared)
            ways = itertools.product(cuts, options.recompute, sharding, spreads, parallel_choices)
            for cut, recompute, sharded, spread, is_parallel in ways if measured else ():
                if cut.tokens is not None and is_parallel and cut.tokens % classes[0].tp:
                    continue  # Skip slices that tensor-parallel ranks cannot divide evenly.
                if sharded and all(stage_class.dp == 1 for stage_class in classes):
                    continue
                choice = ShapeChoice(
                    microbatches=cut.num_items,
                    recompute=recompute,
                    distributed_optimizer=sharded,
                    overlap_reduce=options.overlap_reduce,
                    sequence_parallel=is_parallel,
                    expert_ranks=spread,
                    context_ranks=shared,
                    slices=cut.slices,
                    slice_tokens=cut.tokens,
                )
                if (
                    not is_parallel
                    and True in parallel_choices
                    and self._tables.fits_split(measured, choice)
                ):
                    continue
                bound = self._work_s(measured, choice, self._counts, self._most_stages(measured))
                shapes.append(SearchShape(classes=measured, choice=choice, bound_s=bound))
        return sorted(shapes, key=self._guess_s)

    def _cuts(
        self, classes: Sequence[StageClass], microbatches: int, shared: int
    ) -> tuple[_Cutting, ...]:
        """Returns the options that the search tries for cutting sequences or documents into slices.

        Args:
            classes: Stage classes that a pipeline may combine.
            microbatches: Number of microbatches per step.
            shared: Number of ranks that share a sequence.
        """
        has_rule = any(is_rule(name) for name in self.options.schedules)
        most = _MOST_SLICES // microbatches
        is_cut = has_rule and shared == 1 and self._most_stages(classes) > 1
        is_cut = is_cut and not self.options.unequal
        if not self.options.slice_tokens:
            numbers = (n for n in self.options.slices if n == 1 or (is_cut and n <= most))
            return tuple(_Cutting(microbatches * n, slices=n) for n in numbers)
        if not is_cut or any(stage_class.micro_batch != 1 for stage_class in classes):
            return ()
        items = [(n, known_documents(self.inputs).mean_items(n)) for n in self.options.slice_tokens]
        # Each microbatch of a replica is one document. Round the number of slices down, so that
        # lower bounds remain valid.
        share = microbatches / self.global_batch
        return tuple(_Cutting(max(1, int(count * share)), tokens=n) for n, count in items)

    def _sequence_parallel(self, classes: Sequence[StageClass], shared: int) -> tuple[bool, ...]:
        """Returns which settings of sequence parallelism to try: off, on or both."""
        widest = max((stage_class.tp for stage_class in classes), default=1)
        if widest == 1:
            return (False,)
        choices = (True,) if self.model.has_experts else self.options.sequence_parallel
        divided = self.model.divides_sequence(widest, shared, True)
        return tuple(is_on for is_on in choices if divided or not is_on)

    def _guess_s(self, shape: SearchShape) -> float:
        """Estimates the step time of ``shape`` in seconds for equal stages on all GPUs."""
        stages = min(self._most_stages((stage_class,)) for stage_class in shape.classes)
        return shape.bound_s * (1 + (stages - 1) * self._idle / shape.choice.microbatches)

    def _class_sets(self) -> Iterator[tuple[tuple[StageClass, ...], int, int]]:
        """Yields each set of stage classes that a pipeline may combine.

        Each item also contains the number of microbatches per step and the number of ranks that
        share a sequence.
        """
        waves: dict[int, list[StageClass]] = {}
        for tp, dp, micro_batch, shared in self._widths():
            classes = stage_classes(self.cluster, tp=tp, dp=dp * shared, micro_batch=micro_batch)
            if self.options.unequal and shared == 1:
                waves.setdefault(dp * micro_batch, []).extend(classes)
            elif classes:
                yield classes, self.global_batch // (dp * micro_batch), shared
        for wave, wave_classes in waves.items():
            yield tuple(wave_classes), self.global_batch // wave, 1

    def _widths(self) -> Iterator[_Widths]:
        """Yields all parallel sizes of a stage that the options, model and cluster allow."""
        options, batch, model = self.options, self.global_batch, self.model
        most = max(model.sequence // LEAST_TOKENS, 1)
        shares = [
            shared
            for shared in options.context_ranks or range(1, most + 1)
            if model.divides_sequence(1, shared, False)
        ]
        widest = max(group.type.gpus for group in self.cluster.groups)
        widths = [
            tp
            for tp in options.tp or range(1, widest + 1)
            if tp <= self.model.max_tp and self.model.max_tp % tp == 0
            if any(group.type.gpus % tp == 0 for group in self.cluster.groups)
        ]
        for tp in widths:
            most = self.cluster.num_gpus // tp
            for dp, shared in itertools.product(options.dp or range(1, most + 1), shares):
                if batch % dp or dp * shared > most:
                    continue
                share = batch // dp
                for micro_batch in options.micro_batch or range(1, share + 1):
                    if share % micro_batch == 0:
                        yield _Widths(tp, dp, micro_batch, shared)

    def _known(self, stage_class: StageClass) -> bool:
        """Returns whether the profile contains all layer times for all node types of a class."""
        return all(
            self.profile.knows(kind, node.gpu, stage_class.tp)
            for node in self._tables.types(stage_class)
            for kind in set(self.model.layers)
        )

    def _work_s(
        self,
        classes: Sequence[StageClass],
        choice: ShapeChoice,
        nodes: Sequence[int],
        most_stages: int,
        *,
        exactly: bool = False,
    ) -> float:
        """Returns a lower bound of the step time in seconds that is valid for every schedule.

        The result is the maximum of three bounds:

        - Time for all work, gradient reductions and the optimizer, divided evenly among the nodes.
          Rank r is idle until each of the r stages before it has run the forward pass of at least
          one layer.
        - Duration of one microbatch's forward and backward passes through all layers.
        - Memory limit. The activations of a microbatch stay in memory between its forward and
          backward pass, so the memory that is not used by weights limits the number of microbatches
          in flight.

        Args:
            classes: Stage classes that the pipeline can use.
            choice: Settings that all stages share.
            nodes: Number of nodes of each type that may be used.
            most_stages: Maximum number of pipeline ranks.
            exactly: Whether the pipeline has exactly ``most_stages`` ranks.
        """
        rates, totals, memories = [], [], []
        microbatches = choice.microbatches
        for index, group in enumerate(self.cluster.groups):
            for stage_class in classes if nodes[index] else ():
                if stage_class.nodes[index]:
                    sums = self._tables.totals(
                        group.type, stage_class, choice, self._whole_backward
                    )
                    microbatch_s = sums.work_s + sums.after_s / microbatches
                    gpus = stage_class.tp * stage_class.dp
                    stages = nodes[index] * group.type.gpus / gpus
                    rates.append((index, 1 / max(microbatch_s, 1e-30), stages))
                    totals.append(sums)
                    context = self.profile.context_bytes.get(group.type.gpu, OURS.context_bytes)
                    memories.append((index, group.type.memory_bytes - context, stages))
        whole_s = microbatches / most_rate(rates, most_stages)
        if not rates:
            return whole_s
        slowest = min(rate for _, rate, _ in rates)
        fastest = max(rate for _, rate, _ in rates)
        ranks = np.arange(most_stages if exactly else 1, most_stages + 1)
        lost = min(sums.least_s for sums in totals) * slowest * (ranks - 1) * (ranks - 2) / 2
        each_s = (microbatches + lost) / (ranks * fastest)
        if exactly:
            whole_s *= 1 + float(lost[0]) / microbatches
        whole_s = max(whole_s, float(each_s.min()))
        if self.options.unequal:
            # The two bounds below require that the trainer uses this microbatch size, but for
            # unequal stages, it may use a smaller one.
            return whole_s
        free = most_rate(memories, most_stages) - min(sums.held_bytes for sums in totals)
        if free < min(sums.kept_bytes for sums in totals):
            return math.inf
        stay = microbatches * min(sums.stay for sums in totals)
        return max(whole_s, min(sums.way_s for sums in totals), stay / max(free, 1.0))

    def _most_stages(self, classes: Sequence[StageClass]) -> int:
        """Returns the maximum number of stages in a pipeline whose stages belong to ``classes``."""
        if self.options.pp:
            return max(self.options.pp)
        narrow = min(stage_class.tp * stage_class.dp for stage_class in classes)
        return max(1, min(self.cluster.num_gpus // narrow, self.model.num_layers))

    def _bounded(self, shape: SearchShape, best: Best, most_levels: int) -> _Bounded:
        """Computes bounds for the node sets (levels) of ``shape``, and selects levels to search."""
        most = self._most_stages(shape.classes)
        blocks = tuple((stage_class.nodes, stage_class.block) for stage_class in shape.classes)
        key = (blocks, most, most_levels)
        if key not in self._levels:
            self._levels[key] = make_dp_states(
                shape.classes, self._counts, most_stages=most, most_levels=most_levels
            )
        levels = self._levels[key]
        costs = self._tables.arrays(shape.classes, shape.choice)
        if self.options.partition:
            costs["after"] = only_partition(costs["after"], self.options.partition)
        held = self._held(shape.choice, most)
        arrays = search_kernel.ShapeArrays(
            **costs,
            **levels.arrays,
            held=np.array(held[::-1], dtype=np.float64),
            microbatches=shape.choice.microbatches,
        )
        size = (arrays.level_class.shape[0], arrays.forward.shape[1])
        bounds = search_kernel.LevelBounds(*(np.full(size, np.inf) for _ in range(3)))
        most_s = best.most_seconds(self._least_price)
        search_kernel.bound_levels(arrays, self._slack * most_s, bounds)
        goals = []
        complete = np.array(levels.complete, dtype=np.int64)
        self.configurations += len(complete)
        self.placements += levels.placements
        for level in complete[bounds.done[complete, 0] < np.inf].tolist():
            used = levels.used[level]
            stages = int(arrays.level_follow[level]) + 1
            if self.options.pp and stages not in self.options.pp:
                continue
            if self.options.all_nodes and used != self._counts:
                continue
            seconds = float(bounds.done[level, 0])
            if stages > 1:
                seconds += float(arrays.tied[:, arrays.level_class[level], :].min())
            price = sum(
                count * group.type.price_per_hour
                for count, group in zip(used, self.cluster.groups, strict=True)
            )
            ordered_s = seconds
            if not self._exact:
                seconds = self._work_s(shape.classes, shape.choice, used, stages, exactly=True)
            if seconds < best.most_seconds(price):
                # The best schedule probably has only a fraction of 1F1B's idle time, so the
                # estimate contains only this fraction.
                idle = (stages - 1) / shape.choice.microbatches
                likely_s = ordered_s * (1 + self._idle * idle) / (1 + idle)
                goals.append(_Goal(best.value(seconds, price), seconds, level, price, likely_s))
        return _Bounded(shape, levels, arrays, bounds, sorted(goals))

    def _held(self, choice: ShapeChoice, ranks: int) -> tuple[float, ...]:
        """Returns how many microbatches or slices each of ``ranks`` ranks holds under 1F1B."""
        slices, share = choice.slices, self.model.attention_share
        if choice.slice_tokens is not None:
            slices, share = known_documents(self.inputs).needed_slices(choice.slice_tokens), 0.0
        microbatches = -(-choice.microbatches // slices)
        return in_flight("1f1b", ranks, 1, microbatches, slices, attention_share=share)

    def visit(
        self, shape: SearchShape, best: Best, most_leaves: int, *, finish: bool = True
    ) -> list[tuple[float, float]]:
        """Searches all levels (sets of nodes) of a shape that may contain a better plan.

        Args:
            shape: Combination of parallel sizes to search, from :meth:`shapes`.
            best: Best plans so far. The search adds better plans to it.
            most_leaves: Maximum number of pipelines to simulate per level.
            finish: Whether the pipelines are also timed under schedules other than 1F1B.

        Returns:
            Lower bound in seconds and price per hour of each level that was not searched
            completely.
        """
        if max(shape.bound_s, shape.least_s) >= best.most_seconds(self._least_price):
            return []
        bounded = self._bounded(shape, best, self.options.most_levels)
        shape.partial = not bounded.levels.whole
        shape.least_s = min((goal.seconds for goal in bounded.goals), default=math.inf)
        missed = []
        for goal in bounded.goals:
            if goal.seconds >= best.most_seconds(goal.price):
                continue
            if search_s() > self._until:
                missed.append((goal.seconds, goal.price))
                continue
            bound = self._search_goal(bounded, goal, best, most_leaves, finish)
            # ``bound`` holds for all pipelines of the level only if 1F1B is the only schedule.
            # With other schedules, use the level's own bound.
            missed.append((bound if self._exact else goal.seconds, goal.price))
        return [(seconds, price) for seconds, price in missed if seconds < best.most_seconds(price)]

    def _visit_first(self, shape: SearchShape, best: Best) -> None:
        """Computes bounds for all levels of a shape, and searches only the most promising level.

        If too many orders of nodes are possible, only orders in which nodes of the same type are
        adjacent are searched.
        """
        bounded = self._bounded(shape, best, min(_FEW_LEVELS, self.options.most_levels))
        shape.least_value = bounded.goals[0][0] if bounded.goals else math.inf
        if not (bounded.levels.whole and self._exact):
            least = best.value(self._capacity_s(shape), self._least_price)
            bound = shape.least_value if bounded.levels.whole else least
            shape.least_value = max(bound, least)
        is_small = len(bounded.levels.used) <= _SMALL_LEVELS
        for goal in sorted(bounded.goals, key=lambda goal: goal.likely_s)[:1]:
            # Small shapes are searched with the same limit as in the second pass. Otherwise, the
            # result would depend on the order of the shapes in the first pass.
            most_leaves = self.options.most_leaves if is_small else 10
            self._search_goal(bounded, goal, best, most_leaves, finish=True)

    def _capacity_s(self, shape: SearchShape) -> float:
        """Improves the lower bound of the step time in ``shape``, and returns it in seconds.

        The new bound is the larger of the old bound and ``stage_classes.capacity_bound``.
        """
        least_s = capacity_bound(self._tables, self.cluster, shape.classes, shape.choice)
        shape.bound_s = max(shape.bound_s, least_s)
        return shape.bound_s

    def _exhaust(self, shape: SearchShape, best: Best) -> float:
        """Searches all levels of ``shape``, and returns a lower bound for the skipped plans."""
        if shape.least_value >= best.worst_value():
            return math.inf
        missed = self.visit(shape, best, self.options.most_leaves)
        left_out = min((best.value(*entry) for entry in missed), default=math.inf)
        least = best.value(shape.bound_s, self._least_price)
        return least if shape.partial else max(left_out, least)

    def _search_goal(
        self, bounded: _Bounded, goal: _Goal, best: Best, most_leaves: int, finish: bool
    ) -> float:
        """Searches the pipelines of a level (set of nodes and class of the first stage).

        Returns:
            Lower bound in seconds of the pipelines that were not searched, or infinity if all were
            searched.
        """
        shape, arrays = bounded.shape, bounded.arrays
        level, price = goal.level, goal.price
        stages = int(arrays.level_follow[level]) + 1
        sizes = (stages + 1, stages, stages)
        fastest = search_kernel.BestPipeline(*(np.zeros(n, dtype=np.int64) for n in sizes))
        if not self._exact:
            rows = 2 * stages * shape.choice.microbatches
            most_leaves = min(most_leaves, max(10, _ROW_STEPS // rows))
        cap = self._slack * best.most_seconds(price)
        walk = search_kernel.make_walk(arrays, stages)
        seconds, left_out, timed = search_kernel.search_level(
            arrays, walk, level, bounded.bounds, cap, most_leaves, fastest
        )
        cuts = fastest.cuts
        if seconds < cap and left_out < seconds:
            walk.levels[:] = fastest.levels
            walk.kinds[:] = fastest.kinds

            def seconds_of(trial: Any) -> float:
                walk.cuts[:] = trial
                return float(search_kernel.leaf_s(arrays, walk, stages))

            cuts, seconds, more = hand_over(cuts, seconds, seconds_of, most_leaves)
            timed += more
        self.timed += timed
        if seconds < cap:
            numbers = [arrays.level_class[step] for step in fastest.levels.tolist()]
            classes = [shape.classes[number] for number in numbers]
            plan = self._plan(classes, shape.choice, cuts.tolist())
            key = shape.key(bounded.levels.used[level], stages)
            ordered_s = seconds
            if self._islands:
                # The kernel assumes that neighbours always share an island (a group of GPUs with
                # fast links). This may be wrong, so time the plan again.
                seconds = predict(plan, self.inputs).seconds
            elif len(plan.nodes) > 1:
                # The kernel assumes a link for each pair of stages, but pairs may share a link.
                seconds = max(seconds, StageSums.of(plan, self.inputs, OURS).busy_link.seconds)
            if seconds > ordered_s:
                # Another pipeline with the same nodes may now be faster than this one.
                left_out = min(left_out, ordered_s)
            allowed = "1f1b" in self.options.schedules and plan.uniform and not plan.is_cut
            if allowed and seconds < best.most_seconds(price):
                best.add(key, plan, float(seconds), price)
            if finish and not (self._exact and plan.uniform):
                least_s = float(seconds) if allowed else math.inf
                other_plans = self._other_schedules(plan, classes, bounded, best, price, least_s)
                for other_plan, other_s in other_plans:
                    if other_s < best.most_seconds(price):
                        best.add(key, other_plan, other_s, price)
        return float(left_out)

    def _other_schedules(
        self,
        plan: Plan,
        classes: Sequence[StageClass],
        bounded: _Bounded,
        best: Best,
        price: float,
        least_s: float,
    ) -> Iterator[tuple[Plan, float]]:
        """Yields variants of ``plan`` with other schedules, and their step times in seconds.

        Plans that do not fit into memory are skipped.

        Args:
            plan: Plan with the 1F1B schedule.
            classes: Stage class of each rank of the pipeline.
            bounded: Shape (parallel sizes) of the pipeline, with bounds for its node sets.
            best: Best plans so far.
            price: Price per hour of the pipeline's nodes.
            least_s: Step time in seconds under 1F1B, or infinity if it is unknown.
        """
        names = [name for name in self.options.schedules if name != "1f1b" or least_s == math.inf]
        if plan.is_cut:
            names = [name for name in names if is_rule(name) and plan.pp > 1]
        row = scheduled(plan, self.inputs, names)
        if row is not None and row.prediction.fits:
            least_s = min(least_s, row.prediction.seconds)
            yield row.plan, row.prediction.seconds
        if self.options.partition or not plan.uniform or plan.pp == 1 or self.model.splits:
            return
        shape = bounded.shape
        used = bounded.levels.used
        numbers = tuple(shape.classes.index(stage_class) for stage_class in classes)
        microbatches = shape.choice.microbatches
        rates = (1 / self._tables.pipeline_s(stage_class, shape.choice) for stage_class in classes)
        work_s = 1 / sum(rates)
        for order, (counts, same_placement) in CHUNKED.items():
            chosen = [name for name in names if name in same_placement]
            for chunks in counts if chosen else ():
                if chunks * plan.pp > self.model.num_layers:
                    continue
                # The best case is equal work in all chunks, so the time in this case is a lower
                # bound, up to rounding.
                waits = (plan.pp - 1) / chunks if order in _WHOLE_BACKWARD else 0.0
                even_s = work_s * (microbatches + waits)
                known_s = best.most_seconds(price) if len(used) > _SMALL_LEVELS else math.inf
                if even_s >= min(least_s, known_s):
                    continue
                try:
                    pipeline = ChunkedPipeline(
                        bounded.arrays, shape.classes, numbers, order, chunks
                    )
                    cuts = pipeline.best(_HAND_OVERS, _NO_HOPE * least_s)
                except ScheduleError:
                    continue  # Skip schedules that need more microbatches than the step has.
                self.timed += 1
                for name in chosen if cuts else ():
                    chunked = self._plan(classes, shape.choice, list(cuts), chunks, name)
                    row = scheduled(chunked, self.inputs, (name,))
                    if row is not None and row.prediction.fits:
                        yield row.plan, row.prediction.seconds

    def _plan(
        self,
        classes: Sequence[StageClass],
        choice: ShapeChoice,
        cuts: list[int],
        chunks: int = 1,
        schedule: str = "1f1b",
    ) -> Plan:
        """Creates a plan that gives each rank free nodes of its class, with fast links if possible.

        Args:
            classes: Stage class of each rank.
            choice: Settings that all stages share.
            cuts: Index of the first layer of each stage, followed by the number of layers.
            chunks: Number of stages (model chunks) per rank.
            schedule: Name of the pipeline schedule.
        """
        numbers = itertools.count()
        free = [list(itertools.islice(numbers, group.count)) for group in self.cluster.groups]
        first = [nodes[0] for nodes in free]
        places: list[StagePlace] = []
        position = 0
        nodes = list[int]()
        for stage, stage_class in enumerate(classes):
            opens = stage == 0 or position + 1 == classes[stage - 1].block
            position = 0 if opens else position + 1
            if opens:
                nodes = []
                for index, count in enumerate(stage_class.nodes):
                    node_type = self.cluster.groups[index].type
                    nodes += take_nodes(free[index], first[index], count, node_type)
            places.append(place_stage(self.cluster, nodes, *stage_class.widths, position=position))
        return Plan(
            tp=max(stage_class.tp for stage_class in classes),
            dp=classes[0].dp // choice.context_ranks,
            pp=len(classes),
            micro_batch=classes[0].micro_batch,
            global_batch=self.global_batch,
            partition=tuple(b - a for a, b in itertools.pairwise(cuts)),
            places=tuple(places),
            chunks=chunks,
            schedule=schedule,
            **choice.of_plan,
        )
