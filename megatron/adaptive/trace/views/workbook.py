"""A run's pipeline as an Excel workbook.

- *order*       the actions of one iteration in executed order, wide enough to read
- *time*        the same on a scale of time
- *summary*     per rank: busy, waits by cause, bubble, lengths of actions, peaks, bytes
- *iterations*  per iteration: step time, bubble, waits
- *charts*      Excel's own charts of the last two

It shows one replica, and says which where there are several. Columns are set, cells are merged and
styles are made in the ways that stay quick for charts of hundred thousands of cells.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from openpyxl import Workbook
from openpyxl.styles import Alignment, Border, Font, PatternFill, Side
from openpyxl.worksheet.cell_range import CellRange
from openpyxl.worksheet.worksheet import Worksheet

from megatron.adaptive.trace.event import Span
from megatron.adaptive.trace.figures import RunFigures
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.step import PipelineStep
from megatron.adaptive.trace.summary import NS_PER_MS, summarize
from megatron.adaptive.trace.views.palette import (
    ACTION_NAMES,
    IDLE,
    WAIT_COLORS,
    WAIT_NAMES,
    chunk_color,
    text_color,
)
from megatron.adaptive.trace.views.workbook_tables import (
    BOLD,
    add_charts,
    add_iterations,
    add_summary,
)

__all__ = [
    "Chart",
    "ChartCell",
    "MAX_BINS",
    "MAX_COLUMNS",
    "add_order",
    "fill_bins",
    "lay_out",
    "write_workbook",
]

LABEL_COLUMNS = 1
TITLE_ROW, TIME_ROW, FIRST_ROW = 1, 2, 3
PATCH_COLUMNS = 8
"""Width of a sample of a colour in the legend."""
MAX_COLUMNS = 16_384
GRID_COLUMNS = MAX_COLUMNS - LABEL_COLUMNS
FORWARD_COLUMNS = 4
"""Columns of the sheet *order* that a short action gets, so that its text fits."""
MAX_BINS = 600
"""Columns of the sheet *time*."""

CENTRE = Alignment(horizontal="center", vertical="center", shrink_to_fit=True)
LEFT = Alignment(horizontal="left", vertical="center")
SEPARATOR = Border(left=Side(style="thin", color="FFFFFF"))
_FAINT = Font(size=8, color="6B6B70")


@dataclass(frozen=True, slots=True)
class ChartCell:
    """A run of columns in a row that shows one thing.

    Attributes:
        start: first column of time, from 0.
        end: column behind the last.
        span: the action, ``None`` for idle time.
        cause: of the wait, as in ``Span.reason``; ``None`` for actions and other idle time.
    """

    start: int
    end: int
    span: Span | None
    cause: str | None = None


@dataclass(frozen=True)
class Chart:
    """A step on columns of equal time.

    Attributes:
        unit_ns: time per column.
        num_columns: columns of the longest row; every known row is filled up to it.
        rows: per pipeline rank its cells, gapless; empty where nothing is known.
    """

    unit_ns: int
    num_columns: int
    rows: tuple[tuple[ChartCell, ...], ...]


def write_workbook(
    run: RunTrace, step: PipelineStep, figures: RunFigures, target: str | os.PathLike[str]
) -> None:
    """Write a workbook (``.xlsx``), replacing the file.

    Args:
        run: where both come from; what is wrong with it is said below the summary.
        step: the iteration to draw.
        figures: of the ranks of its pipeline, over the iterations to cover; ``step.iteration`` is
            one of them.
        target: the file.

    Raises:
        TraceError: the file cannot be written.
    """
    workbook = Workbook()
    summary = summarize(step)
    replica = f", replica {step.dp_rank} of {step.num_replicas}" if step.num_replicas > 1 else ""
    title = (
        f"{step.schedule} schedule, iteration {step.iteration}{replica}: {step.num_ranks} ranks x "
        f"{step.num_chunks} chunks, {step.num_microbatches} microbatches, step "
        f"{summary.step_ms:.2f} ms, bubble {summary.bubble_fraction:.1%}"
    )
    add_order(workbook, step, title)
    _add_time(workbook, step, title)
    add_summary(workbook, step, figures)
    num_iterations = add_iterations(workbook, step, figures)
    add_charts(workbook, step, num_iterations)
    del workbook[workbook.sheetnames[0]]
    _add_notes(workbook, run, figures)
    with replaced(target) as temporary:
        workbook.save(temporary)


def _add_notes(workbook: Workbook, run: RunTrace, figures: RunFigures) -> None:
    """Say below the summary what the reader must know about the trace."""
    sheet = workbook["summary"]
    lines = [f"run {run.run}, {run.origin}", f"clocks: {run.alignment.describe()}"]
    lines += run.notes() + figures.notes()
    row = sheet.max_row + 2
    sheet.cell(row, 1, "about this trace").font = BOLD
    for number, line in enumerate(lines, start=1):
        sheet.cell(row + number, 1, line)


def lay_out(step: PipelineStep) -> Chart:
    """Lay a step on a grid.

    A tenth of the actions may be shorter than four columns. Rows drift to the right of their true
    time only where actions shorter than a column crowd.
    """
    durations = sorted(span.duration_ns for row in step.rows for span in row)
    short_ns = durations[len(durations) // 10]
    unit_ns = max(1, short_ns // FORWARD_COLUMNS, -(-step.step_ns // (GRID_COLUMNS - 1)))
    rows = [list(_cells(row, unit_ns)) for row in step.rows]
    num_columns = max(round(step.step_ns / unit_ns), *(row[-1].end for row in rows if row))
    for row in rows:
        if row and row[-1].end < num_columns:
            row.append(ChartCell(row[-1].end, num_columns, None))
    return Chart(unit_ns, num_columns, tuple(map(tuple, rows)))


def _cells(row: tuple[Span, ...], unit_ns: int) -> Iterator[ChartCell]:
    at = 0
    for span in row:
        start = max(at, round(span.start_ns / unit_ns))
        end = max(start + 1, round(span.end_ns / unit_ns))
        if start > at:
            yield ChartCell(at, start, None)
        yield ChartCell(start, end, span)
        at = end


def fill_bins(step: PipelineStep) -> Chart:
    """Cut a step into at most :data:`MAX_BINS` columns of 1, 2 or 5 times a power of ten ns."""
    unit_ns = next(u for u in _round_numbers() if -(-step.step_ns // u) <= MAX_BINS)
    count = max(1, -(-step.step_ns // unit_ns))
    waits = step.waits or ((),) * step.num_ranks
    rows = (
        tuple(_runs(_row(row, waits[pp_rank], unit_ns, count, step.step_ns))) if row else ()
        for pp_rank, row in enumerate(step.rows)
    )
    return Chart(unit_ns, count, tuple(rows))


def add_order(workbook: Workbook, step: PipelineStep, title: str) -> None:
    """Add the sheet *order*, or the sheets where one is too narrow."""
    chart = lay_out(step)
    about = "cells read chunk-microbatch, width is time"
    for part in range(-(-chart.num_columns // GRID_COLUMNS)):
        sheet = workbook.create_sheet("order" if part == 0 else f"order {part + 1}")
        last = _draw(sheet, step, chart, title, about, 1.4, 16, part * GRID_COLUMNS)
        _patch(sheet, last, 0, IDLE, "idle (bubble)")


def _add_time(workbook: Workbook, step: PipelineStep, title: str) -> None:
    chart = fill_bins(step)
    sheet = workbook.create_sheet("time")
    unit = f"{chart.unit_ns / NS_PER_MS:g} ms"
    about = f"a column is {unit} and shows what covers most of it, as chunk-microbatch"
    last = _draw(sheet, step, chart, f"{title}; one column is {unit}", about, 0.9, 20)
    causes = {cell.cause for row in chart.rows for cell in row}
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
    offset: int = 0,
) -> int:
    """Draw a sheet that has a row per rank and time to the right.

    Args:
        sheet: to be filled.
        step: whose ranks the rows are.
        chart: its cells.
        title: above all.
        about: the legend's first line.
        column_width: of each column of time, in characters.
        tick: a time is written above every so many columns.
        offset: columns of the chart before the first; as many as fit are drawn.

    Returns:
        The row behind the legend of actions.
    """
    width = min(GRID_COLUMNS, chart.num_columns - offset)
    sheet.sheet_view.showGridLines = False
    sheet.freeze_panes = f"B{FIRST_ROW}"
    sheet.column_dimensions["A"].width = max(12, *map(len, map(step.label, range(step.num_ranks))))
    # One dimension for the whole range: column by column it would be 16,384 records.
    columns = sheet.column_dimensions["B"]
    columns.min, columns.max, columns.width = 2, LABEL_COLUMNS + width, column_width
    sheet.cell(TITLE_ROW, 1, title).font = Font(bold=True, size=12)
    for start in range(0, width, tick):
        _merge(sheet, TIME_ROW, start, min(start + tick, width))
        text = f"{(offset + start) * chart.unit_ns / NS_PER_MS:.4g} ms"
        cell = sheet.cell(TIME_ROW, LABEL_COLUMNS + 1 + start, text)
        cell.font, cell.alignment = _FAINT, LEFT
    for pp_rank, cells in enumerate(chart.rows):
        row = FIRST_ROW + pp_rank
        sheet.row_dimensions[row].height = 20
        label = sheet.cell(row, 1, step.label(pp_rank))
        label.font, label.alignment = BOLD, LEFT
        if pp_rank in step.missing:
            sheet.cell(row, LABEL_COLUMNS + 1, "no trace of this rank").font = Font(italic=True)
        for one in cells:
            start, end = max(one.start - offset, 0), min(one.end - offset, width)
            if start < end:
                _fill_cell(sheet, row, start, end, one, step.num_chunks)
    row = FIRST_ROW + step.num_ranks + 1
    sheet.cell(row, 1, "legend").font = BOLD
    sheet.cell(row, LABEL_COLUMNS + 1, about)
    for chunk in range(step.num_chunks):
        for place, action in enumerate(step.actions):
            color = chunk_color(action, chunk, step.num_chunks)
            start = place * (PATCH_COLUMNS + 1)
            _patch(sheet, row + 1 + chunk, start, color, f"chunk {chunk}", ACTION_NAMES[action])
    return row + 1 + step.num_chunks


def _fill_cell(
    sheet: Worksheet, row: int, start: int, end: int, shown: ChartCell, num_chunks: int
) -> None:
    _merge(sheet, row, start, end)
    cell = sheet.cell(row, LABEL_COLUMNS + 1 + start)
    span = shown.span
    if span is None:
        cell.fill = _fill(IDLE if shown.cause is None else WAIT_COLORS[shown.cause])
        return
    color = chunk_color(span.action, span.chunk, num_chunks)
    cell.value, cell.border = f"{span.chunk}-{span.microbatch}", SEPARATOR
    cell.fill, cell.font, cell.alignment = _fill(color), _font(text_color(color)), CENTRE


def _patch(
    sheet: Worksheet, row: int, start: int, color: str, label: str, text: str | None = None
) -> None:
    """Draw a labelled sample of a colour from column ``start`` of the time on."""
    sheet.cell(row, 1, label)
    _merge(sheet, row, start, start + PATCH_COLUMNS)
    cell = sheet.cell(row, LABEL_COLUMNS + 1 + start, text)
    cell.fill, cell.font, cell.alignment = _fill(color), _font(text_color(color)), CENTRE


def _merge(sheet: Worksheet, row: int, start: int, end: int) -> None:
    """Merge columns ``start .. end - 1`` of a row.

    Goes into the set of ranges directly: the sheet's own method makes an object for each covered
    cell and compares every pair of ranges, which takes minutes for a wide chart.
    """
    if end - start > 1:
        area = CellRange(
            min_row=row,
            max_row=row,
            min_col=LABEL_COLUMNS + 1 + start,
            max_col=LABEL_COLUMNS + end,
        )
        sheet.merged_cells.ranges.add(area)


@cache
def _fill(color: str) -> PatternFill:
    return PatternFill("solid", start_color=color, end_color=color)


@cache
def _font(color: str) -> Font:
    return Font(size=8, color=color)


def _round_numbers() -> Iterator[int]:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _row(
    row: Iterable[Span], waits: Iterable[Span], unit_ns: int, count: int, step_ns: int
) -> Iterator[tuple[Span | None, str | None]]:
    """Chooses what each bin shows: an action or the cause of a wait."""
    busy, most = [0] * count, [0] * count
    shown: list[Span | None] = [None] * count
    for span in row:
        for at, covered in _overlaps(span, unit_ns, count):
            busy[at] += covered
            if covered > most[at] or shown[at] is None:
                most[at], shown[at] = covered, span
    idle: list[dict[str, int]] = [{} for _ in range(count)]
    for wait in waits:
        cause = wait.reason if wait.reason in WAIT_NAMES else ""
        for at, covered in _overlaps(wait, unit_ns, count):
            idle[at][cause] = idle[at].get(cause, 0) + covered
    for at in range(count):
        extent = min(unit_ns, step_ns - at * unit_ns)
        if shown[at] is not None and 2 * busy[at] >= extent:
            yield shown[at], None
            continue
        unexplained = extent - busy[at] - sum(idle[at].values())
        longest = max(idle[at], key=idle[at].__getitem__, default="")
        yield None, longest if idle[at].get(longest, 0) > max(0, unexplained) else None


def _overlaps(span: Span, unit_ns: int, count: int) -> Iterator[tuple[int, int]]:
    """The bins that a span touches, and how much of each it covers."""
    first = min(max(span.start_ns // unit_ns, 0), count - 1)
    last = min(max(-(-span.end_ns // unit_ns), first + 1), count)
    for at in range(first, last):
        yield (
            at,
            max(0, min(span.end_ns, (at + 1) * unit_ns) - max(span.start_ns, at * unit_ns)),
        )


def _runs(cells: Iterable[tuple[Span | None, str | None]]) -> Iterator[ChartCell]:
    at = 0
    for (_, cause), group in groupby(cells, key=lambda cell: (id(cell[0]), cell[1])):
        members = list(group)
        yield ChartCell(at, at + len(members), members[0][0], cause)
        at += len(members)
