"""Computes and compares checksums to detect damaged checkpoints and snapshots.

::

    file          | block 0: 1 MiB | block 1: 1 MiB | ... | last |     xxh3, 64 bits, for each block
    manifest.json { ..., "files": {name: size}, "blocks": {name: "<16 digits for each block>"},
                    "checksum": "<32 digits>" }           xxh3, 128 bits, of the text above it

Block checksums are computed while a file is written. When the file is read, each block is verified
against its checksum before any byte of the block is used. The manifest ends with a checksum of its
preceding text. The same checksums protect files in shared storage, files on the nodes' local disks,
uploads from local disks, and in-memory snapshots. They detect damage but not tampering, because
anyone who can write a file can also write its checksum.

This module does not import torch. It treats all files as bytes.
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
_PIECE_BYTES = 1 << 22  # Hashed pieces of this size are still in the CPU cache when written.
_SEAL = ',\n"checksum": "%s"\n}\n'
_SEAL_BYTES = len(_SEAL % ("0" * 32))
_SEALED = re.compile(rb',\n"checksum": "([0-9a-f]{32})"\n}\n')

FileSum = tuple[int, str]
"""Size of a file in bytes, and the concatenated checksums of its blocks."""


class Checksums:
    """Computes a checksum for each block of a byte stream.

    Attributes:
        size: Number of bytes added so far.
    """

    def __init__(self) -> None:
        self.size = 0
        self._done: list[str] = []
        self._block = xxhash.xxh3_64()

    def update(self, data: Any) -> None:
        """Appends the bytes-like object ``data`` to the stream."""
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
        """Returns the number of appended bytes, and the concatenated checksums of their blocks."""
        hashes = list(self._done)
        if self.size % BLOCK_BYTES:
            hashes.append(self._block.hexdigest())
        return self.size, "".join(hashes)


def sum_of(data: Any) -> FileSum:
    """Returns the size in bytes of ``data`` and the concatenated checksums of its blocks."""
    sums = Checksums()
    sums.update(data)
    return sums.result()


def sum_of_file(path: Path) -> FileSum:
    """Returns the size in bytes of the file ``path`` and the checksums of its blocks.

    Raises:
        OSError: If the file cannot be read.
    """
    sums = Checksums()
    with open_file(path) as file:
        while piece := file.read(BLOCK_BYTES):
            sums.update(piece)
    return sums.result()


def write_summed(file: Any, sums: Checksums, data: Any) -> int:
    """Writes ``data`` to the unbuffered file ``file``, and updates ``sums`` with the data.

    Returns:
        Number of bytes written.
    """
    # Release the views even if writing fails. Otherwise, the traceback of the error would keep a
    # view of memory that the caller is about to free.
    with memoryview(data) as buffer, buffer.cast("B") as view:
        for start in range(0, len(view), _PIECE_BYTES):
            with view[start : start + _PIECE_BYTES] as piece:
                sums.update(piece)
                written = 0
                while written < len(piece):
                    with piece[written:] as left:
                        written += file.write(left)
        return len(view)


class CheckedFile:
    """Reads a file, and verifies the checksum of each block before using the block.

    Args:
        paths: Paths of copies of the file. If a block is damaged in a copy, this block and all
            later blocks are read from the next copy.
        expected: Size of the file in bytes, and the checksums of its blocks. Checkpoints of earlier
            versions have no checksums, so only the size of their files is verified.
    """

    def __init__(self, paths: Sequence[Path], expected: FileSum) -> None:
        self._paths = list(paths)
        self.size, self._sums = expected
        self._buffer: memoryview | None = None
        self._number = self._file = -1

    @property
    def blocks(self) -> int:
        """Returns the number of blocks in the file."""
        return -(-self.size // BLOCK_BYTES)

    @staticmethod
    def blocks_of(offset: int, length: int) -> range:
        """Returns the indices of the blocks that contain the ``length`` bytes at ``offset``."""
        end = -(-(offset + length) // BLOCK_BYTES) if length else 0
        return range(offset // BLOCK_BYTES, end)

    def read(self, offset: int, into: memoryview) -> None:
        """Fills the buffer ``into`` with bytes of the file, starting at ``offset``.

        Raises:
            DamagedCheckpointError: If these bytes are damaged in every copy of the file.
        """
        if offset < 0 or offset + len(into) > self.size:
            raise DamagedCheckpointError(
                f"{self._paths[0]} is damaged (it has {self.size} bytes instead of at least "
                f"{offset + len(into)})"
            )
        while into:
            number, start = divmod(offset, BLOCK_BYTES)
            if not start and len(into) >= (size := self._size_of(number)):
                target = into[:size]  # Read a whole block directly into the buffer.
                self._checked(number, target)
            else:
                block = self.block(number)[start : start + len(into)]
                target = into[: len(block)]
                target[:] = block
            offset += len(target)
            into = into[len(target) :]

    def block(self, number: int) -> memoryview:
        """Returns a view of block ``number``, which is valid until the next block is read.

        Raises:
            DamagedCheckpointError: If the block is damaged in every copy of the file.
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
        """Closes the file. Safe to call more than once."""
        descriptor, self._file = self._file, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _size_of(self, number: int) -> int:
        return min(BLOCK_BYTES, self.size - number * BLOCK_BYTES)

    def _checked(self, number: int, view: memoryview) -> None:
        """Reads block ``number`` into ``view``, from the first copy whose block is undamaged."""
        while True:
            try:
                return self._fetch(number, view)
            except DamagedCheckpointError as error:
                if len(self._paths) == 1:
                    raise
                self.close()
                del self._paths[0]
                text = printable(f"{error}; reading {self._paths[0]} instead")
                _LOG.warning("WARNING: %s", text)

    def _fetch(self, number: int, view: memoryview) -> None:
        path = self._paths[0]
        start = number * BLOCK_BYTES
        try:
            if self._file < 0:
                require_file(path)
                self._file = os.open(path, os.O_RDONLY)
            done = 0
            while count := os.preadv(self._file, [view[done:]], start + done):
                done += count
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            text = f"{path} is damaged (cannot be read: {reason})"
            raise DamagedCheckpointError(text) from None
        if done < len(view):
            raise DamagedCheckpointError(
                f"{path} is damaged (it ends after {start + done} of {self.size} bytes)"
            )
        expected = self._sums[number * _DIGITS : (number + 1) * _DIGITS]
        if self._sums and xxhash.xxh3_64_hexdigest(view) != expected:
            raise _damaged(path, number, len(view))


def _damaged(path: Path, number: int, length: int) -> DamagedCheckpointError:
    start = number * BLOCK_BYTES
    return DamagedCheckpointError(
        f"{path} is damaged (block {number}, bytes {start} to {start + length - 1}, does not "
        "match its checksum)"
    )


def sealed(lines: Sequence[str]) -> str:
    """Returns the text of a manifest: the JSON entries ``lines``, followed by their checksum."""
    text = "{\n" + ",\n".join(lines)
    return text + _seal(text.encode())


def is_sealed(raw: bytes) -> bool:
    """Returns whether the manifest ``raw`` ends with the correct checksum of the preceding text."""
    return raw[-_SEAL_BYTES:] == _seal(raw[:-_SEAL_BYTES]).encode()


def seal_of(file: Path) -> str:
    """Returns the checksum at the end of the manifest ``file``, or ``""`` if it cannot be read."""
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
    """Reads all ``files`` completely, and reports each file that is missing or damaged.

    Args:
        folder: Folder of the files.
        files: Size in bytes of each file, keyed by name.
        blocks: Concatenated checksums of the blocks of each file, keyed by name. Only the sizes of
            files without checksums are compared. Earlier versions wrote no checksums.
        report: Function that is called with a line of text for each damaged file.
    """
    for name, size in files.items():
        path = folder / name
        sums = blocks.get(name, "")
        try:
            size_found = path.stat().st_size if path.is_file() else None
            if size_found is None:
                report(f"{path} is missing")
                continue
            if size_found != size:
                report(f"{path} is damaged (it has {size_found} bytes instead of {size})")
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
