"""The chart of a step as an Excel workbook.

Sheet *order*: one row per stage (per rank that holds several), time to the right on a grid of
narrow columns. An action covers as many columns as its duration needs, one at least, merged into
one cell with the text ``chunk-microbatch``; grey is idle::

              0 ms          1 ms          2 ms
    stage 0 | 0-0 | 0-1 |::::::::|   0-0    |   0-1    |
    stage 1 |:::::| 0-0 |   0-0    | 0-1 |   0-1    |::|

Excel allows 16,384 columns: a longer step gets coarser columns, and one with more actions than
columns goes on in sheets *order 2*, *order 3*. Sheet *summary*: the figures of each rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from openpyxl import Workbook
from openpyxl.styles import Alignment, Border, Font, PatternFill, Side
from openpyxl.utils import get_column_letter
from openpyxl.worksheet.cell_range import CellRange
from openpyxl.worksheet.worksheet import Worksheet

from megatron.adaptive.trace.event import Span
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.palette import ACTION_NAMES, IDLE, chunk_color, text_color
from megatron.adaptive.trace.step import PipelineStep
from megatron.adaptive.trace.summary import StepSummary, summarize

__all__ = ["Cell", "Grid", "lay_out", "write_workbook"]

MAX_COLUMNS = 16_384
LABEL_COLUMNS = 1
GRID_COLUMNS = MAX_COLUMNS - LABEL_COLUMNS
FORWARD_COLUMNS = 4
"""Columns that a short action gets, so that its text fits."""

TITLE_ROW, TIME_ROW, FIRST_ROW = 1, 2, 3
TICK_COLUMNS = 16
COLUMN_WIDTH = 1.4

_CENTRE = Alignment(horizontal="center", vertical="center", shrink_to_fit=True)
_LEFT = Alignment(horizontal="left", vertical="center")
_SEPARATOR = Border(left=Side(style="thin", color="FFFFFF"))


@dataclass(frozen=True, slots=True)
class Cell:
    """A run of grid columns in a row: an action, or idle time (``span`` is ``None``).

    Attributes:
        start: first column, from 0.
        end: column behind the last.
        span: the action, or ``None``.
    """

    start: int
    end: int
    span: Span | None


@dataclass(frozen=True)
class Grid:
    """A step laid on columns of equal time.

    Attributes:
        unit_ns: time per column.
        num_columns: columns of the longest row; every known row is filled up to it.
        rows: per pipeline rank its cells, gapless; empty where nothing is known.
    """

    unit_ns: int
    num_columns: int
    rows: tuple[tuple[Cell, ...], ...]


def lay_out(step: PipelineStep) -> Grid:
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
            row.append(Cell(row[-1].end, num_columns, None))
    return Grid(unit_ns, num_columns, tuple(map(tuple, rows)))


def write_workbook(step: PipelineStep, path: str | os.PathLike[str]) -> None:
    """Write a step as ``.xlsx``, replacing the file.

    Raises:
        TraceError: the file cannot be written.
    """
    grid = lay_out(step)
    summary = summarize(step)
    workbook = Workbook()
    for part in range(-(-grid.num_columns // GRID_COLUMNS)):
        name = "order" if part == 0 else f"order {part + 1}"
        sheet = workbook.create_sheet(name)
        _fill_sheet(sheet, step, grid, part * GRID_COLUMNS)
        sheet.cell(TITLE_ROW, 1, _title(step, summary)).font = Font(bold=True, size=12)
    del workbook[workbook.sheetnames[0]]
    _fill_summary(workbook.create_sheet("summary"), summary)
    with replaced(path) as temporary:
        workbook.save(temporary)


def _cells(row: tuple[Span, ...], unit_ns: int) -> Iterator[Cell]:
    at = 0
    for span in row:
        start = max(at, round(span.start_ns / unit_ns))
        end = max(start + 1, round(span.end_ns / unit_ns))
        if start > at:
            yield Cell(at, start, None)
        yield Cell(start, end, span)
        at = end


def _title(step: PipelineStep, summary: StepSummary) -> str:
    return (
        f"{step.schedule} schedule, iteration {step.iteration}: {step.num_ranks} ranks x "
        f"{step.num_chunks} chunks, {step.num_microbatches} microbatches, step "
        f"{summary.step_ms:.2f} ms, bubble {summary.bubble_fraction:.1%}"
    )


def _fill_sheet(sheet: Worksheet, step: PipelineStep, grid: Grid, offset: int) -> None:
    """Draw the columns ``offset .. offset + GRID_COLUMNS`` of the grid."""
    width = min(GRID_COLUMNS, grid.num_columns - offset)
    sheet.sheet_view.showGridLines = False
    sheet.freeze_panes = f"B{FIRST_ROW}"
    sheet.column_dimensions["A"].width = max(12, *map(len, map(step.label, range(step.num_ranks))))
    # One dimension for the whole range: column by column it would be 16,384 records.
    columns = sheet.column_dimensions["B"]
    columns.min, columns.max, columns.width = 2, LABEL_COLUMNS + width, COLUMN_WIDTH
    _fill_times(sheet, grid, offset, width)
    for pp_rank, cells in enumerate(grid.rows):
        row = FIRST_ROW + pp_rank
        sheet.row_dimensions[row].height = 20
        label = sheet.cell(row, 1, step.label(pp_rank))
        label.font, label.alignment = Font(bold=True), _LEFT
        if pp_rank in step.missing:
            sheet.cell(row, LABEL_COLUMNS + 1, "no trace of this rank").font = Font(italic=True)
        for cell in cells:
            start, end = max(cell.start - offset, 0), min(cell.end - offset, width)
            if start < end:
                _fill_cell(sheet, row, start, end, cell.span, step.num_chunks)
    _fill_legend(sheet, step, FIRST_ROW + step.num_ranks + 1)


def _fill_times(sheet: Worksheet, grid: Grid, offset: int, width: int) -> None:
    unit_ms = grid.unit_ns / 1e6
    for start in range(0, width, TICK_COLUMNS):
        end = min(start + TICK_COLUMNS, width)
        _merge(sheet, TIME_ROW, start, end)
        cell = sheet.cell(TIME_ROW, LABEL_COLUMNS + 1 + start)
        cell.value = f"{(offset + start) * unit_ms:.4g} ms"
        cell.font, cell.alignment = Font(size=8, color="6B6B70"), _LEFT


def _fill_cell(
    sheet: Worksheet, row: int, start: int, end: int, span: Span | None, num_chunks: int
) -> None:
    _merge(sheet, row, start, end)
    cell = sheet.cell(row, LABEL_COLUMNS + 1 + start)
    cell.border = _SEPARATOR
    if span is None:
        cell.fill = _fill(IDLE)
        return
    color = chunk_color(span.action, span.chunk, num_chunks)
    cell.value = f"{span.chunk}-{span.microbatch}"
    cell.fill, cell.font, cell.alignment = _fill(color), _font(text_color(color)), _CENTRE


def _fill_legend(sheet: Worksheet, step: PipelineStep, row: int) -> None:
    """Patches below the chart: a line per chunk, its kinds of action side by side."""
    sheet.cell(row, 1, "legend").font = Font(bold=True)
    sheet.cell(row, LABEL_COLUMNS + 1, "cells read chunk-microbatch, width is time")
    width = 2 * FORWARD_COLUMNS
    for chunk in range(step.num_chunks):
        sheet.cell(row + 1 + chunk, 1, f"chunk {chunk}")
        for place, action in enumerate(step.actions):
            color = chunk_color(action, chunk, step.num_chunks)
            start = place * (width + 1)
            _merge(sheet, row + 1 + chunk, start, start + width)
            cell = sheet.cell(row + 1 + chunk, LABEL_COLUMNS + 1 + start, ACTION_NAMES[action])
            cell.fill, cell.font, cell.alignment = _fill(color), _font(text_color(color)), _CENTRE
    last = row + 1 + step.num_chunks
    sheet.cell(last, 1, "idle (bubble)")
    _merge(sheet, last, 0, width)
    sheet.cell(last, LABEL_COLUMNS + 1).fill = _fill(IDLE)


def _fill_summary(sheet: Worksheet, summary: StepSummary) -> None:
    kinds = [k for k in ACTION_NAMES if any(k in rank.times for rank in summary.ranks)]
    head = ["", "actions", "busy ms", "wait ms", "bubble fraction"]
    for kind in kinds:
        head += [f"{kind} mean ms", f"{kind} standard deviation ms"]
    head += ["peak microbatches in flight", "peak bytes in flight", "bytes moved"]
    sheet.append(head)
    for rank in summary.ranks:
        line: list[str | int | float | None] = [
            rank.label,
            rank.num_actions,
            rank.busy_ms,
            rank.wait_ms,
            rank.bubble_fraction,
        ]
        for kind in kinds:
            time = rank.times.get(kind)
            line += [time.mean_ms, time.stdev_ms] if time else [None, None]
        line += [rank.peak_microbatches, rank.peak_in_flight_bytes, rank.transfer_bytes]
        sheet.append(line)
    for row in sheet.iter_rows(min_row=2, min_col=3):
        for figure in row:
            figure.number_format = "0.000" if isinstance(figure.value, float) else "#,##0"
        row[2].number_format = "0.0%"
    for column, title in enumerate(head, start=1):
        sheet.cell(1, column).font = Font(bold=True)
        longest = max([len(title), *(len(rank.label) for rank in summary.ranks if column == 1)])
        sheet.column_dimensions[get_column_letter(column)].width = longest + 2
    sheet.freeze_panes = "B2"


def _merge(sheet: Worksheet, row: int, start: int, end: int) -> None:
    """Merge grid columns ``start .. end - 1`` of a row.

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
