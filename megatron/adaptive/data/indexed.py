r"""Checks ``.bin/.idx`` token files before training uses them.

megatron-core maps both files into memory without checking them. As a result, an index in a
different format fails an assertion, a truncated index is read past its end, and an id outside of
the vocabulary crashes the embedding in a later step. The checks in this module run before training,
and their error messages state the file and its fault. The module imports neither torch nor
megatron-core. The index has this layout::

    bytes  0..8    magic  MMIDIDX\\0\\0
           9..16   version, u64            always 1
          17       dtype code, u8
          18..25   sequences S, u64
          26..33   bounds D, u64           number of documents + 1
          34..     lengths   S x i32       tokens of each sequence
                   pointers  S x i64       byte offset of each sequence in .bin
                   bounds    D x i64       index of each document's first sequence, then S
                   modes     S x i8        only in multimodal data
"""

from __future__ import annotations

import glob
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from megatron.adaptive.config.input_files import open_file
from megatron.adaptive.errors import DataError

INDEX_CACHE = "index_cache"
"""Name of the default folder for shuffling indices, next to the data."""

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_AGAIN = "create it again with tools/preprocess_data.py"

_SCAN_WHOLE_BYTES = 256 << 20
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class IndexedInfo:
    """Properties of a token file, read from its index.

    Attributes:
        prefix: Path of the ``.bin`` and ``.idx`` files without suffix.
        dtype: Integer type in which the ``.bin`` file stores token ids.
        num_sequences: Number of sequences. megatron-core assigns whole sequences to training,
            validation and test data.
        num_tokens: Total number of tokens in all sequences.
    """

    prefix: str
    dtype: np.dtype[Any]
    num_sequences: int
    num_tokens: int


def check_indexed(prefix: str | Path) -> IndexedInfo:
    """Checks that ``<prefix>.idx`` and ``<prefix>.bin`` are complete and match.

    Args:
        prefix: Path of both files without suffix, as passed to ``--data-path``.

    Returns:
        Integer type, number of tokens and number of sequences.

    Raises:
        DataError: If a file is missing or truncated or has a different format or version, or if the
            two files do not match. The message states the file and the fault.
    """
    idx_path = Path(f"{prefix}.idx")
    bin_path = Path(f"{prefix}.bin")
    for path in (idx_path, bin_path):
        if not path.is_file():
            raise DataError(f"{path}: no such file; {_hint_for_missing(str(prefix))}")
    try:
        return _checked(str(prefix), idx_path, bin_path)
    except OSError as error:
        raise DataError(
            f"cannot read {idx_path} ({error.strerror}); make it readable for this user"
        ) from None


def sequence_lengths(prefix: str | Path) -> npt.NDArray[np.int32]:
    """Returns the number of tokens of each sequence of a token file.

    Args:
        prefix: Path without suffix of a file that :func:`check_indexed` has checked.
    """
    with open_file(Path(f"{prefix}.idx")) as stream:
        _, _, _, sequences, _ = _HEADER.unpack(stream.read(_HEADER.size))
        return np.frombuffer(stream.read(4 * sequences), "<i4")


def _checked(prefix: str, idx_path: Path, bin_path: Path) -> IndexedInfo:
    """Checks that the files ``idx_path`` and ``bin_path`` match, and returns their properties.

    ``prefix`` is the path of both files without suffix.
    """
    with open_file(idx_path) as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        _refuse(
            idx_path,
            f"is not a token index (starts with {header[:9]!r} instead of {_MAGIC!r}, or is "
            "truncated within the header)",
        )
    _, version, code, sequences, marks = _HEADER.unpack(header)
    if version != _VERSION:
        _refuse(
            idx_path,
            f"is a token index of version {version}, but only version {_VERSION} is supported",
        )
    if code not in _DTYPES:
        _refuse(idx_path, f"has dtype code {code}, but only integer types are supported")
    dtype = np.dtype(_DTYPES[code])
    size = idx_path.stat().st_size
    expected = _HEADER.size + 12 * sequences + 8 * marks
    # The index of multimodal data has one more byte per sequence (the mode). Accept such an index,
    # because text can be read without the modes.
    if size not in (expected, expected + sequences):
        fault = "is truncated" if size < expected else "has too many bytes"
        _refuse(
            idx_path,
            f"{fault} ({size} bytes, but {sequences} sequences and {marks - 1} documents "
            f"require {expected} bytes)",
        )
    if not sequences or marks < 2:
        _refuse(idx_path, "contains no document")
    index: npt.NDArray[np.uint8] = np.memmap(idx_path, dtype=np.uint8, mode="r")
    lengths = np.frombuffer(index, "<i4", sequences, _HEADER.size)
    pointers = np.frombuffer(index, "<i8", sequences, _HEADER.size + 4 * sequences)
    ends = np.frombuffer(index, "<i8", marks, _HEADER.size + 12 * sequences)
    if int(lengths.min()) < 0:
        _refuse(idx_path, f"sequence {int(lengths.argmin())} has length {int(lengths.min())}")
    num_tokens = int(lengths.sum(dtype=np.int64))
    bin_size = bin_path.stat().st_size
    if num_tokens * dtype.itemsize != bin_size:
        _refuse(
            bin_path,
            f"has {bin_size} bytes, but its index lists {num_tokens} tokens of {dtype.itemsize} "
            "bytes; the files are damaged, or do not belong together",
        )
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    if not np.array_equal(pointers, starts * dtype.itemsize):
        _refuse(idx_path, "has sequence offsets that do not match the sequence lengths")
    if int(ends[0]) != 0 or int(ends[-1]) != sequences or bool(np.any(np.diff(ends) < 0)):
        _refuse(idx_path, f"has document boundaries that do not increase from 0 to {sequences}")
    if sequences == marks - 1 and bool(np.any(np.diff(ends) != 1)):
        number = int(np.argmax(np.diff(ends) != 1))
        _refuse(
            idx_path,
            f"has as many sequences as documents ({sequences}), but document {number} has "
            f"{int(ends[number + 1] - ends[number])} sequences",
        )
    return IndexedInfo(prefix=prefix, dtype=dtype, num_sequences=sequences, num_tokens=num_tokens)


def _refuse(path: Path, fault: str) -> NoReturn:
    raise DataError(f"{path}: {fault}; {_AGAIN}")


def check_vocabulary_fits(info: IndexedInfo, vocab_size: int) -> None:
    """Checks that a token file contains no id outside ``0..vocab_size-1``.

    A file of up to 256 MB is read completely. In a larger file, only 256 MB are read, in evenly
    spaced parts of 4 MB. This may miss a few wrong ids, but it detects data that was tokenized with
    a different vocabulary.

    Args:
        info: Result of :func:`check_indexed` for the file.
        vocab_size: Number of token ids of the tokenizer, without padding.

    Raises:
        DataError: If a token id is out of range. The message states the vocabulary size that the
            data needs.
    """
    path = f"{info.prefix}.bin"
    try:
        tokens: npt.NDArray[Any] = np.memmap(path, dtype=info.dtype, mode="r")
    except OSError as error:
        raise DataError(
            f"cannot read {path} ({error.strerror}); make it readable for this user"
        ) from None
    lowest = highest = 0
    for start, stop in pieces(tokens.size, info.dtype.itemsize):
        piece = tokens[start:stop]
        lowest = min(lowest, int(piece.min()))
        highest = max(highest, int(piece.max()))
    if lowest < 0:
        raise DataError(f"{path} contains the negative id {lowest}; {_AGAIN}")
    if highest >= vocab_size:
        raise DataError(
            f"{path} contains id {highest}, but the vocabulary has only {vocab_size} ids; use "
            f"the --vocab-file and --merge-file with which the data was tokenized ({highest + 1} "
            "ids or more)"
        )


def _hint_for_missing(prefix: str) -> str:
    path = Path(prefix.removesuffix(".idx").removesuffix(".bin"))
    similar = path.parent.glob(f"{glob.escape(path.name)}*.idx")
    candidates = sorted(similar) or sorted(path.glob("*.idx"))
    if Path(f"{prefix}.idx") in candidates:
        return f"{prefix}.idx requires it; copy it to the same folder, or {_AGAIN}"
    if candidates:
        return f"did you mean {str(candidates[0]).removesuffix('.idx')}?"
    return f"{_AGAIN}, or correct --data-path"


def pieces(
    count: int, itemsize: int, whole_bytes: int = _SCAN_WHOLE_BYTES
) -> Iterator[tuple[int, int]]:
    """Yields parts of an array, each as a half-open range of indices (start, stop).

    The size of each part is 4 MB. The parts cover a small array completely. In a large array, the
    parts are evenly spaced from the first element to the last.

    Args:
        count: Number of elements of the array.
        itemsize: Size of an element in bytes.
        whole_bytes: Maximum size in bytes of an array that is covered completely. For a larger
            array, this is the total size of the parts.
    """
    piece = _PIECE_BYTES // itemsize
    if count * itemsize <= whole_bytes:
        starts = np.arange(0, count, piece)
    else:
        starts = np.linspace(0, count - piece, whole_bytes // _PIECE_BYTES, dtype=int)
    for start in starts.tolist():
        yield start, min(start + piece, count)
