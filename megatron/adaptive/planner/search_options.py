"""Defines the options and the objective of a search, its result, and a store of its best plans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from megatron.adaptive.planner.model_description import RECOMPUTE
from megatron.adaptive.planner.plan import Plan

LEAST_TOKENS = 4096
"""Minimum number of tokens of a sequence on each rank, if the user does not choose how many ranks
share it."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Choices that are open to the search, and its limits.

    Attributes:
        tp: Tensor-parallel widths to choose from; empty for all that fit into a node.
        dp: Numbers of replicas to choose from; empty for all.
        pp: Numbers of pipeline ranks to choose from; empty for all.
        micro_batch: Samples of a microbatch to choose from; empty for all.
        recompute: Kinds of recompute to choose from, see ``model_description.RECOMPUTE``.
        distributed_optimizer: Whether the optimizer may be off and on.
        overlap_reduce: Whether the run overlaps the gradient reduction.
        sequence_parallel: Whether sequence parallelism may be off and on, if ``tp`` is above 1.
            With experts it is always on.
        context_ranks: Numbers of ranks that share a sequence; empty for all that leave
            ``LEAST_TOKENS`` on each rank.
        expert_ranks: Numbers of replicas that experts are spread over; empty for all possible ones.
        partition: Layers of each stage, embedding and head included; empty to choose them.
        schedules: Schedules to choose from, out of ``SEARCHED``.
        all_nodes: Whether every node has to be used.
        unequal: Whether stages may have different widths. The trainer runs such plans only if
            ``tp`` is 1.
        top: Number of plans to return.
        most_leaves: Maximum number of pipelines to time for one shape and set of nodes.
        most_levels: Maximum number of levels of a shape, see ``search_levels.make_dp_states``.
        most_cpu_s: CPU seconds per type of node. Shapes that are not searched by then only count
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
    """Quantity to minimise, and limits that plans have to keep.

    Attributes:
        least: Quantity: ``time`` for seconds per step, ``cost`` for the price of a step.
        most_seconds_per_step: Limit on the seconds of a step.
        most_price_per_hour: Limit on the price of the nodes per hour.
        most_price_per_step: Limit on the price of a step: the budget of a run, divided by its
            number of steps.
    """

    least: Literal["time", "cost"] = "time"
    most_seconds_per_step: float = math.inf
    most_price_per_hour: float = math.inf
    most_price_per_step: float = math.inf

    def value(self, seconds: float, price_per_hour: float) -> float:
        """Returns the seconds or the price of a step, whichever is minimised."""
        return seconds if self.least == "time" else seconds * price_per_hour / 3600

    def most_seconds(self, price_per_hour: float, worst_value: float) -> float:
        """Returns the seconds that a plan has to stay below to keep the limits and be of use.

        Args:
            price_per_hour: Price of the plan's nodes.
            worst_value: Value that the plan has to beat.
        """
        if price_per_hour > self.most_price_per_hour:
            return 0.0
        # A plan that meets a limit exactly keeps it, so the seconds are the next larger number.
        most = math.nextafter(self.most_seconds_per_step, math.inf)
        hourly = price_per_hour / 3600
        if hourly:
            most = min(most, math.nextafter(self.most_price_per_step / hourly, math.inf))
        if self.least == "time":
            return min(most, worst_value)
        return min(most, worst_value / hourly) if hourly else most


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan that the search found.

    Attributes:
        plan: The plan.
        seconds: Predicted seconds of a step.
        price_per_hour: Price of its nodes per hour.
        value: Quantity that the objective minimises.
    """

    plan: Plan
    seconds: float
    price_per_hour: float
    value: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search.

    Attributes:
        plans: Best plans, best first; empty if none fits.
        bound: Lower bound of the value of every plan in the search space. If there are too many
            mixtures of node types, it holds for those that were searched.
        timed: Number of pipelines timed exactly.
        configurations: Number of levels (shape, length of pipeline and set of nodes) with a bound.
    """

    plans: tuple[Found, ...]
    bound: float
    timed: int
    configurations: int

    @property
    def gap(self) -> float:
        """Share of its value by which the best plan could be improved at most, 0 if optimal."""
        if not self.plans or self.plans[0].value <= 0:
            return 0.0
        return max(0.0, 1 - self.bound / self.plans[0].value)


class Best:
    """Keeps the best plans so far, one per shape and set of nodes.

    Args:
        top: Number of plans to keep.
        objective: Quantity to minimise, and limits.
    """

    def __init__(self, top: int, objective: Objective) -> None:
        self.objective = objective
        self._top = top
        self._found: dict[Any, Found] = {}

    def worst_value(self) -> float:
        """Returns the value that another plan has to beat to be kept."""
        if len(self._found) < self._top:
            return math.inf
        return max(entry.value for entry in self._found.values())

    def value(self, seconds: float, price: float) -> float:
        """Returns the value of a plan, which orders plans and levels."""
        return self.objective.value(seconds, price)

    def most_seconds(self, price: float) -> float:
        """Returns the seconds that a plan of a price per hour has to stay below to be kept."""
        return self.objective.most_seconds(price, self.worst_value())

    def add(self, key: Any, plan: Plan, seconds: float, price: float) -> None:
        """Keeps a plan if it is good enough. Of plans with the same key, only the best is kept."""
        value = self.value(seconds, price)
        old = self._found.get(key)
        if old is not None and old.value <= value:
            return
        self._found[key] = Found(plan=plan, seconds=seconds, price_per_hour=price, value=value)
        if len(self._found) > self._top:
            del self._found[max(self._found, key=lambda kept: self._found[kept].value)]

    def sorted(self) -> list[Found]:
        """Returns the plans, best first."""
        return sorted(self._found.values(), key=lambda entry: entry.value)
