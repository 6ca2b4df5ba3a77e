"""The part of a report that traces tell: iteration times of every rank, and what each rank did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.figures import RunFigures, run_figures
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.views.page_spans import Category, categories, merged, rows_of
from megatron.adaptive.trace.views.palette import IDLE

__all__ = ["traced"]

MAX_BARS = 60_000
"""Of all iterations together; short ones are merged where there are more."""
MAX_STEPS = 4
MAX_CELLS = 200_000
"""Iterations times ranks of the times; of more, evenly spaced iterations are shown."""
_NS_PER_MS = 1e6


def traced(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Read the traces of a job.

    Args:
        folder: that of the traces; need not exist.

    Returns:
        What the page draws, ``None`` without traces; and notes for the reader.
    """
    if not folder.is_dir():
        return None, ["no traces: with TRACE=true there are times of every rank and a timeline"]
    try:
        run = read_run(folder)
        figures = run_figures(run, workers=1)
        steps, typical = _steps(figures)
    except TraceError as error:
        return None, [f"no timeline: {error}"]
    colors = categories(run.num_chunks)
    drawn = [_step(run, iteration, colors, len(steps)) for iteration in steps]
    told = {
        "ranks": figures.ranks.tolist(),
        "labels": [_label(run, int(rank)) for rank in figures.ranks],
        "idle": f"#{IDLE}",
        "categories": [asdict(category) for category in colors],
        "steps": drawn,
        "typical": typical,
        **_times(figures),
    }
    return told, [*run.notes(), *figures.notes()]


def _label(run: RunTrace, rank: int) -> str:
    header = run.ranks[rank].header
    return f"rank {rank}: stage {header.pp_rank}, copy {header.dp_rank}, part {header.tp_rank}"


def _times(figures: RunFigures) -> dict[str, Any]:
    """Time of every rank from its first to its last action, by iteration."""
    known = figures.num_actions > 0
    ms = np.where(known, figures.end_ns - figures.start_ns, 0) / _NS_PER_MS
    limit = max(2, MAX_CELLS // max(1, ms.shape[1]))
    count = len(figures.iterations)
    shown = np.unique(np.linspace(0, count - 1, min(limit, count)).round().astype(int))
    rows = [
        [round(float(value), 3) if there else None for value, there in zip(row, here, strict=True)]
        for row, here in zip(ms[shown].T, known[shown].T, strict=True)
    ]
    return {"iterations": figures.iterations[shown].tolist(), "rank_ms": rows}


def _steps(figures: RunFigures) -> tuple[list[int], int]:
    """Choose iterations to draw: one in the middle of the times, the slowest, the first, the last.

    Returns:
        The iterations, and the place of the one in the middle among them.

    Raises:
        TraceError: nothing was recorded.
    """
    recorded = np.flatnonzero((figures.num_actions > 0).all(axis=1))
    if not len(recorded):
        raise TraceError("no iteration is complete")
    order = recorded[np.argsort(figures.step_ns[recorded].max(axis=1), kind="stable")]
    wanted = [order[len(order) // 2], order[-1], recorded[0], recorded[-1]]
    places = sorted(dict.fromkeys(int(place) for place in wanted[:MAX_STEPS]))
    typical = places.index(int(order[len(order) // 2]))
    return [int(figures.iterations[place]) for place in places], typical


def _step(run: RunTrace, iteration: int, colors: Sequence[Category], share: int) -> dict[str, Any]:
    """Return the bars of all ranks in an iteration, in milliseconds from its first one."""
    tables = [run.ranks[rank].table([iteration]) for rank in sorted(run.ranks)]
    rows = merged(rows_of(tables, run.num_chunks), MAX_BARS // share)
    columns = rows.columns
    if not len(rows):
        return {"iteration": iteration, "bars": {}, "merged_below_ms": 0}
    # What was done within something else is drawn by that alone.
    keep = columns["category"] != rows.within
    start_ns = int(columns["start"].min())
    bars: dict[str, dict[str, list[float]]] = {}
    for number in range(len(colors)):
        chosen = keep & (columns["category"] == number)
        if chosen.any():
            bars[str(number)] = {
                "row": columns["row"][chosen].tolist(),
                "start": np.round((columns["start"][chosen] - start_ns) / _NS_PER_MS, 4).tolist(),
                "length": np.round(columns["length"][chosen] / _NS_PER_MS, 4).tolist(),
                "microbatch": columns["microbatch"][chosen].tolist(),
            }
    return {
        "iteration": iteration,
        "bars": bars,
        "merged_below_ms": rows.merged_below_ns / _NS_PER_MS,
    }
