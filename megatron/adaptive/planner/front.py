"""The front of price and speed over the parts of a cluster, and what is written of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.chart import Point, write_page, write_picture
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.model import Model
from megatron.adaptive.planner.pareto import pareto
from megatron.adaptive.planner.plan_file import plan_document
from megatron.adaptive.planner.profile import Profile
from megatron.adaptive.planner.propose import Request, check_request, scheduled, whole_partition
from megatron.adaptive.planner.report import Row, placement_text
from megatron.adaptive.planner.search import Searcher

__all__ = ["find_front", "write_front"]


def find_front(
    model: Model, cluster: Cluster, profile: Profile, request: Request
) -> tuple[Row, ...]:
    """Find the plans that no other beats in both time and price of a step, fastest first.

    Args:
        model: what is trained.
        cluster: the largest; every part of it counts.
        profile: durations.
        request: what is asked for; which of time and cost is least does not matter.

    Raises:
        ConfigError: the cluster has no prices, or no plan keeps the limits.
    """
    if not any(node.price_per_hour for node in cluster.types):
        raise ConfigError(
            "--pareto weighs speed against price, but no node type has one: give price_per_hour in"
            " the cluster file"
        )
    options = replace(request.options, partition=whole_partition(request.options.partition, model))
    check_request(request, options, model, cluster)
    searcher = Searcher(model, cluster, profile, global_batch=request.global_batch, options=options)
    found = pareto(searcher, request.objective).found
    if not found:
        raise ConfigError("--pareto: no plan fits and keeps the limits; plan without it to see why")
    rows = [scheduled(one.plan, model, cluster, profile, request.schedules) for one in found]
    return tuple(_front(rows))


def _front(rows: Sequence[Row]) -> list[Row]:
    """Leave out what is beaten once every plan has its schedule."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda one: one.prediction.seconds):
        if not kept or row.prediction.price_per_step < kept[-1].prediction.price_per_step:
            kept.append(row)
    return kept


def write_front(rows: Sequence[Row], model: Model, cluster: Cluster, folder: Path) -> None:
    """Write the front as chart, picture and plan files.

    Args:
        rows: the plans, fastest first.
        model: what is planned.
        cluster: on which nodes.
        folder: gets ``front.html``, ``front.png``, ``front.json`` and ``plan-N.json``.

    Raises:
        ConfigError: the folder cannot be written to.
        SetupError: a package that draws is missing.
    """
    documents = [plan_document(row.plan, model, cluster, row.prediction) for row in rows]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, told in enumerate(documents, start=1):
            text = json.dumps(told, indent=2) + "\n"
            (folder / f"plan-{number}.json").write_text(text, encoding="utf-8")
        text = json.dumps(documents, indent=2) + "\n"
        (folder / "front.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--pareto {folder}: {error.strerror}; name another folder") from error
    points = [
        Point(
            tokens_per_s=row.prediction.tokens_per_s,
            price_per_million=row.prediction.price_per_hour
            / 3600
            / row.prediction.tokens_per_s
            * 1e6,
            label=f"{placement_text(row.plan, cluster)}; tp {row.plan.tp}, dp {row.plan.dp},"
            f" pp {row.plan.pp}, microbatch {row.plan.micro_batch}",
        )
        for row in rows
    ]
    title = f"{model.name}, {rows[0].plan.global_batch} samples for a step"
    write_page(points, title, folder / "front.html")
    write_picture(points, title, folder / "front.png")
