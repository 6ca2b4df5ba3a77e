"""``trace export``: writes a run's spans in the JSON of the OpenTelemetry protocol (OTLP).

::

    python -m megatron.adaptive trace export runs/latest --otlp spans.jsonl
    python -m megatron.adaptive trace export runs/latest --otlp http://127.0.0.1:4318

A file has one request per line, in the format of the file exporter of OpenTelemetry's collector. A
collector gets the same requests over HTTP. The spans of steps, forwards, backwards, messages and
the optimizer have the same names as in Megatron-LM. The span of a step is the parent of all spans
in the step, and all steps of a rank belong to one trace.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive import __version__
from megatron.adaptive.cli.common import show
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, number
from megatron.adaptive.errors import ConfigError, TraceError
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.locate import load_run
from megatron.adaptive.trace.read import RankTrace, RunTrace
from megatron.adaptive.trace.trace_format import Span

_PREFIX = "megatron."
_NAMES = {
    "step": "train_step",
    "F": "microbatch.forward",
    "B": "microbatch.backward",
    "W": "microbatch.weight_gradient",
    "reduce": "grad_sync.finish",
    "optimizer": "optimizer_step",
    "checkpoint": "save_checkpoint",
    "receive": "queued_input",
}
_PASSES = {"F": "forward", "B": "backward"}
_INTERNAL = 1  # kind of a span in OTLP
_BATCH = 1000
_PATH = "/v1/traces"
_LIMIT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Writes or sends the spans of a run; returns the exit status.

    Returns:
        0, or 1 if the collector did not accept all spans.
    """
    parser = CommandParser(
        prog=f"{PROGRAM} trace export",
        description="Write the spans of a run for programs that read OpenTelemetry (OTLP), or send"
        " them to a collector.",
    )
    add = parser.add_argument
    text = "folder of the run or its traces folder (default: the newest run here)"
    add("run_dir", nargs="?", type=Path, metavar="DIR", help=text)
    text = f"file for lines of JSON, or URL of a collector; without a path, {_PATH} is added"
    add("--otlp", required=True, metavar="FILE|URL", help=text)
    text = f"seconds to wait for an answer of the collector ({_LIMIT_S:g})"
    add("--timeout", type=number(float, 0.1, 3600), default=_LIMIT_S, help=text)
    arguments = parser.parse_args(argv)
    target = arguments.otlp
    url = _url(target) if "://" in target else ""
    run = load_run(arguments.run_dir)
    if url:
        return _send(run, url, arguments.timeout)
    count = 0
    with replaced(target) as temporary, temporary.open("w", encoding="utf-8") as file:
        for request, spans in otlp_requests(run):
            file.write(json.dumps(request, separators=(",", ":")) + "\n")
            count += spans
    show(f"{count:,} spans of {len(run.ranks)} ranks: {target}")
    return 0


def otlp_requests(run: RunTrace) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields requests in the JSON form of OTLP, each with its number of spans.

    Args:
        run: Trace of the run.
    """
    for rank, trace in run.ranks.items():
        resource = {"attributes": _attributes(_facts(run, trace))}
        scope = {"name": "megatron.adaptive", "version": __version__}
        spans = _spans(run, rank, trace)
        batch: list[dict[str, Any]] = []
        for span in spans:
            batch.append(span)
            if len(batch) == _BATCH:
                yield _request(resource, scope, batch), len(batch)
                batch = []
        if batch:
            yield _request(resource, scope, batch), len(batch)


def _request(
    resource: Mapping[str, Any], scope: Mapping[str, Any], spans: list[dict[str, Any]]
) -> dict[str, Any]:
    scoped = [{"scope": scope, "spans": spans}]
    return {"resourceSpans": [{"resource": resource, "scopeSpans": scoped}]}


def _facts(run: RunTrace, trace: RankTrace) -> dict[str, Any]:
    """Returns the attributes of a rank's OTLP resource; sizes have the names of Megatron-LM."""
    header = trace.header
    replicas = len({t.header.dp_rank for t in run.ranks.values()})
    tensor = len({t.header.tp_rank for t in run.ranks.values()})
    return {
        "service.name": "megatron-adaptive",
        "service.instance.id": f"rank {header.rank}",
        "host.name": header.host,
        "process.pid": header.pid,
        "nemo.run.id": run.run,
        "dl.rank": header.rank,
        "dl.world_size": run.world_size,
        "dl.pipeline_parallel.size": run.num_ranks,
        "dl.tensor_parallel.size": tensor,
        "dl.data_parallel.size": replicas,
        "schedule": header.schedule,
    }


def _spans(run: RunTrace, rank: int, trace: RankTrace) -> Iterator[dict[str, Any]]:
    """Yields the spans of a rank. The span of a step comes before all spans in the step."""
    unix_ns = _unix_offset_ns(run, trace)
    trace_id = _id(16, run.run, rank)
    for iteration in trace.iterations:
        step_id = _id(8, run.run, rank, iteration)
        spans = sorted(trace.spans(iteration), key=lambda span: span.action != "step")
        has_step = bool(spans) and spans[0].action == "step"
        for index, span in enumerate(spans):
            is_step = span.action == "step"
            span_id = step_id if is_step else _id(8, run.run, rank, iteration, index)
            yield {
                "traceId": trace_id,
                "spanId": span_id,
                **({"parentSpanId": step_id} if has_step and not is_step else {}),
                "name": _PREFIX + _name(span),
                "kind": _INTERNAL,
                "startTimeUnixNano": str(span.start_ns + unix_ns),
                "endTimeUnixNano": str(span.end_ns + unix_ns),
                "attributes": _attributes(_details(span)),
            }


def _unix_offset_ns(run: RunTrace, trace: RankTrace) -> int:
    """Returns the time to add to the run's common time to get the time since 1970, in ns."""
    header = trace.header
    if not run.alignment.clocks:
        return header.unix_ns - header.monotonic_ns
    first = run.ranks[min(run.ranks)].header
    fit = run.alignment.fit_of(first.clock)
    return first.unix_ns - int(fit.apply(np.array([first.monotonic_ns]))[0])


def _id(size_bytes: int, *parts: object) -> str:
    """Returns an id in hexadecimal that is equal whenever the same run is exported."""
    text = " ".join(map(str, parts)).encode()
    return hashlib.blake2b(text, digest_size=size_bytes).hexdigest()


def _name(span: Span) -> str:
    if span.action == "send":
        return f"p2p.send_{_PASSES.get(span.of, span.of)}"
    if span.action == "collective" and span.reason:
        return f"collective.{span.reason}"
    return _NAMES.get(span.action, span.action)


def _details(span: Span) -> dict[str, Any]:
    """Returns the attributes of a span."""
    details: dict[str, Any] = {"iteration": span.iteration}
    numbers = {"microbatch_id": span.microbatch, "chunk": span.chunk, "peer": span.peer}
    details |= {name: value for name, value in numbers.items() if value >= 0}
    details |= {name: text for name in ("of", "reason") if (text := getattr(span, name))}
    if span.bytes:
        details["bytes"] = span.bytes
    return details


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns attributes in the JSON form of OTLP, in which integers are strings."""
    return [
        {
            "key": key,
            "value": {"intValue": str(value)}
            if isinstance(value, int)
            else {"stringValue": str(value)},
        }
        for key, value in values.items()
    ]


def _url(target: str) -> str:
    """Returns the address to which requests are sent.

    Raises:
        ConfigError: The target is not an HTTP URL.
    """
    parts = urllib.parse.urlsplit(target)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp {target}: give the path of a file, or a URL such as http://127.0.0.1:4318"
        )
    return target if parts.path.strip("/") else parts._replace(path=_PATH).geturl()


def _send(run: RunTrace, url: str, limit_s: float) -> int:
    """Sends the spans of a run; returns the exit status.

    Raises:
        TraceError: The collector accepted no span.
    """
    sent = dropped = 0
    reason = ""
    is_down = False
    for request, count in otlp_requests(run):
        # After a failure, drop all later batches, so that each batch does not wait again for a
        # collector that is down.
        if not is_down:
            answer = _post(url, request, limit_s)
            is_down = answer.is_failure
            reason = answer.reason or reason
            refused = count if is_down else min(answer.refused, count)
        else:
            refused = count
        sent += count - refused
        dropped += refused
    if not sent and dropped:
        raise TraceError(
            f"--otlp {url}: {reason}; {dropped:,} spans were dropped: start the collector there, "
            "or write a file"
        )
    show(f"{sent:,} spans of {len(run.ranks)} ranks: {url}")
    if dropped:
        show(f"warning: {url}: {reason}; {dropped:,} spans were dropped", file=sys.stderr)
    return int(dropped > 0)


@dataclass(frozen=True)
class _Answer:
    """Holds the answer of a collector to a request.

    Attributes:
        is_failure: Whether no span was accepted.
        refused: Number of spans that the collector refused.
        reason: Reason for the failure or for refused spans; empty if all spans were accepted.
    """

    is_failure: bool = False
    refused: int = 0
    reason: str = ""


def _post(url: str, request: Mapping[str, Any], limit_s: float) -> _Answer:
    """Sends a request to a collector, and returns its answer."""
    body = json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    message = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(message, timeout=limit_s) as reply:
            text = reply.read(1 << 20)
    except (OSError, http.client.HTTPException) as error:
        inner = getattr(error, "reason", None)
        shown = getattr(inner, "strerror", None) or (error if isinstance(inner, str) else inner)
        return _Answer(is_failure=True, reason=str(shown or error))
    try:
        partial = json.loads(text or b"{}").get("partialSuccess", {})
        refused = int(partial.get("rejectedSpans", 0))
        return _Answer(refused=refused, reason=str(partial.get("errorMessage", "")) * (refused > 0))
    except (ValueError, AttributeError, TypeError):
        return _Answer()  # an answer in another form says nothing about refused spans
