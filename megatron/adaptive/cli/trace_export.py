"""Implements ``trace export``, which writes a run's spans as OpenTelemetry (OTLP) JSON.

::

    python -m megatron.adaptive trace export runs/latest --otlp spans.jsonl
    python -m megatron.adaptive trace export runs/latest --otlp http://127.0.0.1:4318

A file has one request per line, in the format that OpenTelemetry's file exporter writes. A
collector receives the same requests over HTTP. The spans of steps, forward passes, backward passes,
messages and the optimizer have the same names as in Megatron-LM. The span of a step is the parent
of all spans in the step, and all steps of a rank belong to one trace.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.cli.common import show
from megatron.adaptive.config.collector import OTLP_PATH, collector_url, shown_url
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, number
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.locate import load_run
from megatron.adaptive.trace.otlp import LIMIT_S, batches, otlp_spans, post, request_of, resource_of
from megatron.adaptive.trace.read import RankTrace, RunTrace


def main(argv: Sequence[str]) -> int:
    """Writes the spans of a run to a file, or sends them to a collector.

    Returns:
        0, or 1 if the collector did not accept all spans.
    """
    parser = CommandParser(
        prog=f"{PROGRAM} trace export",
        description=(
            "Write the spans of a run in the OpenTelemetry format (OTLP), or send them to a "
            "collector."
        ),
    )
    add = parser.add_argument
    text = "folder of the run or its traces folder (default: the newest run)"
    add("run_dir", nargs="?", type=Path, metavar="DIR", help=text)
    text = (
        f"file for JSON lines, or URL of a collector; {OTLP_PATH} is added to a URL without a path"
    )
    add("--otlp", required=True, metavar="FILE|URL", help=text)
    text = f"seconds to wait for the collector's response ({LIMIT_S:g})"
    add("--timeout", type=number(float, 0.1, 3600), default=LIMIT_S, help=text)
    arguments = parser.parse_args(argv)
    target = arguments.otlp
    url = ""
    if "://" in target:
        url = collector_url("--otlp", target, or_give="the path of a file, or ")
    run = load_run(arguments.run_dir)
    if url:
        return _send(run, url, arguments.timeout)
    count = 0
    with replaced(target) as temporary, temporary.open("w", encoding="utf-8") as file:
        for request, spans in otlp_requests(run):
            file.write(json.dumps(request, separators=(",", ":")) + "\n")
            count += spans
    show(f"wrote {count:,} spans of {len(run.ranks)} ranks to {target}")
    return 0


def otlp_requests(run: RunTrace) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields requests in OTLP's JSON format, each with the number of spans in the request.

    Args:
        run: Trace of the run.
    """
    replicas = len({trace.header.dp_rank for trace in run.ranks.values()})
    tensor = len({trace.header.tp_rank for trace in run.ranks.values()})
    for rank, trace in run.ranks.items():
        header = replace(trace.header, run=run.run, world_size=run.world_size)
        resource = resource_of(header, replicas=replicas, tensor=tensor)
        unix_ns = _unix_offset_ns(run, trace)
        spans = (
            span
            for iteration in trace.iterations
            for span in otlp_spans(
                run.run, rank, trace.spans(iteration), unix_ns, slices=trace.slices(iteration)
            )
        )
        for batch in batches(spans):
            yield request_of(resource, batch), len(batch)


def _unix_offset_ns(run: RunTrace, trace: RankTrace) -> int:
    """Returns the offset in nanoseconds from the run's common time to Unix time."""
    header = trace.header
    if not run.alignment.clocks:
        return header.unix_ns - header.monotonic_ns
    first = run.ranks[min(run.ranks)].header
    fit = run.alignment.fit_of(first.clock)
    return first.unix_ns - int(fit.apply(np.array([first.monotonic_ns]))[0])


def _send(run: RunTrace, url: str, limit_s: float) -> int:
    """Sends the spans of ``run`` to the collector at ``url``, and returns the exit status.

    ``limit_s`` is the timeout of a request in seconds.

    Raises:
        TraceError: The collector did not accept any span.
    """
    shown = shown_url(url)
    sent = dropped = 0
    reason = ""
    is_down = False
    for request, count in otlp_requests(run):
        # After a failure, drop all later batches, because each of them would wait for a collector
        # that is down.
        if not is_down:
            answer = post(url, request, limit_s)
            is_down = answer.is_failure
            reason = answer.reason or reason
            refused = count if is_down else min(answer.refused, count)
        else:
            refused = count
        sent += count - refused
        dropped += refused
    if not sent and dropped:
        raise TraceError(
            f"--otlp {shown}: {reason}; {dropped:,} spans were dropped; start a collector at "
            "this URL, or write to a file"
        )
    show(f"sent {sent:,} spans of {len(run.ranks)} ranks to {shown}")
    if dropped:
        show(f"warning: {shown}: {reason}; {dropped:,} spans were dropped", file=sys.stderr)
    return int(dropped > 0)
