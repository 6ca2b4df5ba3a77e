"""Provides a file lock, so that only one process builds files that several processes need."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.adaptive.config.input_files import printable
from megatron.adaptive.errors import DataError

_LOG = logging.getLogger(__name__)
_WAIT_S = 3600.0
_RETRY_S = 0.05
_FIRST_LINE_S = 60.0


@contextmanager
def locked(path: Path, *, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Locks the file ``path`` exclusively during the ``with`` block.

    While a different process holds the lock, this function waits, and logs a warning if the wait is
    long. If the process that holds the lock exits, the kernel releases the lock.

    Args:
        path: Path of the file, which is created if it does not exist.
        wait_s: Maximum time to wait for the lock, in seconds.

    Raises:
        DataError: If another process still holds the lock after ``wait_s`` seconds.
        OSError: If the file cannot be created.
    """
    # If the path is a named pipe, opening it only for writing would block until there is a reader.
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "rb") as stream:
        _lock(stream.fileno(), path, wait_s)
        yield


def _lock(descriptor: int, path: Path, wait_s: float) -> None:
    begin_s = time.monotonic()
    is_told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                # The file system does not support locks. Continue, although two processes may then
                # do the same work.
                return
        else:
            return
        waited_s = time.monotonic() - begin_s
        if waited_s >= wait_s:
            raise DataError(
                f"{path}: another process has locked this file for more than {wait_s:g} s, to "
                "build other files in the same folder; check whether that process still makes "
                "progress, or stop it"
            )
        if waited_s >= _FIRST_LINE_S and not is_told:
            is_told = True
            _LOG.warning(
                "WARNING: waiting for the process that has locked %s", printable(str(path))
            )
        time.sleep(_RETRY_S)
