"""Tests that lines with spans are parsed correctly, and that damaged lines are reported."""

import json

import numpy as np
import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.block_index import parse_spans
from megatron.adaptive.trace.span_columns import OTHER
from megatron.adaptive.trace.trace_format import COLUMNS, KINDS, REASONS, IterationStart, block_text


def place(line: int) -> str:
    return f"file:{line + 10}"


def lines(*rows: object) -> bytes:
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()


ROW = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 1]


def test_what_the_recorder_writes_is_read() -> None:
    rng = np.random.default_rng(3)
    rows = rng.integers(-(2**62), 2**62, (500, len(COLUMNS)))
    rows[:, 0] = rng.integers(0, len(KINDS), 500)
    rows[:, 10] = rng.integers(-1, len(KINDS), 500)
    rows[:, 11] = rng.integers(0, len(REASONS), 500)
    written = [tuple(row) for row in rows.tolist()]
    text = block_text(IterationStart(1, 1), written).split("\n", 1)[1]
    rows[:, 5] -= rows[:, 4]
    big = np.abs(rows).max()
    assert big > 2**60
    assert np.array_equal(parse_spans(text.encode(), place), rows)
    assert parse_spans(b"", place).shape == (0, len(COLUMNS))


@pytest.mark.parametrize(
    "line",
    [
        b"garbage\n",
        b"[0,1,2\n",
        b"[0,1,,2]\n",
        b"[0,1,2]\n",
        b"[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 1]\n",
        b"[0,1,2,3,4,5,6,7,8,9,1,1,1]\n",
        b"[0,1,2,3,4,5.5,6,7,8,9,1,1]\n",
        b"[0,1,2,3,4,99999999999999999999,6,7,8,9,1,1]\n",
        b'["F",1,2,3,4,5,6,7,8,9,1,1]\n',
        b"12\n",
    ],
)
def test_damaged_lines_are_named(line: bytes) -> None:
    with pytest.raises(TraceError, match="file:11 is not a span") as caught:
        parse_spans(lines(ROW) + line + lines(ROW), place)
    assert "\n" not in str(caught.value)


def test_numbers_out_of_their_range_name_nothing() -> None:
    wild = [99, *ROW[1:10], 99, -7]
    row = parse_spans(lines(wild), place)[0]
    assert (row[0], row[10], row[11]) == (OTHER, -1, 0)
