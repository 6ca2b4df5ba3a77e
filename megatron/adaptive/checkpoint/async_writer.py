"""Checkpoints that are written while training goes on, one at a time.

What is written was copied before; who waits for it, and what follows from a failure, is the same
for all programs that train.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from megatron.adaptive.errors import CheckpointError

__all__ = ["Behind"]


class Behind:
    """The checkpoint that is being written behind training, if there is one."""

    def __init__(self) -> None:
        self._pending: _Pending | None = None
        self._untold: deque[tuple[int, Path]] = deque()

    def begin(self, write: Callable[[], Path | None], step: int) -> None:
        """Write a checkpoint in a thread of its own; after :meth:`finish` or :meth:`lacking`.

        Args:
            write: returns its folder, ``None`` where it is not yet where it is to be.
            step: that it is of.
        """
        self._take_note()
        self._pending = _Pending(write, step)

    def completed(self) -> tuple[int, Path] | None:
        """Step and folder of a checkpoint that was completed; each once, in their order."""
        self._take_note()
        return self._untold.popleft() if self._untold else None

    def finish(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointError: it could not be written; nothing of it is left.
        """
        pending = self._pending
        if pending is None:
            return
        pending.join()
        if pending.failure is not None:
            self._pending = None
            raise pending.failure

    def lacking(self, step: int) -> str:
        """Wait for the checkpoint that is being written; what to say where it failed, or nothing.

        Args:
            step: of the checkpoint that is to take its place, and that training waits for then: a
                disk that was full for a while costs no steps.
        """
        try:
            self.finish()
        except CheckpointError as error:
            return f"{error}; training waits until that of iteration {step} is there in its place"
        return ""

    def _take_note(self) -> None:
        pending = self._pending
        if pending is not None and not pending.is_alive() and pending.path is not None:
            self._pending = None
            self._untold.append((pending.step, pending.path))


class _Pending(threading.Thread):
    """Writes one checkpoint."""

    def __init__(self, write: Callable[[], Path | None], step: int) -> None:
        super().__init__(name=f"checkpoint {step}", daemon=True)
        self._write = write
        self.step = step
        self.path: Path | None = None
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.path = self._write()
        except BaseException as error:
            self.failure = error
