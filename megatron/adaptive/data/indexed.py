"""Checks of ``.bin/.idx`` token files before anything is built on them.

megatron-core maps both files and trusts them: a foreign index fails an assertion, a truncated one
reads past its end, and an id outside the vocabulary crashes in the embedding of some later step.
These checks say at start-up which file is wrong and what was found. Needs neither torch nor
megatron-core. The index is laid out as::

    bytes  0..8    magic  MMIDIDX\\0\\0
           9..16   version, u64            1
          17       dtype code, u8
          18..25   sequences S, u64
          26..33   document marks D, u64   documents + 1
          34..     lengths   S x i32       tokens
                   pointers  S x i64       bytes into .bin
                   marks     D x i64       index of each document's first sequence, then S
                   modes     S x i8        multimodal data only
"""

from __future__ import annotations

import fcntl
import glob
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from megatron.adaptive.config.input_files import open_file
from megatron.adaptive.errors import DataError

INDEX_CACHE = "index_cache"
"""Folder beside the data where shuffling indices go unless ``--data-cache-path`` names another."""

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_AGAIN = "make it again with tools/preprocess_data.py"

_SCAN_WHOLE_BYTES = 256 << 20
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class IndexedInfo:
    """Sizes of a token file, as its index states them.

    Attributes:
        prefix: path of both files without suffix.
        dtype: numpy type of a token in the ``.bin`` file.
        num_sequences: sequences; megatron-core splits a corpus by these.
        num_tokens: tokens in all.
    """

    prefix: str
    dtype: np.dtype[Any]
    num_sequences: int
    num_tokens: int


def check_indexed(prefix: str | Path) -> IndexedInfo:
    """Check that ``<prefix>.idx`` and ``<prefix>.bin`` are whole and belong together.

    Args:
        prefix: path of both files without suffix, as ``--data-path`` takes it.

    Returns:
        What the index says.

    Raises:
        DataError: a file is missing, foreign, of another version, truncated, or the two disagree;
            names the file and what was found.
    """
    idx_path, bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (idx_path, bin_path):
        if not path.is_file():
            raise DataError(f"{path}: no such file; {_hint_for_missing(str(prefix))}")
    try:
        return _checked(str(prefix), idx_path, bin_path)
    except OSError as error:
        raise DataError(
            f"{idx_path}: cannot be read ({error.strerror}); let this user read it"
        ) from None


def _checked(prefix: str, idx_path: Path, bin_path: Path) -> IndexedInfo:
    """Checks header, lengths, pointers and marks against each other and the data."""
    with open_file(idx_path) as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        _refuse(
            idx_path,
            f"is no token index (starts with {header[:9]!r} instead of {_MAGIC!r}, or ends within "
            "the header)",
        )
    _, version, code, sequences, marks = _HEADER.unpack(header)
    if version != _VERSION:
        _refuse(idx_path, f"is a token index of version {version}, but only {_VERSION} can be read")
    if code not in _DTYPES:
        _refuse(idx_path, f"has dtype code {code}, known are those of integers")
    dtype = np.dtype(_DTYPES[code])
    size, expected = idx_path.stat().st_size, _HEADER.size + 12 * sequences + 8 * marks
    # Multimodal indices carry one more byte a sequence, which a reader of text ignores.
    if size not in (expected, expected + sequences):
        what = "is truncated" if size < expected else "has bytes too many"
        _refuse(
            idx_path,
            f"{what} ({size} bytes, but {sequences} sequences and {marks - 1} documents take "
            f"{expected})",
        )
    if not sequences or marks < 2:
        _refuse(idx_path, "holds no document")
    index: npt.NDArray[np.uint8] = np.memmap(idx_path, dtype=np.uint8, mode="r")
    lengths = np.frombuffer(index, "<i4", sequences, _HEADER.size)
    pointers = np.frombuffer(index, "<i8", sequences, _HEADER.size + 4 * sequences)
    ends = np.frombuffer(index, "<i8", marks, _HEADER.size + 12 * sequences)
    if int(lengths.min()) < 0:
        _refuse(idx_path, f"sequence {int(lengths.argmin())} has length {int(lengths.min())}")
    num_tokens, bin_size = int(lengths.sum(dtype=np.int64)), bin_path.stat().st_size
    if num_tokens * dtype.itemsize != bin_size:
        _refuse(
            bin_path,
            f"has {bin_size} bytes, but its index counts {num_tokens} tokens of {dtype.itemsize} "
            "bytes; the pair is damaged or mixed up",
        )
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    if not np.array_equal(pointers, starts * dtype.itemsize):
        _refuse(idx_path, "offsets do not follow from the lengths")
    if int(ends[0]) != 0 or int(ends[-1]) != sequences or bool(np.any(np.diff(ends) < 0)):
        _refuse(idx_path, f"document marks do not rise from 0 to {sequences}")
    if sequences == marks - 1 and bool(np.any(np.diff(ends) != 1)):
        number = int(np.argmax(np.diff(ends) != 1))
        _refuse(
            idx_path,
            f"has as many sequences as documents ({sequences}), but document {number} has"
            f" {int(ends[number + 1] - ends[number])} of them",
        )
    return IndexedInfo(prefix=prefix, dtype=dtype, num_sequences=sequences, num_tokens=num_tokens)


def _refuse(path: Path, why: str) -> NoReturn:
    raise DataError(f"{path}: {why}; {_AGAIN}")


def check_vocabulary_fits(info: IndexedInfo, vocab_size: int) -> None:
    """Check that the data holds no id outside ``0..vocab_size-1``.

    Reads all of a ``.bin`` file up to 256 MB. Of a larger one it reads 256 MB in pieces of 4 MB
    spread evenly from the first token to the last, so that a few stray ids may go unseen, but not
    data of another vocabulary.

    Args:
        info: of the files, from :func:`check_indexed`.
        vocab_size: ids the tokenizer knows, without padding.

    Raises:
        DataError: an id is outside; says how large a vocabulary the data needs.
    """
    path = f"{info.prefix}.bin"
    try:
        tokens: npt.NDArray[Any] = np.memmap(path, dtype=info.dtype, mode="r")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); let this user read it"
        ) from None
    lowest = highest = 0
    for start, stop in pieces(tokens.size, info.dtype.itemsize):
        piece = tokens[start:stop]
        lowest = min(lowest, int(piece.min()))
        highest = max(highest, int(piece.max()))
    if lowest < 0:
        raise DataError(f"{path}: holds the negative id {lowest}; {_AGAIN}")
    if highest >= vocab_size:
        raise DataError(
            f"{path}: holds id {highest}, but the vocabulary has only {vocab_size} ids; give the "
            f"--vocab-file and --merge-file it was tokenized with ({highest + 1} ids or more)"
        )


def _hint_for_missing(prefix: str) -> str:
    path = Path(prefix.removesuffix(".idx").removesuffix(".bin"))
    found = sorted(path.parent.glob(f"{glob.escape(path.name)}*.idx")) or sorted(path.glob("*.idx"))
    if Path(f"{prefix}.idx") in found:
        return f"it belongs to {prefix}.idx; copy it there, too, or {_AGAIN}"
    if found:
        return f"did you mean {str(found[0]).removesuffix('.idx')}?"
    return f"{_AGAIN}, or correct --data-path"


def pieces(
    count: int, itemsize: int, whole_bytes: int = _SCAN_WHOLE_BYTES
) -> Iterator[tuple[int, int]]:
    """Yields begin and end of 4 MB pieces of an array.

    The pieces cover a small array completely. In a larger one they are spread evenly from the first
    element to the last.

    Args:
        count: Elements of the array.
        itemsize: Bytes of an element.
        whole_bytes: Largest size in bytes of an array that is covered completely.
    """
    piece = _PIECE_BYTES // itemsize
    if count * itemsize <= whole_bytes:
        starts = np.arange(0, count, piece)
    else:
        starts = np.linspace(0, count - piece, whole_bytes // _PIECE_BYTES, dtype=int)
    for start in starts.tolist():
        yield start, min(start + piece, count)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file; the kernel frees it when a process dies."""
    # If the name is a pipe, opening it for reading too keeps this from waiting for a reader.
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "rb") as stream:
        with suppress(OSError):  # a file system without locks: two may do the same work
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
