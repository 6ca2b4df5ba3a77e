"""Defines the records of a trace: header, iterations, spans, clock samples, and their words.

A trace file belongs to one rank. This module owns the vocabulary and the records; their text form
is in ``lines``. It reads no clock except for a new :class:`TraceHeader` and opens no trace file.

::

    kind         what it is                                    what its other columns say
    ===========  ============================================  =================================
    F B W        forward, backward, weight gradient            chunk, microbatch, piece, bytes
                                                               received and sent, memory held,
                                                               inputs waiting, why it was picked
    wait         nothing could start                           of, chunk, microbatch: the action
                                                               that ended it; peer that its input
                                                               came from; the cause
    send         a result handed to the transport              of, chunk, microbatch: the action
                                                               it is the input of; peer, bytes
    receive      an input, from its arrival to the start of    the same
                 the action that took it
    data         a microbatch read                             microbatch
    reduce       gradients reduced and made whole
    optimizer    parameters updated
    evaluate     losses of other data
    checkpoint   state written
    step         the whole iteration
    ===========  ============================================  =================================

``of`` and ``chunk`` of a message are those of the receiving rank, so that both ends name it alike.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

FORMAT_NAME = "megatron-adaptive-trace"
FORMAT_VERSION = 2

KINDS = (
    *("F", "B", "W", "wait", "send", "receive"),
    *("data", "reduce", "optimizer", "evaluate", "checkpoint", "step", "collective"),
)
"""Kinds of span; a row names one by its place."""

DRAWN_ACTIONS = KINDS[:3]
"""The kinds of span that the charts of the order draw; every other kind is skipped by them."""

CAUSES = ("input", "memory", "order", "group")
"""Causes of a wait: no input was there; one was, but its activations would not have fitted the
cap; something was ready, but the order wanted another; a member of the decision group had
no input or no decision yet."""

COLLECTIVES = (
    *("params-all-gather", "grads-reduce-scatter", "embedding-grads-all-reduce"),
    *("layernorm-grads-all-reduce", "optimizer-clip-main-grad"),
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "barrier"),
)
"""Names of collectives in imported traces: those of Megatron-LM's phases, then by what they do."""

REASONS = (
    "",
    *CAUSES,
    *("seen", "found"),
    *("hint", "filler", "overtake", "deepest", "broadest", "turn"),
    *("posted", "gc", *COLLECTIVES),
)
"""Short words of a row, named by their place: the cause of a wait; whether the arrival of a message
was ``seen`` when it happened or ``found`` later, or ``posted``: seen, and its transfer could not
begin before the receiver's wait for it did; why the policy picked an action (see
``schedule.policy``); the name of a collective, or ``gc`` of an ``optimizer`` that is Python's
garbage collection. A collective's peer is the lowest rank of its group, -1 where only this rank's
part was recorded."""

COLUMNS = (
    *("kind", "chunk", "microbatch", "piece", "start_ns", "duration_ns", "bytes"),
    *("in_flight_bytes", "queue_depth", "peer", "of", "reason"),
)
"""Meaning of the numbers of a span's line, from the left."""

Row: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int, int]
"""A span as it is recorded: :data:`COLUMNS`, with absolute start and end on the rank's monotonic
clock in the places of ``start_ns`` and ``duration_ns``. Nothing is said by -1 for chunk,
microbatch, peer and of, by 0 elsewhere."""

Lengths: TypeAlias = tuple[tuple[int, ...], ...]
"""By microbatch of a rank: its positions, then the tokens of each of its documents; what is left of
the positions is padding. Empty where all microbatches are alike."""


def trace_file_name(rank: int) -> str:
    """The name of the trace file of a global rank."""
    return f"trace_rank_{rank:05d}.jsonl"


@dataclass(frozen=True, slots=True)
class SpanFormat:
    """Names the numbers in the lines below a header.

    Attributes:
        columns: what the numbers of a line mean.
        kinds: what the numbers of the column ``kind`` mean, and of ``of``.
        reasons: what the numbers of the column ``reason`` mean.
    """

    columns: tuple[str, ...] = COLUMNS
    kinds: tuple[str, ...] = KINDS
    reasons: tuple[str, ...] = REASONS


def _clock_id() -> str:
    """Returns what processes with one monotonic clock share: the boot and the time namespace."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        name = f"{name} {os.readlink('/proc/self/ns/time')}"
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """Names a trace file's writer, the shape of its pipeline, and its clock.

    Host, process, clock and its readings are those of this process where they are not given.

    Attributes:
        run: id of the run; equal on all its ranks, and on a resumed run.
        rank: global rank, in ``0..world_size-1``.
        world_size: number of processes of the run.
        pp_rank: position in the pipeline.
        tp_rank: position in the tensor-parallel group.
        dp_rank: position in the data-parallel group.
        num_ranks: size of the pipeline (ranks, not stages).
        num_chunks: model chunks that each rank holds.
        num_microbatches: microbatches of a step at the start; a marker may change it.
        placement: how stages lie on ranks and chunks, ``loop`` for stage = chunk * ranks + rank.
        schedule: name of the schedule or policy.
        host: name of the machine.
        pid: process id.
        monotonic_ns: ``time.monotonic_ns()`` at the moment of ``unix_ns``.
        unix_ns: ``time.time_ns()`` at the moment of ``monotonic_ns``.
        clock: id of the monotonic clock; ranks with one id share one. Empty in the text form.
        layers: transformer layers of each stage in pipeline order; empty if the file does not say
            it.
        work: how long each stage should take beside one layer, so its layers and what else it
            holds; empty if the file does not say it.
        span_format: names the numbers in the lines below it.
    """

    run: str
    rank: int
    world_size: int
    pp_rank: int
    tp_rank: int = 0
    dp_rank: int = 0
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    placement: str = "loop"
    schedule: str
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    monotonic_ns: int = field(default_factory=time.monotonic_ns)
    unix_ns: int = field(default_factory=time.time_ns)
    clock: str = field(default_factory=_clock_id)
    layers: tuple[int, ...] = ()
    work: tuple[float, ...] = ()
    span_format: SpanFormat = SpanFormat()

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(world_size, num_ranks, num_chunks)``: what all files of a folder agree on."""
        return (self.world_size, self.num_ranks, self.num_chunks)


@dataclass(frozen=True, slots=True)
class IterationStart:
    """The marker before spans of an iteration.

    Attributes:
        iteration: number of the iteration, as in the training log.
        num_microbatches: microbatches of this iteration (they change while the batch ramps up).
        start_ns: what the starts of its spans count from, on the rank's monotonic clock.
        counts: how many spans of each of the header's kinds follow.
        size_bytes: length of their lines together, to pass over them.
        is_late: the iteration has a marker before this one, these spans belong to it as well.
        exchange_ns: time that actions stood in exchanges of experts' tokens.
        tokens: of each layer of experts: its number in the model from 0 (predicting layers behind
            the others), the first expert of this rank, tokens of each of its experts.
        lengths: of its microbatches.
    """

    iteration: int
    num_microbatches: int
    start_ns: int = 0
    counts: tuple[int, ...] = ()
    size_bytes: int = -1
    is_late: bool = False
    exchange_ns: int = 0
    tokens: tuple[tuple[int, ...], ...] = ()
    lengths: Lengths = ()


@dataclass(frozen=True, slots=True)
class ClockSamples:
    """Readings of this rank's clock beside another rank's.

    Attributes:
        reference: global rank whose clock is the other one.
        samples: per exchange: sent here, received there, answered there, answer received here.
    """

    reference: int
    samples: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """Iterations that are missing in a file, because its disk took nothing.

    Attributes:
        first: the first of them.
        last: the last of them.
        count: how many were recorded and are lost.
    """

    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """One thing a rank did, from start to end; the columns of a row with names for numbers.

    Attributes:
        action: one of :data:`KINDS`.
        chunk: local index of the model chunk, -1 for none.
        microbatch: microbatch within the iteration, -1 for none.
        start_ns: start.
        end_ns: end, not before the start.
        iteration: number of the iteration.
        wait_ns: idle time before, spent waiting for this action to become possible.
        bytes: payload of a message; of an action what it received plus what it sent.
        in_flight_bytes: activation bytes held after it started.
        piece: part of a weight gradient.
        queue_depth: inputs that had arrived and were not taken when it started.
        peer: global rank at the other end, -1 for none.
        of: the kind of action that a wait or a message is about, empty for none.
        reason: one of :data:`REASONS`.
    """

    action: str
    chunk: int
    microbatch: int
    start_ns: int
    end_ns: int
    iteration: int
    wait_ns: int = 0
    bytes: int = 0
    in_flight_bytes: int = 0
    piece: int = 0
    queue_depth: int = 0
    peer: int = -1
    of: str = ""
    reason: str = ""

    @property
    def duration_ns(self) -> int:
        """End minus start."""
        return self.end_ns - self.start_ns
