"""Checks the types and ranges of the values in a trace file's JSON lines."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron.adaptive.config.input_files import printable
from megatron.adaptive.errors import TraceError

MAX_SLICES = 1 << 20
"""Maximum number of slices of a microbatch. Larger numbers mean that the file is damaged."""

MAX_SIZES = {
    "world_size": 1 << 17,
    "num_ranks": 1 << 14,
    "num_chunks": 1 << 10,
    "num_microbatches": 1 << 20,
    "num_slices": MAX_SLICES,
}
"""Maximum sizes of a run in the header of a trace.

Readers loop over all ranks, including ranks without a file, so a huge number in a damaged header
would make them run for a very long time.
"""

MAX_STAGES = 1 << 16
"""Maximum number of stages of a run."""

MAX_ITERATION = 1 << 40
"""Maximum iteration number. Its product with the number of ranks still fits into 64 bits."""

_MAX_LAYERS = 1 << 16
_MAX_WORK = 1e30
_OF_LAYERS = ("layer_kinds", "layer_work")


def _is_list(value: Any, kind: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(kind, value))


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_count(value: Any) -> bool:
    return _is_int(value) and 0 <= value < 1 << 53


def _is_group(value: Any) -> bool:
    """Returns whether ``value`` is a valid record of a ``trace_format.GroupCollectives``."""
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
    "int": (_is_int, "an integer"),
    "str": (lambda value: isinstance(value, str), "a string"),
    "words": (
        lambda value: _is_list(value, lambda word: isinstance(word, str)),
        "a list of strings",
    ),
    "counts": (lambda value: _is_list(value, _is_int), "integers"),
    "slices": (
        lambda value: _is_list(value, lambda count: _is_int(count) and 1 <= count <= MAX_SLICES),
        f"integers from 1 to {MAX_SLICES:,}",
    ),
    "numbers": (
        lambda value: _is_list(value, lambda n: type(n) in (int, float) and n >= 0),
        "non-negative numbers",
    ),
    "lengths": (
        lambda value: _is_list(value, lambda row: bool(row) and _is_list(row, _is_int)),
        "non-empty lists of integers",
    ),
    "counters": (
        lambda value: (
            isinstance(value, dict) and all(_is_int(n) and n >= 0 for n in value.values())
        ),
        "a mapping from names to non-negative integers",
    ),
    "samples": (
        lambda value: _is_list(value, lambda row: _is_list(row, _is_int) and len(row) == 4),
        "lists of four integers",
    ),
    "tokens": (
        lambda value: _is_list(value, lambda row: _is_list(row, _is_count) and len(row) > 2),
        "lists of at least three non-negative integers",
    ),
    "layers": (
        lambda value: _is_list(value, lambda row: _is_list(row, _is_count) and len(row) == 4),
        "lists of four non-negative integers",
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
        "lists of four integers, of which the second is 0 or 1",
    ),
    "collectives": (
        lambda value: _is_list(value, _is_group),
        "a list of process groups with the times of their collectives",
    ),
}
"""Maps each type of field to a function that checks a value, and to a description for errors."""


def value_of(
    record: Mapping[str, Any], name: str, kind: Any, origin: object, default: Any = None
) -> Any:
    """Returns the field ``name`` of ``record`` after checking its type.

    A missing field has the value ``default``. ``kind`` is the type of the field, a key of
    :data:`EXPECTED`. ``origin`` is the position of the record for error messages.

    Raises:
        TraceError: The field is missing and has no default, or the value has the wrong type.
    """
    value = record.get(name, default)
    is_sound, expected = EXPECTED[kind]
    if not is_sound(value):
        shown = reprlib.repr(value)
        raise TraceError(f"{origin}: field {name!r} must be {expected}, got {shown}")
    # Tables and spreadsheets cannot contain control characters, so remove them.
    return printable(value) if isinstance(value, str) else value


def number_of_microbatches(record: Mapping[str, Any], origin: object) -> int:
    """Reads an iteration's number of microbatches from ``record``, and checks that it is in range.

    ``origin`` is the position of the record for error messages.
    """
    number: int = value_of(record, "num_microbatches", "int", origin)
    most = MAX_SIZES["num_microbatches"]
    if not 0 <= number <= most:
        raise TraceError(
            f"{origin}: num_microbatches must be from 0 to {most:,}, got {number}; remove this"
            " line or the damaged file"
        )
    return number


def check_layers(values: Mapping[str, Any], origin: object) -> None:
    """Checks that a header describes a plausible number of layers with plausible work.

    Without this check, a damaged header could cause a search over a huge number of layers.

    Args:
        values: Header fields.
        origin: Position of the header (``file:line``) for error messages.

    Raises:
        TraceError: The numbers are larger than in any real model.
    """
    if sum(values["layers"]) > _MAX_LAYERS or len(values["layers"]) > MAX_STAGES:
        shown = reprlib.repr(values["layers"])
        raise TraceError(f"{origin}: layers must be at most {_MAX_LAYERS:,} in total, got {shown}")
    for name in _OF_LAYERS:
        if len(values[name]) > _MAX_LAYERS:
            raise TraceError(
                f"{origin}: {name} must have at most {_MAX_LAYERS:,} values, got"
                f" {len(values[name]):,}"
            )
    for name in ("work", "layer_work"):
        if max(values[name], default=0) > _MAX_WORK:
            raise TraceError(
                f"{origin}: {name} must be numbers up to {_MAX_WORK:g}, got"
                f" {reprlib.repr(values[name])}"
            )
