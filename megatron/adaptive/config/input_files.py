"""Opens files and parses JSON within limits, and makes foreign text safe to print.

Files, sockets and environment variables may contain anything, and a path may name anything. So
:func:`open_file` is the only way to open a user's file, :func:`parse_json` the only parser of JSON,
and text for a terminal, a sheet or a page passes through :func:`printable`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megatron.adaptive.errors import AdaptiveError, ConfigError

MAX_BYTES = 1 << 28
"""Size in bytes of the largest file that is read at once."""
MAX_LEVELS = 64
"""Depth of nested lists and objects in JSON; programs of the project write at most 10 levels."""
_MAX_INTEGER = 1 << 64
_MOST_DIGITS = 300  # an integer with this number of digits still fits a float
_DIGITS = 18  # an integer with this number of digits fits 64 bits
BYTE_ORDER_MARK = "\ufeff"
"""Character that some editors write at the start of a UTF-8 text; it is not part of the text."""
_WIDE = re.compile(r"\d{20}|[eE]\+?\d{3}")
# Control characters, marks of text direction, line ends of splitlines and lone surrogates.
_UNSAFE = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[{_UNSAFE}\t\n]")
_ENDLESS = re.compile(r"\S{400,}")
_SHOWN = 80
_UNPRINTABLE_IN_LINES = re.compile(f"[{_UNSAFE}]")


_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_PIECE_BYTES = 1 << 20


def require_file(path: str | Path) -> int:
    """Checks that a path names a regular file, for libraries that open it themselves.

    Opening a FIFO waits for a writer, which may never come, and a device may have no end.

    Args:
        path: Path of the file; links are followed.

    Returns:
        Size of the file in bytes.

    Raises:
        OSError: There is no file, or it is not a regular one; ``strerror`` says which.
    """
    try:
        status = os.stat(path)
    except ValueError:  # the name contains a NUL character, for instance
        raise OSError(errno.EINVAL, "this is no name of a file", str(path)) from None
    return _require_regular(status, path)


def _require_regular(status: os.stat_result, path: str | Path) -> int:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    for is_kind, kind in _KINDS:
        if is_kind(status.st_mode):
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    return status.st_size


def open_file(path: str | Path) -> BinaryIO:
    """Opens a regular file to read its bytes, and never waits for another process.

    Raises:
        OSError: The file cannot be opened or is not a regular file.
    """
    require_file(path)
    # If a FIFO has replaced the file since the check, O_NONBLOCK keeps open() from waiting.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_whole(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """Returns the content of a regular file.

    Args:
        path: Path of the file.
        most: Largest allowed size in bytes.

    Raises:
        OSError: The file cannot be read, is no regular file, or is larger.
    """
    with open_file(path) as file:
        pieces: list[bytes] = []
        left = most - os.fstat(file.fileno()).st_size
        while left >= 0 and (piece := file.read(_PIECE_BYTES)):
            pieces.append(piece)
            # Files of /proc report no size, and other files may grow.
            left = most - sum(map(len, pieces))
    if left < 0:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return b"".join(pieces)


def parse_json(data: str | bytes | bytearray, *, strict: bool = True, once: bool = False) -> Any:
    """Parses JSON within limits on its size, its depth and its numbers.

    Args:
        data: Text to parse; bytes are UTF-8.
        strict: Whether numbers must be finite and integers must fit 64 bits. False allows NaN, for
            example as a loss, and makes integers that are too large for a float infinite.
        once: Whether a key that occurs twice in an object is an error, for files that people write.

    Raises:
        ValueError: The text is no JSON or beyond a limit; the message is one line with the rule.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, more than {MAX_BYTES:,}")
    try:
        text = data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no valid UTF-8") from None
    text = text.removeprefix(BYTE_ORDER_MARK)
    options: dict[str, Any] = {"object_pairs_hook": _once} if once else {}
    if strict:
        options["parse_constant"] = _refuse
    if _WIDE.search(text):
        integer = _integer if strict else _any_integer
        options |= {"parse_int": integer, "parse_float": _number if strict else float}
    deep = ValueError(f"it is nested more than {MAX_LEVELS} levels deep")
    try:
        document = json.loads(text, **options)
    except RecursionError:
        raise deep from None
    if text.count("[") + text.count("{") > MAX_LEVELS and _is_deep(document):
        raise deep
    return document


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_LEVELS):
        level = [
            part
            for container in level
            for part in (container.values() if isinstance(container, dict) else container)
            if isinstance(part, dict | list)
        ]
        if not level:
            return False
    return True


def _refuse(digits: str) -> float:
    raise ValueError(f"{digits} is not a finite number")


def _integer(digits: str) -> int:
    if len(digits) > 21 or abs(int(digits)) >= _MAX_INTEGER:
        raise ValueError(f"the number {digits[:24]} has more than 64 bits")
    return int(digits)


def _any_integer(digits: str) -> int | float:
    """Converts an integer of any size; an integer too large for a float becomes infinite.

    Dividing such an integer would raise OverflowError.
    """
    return int(digits) if len(digits) <= _MOST_DIGITS else math.copysign(math.inf, float(digits))


def _number(digits: str) -> float:
    return float(digits) if math.isfinite(float(digits)) else _refuse(digits[:24])


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"{key!r} is given twice in one object; keep one")
        entries[key] = value
    return entries


def read_text(path: Path, hint: str, error: type[AdaptiveError] = ConfigError) -> str:
    """Reads a regular text file of at most :data:`MAX_BYTES`, without a leading byte order mark.

    Args:
        path: Path of the file.
        hint: Remedy at the end of the message.
        error: Class of the error that is raised.

    Raises:
        AdaptiveError: The file cannot be read, is too large, or is no text in UTF-8.
    """
    try:
        return read_bytes(path, hint, error).decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as caught:
        raise error(f"{path}: byte {caught.start} is no valid UTF-8; {hint}") from None


def read_bytes(path: Path, hint: str, error: type[AdaptiveError] = ConfigError) -> bytes:
    """Reads a regular file of at most :data:`MAX_BYTES`; see :func:`read_text`."""
    try:
        return read_whole(path)
    except OSError as caught:
        raise error(f"{path}: {caught.strerror or caught}; {hint}") from None


def read_json(path: Path, hint: str, error: type[AdaptiveError] = ConfigError) -> Any:
    """Reads a JSON file that people write; see :func:`read_text` and :func:`parse_json`.

    Raises:
        AdaptiveError: The file cannot be read or is no JSON within the limits.
    """
    text = read_text(path, hint, error)
    try:
        return parse_json(text, once=True)
    except ValueError as caught:
        raise error(f"{path}: no JSON ({caught}); {hint}") from None


def natural(text: str) -> int | None:
    """Converts text to a whole number of at most 18 digits, ``None`` if it is not one."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= _DIGITS
    return int(text) if is_number else None


def say(text: str, *, lines: bool = False) -> None:
    """Prints a line on standard error at once, with control characters escaped.

    Args:
        text: Text of the line.
        lines: Whether the text may have several lines, such as the picture of a schedule.
    """
    print(shown(text, lines=lines), file=sys.stderr, flush=True)


def shown(text: str, *, lines: bool = False) -> str:
    """Makes a message printable and cuts words that are too long to show.

    Args:
        text: Text of the message, which may quote users or files.
        lines: Whether the text may have several lines.
    """
    return _ENDLESS.sub(lambda match: f"{match[0][:_SHOWN]}...", printable(text, lines=lines))


def aligned(lines: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Returns the lines of a table with aligned columns.

    Args:
        lines: Cells of each line.
        left: Number of columns at the start that are aligned left; the others are aligned right.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def printable(text: str, *, lines: bool = False) -> str:
    r"""Returns a text with its control characters escaped, for example as ``\x1b``.

    Args:
        text: Any text.
        lines: Whether line ends and tabs stay.
    """
    pattern = _UNPRINTABLE_IN_LINES if lines else _UNPRINTABLE
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
