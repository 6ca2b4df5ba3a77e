"""Searches for the best plan for a model on a cluster, with a proof where that is affordable.

A shape is one choice of widths, microbatch, recompute and optimizer. For each, bounds over all
node orders, lengths of pipelines and partitions come from one table (``kernel``). The shapes are
then searched by bound, best first, until no bound is below what is known. Where the number of
pipelines timed is limited before that, the gap to the least bound left is reported. Where there are
too many orders of nodes to go through, weaker bounds hold for all of them at once.

The search stands on 1F1B, whose order is fixed: no plan gets slower when a duration shrinks. Where
other schedules may be chosen, the fastest pipeline of each set of nodes, length and shape is found
under 1F1B, then timed under every other schedule, with chunks divided anew. What counts, also for
limits and fronts, is the least of these. Its bound is what no schedule beats (``_work_s``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron.adaptive.config.schedule_specs import selectable_names
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.planner.chunk_partition import (
    ONE_CHUNK,
    ChunkedPipeline,
    hand_over,
    handed_over,
    scheduled,
)
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.layer_costs import OURS, in_flight
from megatron.adaptive.planner.model_description import RECOMPUTE
from megatron.adaptive.planner.plan import Plan, StagePlace, place_stage
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.search_kernel import search_s
from megatron.adaptive.planner.stage_classes import (
    DpStates,
    ShapeChoice,
    StageClass,
    Tables,
    capacity_bound,
    make_dp_states,
    most_rate,
    only_partition,
    stage_classes,
    take_nodes,
)

_FEW_LEVELS = 2000
_SMALL_LEVELS = 200
_CHUNKED = {
    "zb-v": ((2,), ("zb-v", "adaptive", "hinted")),
    "v-half": ((2,), ("v-half",)),
    "dualpipe-v": ((2,), ("dualpipe-v",)),
    "interleaved": ((2, 3, 4, 6, 8), ("interleaved", "combined-1f1b")),
    "breadth-first": ((2, 3, 4, 6, 8), ("breadth-first",)),
}
"""Orders that chunks are divided by: numbers of chunks, and schedules on the same placement."""
SEARCHED = tuple(dict.fromkeys((*ONE_CHUNK, *(n for _, names in _CHUNKED.values() for n in names))))
"""All schedules that can be asked for."""
_WHOLE_BACKWARD = selectable_names(
    lambda spec: spec.planned != "no" and spec.splits_backward == "never"
)
_ROW_STEPS = 500_000
"""Actions that are timed for one set of nodes, shape and length of pipeline."""
_FORWARD_BACK = 2.5
"""1F1B takes no more than a microbatch's way and the work of the busiest rank, which no schedule
beats: what takes this many times as long as a known plan is not worth another schedule."""
_NO_HOPE = 1.08
_HAND_OVERS = 30
LEAST_TOKENS = 4096
"""Tokens of a sequence that each rank has at least where nobody says how many share it."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Choices that are open to the search.

    Attributes:
        tp: tensor-parallel widths; empty for all that fit into a node. Likewise ``dp``, ``pp`` and
            ``micro_batch``.
        dp: numbers of replicas.
        pp: numbers of pipeline ranks.
        micro_batch: samples of a microbatch.
        recompute: of ``model.RECOMPUTE``.
        distributed_optimizer: which of off and on.
        overlap_reduce: whether the run overlaps the gradient reduction.
        sequence_parallel: which of off and on, where ``tp`` is above 1; with experts it is on.
        context_ranks: ranks that share each sequence; empty for what ``LEAST_TOKENS`` allows.
        expert_ranks: replicas that experts are spread over; empty for all that are possible.
        partition: layers of each stage, embedding and head included, if they are given.
        schedules: of ``SEARCHED``.
        all_nodes: whether every node has to be used.
        unequal: whether stages may have different widths; the trainer runs those of width 1.
        top: how many plans to return.
        most_leaves: pipelines to time for one shape and set of nodes.
        most_levels: see ``shapes.make_dp_states``.
        most_cpu_s: CPU seconds for each type of node after which what was not looked at only counts
            in the gap.
    """

    tp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    recompute: tuple[str, ...] = RECOMPUTE
    distributed_optimizer: tuple[bool, ...] = (False, True)
    overlap_reduce: bool = False
    sequence_parallel: tuple[bool, ...] = (False, True)
    context_ranks: tuple[int, ...] = ()
    expert_ranks: tuple[int, ...] = ()
    partition: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ("1f1b",)
    all_nodes: bool = False
    unequal: bool = False
    top: int = 1
    most_leaves: int = 3000
    most_levels: int = 20_000
    most_cpu_s: float = 8.0


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Least time or least cost.

    Attributes:
        least: ``time`` for seconds per step, ``cost`` for the price of a step.
        most_seconds_per_step: slower plans do not count.
        most_price_per_hour: dearer nodes do not count.
        most_price_per_step: plans whose step costs more do not count; a budget for a run, divided
            by its steps.
    """

    least: Literal["time", "cost"] = "time"
    most_seconds_per_step: float = math.inf
    most_price_per_hour: float = math.inf
    most_price_per_step: float = math.inf

    def value(self, seconds: float, price_per_hour: float) -> float:
        """Returns what is minimised."""
        return seconds if self.least == "time" else seconds * price_per_hour / 3600

    def most_seconds(self, price_per_hour: float, worst_value: float) -> float:
        """Returns the seconds below which a plan keeps the limits and beats ``worst_value``."""
        if price_per_hour > self.most_price_per_hour:
            return 0.0
        # A limit may be met exactly.
        most = math.nextafter(self.most_seconds_per_step, math.inf)
        hourly = price_per_hour / 3600
        if hourly:
            most = min(most, math.nextafter(self.most_price_per_step / hourly, math.inf))
        if self.least == "time":
            return min(most, worst_value)
        return min(most, worst_value / hourly) if hourly else most


@dataclass(frozen=True, kw_only=True)
class Found:
    """One plan found.

    Attributes:
        plan: the plan.
        seconds: of a step, as ``predict`` has them.
        price_per_hour: of its nodes.
        value: what the objective minimises.
    """

    plan: Plan
    seconds: float
    price_per_hour: float
    value: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search.

    Attributes:
        found: the best plans, best first; empty where nothing fits.
        bound: no plan of the search space has a value below it; of very many mixtures of nodes
            and their orders that holds for those that were looked at.
        timed: pipelines timed exactly.
        configurations: shapes, lengths of pipelines and sets of nodes for which a bound was made.
    """

    found: tuple[Found, ...]
    bound: float
    timed: int
    configurations: int

    @property
    def gap(self) -> float:
        """Share of its value by which the best might at most be improved."""
        if not self.found or self.found[0].value <= 0:
            return 0.0
        return max(0.0, 1 - self.bound / self.found[0].value)


class Best:
    """The best plans so far, each shape and set of nodes once; says which others may still matter.

    Args:
        top: how many.
        objective: what is minimised, and the limits.
    """

    def __init__(self, top: int, objective: Objective) -> None:
        self.objective = objective
        self._top = top
        self._found: dict[Any, Found] = {}

    def worst_value(self) -> float:
        """Returns the value that a plan has to beat."""
        if len(self._found) < self._top:
            return math.inf
        return max(one.value for one in self._found.values())

    def value(self, seconds: float, price: float) -> float:
        """Returns the value by which goals are put in order."""
        return self.objective.value(seconds, price)

    def most_seconds(self, price: float) -> float:
        """Returns the seconds that a plan of that price per hour must stay below to matter."""
        return self.objective.most_seconds(price, self.worst_value())

    def add(self, key: Any, plan: Plan, seconds: float, price: float) -> None:
        """Takes a plan; those with one key compete for one place."""
        value = self.value(seconds, price)
        old = self._found.get(key)
        if old is not None and old.value <= value:
            return
        self._found[key] = Found(plan=plan, seconds=seconds, price_per_hour=price, value=value)
        if len(self._found) > self._top:
            del self._found[max(self._found, key=lambda one: self._found[one].value)]

    def sorted(self) -> list[Found]:
        """Returns the plans found, best first."""
        return sorted(self._found.values(), key=lambda one: one.value)


@dataclass(kw_only=True, eq=False)
class SearchShape:
    """One choice of widths, microbatch, recompute and optimizer.

    Attributes:
        classes: of its stages.
        choice: what all stages share.
        bound_s: seconds that no pipeline of it can beat.
        least_s: the same, once it was visited.
        least_value: the least value that any of it can have, once it was looked at.
        partial: whether not every order of nodes was visited.
    """

    classes: tuple[StageClass, ...]
    choice: ShapeChoice
    bound_s: float
    least_s: float = 0.0
    least_value: float = math.inf
    partial: bool = False

    def key(self, used: tuple[int, ...], stages: int) -> Any:
        """Identifies plans that compete for one place: only their ways to save memory differ."""
        widths = tuple(one.widths for one in self.classes)
        return widths, self.choice.context_ranks, used, stages


class _Bounded(NamedTuple):
    """A shape whose pipelines were bounded.

    Attributes:
        shape: the shape.
        levels: ways in which stages can stand on the nodes.
        arrays: ``kernel.ShapeArrays``.
        bounds: of every level, as ``kernel.bound_levels`` fills them.
        goals: complete pipelines that may matter: value and seconds at least, level and price,
            seconds at least under 1F1B; best first.
    """

    shape: SearchShape
    levels: DpStates
    arrays: Any
    bounds: tuple[Any, Any, Any]
    goals: list[tuple[float, float, int, float, float]]


class Searcher:
    """Searches on one cluster; several searches share what they computed.

    Args:
        inputs: what is trained where, and how long it takes.
        global_batch: samples of a step.
        options: what may be chosen.
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
        # Of the idle time of 1F1B other schedules leave about a third.
        self._idle = 1.0 if self._exact else 1 / 3
        self._slack = 1.0 if self._exact else _FORWARD_BACK
        self._whole_backward = set(self.options.schedules) <= set(_WHOLE_BACKWARD)
        self._until = math.inf
        self.timed = 0
        self.configurations = 0
        self.placements = 0

    def search(self, objective: Objective | None = None) -> SearchResult:
        """Finds the best plans for an objective.

        Args:
            objective: what to minimise under which limits; least time without limits by default.
        """
        goal = objective or Objective()
        best = Best(self.options.top, goal)
        shapes = self.shapes()
        looked = []
        self._until = search_s() + self.options.most_cpu_s * len(self._counts)
        left_out, unseen = math.inf, []
        for shape in shapes:
            if search_s() > self._until:
                unseen.append(shape)
            elif shape.bound_s < best.most_seconds(self._least_price):
                self._look(shape, best)
                looked.append(shape)
        for shape in sorted(looked, key=lambda one: one.least_value):
            if search_s() > self._until:
                left_out = min(left_out, shape.least_value)
            else:
                left_out = min(left_out, self._exhaust(shape, best))
        for shape in sorted(unseen, key=lambda one: one.bound_s):
            if best.value(shape.bound_s, self._least_price) >= left_out:
                break
            left_out = min(left_out, best.value(self._capacity_s(shape), self._least_price))
        found = tuple(sorted(map(self._handed_over, best.sorted()), key=lambda one: one.value))
        bound = min(left_out, found[0].value) if found else left_out
        return SearchResult(
            found=found, bound=bound, timed=self.timed, configurations=self.configurations
        )

    def _handed_over(self, one: Found) -> Found:
        """Divides layers for the order that was chosen; under 1F1B alone they are at their best."""
        plan = one.plan
        if self._exact or self.options.partition or not plan.uniform or self.model.splits:
            return one
        plan, seconds = handed_over(plan, one.seconds, self.inputs, _HAND_OVERS)
        value = one.value * seconds / one.seconds
        return replace(one, plan=plan, seconds=seconds, value=value)

    def shapes(self) -> list[SearchShape]:
        """Returns every choice, those that promise most first."""
        options, found = self.options, []
        for classes, microbatches, shared in self._class_sets():
            known = tuple(one for one in classes if self._known(one))
            spreads = [
                spread
                for spread in self.model.expert_ranks
                if spread in (options.expert_ranks or self.model.expert_ranks)
                and all(one.dp % spread == 0 for one in classes)
            ]
            splits = self._sequence_parallel(classes, shared)
            sharding = options.distributed_optimizer
            ways = itertools.product(options.recompute, sharding, spreads, splits)
            for recompute, sharded, spread, split in ways if known else ():
                if sharded and all(one.dp == 1 for one in classes):
                    continue
                choice = ShapeChoice(
                    microbatches=microbatches,
                    recompute=recompute,
                    distributed_optimizer=sharded,
                    overlap_reduce=options.overlap_reduce,
                    sequence_parallel=split,
                    expert_ranks=spread,
                    context_ranks=shared,
                )
                if not split and True in splits and self._tables.fits_split(known, choice):
                    continue
                bound = self._work_s(known, choice, self._counts, self._most_stages(known))
                found.append(SearchShape(classes=known, choice=choice, bound_s=bound))
        return sorted(found, key=self._guess_s)

    def _sequence_parallel(self, classes: Sequence[StageClass], shared: int) -> tuple[bool, ...]:
        """Returns whether sequence parallelism may be off and on."""
        widest = max((one.tp for one in classes), default=1)
        if widest == 1:
            return (False,)
        given = (True,) if self.model.has_experts else self.options.sequence_parallel
        divided = self.model.divides_sequence(widest, shared, True)
        return tuple(on for on in given if divided or not on)

    def _guess_s(self, shape: SearchShape) -> float:
        """Returns the seconds on all GPUs, were stages alike."""
        stages = min(self._most_stages((one,)) for one in shape.classes)
        return shape.bound_s * (1 + (stages - 1) * self._idle / shape.choice.microbatches)

    def _class_sets(self) -> Iterator[tuple[tuple[StageClass, ...], int, int]]:
        """Yields classes whose stages may meet in one pipeline, microbatches, context ranks."""
        waves: dict[int, list[StageClass]] = {}
        for tp, dp, micro_batch, shared in self._widths():
            classes = stage_classes(self.cluster, tp=tp, dp=dp * shared, micro_batch=micro_batch)
            if self.options.unequal and shared == 1:
                waves.setdefault(dp * micro_batch, []).extend(classes)
            elif classes:
                yield classes, self.global_batch // (dp * micro_batch), shared
        for wave, found in waves.items():
            yield tuple(found), self.global_batch // wave, 1

    def _widths(self) -> Iterator[tuple[int, int, int, int]]:
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
                        yield tp, dp, micro_batch, shared

    def _known(self, one: StageClass) -> bool:
        """Returns whether the profile knows every layer on every node of a class."""
        return all(
            self.profile.knows(kind, node.gpu, one.tp)
            for node in self._tables.types(one)
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
        """Returns seconds that no pipeline is faster than.

        Work, reductions and optimizer are divided evenly over nodes. Rank r starts after the
        forwards of r stages, of a layer at least each. A microbatch takes its way through all
        layers and back, and what they keep on this way has to fit beside the weights.

        ``exactly``: there are ``most_stages`` ranks.
        """
        rates, found, rooms = [], [], []
        microbatches = choice.microbatches
        for index, group in enumerate(self.cluster.groups):
            for one in classes if nodes[index] else ():
                if one.nodes[index]:
                    sums = self._tables.totals(group.type, one, choice, self._whole_backward)
                    each = sums.work_s + sums.after_s / microbatches
                    stages = nodes[index] * group.type.gpus / (one.tp * one.dp)
                    rates.append((index, 1 / max(each, 1e-30), stages))
                    found.append(sums)
                    context = self.profile.context_bytes.get(group.type.gpu, OURS.context_bytes)
                    rooms.append((index, group.type.memory_bytes - context, stages))
        whole_s = microbatches / most_rate(rates, most_stages)
        if not rates:
            return whole_s
        slowest, fastest = min(one[1] for one in rates), max(one[1] for one in rates)
        ranks = np.arange(most_stages if exactly else 1, most_stages + 1)
        lost = min(one.least_s for one in found) * slowest * (ranks - 1) * (ranks - 2) / 2
        each_s = (microbatches + lost) / (ranks * fastest)
        if exactly:
            whole_s *= 1 + float(lost[0]) / microbatches
        whole_s = max(whole_s, float(each_s.min()))
        if self.options.unequal:
            return whole_s  # microbatches are smaller where they are dealt out
        free = most_rate(rooms, most_stages) - min(one.held_bytes for one in found)
        if free < min(one.kept_bytes for one in found):
            return math.inf
        stay = microbatches * min(one.stay for one in found)
        return max(whole_s, min(one.way_s for one in found), stay / max(free, 1.0))

    def _most_stages(self, classes: Sequence[StageClass]) -> int:
        if self.options.pp:
            return max(self.options.pp)
        narrow = min(one.tp * one.dp for one in classes)
        return max(1, min(self.cluster.num_gpus // narrow, self.model.num_layers))

    def _bounded(self, shape: SearchShape, best: Best, most_levels: int) -> _Bounded:
        """Bounds all pipelines of a shape that may matter."""
        from megatron.adaptive.planner import search_kernel  # numba takes half a second

        most = self._most_stages(shape.classes)
        key = (tuple((one.nodes, one.block) for one in shape.classes), most, most_levels)
        if key not in self._levels:
            self._levels[key] = make_dp_states(
                shape.classes, self._counts, most_stages=most, most_levels=most_levels
            )
        levels = self._levels[key]
        arrays = self._tables.arrays(shape.classes, shape.choice)
        if self.options.partition:
            arrays["after"] = only_partition(arrays["after"], self.options.partition)
        held = in_flight("1f1b", most, 1, shape.choice.microbatches)[::-1]
        made = search_kernel.ShapeArrays(
            **arrays,
            **levels.arrays,
            held=np.array(held, dtype=np.float64),
            microbatches=shape.choice.microbatches,
        )
        size = (made.level_class.shape[0], made.forward.shape[1])
        ends, done, trips = (np.full(size, np.inf) for _ in range(3))
        most_s = best.most_seconds(self._least_price)
        search_kernel.bound_levels(made, self._slack * most_s, ends, done, trips)
        goals = []
        complete = np.array(levels.complete, dtype=np.int64)
        self.configurations += len(complete)
        self.placements += levels.placements
        for level in complete[done[complete, 0] < np.inf].tolist():
            used, stages = levels.used[level], int(made.level_follow[level]) + 1
            if self.options.pp and stages not in self.options.pp:
                continue
            if self.options.all_nodes and used != self._counts:
                continue
            seconds = float(done[level, 0])
            if stages > 1:
                seconds += float(made.tied[:, made.level_class[level], :].min())
            price = sum(
                count * group.type.price_per_hour
                for count, group in zip(used, self.cluster.groups, strict=True)
            )
            ordered = seconds
            if not self._exact:
                seconds = self._work_s(shape.classes, shape.choice, used, stages, exactly=True)
            if seconds < best.most_seconds(price):
                # Its likely best schedule leaves a part of the idle time of 1F1B.
                idle = (stages - 1) / shape.choice.microbatches
                likely = ordered * (1 + self._idle * idle) / (1 + idle)
                goals.append((best.value(seconds, price), seconds, level, price, likely))
        return _Bounded(shape, levels, made, (ends, done, trips), sorted(goals))

    def visit(
        self, shape: SearchShape, best: Best, most_leaves: int, *, finish: bool = True
    ) -> list[tuple[float, float]]:
        """Searches all pipelines of a shape that may matter.

        Args:
            shape: of ``shapes``.
            best: collects plans, and says which may matter.
            most_leaves: pipelines to time for each set of nodes and length of the pipeline.
            finish: whether to try other schedules than 1F1B.

        Returns:
            Bound and price per hour of those that were not searched to the end.
        """
        if max(shape.bound_s, shape.least_s) >= best.most_seconds(self._least_price):
            return []
        bounded = self._bounded(shape, best, self.options.most_levels)
        shape.partial = not bounded.levels.whole
        shape.least_s = min((goal[1] for goal in bounded.goals), default=math.inf)
        missed = []
        for _, seconds, level, price, _ in bounded.goals:
            if seconds >= best.most_seconds(price):
                continue
            if search_s() > self._until:
                missed.append((seconds, price))
                continue
            bound = self._try(bounded, level, price, best, most_leaves, finish)
            # Only 1F1B is searched to its end.
            missed.append((bound if self._exact else seconds, price))
        return [one for one in missed if one[0] < best.most_seconds(one[1])]

    def _look(self, shape: SearchShape, best: Best) -> None:
        """Bounds a shape, and tries a few pipelines of its best set of nodes.

        Where there are very many orders of nodes, only with equal nodes side by side.
        """
        bounded = self._bounded(shape, best, min(_FEW_LEVELS, self.options.most_levels))
        shape.least_value = bounded.goals[0][0] if bounded.goals else math.inf
        if not (bounded.levels.whole and self._exact):
            least = best.value(self._capacity_s(shape), self._least_price)
            known = shape.least_value if bounded.levels.whole else least
            shape.least_value = max(known, least)
        few = len(bounded.levels.used) <= _SMALL_LEVELS
        for *_, level, price, _ in sorted(bounded.goals, key=lambda goal: goal[-1])[:1]:
            # The same as later, so that it does not matter what was looked at first.
            self._try(bounded, level, price, best, self.options.most_leaves if few else 10, True)

    def _capacity_s(self, shape: SearchShape) -> float:
        """Returns and keeps a shape's bound, raised by what all nodes together can hold."""
        room = capacity_bound(self._tables, self.cluster, shape.classes, shape.choice)
        shape.bound_s = max(shape.bound_s, room)
        return shape.bound_s

    def _exhaust(self, shape: SearchShape, best: Best) -> float:
        """Searches a shape to its end; returns the least value that was left out."""
        if shape.least_value >= best.worst_value():
            return math.inf
        missed = self.visit(shape, best, self.options.most_leaves)
        left_out = min((best.value(*one) for one in missed), default=math.inf)
        least = best.value(shape.bound_s, self._least_price)
        return least if shape.partial else max(left_out, least)

    def _try(
        self,
        bounded: _Bounded,
        level: int,
        price: float,
        best: Best,
        most_leaves: int,
        finish: bool,
    ) -> float:
        """Searches the pipelines of one level; returns a bound on what was left out."""
        from megatron.adaptive.planner import search_kernel

        shape, levels, made = bounded.shape, bounded.levels, bounded.arrays
        stages = int(made.level_follow[level]) + 1
        cuts, path, kinds = (np.zeros(n, dtype=np.int64) for n in (stages + 1, stages, stages))
        if not self._exact:
            rows = 2 * stages * shape.choice.microbatches
            most_leaves = min(most_leaves, max(10, _ROW_STEPS // rows))
        cap = self._slack * best.most_seconds(price)
        walk = search_kernel.make_walk(made, stages)
        seconds, left_out, timed = search_kernel.search_level(
            made, walk, level, *bounded.bounds, cap, most_leaves, cuts, path, kinds
        )
        if seconds < cap and left_out < seconds:
            walk.levels[:], walk.kinds[:] = path, kinds

            def seconds_of(trial: Any) -> float:
                walk.cuts[:] = trial
                return float(search_kernel.leaf_s(made, walk, stages))

            cuts, seconds, more = hand_over(cuts, seconds, seconds_of, most_leaves)
            timed += more
        self.timed += timed
        if seconds < cap:
            classes = [shape.classes[made.level_class[step]] for step in path.tolist()]
            plan = self._plan(classes, shape.choice, cuts.tolist())
            key = shape.key(levels.used[level], stages)
            if self._islands:
                # The kernel sends each message as between neighbours of one island.
                seconds = predict(plan, self.inputs).seconds
            allowed = "1f1b" in self.options.schedules and plan.uniform
            if allowed and seconds < best.most_seconds(price):
                best.add(key, plan, float(seconds), price)
            if finish and not (self._exact and plan.uniform):
                least_s = float(seconds) if allowed else math.inf
                for one, one_s in self._finished(plan, classes, bounded, best, price, least_s):
                    if one_s < best.most_seconds(price):
                        best.add(key, one, one_s, price)
        return float(left_out)

    def _finished(
        self,
        plan: Plan,
        classes: Sequence[StageClass],
        bounded: _Bounded,
        best: Best,
        price: float,
        least_s: float,
    ) -> Iterator[tuple[Plan, float]]:
        """Yields a pipeline under the schedules that may be chosen and fit, and its seconds.

        ``least_s`` is what it takes under 1F1B if that is known.
        """
        names = [one for one in self.options.schedules if one != "1f1b" or least_s == math.inf]
        row = scheduled(plan, self.inputs, names)
        if row is not None and row.prediction.fits:
            least_s = min(least_s, row.prediction.seconds)
            yield row.plan, row.prediction.seconds
        if self.options.partition or not plan.uniform or plan.pp == 1 or self.model.splits:
            return
        shape, used = bounded.shape, bounded.levels.used
        numbers = tuple(shape.classes.index(one) for one in classes)
        microbatches = shape.choice.microbatches
        work_s = 1 / sum(1 / self._tables.pipeline_s(one, shape.choice) for one in classes)
        for order, (counts, those) in _CHUNKED.items():
            chosen = [name for name in names if name in those]
            for chunks in counts if chosen else ():
                if chunks * plan.pp > self.model.num_layers:
                    continue
                # What equal chunks take; nothing but rounding beats it.
                waits = (plan.pp - 1) / chunks if order in _WHOLE_BACKWARD else 0.0
                even_s = work_s * (microbatches + waits)
                known_s = best.most_seconds(price) if len(used) > _SMALL_LEVELS else math.inf
                if even_s >= min(least_s, known_s):
                    continue
                try:
                    made = ChunkedPipeline(bounded.arrays, shape.classes, numbers, order, chunks)
                    cuts = made.best(_HAND_OVERS, _NO_HOPE * least_s)
                except ScheduleError:
                    continue  # not with so few microbatches
                self.timed += 1
                for name in chosen if cuts else ():
                    one = self._plan(classes, shape.choice, list(cuts), chunks, name)
                    found = scheduled(one, self.inputs, (name,))
                    if found is not None and found.prediction.fits:
                        yield found.plan, found.prediction.seconds

    def _plan(
        self,
        classes: Sequence[StageClass],
        choice: ShapeChoice,
        cuts: list[int],
        chunks: int = 1,
        schedule: str = "1f1b",
    ) -> Plan:
        """Returns a plan by the classes of its ranks, on the first nodes of each type that suit."""
        numbers = itertools.count()
        free = [list(itertools.islice(numbers, group.count)) for group in self.cluster.groups]
        first = [those[0] for those in free]
        places: list[StagePlace] = []
        position, nodes = 0, list[int]()
        for stage, one in enumerate(classes):
            opens = stage == 0 or position + 1 == classes[stage - 1].block
            position = 0 if opens else position + 1
            if opens:
                nodes = []
                for index, count in enumerate(one.nodes):
                    kind = self.cluster.groups[index].type
                    nodes += take_nodes(free[index], first[index], count, kind)
            places.append(place_stage(self.cluster, nodes, *one.widths, position=position))
        return Plan(
            tp=max(one.tp for one in classes),
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
