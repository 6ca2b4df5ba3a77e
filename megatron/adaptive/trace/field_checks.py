"""Checks the fields of a trace file's records, such as markers, when they are read."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron.adaptive.config.input_files import printable
from megatron.adaptive.errors import TraceError

MOST_SLICES = 1 << 20
"""Maximum number of slices of a microbatch. A damaged file may state a larger one."""


def _is_list(value: Any, kind: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(kind, value))


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_count(value: Any) -> bool:
    return _is_int(value) and 0 <= value < 1 << 53


def _is_group(value: Any) -> bool:
    """Returns whether a value has the form of a :class:`GroupCollectives` in a marker."""
    if not isinstance(value, dict):
        return False
    operations = value.get("operations")
    totals = value.get("totals")
    if not _is_list(operations, lambda word: isinstance(word, str)):
        return False
    if not _is_list(totals, lambda row: _is_list(row, _is_count) and len(row) == 3):
        return False
    assert operations is not None
    assert totals is not None

    def is_kept(row: Any) -> bool:
        if not _is_list(row, _is_int) or len(row) != 4:
            return False
        number, of, start_ns, duration_ns = row
        is_known = _is_count(number) and 0 <= of < len(operations)
        return is_known and abs(start_ns) < 1 << 53 and _is_count(duration_ns)

    return (
        isinstance(value.get("kind"), str)
        and all(_is_count(value.get(name)) for name in ("lowest_rank", "size"))
        and len(totals) == len(operations)
        and _is_list(value.get("kept"), is_kept)
    )


EXPECTED: dict[Any, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_int, "a whole number"),
    "str": (lambda value: isinstance(value, str), "text"),
    "words": (lambda value: _is_list(value, lambda word: isinstance(word, str)), "a list of words"),
    "counts": (lambda value: _is_list(value, _is_int), "whole numbers"),
    "slices": (
        lambda value: _is_list(value, lambda count: _is_int(count) and 1 <= count <= MOST_SLICES),
        f"numbers of slices from 1 to {MOST_SLICES:,}",
    ),
    "numbers": (
        lambda value: _is_list(value, lambda n: type(n) in (int, float) and n >= 0),
        "numbers from 0",
    ),
    "lengths": (
        lambda value: _is_list(value, lambda row: bool(row) and _is_list(row, _is_int)),
        "lists of whole numbers, none empty",
    ),
    "counters": (
        lambda value: (
            isinstance(value, dict) and all(_is_int(n) and n >= 0 for n in value.values())
        ),
        "whole numbers from 0 by name",
    ),
    "samples": (
        lambda value: _is_list(value, lambda row: _is_list(row, _is_int) and len(row) == 4),
        "lists of four whole numbers",
    ),
    "tokens": (
        lambda value: _is_list(value, lambda row: _is_list(row, _is_count) and len(row) > 2),
        "lists of at least three whole numbers from 0",
    ),
    "layers": (
        lambda value: _is_list(value, lambda row: _is_list(row, _is_count) and len(row) == 4),
        "lists of four whole numbers from 0",
    ),
    "passes": (
        lambda value: _is_list(
            value,
            lambda row: (
                _is_list(row, _is_int)
                and len(row) == 4
                and row[1] in (0, 1)
                and _is_count(row[0])
                and _is_count(row[3])
                and abs(row[2]) < 1 << 53
            ),
        ),
        "lists of four whole numbers, the second 0 or 1",
    ),
    "collectives": (
        lambda value: _is_list(value, _is_group),
        "a list of process groups with the times of their collectives",
    ),
}
"""Maps each type of field to a check of its value, and a description for error messages."""


def value_of(
    record: Mapping[str, Any], name: str, kind: Any, origin: object, default: Any = None
) -> Any:
    """Returns a field of a record, after the check in :data:`EXPECTED` for the type ``kind``.

    Raises:
        TraceError: The field is missing and has no default, or its value has another type.
    """
    value = record.get(name, default)
    is_sound, expected = EXPECTED[kind]
    if not is_sound(value):
        shown = reprlib.repr(value)
        raise TraceError(f"{origin}: field {name!r} is {shown}, expected {expected}")
    # Tables and sheets show this text, and cannot contain control characters.
    return printable(value) if isinstance(value, str) else value
