"""Reads the header of a ``safetensors`` file, with the same checks as the ``safetensors`` package.

The file and its JSON header have the following layout::

    [ 8 bytes: length of the header | JSON | bytes of tensors ]
    {"__metadata__": {text: text}, NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}

Tensors follow each other without gaps, from the end of the header to the end of the file.
Therefore, a file is damaged if tensors overlap, or if a byte belongs to no tensor.

Source: the description of the format, and the behaviour of the package ``safetensors`` 0.8.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

from megatron.adaptive.errors import CheckpointError, DamagedCheckpointError

BITS: Mapping[str, int] = {
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "BF16": 16,
    "F16": 16,
    "I16": 16,
    "U16": 16,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
"""Number of bits per element, keyed by the code of the tensor's data type."""

_LONGEST = 100_000_000  # Maximum size of a header in bytes, which the format defines.
_RESTORE = "copy the file again"
_METADATA = "__metadata__"
_SIZE_LIMIT = 1 << 64
_MOST_DIGITS = 300  # A number with 300 digits still fits into a double.


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Type, shape and position of a tensor in a file.

    Attributes:
        dtype: Code of the data type, which is a key of :data:`BITS`.
        shape: Number of elements along each dimension.
        begin: Position of the tensor's first byte in the file.
        end: Position directly after the tensor's last byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Once(dict[str, Any]):
    """JSON object that records duplicate keys."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated = {key for key, _ in pairs} if len(self) < len(pairs) else set()
        if self.repeated:
            names = [key for key, _ in pairs]
            self.repeated = {key for key in self.repeated if names.count(key) > 1}


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Returns type, shape and position of each tensor, keyed by name, in the order of the header.

    Raises:
        CheckpointError: The file cannot be read.
        DamagedCheckpointError: The file is truncated, or its header is invalid.
    """
    try:
        # If the path is a named pipe, os.open() without O_NONBLOCK would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not S_ISREG(status.st_mode):
                raise CheckpointError(f"cannot read {path}: it is not a regular file")
            return _entries(file, status.st_size)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except RecursionError:
        reason = "the header is nested too deeply"
        raise DamagedCheckpointError(
            f"{path} is truncated or damaged ({reason}); {_RESTORE}"
        ) from None
    except ValueError as error:
        raise DamagedCheckpointError(
            f"{path} is truncated or damaged ({error}); {_RESTORE}"
        ) from None


def _entries(file: BinaryIO, size: int) -> dict[str, TensorEntry]:
    head = file.read(8)
    if len(head) < 8:
        raise ValueError(f"the file has {len(head)} bytes, but a header needs at least 8")
    (length,) = struct.unpack("<Q", head)
    if length > _LONGEST:
        raise ValueError(
            f"its header would have {length} bytes, but at most {_LONGEST} are allowed"
        )
    if length > size - 8:
        raise ValueError(f"the file has {size} bytes, too few for a header of {length} bytes")
    raw = file.read(length)
    if len(raw) < length:
        raise ValueError(f"the file ends after {8 + len(raw)} bytes")
    document = _parse(raw)
    metadata = document.pop(_METADATA, None)
    if _METADATA in document.repeated or not _is_metadata(metadata):
        raise ValueError(
            f"{_METADATA} must map names to strings and occur once, got {_short(metadata)}"
        )
    first = 8 + length
    entries = {name: _entry(name, value, first) for name, value in document.items()}
    _check_cover(entries, first, size)
    return entries


def _parse(raw: bytes) -> _Once:
    try:
        document = json.loads(
            raw.decode(),
            object_pairs_hook=_Once,
            parse_int=_whole_number,
            parse_float=_number,
            parse_constant=_refuse,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {8 + error.start} is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the header is not valid JSON: {error}") from None
    if not isinstance(document, _Once):
        raise ValueError(f"the header must be an object, got {_short(document)}")
    return document


def _whole_number(digits: str) -> int | float:
    if len(digits) > _MOST_DIGITS:
        _refuse(digits)
    return -0.0 if digits == "-0" else int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _refuse(digits: str) -> float:
    raise ValueError(f"{_short(digits)} is not allowed as a number in a header")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_metadata(metadata: Any) -> bool:
    if metadata is None:
        return True
    is_object = isinstance(metadata, dict)
    return is_object and all(_is_text(text) for pair in metadata.items() for text in pair)


def _is_text(value: Any) -> bool:
    """Returns whether ``value`` is a string that UTF-8 can encode."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _entry(name: str, value: Any, first: int) -> TensorEntry:
    """Parses the header's entry for a tensor.

    Args:
        name: Name of the tensor.
        value: Value of the entry; an object unless the file is damaged.
        first: Position of the first byte after the header in the file.

    Raises:
        ValueError: A field is missing, is duplicated or has the wrong type. The error is also
            raised if the number of bytes does not match type and shape.
    """
    if not _is_text(name) or not isinstance(value, _Once):
        raise ValueError(f"{_short(name)} must be an object, got {_short(value)}")
    fields = ("dtype", "shape", "data_offsets")
    if lacking := [key for key in fields if key not in value or key in value.repeated]:
        raise ValueError(f"{_short(name)} must have {lacking[0]} exactly once")
    dtype, shape, offsets = (value[key] for key in fields)
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(
            f"{_short(name)} has the type {_short(dtype)}, which the format does not support"
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{_short(name)} has an invalid shape {_short(shape)} or offsets {_short(offsets)}"
        )
    bits = BITS[dtype]
    count = 1
    for extent in (*shape, bits):
        count *= extent
        if count >= _SIZE_LIMIT:
            raise ValueError(f"{_short(name)} has the shape {_short(shape)}, which exceeds 64 bits")
    begin, end = offsets
    if 8 * (end - begin) != count:
        raise ValueError(
            f"{_short(name)} is stored from {begin} to {end}, but {dtype} {_short(shape)} takes"
            f" {count / 8:g} bytes"
        )
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=first + begin, end=first + end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < _SIZE_LIMIT for value in values
    )


def _check_cover(entries: Mapping[str, TensorEntry], first: int, size: int) -> None:
    """Checks that each byte after the header belongs to exactly one tensor.

    Args:
        entries: Type, shape and position of each tensor in the file, keyed by name.
        first: Position of the first byte after the header in the file.
        size: Size of the file in bytes.
    """
    end = first
    before = "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            fault = "overlaps" if entry.begin < end else "leaves a gap after"
            raise ValueError(f"{_short(name)} begins at byte {entry.begin} and {fault} {before}")
        end = entry.end
        before = _short(name)
    if end != size:
        fault = "no bytes may follow the tensors" if end < size else "the file is truncated"
        raise ValueError(f"the file has {size} bytes, but its tensors end at {end}: {fault}")
