"""Provides the ``html`` view, a page for the browser."""

from __future__ import annotations

from pathlib import Path

from megatron.adaptive.trace.views.view import ViewInput, trace_view


@trace_view(name="html", ending=".html", summary="web page with a zoomable timeline")
def html(shown: ViewInput, path: Path) -> list[str]:
    """Writes a page with ``shown``, the chosen iterations and ranks of a run, to ``path``.

    Returns a description of the page, and notes on omitted parts.
    """
    from megatron.adaptive.trace.views.page import write_page

    notes = write_page(shown.run, path, shown.iterations, dp_rank=shown.dp_rank)
    return ["zoomable page", *notes]
