"""Provides the ``perfetto`` view, which exports events for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path

from megatron.adaptive.trace.views.view import ViewInput, trace_view

EVENT_ITERATIONS = 20
"""Maximum number of iterations in a file of events. Viewers are slow with larger files."""


@trace_view(
    name="perfetto",
    ending=".json.gz",
    summary=f"events of the last {EVENT_ITERATIONS} iterations for Perfetto and chrome://tracing",
)
def perfetto(shown: ViewInput, path: Path) -> list[str]:
    """Writes the events of the last iterations in ``shown`` to ``path``.

    Returns a description of the file, and notes on omitted parts.
    """
    from megatron.adaptive.trace.read import describe_numbers
    from megatron.adaptive.trace.views.perfetto import write_perfetto

    covered = shown.iterations[-EVENT_ITERATIONS:]
    notes = write_perfetto(shown.run, path, covered, dp_rank=shown.dp_rank)
    return [f"events of iterations {describe_numbers(covered)}", *notes]
