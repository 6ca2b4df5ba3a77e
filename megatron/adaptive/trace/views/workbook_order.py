"""Sheet *order*: one row per stage (per rank that holds several), actions in executed order.

Time is to the right on a grid of narrow columns. An action covers as many columns as its duration
needs, one at least, merged into one cell with the text ``chunk-microbatch``; grey is idle::

              0 ms          1 ms          2 ms
    stage 0 | 0-0 | 0-1 |::::::::|   0-0    |   0-1    |
    stage 1 |:::::| 0-0 |   0-0    | 0-1 |   0-1    |::|

Excel allows 16,384 columns: a longer step gets coarser columns, and one with more actions than
columns goes on in sheets *order 2*, *order 3*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openpyxl import Workbook
from openpyxl.styles import Font
from openpyxl.worksheet.worksheet import Worksheet

from megatron.adaptive.trace.event import Span
from megatron.adaptive.trace.step import PipelineStep
from megatron.adaptive.trace.views.palette import IDLE, chunk_color, text_color
from megatron.adaptive.trace.views.workbook_cells import (
    CENTRE,
    FIRST_ROW,
    LABEL_COLUMNS,
    SEPARATOR,
    TITLE_ROW,
    action_legend,
    fill,
    font,
    merge,
    patch,
    prepare,
)

__all__ = ["MAX_COLUMNS", "Cell", "Grid", "add_order", "lay_out"]

MAX_COLUMNS = 16_384
GRID_COLUMNS = MAX_COLUMNS - LABEL_COLUMNS
FORWARD_COLUMNS = 4
"""Columns that a short action gets, so that its text fits."""

TICK_COLUMNS = 16
COLUMN_WIDTH = 1.4


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


def add_order(workbook: Workbook, step: PipelineStep, title: str) -> None:
    """Add the sheet, or the sheets where one is too narrow."""
    grid = lay_out(step)
    for part in range(-(-grid.num_columns // GRID_COLUMNS)):
        sheet = workbook.create_sheet("order" if part == 0 else f"order {part + 1}")
        _fill_sheet(sheet, step, grid, part * GRID_COLUMNS)
        sheet.cell(TITLE_ROW, 1, title).font = Font(bold=True, size=12)


def _cells(row: tuple[Span, ...], unit_ns: int) -> Iterator[Cell]:
    at = 0
    for span in row:
        start = max(at, round(span.start_ns / unit_ns))
        end = max(start + 1, round(span.end_ns / unit_ns))
        if start > at:
            yield Cell(at, start, None)
        yield Cell(start, end, span)
        at = end


def _fill_sheet(sheet: Worksheet, step: PipelineStep, grid: Grid, offset: int) -> None:
    """Draw the columns ``offset .. offset + GRID_COLUMNS`` of the grid."""
    width = min(GRID_COLUMNS, grid.num_columns - offset)
    unit_ms = grid.unit_ns / 1e6
    prepare(sheet, step, width, COLUMN_WIDTH, TICK_COLUMNS, unit_ms, offset)
    for pp_rank, cells in enumerate(grid.rows):
        for cell in cells:
            start, end = max(cell.start - offset, 0), min(cell.end - offset, width)
            if start < end:
                _fill_cell(sheet, FIRST_ROW + pp_rank, start, end, cell.span, step.num_chunks)
    last = action_legend(
        sheet,
        step,
        FIRST_ROW + step.num_ranks + 1,
        "cells read chunk-microbatch, width is time",
    )
    sheet.cell(last, 1, "idle (bubble)")
    patch(sheet, last, 0, IDLE)


def _fill_cell(
    sheet: Worksheet, row: int, start: int, end: int, span: Span | None, num_chunks: int
) -> None:
    merge(sheet, row, start, end)
    cell = sheet.cell(row, LABEL_COLUMNS + 1 + start)
    cell.border = SEPARATOR
    if span is None:
        cell.fill = fill(IDLE)
        return
    color = chunk_color(span.action, span.chunk, num_chunks)
    cell.value = f"{span.chunk}-{span.microbatch}"
    cell.fill, cell.font, cell.alignment = fill(color), font(text_color(color)), CENTRE
