"""Provides the ``xlsx`` view, an Excel workbook."""

from __future__ import annotations

from pathlib import Path

from megatron.adaptive.trace.views.view import ViewInput, trace_view


@trace_view(name="xlsx", ending=".xlsx", summary="workbook with timelines, tables and charts")
def xlsx(shown: ViewInput, path: Path) -> str:
    """Writes a workbook of the run in ``shown`` to ``path``.

    Returns a line that names the drawn iteration.
    """
    from megatron.adaptive.trace.views.workbook import write_workbook

    write_workbook(shown.run, shown.step, shown.figures, path)
    return f"iteration {shown.step.iteration} drawn"
