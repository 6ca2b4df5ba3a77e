"""Turns the lines of spans of version 2 into numbers, a whole block at a time.

The writer puts nothing but whole numbers, commas and brackets into these lines, so that numpy reads
them as one long list: some 0.4 us a span, against 2.3 us for JSON. Lines of another hand may hold
spaces or lack columns at the end; a block that has such lines is read as JSON, line by line, which
also names the line that is damaged.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.event import COLUMNS, KINDS, REASONS, Layout
from megatron.adaptive.trace.table import KIND, OTHER, REASON, Ints

__all__ = ["parse_spans"]

_PLAIN = bytes(range(ord("0"), ord("9") + 1)) + b",-[]\n"
_COMMAS = bytes.maketrans(b"]", b",")
_ENDS = {-(2**63), 2**63 - 1}
_MISSING = {"peer": -1, "of": -1}


def parse_spans(data: bytes, layout: Layout, where: Callable[[int], str]) -> Ints:
    """Read spans.

    Args:
        data: whole lines.
        layout: of the header above them.
        where: says where a line of ``data`` (from 0) stands, for the message of an error.

    Returns:
        ``[lines, 12] int64`` in the order of :data:`~megatron.adaptive.trace.event.COLUMNS`, with
        kinds and reasons numbered as in this program.

    Raises:
        TraceError: a line is no list of whole numbers, or has more of them than columns.
    """
    width = len(layout.columns)
    numbers = _plain(data, width)
    if numbers is None:
        numbers = _careful(data, layout, where)
    return _as_ours(numbers, layout)


def _plain(data: bytes, width: int) -> Ints | None:
    """The numbers of lines as the recorder writes them; ``None`` if some are not so."""
    lines = data.count(b"\n")
    if data.translate(None, _PLAIN) or data.count(b"]\n") != lines or data.count(b"[") != lines:
        return None
    if not lines:
        return np.zeros((0, width), dtype=np.int64)
    text = data.translate(_COMMAS, b"[\n")
    with warnings.catch_warnings():
        # An unreadable rest was a warning first and is an error since.
        warnings.simplefilter("error", DeprecationWarning)
        try:
            numbers = np.fromstring(text[:-1], dtype=np.int64, sep=",")
        except (ValueError, DeprecationWarning):
            return None
    if numbers.size != lines * width or {int(numbers.min()), int(numbers.max())} & _ENDS:
        return None  # numbers beyond the ends of the range became the ends
    return numbers.reshape(lines, width)


def _careful(data: bytes, layout: Layout, where: Callable[[int], str]) -> Ints:
    width = len(layout.columns)
    defaults = [_MISSING.get(column, 0) for column in layout.columns]
    rows = []
    for number, line in enumerate(data.splitlines()):
        try:
            row: Any = json.loads(line)
        except ValueError:
            raise TraceError(
                f"{where(number)} is not a line of JSON; the file is damaged, remove it or that "
                "line"
            ) from None
        sound = isinstance(row, list) and all(
            type(value) is int and -(2**63) <= value < 2**63 for value in row
        )
        if not sound or not 6 <= len(row) <= width:
            raise TraceError(
                f"{where(number)} is no span: expected a list of whole numbers for "
                f"{', '.join(layout.columns)}"
            )
        rows.append(row + defaults[len(row) :])
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def _as_ours(numbers: Ints, layout: Layout) -> Ints:
    """Columns, kinds and reasons in the places that they have in this program."""
    if layout.columns != COLUMNS:
        ours = np.zeros((len(numbers), len(COLUMNS)), dtype=np.int64)
        for place, column in enumerate(COLUMNS):
            if column in layout.columns:
                ours[:, place] = numbers[:, layout.columns.index(column)]
            else:
                ours[:, place] = _MISSING.get(column, 0)
        numbers = ours
    kind, of, reason = (COLUMNS.index(name) for name in ("kind", "of", "reason"))
    if layout.kinds != KINDS:
        kinds = np.array([KIND.get(word, OTHER) for word in layout.kinds])
        numbers[:, kind] = _renamed(numbers[:, kind], kinds, OTHER)
        numbers[:, of] = _renamed(numbers[:, of], kinds, -1)
    else:
        _bound(numbers[:, kind], len(KINDS), OTHER)
        _bound(numbers[:, of], len(KINDS), -1)
    if layout.reasons != REASONS:
        reasons = np.array([REASON.get(word, 0) for word in layout.reasons])
        numbers[:, reason] = _renamed(numbers[:, reason], reasons, 0)
    else:
        _bound(numbers[:, reason], len(REASONS), 0)
    return numbers


def _renamed(values: Ints, names: Ints, otherwise: int) -> Ints:
    known = (values >= 0) & (values < len(names))
    renamed: Ints = np.where(known, names[np.where(known, values, 0)], otherwise)
    return renamed


def _bound(values: Ints, limit: int, otherwise: int) -> None:
    values[(values < 0) | (values >= limit)] = otherwise
