"""Sheet *time*: a row per stage, a column per bin of time; bubbles have their true width.

A bin is idle where actions cover less than half of it, and then has the colour of the wait that
covers most of it, or grey. Any other bin shows the action that covers most of it. Bins of one
action, and of one cause side by side, are one cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from openpyxl import Workbook
from openpyxl.styles import Font

from megatron.adaptive.trace.event import Span
from megatron.adaptive.trace.step import PipelineStep
from megatron.adaptive.trace.summary import NS_PER_MS
from megatron.adaptive.trace.views.palette import (
    IDLE,
    WAIT_COLORS,
    WAIT_NAMES,
    chunk_color,
    text_color,
)
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

__all__ = ["MAX_BINS", "Bin", "Bins", "add_time", "fill_bins"]

MAX_BINS = 600
TICK_BINS = 20
COLUMN_WIDTH = 0.9


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
    prepare(sheet, step, bins.num_bins, COLUMN_WIDTH, TICK_BINS, unit_ms)
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
