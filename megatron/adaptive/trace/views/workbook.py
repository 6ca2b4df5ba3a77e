"""Writes the trace of a pipeline as an Excel workbook with several sheets.

- *order*       actions of one iteration in the order in which they ran, wide enough to read
- *time*        the same actions on a time scale
- *summary*     busy time, waits by cause, bubble, durations of actions, peaks and bytes of each
                rank, first for the drawn iteration, then averaged over the workbook's iterations
- *iterations*  step time, bubble and waits of each iteration
- *charts*      Excel charts of *summary* and *iterations*, which are updated when cells change

The workbook shows one replica, and names it if there are several. The code avoids slow functions of
openpyxl for columns, merged cells and styles, because charts may have hundreds of thousands of
cells.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from openpyxl import Workbook
from openpyxl.chart import BarChart, LineChart, Reference
from openpyxl.chart.axis import TextAxis
from openpyxl.chart.legend import Legend
from openpyxl.styles import Alignment, Border, Font, PatternFill, Side
from openpyxl.utils import get_column_letter
from openpyxl.worksheet.cell_range import CellRange
from openpyxl.worksheet.worksheet import Worksheet

from megatron.adaptive.config.input_files import printable
from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.metrics import NS_PER_MS, PARTS, Floats, RunFigures
from megatron.adaptive.trace.read import RunTrace, describe_numbers
from megatron.adaptive.trace.step_view import PipelineStep
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, Span
from megatron.adaptive.trace.views.palette import (
    ACTION_NAMES,
    IDLE,
    WAIT_COLORS,
    WAIT_NAMES,
    cause_of,
    chunk_color,
    fill_of,
    text_color,
)

LABEL_COLUMNS = 1
TITLE_ROW = 1
TIME_ROW = 2
FIRST_ROW = 3
PATCH_COLUMNS = 8
"""Width in columns of a colour sample in the legend."""
MAX_COLUMNS = 16_384
GRID_COLUMNS = MAX_COLUMNS - LABEL_COLUMNS
FORWARD_COLUMNS = 4
"""Width in columns of a short action in the sheet *order*. Most texts fit into this width."""
MAX_BINS = 600
"""Maximum number of time columns in the sheet *time*."""

CENTRE = Alignment(horizontal="center", vertical="center", shrink_to_fit=True)
LEFT = Alignment(horizontal="left", vertical="center")
SEPARATOR = Border(left=Side(style="thin", color="FFFFFF"))
_FAINT = Font(size=8, color="6B6B70")
BOLD = Font(bold=True)
MAX_ITERATIONS = 20_000
"""Maximum number of rows in the sheet *iterations*. Longer runs show every n-th iteration."""
MAX_RANK_COLUMNS = 256
"""Maximum number of ranks in the sheet *iterations*, which has one column per rank."""

MS = "0.000"
COUNT = "#,##0"
SHARE = "0.0%"
HEAD_ROW = 2
HEAD_HEIGHT = 44
"""Height in points of a header row, enough for three lines of text."""
PART_COLUMN = 5
"""Number of the first column in the sheet *summary* that shows a part of the step."""

PART_COLORS = {
    "busy": chunk_color("F", 0, 1),
    **{cause or "unknown": color for cause, color in WAIT_COLORS.items()},
    "before": "B9BDC6",
    "after": "D5D8DE",
    "rest": IDLE,
}

_Column = tuple[str, str, Floats]
"""Column in the sheet *summary*: header, number format, and a value for each rank."""


@dataclass(frozen=True, slots=True)
class ChartCell:
    """Describes a range of columns in a row. The range shows an action, a wait or idle time.

    Attributes:
        start: First column of the range, counted from the first time column, which is 0.
        end: Column after the last column of the range.
        span: Action or wait to show, or ``None`` for other idle time.
    """

    start: int
    end: int
    span: Span | None


@dataclass(frozen=True)
class Chart:
    """Contains a step, drawn on a grid whose columns all represent the same amount of time.

    Attributes:
        unit_ns: Time per column in nanoseconds.
        num_columns: Number of columns in the longest row. The rows of all other ranks with a trace
            are padded to this length.
        rows: Cells of each pipeline rank, without gaps; empty for a rank without a trace.
    """

    unit_ns: int
    num_columns: int
    rows: tuple[tuple[ChartCell, ...], ...]


def write_workbook(
    run: RunTrace, step: PipelineStep, figures: RunFigures, target: str | os.PathLike[str]
) -> None:
    """Writes the workbook of a run to ``target``, and replaces an existing file.

    Args:
        run: Trace of the run, whose notes (caveats) are written below the summary.
        step: Step (iteration) to draw.
        figures: Statistics of the ranks in the step's pipeline, for all iterations in the workbook,
            including ``step.iteration``.
        target: Path of the ``.xlsx`` file.

    Raises:
        TraceError: The file cannot be written.
    """
    workbook = Workbook()
    title = (
        f"{step.schedule} schedule, iteration {step.iteration}{step.replica}: {step.num_ranks} "
        f"ranks x {step.num_chunks} chunks, {step.microbatches}, step "
        f"{step.step_ns / NS_PER_MS:.2f} ms, bubble {step.bubble_fraction:.1%}{step.bubble_note}"
    )
    add_order(workbook, step, title)
    _add_time(workbook, step, title)
    _add_summary(workbook, step, figures)
    num_iterations = _add_iterations(workbook, step, figures)
    _add_charts(workbook, step, num_iterations)
    del workbook[workbook.sheetnames[0]]
    sheet = workbook["summary"]
    row = sheet.max_row + 2
    sheet.cell(row, 1, "about this trace").font = BOLD
    notes = [f"run {run.run}, {run.origin}", f"clocks: {run.alignment.describe()}"]
    for number, line in enumerate([*notes, *run.notes()], start=1):
        sheet.cell(row + number, 1, printable(line))
    with replaced(target) as temporary:
        workbook.save(temporary)


def lay_out(step: PipelineStep) -> Chart:
    """Returns a grid for ``step`` in which most actions are wide enough for their text.

    Up to a tenth of the actions may be narrower than :data:`FORWARD_COLUMNS` columns. Each action
    occupies at least one column. If many actions are shorter than a column, their row is longer
    than it should be.
    """
    durations = sorted(span.duration_ns for row in step.rows for span in row)
    short_ns = durations[len(durations) // 10]
    unit_ns = max(1, short_ns // FORWARD_COLUMNS, -(-step.step_ns // (GRID_COLUMNS - 1)))
    return _chart(step.rows, unit_ns, round(step.step_ns / unit_ns), least=1)


def fill_bins(step: PipelineStep) -> Chart:
    """Returns a grid for ``step`` with at most :data:`MAX_BINS` columns of equal time.

    The time per column is 1, 2 or 5 times a power of ten in nanoseconds. A column shows the action
    or wait that is running in the middle of the column's time.
    """
    powers = (10**power for power in range(19))
    units = (factor * power for power in powers for factor in (1, 2, 5))
    unit_ns = next(unit for unit in units if -(-step.step_ns // unit) <= MAX_BINS)
    waits = step.waits or ((),) * step.num_ranks
    rows = [
        sorted((*row, *idle), key=lambda span: span.start_ns) if row else ()
        for row, idle in zip(step.rows, waits, strict=True)
    ]
    return _chart(rows, unit_ns, max(1, -(-step.step_ns // unit_ns)), least=0)


def _chart(rows: Sequence[Sequence[Span]], unit_ns: int, num_columns: int, least: int) -> Chart:
    """Returns a grid with the spans in ``rows``, whose columns represent equal amounts of time.

    Args:
        rows: Spans of each rank, ordered by start.
        unit_ns: Time per column in nanoseconds.
        num_columns: Minimum number of columns in the chart.
        least: Minimum number of columns per span.
    """
    cells_of = [list(_cells(row, unit_ns, least)) for row in rows]
    num_columns = max(num_columns, *(row[-1].end for row in cells_of if row), 0)
    for row, cells in zip(rows, cells_of, strict=True):
        end = cells[-1].end if cells else 0
        if row and end < num_columns:
            cells.append(ChartCell(end, num_columns, None))
    return Chart(unit_ns, num_columns, tuple(map(tuple, cells_of)))


def _cells(row: Sequence[Span], unit_ns: int, least: int) -> Iterator[ChartCell]:
    """Yields the cells of a row: one cell per span, and idle cells between spans.

    The cell of a span has at least ``least`` columns, which represent ``unit_ns`` nanoseconds each.
    """
    column = 0
    for span in row:
        start = max(column, round(span.start_ns / unit_ns))
        end = max(start + least, round(span.end_ns / unit_ns))
        if start == end:
            continue
        if start > column:
            yield ChartCell(column, start, None)
        yield ChartCell(start, end, span)
        column = end


def add_order(workbook: Workbook, step: PipelineStep, title: str) -> None:
    """Adds the sheet *order* to ``workbook``, with the actions of ``step`` in execution order.

    Columns beyond Excel's maximum number are omitted.
    """
    chart = lay_out(step)
    about = "each cell shows chunk-microbatch, with a width proportional to its time"
    if chart.num_columns > GRID_COLUMNS:
        about += f"; only the first {GRID_COLUMNS / chart.num_columns:.0%} fit; see sheet *time*"
    sheet = workbook.create_sheet("order")
    last = _draw(sheet, step, chart, title, about, 1.4, 16)
    _patch(sheet, last, 0, IDLE, "idle (bubble)")


def _add_time(workbook: Workbook, step: PipelineStep, title: str) -> None:
    chart = fill_bins(step)
    sheet = workbook.create_sheet("time")
    unit = f"{chart.unit_ns / NS_PER_MS:g} ms"
    about = f"each column shows the action (chunk-microbatch) in the middle of its {unit}"
    last = _draw(sheet, step, chart, f"{title}; one column is {unit}", about, 0.9, 20)
    spans = [cell.span for row in chart.rows for cell in row if cell.span is not None]
    causes = {cause_of(span) for span in spans if span.action == "wait"}
    for cause in [cause for cause in WAIT_NAMES if cause in causes]:
        _patch(sheet, last, 0, WAIT_COLORS[cause], WAIT_NAMES[cause])
        last += 1
    _patch(sheet, last, 0, IDLE, "idle, no wait")


def _draw(
    sheet: Worksheet,
    step: PipelineStep,
    chart: Chart,
    title: str,
    about: str,
    column_width: float,
    tick: int,
) -> int:
    """Draws a chart on a sheet. It has a row per rank, and time runs from left to right.

    Args:
        sheet: Sheet to fill.
        step: Step that the chart shows.
        chart: Grid of cells that shows the step.
        title: Text in the first row of the sheet.
        about: Explanation of the cells, used as the first line of the legend.
        column_width: Width of a time column in characters.
        tick: Number of columns between consecutive times in the header.

    Returns:
        Number of the row below the legend of actions.
    """
    width = min(GRID_COLUMNS, chart.num_columns)
    sheet.sheet_view.showGridLines = False
    sheet.freeze_panes = f"B{FIRST_ROW}"
    sheet.column_dimensions["A"].width = max(12, *map(len, map(step.label, range(step.num_ranks))))
    # Set the width of all columns in the range with a single record. Otherwise, up to 16,384
    # records would be needed.
    columns = sheet.column_dimensions["B"]
    columns.min, columns.max, columns.width = 2, LABEL_COLUMNS + width, column_width
    sheet.cell(TITLE_ROW, 1, title).font = Font(bold=True, size=12)
    for start in range(0, width, tick):
        _merge(sheet, TIME_ROW, start, min(start + tick, width))
        text = f"{number_text(start * chart.unit_ns / NS_PER_MS, 4)} ms"
        cell = sheet.cell(TIME_ROW, LABEL_COLUMNS + 1 + start, text)
        cell.font = _FAINT
        cell.alignment = LEFT
    for pp_rank, cells in enumerate(chart.rows):
        row = FIRST_ROW + pp_rank
        sheet.row_dimensions[row].height = 20
        label = sheet.cell(row, 1, step.label(pp_rank))
        label.font = BOLD
        label.alignment = LEFT
        if pp_rank in step.missing:
            sheet.cell(row, LABEL_COLUMNS + 1, "no trace of this rank").font = Font(italic=True)
        for chart_cell in cells:
            if chart_cell.start < width:
                end = min(chart_cell.end, width)
                _fill_cell(sheet, row, chart_cell, end, step)
    row = FIRST_ROW + step.num_ranks + 1
    sheet.cell(row, 1, "legend").font = BOLD
    sheet.cell(row, LABEL_COLUMNS + 1, about)
    for chunk in range(step.num_chunks):
        for index, action in enumerate(step.actions):
            color = chunk_color(action, chunk, step.num_chunks)
            start = index * (PATCH_COLUMNS + 1)
            _patch(sheet, row + 1 + chunk, start, color, f"chunk {chunk}", ACTION_NAMES[action])
    return row + 1 + step.num_chunks


def _fill_cell(sheet: Worksheet, row: int, shown: ChartCell, end: int, step: PipelineStep) -> None:
    _merge(sheet, row, shown.start, end)
    cell = sheet.cell(row, LABEL_COLUMNS + 1 + shown.start)
    span = shown.span
    color = fill_of(span, step.num_chunks)
    cell.fill = _fill(color)
    if span is not None and span.action != "wait":
        cell.value = step.numbers(span)
        cell.border = SEPARATOR
        cell.font = _font(text_color(color))
        cell.alignment = CENTRE


def _patch(
    sheet: Worksheet, row: int, start: int, color: str, label: str, text: str | None = None
) -> None:
    """Writes ``label`` and a colour sample into a row of the legend.

    The sample begins at column ``start`` of the time axis. It contains ``text``, if given.
    """
    sheet.cell(row, 1, label)
    _merge(sheet, row, start, start + PATCH_COLUMNS)
    cell = sheet.cell(row, LABEL_COLUMNS + 1 + start, text)
    cell.fill = _fill(color)
    cell.font = _font(text_color(color))
    cell.alignment = CENTRE


def _merge(sheet: Worksheet, row: int, start: int, end: int) -> None:
    """Merges the columns from ``start`` to ``end - 1`` of a row.

    Adds the range directly to the sheet's set of merged ranges. openpyxl's ``merge_cells()`` would
    take minutes for a wide chart, because it creates an object for each covered cell and compares
    every pair of ranges.
    """
    if end - start > 1:
        first, last = LABEL_COLUMNS + 1 + start, LABEL_COLUMNS + end
        sheet.merged_cells.ranges.add(CellRange(None, first, row, last, row))


@cache
def _fill(color: str) -> PatternFill:
    return PatternFill("solid", start_color=color, end_color=color)


@cache
def _font(color: str) -> Font:
    return Font(size=8, color=color)


def _add_summary(workbook: Workbook, step: PipelineStep, figures: RunFigures) -> None:
    sheet = workbook.create_sheet("summary")
    row = int(np.searchsorted(figures.iterations, step.iteration))
    drawn = _columns(figures, [row])
    title = f"iteration {step.iteration}{step.replica}"
    next_row = _block(sheet, TITLE_ROW, title, step, figures, drawn)
    if len(figures.iterations) > 1:
        numbers = figures.iterations.tolist()
        title = f"mean of {len(numbers)} iterations ({describe_numbers(numbers)}){step.replica}"
        every = _columns(figures, list(range(len(numbers))))
        _block(sheet, next_row + 1, f"{title}; peaks are maxima instead", step, figures, every)
    for number, (name, _, _) in enumerate(drawn, start=2):
        width = max(10, min(15, len(name) + 2))
        sheet.column_dimensions[get_column_letter(number)].width = width
    sheet.column_dimensions["A"].width = max(
        14, *(len(step.label(pp_rank)) + 2 for pp_rank in range(step.num_ranks))
    )
    sheet.freeze_panes = f"B{HEAD_ROW + 1}"


def _add_iterations(workbook: Workbook, step: PipelineStep, figures: RunFigures) -> int:
    """Adds the sheet *iterations* to ``workbook``, and returns the number of rows for iterations.

    The sheet shows ``figures``, with the rank labels of ``step``.
    """
    sheet = workbook.create_sheet("iterations")
    total = len(figures.iterations)
    stride = -(-total // MAX_ITERATIONS)
    rows = range(0, total, stride)
    ranks = range(min(len(figures.ranks), MAX_RANK_COLUMNS))
    labels = [step.label(int(figures.pp_rank[rank])).split(" (")[0] for rank in ranks]
    text = "the parts of a step are means over all ranks"
    if stride > 1:
        text += f"; the rows show one in {stride} of all {total} iterations"
    if len(ranks) < len(figures.ranks):
        text += f"; bubbles of the first {len(ranks)} of {len(figures.ranks)} ranks"
    sheet.append([text])
    head = ["iteration", "step ms", "bubble", *(f"{part} ms" for part in PARTS.values())]
    sheet.append([*head, *(f"bubble {label}" for label in labels)])
    parts, bubbles = figures.parts_ms, figures.bubble_fraction
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


def _add_charts(workbook: Workbook, step: PipelineStep, num_iterations: int) -> None:
    sheet = workbook.create_sheet("charts")
    sheet.sheet_view.showGridLines = False
    bars = _bars(workbook["summary"], step)
    sheet.add_chart(bars, "B2")
    if num_iterations > 1:
        # Place the second chart below the first. A row is about half a centimetre high.
        row = 4 + int(bars.height / 0.5)
        sheet.add_chart(_curves(workbook["iterations"], num_iterations), f"B{row}")


def _bars(sheet: Worksheet, step: PipelineStep) -> BarChart:
    chart = BarChart()
    chart.type = "bar"
    chart.grouping = "stacked"
    chart.overlap = 100
    chart.title = f"where the time of iteration {step.iteration} went (ms)"
    chart.gapWidth = 40
    chart.width = 26
    chart.height = min(40, max(8, 3.5 + 0.8 * step.num_ranks))
    last = HEAD_ROW + step.num_ranks
    for column, part in enumerate(PARTS, start=PART_COLUMN):
        values = [sheet.cell(row, column).value for row in range(HEAD_ROW + 1, last + 1)]
        if part != "busy" and not any(values):
            continue
        data = Reference(sheet, min_col=column, min_row=HEAD_ROW, max_row=last)
        chart.add_data(data, titles_from_data=True)
        chart.series[-1].graphicalProperties.solidFill = PART_COLORS[part]
        chart.series[-1].graphicalProperties.line.solidFill = "FFFFFF"
    chart.set_categories(Reference(sheet, min_col=1, min_row=HEAD_ROW + 1, max_row=last))
    # Excel draws the first row at the bottom. Reverse the axis, so that the first rank is at the
    # top.
    chart.x_axis.scaling.orientation = "maxMin"
    chart.x_axis.delete = chart.y_axis.delete = False
    chart.y_axis.number_format = "0"
    chart.y_axis.crosses = "max"
    chart.legend = Legend(legendPos="b")
    return chart


def _curves(sheet: Worksheet, num_iterations: int) -> LineChart:
    last = HEAD_ROW + num_iterations
    steps = LineChart()
    bubbles = LineChart()
    for chart, column, color in ((steps, 2, chunk_color("F", 0, 1)), (bubbles, 3, "C0504D")):
        data = Reference(sheet, min_col=column, min_row=HEAD_ROW, max_row=last)
        chart.add_data(data, titles_from_data=True)
        chart.set_categories(Reference(sheet, min_col=1, min_row=HEAD_ROW + 1, max_row=last))
        chart.series[0].graphicalProperties.line.solidFill = color
        chart.series[0].graphicalProperties.line.width = 16_000
        chart.series[0].smooth = False
        chart.x_axis.delete = chart.y_axis.delete = False
    steps.title = "step time and bubble by iteration"
    steps.width = 26
    steps.height = 10
    steps.y_axis.title = "step ms"
    steps.y_axis.number_format = "0"
    assert isinstance(steps.x_axis, TextAxis)
    steps.x_axis.tickLblSkip = steps.x_axis.tickMarkSkip = max(1, num_iterations // 20)
    steps.x_axis.number_format = "0"
    steps.y_axis.scaling.min = 0
    bubbles.y_axis.axId = 200
    bubbles.y_axis.crosses = "max"
    bubbles.y_axis.title = "bubble"
    bubbles.y_axis.number_format = "0%"
    bubbles.y_axis.scaling.min = 0
    bubbles.y_axis.majorGridlines = None
    steps.legend = Legend(legendPos="b")
    steps += bubbles
    return steps


def _columns(figures: RunFigures, rows: list[int]) -> list[_Column]:
    """Returns the columns of *summary*, with means and peaks over the iterations in ``rows``."""

    def mean(values: Floats) -> Floats:
        is_recorded = figures.num_actions[rows] > 0
        sums = np.where(is_recorded, values[rows], 0).sum(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            means: Floats = sums / is_recorded.sum(axis=0)
        return means

    def peak(values: Floats) -> Floats:
        peaks: Floats = values[rows].max(axis=0)
        return peaks

    parts = [
        (f"{part} ms", MS, mean(figures.parts_ms[..., number]))
        for number, part in enumerate(PARTS.values())
    ]
    return [
        ("global rank", "0", figures.ranks),
        ("actions", COUNT, mean(figures.num_actions)),
        ("step ms", MS, mean(figures.step_ns / NS_PER_MS)),
        *parts,
        ("bubble fraction", SHARE, mean(figures.bubble_fraction)),
        *_times(figures, rows),
        ("peak microbatches in flight", COUNT, peak(figures.peak_microbatches)),
        ("peak bytes in flight", COUNT, peak(figures.peak_in_flight_bytes)),
        ("bytes moved", COUNT, mean(figures.transfer_bytes)),
    ]


def _times(figures: RunFigures, rows: list[int]) -> Iterator[_Column]:
    """Yields columns with the mean and standard deviation of action durations, for each chunk.

    The values cover the iterations in ``rows``.
    """
    number = figures.count[rows].astype(np.float64)
    means = np.nan_to_num(figures.mean_ns[rows])
    spreads = np.nan_to_num(figures.std_ns[rows])
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (number * means).sum(axis=0) / number.sum(axis=0)
        variance = (number * (spreads**2 + (means - mean) ** 2)).sum(axis=0) / number.sum(axis=0)
    for kind, name in enumerate(DRAWN_ACTIONS):
        for chunk in np.flatnonzero(number[..., kind].any(axis=(0, 1))).tolist():
            head = name if number.shape[2] == 1 else f"{name} chunk {chunk}"
            spread_ns = np.sqrt(variance[:, chunk, kind])
            yield f"{head} mean ms", MS, mean[:, chunk, kind] / NS_PER_MS
            yield f"{head} standard deviation ms", MS, spread_ns / NS_PER_MS


def _block(
    sheet: Worksheet,
    first_row: int,
    text: str,
    step: PipelineStep,
    figures: RunFigures,
    columns: Sequence[_Column],
) -> int:
    """Writes a table with the title ``text``, and returns the number of the row below the table.

    The title is in row ``first_row``. The table contains ``columns``, and one row for each rank.
    """
    sheet.cell(first_row, 1, text)
    for number, (name, _, _) in enumerate(columns, start=2):
        sheet.cell(first_row + 1, number, name)
    index_of = {int(pp_rank): index for index, pp_rank in enumerate(figures.pp_rank)}
    for pp_rank in range(step.num_ranks):
        row = first_row + 2 + pp_rank
        sheet.cell(row, 1, step.label(pp_rank)).font = BOLD
        if pp_rank not in index_of:
            sheet.cell(row, 2, "no trace of this rank")
            continue
        for number, (_, form, values) in enumerate(columns, start=2):
            cell = sheet.cell(row, number, _plain(values[index_of[pp_rank]]))
            cell.number_format = form
    _style_head(sheet, first_row)
    return first_row + 2 + step.num_ranks


def _style_head(sheet: Worksheet, title_row: int) -> None:
    sheet.cell(title_row, 1).font = BOLD
    sheet.row_dimensions[title_row + 1].height = HEAD_HEIGHT
    for cell in sheet[title_row + 1]:
        cell.font = BOLD
        cell.alignment = Alignment(wrap_text=True, vertical="top", horizontal="right")


def _mean(values: Floats) -> float:
    """Returns the mean of ``values``, ignoring NaN, or NaN if all values are NaN."""
    numbers = values[~np.isnan(values)]
    return float(numbers.mean()) if len(numbers) else float("nan")


def _plain(value: float) -> float | int | None:
    """Returns ``value`` as the content of a cell: ``int`` for a whole number, ``None`` for NaN."""
    number = float(value)
    if np.isnan(number):
        return None
    return int(number) if number.is_integer() else number
