"""Draws timelines of steps, with one row per rank, and maps of lost time.

In a timeline, time runs from left to right. The colour of a wait depends on its cause, and other
idle time is grey.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.metrics import NS_PER_MS, run_figures
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.step_view import PipelineStep
from megatron.adaptive.trace.views.palette import (
    ACTION_NAMES,
    IDLE,
    categories,
    cause_of,
    chunk_color,
    fill_of,
    text_color,
)

if TYPE_CHECKING:
    from megatron.adaptive.trace.whatif.result import WhatIf

DPI = 150
WIDTH_IN = 14.0
MAX_WIDTH_IN = 22.0
FORWARD_IN = 0.13
"""Desired width in inches of a short action.

If necessary, the picture is widened to reach it, up to ``MAX_WIDTH_IN``.
"""
AROUND_IN = 1.5
"""Total height in inches of the parts above and below the rows of the picture."""
ROW_IN_FEW = 0.62
ROW_IN_MANY = 0.36
MANY_ROWS = 8
"""Maximum number of rows with height ``ROW_IN_FEW``. More rows have height ``ROW_IN_MANY``."""
MAX_ROWS_IN = 100.0
"""Maximum total height of the rows in inches. Viewers support at most 65,536 pixels."""
BAR = 0.80
"""Height of a bar as a fraction of the row height. The rest is the gap to the next bar."""
INK = "#1F2328"
FAINT = "#6B6B70"
DIGIT_EM = 0.64
"""Width of a digit as a multiple of the font size."""
DIGIT_HEIGHT_EM = 1.15
SMALLEST_PT = 4.5
"""Minimum font size in points of the text in a bar. Smaller text is omitted."""
UPRIGHT_BELOW_PT = 5.5
"""Font size in points below which the text in bars is rotated by 90 degrees."""
POINTS_PER_IN = 72
VISIBLE = 2000
"""Divisor of the step time. The legend lists only causes of waits longer than the quotient."""


def write_picture(step: PipelineStep, path: str | os.PathLike[str]) -> None:
    """Writes a picture of a step as ``.png`` or in another format that matplotlib supports.

    Args:
        step: Step to draw.
        path: Path of the file, whose suffix (such as ``.png``) determines the format.

    Raises:
        TraceError: The file cannot be written.
    """
    row_in = ROW_IN_FEW if step.num_ranks <= MANY_ROWS else ROW_IN_MANY
    row_in = min(row_in, MAX_ROWS_IN / step.num_ranks)
    durations = sorted(span.duration_ns for row in step.rows for span in row)
    short_ns = max(1, durations[len(durations) // 10])
    width_in = min(max(WIDTH_IN, FORWARD_IN * step.step_ns / short_ns), MAX_WIDTH_IN)
    figure = _figure(width_in, AROUND_IN + row_in * step.num_ranks, DPI)
    axes = figure.add_subplot()
    text_pt = min(9.0, row_in * POINTS_PER_IN * 0.8)
    _set_axes(axes, step, text_pt)
    _write_title(figure, axes, step)
    long_ns = step.step_ns / VISIBLE
    causes = {cause_of(wait) for row in step.waits for wait in row if wait.duration_ns > long_ns}
    _draw_legend(figure, step.num_chunks, step.actions, causes)
    figure.draw_without_rendering()
    # All bars and texts that are drawn from now on are within the axes, so keep the layout.
    figure.set_layout_engine("none")
    points = axes.get_window_extent().width / DPI * POINTS_PER_IN
    points_per_ns = points / max(step.step_ns, 1)
    # The edges of bars must be much thinner than the bars, or they would hide the bars of a dense
    # chart.
    edge_pt = min(0.5, 0.05 * durations[len(durations) // 2] * points_per_ns)
    _draw_rows(axes, step, edge_pt)
    _write_texts(axes, step, points_per_ns, row_in, min(9.0 if row_in > 0.5 else 7.5, text_pt))
    with replaced(path) as temporary:
        figure.savefig(temporary, facecolor="white")


def _figure(width_in: float, height_in: float, dpi: int) -> Figure:
    figure = Figure(figsize=(width_in, height_in), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _set_axes(axes: Axes, step: PipelineStep, text_pt: float) -> None:
    axes.set_xlim(0, max(step.step_ns, 1) / NS_PER_MS)
    axes.set_ylim(step.num_ranks - 0.5, -0.5)
    labels = [step.label(pp_rank) for pp_rank in range(step.num_ranks)]
    axes.set_yticks(range(step.num_ranks), labels, fontsize=text_pt, color=INK)
    busy = axes.secondary_yaxis("right")
    shares = {rank: f"{1 - bubble:.0%} busy" for rank, bubble in step.bubble_fractions.items()}
    busy.set_yticks(list(shares), list(shares.values()), fontsize=text_pt, color=FAINT)
    for sided_axes in (axes, busy):
        sided_axes.tick_params(axis="y", length=0, pad=6)
        for spine in sided_axes.spines.values():
            spine.set_visible(False)
    axes.tick_params(axis="x", length=3, color=FAINT, labelcolor=FAINT, labelsize=8.5)
    axes.set_xlabel("time in the step (ms)", fontsize=9, color=FAINT, labelpad=3)


def _draw_rows(axes: Axes, step: PipelineStep, edge_pt: float) -> None:
    for pp_rank in step.bubble_fractions:
        waits = step.waits[pp_rank] if step.waits else ()
        _draw_bars(axes, pp_rank, [(0.0, step.step_ns / NS_PER_MS, IDLE)])
        for spans, edge in ((waits, 0.0), (step.rows[pp_rank], edge_pt)):
            _draw_bars(
                axes,
                pp_rank,
                [
                    (
                        span.start_ns / NS_PER_MS,
                        span.duration_ns / NS_PER_MS,
                        fill_of(span, step.num_chunks),
                    )
                    for span in spans
                ],
                edge,
            )
    for pp_rank in step.missing:
        axes.text(0, pp_rank, "no trace of this rank", va="center", color=FAINT, style="italic")


def _draw_bars(
    axes: Axes, row: int, bars: Sequence[tuple[float, float, str]], edge_pt: float = 0
) -> None:
    """Draws ``bars`` into the row with index ``row``.

    A bar is a tuple (start, length, colour ``RRGGBB``). ``edge_pt`` is the width of the white edges
    in points, or 0 for no edges.
    """
    axes.broken_barh(
        [(start, length) for start, length, _ in bars],
        (row - BAR / 2, BAR),
        facecolors=[f"#{color}" for _, _, color in bars],
        edgecolors="white" if edge_pt else "none",
        linewidth=edge_pt,
    )


def _write_texts(
    axes: Axes, step: PipelineStep, points_per_ns: float, row_in: float, largest: float
) -> None:
    """Writes the numbers of chunk and microbatch into the bars that are wide enough.

    A text is, for example, ``0-3`` for chunk 0 and microbatch 3, or ``0-3.5`` for slice 5 of this
    microbatch. All texts of one kind of action have the same font size and direction. If they would
    be too small, they are rotated by 90 degrees. ``points_per_ns`` is the width of a nanosecond in
    points, ``row_in`` is the height of a row in inches, and ``largest`` is the maximum font size in
    points.
    """
    height_pt = row_in * BAR * POINTS_PER_IN
    for action in step.actions:
        bars = [(r, s) for r, row in enumerate(step.rows) for s in row if s.action == action]
        texts = [step.numbers(span) for _, span in bars]
        widths = np.array([span.duration_ns for _, span in bars]) * points_per_ns
        letters = DIGIT_EM * np.array(list(map(len, texts)))
        along = 0.88 * widths / letters
        upright = np.minimum(0.95 * widths / DIGIT_HEIGHT_EM, 0.88 * height_pt / letters)
        # Nine tenths of the texts must fit into their bars at the common font size.
        turned = min(largest, np.sort(along)[len(bars) // 10]) < UPRIGHT_BELOW_PT
        sizes = upright if turned else along
        common = max(min(largest, np.sort(sizes)[len(bars) // 10]), SMALLEST_PT)
        for (pp_rank, span), text, size in zip(bars, texts, sizes.tolist(), strict=True):
            if size >= SMALLEST_PT:
                axes.text(
                    (span.start_ns + span.end_ns) / 2 / NS_PER_MS,
                    pp_rank,
                    text,
                    ha="center",
                    va="center" if turned else "center_baseline",
                    rotation=90 if turned else 0,
                    fontsize=min(size, common),
                    color=f"#{text_color(chunk_color(action, span.chunk, step.num_chunks))}",
                )


def _write_title(figure: Figure, axes: Axes, step: PipelineStep) -> None:
    chunks = "chunk" if step.num_chunks == 1 else "chunks"
    ranks = "rank" if step.num_ranks == 1 else "ranks"
    subtitle = (
        f"{step.num_ranks} pipeline {ranks} × {step.num_chunks} {chunks}, "  # noqa: RUF001
        f"{step.microbatches}  ·  iteration {step.iteration}{step.replica}  ·  "
        f"step {number_text(step.step_ns / NS_PER_MS, 4)} ms  ·  "
        f"bubble {step.bubble_fraction:.1%}{step.bubble_note}"
    )
    title = f"Pipeline schedule: {step.schedule}"
    figure.suptitle(title, x=0.01, ha="left", size=14, color=INK, weight="bold")
    axes.set_title(subtitle, loc="left", size=10, color=FAINT)


def _draw_legend(
    figure: Figure, num_chunks: int, actions: Collection[str], causes: Collection[str]
) -> None:
    """Draws a legend with the colours of actions (by chunk), waits (by cause) and idle time."""
    patches = [
        Patch(color=category.color, label=category.name)
        for category in categories(num_chunks)
        if category.in_legend
        and (category.cause in causes if category.kind == "wait" else category.kind in actions)
    ]
    patches.append(Patch(color=f"#{IDLE}", label="idle"))
    figure.legend(handles=patches, loc="outside lower center", ncols=9, fontsize=8.5, frameon=False)


PANEL_ROW_IN, PANEL_TITLE_IN = 0.16, 0.42


def write_comparison(steps: Sequence[tuple[str, SimResult]], path: str | os.PathLike[str]) -> None:
    """Writes a picture with a panel for each simulated step, and replaces an existing file.

    Args:
        steps: Title and simulated step of each panel, in order from top to bottom.
        path: Path of the file, whose suffix (such as ``.png``) determines the format.

    Raises:
        TraceError: The file cannot be written.
    """
    heights = [PANEL_ROW_IN * result.placement.num_ranks + PANEL_TITLE_IN for _, result in steps]
    figure = _figure(WIDTH_IN, sum(heights) + 0.7, 110)
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False, height_ratios=heights)
    for (title, result), axes in zip(steps, panels[:, 0], strict=True):
        chunks = result.placement.num_chunks
        last = result.placement.num_ranks - 1
        for rank, spans in enumerate(result.spans):
            bars = [(0.0, result.makespan_s, IDLE)]
            for span in spans:
                color = chunk_color(span.action.kind.value, span.action.chunk, chunks)
                bars.append((span.start_s, span.end_s - span.start_s, color))
            _draw_bars(axes, rank, bars, 0.2)
        axes.set_ylim(last + 0.5, -0.5)
        axes.set_title(title, fontsize=9, loc="left", pad=3)
        axes.set_yticks([0, last])
        axes.tick_params(labelsize=7, length=2)
        axes.set_ylabel("rank", fontsize=7)
        axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlim(0, max(result.makespan_s for _, result in steps))
    axes.set_xlabel("seconds", fontsize=8)
    _draw_legend(figure, max(r.placement.num_chunks for _, r in steps), ACTION_NAMES, ())
    with replaced(path) as temporary:
        figure.savefig(temporary, facecolor="white")


MAX_HEAT_ROWS = 64
"""Maximum number of ranks in a map of lost time. If there are more, the map shows the slowest."""


def write_heat(run: RunTrace, answers: WhatIf, path: str | os.PathLike[str]) -> None:
    """Writes a picture with two maps of lost time: ranks by steps, and replicas by stages.

    Args:
        run: Trace of the run.
        answers: Result of the what-if analysis (``what_if``) of the run.
        path: Path of the ``.png`` file. An existing file is replaced.

    Raises:
        TraceError: The file cannot be written.
    """
    where = answers.where
    steps = answers.iterations.tolist()
    ranks, stages = run_figures(run, steps, ranks=where.ranks.tolist()).heat(where.stages)
    shown = np.sort(np.argsort(-np.nanmean(ranks, axis=1), kind="stable")[:MAX_HEAT_ROWS])
    height = 1.9 + 0.24 * max(len(shown), len(stages), 4)
    figure = _figure(WIDTH_IN * 0.8, height, DPI * 2 // 3)
    whole, part = figure.subplots(1, 2, width_ratios=(3, 1))
    for axes, values in ((whole, ranks[shown]), (part, stages)):
        # Values are durations divided by the mean duration. White is the mean, red is slower, and
        # blue is faster.
        image = axes.imshow(
            values, aspect="auto", cmap="RdBu_r", vmin=0.5, vmax=1.5, interpolation="nearest"
        )
    names = [where.name(worker) for worker in shown.tolist()]
    whole.set_yticks(range(len(shown)), labels=names, fontsize=7.5)
    ticks = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 12)).astype(int))
    whole.set_xticks(ticks, labels=[steps[tick] for tick in ticks], fontsize=7.5)
    whole.set_xlabel("step")
    part.set(xlabel="stage", ylabel="replica")
    for axis in (part.xaxis, part.yaxis):
        axis.set_major_locator(MaxNLocator(16, integer=True))
    figure.colorbar(image, ax=part, label="work, times the usual", extend="both")
    lines = answers.format().split("\n")
    figure.suptitle(f"{run.run}: {lines[1]}", fontsize=11, color=INK, x=0.02, ha="left")
    with replaced(path) as temporary:
        figure.savefig(temporary, facecolor="white")
