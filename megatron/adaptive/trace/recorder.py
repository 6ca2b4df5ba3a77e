"""Records the spans of a rank at low cost, and writes them from a background thread.

During a step, recording a span only appends a tuple to a list. At the end of the iteration, the
whole list is passed to a writer thread through a bounded queue. The thread formats the spans and
appends them to the rank's file in a single write. While the disk does not accept data, iterations
are dropped and a warning is printed. After the disk has recovered, a record that lists the missing
iterations is written to the file::

    extend() extend() | end_iteration() --queue--> writer: format, write
      a list, no lock |   (64 iterations at most)

After :meth:`Recorder.watch`, the thread also updates the rank's status file ``now_rank_*.json``
(``status_files``). If the run is killed, the trace file still ends with a complete line, and only
the iterations in the queue are missing. This module does not import torch and never reads a GPU's
clock, because the caller passes all times.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.files import BestEffortFile, Outage
from megatron.adaptive.trace.otlp import SpanSender
from megatron.adaptive.trace.status_files import NowFile, ReadState
from megatron.adaptive.trace.trace_format import (
    ClockSamples,
    Gap,
    GroupCollectives,
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
"""Entry of the queue: the marker and the spans of an iteration."""


class Recorder(AbstractContextManager["Recorder"]):
    """Appends the spans of one rank to its trace file.

    For each iteration, call :meth:`begin_iteration`, then :meth:`extend` any number of times, then
    :meth:`end_iteration`. Call :meth:`close` at the end, or use the recorder in a ``with``
    statement. The recorder is also closed when the interpreter exits.

    Thread safety: :meth:`extend`, :meth:`add_late` and :meth:`add_clock_samples` may be called from
    any thread. All other methods must be called from the same thread.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        header: TraceHeader,
        sender: SpanSender | None = None,
        *,
        begin_thread: Callable[[], None] | None = None,
    ) -> None:
        """Opens the rank's trace file.

        Args:
            folder: Path of the folder for the trace files. It is created if necessary, and no other
                run may use it.
            header: Description of the rank. Written as the first line of the file.
            sender: Sender that gets all spans, even while the disk does not accept data; ``None``
                for no sender. :meth:`close` also closes the sender.
            begin_thread: Function that the writer thread calls first; ``None`` for no function.
                Used to select the process's GPU in this thread, because ``read_state`` may use the
                GPU.

        Raises:
            TraceError: The folder already contains a trace of this rank, or the file cannot be
                written. A full or failing disk does not raise this error. Instead, spans are
                dropped until the disk recovers.
        """
        self._path = Path(folder) / trace_file_name(header.rank)
        line = header_line(header).encode()
        try:
            if self._path.exists() and self._path.stat().st_size:
                raise TraceError(
                    f"{self._path} contains the trace of another start of the job; use an empty "
                    "folder"
                )
            self._file = BestEffortFile(self._path, "iterations", lambda: line)
        except OSError as error:
            raise TraceError(
                f"cannot write the trace file {self._path}: {error.strerror or error}"
            ) from error
        self._file.begin()
        self._rank = header.rank
        self._read_state: ReadState | None = None
        self._begin_thread = begin_thread
        self._sender = sender
        self._begun: IterationStart | None = None
        self._rows: list[SpanRow] | None = None
        self._open = True
        self._gap: Gap | None = None  # Used only by the writer thread.
        # Used only by the recording thread.
        self._delay = Outage(self._path, "iterations")
        self._queue: queue.Queue[_Batch | ClockSamples | None] = queue.Queue(QUEUE_ITERATIONS)
        self._thread = threading.Thread(
            target=self._write_batches, name="trace-writer", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    @property
    def path(self) -> Path:
        """Path of the rank's trace file."""
        return self._path

    @property
    def is_recording(self) -> bool:
        """Whether spans are being recorded: an iteration has begun but not yet ended."""
        return self._rows is not None

    @property
    def rows(self) -> tuple[SpanRow, ...]:
        """Spans that have been recorded in the current iteration so far.

        The tuple is empty outside of iterations.
        """
        return tuple(self._rows or ())

    def begin_iteration(
        self,
        iteration: int,
        num_microbatches: int,
        *,
        start_ns: int | None = None,
        lengths: Lengths = (),
        slices: tuple[int, ...] = (),
        sizes: tuple[int, ...] = (),
        frozen_stages: int = -1,
    ) -> None:
        """Starts an iteration, and ends the previous one if :meth:`end_iteration` was not called.

        Args:
            iteration: Iteration number, as in the training log.
            num_microbatches: Number of microbatches in the iteration.
            start_ns: Start of the iteration in ns on the clock of the spans; ``None`` for the
                current time.
            lengths: Sizes of the microbatches in the form of ``Lengths``; empty if all microbatches
                have the same size.
            slices: Number of slices of each microbatch; empty if the number in the header applies.
            sizes: Approximate size in bytes of the activations of each microbatch; empty if all
                microbatches have the same size.
            frozen_stages: Number of leading stages that run no backward passes in the iteration; -1
                if the number in the header applies.
        """
        self.end_iteration()
        if self._open:
            start_ns = time.monotonic_ns() if start_ns is None else start_ns
            self._begun = IterationStart(
                iteration,
                num_microbatches,
                start_ns,
                lengths=lengths,
                slices=slices,
                sizes=sizes,
                frozen_stages=frozen_stages,
            )
            self._rows = []

    def extend(self, rows: Iterable[SpanRow]) -> None:
        """Adds ``rows`` to the current iteration, or drops them if there is none.

        This method never blocks.
        """
        if self._rows is not None:
            self._rows.extend(rows)

    def add_experts(self, exchange_ns: int, tokens: Sequence[Sequence[int]]) -> None:
        """Records how many tokens each expert of the rank received in this iteration.

        Args:
            exchange_ns: Time in ns that actions waited for all-to-all exchanges of tokens.
            tokens: Row per MoE layer, as in ``IterationStart.tokens``: index of the layer, index of
                the rank's first expert, number of tokens of each expert.
        """
        if self._begun is not None:
            rows = tuple(tuple(row) for row in tokens)
            self._begun = replace(self._begun, exchange_ns=exchange_ns, tokens=rows)

    def add_machine(self, counts: Mapping[str, int]) -> None:
        """Records the counters of events that kept the rank from computing in this iteration.

        Args:
            counts: Counts, keyed by the names in ``machine_counters``.
        """
        if self._begun is not None:
            self._begun = replace(self._begun, machine=counts)

    def add_layers(
        self, rows: Sequence[Sequence[int]], passes: Sequence[tuple[int, int, int, int]] = ()
    ) -> None:
        """Records the times of the rank's layers in this iteration.

        Args:
            rows: Row per layer, as in ``IterationStart.layers``.
            passes: Times of the layers' first passes, as in ``IterationStart.layer_passes``.
        """
        if self._begun is not None:
            layers = tuple(tuple(row) for row in rows)
            self._begun = replace(self._begun, layers=layers, layer_passes=tuple(passes))

    def add_collectives(self, groups: Sequence[GroupCollectives]) -> None:
        """Records the collectives of the rank's process groups in this iteration."""
        if self._begun is not None:
            self._begun = replace(self._begun, collectives=tuple(groups))

    def end_iteration(self) -> None:
        """Passes the iteration's spans to the writer thread.

        This method blocks only if the queue is full, and for at most 10 s. If the queue is still
        full after this time, the iteration is dropped. Later iterations are then dropped
        immediately until the queue has space again.
        """
        begun, rows = self._begun, self._rows
        self._begun, self._rows = None, None
        if begun is not None and rows is not None:
            self._hand_over((begun, rows))

    def add_late(self, iteration: int, num_microbatches: int, rows: Sequence[SpanRow]) -> None:
        """Adds spans to an iteration that has already ended. Drops them if the queue is full.

        Args:
            iteration: Number of the iteration that has ended.
            num_microbatches: Number of microbatches in that iteration.
            rows: Spans to add.
        """
        if self._open and rows:
            begun = IterationStart(iteration, num_microbatches, rows[0].start_ns, is_late=True)
            self._offer((begun, rows))

    def add_clock_samples(self, samples: ClockSamples) -> None:
        """Passes clock samples to the writer thread. Drops them if the queue is full."""
        if self._open and samples.samples:
            self._offer(samples)

    def watch(self, read_state: ReadState) -> None:
        """Keeps the status file ``now_rank_*.json`` up to date until :meth:`close` is called.

        The file is written twice a second.

        Args:
            read_state: Function that returns fields of
                :class:`~megatron.adaptive.trace.status_files.Now`. Must not change any state,
                because the writer thread calls this function while the rank computes.
        """
        self._read_state = read_state
        if self._open:
            # Wake the writer thread with an empty record.
            self._offer(ClockSamples(0, ()))

    def close(self) -> None:
        """Writes all remaining spans and closes the file. May be called more than once."""
        if not self._open:
            return
        self.end_iteration()
        self._open = False
        atexit.unregister(self.close)
        # Wait with a timeout, because the thread may hang while writing to a disk. The process can
        # exit anyway, because this is a daemon thread.
        if self._hand_over(None):
            self._thread.join(WRITER_PATIENCE_S)
        if self._sender is not None:
            self._sender.close()

    def __exit__(self, *_: object) -> None:
        """Writes all remaining spans and closes the file."""
        self.close()

    def _offer(self, batch: _Batch | ClockSamples) -> None:
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            # Drop the batch, because only end_iteration() may wait for space in the queue.
            return

    def _hand_over(self, batch: _Batch | None) -> bool:
        """Queues ``batch``, and returns ``False`` if the queue still has no space after 10 s."""
        try:
            self._queue.put(batch, timeout=0.0 if self._delay.lost else WRITER_PATIENCE_S)
        except queue.Full:
            self._delay.begins(f"the disk accepted no data for {WRITER_PATIENCE_S:.0f} s")
            return False
        self._delay.ends()
        return True

    def _write_batches(self) -> None:
        """Writes the batches in the queue until a ``None`` arrives. Runs in the writer thread."""
        if self._begin_thread is not None:
            self._begin_thread()
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
        """Appends the lines of ``batch`` to the file.

        If earlier iterations could not be written, a record that lists them is written before the
        batch. If the batch cannot be written, the iteration is added to this record.
        """
        if isinstance(batch, ClockSamples):
            text, iteration = samples_line(batch) if batch.samples else "", None
        else:
            text, iteration = block_text(*batch), None if batch[0].is_late else batch[0].iteration
            if self._sender is not None:
                self._sender.add(*batch)
        if not text:
            return
        if self._gap is not None:
            text = gap_line(self._gap) + text
        if self._file.append(text.encode(), int(iteration is not None)):
            self._gap = None
        elif iteration is not None:
            first = iteration if self._gap is None else self._gap.first
            self._gap = Gap(first, iteration, self._file.lost)
