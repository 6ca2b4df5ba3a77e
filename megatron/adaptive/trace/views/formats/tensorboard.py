"""Provides the view ``tensorboard``, curves over the iterations."""

from __future__ import annotations

from pathlib import Path

from megatron.adaptive.trace.views.view import ViewInput, trace_view


@trace_view(name="tensorboard", ending="_tensorboard", summary="folder of curves per rank")
def tensorboard(shown: ViewInput, path: Path) -> str:
    """Writes the curves, and returns how many iterations they cover."""
    from megatron.adaptive.trace.views.scalars import write_scalars

    write_scalars(shown.run, shown.figures, path)
    return f"curves of {len(shown.iterations)} iterations"
