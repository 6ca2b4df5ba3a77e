"""Defines the options, the objective and the results of a search, and keeps the best plans."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from megatron.adaptive.planner.model_description import RECOMPUTE
from megatron.adaptive.planner.plan import Plan

LEAST_TOKENS = 4096
"""Minimum number of tokens per rank if ranks share a sequence (context parallelism). The minimum
applies only if the user does not choose the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Settings from which the search may choose, and limits of the search.

    Attributes:
        tp: Tensor-parallel sizes to choose from, or empty for all sizes that fit into a node.
        dp: Data-parallel sizes (numbers of replicas) to choose from, or empty for all possible
            sizes.
        pp: Numbers of pipeline ranks to choose from, or empty for all possible numbers.
        micro_batch: Microbatch sizes in samples to choose from, or empty for all possible sizes.
        recompute: Kinds of activation recomputation to choose from, a subset of ``RECOMPUTE``.
        distributed_optimizer: Settings of the distributed optimizer to try: off, on or both.
        overlap_reduce: Whether the training run overlaps gradient reduction with backward passes.
        sequence_parallel: Settings of sequence parallelism to try if ``tp`` is above 1: off, on or
            both. Models with experts always use sequence parallelism.
        context_ranks: Context-parallel sizes (numbers of ranks that share a sequence) to choose
            from. If empty, all sizes that leave at least ``LEAST_TOKENS`` tokens on each rank are
            tried.
        slices: Numbers of slices per sequence to choose from. Sequences are only cut in pipelines
            with several ranks and a run-time scheduling rule.
        slice_tokens: Numbers of tokens per slice to choose from if documents of different lengths
            are packed. If not empty, only plans with packed documents are searched. Empty if all
            sequences have the same length.
        expert_ranks: Numbers of replicas over which experts may be distributed, or empty for all
            possible numbers.
        partition: Number of layers of each stage, including embedding and head, or empty to choose
            a partition.
        schedules: Names of the pipeline schedules to choose from, which must be in
            ``chunk_partition.SEARCHED``.
        all_nodes: Whether a plan must use every node.
        unequal: Whether stages may have different parallel sizes. The trainer supports such plans
            only if ``tp`` is 1.
        top: Number of plans to return.
        most_leaves: Maximum number of pipelines to simulate for each combination of parallel sizes
            and set of nodes.
        most_levels: Maximum number of levels per combination of parallel sizes. A level is a set of
            nodes with the class of the pipeline's first stage. If there are more levels, some
            orders of nodes are skipped.
        most_cpu_s: CPU time in seconds per node type after which the search skips combinations of
            parallel sizes. Skipping increases the reported gap to the optimum.
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
    """Quantity to minimize, and limits on time and price.

    Attributes:
        least: Quantity to minimize: ``time`` for seconds per step, or ``cost`` for price per step.
        most_seconds_per_step: Maximum step time in seconds.
        most_price_per_hour: Maximum price per hour of the nodes that a plan uses.
        most_price_per_step: Maximum price per step. This is the budget of a run divided by its
            number of steps.
    """

    least: Literal["time", "cost"] = "time"
    most_seconds_per_step: float = math.inf
    most_price_per_hour: float = math.inf
    most_price_per_step: float = math.inf

    def value(self, seconds: float, price_per_hour: float) -> float:
        """Returns the value of the quantity to minimize: seconds per step, or price per step."""
        return seconds if self.least == "time" else seconds * price_per_hour / 3600

    def most_seconds(self, price_per_hour: float, worst_value: float) -> float:
        """Returns the step time below which a plan satisfies all limits and beats ``worst_value``.

        Args:
            price_per_hour: Price per hour of the plan's nodes.
            worst_value: Step time or price per step that the plan must beat.
        """
        if price_per_hour > self.most_price_per_hour:
            return 0.0
        # The result is an exclusive bound, but a plan exactly at a limit is allowed, so return the
        # next larger number.
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
        price_per_hour: Price per hour of the nodes that the plan uses.
        value: Value of the minimized quantity: step time in seconds, or price per step.
    """

    plan: Plan
    seconds: float
    price_per_hour: float
    value: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Best plans of a search, with a bound on their distance from the optimum.

    Attributes:
        plans: Plans in ascending order of their value, so the best plan comes first. Empty if no
            plan fits into memory.
        bound: Lower bound of the minimized quantity for all plans in the search space. If there are
            too many ways to mix node types in a stage, the bound applies only to the mixtures that
            were searched.
        timed: Number of pipelines that were simulated exactly.
        configurations: Number of levels for which a bound was computed. A level is a combination of
            parallel sizes, number of stages and set of nodes.
    """

    plans: tuple[Found, ...]
    bound: float
    timed: int
    configurations: int

    @property
    def gap(self) -> float:
        """Maximum fraction by which a skipped plan may be better than the best plan."""
        if not self.plans or self.plans[0].value <= 0:
            return 0.0
        return max(0.0, 1 - self.bound / self.plans[0].value)


class Best:
    """Stores the best plans so far, with at most one plan per combination of sizes and nodes.

    Args:
        top: Maximum number of plans to keep.
        objective: Quantity to minimize, and limits on time and price.
    """

    def __init__(self, top: int, objective: Objective) -> None:
        self.objective = objective
        self._top = top
        self._found: dict[Any, Found] = {}

    def worst_value(self) -> float:
        """Returns the step time or price per step that a new plan must beat to be kept."""
        if len(self._found) < self._top:
            return math.inf
        return max(entry.value for entry in self._found.values())

    def value(self, seconds: float, price: float) -> float:
        """Returns the step time or price per step by which plans are ranked. Lower is better."""
        return self.objective.value(seconds, price)

    def most_seconds(self, price: float) -> float:
        """Returns the step time below which a plan is kept if its nodes cost ``price`` per hour."""
        return self.objective.most_seconds(price, self.worst_value())

    def add(self, key: Any, plan: Plan, seconds: float, price: float) -> None:
        """Keeps ``plan`` if it is one of the best plans, and the best plan with this ``key``."""
        value = self.value(seconds, price)
        old = self._found.get(key)
        if old is not None and old.value <= value:
            return
        self._found[key] = Found(plan=plan, seconds=seconds, price_per_hour=price, value=value)
        if len(self._found) > self._top:
            del self._found[max(self._found, key=lambda kept: self._found[kept].value)]

    def sorted(self) -> list[Found]:
        """Returns the kept plans, sorted by step time or price per step."""
        return sorted(self._found.values(), key=lambda entry: entry.value)


def best_of_each(entries: Iterable[Found], top: int) -> tuple[Found, ...]:
    """Returns the best plans, with at most one plan for each assignment of ranks to nodes.

    If plans with the same assignment differ in the length of their slices, only the best of them is
    returned.

    Args:
        entries: Plans that a search found.
        top: Maximum number of plans to return.
    """
    plans: dict[Any, Found] = {}
    for entry in sorted(entries, key=lambda entry: entry.value):
        plan = entry.plan
        key: Any = (plan.places, plan.context_ranks)
        if plan.slice_tokens is None:
            # Keep all of these plans: without ``slice_tokens``, the search has found only one per
            # assignment.
            key = len(plans)
        plans.setdefault(key, entry)
    return tuple(plans.values())[:top]
