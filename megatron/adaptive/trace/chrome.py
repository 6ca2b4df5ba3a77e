"""The events of a run in the form that chrome://tracing and Perfetto open.

A plain list of begin and end events, as OpenSQZ/MegatronApp's ``process_trace.py`` writes it:
``pid`` is the pipeline rank, times are microseconds. Two differences: a backward is named after
its real chunk, and each begin carries its figures in ``args``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.adaptive.trace.event import Span
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.step import PipelineStep, pipeline_step

__all__ = ["chrome_events", "write_chrome"]

NS_PER_US = 1000

_WORDS = {"F": "forward", "B": "backward", "W": "weight"}


def chrome_events(
    run: RunTrace, iterations: Sequence[int], *, dp_rank: int = 0
) -> list[dict[str, Any]]:
    """The events of some iterations of one pipeline; time 0 is the start of the first of them.

    Iterations that were recorded next to each other keep the pause between them.

    Raises:
        TraceError: an iteration does not exist or holds nothing to draw.
    """
    events: list[dict[str, Any]] = []
    steps = [pipeline_step(run, iteration, dp_rank=dp_rank) for iteration in iterations]
    if not steps:
        return events
    for pp_rank in range(run.num_ranks):
        name = {"name": steps[0].label(pp_rank)}
        events.append({"name": "process_name", "ph": "M", "pid": pp_rank, "tid": 0, "args": name})
    origin_ns = steps[0].start_ns
    for step in steps:
        events.extend(_step_events(step, step.start_ns - origin_ns))
    return events


def write_chrome(
    run: RunTrace,
    path: str | os.PathLike[str],
    iterations: Sequence[int],
    *,
    dp_rank: int = 0,
) -> None:
    """Write :func:`chrome_events` as a JSON file.

    Raises:
        TraceError: as there, or the file cannot be written.
    """
    events = chrome_events(run, iterations, dp_rank=dp_rank)
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")


def _step_events(step: PipelineStep, shift_ns: int) -> Iterator[dict[str, Any]]:
    for pp_rank, row in enumerate(step.rows):
        for span in row:
            common = {
                "name": f"{_WORDS[span.action]} {span.chunk}-{span.microbatch}",
                "cat": _WORDS[span.action],
                "pid": pp_rank,
                "tid": 0,
            }
            begin = (shift_ns + span.start_ns) / NS_PER_US
            end = (shift_ns + span.end_ns) / NS_PER_US
            yield {**common, "ph": "B", "ts": begin, "args": _figures(span)}
            yield {**common, "ph": "E", "ts": end}


def _figures(span: Span) -> dict[str, int | float]:
    return {
        "iteration": span.iteration,
        "chunk": span.chunk,
        "microbatch": span.microbatch,
        "wait_us": span.wait_ns / NS_PER_US,
        "bytes": span.bytes,
        "in_flight_bytes": span.in_flight_bytes,
    }
