"""The Pareto front of time and cost over every part of a cluster.

One table of bounds serves all parts: a level of the search knows the nodes that it stands on. So
every part is looked at in one pass over the shapes, and only what no known plan beats in both time
and cost is searched.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any

from megatron.adaptive.planner.objective import Objective
from megatron.adaptive.planner.plan import Plan
from megatron.adaptive.planner.search import Found, Searcher

__all__ = ["Front", "pareto"]


@dataclass(frozen=True, kw_only=True)
class Front:
    """What no other plan beats in both.

    Attributes:
        found: plans by rising time and falling price per step; ``value`` is that price.
        configurations: shapes, lengths of pipelines and sets of nodes bounded.
        placements: orders of nodes among them.
        timed: pipelines timed exactly.
        slack: by how much of a plan's time or cost a plan that was not searched to the end may at
            most lie below the front; 0 if all were.
    """

    found: tuple[Found, ...]
    configurations: int
    placements: int
    timed: int
    slack: float


def pareto(searcher: Searcher, objective: Objective | None = None) -> Front:
    """Find the front of seconds and price per step.

    Args:
        searcher: for the model, the whole cluster and the options.
        objective: limits on time and price; which of the two is least does not matter.
    """
    front = _Points(objective or Objective())
    shapes = searcher.shapes()
    for shape in shapes:
        searcher.visit(shape, front, 1)
    missed = [searcher.visit(shape, front, searcher.options.most_leaves) for shape in shapes]
    return Front(
        found=tuple(front.points),
        configurations=searcher.configurations,
        placements=searcher.placements,
        timed=searcher.timed,
        slack=max([0.0, *(front.slack(*one) for some in missed for one in some)]),
    )


class _Points:
    """The front so far, by rising time."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.points: list[Found] = []

    def value(self, seconds: float, price: float) -> float:
        """What goals are looked at by: seconds."""
        return seconds

    def most_seconds(self, price: float) -> float:
        """Seconds below which a plan of that price per hour would be on the front."""
        most = self.objective.most_seconds(price, math.inf)
        hourly = price / 3600
        for one in self.points:
            # Beaten by this point from the moment that both its time and its cost are reached.
            reached = one.value / hourly if hourly else math.inf
            most = min(most, max(one.seconds, reached))
        return most

    def add(self, key: Any, plan: Plan, seconds: float, price: float) -> None:
        """Take a plan, and drop those that it beats."""
        value = seconds * price / 3600
        if any(one.seconds <= seconds and one.value <= value for one in self.points):
            return
        kept = [one for one in self.points if one.seconds < seconds or one.value < value]
        found = Found(plan=plan, seconds=seconds, price_per_hour=price, value=value)
        at = bisect.bisect([one.seconds for one in kept], seconds)
        self.points = [*kept[:at], found, *kept[at:]]

    def slack(self, seconds: float, price: float) -> float:
        """How far below the front a bound lies, as a part of the time."""
        most = self.most_seconds(price)
        return max(0.0, 1 - seconds / most) if math.isfinite(most) else 0.0
