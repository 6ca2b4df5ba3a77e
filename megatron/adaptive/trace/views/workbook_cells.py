"""Draws cells of sheets that have a row per rank and time to the right.

Columns are set, cells are merged and styles are made in the ways that stay quick for charts of
hundred thousands of cells.
"""

from __future__ import annotations

from functools import cache

from openpyxl.cell import Cell
from openpyxl.styles import Alignment, Border, Font, PatternFill, Side
from openpyxl.worksheet.cell_range import CellRange
from openpyxl.worksheet.worksheet import Worksheet

from megatron.adaptive.trace.step import PipelineStep
from megatron.adaptive.trace.views.palette import ACTION_NAMES, chunk_color, text_color

__all__ = [
    "BOLD",
    "CENTRE",
    "FIRST_ROW",
    "LABEL_COLUMNS",
    "LEFT",
    "SEPARATOR",
    "TIME_ROW",
    "TITLE_ROW",
    "action_legend",
    "fill",
    "font",
    "merge",
    "patch",
    "prepare",
    "title",
]

LABEL_COLUMNS = 1
TITLE_ROW, TIME_ROW, FIRST_ROW = 1, 2, 3
PATCH_COLUMNS = 8
"""Width of a sample of a colour in the legend."""

BOLD = Font(bold=True)
CENTRE = Alignment(horizontal="center", vertical="center", shrink_to_fit=True)
LEFT = Alignment(horizontal="left", vertical="center")
SEPARATOR = Border(left=Side(style="thin", color="FFFFFF"))

_FAINT = Font(size=8, color="6B6B70")


def title(step: PipelineStep, step_ms: float, bubble_fraction: float) -> str:
    """One line that says what a sheet shows."""
    replica = f", replica {step.dp_rank} of {step.num_replicas}" if step.num_replicas > 1 else ""
    return (
        f"{step.schedule} schedule, iteration {step.iteration}{replica}: {step.num_ranks} ranks x "
        f"{step.num_chunks} chunks, {step.num_microbatches} microbatches, step "
        f"{step_ms:.2f} ms, bubble {bubble_fraction:.1%}"
    )


def prepare(
    sheet: Worksheet,
    step: PipelineStep,
    width: int,
    column_width: float,
    tick: int,
    unit_ms: float,
    offset: int = 0,
) -> None:
    """Set up a sheet: columns, frozen panes, the names of the ranks.

    Args:
        sheet: to be filled.
        step: whose ranks the rows are.
        width: columns of time.
        column_width: of each, in characters.
        tick: a time is written above every so many columns.
        unit_ms: time of a column.
        offset: columns of time before the first.
    """
    sheet.sheet_view.showGridLines = False
    sheet.freeze_panes = f"B{FIRST_ROW}"
    sheet.column_dimensions["A"].width = max(12, *map(len, map(step.label, range(step.num_ranks))))
    # One dimension for the whole range: column by column it would be 16,384 records.
    columns = sheet.column_dimensions["B"]
    columns.min, columns.max, columns.width = 2, LABEL_COLUMNS + width, column_width
    for pp_rank in range(step.num_ranks):
        row = FIRST_ROW + pp_rank
        sheet.row_dimensions[row].height = 20
        label = sheet.cell(row, 1, step.label(pp_rank))
        label.font, label.alignment = BOLD, LEFT
        if pp_rank in step.missing:
            sheet.cell(row, LABEL_COLUMNS + 1, "no trace of this rank").font = Font(italic=True)
    for start in range(0, width, tick):
        merge(sheet, TIME_ROW, start, min(start + tick, width))
        cell = sheet.cell(
            TIME_ROW, LABEL_COLUMNS + 1 + start, f"{(offset + start) * unit_ms:.4g} ms"
        )
        cell.font, cell.alignment = _FAINT, LEFT


def action_legend(sheet: Worksheet, step: PipelineStep, row: int, text: str) -> int:
    """Patches below a chart: a line per chunk, its kinds of action side by side.

    Returns:
        The row behind the last.
    """
    sheet.cell(row, 1, "legend").font = BOLD
    sheet.cell(row, LABEL_COLUMNS + 1, text)
    for chunk in range(step.num_chunks):
        sheet.cell(row + 1 + chunk, 1, f"chunk {chunk}")
        for place, action in enumerate(step.actions):
            color = chunk_color(action, chunk, step.num_chunks)
            start = place * (PATCH_COLUMNS + 1)
            cell = patch(sheet, row + 1 + chunk, start, color)
            cell.value, cell.alignment = ACTION_NAMES[action], CENTRE
    return row + 1 + step.num_chunks


def patch(sheet: Worksheet, row: int, start: int, color: str) -> Cell:
    """A sample of a colour from grid column ``start`` on; returns its cell."""
    merge(sheet, row, start, start + PATCH_COLUMNS)
    cell = sheet.cell(row, LABEL_COLUMNS + 1 + start)
    cell.fill, cell.font = fill(color), font(text_color(color))
    return cell  # type: ignore[return-value]


def merge(sheet: Worksheet, row: int, start: int, end: int) -> None:
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
def fill(color: str) -> PatternFill:
    """A solid fill ``RRGGBB``."""
    return PatternFill("solid", start_color=color, end_color=color)


@cache
def font(color: str) -> Font:
    """The small font of a cell of the chart, ``RRGGBB``."""
    return Font(size=8, color=color)
