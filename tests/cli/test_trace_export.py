"""Tests ``trace export --otlp``. The tests parse its output with OpenTelemetry's own classes."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cli import trace, trace_export
from megatron.adaptive.errors import ConfigError, TraceError
from megatron.adaptive.trace.read import read_run

from ..multiprocess.launch import free_port
from ..support.synthetic_trace import SyntheticRun, write_synthetic

messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
json_format = pytest.importorskip("google.protobuf.json_format")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_synthetic(tmp_path / "traces", SyntheticRun(iterations=3))
    return tmp_path / "traces"


def parsed(text: str | bytes) -> Any:
    """Parses the request ``text``, in which IDs are hexadecimal digits."""

    def decode(value: dict[str, Any]) -> dict[str, Any]:
        ids = [name for name in ("traceId", "spanId", "parentSpanId") if name in value]
        return value | {name: base64.b64encode(bytes.fromhex(value[name])).decode() for name in ids}

    content = json.loads(text, object_hook=decode)
    return json_format.ParseDict(content, messages.ExportTraceServiceRequest())


def spans_of(requests: list[Any]) -> list[Any]:
    return [
        span
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


@contextmanager
def collector(answer: tuple[int, bytes]) -> Iterator[tuple[str, list[Any]]]:
    """Runs a collector on loopback, and yields its URL and the list of requests that it receives.

    The collector answers each request with the status and the body in ``answer``.
    """
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/json"
            requests.append(parsed(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = answer
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def check(folder: Path, requests: list[Any]) -> None:
    """Checks that ``requests`` contain each span exactly once, as a child of its step."""
    run = read_run(folder)
    spans = spans_of(requests)
    expected = [s for r in run.ranks.values() for i in r.iterations for s in r.spans(i)]
    assert len(spans) == len(expected)
    assert len({span.span_id for span in spans}) == len(spans)
    assert len({span.trace_id for span in spans}) == len(run.ranks)
    total = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in spans)
    assert total == sum(span.duration_ns for span in expected)
    steps = {span.span_id for span in spans if span.name == "megatron.train_step"}
    assert len(steps) == sum(span.action == "step" for span in expected)
    assert all(s.parent_span_id in steps for s in spans if s.span_id not in steps) or not steps
    forwards = [span for span in spans if span.name == "megatron.microbatch.forward"]
    assert len(forwards) == sum(span.action == "F" for span in expected)
    assert all("microbatch_id" in {a.key for a in span.attributes} for span in forwards)
    header = run.ranks[0].header
    lead = header.unix_ns - header.monotonic_ns
    if len(run.alignment.clocks) == 1:
        first = min(span.start_time_unix_nano for span in spans)
        assert first == min(span.start_ns for span in expected) + lead


def test_a_file_has_all_spans(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    assert trace_export.main([str(folder), "--otlp", str(file)]) == 0
    check(folder, [parsed(line) for line in file.read_text().splitlines()])
    # ``trace import`` recognizes the exported names, because Megatron-LM uses the same names.
    again = tmp_path / "again"
    assert trace.import_run([str(file), "--output", str(again)]) == 0
    exported, reread = read_run(folder), read_run(again)
    assert reread.num_ranks == exported.num_ranks
    for rank, imported in reread.ranks.items():
        for iteration in imported.iterations:
            counts = [
                [span.action for span in side.spans(iteration)].count("F")
                for side in (imported, exported.ranks[rank])
            ]
            assert counts[0] == counts[1]


def test_a_collector_gets_all_spans(folder: Path) -> None:
    with collector((200, b"{}")) as (url, requests):
        assert trace_export.main([str(folder), "--otlp", url]) == 0
    check(folder, requests)


def test_refused_spans_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"partialSuccess": {"rejectedSpans": "3", "errorMessage": "too old"}}
    with collector((200, json.dumps(answer).encode())) as (url, requests):
        assert trace_export.main([str(folder), "--otlp", url]) == 1
    dropped = 3 * len(requests)
    assert f"too old; {dropped:,} spans were dropped" in capsys.readouterr().err
    with collector((503, b"")) as (url, requests), pytest.raises(TraceError, match="503"):
        trace_export.main([str(folder), "--otlp", url])
    assert len(requests) == 1


def test_a_collector_that_is_down_is_named(folder: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TraceError, match="Connection refused; [0-9,]+ spans were dropped"):
        trace_export.main([str(folder), "--otlp", url])


def test_another_scheme_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="must be the path of a file, or a URL"):
        trace_export.main([str(folder), "--otlp", "grpc://localhost:4317"])
