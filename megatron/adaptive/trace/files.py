"""Writes results atomically, and writes optional files as long as the disk accepts data.

Some files of a run are optional, such as traces, curves, progress files and logs. If such a file
cannot be written, for example because the disk is full, a warning is printed, the data is dropped
and the run continues.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from megatron.adaptive.config.input_files import say
from megatron.adaptive.errors import TraceError

PASSING = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG, errno.ENODEV)
)
"""Error numbers (``errno``) of disk problems that may be temporary, such as a full disk."""


_ROOM_BYTES = 1 << 16


def _has_room(file: int) -> bool:
    """Returns whether the disk of the file descriptor ``file`` has enough space to resume writing.

    At least 64 KiB must be free. With a smaller limit, writing would resume after another program
    freed a few bytes, and the disk would soon be full again.
    """
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return True
    disk = os.fstatvfs(file)
    return disk.f_blocks == 0 or disk.f_bavail * disk.f_frsize >= _ROOM_BYTES


class Outage:
    """Prints a warning when writing to a file begins to fail, and a note when it succeeds again.

    The note states how much data was lost in between.

    Args:
        name: Name of the file or stream, such as its path.
        unit: Unit in which lost data is counted, as a plural, such as ``iterations``.

    Attributes:
        is_on: Whether writing currently fails.
        lost: Number of units lost since the last successful write.
    """

    def __init__(self, name: str | os.PathLike[str], unit: str) -> None:
        self._name = os.fspath(name)
        self._unit = unit
        self.is_on = False
        self.lost = 0

    def begins(self, error: Exception | str, count: int = 1) -> None:
        """Adds ``count`` to the lost units, and prints a warning if this is a new outage."""
        self.lost += count
        if not self.is_on:
            self.is_on = True
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._say(
                f"warning: cannot write {self._name}: {reason}; the run continues and drops the "
                "data"
            )

    def ends(self) -> None:
        """Ends the current outage, if there is one, and prints how much data was lost."""
        if self.is_on:
            self.is_on = False
            self._say(
                f"note: {self._name} can be written again; {self.lost} {self._unit} were lost"
            )
        self.lost = 0

    @staticmethod
    def _say(line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            say(line)


class BestEffortFile:
    """Appends to an optional file, and drops data that cannot be written.

    If the file or its folder was deleted, the file is created again. Data is written completely or
    not at all: if a write fails halfway, the file is truncated to its previous size. Only one
    process may write to the file, but several of its threads may.

    Args:
        path: Path of the file. Missing folders are created.
        unit: Unit in which lost data is counted, as a plural, such as ``iterations``.
        head: Function that returns the bytes to write at the beginning each time the file is
            opened.

    Raises:
        OSError: The file cannot be opened for a reason other than a full or failing disk.
    """

    def __init__(self, path: Path, unit: str, head: Callable[[], bytes] = lambda: b"") -> None:
        self._path = path
        self._head = head
        self._outage = Outage(path, unit)
        self._lock = threading.Lock()
        self._file: int | None = None
        self._end = 0
        self._has_head = self._is_torn = False
        try:
            self._open()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            self._outage.begins(error, 0)

    @property
    def lost(self) -> int:
        """Number of units lost since the last successful write."""
        return self._outage.lost

    def append(self, data: bytes, count: int = 1) -> bool:
        """Appends all of ``data``, or nothing if the disk does not accept all of ``data``.

        Args:
            data: Bytes to append.
            count: Number of units in ``data``. They are counted as lost if the write fails.

        Returns:
            Whether the data was written.
        """
        with self._lock:
            try:
                if self._file is None or os.fstat(self._file).st_nlink == 0:
                    self.close()
                    self._open()
                if not self._has_head:
                    data = self._head() + data
                file = self._file
                assert file is not None
                if self._outage.is_on and not _has_room(file):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._write(file, data)
            except OSError as error:
                self._outage.begins(error, count)
                return False
            self._has_head = True
            self._outage.ends()
            return True

    def begin(self) -> None:
        """Writes the bytes that the ``head`` function returns.

        If the write fails, they are written before any later data.
        """
        self._has_head = False
        self.append(b"", 0)

    def close(self) -> None:
        """Closes the file. This method can be called more than once."""
        file, self._file = self._file, None
        if file is not None:
            # Ignore errors: NFS may report only at close() that earlier writes failed, and it is
            # too late to write again.
            with contextlib.suppress(OSError):
                os.close(file)

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o644)
        self._has_head = self._is_torn = False

    def _write(self, file: int, data: bytes) -> None:
        if self._is_torn:
            os.ftruncate(file, self._end)
            self._is_torn = False
        self._end = os.fstat(file).st_size
        try:
            while data:
                data = data[os.write(file, data) :]
        except OSError:
            self._is_torn = True
            # If truncating also fails, _is_torn stays set, and the next write truncates the file
            # first.
            with contextlib.suppress(OSError):
                os.ftruncate(file, self._end)
                self._is_torn = False
            raise


class _LossyOutput(io.FileIO):
    """Stream for standard output or error that drops data if writing fails.

    Args:
        stream: Stream that is replaced, ``sys.stdout`` or ``sys.stderr``.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self._name = stream.name.strip("<>")
        self._lost = 0

    def write(self, data: Any) -> int:
        """Writes ``data``, or drops it if the write fails.

        At the first successful write after a failure, the number of lost bytes is written first.

        Returns:
            Size of ``data`` in bytes, even if ``data`` was dropped.
        """
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            if self._lost and not _has_room(self.fileno()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._lost:
                gap = f"\n[{self._lost} bytes of {self._name} were lost here]\n"
                os.write(self.fileno(), gap.encode())
                self._lost = 0
            while left:
                left = left[os.write(self.fileno(), left) :]
        except OSError as error:
            if self._name == "stdout" and not self._lost:
                Outage(self._name, "bytes").begins(error)
            self._lost += len(left)
        return size


def keep_printing() -> None:
    """Makes ``print`` and all other writes to standard output and standard error ignore errors.

    Otherwise, a full disk or a closed terminal would end the run. Streams that other code has
    replaced are left unchanged. This function may be called more than once.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        if isinstance(getattr(stream.buffer, "raw", stream.buffer), _LossyOutput):
            continue
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        raw = _LossyOutput(stream)
        made = io.TextIOWrapper(
            # Keep an unbuffered stream (PYTHONUNBUFFERED) unbuffered.
            cast(Any, raw) if stream.write_through else io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)


def drop_closed_terminal() -> bool:
    """Redirects standard output and error to /dev/null if their terminal was closed.

    Otherwise, printing a log line would raise an error, which could end the process before a
    checkpoint is saved.

    Returns:
        ``True`` if the terminal of standard output or error was closed.
    """
    is_closed = False
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError as error:
            if error.errno != errno.EIO:
                continue
            is_closed = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
    return is_closed


def set_aside(folder: str | os.PathLike[str]) -> Path | None:
    """Renames ``folder`` to the first unused name among ``<folder>-1``, ``<folder>-2`` and so on.

    An empty folder is not renamed. A job calls this function at each start, because it needs an
    empty folder for its traces. If several machines share the folder, all of them may call this
    function at the same time.

    Returns:
        New path of the folder, or ``None`` if the folder was empty or missing.

    Raises:
        TraceError: The folder cannot be renamed.
    """
    path = Path(folder)
    number = 1
    try:
        if not path.is_dir() or not any(path.iterdir()):
            return None
        while (kept := path.with_name(f"{path.name}-{number}")).exists():
            number += 1
        path.rename(kept)
    except FileNotFoundError:
        return None  # Another machine that shares the folder has just renamed it.
    except OSError as error:
        raise TraceError(
            f"cannot rename {path}, which contains the traces of an earlier start of the job: "
            f"{error.strerror}; give this user write permission, or choose another --trace-dir"
        ) from error
    return kept


def make_parent(path: Path) -> None:
    """Creates the folder of the file ``path`` if it does not exist.

    Raises:
        TraceError: The folder cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path, and then atomically moves the file from there to ``path``.

    The temporary file has the suffix of ``path``, because writers choose the format by the suffix.
    The file is moved when the ``with`` block ends. If the block raises an error, an existing file
    at ``path`` stays unchanged and the temporary file is deleted. Missing folders are created.

    Raises:
        TraceError: The file cannot be written at ``path``.
    """
    target = Path(path)
    make_parent(target)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=target.suffix)
        os.close(handle)
    except OSError as error:
        raise _unwritable(target, error) from error
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> TraceError:
    return TraceError(f"cannot write {path}: {error.strerror or error}; choose another path")
