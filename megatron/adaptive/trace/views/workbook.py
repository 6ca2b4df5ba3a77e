"""A run's pipeline as an Excel workbook.

- *order*       the actions of one iteration in executed order, wide enough to read
- *time*        the same on a scale of time
- *summary*     per rank: busy, waits by cause, bubble, lengths of actions, peaks, bytes
- *iterations*  per iteration: step time, bubble, waits
- *charts*      Excel's own charts of the last two

It shows one replica, and says which where there are several.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from openpyxl import Workbook
from openpyxl.styles import Font
from openpyxl.worksheet.worksheet import Worksheet

from megatron.adaptive.trace.event import Span
from megatron.adaptive.trace.figures import RunFigures
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.step import PipelineStep
from megatron.adaptive.trace.summary import NS_PER_MS, summarize
from megatron.adaptive.trace.views.palette import (
    IDLE,
    WAIT_COLORS,
    WAIT_NAMES,
    chunk_color,
    text_color,
)
from megatron.adaptive.trace.views.workbook_cells import (
    BOLD,
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
    title,
)
from megatron.adaptive.trace.views.workbook_tables import add_charts, add_iterations, add_summary

__all__ = [
    "Bin",
    "Bins",
    "Grid",
    "GridCell",
    "MAX_BINS",
    "MAX_COLUMNS",
    "add_order",
    "add_time",
    "fill_bins",
    "lay_out",
    "write_workbook",
]


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
    heading = title(step, summary.step_ms, summary.bubble_fraction)
    add_order(workbook, step, heading)
    add_time(workbook, step, heading)
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


MAX_COLUMNS = 16_384
GRID_COLUMNS = MAX_COLUMNS - LABEL_COLUMNS
FORWARD_COLUMNS = 4
"""Columns that a short action gets, so that its text fits."""

TICK_COLUMNS = 16
GRID_WIDTH = 1.4


@dataclass(frozen=True, slots=True)
class GridCell:
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
    rows: tuple[tuple[GridCell, ...], ...]


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
            row.append(GridCell(row[-1].end, num_columns, None))
    return Grid(unit_ns, num_columns, tuple(map(tuple, rows)))


def add_order(workbook: Workbook, step: PipelineStep, title: str) -> None:
    """Add the sheet, or the sheets where one is too narrow."""
    grid = lay_out(step)
    for part in range(-(-grid.num_columns // GRID_COLUMNS)):
        sheet = workbook.create_sheet("order" if part == 0 else f"order {part + 1}")
        _fill_sheet(sheet, step, grid, part * GRID_COLUMNS)
        sheet.cell(TITLE_ROW, 1, title).font = Font(bold=True, size=12)


def _cells(row: tuple[Span, ...], unit_ns: int) -> Iterator[GridCell]:
    at = 0
    for span in row:
        start = max(at, round(span.start_ns / unit_ns))
        end = max(start + 1, round(span.end_ns / unit_ns))
        if start > at:
            yield GridCell(at, start, None)
        yield GridCell(start, end, span)
        at = end


def _fill_sheet(sheet: Worksheet, step: PipelineStep, grid: Grid, offset: int) -> None:
    """Draw the columns ``offset .. offset + GRID_COLUMNS`` of the grid."""
    width = min(GRID_COLUMNS, grid.num_columns - offset)
    unit_ms = grid.unit_ns / 1e6
    prepare(sheet, step, width, GRID_WIDTH, TICK_COLUMNS, unit_ms, offset)
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


MAX_BINS = 600
TICK_BINS = 20
BIN_WIDTH = 0.9


@dataclass(frozen=True, slots=True)
class Bin:
    """Bins of a row side by side that show the same.

    Attributes:
        start: first bin.
        end: bin behind the last.
        span: the action, ``None`` for idle time.
        cause: of the wait, as in ``Span.reason``; ``None`` for actions and other idle time.
    """

    start: int
    end: int
    span: Span | None
    cause: str | None


@dataclass(frozen=True)
class Bins:
    """A step cut into bins.

    Attributes:
        unit_ns: time of a bin: 1, 2 or 5 times a power of ten.
        num_bins: at most :data:`MAX_BINS`.
        rows: per pipeline rank, gapless; empty where nothing is known.
    """

    unit_ns: int
    num_bins: int
    rows: tuple[tuple[Bin, ...], ...]


def fill_bins(step: PipelineStep) -> Bins:
    """Cut a step into bins."""
    unit_ns = next(u for u in _round_numbers() if -(-step.step_ns // u) <= MAX_BINS)
    count = max(1, -(-step.step_ns // unit_ns))
    waits = step.waits or ((),) * step.num_ranks
    rows = (
        tuple(_runs(_row(row, waits[pp_rank], unit_ns, count, step.step_ns))) if row else ()
        for pp_rank, row in enumerate(step.rows)
    )
    return Bins(unit_ns, count, tuple(rows))


def add_time(workbook: Workbook, step: PipelineStep, title: str) -> None:
    """Add the sheet."""
    bins = fill_bins(step)
    sheet = workbook.create_sheet("time")
    unit_ms = bins.unit_ns / NS_PER_MS
    prepare(sheet, step, bins.num_bins, BIN_WIDTH, TICK_BINS, unit_ms)
    sheet.cell(TITLE_ROW, 1, f"{title}; one column is {unit_ms:g} ms").font = Font(
        bold=True, size=12
    )
    causes: set[str | None] = set()
    for pp_rank, row in enumerate(bins.rows):
        for run in row:
            merge(sheet, FIRST_ROW + pp_rank, run.start, run.end)
            cell = sheet.cell(FIRST_ROW + pp_rank, LABEL_COLUMNS + 1 + run.start)
            if run.span is None:
                causes.add(run.cause)
                cell.fill = fill(IDLE if run.cause is None else WAIT_COLORS[run.cause])
                continue
            color = chunk_color(run.span.action, run.span.chunk, step.num_chunks)
            cell.value = f"{run.span.chunk}-{run.span.microbatch}"
            cell.fill, cell.font, cell.alignment = fill(color), font(text_color(color)), CENTRE
            cell.border = SEPARATOR
    last = action_legend(
        sheet,
        step,
        FIRST_ROW + step.num_ranks + 1,
        f"a column is {unit_ms:g} ms and shows what covers most of it, as chunk-microbatch",
    )
    for cause in [cause for cause in WAIT_NAMES if cause in causes]:
        sheet.cell(last, 1, WAIT_NAMES[cause])
        patch(sheet, last, 0, WAIT_COLORS[cause])
        last += 1
    sheet.cell(last, 1, "idle, no wait")
    patch(sheet, last, 0, IDLE)


def _round_numbers() -> Iterator[int]:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _row(
    row: Iterable[Span], waits: Iterable[Span], unit_ns: int, count: int, step_ns: int
) -> Iterator[tuple[Span | None, str | None]]:
    """What each bin shows: an action or the cause of a wait."""
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


def _runs(cells: Iterable[tuple[Span | None, str | None]]) -> Iterator[Bin]:
    at = 0
    for (_, cause), group in groupby(cells, key=lambda cell: (id(cell[0]), cell[1])):
        members = list(group)
        yield Bin(at, at + len(members), members[0][0], cause)
        at += len(members)
