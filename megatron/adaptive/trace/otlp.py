"""Converts spans to the JSON format of the OpenTelemetry protocol (OTLP), and sends them.

Each rank is a resource with one OpenTelemetry trace. The span of a step is the parent of all other
spans of the step. The spans of steps, forward passes, backward passes, messages and the optimizer
have the same names as in Megatron-LM. IDs depend only on the run, the rank, the iteration and the
position of the span. A span therefore has the same ID whether it is sent during training or
exported afterwards.

:class:`SpanSender` sends the spans of a training job as they are recorded. Training never waits for
the collector::

    trace-writer thread ── put, or drop if full ──> queue (64 iterations) ──> thread: POST

If the collector does not respond, the spans are dropped and counted. The next attempt is made after
a pause, which doubles with each failure up to a maximum of one minute.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import queue
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.adaptive.config.collector import collector_url, shown_url, without_login
from megatron.adaptive.config.input_files import say
from megatron.adaptive.schedule.action import SliceCounts
from megatron.adaptive.trace.trace_format import (
    KINDS,
    REASONS,
    IterationStart,
    Span,
    SpanRow,
    TraceHeader,
    slices_of,
)

LIMIT_S = 10.0
"""Default timeout in seconds for a collector's response."""

BATCH = 1000
"""Maximum number of spans in a request."""

QUEUE_ITERATIONS = 64
"""Maximum number of iterations in the queue. Further iterations are dropped."""

FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
"""Initial and maximum pause in seconds after a failure. The pause doubles with each failure."""

CLOSE_S = 5.0
"""Maximum time in seconds that a job waits at its end for the last spans to be sent."""

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
_INTERNAL = 1  # Code for an internal span in OTLP.


def resource_of(header: TraceHeader, *, replicas: int, tensor: int) -> dict[str, Any]:
    """Creates a rank's OTLP resource. Parallel sizes have the attribute names of Megatron-LM.

    Args:
        header: Header of the rank's trace.
        replicas: Number of data-parallel replicas, or 0 if unknown.
        tensor: Number of tensor-parallel ranks, or 0 if unknown.
    """
    facts = {
        "service.name": "megatron-adaptive",
        "service.instance.id": f"rank {header.rank}",
        "host.name": header.host,
        "process.pid": header.pid,
        "nemo.run.id": header.run,
        "dl.rank": header.rank,
        "dl.world_size": header.world_size,
        "dl.pipeline_parallel.size": header.num_ranks,
        **({"dl.tensor_parallel.size": tensor} if tensor else {}),
        **({"dl.data_parallel.size": replicas} if replicas else {}),
        "schedule": header.schedule,
    }
    return {"attributes": _attributes(facts)}


def request_of(resource: Mapping[str, Any], spans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Creates an OTLP request with the ``spans`` of ``resource``."""
    scope = {"name": "megatron.adaptive"}
    return {
        "resourceSpans": [
            {"resource": resource, "scopeSpans": [{"scope": scope, "spans": list(spans)}]}
        ]
    }


def batches(spans: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yields ``spans`` in lists of at most :data:`BATCH` spans."""
    batch: list[Mapping[str, Any]] = []
    for span in spans:
        batch.append(span)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def otlp_spans(
    run: str,
    rank: int,
    spans: Sequence[Span],
    unix_ns: int,
    *,
    first: int = 0,
    has_step: bool | None = None,
    slices: SliceCounts = 1,
) -> Iterator[dict[str, Any]]:
    """Converts the spans of a rank in one iteration to OTLP, with the span of the step first.

    Args:
        run: ID of the run.
        rank: Global rank.
        spans: Spans of the iteration.
        unix_ns: Difference in ns between the time since 1970 and the times of the spans.
        first: Number of spans of the iteration that earlier calls already converted.
        has_step: Whether the iteration has a span of the whole step; ``None`` to determine this
            from ``spans``.
        slices: Number of slices of each microbatch of the iteration.
    """
    ordered = sorted(spans, key=lambda span: span.action != "step")
    if has_step is None:
        has_step = bool(ordered) and ordered[0].action == "step"
    trace_id = _id(16, run, rank)
    for index, span in enumerate(ordered, first):
        step_id = _id(8, run, rank, span.iteration)
        is_step = span.action == "step"
        yield {
            "traceId": trace_id,
            "spanId": step_id if is_step else _id(8, run, rank, span.iteration, index),
            **({"parentSpanId": step_id} if has_step and not is_step else {}),
            "name": _PREFIX + _name(span),
            "kind": _INTERNAL,
            "startTimeUnixNano": str(span.start_ns + unix_ns),
            "endTimeUnixNano": str(span.end_ns + unix_ns),
            "attributes": _attributes(_details(span, slices)),
        }


def _id(size_bytes: int, *parts: object) -> str:
    """Returns a hexadecimal ID of ``size_bytes`` bytes, derived from ``parts``."""
    text = " ".join(map(str, parts)).encode()
    return hashlib.blake2b(text, digest_size=size_bytes).hexdigest()


def _name(span: Span) -> str:
    if span.action == "send":
        return f"p2p.send_{_PASSES.get(span.of, span.of)}"
    if span.action == "collective" and span.reason:
        return f"collective.{span.reason}"
    return _NAMES.get(span.action, span.action)


def _details(span: Span, slices: SliceCounts) -> dict[str, Any]:
    """Returns the attributes of ``span``, keyed by name.

    ``slices`` is the number of slices of each microbatch.
    """
    item = span.numbers(slices)
    numbers = {
        "iteration": span.iteration,
        "microbatch_id": item.get("microbatch", -1),
        "slice": item.get("slice", -1),
        "chunk": span.chunk,
        "peer": span.peer,
    }
    details: dict[str, Any] = {name: value for name, value in numbers.items() if value >= 0}
    details |= {name: text for name in ("of", "reason") if (text := getattr(span, name))}
    if span.bytes:
        details["bytes"] = span.bytes
    return details


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns ``values`` in the JSON format of OTLP, in which integers are strings."""
    return [
        {
            "key": key,
            "value": {"intValue": str(value)}
            if isinstance(value, int)
            else {"stringValue": str(value)},
        }
        for key, value in values.items()
    ]


@dataclass(frozen=True)
class Answer:
    """Contains a collector's response to a request.

    Attributes:
        is_failure: Whether the whole request failed.
        refused: Number of spans that the collector rejected.
        reason: Reason for the failure or for rejected spans; empty if all spans were accepted.
    """

    is_failure: bool = False
    refused: int = 0
    reason: str = ""


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Treats redirects as errors, because a redirected request would not contain the spans."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Makes the request fail by returning ``None``."""


_opener = urllib.request.build_opener(_NoRedirection)


def post(url: str, request: Mapping[str, Any], limit_s: float) -> Answer:
    """Sends a request to a collector, and returns the response.

    Args:
        url: URL of the collector. A user name and a password in the URL are sent as an HTTP header.
        request: Request with spans.
        limit_s: Timeout in seconds for each part of the response.
    """
    body = json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    address, login = without_login(url)
    if login:
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    message = urllib.request.Request(address, data=body, headers=headers, method="POST")
    try:
        with _opener.open(message, timeout=limit_s) as reply:
            text = reply.read(1 << 20)
    except http.client.InvalidURL:
        # Do not use the message of the error, because it contains the URL.
        return Answer(is_failure=True, reason="the URL is not valid")
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        inner = getattr(error, "reason", None)
        shown = getattr(inner, "strerror", None) or (error if isinstance(inner, str) else inner)
        return Answer(is_failure=True, reason=str(shown or error))
    try:
        partial = json.loads(text or b"{}").get("partialSuccess", {})
        refused = max(0, int(partial.get("rejectedSpans", 0)))
        return Answer(refused=refused, reason=str(partial.get("errorMessage", "")) * (refused > 0))
    except (ValueError, AttributeError, TypeError, OverflowError):
        return Answer()  # Responses in another format do not report rejected spans.


_Batch = tuple[IterationStart, Sequence[SpanRow]]


class _SentBefore(NamedTuple):
    """Describes the already converted spans of an iteration, to which later spans may be added.

    Attributes:
        num_spans: Number of spans that were converted.
        has_step: Whether these spans include the span of the step.
        slices: Number of slices of each microbatch. The markers of later spans do not contain it.
    """

    num_spans: int
    has_step: bool
    slices: SliceCounts


class SpanSender:
    """Sends the spans of one rank to a collector from a separate thread while the job runs.

    Times are converted to the time of day of the rank's machine.

    Thread safety: :meth:`add` never blocks, and must always be called from the same thread.
    :meth:`close` may be called from any thread.

    Args:
        target: URL of the collector, as the user wrote it.
        header: Header of the rank's trace.
        flag: Name of the flag that sets the URL, for error messages.
        limit_s: Timeout in seconds for a response.

    Attributes:
        sent: Number of spans that the collector accepted.
        dropped: Number of spans that were not sent, or not accepted by the collector.

    Raises:
        ConfigError: The target is not an HTTP URL.
    """

    def __init__(
        self,
        target: str,
        header: TraceHeader,
        *,
        flag: str = "--trace-otlp",
        limit_s: float = LIMIT_S,
    ) -> None:
        self._url = collector_url(flag, target)
        self._shown = shown_url(self._url)
        self._header = header
        self._limit_s = limit_s
        self._resource = resource_of(header, replicas=0, tensor=0)
        self._unix_ns = header.unix_ns - header.monotonic_ns
        self._sent_of: dict[int, _SentBefore] = {}
        self._pause_s = FIRST_PAUSE_S
        self._next_s = -1.0
        self._is_down = False
        self.sent = self.dropped = self._given = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._queue: queue.Queue[_Batch | None] = queue.Queue(QUEUE_ITERATIONS)
        self._thread = threading.Thread(target=self._run, name="trace-otlp", daemon=True)
        self._thread.start()

    def add(self, marker: IterationStart, rows: Sequence[SpanRow]) -> None:
        """Queues the spans in ``rows`` for sending, or drops the spans if the queue is full.

        ``marker`` describes the iteration of the spans. This method never blocks.
        """
        self._given += len(rows)
        try:
            self._queue.put_nowait((marker, rows))
        except queue.Full:
            self._count(dropped=len(rows))

    def close(self) -> None:
        """Sends the remaining spans within :data:`CLOSE_S`, and prints how many were not sent."""
        if self._closing.is_set():
            return
        end_s = time.monotonic() + CLOSE_S
        self._closing.set()
        # If the queue stays full, the sending thread is waiting for a response. The process can
        # still exit, because this is a daemon thread.
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(max(0.0, end_s - time.monotonic()))
        if lost := self._given - self.sent:
            say(
                f"warning: rank {self._header.rank} sent {self.sent:,} spans to {self._shown}, and "
                f"dropped {lost:,} spans; the trace file contains all of them"
            )

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            self._send(*batch)

    def _send(self, marker: IterationStart, rows: Sequence[SpanRow]) -> None:
        """Sends the spans of an iteration, or drops the spans during a pause after a failure."""
        before = self._sent_of.get(marker.iteration)
        if before is None:
            before = _SentBefore(0, False, slices_of(self._header, marker))
        first, has_step, slices = before
        has_step = has_step or any(KINDS[row.kind] == "step" for row in rows)
        self._sent_of[marker.iteration] = _SentBefore(first + len(rows), has_step, slices)
        while len(self._sent_of) > QUEUE_ITERATIONS:
            del self._sent_of[next(iter(self._sent_of))]
        if time.monotonic() < self._next_s:
            self._count(dropped=len(rows))
            return
        spans = [_span(marker.iteration, row) for row in rows]
        run, rank = self._header.run, self._header.rank
        converted = otlp_spans(
            run, rank, spans, self._unix_ns, first=first, has_step=has_step, slices=slices
        )
        left = len(rows)
        for batch in batches(converted):
            answer = post(self._url, request_of(self._resource, batch), self._limit_s)
            if answer.is_failure:
                self._fails(answer.reason)
                break
            self._answers()
            refused = min(answer.refused, len(batch))
            self._count(sent=len(batch) - refused, dropped=refused)
            left -= len(batch)
        self._count(dropped=left)

    def _fails(self, reason: str) -> None:
        """Delays the next attempt. Prints a warning with ``reason`` after the first failure."""
        self._next_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        if not self._is_down:
            self._is_down = True
            say(
                f"warning: rank {self._header.rank} cannot send spans to {self._shown}: {reason};"
                " training continues, and spans are dropped until the collector responds"
            )

    def _answers(self) -> None:
        """Resets the pause after failures. Prints a note if earlier requests had failed."""
        self._pause_s = FIRST_PAUSE_S
        if self._is_down:
            self._is_down = False
            say(
                f"note: rank {self._header.rank}: {self._shown} responds again; {self.dropped:,}"
                " spans were dropped"
            )

    def _count(self, *, sent: int = 0, dropped: int = 0) -> None:
        with self._lock:
            self.sent += sent
            self.dropped += dropped


def _span(iteration: int, row: SpanRow) -> Span:
    """Converts a recorded row to a span, with times on the rank's monotonic clock."""
    return Span(
        action=KINDS[row.kind],
        chunk=row.chunk,
        microbatch=row.microbatch,
        start_ns=row.start_ns,
        end_ns=row.end_ns,
        iteration=iteration,
        bytes=row.bytes,
        in_flight_bytes=row.in_flight_bytes,
        piece=row.piece,
        queue_depth=row.queue_depth,
        peer=row.peer,
        of="" if row.of < 0 else KINDS[row.of],
        reason=REASONS[row.reason],
    )
