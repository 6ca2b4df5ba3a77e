"""Caches arrays that are slow to build, and rebuilds them if a cached file is damaged.

Each array is stored as a file in numpy's format, which other programs can read, followed by a
checksum::

    NAME.npy   | header | data | MAIDXSUM | 16 bytes: xxh3 of NAME.npy, header and data |

A file gets its final name only after its bytes are on the disk. Before an array is used, the whole
file is read and its checksum is verified. A correct checksum proves only that the bytes have not
changed, not that the array was built from the current data. Therefore, the caller also provides a
function that checks the arrays against each other and against the data.

This module imports neither torch nor megatron-core.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.adaptive.config.input_files import printable
from megatron.adaptive.data.file_lock import locked
from megatron.adaptive.errors import DataError

Arrays = list[npt.NDArray[Any]]
Check = Callable[[Arrays], str]
"""Function that describes what is wrong with the arrays. Its result is empty if they are valid."""

_LOG = logging.getLogger(__name__)
_MARK = b"MAIDXSUM"
_TAIL_BYTES = len(_MARK) + 16
# Size of a piece, small enough that the piece is still in the CPU cache when it is hashed.
_PIECE_BYTES = 1 << 22


class _DamageError(Exception):
    """Raised if a cached file differs from what was written. The message states the difference."""


def cached_arrays(
    cache: str,
    names: Sequence[str],
    make: Callable[[], Sequence[npt.NDArray[Any]]],
    check: Check = lambda arrays: "",
) -> Arrays:
    """Returns the arrays ``names`` from the folder ``cache``, and builds them if necessary.

    If any file is missing or damaged, all arrays are built and cached again.

    If several processes need the arrays at the same time, one process builds them under a file
    lock, and the other processes wait.

    Args:
        cache: Path of the folder that contains the cached files.
        names: File name of each array, without the suffix ``.npy``.
        make: Function that builds and returns the arrays, in the order of ``names``.
        check: Function that checks the arrays against each other and against the data they index.

    Raises:
        DataError: If the folder cannot be written, or if ``make`` raises this error.
    """
    folder = Path(cache)
    paths = [folder / f"{name}.npy" for name in names]
    try:
        arrays = _read(paths, check)
        if arrays is None:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / ".lock"):
                arrays = _read(paths, check, logs=True)
                if arrays is None:
                    _write(paths, make())
                    arrays = [_map(path) for path in paths]
    except (OSError, _DamageError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{folder}: cannot store shuffling indices ({reason}); choose a writable folder with "
            "--data-cache-path"
        ) from None
    return arrays


def _read(paths: Sequence[Path], check: Check, *, logs: bool = False) -> Arrays | None:
    """Returns all arrays, or ``None`` if a file is missing or damaged.

    Args:
        paths: Path of the ``.npy`` file of each array.
        check: Function that checks the arrays against each other.
        logs: Whether to log a warning if a file is damaged.
    """
    arrays = []
    try:
        for path in paths:
            arrays.append(_map(path))
        if broken := check(arrays):
            others = f" and {len(paths) - 1} more files" * (len(paths) > 1)
            raise _DamageError(f"{paths[0]}{others}: {broken}")
    except FileNotFoundError:
        return None
    except _DamageError as error:
        if logs:
            message = printable(str(error))
            _LOG.warning("WARNING: %s: rebuilding these indices", message)
        return None
    return arrays


def _map(path: Path) -> npt.NDArray[Any]:
    """Verifies the checksum of the file ``path`` and maps its array into memory.

    Raises:
        FileNotFoundError: If the file does not exist.
        _DamageError: If the file differs from what was written.
    """
    try:
        # If the path is a named pipe, open() without O_NONBLOCK would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _DamageError(f"cannot read {path} ({error.strerror})") from None
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not S_ISREG(status.st_mode):
            raise _DamageError(f"{path} is not a regular file")
        try:
            _check_sum(stream, path.name, status.st_size)
            stream.seek(0)
            if np.lib.format.read_magic(stream) != (1, 0):
                raise ValueError("unsupported version of numpy's format")
            shape, is_turned, dtype = np.lib.format.read_array_header_1_0(stream)
            order: Any = "F" if is_turned else "C"
            offset = stream.seek(0, os.SEEK_CUR)
            return np.memmap(stream, dtype, "r", offset=offset, shape=shape, order=order)
        except OSError as error:
            raise _DamageError(f"cannot read {path} ({error.strerror})") from None
        except ValueError as error:
            raise _DamageError(f"{path} is damaged ({error})") from None


def _check_sum(stream: Any, name: str, size: int) -> None:
    left = size - _TAIL_BYTES
    if left <= 0:
        raise ValueError(f"the file has only {size} bytes")
    checksum = xxhash.xxh3_128(name.encode())
    piece = memoryview(bytearray(min(_PIECE_BYTES, left)))
    while left:
        count = stream.readinto(piece[:left])
        if not count:
            raise ValueError(f"the file is truncated: at least {left} bytes are missing")
        checksum.update(piece[:count])
        left -= count
    if stream.read() != _MARK + checksum.digest():
        raise ValueError("the checksum does not match")


def _write(paths: Sequence[Path], arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Writes each array to its file in ``paths``, first under a temporary name.

    A file gets its final name only after its bytes are on the disk.
    """
    for path, array in zip(paths, arrays, strict=True):
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("wb") as stream:
                _write_array(stream, path.name, array)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    descriptor = os.open(paths[0].parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_array(stream: Any, name: str, array: npt.NDArray[Any]) -> None:
    array = np.ascontiguousarray(array)
    header = io.BytesIO()
    described = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(header, described)
    checksum = xxhash.xxh3_128(name.encode())
    data: Any = array.reshape(-1).view(np.uint8)
    for part in (memoryview(header.getvalue()), memoryview(data)):
        for start in range(0, len(part), _PIECE_BYTES):
            piece = part[start : start + _PIECE_BYTES]
            checksum.update(piece)
            stream.write(piece)
    stream.write(_MARK + checksum.digest())
