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

from openpyxl import Workbook

from megatron.adaptive.trace.figures import RunFigures
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.step import PipelineStep
from megatron.adaptive.trace.summary import summarize
from megatron.adaptive.trace.views.workbook_cells import BOLD, title
from megatron.adaptive.trace.views.workbook_order import add_order
from megatron.adaptive.trace.views.workbook_tables import add_charts, add_iterations, add_summary
from megatron.adaptive.trace.views.workbook_time import add_time

__all__ = ["write_workbook"]


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
