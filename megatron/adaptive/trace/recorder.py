"""Records what a rank does, cheaply, and writes it from a thread.

The step only appends tuples to a list. At the end of an iteration the list goes, whole, through a
bounded queue to a writer thread, which formats it and appends it to the rank's file with one
write::

    record() record() record() | end_iteration() --queue--> writer: format, write
             a list, no lock   |   (64 iterations at most)

A killed run therefore leaves a file of whole lines that lacks at most the iterations still in the
queue. This module imports no torch and never looks at a device: times are given by the caller.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import threading
from collections.abc import Container, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.event import (
    IterationStart,
    TraceHeader,
    parse_line,
    trace_file_name,
)

__all__ = ["Recorder"]

QUEUE_ITERATIONS = 64
WRITER_PATIENCE_S = 30.0

_Record: TypeAlias = tuple[str, int, int, int, int, int, int, int]
_Batch: TypeAlias = tuple[IterationStart, Sequence[_Record]]

_SPAN_LINE = (
    '{"action": %s, "chunk": %d, "microbatch": %d, "start_ns": %d, "end_ns": %d, '
    '"iteration": %d, "wait_ns": %d, "bytes": %d, "in_flight_bytes": %d}\n'
)


class Recorder:
    """Appends the spans of one rank to its trace file.

    Use :meth:`begin_iteration`, any number of :meth:`record`, :meth:`end_iteration`, and
    :meth:`close` at the end (also a context manager; the interpreter's exit closes it too).

    An error of the writer, such as a full disk, is raised at the next :meth:`begin_iteration`,
    :meth:`end_iteration` or :meth:`close`, so never in the middle of a step. It is raised once;
    from then on the recorder does nothing, so that a trainer may report it and go on.

    Thread safety: :meth:`record` may be called from any thread. The other methods belong to one
    thread.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        header: TraceHeader,
        *,
        interval: int = 1,
        iterations: Container[int] | None = None,
    ) -> None:
        """Open the rank's file in a folder, which is made if it is missing.

        Args:
            folder: one folder per run.
            header: written as the first line; written again if the same run goes on.
            interval: record only the iterations that this divides.
            iterations: record only iterations that this contains; ``None`` for all.

        Raises:
            TraceError: the file belongs to another run or to another shape of this run, is no
                trace file, or cannot be written.
        """
        if interval < 1:
            raise TraceError(f"trace interval is {interval}, expected at least 1")
        self._interval = interval
        self._iterations = iterations
        self._path = Path(folder) / trace_file_name(header.rank)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            size = _continue_at(self._path, header)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._file, size)
        except OSError as error:
            raise TraceError(
                f"cannot write the trace file {self._path}: {error.strerror or error}"
            ) from error
        self._size = size
        self._marker: IterationStart | None = None
        self._spans: list[_Record] | None = None
        self._error: Exception | None = None
        self._open = True
        self._queue: queue.Queue[_Batch | None] = queue.Queue(QUEUE_ITERATIONS)
        try:
            self._append((header.to_line() + "\n").encode())
        except OSError as error:
            os.close(self._file)
            raise self._as_trace_error(error) from error
        self._thread = threading.Thread(
            target=self._write_batches, name="trace-writer", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    @property
    def path(self) -> Path:
        """The file this recorder appends to."""
        return self._path

    def begin_iteration(self, iteration: int, num_microbatches: int) -> None:
        """Start an iteration; ends the one before it if :meth:`end_iteration` was not called.

        Args:
            iteration: number of the iteration, as in the training log.
            num_microbatches: microbatches of this iteration.

        Raises:
            TraceError: the writer failed earlier.
        """
        self.end_iteration()
        if self._open and self._wanted(iteration):
            self._marker = IterationStart(iteration, num_microbatches)
            self._spans = []

    def record(
        self,
        action: str,
        chunk: int,
        microbatch: int,
        start_ns: int,
        end_ns: int,
        *,
        wait_ns: int = 0,
        bytes: int = 0,
        in_flight_bytes: int = 0,
    ) -> None:
        """Add a span to the iteration; does nothing in an iteration that is not recorded.

        Args: see :class:`~megatron.adaptive.trace.event.Span`. Costs well below a microsecond,
        never blocks and never raises for a reason of the writer.
        """
        spans = self._spans
        if spans is not None:
            spans.append(
                (action, chunk, microbatch, start_ns, end_ns, wait_ns, bytes, in_flight_bytes)
            )

    def end_iteration(self) -> None:
        """Hand the iteration's spans to the writer; without an open iteration only checks it.

        Blocks only while the queue is full, for 30 s at most.

        Raises:
            TraceError: the writer failed earlier, or writes nothing any more.
        """
        marker, spans = self._marker, self._spans
        self._marker = self._spans = None
        self._raise_pending()
        if marker is not None and spans is not None:
            self._hand_over((marker, spans))

    def close(self) -> None:
        """Write everything that is left and close the file; later calls do nothing.

        Raises:
            TraceError: something could not be written.
        """
        if not self._open:
            return
        try:
            self.end_iteration()
            if self._open:
                self._hand_over(None)
                self._thread.join(WRITER_PATIENCE_S)
                self._raise_pending()
                if self._thread.is_alive():
                    raise self._too_slow()
        finally:
            self._stop()

    def __enter__(self) -> Recorder:
        """The recorder itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the recorder."""
        self.close()

    def _wanted(self, iteration: int) -> bool:
        if iteration % self._interval:
            return False
        return self._iterations is None or iteration in self._iterations

    def _hand_over(self, batch: _Batch | None) -> None:
        try:
            self._queue.put(batch, timeout=WRITER_PATIENCE_S)
        except queue.Full:
            self._stop()
            raise self._too_slow() from None

    def _too_slow(self) -> TraceError:
        return TraceError(
            f"the trace file {self._path} took no data for {WRITER_PATIENCE_S:.0f} s; "
            "tracing ends here, choose a folder on a faster disk"
        )

    def _raise_pending(self) -> None:
        error = self._error
        if error is None or not self._open:
            return
        self._stop()
        if isinstance(error, OSError):
            raise self._as_trace_error(error) from error
        raise error

    def _as_trace_error(self, error: OSError) -> TraceError:
        return TraceError(
            f"cannot write the trace file {self._path}: {error.strerror or error}; "
            "what it holds so far is readable"
        )

    def _stop(self) -> None:
        """Refuse further work; the writer closes the file once its queue is empty."""
        self._open = False
        self._marker = self._spans = None
        atexit.unregister(self.close)
        if self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return  # The writer hangs in a write; it is a daemon and dies with the process.

    def _write_batches(self) -> None:
        """The writer thread: until the sentinel comes, or drained after a failure."""
        while (batch := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._append(_format(batch))
                except Exception as error:
                    self._error = error
        os.close(self._file)

    def _append(self, data: bytes) -> None:
        """Append all of ``data``, or nothing of it and raise."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += written


def _format(batch: _Batch) -> bytes:
    marker, records = batch
    words: dict[str, str] = {}
    lines = [marker.to_line() + "\n"]
    iteration = marker.iteration
    for action, chunk, microbatch, start, end, wait, size, in_flight in records:
        word = words.get(action)
        if word is None:
            word = words[action] = json.dumps(action)
        lines.append(
            _SPAN_LINE % (word, chunk, microbatch, start, end, iteration, wait, size, in_flight)
        )
    return "".join(lines).encode()


def _continue_at(path: Path, header: TraceHeader) -> int:
    """The size at which to go on in a file: behind its last whole line, or 0 for a new one."""
    if not path.exists() or path.stat().st_size == 0:
        return 0
    with path.open("rb") as file:
        line = file.readline()
        if not line.endswith(b"\n"):
            return 0  # Killed while it wrote its first header.
        first = parse_line(line, f"{path}:1")
        if not isinstance(first, TraceHeader):
            raise TraceError(f"{path} is no trace file; give an empty folder for the traces")
        if first.run != header.run:
            raise TraceError(
                f"{path} belongs to run {first.run!r}, this is run {header.run!r}; "
                "give an empty folder for the traces"
            )
        if first.shape != header.shape:
            raise TraceError(
                f"{path} has (world size, pipeline ranks, chunks) {first.shape}, this run goes on "
                f"with {header.shape}; give an empty folder for the traces"
            )
        return _end_of_last_line(file.fileno())


def _end_of_last_line(file: int, block: int = 65536) -> int:
    """Offset behind the last line end of a file; 0 if it has none."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - block)
        at = os.pread(file, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
