"""Checks the URL of a collector of OpenTelemetry spans."""

from __future__ import annotations

import urllib.parse

from megatron.adaptive.errors import ConfigError

OTLP_PATH = "/v1/traces"
"""Path to which spans are sent if a URL has none."""


def collector_url(flag: str, target: str, *, or_give: str = "") -> str:
    """Returns the address to which spans are sent.

    Args:
        flag: Name of the flag, for error messages.
        target: URL that the user gave; without a path, :data:`OTLP_PATH` is added.
        or_give: Other value that the flag takes, for error messages, with a comma at its end.

    Raises:
        ConfigError: The target is not an HTTP URL.
    """
    try:
        parts = urllib.parse.urlsplit(target)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_url = is_url and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"{flag} {target}: give {or_give}a URL such as http://127.0.0.1:4318")
    return target if parts.path.strip("/") else parts._replace(path=OTLP_PATH).geturl()
