"""Plans that a search found, and what keeps the best of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.adaptive.planner.objective import Objective
from megatron.adaptive.planner.plan import Plan

__all__ = ["Best", "Collector", "Found", "SearchResult"]


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
    """What a search found.

    Attributes:
        found: the best plans, best first; empty where nothing fits.
        bound: no 1F1B plan of the search space has a value below it.
        whole: whether the search space had every mixture and order of nodes; where not, the bound
            holds only for those that it had.
        shapes: choices of widths, microbatch and so on that were looked at.
        timed: pipelines timed exactly.
        configurations: shapes, lengths of pipelines and sets of nodes for which a bound was made.
    """

    found: tuple[Found, ...]
    bound: float
    whole: bool
    shapes: int
    timed: int
    configurations: int

    @property
    def gap(self) -> float:
        """By how much of its value the best might at most be improved."""
        if not self.found or self.found[0].value <= 0:
            return 0.0
        return max(0.0, 1 - self.bound / self.found[0].value)


class Collector(Protocol):
    """What plans are handed to."""

    def value(self, seconds: float, price: float) -> float:
        """By which goals are put in order."""

    def most_seconds(self, price: float) -> float:
        """Seconds that a plan of that price per hour must stay below to matter."""

    def add(self, key: Any, plan: Plan, seconds: float, price: float) -> None:
        """Take a plan; those with one key compete for one place."""


class Best:
    """The best plans so far, each shape and set of nodes once."""

    def __init__(self, top: int, objective: Objective) -> None:
        self.objective = objective
        self._top = top
        self._found: dict[Any, Found] = {}

    def value(self, seconds: float, price: float) -> float:
        """What the objective minimises."""
        return self.objective.value(seconds, price)

    def worst_value(self) -> float:
        """What a plan has to beat."""
        if len(self._found) < self._top:
            return math.inf
        return max(one.value for one in self._found.values())

    def most_seconds(self, price: float) -> float:
        """Seconds that a plan of that price per hour must stay below to matter."""
        return self.objective.most_seconds(price, self.worst_value())

    def add(self, key: Any, plan: Plan, seconds: float, price: float) -> None:
        """Take a plan; the worst goes where there are too many."""
        value = self.objective.value(seconds, price)
        old = self._found.get(key)
        if old is not None and old.value <= value:
            return
        self._found[key] = Found(plan=plan, seconds=seconds, price_per_hour=price, value=value)
        if len(self._found) > self._top:
            worst = max(self._found, key=lambda one: self._found[one].value)
            del self._found[worst]

    def sorted(self) -> list[Found]:
        """Best first."""
        return sorted(self._found.values(), key=lambda one: one.value)
