"""Reads JSON from outside within limits, and makes text from outside fit to be shown.

Files, sockets and environment variables may hold anything: :func:`parse_json` is the one reader of
their JSON, :func:`printable` stands where their text goes to a terminal, a sheet or a page.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import AdaptiveError, ConfigError

MAX_BYTES = 1 << 28
"""Size of the largest file that is read at once."""
MAX_LEVELS = 64
"""Lists and objects within each other; programs of the project write ten at most."""
_MAX_INTEGER = 1 << 64
_MOST_DIGITS = 4000  # of an integer that Python turns into a number
BYTE_ORDER_MARK = "\ufeff"
"""Character that some editors put before a text in UTF-8, which says nothing."""
_WIDE = re.compile(r"\d{20}|[eE]\+?\d{3}")
# Controls; what turns the direction of a line; line ends that splitlines knows; lone surrogates.
_UNSAFE = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[{_UNSAFE}\t\n]")
_UNPRINTABLE_IN_LINES = re.compile(f"[{_UNSAFE}]")


def parse_json(data: str | bytes | bytearray, *, strict: bool = True, once: bool = False) -> Any:
    """Reads JSON within limits on its size, its depth and its numbers.

    Args:
        data: the text; bytes are UTF-8.
        strict: whether numbers must be finite and integers fit 64 bits. A loss may be NaN. Without
            it, integers of more digits than Python takes are infinite.
        once: whether a key that an object has twice is refused, as in files that people write.

    Raises:
        ValueError: it is no JSON or beyond a limit; the text is one line with the rule.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, more than {MAX_BYTES:,}")
    try:
        text = data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not of a text in UTF-8") from None
    text = text.removeprefix(BYTE_ORDER_MARK)
    options: dict[str, Any] = {"object_pairs_hook": _once} if once else {}
    if strict:
        options["parse_constant"] = _refuse
    if _WIDE.search(text):
        integer = _integer if strict else _any_integer
        options |= {"parse_int": integer, "parse_float": _number if strict else float}
    deep = ValueError(f"it is nested more than {MAX_LEVELS} levels deep")
    try:
        found = json.loads(text, **options)
    except RecursionError:
        raise deep from None
    if text.count("[") + text.count("{") > MAX_LEVELS and _is_deep(found):
        raise deep
    return found


def _is_deep(found: Any) -> bool:
    level = [found]
    for _ in range(MAX_LEVELS):
        level = [
            part
            for one in level
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, dict | list)
        ]
        if not level:
            return False
    return True


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not a finite number")


def _integer(word: str) -> int:
    if len(word) > 21 or abs(int(word)) >= _MAX_INTEGER:
        raise ValueError(f"the number {word[:24]} has more than 64 bits")
    return int(word)


def _any_integer(word: str) -> int | float:
    return int(word) if len(word) <= _MOST_DIGITS else math.copysign(math.inf, float(word))


def _number(word: str) -> float:
    return float(word) if math.isfinite(float(word)) else _refuse(word[:24])


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is given twice in one object; keep one")
        found[key] = value
    return found


def read_text(path: Path, hint: str, error: type[AdaptiveError] = ConfigError) -> str:
    """Reads a text file of at most :data:`MAX_BYTES`, without a leading byte order mark.

    Args:
        path: the file.
        hint: what to do, for the message.
        error: class of the error.

    Raises:
        AdaptiveError: of class ``error``: it cannot be read, is too large, or is no text.
    """
    try:
        return read_bytes(path, hint, error).decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as caught:
        raise error(f"{path}: byte {caught.start} is not of a text in UTF-8; {hint}") from None


def read_bytes(path: Path, hint: str, error: type[AdaptiveError] = ConfigError) -> bytes:
    """Reads a file of at most :data:`MAX_BYTES`; arguments are those of :func:`read_text`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as caught:
        raise error(f"{path}: {caught.strerror or caught}; {hint}") from None
    if len(data) > MAX_BYTES:
        raise error(f"{path}: it has more than {MAX_BYTES:,} bytes; {hint}")
    return data


def read_json(path: Path, hint: str, error: type[AdaptiveError] = ConfigError) -> Any:
    """Reads a JSON file that people write: see :func:`read_text` and :func:`parse_json`.

    Raises:
        AdaptiveError: of class ``error``: the file cannot be read or breaks a rule.
    """
    text = read_text(path, hint, error)
    try:
        return parse_json(text, once=True)
    except ValueError as caught:
        raise error(f"{path}: no JSON ({caught}); {hint}") from None


def aligned(lines: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Returns lines of columns, of which so many are flush left and the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def printable(text: str, *, lines: bool = False) -> str:
    r"""Returns a text with its control characters written out, as ``\x1b``.

    Args:
        text: from outside.
        lines: whether it may have several lines and tabs.
    """
    pattern = _UNPRINTABLE_IN_LINES if lines else _UNPRINTABLE
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
