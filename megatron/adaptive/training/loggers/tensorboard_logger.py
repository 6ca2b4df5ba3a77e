"""Provides the logger ``tensorboard``, which writes a file for TensorBoard."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.trace.files import BestEffortFile
from megatron.adaptive.training.logger import Logger

_CURVES_S = 5.0
"""Maximum time in seconds between two writes. A full queue is written earlier."""


class TensorBoard(Logger):
    """Writes scalars to an event file for TensorBoard.

    This class tolerates write errors, whereas TensorBoard's own writer would stop permanently once
    the disk is full.
    """

    name = "tensorboard"
    flag = "tensorboard_dir"

    def __init__(self, cfg: TrainerConfig) -> None:
        # Import here, because these imports are slow and only one rank needs them.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._make_event = Event
        self._make_summary = Summary
        self._events: list[bytes] = []
        self._records = RecordWriter(SimpleNamespace(write=self._events.append))
        settings = cfg.logging
        self._most_waiting = settings.tensorboard_queue_size
        self._due_s = 0.0
        folder = settings.tensorboard_dir
        assert folder is not None
        begin_s = time.time()
        # Start the name with the time, because TensorBoard reads the files of a folder in the order
        # of their names.
        name = f"events.out.tfevents.{begin_s:017.6f}.{socket.gethostname()}.{os.getpid()}"
        try:
            self._file = BestEffortFile(Path(folder, name), "points", self._head)
        except OSError as error:
            raise ConfigError(
                f"cannot write to --tensorboard-dir {folder} ({error.strerror}); choose a writable "
                "folder"
            ) from None
        self._file.begin()

    def scalar(self, tag: str, value: float, step: int) -> None:
        summary = self._make_summary(value=[self._make_summary.Value(tag=tag, simple_value=value)])
        self._record(step=step, summary=summary)
        if len(self._events) >= self._most_waiting or time.monotonic() >= self._due_s:
            self.flush()

    def flush(self) -> None:
        """Writes the pending points, or drops them if they cannot be written."""
        self._due_s = time.monotonic() + _CURVES_S
        if self._events:
            self._file.append(b"".join(self._events), len(self._events))
            self._events.clear()

    def close(self) -> None:
        """Writes the pending points and closes the file."""
        self.flush()
        self._file.close()

    def _head(self) -> bytes:
        waiting = self._events[:]
        self._events[:] = []
        self._record(file_version="brain.Event:2")
        head = b"".join(self._events)
        self._events[:] = waiting
        return head

    def _record(self, **content: Any) -> None:
        self._records.write(self._make_event(wall_time=time.time(), **content).SerializeToString())
