"""Tells whether bytes are those that were written: one mechanism for all copies of a checkpoint.

::

    file          | block 0: 1 MiB | block 1: 1 MiB | ... | last |     xxh3, 64 bits, for each block
    manifest.json { ..., "files": {name: size}, "blocks": {name: "<16 digits for each block>"},
                    "checksum": "<32 digits>" }                        xxh3, 128 bits, of the rest

Blocks are summed as they are written and checked as they are read, before anything of them is
used. The manifest's own checksum ends it. Files in shared storage, on the nodes' own disks, on
their way from there, and snapshots in memory are checked by the same sums. They find damage, not
forgery: whoever can write a file can write its checksum.

Imports no torch, and nothing here knows what the bytes mean.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from megatron.adaptive.config.input_files import open_file, printable, require_file
from megatron.adaptive.errors import CheckpointError, DamagedCheckpointError

BLOCK_BYTES = 1 << 20
_LOG = logging.getLogger(__name__)
_DIGITS = 16
_PIECE_BYTES = 1 << 22  # stays in the processor's cache between the checksum and the write
_SEAL = ',\n"checksum": "%s"\n}\n'
_SEAL_BYTES = len(_SEAL % ("0" * 32))
_SEALED = re.compile(rb',\n"checksum": "([0-9a-f]{32})"\n}\n')

FileSum = tuple[int, str]
"""Size of a file in bytes, and the checksums of its blocks, one after the other."""


class Checksums:
    """Sums the blocks of a stream of bytes.

    Attributes:
        size: bytes so far.
    """

    def __init__(self) -> None:
        self.size = 0
        self._done: list[str] = []
        self._block = xxhash.xxh3_64()

    def update(self, data: Any) -> None:
        """Go on with bytes, or a buffer of them."""
        left = memoryview(data).cast("B")
        while left:
            room = BLOCK_BYTES - self.size % BLOCK_BYTES
            piece, left = left[:room], left[room:]
            self._block.update(piece)
            self.size += len(piece)
            if len(piece) == room:
                self._done.append(self._block.hexdigest())
                self._block.reset()

    def result(self) -> FileSum:
        """Return what was summed."""
        is_open = self.size % BLOCK_BYTES
        return self.size, "".join([*self._done, *([self._block.hexdigest()] if is_open else [])])


def sum_of(data: Any) -> FileSum:
    """Return the checksums of bytes in memory."""
    sums = Checksums()
    sums.update(data)
    return sums.result()


def sum_of_file(path: Path) -> FileSum:
    """Return the checksums of a file.

    Raises:
        OSError: it cannot be read.
    """
    sums = Checksums()
    with open_file(path) as file:
        while piece := file.read(BLOCK_BYTES):
            sums.update(piece)
    return sums.result()


def write_summed(file: Any, sums: Checksums, data: Any) -> int:
    """Write all of a buffer to an unbuffered file, and sum it; returns its size in bytes."""
    # Release the views even if writing fails: Python 3.12.1 crashes when it collects a BytesIO
    # while the traceback of an error still holds a view of it.
    with memoryview(data) as given, given.cast("B") as view:
        for start in range(0, len(view), _PIECE_BYTES):
            with view[start : start + _PIECE_BYTES] as piece:
                sums.update(piece)
                written = 0
                while written < len(piece):
                    with piece[written:] as left:
                        written += file.write(left)
        return len(view)


class CheckedFile:
    """Reads a file, each block checked before anything of it is given.

    Args:
        paths: where it is; another is tried where a block of one is damaged.
        expected: its size, and the checksums of its blocks; none for a file of a former version,
            whose size alone is known.
    """

    def __init__(self, paths: Sequence[Path], expected: FileSum) -> None:
        self._paths = list(paths)
        self.size, self._sums = expected
        self._buffer: memoryview | None = None
        self._number = self._file = -1

    @property
    def blocks(self) -> int:
        """Number of its blocks."""
        return -(-self.size // BLOCK_BYTES)

    @staticmethod
    def blocks_of(at: int, length: int) -> range:
        """Return the numbers of the blocks that bytes from an offset on lie in."""
        return range(at // BLOCK_BYTES, -(-(at + length) // BLOCK_BYTES) if length else 0)

    def read(self, at: int, into: memoryview) -> None:
        """Fill a buffer with the bytes from an offset on.

        Raises:
            DamagedCheckpointError: they are not those that were written.
        """
        if at < 0 or at + len(into) > self.size:
            raise DamagedCheckpointError(
                f"{self._paths[0]} is damaged (it has {self.size} bytes, and those up to"
                f" {at + len(into)} are to be read)"
            )
        while into:
            number, start = divmod(at, BLOCK_BYTES)
            if not start and len(into) >= (size := self._size_of(number)):
                place = into[:size]  # all of it is wanted here: no copy
                self._checked(number, place)
            else:
                block = self.block(number)[start : start + len(into)]
                place = into[: len(block)]
                place[:] = block
            at, into = at + len(place), into[len(place) :]

    def block(self, number: int) -> memoryview:
        """Return a block, good until the next one is read.

        Raises:
            DamagedCheckpointError: it is not what was written.
        """
        if self._buffer is None:
            self._buffer = memoryview(bytearray(min(BLOCK_BYTES, self.size)))
        view = self._buffer[: self._size_of(number)]
        if number != self._number:
            self._number = -1
            self._checked(number, view)
            self._number = number
        return view

    def close(self) -> None:
        """Close it. Idempotent."""
        descriptor, self._file = self._file, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _size_of(self, number: int) -> int:
        return min(BLOCK_BYTES, self.size - number * BLOCK_BYTES)

    def _checked(self, number: int, view: memoryview) -> None:
        """Fill memory with a block that is what was written, from the first file that has it so."""
        while True:
            try:
                return self._fetch(number, view)
            except DamagedCheckpointError as error:
                if len(self._paths) == 1:
                    raise
                self.close()
                del self._paths[0]
                text = printable(f"{error}; going on with {self._paths[0]}")
                _LOG.warning("WARNING: %s", text)

    def _fetch(self, number: int, view: memoryview) -> None:
        path, start = self._paths[0], number * BLOCK_BYTES
        try:
            if self._file < 0:
                require_file(path)
                self._file = os.open(path, os.O_RDONLY)
            done = 0
            while count := os.preadv(self._file, [view[done:]], start + done):
                done += count
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise DamagedCheckpointError(f"{path} is damaged (it cannot be read: {why})") from None
        if done < len(view):
            raise DamagedCheckpointError(
                f"{path} is damaged (it ends after {start + done} of its {self.size} bytes)"
            )
        expected = self._sums[number * _DIGITS : (number + 1) * _DIGITS]
        if self._sums and xxhash.xxh3_64_hexdigest(view) != expected:
            raise _damaged(path, number, len(view))


def _damaged(path: Path, number: int, length: int) -> DamagedCheckpointError:
    start = number * BLOCK_BYTES
    return DamagedCheckpointError(
        f"{path} is damaged (block {number}, bytes {start} to {start + length - 1}, is not what was"
        " written)"
    )


def sealed(lines: Sequence[str]) -> str:
    """Return a manifest of these members that ends with a checksum of itself."""
    text = "{\n" + ",\n".join(lines)
    return text + _seal(text.encode())


def is_sealed(raw: bytes) -> bool:
    """Return whether a manifest ends with the checksum of what it says."""
    return raw[-_SEAL_BYTES:] == _seal(raw[:-_SEAL_BYTES]).encode()


def seal_of(file: Path) -> str:
    """Returns the checksum that ends a manifest, empty if it cannot be read or has none."""
    try:
        with open_file(file) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _SEAL_BYTES))
            end = stream.read(_SEAL_BYTES)
    except OSError:
        return ""
    match = _SEALED.fullmatch(end)
    return "" if match is None else match[1].decode()


def _seal(text: bytes) -> str:
    return _SEAL % xxhash.xxh3_128_hexdigest(text)


def find_damage(
    folder: Path, files: Mapping[str, int], blocks: Mapping[str, str], report: Callable[[str], None]
) -> None:
    """Read all of some files and report each that is not as it was written.

    Args:
        folder: of the files.
        files: their sizes in bytes.
        blocks: the checksums of their blocks; none for those of a former version.
        report: takes a line for each file that is damaged.
    """
    for name, size in files.items():
        path, sums = folder / name, blocks.get(name, "")
        try:
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                why = f"is damaged (it has {found} bytes and was written with {size})"
                report(f"{path} {'is missing' if found is None else why}")
                continue
            if not sums:
                continue
            file = CheckedFile([path], (size, sums))
            try:
                for number in range(file.blocks):
                    file.block(number)
            finally:
                file.close()
        except (CheckpointError, OSError) as error:
            report(str(error))
