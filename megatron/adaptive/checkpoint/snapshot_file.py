"""How copies of a rank's state lie in memory that outlives the rank.

::

    [ lengths ][ head: JSON ] | [ slot 0 ] | [ slot 1 ]          each begins on a page
                                    |
                     [ marks ][ extra ][ tensors to be sent ][ tensors with a replica elsewhere ]

The file has no name: it is gone with the last process that holds its descriptor, however that ends.
A rank writes its steps into the two slots by turns, and what it writes in a slot counts only once
both marks bear the same step: whatever moment it is killed at, the older step is whole. A node that
keeps copies for another one holds the same file without the last part.

Imports no torch: those who hold and send copies have none.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from typing import Any

__all__ = ["ALIGN", "SLOTS", "CopyFile", "slot_bytes"]

SLOTS = 2
ALIGN = 64
_PAGE = 4096
_LENGTHS = struct.Struct("<QQ")  # bytes of the head, bytes of a slot
_MARKS = struct.Struct("<QQQ")  # step begun, step done, bytes of extra
_MARKS_BYTES = ALIGN


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def slot_bytes(extra_bytes: int, tensor_bytes: int) -> int:
    """Size of a slot with so much in it."""
    return _rounded(_MARKS_BYTES + _rounded(extra_bytes, ALIGN) + tensor_bytes, _PAGE)


class CopyFile:
    """The copies of one rank, mapped.

    Args:
        descriptor: of the file; owned by this object from here on.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        head_bytes, self._slot_bytes = _LENGTHS.unpack_from(self.memory)
        self.raw_head = self.memory[_LENGTHS.size : _LENGTHS.size + head_bytes]
        self.head: dict[str, Any] = json.loads(self.raw_head)
        self._first = _rounded(_LENGTHS.size + head_bytes, _PAGE)

    @classmethod
    def create(cls, head: bytes, *, whole: bool) -> CopyFile:
        """Make a file with its memory.

        Args:
            head: JSON with at least ``extra_bytes``, the most that a step has besides tensors,
                ``sent_bytes`` and ``tensor_bytes``.
            whole: with all tensors, not only those that are sent.

        Raises:
            OSError: the memory cannot be had.
        """
        told = json.loads(head)
        size = slot_bytes(
            told["extra_bytes"], told["tensor_bytes"] if whole else told["sent_bytes"]
        )
        descriptor = os.memfd_create("megatron-adaptive-copies", os.MFD_CLOEXEC)
        try:
            first = _rounded(_LENGTHS.size + len(head), _PAGE)
            # Taken now: memory that is missing later kills who writes to it.
            os.posix_fallocate(descriptor, 0, first + SLOTS * size)
            os.pwrite(descriptor, _LENGTHS.pack(len(head), size) + head, 0)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def extra_offset(self, slot: int) -> int:
        """Where a slot's part besides tensors begins."""
        return self._first + slot * self._slot_bytes + _MARKS_BYTES

    def tensors_offset(self, slot: int) -> int:
        """Where a slot's tensors begin."""
        return self.extra_offset(slot) + _rounded(self.head["extra_bytes"], ALIGN)

    def begin(self, slot: int, step: int) -> None:
        """Say that a slot is about to be written; it holds nothing until :meth:`finish`."""
        self._mark(slot, step, 0, 0)

    def finish(self, slot: int, step: int, extra_bytes: int) -> None:
        """Say that a slot holds a step."""
        self._mark(slot, step, 0, extra_bytes)
        self._mark(slot, step, step, extra_bytes)

    def steps(self) -> dict[int, int]:
        """Steps that are held whole, with their slots."""
        found = {}
        for slot in range(SLOTS):
            begun, done, _ = self._marks(slot)
            if done and begun == done:
                found[done] = slot
        return found

    def extra(self, slot: int) -> memoryview:
        """What a slot holds besides tensors."""
        start = self.extra_offset(slot)
        return memoryview(self.memory)[start : start + self._marks(slot)[2]]

    def sent(self, slot: int) -> memoryview:
        """The tensors of a slot that are sent."""
        start = self.tensors_offset(slot)
        return memoryview(self.memory)[start : start + self.head["sent_bytes"]]

    def close(self) -> None:
        """Give it up; the memory is free once nobody else has it. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        with contextlib.suppress(BufferError):  # a view of it is in use, and keeps it
            self.memory.close()

    def _marks(self, slot: int) -> tuple[int, int, int]:
        begun, done, extra = _MARKS.unpack_from(self.memory, self.extra_offset(slot) - _MARKS_BYTES)
        return begun, done, extra

    def _mark(self, slot: int, begun: int, done: int, extra: int) -> None:
        at = self.extra_offset(slot) - _MARKS_BYTES
        _MARKS.pack_into(self.memory, at, begun, done, extra)
