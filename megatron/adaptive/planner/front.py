"""Finds the front of price and speed over the parts of a cluster, and writes and draws it.

One table of bounds serves all parts: a state of the search knows the nodes that it stands on. So
every part is looked at in one pass over the shapes, and only what no known plan beats in both time
and cost is searched.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.plan import Plan, PlanRow, placement_text, plan_document
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import Request, check_request, scheduled, whole_partition
from megatron.adaptive.planner.search import Found, Searcher
from megatron.adaptive.planner.search_space import Objective

__all__ = ["Front", "find_front", "pareto", "write_front"]

_COLOUR = "#1f77b4"
_SPEED, _PRICE = "tokens per second", "price of a million tokens"


def find_front(inputs: PlanInputs, request: Request) -> tuple[PlanRow, ...]:
    """Finds the plans that no other beats in both time and price of a step, fastest first.

    Args:
        inputs: what is trained where, and how long it takes.
        request: what is asked for; which of time and cost is least does not matter.

    Raises:
        ConfigError: the cluster has no prices, or no plan keeps the limits.
    """
    if not any(node.price_per_hour for node in inputs.cluster.types):
        raise ConfigError(
            "--pareto weighs speed against price, but no node type has one: give price_per_hour in"
            " the cluster file"
        )
    options = replace(
        request.options, partition=whole_partition(request.options.partition, inputs.model)
    )
    check_request(request, options, inputs)
    searcher = Searcher(inputs, global_batch=request.global_batch, options=options)
    found = pareto(searcher, request.objective).found
    if not found:
        raise ConfigError("--pareto: no plan fits and keeps the limits; plan without it to see why")
    rows = [scheduled(one.plan, inputs, request.schedules) for one in found]
    return tuple(_front(rows))


def _front(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Leaves out what is beaten once every plan has its schedule."""
    kept: list[PlanRow] = []
    for row in sorted(rows, key=lambda one: one.prediction.seconds):
        if not kept or row.prediction.price_per_step < kept[-1].prediction.price_per_step:
            kept.append(row)
    return kept


def write_front(rows: Sequence[PlanRow], inputs: PlanInputs, folder: Path) -> None:
    """Writes the front as chart, picture and plan files.

    Args:
        rows: the plans, fastest first.
        inputs: what is trained where, and how long it takes.
        folder: gets ``front.html``, ``front.png``, ``front.json`` and ``plan-N.json``.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    documents = [plan_document(row.plan, inputs, row.prediction) for row in rows]
    files = {f"plan-{number}": document for number, document in enumerate(documents, start=1)}
    prices = [
        row.prediction.price_per_hour / 3600 / row.prediction.tokens_per_s * 1e6 for row in rows
    ]
    speeds = [row.prediction.tokens_per_s for row in rows]
    labels = [
        f"{placement_text(row.plan, inputs.cluster)}; tp {row.plan.tp}, dp {row.plan.dp},"
        f" pp {row.plan.pp}, microbatch {row.plan.micro_batch}"
        for row in rows
    ]
    title = f"{inputs.model.name}, {rows[0].plan.global_batch} samples for a step"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {**files, "front": documents}.items():
            text = json.dumps(content, indent=2) + "\n"
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
        _write_page(prices, speeds, labels, title, folder / "front.html")
        _write_picture(prices, speeds, title, folder / "front.png")
    except OSError as error:
        raise ConfigError(f"--pareto {folder}: {error.strerror}; name another folder") from error


@dataclass(frozen=True, kw_only=True)
class Front:
    """Plans that no other beats in both time and price.

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
    """Finds the front of seconds and price per step.

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
        """Returns the seconds, by which goals are put in order."""
        return seconds

    def most_seconds(self, price: float) -> float:
        """Returns the seconds below which a plan of that price per hour would be on the front."""
        most = self.objective.most_seconds(price, math.inf)
        hourly = price / 3600
        for one in self.points:
            # Beaten by this point from the moment that both its time and its cost are reached.
            reached = one.value / hourly if hourly else math.inf
            most = min(most, max(one.seconds, reached))
        return most

    def add(self, key: Any, plan: Plan, seconds: float, price: float) -> None:
        """Takes a plan, and drops those that it beats."""
        value = seconds * price / 3600
        if any(one.seconds <= seconds and one.value <= value for one in self.points):
            return
        kept = [one for one in self.points if one.seconds < seconds or one.value < value]
        found = Found(plan=plan, seconds=seconds, price_per_hour=price, value=value)
        at = bisect.bisect([one.seconds for one in kept], seconds)
        self.points = [*kept[:at], found, *kept[at:]]

    def slack(self, seconds: float, price: float) -> float:
        """Returns the part of the time by which a bound lies below the front."""
        most = self.most_seconds(price)
        return max(0.0, 1 - seconds / most) if math.isfinite(most) else 0.0


def _write_page(
    prices: list[float], speeds: list[float], labels: list[str], title: str, path: Path
) -> None:
    """Writes a self-contained page with one point for each plan, named when pointed at."""
    import plotly.graph_objects as go

    figure: Any = go.Figure(
        go.Scatter(
            x=prices,
            y=speeds,
            text=labels,
            mode="lines+markers",
            line={"shape": "hv", "color": _COLOUR},
            hovertemplate="%{text}<br>%{y:,.0f} tokens/s<br>%{x:.4g} for a million<extra></extra>",
        )
    )
    figure.update_layout(
        title=title, xaxis_title=_PRICE, yaxis_title=_SPEED, template="plotly_white"
    )
    figure.write_html(str(path), include_plotlyjs=True)


def _write_picture(prices: list[float], speeds: list[float], title: str, path: Path) -> None:
    """Writes the same as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.step(prices, speeds, where="post", color=_COLOUR, linewidth=1)
    axes.plot(prices, speeds, "o", color=_COLOUR, markersize=4)
    axes.set(title=title, xlabel=_PRICE, ylabel=_SPEED)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(str(path), format="png")
