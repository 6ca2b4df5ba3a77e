"""Provides the ``png`` view, a picture of one iteration."""

from __future__ import annotations

from pathlib import Path

from megatron.adaptive.trace.views.view import ViewInput, trace_view


@trace_view(name="png", ending=".png", summary="picture of one iteration")
def png(shown: ViewInput, path: Path) -> str:
    """Writes a picture of the iteration in ``shown`` to ``path``.

    Returns a line that names the drawn iteration.
    """
    from megatron.adaptive.trace.views.picture import write_picture

    write_picture(shown.step, path)
    return f"iteration {shown.step.iteration} drawn"
