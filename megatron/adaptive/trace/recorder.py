"""Records the spans of a rank at low cost and writes them from a thread.

The step only appends tuples to a list. At the end of an iteration the whole list goes through a
bounded queue to a writer thread, which formats it and appends it to the rank's file with one
write. While the disk accepts no data, iterations are dropped and a line on stderr says so; a
record in the file then says which iterations are missing::

    extend() extend() | end_iteration() --queue--> writer: format, write
      a list, no lock |   (64 iterations at most)

The thread also keeps ``now_rank_*.json`` up to date if it gets a function that reads the rank's
state (see ``status_files``). A killed run leaves a file of whole lines; at most the iterations
still in the queue are missing. This module does not import torch and never reads a device's clock:
the caller passes the times.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.files import BestEffortFile, Outage
from megatron.adaptive.trace.status_files import NowFile, ReadState
from megatron.adaptive.trace.trace_format import (
    ClockSamples,
    Gap,
    IterationStart,
    Lengths,
    SpanRow,
    TraceHeader,
    block_text,
    gap_line,
    header_line,
    samples_line,
    trace_file_name,
)

QUEUE_ITERATIONS = 64
WRITER_PATIENCE_S = 10.0


_Batch: TypeAlias = tuple[IterationStart, Sequence[SpanRow]]
"""Marker and spans that wait to be written to the file."""


class Recorder(AbstractContextManager["Recorder"]):
    """Appends the spans of one rank to its trace file.

    Use :meth:`begin_iteration`, any number of :meth:`extend`, :meth:`end_iteration`, and
    :meth:`close` at the end (also a context manager; the interpreter's exit closes it too).

    Thread safety: :meth:`extend`, :meth:`add_late` and :meth:`add_clock_samples` may be called from
    any thread. The other methods belong to one thread.
    """

    def __init__(self, folder: str | os.PathLike[str], header: TraceHeader) -> None:
        """Opens the rank's file in a folder, which is created if it does not exist.

        Args:
            folder: Path of the run's folder; each run needs its own.
            header: Header that is written as the first line.

        Raises:
            TraceError: The folder has a trace of the rank already, or the file cannot be written
                and the disk is neither full nor failing.
        """
        self._path = Path(folder) / trace_file_name(header.rank)
        line = header_line(header).encode()
        try:
            if self._path.exists() and self._path.stat().st_size:
                raise TraceError(
                    f"{self._path} has the trace of another start; give an empty folder"
                )
            self._file = BestEffortFile(self._path, "iterations", lambda: line)
        except OSError as error:
            raise TraceError(
                f"cannot write the trace file {self._path}: {error.strerror or error}"
            ) from error
        self._file.begin()
        self._rank = header.rank
        self._read_state: ReadState | None = None
        self._begun: IterationStart | None = None
        self._rows: list[SpanRow] | None = None
        self._open = True
        self._gap: Gap | None = None  # only the writer thread uses it
        self._delay = Outage(self._path, "iterations")  # only the recording thread uses it
        self._queue: queue.Queue[_Batch | ClockSamples | None] = queue.Queue(QUEUE_ITERATIONS)
        self._thread = threading.Thread(
            target=self._write_batches, name="trace-writer", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    @property
    def path(self) -> Path:
        """Path of the file that the recorder appends to."""
        return self._path

    @property
    def is_recording(self) -> bool:
        """Whether an iteration is being recorded."""
        return self._rows is not None

    def begin_iteration(
        self,
        iteration: int,
        num_microbatches: int,
        *,
        start_ns: int | None = None,
        lengths: Lengths = (),
    ) -> None:
        """Starts an iteration; ends the previous one if :meth:`end_iteration` was not called.

        Args:
            iteration: Number of the iteration, as in the training log.
            num_microbatches: Number of its microbatches.
            start_ns: Start on the clock of the spans; ``None`` for the present time.
            lengths: Lengths of its microbatches.
        """
        self.end_iteration()
        if self._open:
            start_ns = time.monotonic_ns() if start_ns is None else start_ns
            self._begun = IterationStart(iteration, num_microbatches, start_ns, lengths=lengths)
            self._rows = []

    def extend(self, rows: Iterable[SpanRow]) -> None:
        """Adds spans to the iteration; does nothing between two iterations. Never blocks."""
        if self._rows is not None:
            self._rows.extend(rows)

    def add_experts(self, exchange_ns: int, tokens: Sequence[Sequence[int]]) -> None:
        """Adds the load of the rank's experts in the iteration, see ``IterationStart``."""
        if self._begun is not None:
            rows = tuple(tuple(row) for row in tokens)
            self._begun = replace(self._begun, exchange_ns=exchange_ns, tokens=rows)

    def end_iteration(self) -> None:
        """Passes the iteration's spans to the writer thread.

        Blocks only if the queue is full, for at most 10 s and only once: after that, iterations
        are dropped until the queue has room.
        """
        begun, rows = self._begun, self._rows
        self._begun, self._rows = None, None
        if begun is not None and rows is not None:
            self._hand_over((begun, rows))

    def add_late(self, iteration: int, num_microbatches: int, rows: Sequence[SpanRow]) -> None:
        """Adds spans to an iteration that has ended, or drops them if the queue is full.

        Args:
            iteration: Number of a recorded iteration.
            num_microbatches: Number of its microbatches.
            rows: Spans to add.
        """
        if self._open and rows:
            begun = IterationStart(iteration, num_microbatches, rows[0].start_ns, is_late=True)
            self._offer((begun, rows))

    def add_clock_samples(self, samples: ClockSamples) -> None:
        """Writes readings of this rank's clock, or drops them if the queue is full."""
        if self._open and samples.samples:
            self._offer(samples)

    def watch(self, read_state: ReadState) -> None:
        """Keeps the rank's ``now_rank_*.json`` up to date, twice a second, until the recorder ends.

        Args:
            read_state: Function that returns fields of
                :class:`~megatron.adaptive.trace.status_files.Now`. The writer thread calls it
                while the rank computes, so it must not change any state.
        """
        self._read_state = read_state
        if self._open:
            self._offer(ClockSamples(0, ()))  # wakes the thread

    def close(self) -> None:
        """Writes all remaining spans and closes the file; later calls do nothing."""
        if not self._open:
            return
        self.end_iteration()
        self._open = False
        atexit.unregister(self.close)
        # A writer that hangs in a write is a daemon thread and ends with the process.
        if self._hand_over(None):
            self._thread.join(WRITER_PATIENCE_S)

    def __exit__(self, *_: object) -> None:
        """Closes the recorder."""
        self.close()

    def _offer(self, batch: _Batch | ClockSamples) -> None:
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            return  # only whole iterations are worth waiting for, and end_iteration() does

    def _hand_over(self, batch: _Batch | None) -> bool:
        """Puts a batch into the queue, or drops it; returns whether the queue took it."""
        try:
            self._queue.put(batch, timeout=0.0 if self._delay.lost else WRITER_PATIENCE_S)
        except queue.Full:
            self._delay.begins(f"the disk accepted no data for {WRITER_PATIENCE_S:.0f} s")
            return False
        self._delay.ends()
        return True

    def _write_batches(self) -> None:
        """Writes batches until the sentinel ``None`` arrives; runs in the writer thread."""
        state = NowFile(self._path.parent, self._rank)
        while True:
            try:
                batch = self._queue.get(timeout=state.report(self._read_state))
            except queue.Empty:
                continue
            if batch is None:
                break
            self._append(batch)
        state.end(self._read_state)
        self._file.close()

    def _append(self, batch: _Batch | ClockSamples) -> None:
        """Appends a batch, preceded by a record of missing ones, or notes it as missing."""
        if isinstance(batch, ClockSamples):
            text, iteration = samples_line(batch) if batch.samples else "", None
        else:
            text, iteration = block_text(*batch), None if batch[0].is_late else batch[0].iteration
        if not text:
            return
        if self._gap is not None:
            text = gap_line(self._gap) + text
        if self._file.append(text.encode(), int(iteration is not None)):
            self._gap = None
        elif iteration is not None:
            first = iteration if self._gap is None else self._gap.first
            self._gap = Gap(first, iteration, self._file.lost)
