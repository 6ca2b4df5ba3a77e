"""Opens files, parses JSON within limits, and escapes untrusted text for display.

Files, sockets and environment variables may contain arbitrary bytes, and a path may refer to a
device or a pipe. Therefore, files from users are always opened with :func:`open_file`, and JSON is
parsed with :func:`parse_json`. :func:`printable` escapes text for a terminal, a spreadsheet or a
web page.
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
"""Maximum size in bytes of a file that is read into memory as a whole."""
MAX_LEVELS = 64
"""Maximum nesting depth of lists and objects in JSON. Files of this project have at most 10 levels.
"""
_MAX_INTEGER = 1 << 64
_MOST_DIGITS = 300  # An integer with 300 digits still fits into a float.
_DIGITS = 18  # An integer with 18 digits fits into 64 bits.
BYTE_ORDER_MARK = "\ufeff"
"""Character that some editors write at the start of a UTF-8 file. All functions that read text
remove it.
"""
_WIDE = re.compile(r"\d{20}|[eE]\+?\d{3}")
# Control characters, text direction marks, line separators and lone surrogates are escaped.
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
    """Checks that ``path`` is a regular file, before a library opens it.

    Opening a named pipe (FIFO) might wait for a writer forever, and reading from a device might
    never end.

    Args:
        path: Path of the file. Symbolic links are followed.

    Returns:
        Size of the file in bytes.

    Raises:
        OSError: The file does not exist or is not a regular file. ``strerror`` describes the
            problem.
    """
    try:
        status = os.stat(path)
    # os.stat raises ValueError if, for example, the name contains a NUL character.
    except ValueError:
        raise OSError(errno.EINVAL, "this is not the name of a file", str(path)) from None
    return _require_regular(status, path)


def _require_regular(status: os.stat_result, path: str | Path) -> int:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    for is_kind, kind in _KINDS:
        if is_kind(status.st_mode):
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    return status.st_size


def open_file(path: str | Path) -> BinaryIO:
    """Opens ``path``, which must be a regular file, for reading bytes.

    Unlike Python's ``open``, this function never waits for another process.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    require_file(path)
    # A named pipe may have replaced the file since the check. With O_NONBLOCK, os.open does not
    # wait for a process that writes to the pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_whole(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """Returns the contents of ``path``, which must be a regular file.

    Args:
        path: Path of the file.
        most: Largest allowed size in bytes.

    Raises:
        OSError: The file cannot be read, is not a regular file, or has more than ``most`` bytes.
    """
    with open_file(path) as file:
        pieces: list[bytes] = []
        left = most - os.fstat(file.fileno()).st_size
        while left >= 0 and (piece := file.read(_PIECE_BYTES)):
            pieces.append(piece)
            # Count the bytes that were read, because files in /proc report size 0 and other files
            # may grow.
            left = most - sum(map(len, pieces))
    if left < 0:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return b"".join(pieces)


def parse_json(data: str | bytes | bytearray, *, strict: bool = True, once: bool = False) -> Any:
    """Parses JSON within limits on size, nesting depth and numbers.

    Args:
        data: Text to parse. Bytes are decoded as UTF-8.
        strict: Whether numbers must be finite and integers must fit into 64 bits. If false, NaN is
            allowed, for example as a loss. Integers that are too large for a float become infinite.
        once: Whether a duplicate key in an object is an error. This is useful for files that people
            write.

    Raises:
        ValueError: The text is not JSON, or exceeds a limit. The message has a single line.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, more than {MAX_BYTES:,}")
    try:
        text = data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not valid UTF-8") from None
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
    """Converts ``digits`` to an integer, or to infinity if the number is too large for a float.

    Later divisions of such a large integer would raise OverflowError.
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
    """Reads a UTF-8 text file of at most :data:`MAX_BYTES`, and removes a byte order mark.

    Args:
        path: Path of the file.
        hint: Advice to the user, appended to error messages.
        error: Class of the errors to raise.

    Raises:
        AdaptiveError: The file cannot be read, is too large, or is not UTF-8 text.
    """
    try:
        return read_bytes(path, hint, error).decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as caught:
        raise error(f"{path}: byte {caught.start} is not valid UTF-8; {hint}") from None


def read_bytes(path: Path, hint: str, error: type[AdaptiveError] = ConfigError) -> bytes:
    """Reads a regular file of at most :data:`MAX_BYTES`. Raises the errors of :func:`read_text`."""
    try:
        return read_whole(path)
    except OSError as caught:
        raise error(f"{path}: {caught.strerror or caught}; {hint}") from None


def read_json(path: Path, hint: str, error: type[AdaptiveError] = ConfigError) -> Any:
    """Reads a JSON file that a person may have written, so duplicate keys are an error.

    Args:
        path: Path of the file.
        hint: Advice to the user, appended to error messages.
        error: Class of the errors to raise.

    Raises:
        AdaptiveError: The file cannot be read, is not JSON, or exceeds a limit.
    """
    text = read_text(path, hint, error)
    try:
        return parse_json(text, once=True)
    except ValueError as caught:
        raise error(f"{path} is not valid JSON ({caught}); {hint}") from None


def natural(text: str) -> int | None:
    """Converts ``text`` to an integer if it has 1 to 18 digits, otherwise returns ``None``."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= _DIGITS
    return int(text) if is_number else None


def say(text: str, *, lines: bool = False) -> None:
    """Prints a message to standard error, with control characters escaped, and flushes the stream.

    Args:
        text: Text of the message.
        lines: Whether to keep line ends, for example in the drawing of a schedule. By default, they
            are escaped.
    """
    print(shown(text, lines=lines), file=sys.stderr, flush=True)


def shown(text: str, *, lines: bool = False) -> str:
    """Returns a message with control characters escaped and very long words truncated.

    Args:
        text: Text of the message, which may contain user input or parts of files.
        lines: Whether to keep line ends and tabs. By default, they are escaped.
    """
    return _ENDLESS.sub(lambda match: f"{match[0][:_SHOWN]}...", printable(text, lines=lines))


def aligned(lines: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Formats a table as lines of text with aligned columns.

    Args:
        lines: Cells of the table, row by row.
        left: Number of left-aligned columns, counted from the left. All other columns are
            right-aligned.
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
    r"""Returns ``text`` with control characters escaped, for example as ``\x1b``.

    Args:
        text: Any text, for example from a file or from a user.
        lines: Whether to keep line ends and tabs. By default, they are escaped.
    """
    pattern = _UNPRINTABLE_IN_LINES if lines else _UNPRINTABLE
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
