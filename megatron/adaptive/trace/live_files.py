"""The files of a run in progress, read as they grow: what is known already is never read again.

A rank's file may be of any size when it is looked at first: then only its header and its end are
read. Blocks of spans are passed over by what their marker says, and only whole ones are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.event import IterationStart, TraceHeader
from megatron.adaptive.trace.figures import RankFigures, rank_figures
from megatron.adaptive.trace.index import Block, FileIndex, read_blocks
from megatron.adaptive.trace.lines import parse_line

__all__ = ["RankIteration", "RankTail"]

TAIL_BYTES = 1 << 20
"""So much of a file's end is read at first, more where one iteration is longer."""


@dataclass(frozen=True, slots=True)
class RankIteration:
    """Figures of one iteration of one rank.

    Attributes:
        num_microbatches: microbatches of the iteration.
        start_ns: of the first action, on the rank's own clock.
        end_ns: of the last action.
        busy_ns: time within actions.
        wait_ns: by ``figures.WAIT_CAUSES``.
        compute_ns: what its actions take, each counted as the median of its kind and chunk.
        held_bytes: most activation bytes held.
        held_microbatches: most forwards without their backward.
    """

    num_microbatches: int
    start_ns: int
    end_ns: int
    busy_ns: int
    wait_ns: tuple[int, ...]
    compute_ns: float
    held_bytes: int
    held_microbatches: int


class RankTail:
    """The trace file of one rank.

    Args:
        path: the file.
        kept: iterations that are kept, the latest.

    Attributes:
        header: its last one, ``None`` before one was seen.
        iterations: the latest iterations, ascending.
        written_s: time of day of its last change.
        problem: why it is not read further, empty if it is.
    """

    def __init__(self, path: Path, kept: int) -> None:
        self.path = path
        self._kept = kept
        self._reset()

    def _reset(self) -> None:
        self.header: TraceHeader | None = None
        self.iterations: dict[int, RankIteration] = {}
        self.written_s = 0.0
        self.problem = ""
        self._identity: tuple[int, int] | None = None
        self._offset = self._size = 0

    def refresh(self) -> bool:
        """Read what is new; returns whether there was anything."""
        try:
            status = self.path.stat()
        except OSError:
            return False  # it is being moved aside
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or status.st_size < self._size:
            self._reset()
            self._identity = identity
        if status.st_size == self._size or self.problem:
            return False
        self._size, self.written_s = status.st_size, status.st_mtime
        try:
            with self.path.open("rb") as file:
                blocks = self._walk(file)
            self._take([block for block in blocks if not block.marker.is_late])
        except (OSError, TraceError) as error:
            self.problem = str(error)
        return True

    def _walk(self, file: BinaryIO) -> list[Block]:
        """Go on to the end of what is whole; returns the blocks on the way."""
        if self.header is None:
            line = file.readline()
            if not line.endswith(b"\n"):
                return []
            record = parse_line(line, f"{self.path}:1")
            if not isinstance(record, TraceHeader):
                raise TraceError(f"{self.path} does not begin with a header; it is no trace file")
            self.header, self._offset = record, file.tell()
            if self._size - self._offset > TAIL_BYTES:
                self._offset = self._near_end(file)
        blocks: list[Block] = []
        while True:
            file.seek(self._offset)
            line = file.readline()
            if not line.endswith(b"\n"):
                return blocks
            begin, self._offset = self._offset, file.tell()
            if not line.startswith(b"{"):
                continue  # the rest of a block whose writer was killed
            record = parse_line(line, self.path)
            if isinstance(record, TraceHeader):
                self.header = record
            elif isinstance(record, IterationStart):
                end = self._offset + record.size_bytes
                if end > self._size:
                    self._offset = begin
                    return blocks
                if self._is_end(file, end):
                    blocks.append(Block(record, 0, self._offset, record.size_bytes))
                    self._offset = end

    def _near_end(self, file: BinaryIO) -> int:
        """The offset of a marker in the file's last part."""
        wanted = TAIL_BYTES
        while wanted < self._size:
            file.seek(self._size - wanted)
            at = file.read(wanted).find(b'\n{"begin_iteration"')
            if at >= 0:
                return self._size - wanted + at + 1
            wanted *= 4
        return self._offset

    def _is_end(self, file: BinaryIO, end: int) -> bool:
        """Whether a line ends before ``end`` and no span follows."""
        file.seek(end - 1)
        around = file.read(2)
        return around[:1] == b"\n" and around[1:] in (b"", b"{")

    def _take(self, blocks: list[Block]) -> None:
        header = self.header
        if header is None or not blocks:
            return
        blocks = blocks[-self._kept :]
        table = read_blocks(FileIndex(self.path, [header]), blocks)
        if len(table):
            sizes = {block.marker.iteration: block.marker.num_microbatches for block in blocks}
            for iteration, found in _by_iteration(rank_figures(table, header.num_chunks), sizes):
                self.iterations.pop(iteration, None)
                self.iterations[iteration] = found
        for old in sorted(self.iterations)[: -self._kept]:
            del self.iterations[old]


def _by_iteration(figures: RankFigures, sizes: dict[int, int]) -> list[tuple[int, RankIteration]]:
    counts = figures.count
    compute_ns = (counts * np.nan_to_num(figures.median_ns)).sum(axis=(1, 2))
    return [
        (
            iteration,
            RankIteration(
                num_microbatches=sizes.get(iteration, 0),
                start_ns=int(figures.start_ns[row]),
                end_ns=int(figures.end_ns[row]),
                busy_ns=int(figures.busy_ns[row]),
                wait_ns=tuple(figures.wait_ns[row].tolist()),
                compute_ns=float(compute_ns[row]),
                held_bytes=int(figures.peak_in_flight_bytes[row]),
                held_microbatches=int(figures.peak_microbatches[row]),
            ),
        )
        for row, iteration in enumerate(figures.iterations.tolist())
        if figures.num_actions[row]
    ]
