"""Folders of checkpoints, one for each step, that appear whole or not at all.

::

    <path>/
      iter_0000100/              complete: all of it is durable
      .iter_0000200.partial/     being written, or left behind by a crash
      .iter_0000100.replaced/    the former one while another takes its place

What is in them, and which of them counts, is their user's. Nothing here knows of other ranks or of
tensors; one process works on a path at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

__all__ = ["StepFolders", "sync", "write_durably"]


class StepFolders:
    """A path with folders of steps.

    Args:
        path: need not exist.
        prefix: of their names.
        digits: of their numbers, at least.
        manifest: the file that a complete one has.
    """

    def __init__(self, path: str | Path, *, prefix: str, digits: int, manifest: str) -> None:
        self.path = Path(path)
        self._prefix, self._digits, self._manifest = prefix, digits, manifest
        self._complete = re.compile(rf"{prefix}(\d{{{digits},}})")

    def complete_path(self, step: int) -> Path:
        """Where a step is when it is complete."""
        return self.path / self._name(step)

    def partial_path(self, step: int) -> Path:
        """Where a step is written before it is complete."""
        return self.path / f".{self._name(step)}.partial"

    def replaced_path(self, step: int) -> Path:
        """Where the former one is while another takes its place."""
        return self.path / f".{self._name(step)}.replaced"

    def steps(self) -> dict[int, Path]:
        """The complete ones by step, ascending."""
        found = (
            (self._complete.fullmatch(one.parent.name), one.parent)
            for one in self.path.glob(f"{self._prefix}*/{self._manifest}")
        )
        return dict(sorted((int(match[1]), one) for match, one in found if match))

    def begin(self, step: int) -> Path:
        """Clear away what crashed runs left and make an empty partial folder.

        Raises:
            OSError: the path cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for former in self.path.glob(f".{self._prefix}*.replaced"):
            complete = self.path / former.name[1 : -len(".replaced")]
            if complete.exists():
                shutil.rmtree(former)
            else:
                former.rename(complete)
        for stale in self.path.glob(f".{self._prefix}*.partial"):
            shutil.rmtree(stale)
        partial = self.partial_path(step)
        partial.mkdir()
        return partial

    def publish(
        self,
        step: int,
        check: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
    ) -> Path:
        """Make a partial folder durable, and turn it into a complete one.

        Args:
            step: as given to :meth:`begin`.
            check: called when all is written, before anything takes its place; raises what it will.
            then: called when it has its name, before the former one goes.

        Raises:
            OSError: writing failed; the partial folder is still there.
        """
        partial, complete = self.partial_path(step), self.complete_path(step)
        for one in partial.iterdir():
            sync(one)
        sync(partial)
        if check is not None:
            check()
        former = self.replaced_path(step)
        if complete.exists():
            complete.rename(former)
        partial.rename(complete)
        sync(self.path)
        if then is not None:
            then()
        if former.exists():
            shutil.rmtree(former)
        return complete

    def keep(self, number: int, but: Collection[int] = ()) -> None:
        """Remove all but the last complete ones, as far as the file system lets us.

        Args:
            number: of those that stay.
            but: these stay too.
        """
        for step in list(self.steps())[:-number]:
            if step not in but:
                self.remove(step)

    def remove(self, step: int) -> None:
        """Remove a complete one, as far as the file system lets us."""
        # Under a name that nobody loads from, before the first file goes.
        doomed = self.partial_path(step)
        with contextlib.suppress(OSError):
            self.complete_path(step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def abandon(self, step: int) -> None:
        """Remove a partial folder, as far as the file system lets us."""
        shutil.rmtree(self.partial_path(step), ignore_errors=True)

    def _name(self, step: int) -> str:
        return f"{self._prefix}{step:0{self._digits}d}"


def write_durably(path: Path, text: str) -> None:
    """Write a file that survives a power failure.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
