"""Provides the loggers ``prometheus`` and ``prometheus-file``, for Prometheus and Grafana.

Each curve of the training log is exported as a gauge ``megatron_adaptive_<name>``, for example
``megatron_adaptive_lm_loss``. The dashboard ``examples/grafana/dashboard.json`` plots these gauges.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data.tokenizer import need_package
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.training.logger import Logger

PREFIX = "megatron_adaptive_"
"""Prefix of the names of all metrics."""

TOKEN_VARIABLE = "MEGATRON_ADAPTIVE_METRICS_TOKEN"
"""Environment variable with the bearer token that a client of the endpoint must send."""

_WRITE_S = 5.0
"""Minimum time in seconds between two writes of the file."""

_VISITOR_S = 5.0
"""Time limit in seconds for a client to send its request."""


class _Gauges:
    """Prometheus gauges with the last value of each curve.

    Args:
        flag: Flag that selected the logger, for the error message about a missing package.
    """

    def __init__(self, flag: str) -> None:
        self._package = need_package("prometheus_client", flag, "trace")
        self.registry = self._package.CollectorRegistry()
        self._by_name: dict[str, Any] = {}

    def set(self, tag: str, value: float, step: int) -> None:
        """Sets the gauge of ``tag`` to ``value``, and the gauge ``iteration`` to ``step``."""
        for curve, number in ((tag, value), ("iteration", step)):
            name = PREFIX + re.sub(r"\W+", "_", curve, flags=re.ASCII).strip("_").lower()
            if name not in self._by_name:
                text = f"Last value of the curve {curve}."
                self._by_name[name] = self._package.Gauge(name, text, registry=self.registry)
            self._by_name[name].set(number)

    def write(self, path: Path) -> None:
        """Atomically replaces the file ``path`` with a file that contains the current values."""
        self._package.write_to_textfile(str(path), self.registry)

    def application(self) -> Callable[..., Iterable[bytes]]:
        """Returns the WSGI application that serves the current values."""
        application: Callable[..., Iterable[bytes]] = self._package.make_wsgi_app(self.registry)
        return application


class PrometheusEndpoint(Logger):
    """Serves the last value of each curve to a Prometheus server."""

    name = "prometheus"
    flag = "prometheus_address"

    def __init__(self, cfg: TrainerConfig) -> None:
        address = str(cfg.logging.prometheus_address)
        host, _, port = address.rpartition(":")
        host = host.strip("[]") or "127.0.0.1"
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token and not _is_loopback(host):
            raise ConfigError(
                f"--prometheus-address {address} would let other machines read the metrics; set "
                f"{TOKEN_VARIABLE} to a token, or use a loopback address"
            )
        self._gauges = _Gauges("--prometheus-address")
        application = _guarded(self._gauges.application(), token)
        try:
            self._server = make_server(host, int(port), application, WSGIServer, _Visitor)
        except (OSError, ValueError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot open --prometheus-address {address} ({reason}); use [HOST:]PORT with a "
                "free port"
            ) from None
        thread = threading.Thread(
            target=self._server.serve_forever, name="prometheus-endpoint", daemon=True
        )
        thread.start()

    @property
    def port(self) -> int:
        """Returns the port number of the endpoint."""
        return self._server.server_port

    def scalar(self, tag: str, value: float, step: int) -> None:
        self._gauges.set(tag, value, step)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class PrometheusFile(Logger):
    """Writes the last values to a file for the textfile collector of Prometheus's node exporter."""

    name = "prometheus-file"
    flag = "prometheus_file"

    def __init__(self, cfg: TrainerConfig) -> None:
        self._path = Path(str(cfg.logging.prometheus_file))
        self._gauges = _Gauges("--prometheus-file")
        try:
            self._gauges.write(self._path)
        except OSError as error:
            raise ConfigError(
                f"cannot write to --prometheus-file {self._path} ({error.strerror}); choose a file"
                " in a writable folder"
            ) from None
        self._due_s = 0.0

    def scalar(self, tag: str, value: float, step: int) -> None:
        self._gauges.set(tag, value, step)
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _WRITE_S
            self._gauges.write(self._path)

    def close(self) -> None:
        self._gauges.write(self._path)


class _Visitor(WSGIRequestHandler):
    """Reads a client's request within a time limit, without logging the request."""

    timeout = _VISITOR_S

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _guarded(
    application: Callable[..., Iterable[bytes]], token: str
) -> Callable[..., Iterable[bytes]]:
    """Makes ``application`` require the bearer token ``token``, unless ``token`` is empty."""
    if not token:
        return application
    expected = f"Bearer {token}".encode()

    def guarded(environment: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        sent = environment.get("HTTP_AUTHORIZATION", "").encode("utf-8", "surrogateescape")
        if hmac.compare_digest(sent, expected):
            return application(environment, start_response)
        headers = [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")]
        start_response("401 Unauthorized", headers)
        return [b"send the token as Authorization: Bearer TOKEN\n"]

    return guarded
