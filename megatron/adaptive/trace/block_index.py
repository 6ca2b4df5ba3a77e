"""Finds the positions of all spans in a trace file, and reads the spans of selected iterations.

Before the spans of each iteration, a trace file has a line (the marker) with the size of these
spans in bytes. Reading the markers is therefore enough to find the spans, and is fast even for a
large file. If the run was killed, the last line of the file may be truncated. Such a line is
dropped and counted. If the size in a marker is wrong because the file was truncated or edited, the
lines after the marker are read one by one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron.adaptive.config.input_files import open_file, require_file
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.span_columns import OTHER, Ints, TraceTable
from megatron.adaptive.trace.trace_format import (
    COLUMNS,
    DRAWN_ACTIONS,
    REASONS,
    ClockSamples,
    Gap,
    IterationStart,
    TraceHeader,
    parse_line,
)

SHORTEST_SPAN = 2 * len(COLUMNS) + 2
"""Minimum length of a span's line in bytes."""


@dataclass(frozen=True, slots=True)
class Block:
    """Describes where consecutive spans of one iteration are in a file.

    Attributes:
        marker: Parsed line before the spans, which describes the iteration.
        offset: Offset in bytes of the first span in the file.
        size_bytes: Total size in bytes of the complete lines of spans.
        is_whole: Whether the file contains as many spans as the marker states.
        table: Spans of the block if they have already been read; otherwise ``None``.
    """

    marker: IterationStart
    offset: int = 0
    size_bytes: int = 0
    is_whole: bool = True
    table: TraceTable | None = None

    @property
    def num_spans(self) -> int:
        """Number of spans that the file states, at least 1 and limited by the block's size."""
        if self.table is not None:
            return max(1, len(self.table))
        return max(1, min(sum(self.marker.counts), self.size_bytes // SHORTEST_SPAN))


@dataclass
class FileIndex:
    """Lists the contents of a trace file: header, positions of the spans, and clock samples.

    Attributes:
        path: Path of the trace file.
        header: Header of the file, or ``None`` if the file is empty.
        blocks: Positions of the spans, with one block per marker, in the order of the file.
        samples: Clock samples in the file.
        gaps: Iterations that are missing because writing to the disk failed.
        truncated_lines: 1 if the last line of the file is truncated, otherwise 0.
        offset: Offset in bytes from which :meth:`read_on` continues.
    """

    path: Path
    header: TraceHeader | None = None
    blocks: list[Block] = field(default_factory=list)
    samples: list[ClockSamples] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    truncated_lines: int = 0
    offset: int = 0

    def read_on(self, size: int, *, is_growing: bool = False) -> None:
        """Reads the file from :attr:`offset` to the end, and adds the contents to this object.

        Args:
            size: Size of the file in bytes.
            is_growing: Whether the run may still be writing to the file. If so, an incomplete last
                line is left for the next call instead of being counted as truncated.

        Raises:
            OSError: The file cannot be read.
            TraceError: The file is not a trace, is damaged, or has another format version.
        """
        with open_file(self.path) as file:
            file.seek(self.offset)
            while line := file.readline():
                if not line.endswith(b"\n"):
                    self.truncated_lines = 0 if is_growing else 1
                    break
                record = parse_line(line, self)
                if isinstance(record, TraceHeader):
                    if self.header is not None:
                        raise TraceError(
                            f"{self}: the file has a second header, but must have only one; use a "
                            "separate trace folder for each start of a job"
                        )
                    self.header = record
                elif self.header is None:
                    raise TraceError(
                        f"{self}: a trace file must begin with a header, but this line precedes "
                        "it; remove the file from the folder"
                    )
                elif isinstance(record, IterationStart):
                    if is_growing and file.tell() + record.size_bytes > size:
                        break
                    self.blocks.append(_block(self, file, record, size))
                elif isinstance(record, ClockSamples):
                    self.samples.append(record)
                elif isinstance(record, Gap):
                    self.gaps.append(record)
                self.offset = file.tell()

    def __str__(self) -> str:
        """Returns the current position as ``file:line``.

        Slow for a large file, because the preceding lines are counted.
        """
        return f"{self.path}:{_line_number(self.path, self.offset)}"


def index_file(path: Path) -> FileIndex:
    """Finds the header, the blocks of spans and the clock samples of the trace file at ``path``.

    Raises:
        TraceError: The file cannot be read, is not a trace, is damaged, or has another version.
    """
    index = FileIndex(path)
    try:
        index.read_on(require_file(path))
    except OSError as error:
        raise _unreadable(path, error) from error
    return index


def _block(index: FileIndex, file: BinaryIO, marker: IterationStart, file_size: int) -> Block:
    """Returns the block of spans after ``marker``, and advances ``file`` to the end of the block.

    ``index`` lists the contents of the file, and ``file_size`` is the size of the file in bytes
    when reading started.
    """
    offset, size = file.tell(), marker.size_bytes
    if _ends_at(file, offset + size, file_size):
        file.seek(offset + size)
        return Block(marker, offset, size)
    file.seek(offset)
    size = 0
    while (line := file.readline()).endswith(b"\n") and not line.startswith(b"{"):
        size += len(line)
    file.seek(offset + size)
    block = Block(marker, offset, size)
    # The lines may have been edited, so parse them now to report errors immediately.
    table = read_blocks(index, [block])
    return replace(block, is_whole=len(table) == sum(marker.counts), table=table)


def read_blocks(index: FileIndex, blocks: Sequence[Block]) -> TraceTable:
    """Reads the spans of ``blocks``, whose times are on the clock of the rank that wrote the file.

    Raises:
        TraceError: The file no longer exists, or a line is damaged.
    """
    tables = [block.table for block in blocks if block.table is not None]
    blocks = [block for block in blocks if block.table is None and block.size_bytes]
    if blocks:
        parts = []
        try:
            with open_file(index.path) as file:
                for block in blocks:
                    file.seek(block.offset)
                    parts.append(file.read(block.size_bytes))
        except OSError as error:
            raise _unreadable(index.path, error) from error
        tables.append(_table(index, blocks, parts))
    return TraceTable.concat(tables)


def _table(index: FileIndex, blocks: Sequence[Block], parts: Sequence[bytes]) -> TraceTable:
    counts = [part.count(b"\n") for part in parts]

    def where(line: int) -> str:
        for block, count in zip(blocks, counts, strict=True):
            if line < count:
                return f"{index.path}:{_line_number(index.path, block.offset) + line}"
            line -= count
        raise AssertionError("the index of the line is beyond the last block")

    rows = parse_spans(b"".join(parts), where)
    rows[:, 4] += np.repeat([block.marker.start_ns for block in blocks], counts)
    table = TraceTable.from_rows(
        np.repeat([block.marker.iteration for block in blocks], counts), rows
    )
    chunks = table.chunk[table.where(*DRAWN_ACTIONS)]
    num_chunks = index.header.num_chunks if index.header else 0
    foreign = chunks[(chunks < 0) | (chunks >= num_chunks)]
    if len(foreign):
        raise TraceError(
            f"{index.path} has a span of chunk {foreign[0]}, but its header states {num_chunks} "
            "chunks; remove the damaged file"
        )
    return table


def _line_number(path: Path, offset: int) -> int:
    """Returns the number of the line in ``path`` that begins at byte ``offset``, counted from 1."""
    with open_file(path) as file:
        return 1 + file.read(offset).count(b"\n")


def _unreadable(path: Path, error: OSError) -> TraceError:
    return TraceError(f"cannot read {path}: {error.strerror or error}")


def _ends_at(file: BinaryIO, end: int, size: int) -> bool:
    """Returns whether a complete block of spans ends at byte ``end`` of ``file``.

    A block is complete if its last line is complete and no other span follows. ``size`` is the
    size of the file in bytes.
    """
    if end > size:
        return False
    file.seek(end - 1)
    around = file.read(2)
    return around[:1] == b"\n" and around[1:] in (b"", b"{")


_PLAIN = bytes(range(ord("0"), ord("9") + 1)) + b",-[]\n"
_COMMAS = bytes.maketrans(b"]", b",")
_ENDS = {-(2**63), 2**63 - 1}
_UNKNOWN = (("kind", OTHER, OTHER), ("of", OTHER, -1), ("reason", len(REASONS), 0))
"""Columns of indices, as (name, number of known values, replacement for unknown values)."""


def parse_spans(data: bytes, where: Callable[[int], str]) -> Ints:
    """Parses lines of spans into an array of integers.

    Args:
        data: Complete lines of spans.
        where: Function that converts the index of a line in ``data`` to the position ``file:line``
            for error messages.

    Returns:
        Array ``[lines, 12] int64``, in the order of
        :data:`~megatron.adaptive.trace.trace_format.COLUMNS`. An unknown kind of span is replaced
        by ``other``. In the columns ``of`` and ``reason``, unknown values are replaced by the value
        that means none.

    Raises:
        TraceError: A line is not a list of integers, one per column.
    """
    numbers = _plain(data)
    if numbers is None:
        raise _refusal(data, where)
    for name, num_known, replacement in _UNKNOWN:
        column = numbers[:, COLUMNS.index(name)]
        column[(column < 0) | (column >= num_known)] = replacement
    return numbers


def _plain(data: bytes) -> Ints | None:
    """Parses lines of spans in the exact format that the recorder writes.

    Returns ``None`` if any line has another format.
    """
    lines, width = data.count(b"\n"), len(COLUMNS)
    if data.translate(None, _PLAIN) or data.count(b"]\n") != lines or data.count(b"[") != lines:
        return None
    if not lines:
        return np.zeros((0, width), dtype=np.int64)
    text = data.translate(_COMMAS, b"[\n")
    with warnings.catch_warnings():
        # Turn warnings into errors, because older versions of numpy only warn about text that they
        # cannot parse, while newer versions raise an error.
        warnings.simplefilter("error", DeprecationWarning)
        try:
            numbers = np.fromstring(text[:-1], dtype=np.int64, sep=",")
        except (ValueError, DeprecationWarning):
            return None
    if numbers.size != lines * width or {int(numbers.min()), int(numbers.max())} & _ENDS:
        # numpy replaces numbers outside the range of int64 with the smallest or largest int64, so
        # one of these two values indicates a damaged line.
        return None
    return numbers.reshape(lines, width)


def _refusal(data: bytes, where: Callable[[int], str]) -> TraceError:
    """Returns an error that names the position of the first line in ``data`` that is not a span.

    ``where`` converts the index of a line in ``data`` to the position for the message.
    """
    pattern = re.compile(rb"\[(-?\d{1,18},){%d}-?\d{1,18}\]" % (len(COLUMNS) - 1))
    wrong = (n for n, line in enumerate(data.splitlines()) if not pattern.fullmatch(line))
    return TraceError(
        f"{where(next(wrong, 0))} is not a span, but must be one: a list of {len(COLUMNS)} "
        f"integers in brackets ({', '.join(COLUMNS)}); remove this line or the damaged file"
    )
