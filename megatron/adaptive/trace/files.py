"""Writing a result whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.adaptive.errors import TraceError

__all__ = ["replaced"]


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path beside ``path`` and move it there if the block succeeds.

    The temporary name keeps the ending of ``path``, because writers choose a format by it. A
    failing block leaves what was at ``path`` before, and no temporary file. Missing folders are
    made.

    Raises:
        TraceError: the file cannot be written there.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
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
    return TraceError(f"cannot write {path}: {error.strerror or error}; choose another place")
