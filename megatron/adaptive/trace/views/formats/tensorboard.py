"""Provides the ``tensorboard`` view, which contains charts with one curve per rank.

::

    <folder>/mean/events.out.tfevents.trace          mean of the curves over ranks
    <folder>/rank 00003/events.out.tfevents.trace    curves of a single rank

Each curve has one point per iteration, with the time of day at which the iteration ran. The files
are written with TensorBoard's own writer. They become visible only when they are complete. Files
from an earlier export are replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.metrics import NS_PER_MS, PARTS, Floats, RunFigures
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.views.view import ViewInput, trace_view

FILE_NAME = "events.out.tfevents.trace"
MEAN = "mean"
"""Name of the folder with the curves averaged over ranks."""


@trace_view(name="tensorboard", ending="_tensorboard", summary="folder of curves per rank")
def tensorboard(shown: ViewInput, path: Path) -> str:
    """Writes curves of the iterations and ranks in ``shown`` to the folder ``path``.

    Returns a line that states the number of iterations.
    """
    write_scalars(shown.run, shown.figures, path)
    return f"curves of {len(shown.iterations)} iterations"


def write_scalars(
    run: RunTrace, figures: RunFigures, folder: str | os.PathLike[str]
) -> tuple[str, ...]:
    """Writes curves of the idle fraction, the step time, and the parts of the step.

    Args:
        run: Trace of the run.
        figures: Statistics of the ranks to show, for each iteration.
        folder: Folder to pass to TensorBoard as ``--logdir``. Files from an earlier call are
            replaced.

    Returns:
        Names of the curves.

    Raises:
        TraceError: A file cannot be written.
    """
    # TensorBoard is slow to import, and only this function needs it.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    curves = {f"{tag}{run.bubble_note}": values for tag, values in _curves(figures)}
    is_recorded = figures.num_actions > 0
    header = next(iter(run.ranks.values())).header
    # Times of a run with a single clock are monotonic, and must be shifted to the time of day. With
    # several clocks, the reader of the trace has already converted all times to the time of day.
    is_monotonic = len(run.alignment.clocks) == 1
    lead_ns = header.unix_ns - header.monotonic_ns if is_monotonic else 0
    moments_s = (figures.step_start_ns.max(axis=1) + lead_ns) / 1e9
    runs = {f"rank {rank:05d}": column for column, rank in enumerate(figures.ranks.tolist())}
    for name, column in {MEAN: None, **runs}.items():
        with replaced(Path(folder, name, FILE_NAME)) as temporary, temporary.open("wb") as file:
            writer = RecordWriter(file)
            start_s = float(moments_s[0])
            writer.write(Event(wall_time=start_s, file_version="brain.Event:2").SerializeToString())
            for row, iteration in enumerate(figures.iterations.tolist()):
                columns = np.flatnonzero(is_recorded[row]) if column is None else [column]
                if not len(columns) or not is_recorded[row, columns].all():
                    continue
                values = [
                    Summary.Value(tag=tag, simple_value=float(curve[row, columns].mean()))
                    for tag, curve in curves.items()
                ]
                event = Event(
                    wall_time=float(moments_s[row]), step=iteration, summary=Summary(value=values)
                )
                writer.write(event.SerializeToString())
            writer.flush()
    return tuple(curves)


def _curves(figures: RunFigures) -> Iterator[tuple[str, Floats]]:
    """Yields the name and the values, ``[iterations, ranks]``, of each curve."""
    yield "pipeline/bubble fraction", figures.bubble_fraction
    yield "pipeline/step time ms", figures.step_ns / NS_PER_MS
    for number, part in enumerate(PARTS.values()):
        yield f"pipeline parts/{part} ms", figures.parts_ms[..., number]
