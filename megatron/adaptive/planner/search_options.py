"""Defines a search's options, objective and result, and the collection of its best plans."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from megatron.adaptive.planner.model_description import RECOMPUTE
from megatron.adaptive.planner.plan import Plan

LEAST_TOKENS = 4096
"""Minimum number of tokens per rank when a sequence is split across ranks (context parallelism). It
applies only if the user does not choose the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Settings that the search may choose, and its limits.

    Attributes:
        tp: Tensor-parallel sizes to choose from. If empty, all that fit into a node.
        dp: Data-parallel sizes (numbers of replicas) to choose from. If empty, all possible sizes.
        pp: Numbers of pipeline ranks to choose from. If empty, all possible numbers.
        micro_batch: Microbatch sizes in samples to choose from. If empty, all possible sizes.
        recompute: Kinds of activation recompute to choose from, a subset of ``RECOMPUTE``.
        distributed_optimizer: Settings of the distributed optimizer to try: off, on or both.
        overlap_reduce: Whether the training run overlaps gradient reduction with backward passes.
        sequence_parallel: Settings of sequence parallelism to choose from, if ``tp`` is above 1.
            For a model with experts, it is always on.
        context_ranks: Numbers of ranks that share a sequence (context parallelism) to choose from.
            If empty, all that leave at least ``LEAST_TOKENS`` tokens on each rank.
        slices: Numbers of slices into which sequences may be cut. Only pipelines with several ranks
            and a run-time rule cut them.
        slice_tokens: Numbers of tokens of a slice to choose from, if documents of different lengths
            are packed. If set, only such plans are searched. Empty for sequences of one length.
        expert_ranks: Numbers of replicas over which experts may be distributed. If empty, all
            possible numbers.
        partition: Number of layers of each stage, embedding and head included. Empty to choose it.
        schedules: Names of the pipeline schedules to choose from, out of ``search.SEARCHED``.
        all_nodes: Whether a plan must use every node.
        unequal: Whether stages may have different parallel sizes. The trainer can run such plans
            only if ``tp`` is 1.
        top: Number of plans to return.
        most_leaves: Maximum number of pipelines to time per shape and set of nodes. A shape is a
            combination of parallel sizes.
        most_levels: Maximum number of levels (sets of nodes with a first stage) per shape. If more
            are needed, some orders of nodes are skipped.
        most_cpu_s: Limit on CPU seconds per node type. After that, the search skips combinations of
            parallel sizes, which enlarges the reported gap.
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
    slices: tuple[int, ...] = (1,)
    slice_tokens: tuple[int, ...] = ()
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
    """Quantity to minimise, and limits that plans must keep.

    Attributes:
        least: Quantity to minimise: ``time`` for seconds per step, ``cost`` for price per step.
        most_seconds_per_step: Maximum time per step, in seconds.
        most_price_per_hour: Maximum price per hour of the nodes in use.
        most_price_per_step: Maximum price per step. It is a run's budget divided by its number of
            steps.
    """

    least: Literal["time", "cost"] = "time"
    most_seconds_per_step: float = math.inf
    most_price_per_hour: float = math.inf
    most_price_per_step: float = math.inf

    def value(self, seconds: float, price_per_hour: float) -> float:
        """Returns the quantity to minimise: seconds per step, or price per step."""
        return seconds if self.least == "time" else seconds * price_per_hour / 3600

    def most_seconds(self, price_per_hour: float, worst_value: float) -> float:
        """Returns the step time below which a plan keeps the limits and beats ``worst_value``.

        Args:
            price_per_hour: Price per hour of the plan's nodes.
            worst_value: Value (step time or price) that the plan has to beat.
        """
        if price_per_hour > self.most_price_per_hour:
            return 0.0
        # A plan exactly at a limit is allowed, but the result is an exclusive bound. So the next
        # larger number is returned.
        most = math.nextafter(self.most_seconds_per_step, math.inf)
        hourly = price_per_hour / 3600
        if hourly:
            most = min(most, math.nextafter(self.most_price_per_step / hourly, math.inf))
        if self.least == "time":
            return min(most, worst_value)
        return min(most, worst_value / hourly) if hourly else most


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan that the search found, with its time and price.

    Attributes:
        plan: Sizes, settings, layers and nodes of the plan.
        seconds: Predicted step time in seconds.
        price_per_hour: Price per hour of the nodes in use.
        value: Value of the objective: step time in seconds or price per step.
    """

    plan: Plan
    seconds: float
    price_per_hour: float
    value: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Best plans of a search, and how far from optimal they may be.

    Attributes:
        plans: Best plans, best first. Empty if no plan fits.
        bound: Lower bound of the objective's value for every plan in the search space. If stages
            can mix node types in too many ways, it holds only for the mixtures that were searched.
        timed: Number of pipelines that were simulated exactly.
        configurations: Number of levels (shape, number of stages and set of nodes) that were
            bounded.
    """

    plans: tuple[Found, ...]
    bound: float
    timed: int
    configurations: int

    @property
    def gap(self) -> float:
        """Maximum fraction by which the best plan's value could be reduced, 0 if it is optimal."""
        if not self.plans or self.plans[0].value <= 0:
            return 0.0
        return max(0.0, 1 - self.bound / self.plans[0].value)


class Best:
    """Keeps the best plans so far, at most one per shape and set of nodes.

    Args:
        top: Maximum number of plans to keep.
        objective: Quantity to minimise, and limits that plans must keep.
    """

    def __init__(self, top: int, objective: Objective) -> None:
        self.objective = objective
        self._top = top
        self._found: dict[Any, Found] = {}

    def worst_value(self) -> float:
        """Returns the value (step time or price) that another plan has to beat to be kept."""
        if len(self._found) < self._top:
            return math.inf
        return max(entry.value for entry in self._found.values())

    def value(self, seconds: float, price: float) -> float:
        """Returns the value by which plans are ordered: step time or price, lowest first."""
        return self.objective.value(seconds, price)

    def most_seconds(self, price: float) -> float:
        """Returns the step time below which a plan with this price per hour is kept."""
        return self.objective.most_seconds(price, self.worst_value())

    def add(self, key: Any, plan: Plan, seconds: float, price: float) -> None:
        """Keeps a plan if it is among the best. For equal keys, only the best is kept."""
        value = self.value(seconds, price)
        old = self._found.get(key)
        if old is not None and old.value <= value:
            return
        self._found[key] = Found(plan=plan, seconds=seconds, price_per_hour=price, value=value)
        if len(self._found) > self._top:
            del self._found[max(self._found, key=lambda kept: self._found[kept].value)]

    def sorted(self) -> list[Found]:
        """Returns the kept plans, lowest value first."""
        return sorted(self._found.values(), key=lambda entry: entry.value)


def best_of_each(entries: Iterable[Found], top: int) -> tuple[Found, ...]:
    """Returns the best plans, at most one for each combination of ranks and nodes.

    Plans with other lengths of slices are compared only after their layers were moved.

    Args:
        entries: Plans that a search found.
        top: Maximum number of plans to return.
    """
    plans: dict[Any, Found] = {}
    for entry in sorted(entries, key=lambda entry: entry.value):
        plan = entry.plan
        key: Any = (plan.places, plan.context_ranks)
        if plan.slice_tokens is None:
            key = len(plans)  # the search keeps only one
        plans.setdefault(key, entry)
    return tuple(plans.values())[:top]
