"""Writes and reads the text form of a trace file: JSON lines.

::

    {"format": "megatron-adaptive-trace", "version": 2, "columns": [...], "kinds": [...],
     "reasons": [...], "run": ..., "rank": 0, ...}                                        header
    {"begin_iteration": 7, "num_microbatches": 8, "start_ns": 812, "counts": [8, 8, 0, ...],
     "size_bytes": 1312, "lengths": [[64, 40, 21], ...]}                                  marker
    {"begin_iteration": 8, ..., "exchange_ns": 91000, "tokens": [[3, 0, 511, 498], ...]}   experts
    [0,0,3,0,5120,2210000,4096,67108864,1,-1,-1,8]                                          span
    {"after_iteration": 7, ...}                                     marker of more of its spans
    {"clock_samples": [[8, 93, 95, 11], ...], "reference": 0}                      clock samples
    {"missing": [8, 93, 80]}               first and last of iterations that are lost, their number

The header comes first; it comes again where a resumed run went on in the same file. A span's line
holds whole numbers only, one per column of the header, without spaces; its start counts from the
``start_ns`` of the marker above it. A marker says how many bytes of spans follow, so that a reader
passes over what it was not asked for; a rank with experts adds what they did. Readers ignore
fields, columns and objects that they do not know, so the version only rises when an old one changes
its meaning; a file of another version is refused.

This module opens no file and imports nothing heavy: the recorder writes with it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from megatron.adaptive.config.outside import parse_json, printable
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.event import (
    FORMAT_NAME,
    FORMAT_VERSION,
    KINDS,
    ClockSamples,
    Gap,
    IterationStart,
    Row,
    SpanFormat,
    TraceHeader,
)

_MAX_SIZES = {
    "world_size": 1 << 17,
    "num_ranks": 1 << 14,
    "num_chunks": 1 << 10,
    "num_microbatches": 1 << 20,
}
"""Of a run that a header describes: readers go over all of its ranks, present or not."""
_MAX_STAGES = 1 << 16
_ROW = "[%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d]\n"


def header_line(header: TraceHeader) -> str:
    """Returns the header as one line of JSON with its line end."""
    values = asdict(header)
    form = values.pop("span_format")
    return json.dumps({"format": FORMAT_NAME, "version": FORMAT_VERSION, **form, **values}) + "\n"


def samples_line(samples: ClockSamples) -> str:
    """Returns clock samples as one line of JSON with its line end."""
    return f'{{"clock_samples": {json.dumps(samples.samples)}, "reference": {samples.reference}}}\n'


def gap_line(gap: Gap) -> str:
    """Returns what is said of missing iterations as one line of JSON with its line end."""
    return f'{{"missing": [{gap.first}, {gap.last}, {gap.count}]}}\n'


def block_text(marker: IterationStart, rows: Sequence[Row]) -> str:
    """Returns a marker and the spans below it, ready to be appended.

    Args:
        marker: of the iteration; ``counts`` and ``size_bytes`` are those of the rows.
        rows: the spans.
    """
    counts, start_ns = [0] * len(KINDS), marker.start_ns
    lines = []
    for kind, chunk, microbatch, piece, start, end, size, held, depth, peer, of, reason in rows:
        counts[kind] += 1
        lines.append(
            _ROW
            % (
                *(kind, chunk, microbatch, piece, start - start_ns, end - start),
                *(size, held, depth, peer, of, reason),
            )
        )
    spans = "".join(lines)
    said: dict[str, Any] = {
        "after_iteration" if marker.is_late else "begin_iteration": marker.iteration,
        "num_microbatches": marker.num_microbatches,
        "start_ns": start_ns,
        "counts": counts,
        "size_bytes": len(spans),
    }
    if marker.tokens:
        said |= {"exchange_ns": marker.exchange_ns, "tokens": marker.tokens}
    if marker.lengths:
        said["lengths"] = marker.lengths
    return f"{json.dumps(said)}\n{spans}"


def parse_line(
    line: str | bytes, origin: object
) -> TraceHeader | IterationStart | ClockSamples | Gap | None:
    """Reads a line that is an object: anything but a span.

    Args:
        line: the line, with or without its end.
        origin: where it stands (``file:line``), shown in the message of an error.

    Returns:
        The record; ``None`` for an object of a kind this version does not know.

    Raises:
        TraceError: the line is no JSON object, lacks a field, has one of the wrong type, or
            belongs to another version of the format.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        raise TraceError(
            f"{origin} is not a line of JSON ({error}); the file is damaged, remove it or that line"
        ) from None
    if not isinstance(record, dict):
        raise TraceError(f"{origin} is not a JSON object; this is no trace file")
    if "format" in record or "version" in record:
        return _header(record, origin)
    for word in ("begin_iteration", "after_iteration"):
        if word in record:
            return IterationStart(
                iteration=_value(record, word, "int", origin),
                num_microbatches=_value(record, "num_microbatches", "int", origin),
                start_ns=_value(record, "start_ns", "int", origin),
                counts=tuple(_value(record, "counts", "counts", origin, [])),
                size_bytes=_value(record, "size_bytes", "int", origin),
                is_late=word == "after_iteration",
                exchange_ns=_value(record, "exchange_ns", "int", origin, 0),
                tokens=tuple(map(tuple, _value(record, "tokens", "tokens", origin, []))),
                lengths=tuple(map(tuple, _value(record, "lengths", "lengths", origin, []))),
            )
    if "clock_samples" in record:
        samples = _value(record, "clock_samples", "samples", origin)
        reference = _value(record, "reference", "int", origin)
        return ClockSamples(reference, tuple(map(tuple, samples)))
    if "missing" in record:
        numbers = _value(record, "missing", "counts", origin)
        if len(numbers) != 3:
            raise TraceError(f"{origin}: field 'missing' is {numbers}, expected three numbers")
        return Gap(*numbers)
    return None


def _header(record: Mapping[str, Any], origin: object) -> TraceHeader:
    name, version = record.get("format"), record.get("version")
    if name != FORMAT_NAME:
        raise TraceError(f"{origin} has format {name!r}, expected {FORMAT_NAME!r}; no trace file")
    if type(version) is not int or version < 1:
        raise TraceError(f"{origin} has version {version!r}, expected {FORMAT_VERSION}")
    if version != FORMAT_VERSION:
        remedy = "use a newer version of it" if version > FORMAT_VERSION else "record it again"
        raise TraceError(
            f"{origin} has format version {version}, this program reads version "
            f"{FORMAT_VERSION}; {remedy}"
        )
    values = {
        one.name: _value(record, one.name, one.type, origin)
        for one in fields(TraceHeader)
        if one.type in _EXPECTED
    }
    values["layers"] = tuple(map(int, _value(record, "layers", "numbers", origin, [])))
    values["work"] = tuple(_value(record, "work", "numbers", origin, []))
    words = (tuple(_value(record, n, "words", origin)) for n in SpanFormat.__slots__)
    header = TraceHeader(**values, span_format=SpanFormat(*words))
    for size, most in _MAX_SIZES.items():
        if not 1 <= getattr(header, size) <= most:
            raise TraceError(f"{origin}: {size} is {getattr(header, size)}, expected 1 to {most:,}")
    if header.num_ranks * header.num_chunks > _MAX_STAGES:
        raise TraceError(f"{origin}: num_ranks times num_chunks is more than {_MAX_STAGES:,}")
    for position, limit in (("rank", header.world_size), ("pp_rank", header.num_ranks)):
        if not 0 <= getattr(header, position) < limit:
            raise TraceError(
                f"{origin}: {position} is {getattr(header, position)}, expected 0..{limit - 1}"
            )
    return header


def _is_list(value: Any, kind: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(kind, value))


def _is_int(value: Any) -> bool:
    return type(value) is int


_EXPECTED: dict[Any, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_int, "a whole number"),
    "str": (lambda value: isinstance(value, str), "text"),
    "words": (lambda value: _is_list(value, lambda word: isinstance(word, str)), "a list of words"),
    "counts": (lambda value: _is_list(value, _is_int), "whole numbers"),
    "numbers": (
        lambda value: _is_list(value, lambda n: type(n) in (int, float) and n >= 0),
        "numbers from 0",
    ),
    "lengths": (
        lambda value: _is_list(value, lambda one: bool(one) and _is_list(one, _is_int)),
        "lists of whole numbers, none empty",
    ),
    "samples": (
        lambda value: _is_list(value, lambda one: _is_list(one, _is_int) and len(one) == 4),
        "lists of four whole numbers",
    ),
    "tokens": (
        lambda value: _is_list(
            value,
            lambda one: _is_list(one, lambda n: _is_int(n) and 0 <= n < 1 << 53) and len(one) > 2,
        ),
        "lists of three whole numbers from 0 at least",
    ),
}
"""By kind of field: what is one, and the words for it."""


def _value(
    record: Mapping[str, Any], name: str, kind: Any, origin: object, default: Any = None
) -> Any:
    """Returns a field of a record, which must be of a kind of :data:`_EXPECTED`."""
    value = record.get(name, default)
    is_sound, expected = _EXPECTED[kind]
    if not is_sound(value):
        shown = reprlib.repr(value)
        raise TraceError(f"{origin}: field {name!r} is {shown}, expected {expected}")
    # All views show them, among them sheets, which cannot hold control characters.
    return printable(value) if isinstance(value, str) else value
