"""Checks the URL of a collector of OpenTelemetry spans."""

from __future__ import annotations

import re
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
        raise ConfigError(
            f"{flag} {shown_url(target)}: give {or_give}a URL such as http://127.0.0.1:4318"
        )
    return target if parts.path.strip("/") else parts._replace(path=OTLP_PATH).geturl()


def without_login(url: str) -> tuple[str, str]:
    """Returns a URL without its user and password, and these as ``user:password``; empty for none.

    Args:
        url: Address from :func:`collector_url`.
    """
    parts = urllib.parse.urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=host).geturl(), urllib.parse.unquote(login)


def shown_url(url: str) -> str:
    """Returns a URL to print, without its user, password and query, which may be secrets."""
    return re.sub(r"[?#].*", "?...", re.sub(r"//[^/]*@", "//...@", url, flags=re.S), flags=re.S)
