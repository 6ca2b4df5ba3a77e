"""Sheets *summary*, *iterations* and *charts*: the figures of one pipeline, and Excel's own charts.

*summary* has a row per rank, first for the iteration that is drawn, then for the mean over all
iterations that the workbook covers. *iterations* has a row per iteration. *charts* draws columns of
both, so that it follows when someone changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from openpyxl import Workbook
from openpyxl.chart import BarChart, LineChart, Reference
from openpyxl.chart.axis import TextAxis
from openpyxl.chart.legend import Legend
from openpyxl.styles import Alignment, Font
from openpyxl.utils import get_column_letter
from openpyxl.worksheet.worksheet import Worksheet

from megatron.adaptive.trace.event import DRAWN_ACTIONS
from megatron.adaptive.trace.figures import Floats, RunFigures
from megatron.adaptive.trace.read import describe_numbers
from megatron.adaptive.trace.step import PipelineStep
from megatron.adaptive.trace.summary import NS_PER_MS, PART_NAMES, PARTS, parts_ms
from megatron.adaptive.trace.views.palette import IDLE, WAIT_COLORS, chunk_color

__all__ = [
    "BOLD",
    "MAX_ITERATIONS",
    "MAX_RANK_COLUMNS",
    "add_charts",
    "add_iterations",
    "add_summary",
]

BOLD = Font(bold=True)
MAX_ITERATIONS = 20_000
"""Rows of the sheet *iterations*; of a longer run it has every so many rows one."""
MAX_RANK_COLUMNS = 256
"""Ranks with a column of their own there."""

MS, COUNT, SHARE = "0.000", "#,##0", "0.0%"
TITLE_ROW, HEAD_ROW = 1, 2
HEAD_HEIGHT = 44
"""Of a row of heads, in points: three lines."""
PART_COLUMN = 5
"""First column of the parts of the step in *summary*."""

PART_COLORS = {
    "busy": chunk_color("F", 0, 1),
    **{cause or "unknown": color for cause, color in WAIT_COLORS.items()},
    "before": "B9BDC6",
    "after": "D5D8DE",
    "rest": IDLE,
}


@dataclass(frozen=True)
class _Column:
    """A column of *summary*: its head, its number format, its values by rank."""

    head: str
    format: str
    values: Floats


def add_summary(workbook: Workbook, step: PipelineStep, figures: RunFigures) -> None:
    """Add the sheet *summary*.

    Args:
        workbook: to add to.
        step: what the other sheets draw.
        figures: of the ranks of its pipeline, ``step.iteration`` among the iterations.
    """
    sheet = workbook.create_sheet("summary")
    replica = f", replica {step.dp_rank} of {step.num_replicas}" if step.num_replicas > 1 else ""
    row = int(np.searchsorted(figures.iterations, step.iteration))
    parts = parts_ms(figures)
    drawn = _columns(figures, parts, [row])
    behind = _block(sheet, TITLE_ROW, f"iteration {step.iteration}{replica}", step, figures, drawn)
    if len(figures.iterations) > 1:
        numbers = figures.iterations.tolist()
        text = f"mean of {len(numbers)} iterations ({describe_numbers(numbers)}){replica}"
        every = _columns(figures, parts, range(len(numbers)))
        _block(sheet, behind + 1, f"{text}; peaks are the highest", step, figures, every)
    for number, column in enumerate(drawn, start=2):
        width = max(10, min(15, len(column.head) + 2))
        sheet.column_dimensions[get_column_letter(number)].width = width
    sheet.column_dimensions["A"].width = max(
        14, *(len(step.label(pp_rank)) + 2 for pp_rank in range(step.num_ranks))
    )
    sheet.freeze_panes = f"B{HEAD_ROW + 1}"


def add_iterations(workbook: Workbook, step: PipelineStep, figures: RunFigures) -> int:
    """Add the sheet *iterations*; returns how many of them it has.

    Args:
        workbook: to add to.
        step: what the other sheets draw.
        figures: of the ranks of its pipeline.
    """
    sheet = workbook.create_sheet("iterations")
    total = len(figures.iterations)
    stride = -(-total // MAX_ITERATIONS)
    rows = range(0, total, stride)
    ranks = range(min(len(figures.ranks), MAX_RANK_COLUMNS))
    labels = [step.label(int(figures.pp_rank[rank])).split(" (")[0] for rank in ranks]
    text = "parts of the step are means over the ranks"
    if stride > 1:
        text += f"; one iteration in {stride} of {total}"
    if len(ranks) < len(figures.ranks):
        text += f"; bubbles of the first {len(ranks)} of {len(figures.ranks)} ranks"
    sheet.append([text])
    head = ["iteration", "step ms", "bubble", *(f"{PART_NAMES[p]} ms" for p in PARTS)]
    sheet.append([*head, *(f"bubble {label}" for label in labels)])
    parts = parts_ms(figures)
    bubbles = figures.bubble_fraction
    steps = figures.step_ns.max(axis=1) / NS_PER_MS
    for row in rows:
        values = [steps[row], _mean(bubbles[row]), *(_mean(p) for p in parts[row].T)]
        values += [bubbles[row, rank] for rank in ranks]
        sheet.append([int(figures.iterations[row]), *map(_plain, values)])
    formats = ["0", MS, SHARE, *[MS] * len(PARTS), *[SHARE] * len(labels)]
    for cells in sheet.iter_rows(min_row=HEAD_ROW + 1):
        for cell, form in zip(cells, formats, strict=True):
            cell.number_format = form
    _style_head(sheet, TITLE_ROW)
    for number in range(1, len(formats) + 1):
        sheet.column_dimensions[get_column_letter(number)].width = 12
    sheet.freeze_panes = f"B{HEAD_ROW + 1}"
    sheet.auto_filter.ref = f"A{HEAD_ROW}:{get_column_letter(len(formats))}{HEAD_ROW + len(rows)}"
    return len(rows)


def add_charts(workbook: Workbook, step: PipelineStep, num_iterations: int) -> None:
    """Add the sheet *charts*; *summary* and *iterations* are there.

    Args:
        workbook: to add to.
        step: what *summary* begins with.
        num_iterations: rows of *iterations*.
    """
    sheet = workbook.create_sheet("charts")
    sheet.sheet_view.showGridLines = False
    bars = _bars(workbook["summary"], step)
    sheet.add_chart(bars, "B2")
    if num_iterations > 1:
        below = 4 + int(bars.height / 0.5)  # a row is about half a centimetre high
        sheet.add_chart(_curves(workbook["iterations"], num_iterations), f"B{below}")


def _bars(sheet: Worksheet, step: PipelineStep) -> BarChart:
    chart = BarChart()
    chart.type, chart.grouping, chart.overlap = "bar", "stacked", 100
    chart.title = f"where the time of iteration {step.iteration} went (ms)"
    chart.gapWidth = 40
    chart.width, chart.height = 26, min(40, max(8, 3.5 + 0.8 * step.num_ranks))
    last = HEAD_ROW + step.num_ranks
    shown = [
        number
        for number, part in enumerate(PARTS)
        if part == "busy"
        or any(sheet.cell(row, PART_COLUMN + number).value for row in range(HEAD_ROW + 1, last + 1))
    ]
    for number in shown:
        data = Reference(sheet, min_col=PART_COLUMN + number, min_row=HEAD_ROW, max_row=last)
        chart.add_data(data, titles_from_data=True)
        chart.series[-1].graphicalProperties.solidFill = PART_COLORS[PARTS[number]]
        chart.series[-1].graphicalProperties.line.solidFill = "FFFFFF"
    chart.set_categories(Reference(sheet, min_col=1, min_row=HEAD_ROW + 1, max_row=last))
    chart.x_axis.scaling.orientation = "maxMin"  # the first rank on top
    chart.x_axis.delete = chart.y_axis.delete = False
    chart.y_axis.number_format, chart.y_axis.crosses = "0", "max"
    chart.legend = Legend(legendPos="b")
    return chart


def _curves(sheet: Worksheet, num_iterations: int) -> LineChart:
    last = HEAD_ROW + num_iterations
    steps, bubbles = LineChart(), LineChart()
    for chart, column, color in ((steps, 2, chunk_color("F", 0, 1)), (bubbles, 3, "C0504D")):
        data = Reference(sheet, min_col=column, min_row=HEAD_ROW, max_row=last)
        chart.add_data(data, titles_from_data=True)
        chart.set_categories(Reference(sheet, min_col=1, min_row=HEAD_ROW + 1, max_row=last))
        chart.series[0].graphicalProperties.line.solidFill = color
        chart.series[0].graphicalProperties.line.width = 16_000
        chart.series[0].smooth = False
        chart.x_axis.delete = chart.y_axis.delete = False
    steps.title = "step time and bubble by iteration"
    steps.width, steps.height = 26, 10
    steps.y_axis.title, steps.y_axis.number_format = "step ms", "0"
    assert isinstance(steps.x_axis, TextAxis)
    steps.x_axis.tickLblSkip = steps.x_axis.tickMarkSkip = max(1, num_iterations // 20)
    steps.x_axis.number_format = "0"
    steps.y_axis.scaling.min = 0
    bubbles.y_axis.axId, bubbles.y_axis.crosses = 200, "max"
    bubbles.y_axis.title, bubbles.y_axis.number_format = "bubble", "0%"
    bubbles.y_axis.scaling.min = 0
    bubbles.y_axis.majorGridlines = None
    steps.legend = Legend(legendPos="b")
    steps += bubbles
    return steps


def _columns(figures: RunFigures, parts: Floats, rows: Sequence[int]) -> list[_Column]:
    """The columns of *summary*: means, or peaks, over some rows of the figures, by rank."""
    rows = list(rows)

    def mean(values: Floats) -> Floats:
        known = figures.num_actions[rows] > 0
        values = np.where(known, values[rows], 0).sum(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            means: Floats = values / known.sum(axis=0)
        return means

    def peak(values: Floats) -> Floats:
        peaks: Floats = values[rows].max(axis=0).astype(np.float64)
        return peaks

    columns = [
        _Column("global rank", "0", figures.ranks.astype(np.float64)),
        _Column("actions", COUNT, mean(figures.num_actions)),
        _Column("step ms", MS, mean(figures.step_ns / NS_PER_MS)),
    ]
    for number, part in enumerate(PARTS):
        columns.append(_Column(f"{PART_NAMES[part]} ms", MS, mean(parts[..., number])))
    columns.append(_Column("bubble fraction", SHARE, mean(figures.bubble_fraction)))
    columns += _times(figures, rows)
    return [
        *columns,
        _Column("peak microbatches in flight", COUNT, peak(figures.peak_microbatches)),
        _Column("peak bytes in flight", COUNT, peak(figures.peak_in_flight_bytes)),
        _Column("peak inputs waiting", COUNT, peak(figures.peak_queue)),
        _Column("bytes moved", COUNT, mean(figures.transfer_bytes)),
        _Column("bytes sent", COUNT, mean(figures.sent_bytes)),
        _Column("bytes received", COUNT, mean(figures.received_bytes)),
    ]


def _times(figures: RunFigures, rows: Sequence[int]) -> list[_Column]:
    """Mean and spread of each kind of action of each chunk, over all actions of the rows."""
    number = figures.count[rows].astype(np.float64)
    means, spreads = np.nan_to_num(figures.mean_ns[rows]), np.nan_to_num(figures.std_ns[rows])
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (number * means).sum(axis=0) / number.sum(axis=0)
        variance = (number * (spreads**2 + (means - mean) ** 2)).sum(axis=0) / number.sum(axis=0)
    columns = []
    for kind, name in enumerate(DRAWN_ACTIONS):
        for chunk in range(number.shape[2]):
            if number[..., chunk, kind].any():
                head = name if number.shape[2] == 1 else f"{name} chunk {chunk}"
                ms = mean[:, chunk, kind] / NS_PER_MS
                spread = np.sqrt(variance[:, chunk, kind]) / NS_PER_MS
                columns.append(_Column(f"{head} mean ms", MS, ms))
                columns.append(_Column(f"{head} standard deviation ms", MS, spread))
    return columns


def _block(
    sheet: Worksheet,
    at: int,
    text: str,
    step: PipelineStep,
    figures: RunFigures,
    columns: Sequence[_Column],
) -> int:
    """Write a table with its title; returns the row behind it."""
    sheet.cell(at, 1, text)
    for number, column in enumerate(columns, start=2):
        sheet.cell(at + 1, number, column.head)
    places = {int(pp_rank): place for place, pp_rank in enumerate(figures.pp_rank)}
    for pp_rank in range(step.num_ranks):
        row = at + 2 + pp_rank
        sheet.cell(row, 1, step.label(pp_rank)).font = BOLD
        if pp_rank not in places:
            sheet.cell(row, 2, "no trace of this rank")
            continue
        for number, column in enumerate(columns, start=2):
            cell = sheet.cell(row, number, _plain(column.values[places[pp_rank]]))
            cell.number_format = column.format
    _style_head(sheet, at)
    return at + 2 + step.num_ranks


def _style_head(sheet: Worksheet, at: int) -> None:
    sheet.cell(at, 1).font = BOLD
    sheet.row_dimensions[at + 1].height = HEAD_HEIGHT
    for cell in sheet[at + 1]:
        cell.font = BOLD
        cell.alignment = Alignment(wrap_text=True, vertical="top", horizontal="right")


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _plain(value: float) -> float | int | None:
    """Returns a cell's value: a whole number as one, nothing for NaN."""
    number = float(value)
    if np.isnan(number):
        return None
    return int(number) if number.is_integer() else number
