"""Writing a result whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.adaptive.errors import TraceError


def set_aside(folder: str | os.PathLike[str]) -> Path | None:
    """Rename a folder that holds anything to ``<folder>-1`` or the next free number.

    A folder of traces holds one start of a job; another start begins with an empty one. Several
    machines that share the folder may call this at once.

    Returns:
        Where the old folder is now, ``None`` if there was nothing to keep.

    Raises:
        TraceError: it cannot be renamed.
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
        return None  # another machine was first
    except OSError as error:
        raise TraceError(
            f"cannot move the traces of an earlier start, {path}, aside: {error.strerror}; let "
            "this user write there, or name another --trace-dir"
        ) from error
    return kept


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
