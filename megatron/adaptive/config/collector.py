"""Checks the URL of a collector (a server that receives OpenTelemetry spans)."""

from __future__ import annotations

import re
import urllib.parse

from megatron.adaptive.errors import ConfigError

OTLP_PATH = "/v1/traces"
"""Path that is appended to a collector's URL if the URL has no path."""


def collector_url(flag: str, target: str, *, or_give: str = "") -> str:
    """Returns the URL to which spans are sent for the user's URL ``target``.

    Args:
        flag: Name of the flag, shown in error messages.
        target: URL from the user. If it has no path, :data:`OTLP_PATH` is added.
        or_give: Text in the error message that suggests a different kind of value, such as "a
            folder, or ". It is empty if the flag accepts only URLs.

    Raises:
        ConfigError: ``target`` is not an HTTP URL.
    """
    try:
        parts = urllib.parse.urlsplit(target)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_url = is_url and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"{flag} must be {or_give}a URL such as http://127.0.0.1:4318, got {shown_url(target)}"
        )
    return target if parts.path.strip("/") else parts._replace(path=OTLP_PATH).geturl()


def without_login(url: str) -> tuple[str, str]:
    """Splits ``url`` into the URL without its login, and the login, which may be empty.

    Args:
        url: URL from :func:`collector_url`. Its login has the form ``user:password``.
    """
    parts = urllib.parse.urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=host).geturl(), urllib.parse.unquote(login)


def shown_url(url: str) -> str:
    """Returns ``url`` for display, without its user, password and query, which may be secret."""
    return re.sub(r"[?#].*", "?...", re.sub(r"//[^/]*@", "//...@", url, flags=re.S), flags=re.S)
