"""Several simulated steps as one picture: a panel per schedule, all on one time axis."""

from __future__ import annotations

import os
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.views.palette import ACTION_NAMES, IDLE, chunk_color

__all__ = ["write_comparison"]

WIDTH_IN, ROW_IN, PANEL_IN, TOP_IN, BOTTOM_IN = 14.0, 0.16, 0.42, 0.2, 0.75
BAR = 0.86


def write_comparison(steps: Sequence[tuple[str, SimResult]], path: str | os.PathLike[str]) -> None:
    """Write a picture (its format by the ending), replacing the file.

    Args:
        steps: title and simulated step of each panel, from the top.
        path: the file.

    Raises:
        TraceError: the file cannot be written.
    """
    heights = [ROW_IN * result.placement.num_ranks + PANEL_IN for _, result in steps]
    height = sum(heights) + TOP_IN + BOTTOM_IN
    figure = Figure(figsize=(WIDTH_IN, height), dpi=110)
    FigureCanvasAgg(figure)
    longest_s = max(result.makespan_s for _, result in steps)
    top = height - TOP_IN
    for (title, result), panel in zip(steps, heights, strict=True):
        top -= panel
        axes = figure.add_axes((0.055, top / height, 0.93, (panel - PANEL_IN) / height))
        _draw(axes, title, result, longest_s, last=result is steps[-1][1])
    chunks = max(result.placement.num_chunks for _, result in steps)
    figure.legend(
        handles=[
            Patch(
                color=f"#{chunk_color(kind, chunk, chunks)}",
                label=f"{name}, chunk {chunk}" if chunks > 1 else name,
            )
            for kind, name in ACTION_NAMES.items()
            for chunk in range(chunks)
        ],
        loc="lower center",
        ncols=6,
        fontsize=8,
        frameon=False,
    )
    with replaced(path) as temporary:
        figure.savefig(temporary, facecolor="white")


def _draw(axes: Axes, title: str, result: SimResult, longest_s: float, *, last: bool) -> None:
    chunks = result.placement.num_chunks
    bars, colors = [], []
    for rank, spans in enumerate(result.spans):
        bars.append(Rectangle((0, rank - BAR / 2), result.makespan_s, BAR))
        colors.append(f"#{IDLE}")
        for span in spans:
            bars.append(Rectangle((span.start_s, rank - BAR / 2), span.end_s - span.start_s, BAR))
            colors.append(f"#{chunk_color(span.action.kind.value, span.action.chunk, chunks)}")
    axes.add_collection(PatchCollection(bars, facecolor=colors, edgecolor="white", linewidth=0.2))
    axes.set_xlim(0, longest_s)
    axes.set_ylim(result.placement.num_ranks - 0.5, -0.5)
    axes.set_title(title, fontsize=9, loc="left", pad=3)
    axes.set_yticks([0, result.placement.num_ranks - 1])
    axes.tick_params(labelsize=7, length=2)
    axes.set_ylabel("rank", fontsize=7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if last:
        axes.set_xlabel("seconds", fontsize=8)
    else:
        axes.set_xticklabels([])
