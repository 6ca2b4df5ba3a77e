"""Receives OpenTelemetry spans over HTTP on the loopback interface, and stores these spans."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Collector:
    """Stores the requests that the collector receives.

    Attributes:
        url: URL of the collector.
        requests: Requests that were answered with status 200, as parsed JSON.
        answer: Status and body of the responses to requests.
        held: Event that must be set before requests are answered.
        logins: Logins of requests with basic authentication, as ``user:password``.
        gets: Number of GET requests.
    """

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    answer: tuple[int, bytes] = (200, b"{}")
    held: threading.Event = field(default_factory=threading.Event)
    logins: set[str] = field(default_factory=set)
    gets: int = 0

    @property
    def spans(self) -> list[dict[str, Any]]:
        """Returns the spans of all stored requests."""
        return [
            span
            for request in [*self.requests]
            for resource in request["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    @property
    def ranks(self) -> set[str]:
        """Returns the values of the resource attribute ``dl.rank`` in all stored requests."""
        return {
            attribute["value"]["intValue"]
            for request in [*self.requests]
            for resource in request["resourceSpans"]
            for attribute in resource["resource"]["attributes"]
            if attribute["key"] == "dl.rank"
        }


@contextmanager
def serving(port: int = 0) -> Iterator[Collector]:
    """Yields a collector that listens on ``port`` until the ``with`` block ends."""
    state = Collector()
    state.held.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path.partition("?")[0] == "/v1/traces"
            assert self.headers["Content-Type"] == "application/json"
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.held.wait(60)
            scheme, _, login = self.headers.get("Authorization", "").partition(" ")
            if scheme == "Basic":
                state.logins.add(base64.b64decode(login).decode())
            status, body = state.answer
            if status == 200:
                state.requests.append(content)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            state.gets += 1
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        state.held.set()
        server.shutdown()
        thread.join()
        server.server_close()
