"""Defines the records of a trace (header, iterations, spans, clock samples) and the text format.

Each rank writes one trace file. This module defines the records, the names in them, and their
encoding as lines of JSON. The recorder uses this module during training, so the module does not
open trace files or import large packages. The clock is read only to create a :class:`TraceHeader`.

``docs/reference/traces.md`` describes each kind of span. A message has one span on the sender and
one on the receiver. Both spans contain the receiver's ``of`` and ``chunk``, so that readers can
match the two.

The text format::

    {"format": "megatron-adaptive-trace", "version": 2, "columns": [...], "kinds": [...],
     "reasons": [...], "run": ..., "rank": 0, ...}                                        header
    {"begin_iteration": 7, "num_microbatches": 8, "start_ns": 812, "counts": [8, 8, 0, ...],
     "size_bytes": 1312, "lengths": [[64, 40, 21], ...], "slices": [2, 1, ...]}           marker
    {"begin_iteration": 8, ..., "exchange_ns": 91000, "tokens": [[3, 0, 511, 498], ...]}   experts
    {"begin_iteration": 9, ..., "machine": {"elapsed_ns": 310220, ...}}      machine's counters
    {"begin_iteration": 10, ..., "layers": [[0, 91000, 182000, 8], ...]}            layers' times
    {"begin_iteration": 11, ..., "collectives": [{"kind": "tensor", ...}]}           collectives
    {"begin_iteration": 12, ..., "sizes": [4096, 512, ...]}            activations of microbatches
    [0,0,3,0,5120,2210000,4096,67108864,1,-1,-1,8]                                          span
    {"after_iteration": 7, ...}                               marker before spans added later
    {"clock_samples": [[8, 93, 95, 11], ...], "reference": 0}                      clock samples
    {"missing": [8, 93, 80]}                    first, last and number of the lost iterations

The header is always the first line, because each start of a job writes new files. A span is a line
with a list of integers, one per column, without spaces. The start time of a span is relative to the
``start_ns`` of the preceding marker. A marker contains the size in bytes of the spans that follow
it, so that readers can skip iterations. On a rank with experts (MoE), the marker also contains the
load of the experts.

New kinds and reasons are appended to the lists of kinds and reasons. Readers ignore kinds, reasons,
fields and objects that they do not know, so the version changes only if the meaning of existing
data changes. Readers reject files of other versions.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from megatron.adaptive.config.input_files import parse_json, printable
from megatron.adaptive.errors import TraceError
from megatron.adaptive.schedule.action import SliceCounts, item_count, item_label, place_of
from megatron.adaptive.trace.trace_values import (
    EXPECTED,
    MAX_ITERATION,
    MAX_SIZES,
    MAX_STAGES,
    check_layers,
    number_of_microbatches,
    value_of,
)

FORMAT_NAME = "megatron-adaptive-trace"
FORMAT_VERSION = 2

KINDS = (
    "F",
    "B",
    "W",
    "wait",
    "send",
    "receive",
    "data",
    "reduce",
    "optimizer",
    "evaluate",
    "checkpoint",
    "step",
    "collective",
    "probe",
)
"""Kinds of spans. The line of a span contains the index of its kind in this list."""

DRAWN_ACTIONS = KINDS[:3]
"""Kinds of spans that represent computation. Charts of a step show only these kinds.

F is a forward pass, B a backward pass, and W a separate pass that computes weight gradients.
"""

CAUSES = ("input", "memory", "order", "group")
"""Causes of waits between two actions of a rank.

- ``input``: no input had arrived yet.
- ``memory``: an input had arrived, but its activations would have exceeded the activation cap.
- ``order``: an action was ready, but the schedule required another action to run first.
- ``group``: another rank of the tensor-parallel group was not ready. All ranks of the group run the
  same actions.
"""

COLLECTIVES = (
    "params-all-gather",
    "grads-reduce-scatter",
    "embedding-grads-all-reduce",
    "layernorm-grads-all-reduce",
    "optimizer-clip-main-grad",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "broadcast",
    "barrier",
)
"""Names of collectives in imported traces: phases of Megatron-LM, followed by basic operations."""

REASONS = (
    "",
    *CAUSES,
    "seen",
    "found",
    "hint",
    "filler",
    "overtake",
    "deepest",
    "broadest",
    "turn",
    "posted",
    "gc",
    *COLLECTIVES,
)
"""Reasons of spans, such as the cause of a wait. A span's line contains the reason's index.

- For a wait: its cause, one of :data:`CAUSES`.
- For a message: the accuracy of the arrival time. ``seen``: the receiver noticed the arrival
  immediately. ``found``: the receiver noticed the arrival only later. ``posted``: the receiver
  noticed the arrival immediately, but the transfer could not begin before the receiver waited for
  the message.
- For an action: why the run-time rule chose the action, such as ``deepest`` if the action is on the
  deepest chunk. Each rule in ``schedule/runtime_rules.py`` declares its reasons.
- For a collective: the name of the collective. The ``peer`` of the span is the lowest rank of the
  process group, or -1 if only this rank's part was recorded.
- For the kind ``optimizer``: ``gc`` if Python's garbage collector ran.
"""

COLUMNS = (
    "kind",
    "chunk",
    "microbatch",
    "piece",
    "start_ns",
    "duration_ns",
    "bytes",
    "in_flight_bytes",
    "queue_depth",
    "peer",
    "of",
    "reason",
)
"""Names of the fields in the line of a span, in the order of the line."""

PLACEMENTS = ("loop", "v")
"""Ways to assign stages to ranks: round-robin (``loop``), or down the ranks and back up (``v``)."""


Lengths: TypeAlias = tuple[tuple[int, ...], ...]
"""Row per microbatch: number of token positions, then number of tokens of each document.

Positions that belong to no document are padding. The tuple is empty if all microbatches have the
same size.
"""


class SpanRow(NamedTuple):
    """Contains a span as integers, as it is recorded and written to the file.

    Attributes:
        kind: Kind of the span, as an index into :data:`KINDS`.
        chunk: Local index of the model chunk, or -1 if there is none.
        microbatch: Index of the microbatch within the iteration, or -1 if there is none. If
            microbatches are split into slices, this is the index of the slice among the slices of
            all microbatches, except in spans of the kind ``data``.
        piece: Index of the piece if a weight-gradient pass (W) is computed in several pieces;
            otherwise 0.
        start_ns: Start time in nanoseconds on the rank's monotonic clock.
        end_ns: End time in nanoseconds on the same clock. The file contains the duration instead.
        bytes: Size in bytes of a message, or of all messages that an action received and sent.
        in_flight_bytes: Total size in bytes of the activations in memory after the start of the
            span.
        queue_depth: Number of inputs that had arrived but were still unused when the span started.
        peer: Global rank of the other side of a message, or -1 if there is none.
        of: Kind of the action that a wait or a message belongs to, as an index into :data:`KINDS`,
            or -1 if there is none.
        reason: Reason of the span, as an index into :data:`REASONS`.
    """

    kind: int
    chunk: int = -1
    microbatch: int = -1
    piece: int = 0
    start_ns: int = 0
    end_ns: int = 0
    bytes: int = 0
    in_flight_bytes: int = 0
    queue_depth: int = 0
    peer: int = -1
    of: int = -1
    reason: int = 0


def trace_file_name(rank: int) -> str:
    """Returns the name of the trace file of the global rank ``rank``."""
    return f"trace_rank_{rank:05d}.jsonl"


def _clock_id() -> str:
    """Returns the ID of the monotonic clock, which is equal in all processes with the same clock.

    The ID consists of the kernel's boot ID and the Linux time namespace.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        name = f"{name} {os.readlink('/proc/self/ns/time')}"
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """Describes a rank, the clock, the pipeline and the run, in the first line of a trace file.

    By default, the host, the process ID, the clock ID and the clock readings are taken from the
    current process.

    Attributes:
        run: ID of the run, which is the same on all ranks.
        rank: Global rank, from 0 to ``world_size - 1``.
        world_size: Number of processes in the run.
        pp_rank: Position of the rank in the pipeline.
        tp_rank: Position of the rank in the tensor-parallel group.
        dp_rank: Position of the rank in the data-parallel group.
        num_ranks: Number of ranks in each pipeline.
        num_chunks: Number of model chunks on each rank.
        num_microbatches: Number of microbatches per step at the start of the run. The marker of
            each iteration contains the actual number.
        placement: Assignment of stages to ranks and chunks, one of :data:`PLACEMENTS`. For
            ``loop``, the stage is chunk * ranks + rank.
        schedule: Name of the static schedule or of the run-time scheduling policy.
        host: Name of the machine.
        pid: Process ID of the rank.
        monotonic_ns: Value of ``time.monotonic_ns()``, read at the same moment as ``unix_ns``.
        unix_ns: Value of ``time.time_ns()``, read at the same moment as ``monotonic_ns``.
        clock: ID of the monotonic clock; ranks with the same ID share a clock. Empty in traces read
            from the older text format.
        layers: Number of transformer layers per stage, in pipeline order; empty if unknown.
        work: Expected computing time of each stage, including embedding and loss, in units of
            the computing time of a layer; empty if unknown.
        gpu_ranks: Number of ranks that use the GPU of this rank, including this rank; 1 on a CPU or
            if unknown.
        num_slices: Number of slices into which each microbatch is split along its sequence; 1 if
            microbatches are not split, or if their numbers of slices differ. If they differ, the
            marker of each iteration contains the numbers in ``slices``.
        uncounted: Names of the counters of :mod:`machine_counters` that are unavailable on the
            rank's machine.
        device: Kind of device that the rank computes on, ``cpu`` or ``cuda``; empty if unknown.
        transport: Name of the transport that carries all messages between ranks; empty if it is
            unknown or differs between pairs of ranks.
        layer_kinds: Kind of each layer, as a number. Layers of the same kind do the same work. The
            tuple is empty if all layers do the same work.
        layer_work: Expected computing time of each layer, in any unit; empty if unknown.
        order: Value of the setting ``order`` of ``Pipeline``; empty in traces of other programs.
        dealing: Value of the setting ``dealing`` of ``Pipeline``, which controls how microbatches
            are distributed over replicas; empty in traces of other programs.
        token_ranks: Number of tensor-parallel ranks that share the tokens of a sequence; 1 without
            sequence parallelism, 0 if unknown.
        frozen_stages: Number of leading stages that run no backward passes, because no gradient
            flows through them.
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
    gpu_ranks: int = 1
    num_slices: int = 1
    uncounted: tuple[str, ...] = ()
    device: str = ""
    transport: str = ""
    layer_kinds: tuple[int, ...] = ()
    layer_work: tuple[float, ...] = ()
    order: str = ""
    dealing: str = ""
    token_ranks: int = 0
    frozen_stages: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(world_size, num_ranks, num_chunks)``, which is equal in all trace files of a run."""
        return (self.world_size, self.num_ranks, self.num_chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCollectives:
    """Contains the collectives that a rank ran in one process group during one iteration.

    Attributes:
        kind: Kind of the process group, such as ``tensor``. A rank is in only one group of each
            kind.
        lowest_rank: Lowest global rank of the group.
        size: Number of ranks of the group.
        operations: Names of the collectives. See :data:`COLLECTIVES`.
        totals: Row for each operation: number of collectives, total time in ns, and total size in
            bytes.
        kept: Row for each collective with recorded times: index of the collective in the iteration
            (equal on all members), index of the operation, start and end in ns on the rank's
            monotonic clock. The file contains the start relative to the start of the iteration, and
            the duration instead of the end.
    """

    kind: str
    lowest_rank: int
    size: int
    operations: tuple[str, ...]
    totals: tuple[tuple[int, int, int], ...]
    kept: tuple[tuple[int, int, int, int], ...]

    def to_record(self, start_ns: int) -> dict[str, Any]:
        """Returns the fields as they appear in a marker of the trace file.

        Args:
            start_ns: Start of the iteration in ns on the rank's monotonic clock.
        """
        kept = [(number, of, start - start_ns, end - start) for number, of, start, end in self.kept]
        return {**asdict(self), "kept": kept}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], start_ns: int) -> GroupCollectives:
        """Creates an object from ``record``, an entry of a marker whose values have been checked.

        ``start_ns`` is the start of the iteration in ns on the rank's monotonic clock.
        """
        kept = tuple(
            (number, of, start_ns + start, start_ns + start + duration)
            for number, of, start, duration in record["kept"]
        )
        return cls(
            kind=printable(record["kind"]),
            lowest_rank=record["lowest_rank"],
            size=record["size"],
            operations=tuple(map(printable, record["operations"])),
            totals=tuple((count, time_ns, size) for count, time_ns, size in record["totals"]),
            kept=kept,
        )


@dataclass(frozen=True, slots=True)
class IterationStart:
    """Represents a marker: the line before the spans of an iteration in a trace file.

    Attributes:
        iteration: Iteration number, as in the training log.
        num_microbatches: Number of microbatches in this iteration. Varies if the batch size ramps
            up.
        start_ns: Time in ns on the rank's monotonic clock. The start times of the spans in the file
            are relative to this time.
        counts: Number of spans of each kind that follow, in the order of :data:`KINDS`.
        size_bytes: Total size in bytes of the lines of these spans, so that a reader can skip them.
        is_late: Whether the spans were recorded late, that is, after the first marker of the
            iteration was written.
        exchange_ns: Time in ns that actions waited for all-to-all exchanges of the experts' tokens.
        tokens: Load of the experts, with a row for each MoE layer: index of the layer in the model
            (multi-token prediction layers come last), index of this rank's first expert, then the
            number of tokens that each expert of this rank received.
        lengths: Sizes of the microbatches in the form of :data:`Lengths`; empty if all microbatches
            have the same size.
        slices: Number of slices of each microbatch; empty if the number in the header applies.
        sizes: Approximate size in bytes of the activations of each microbatch; empty if all
            microbatches have the same size, or if the sizes are unknown.
        frozen_stages: Number of leading stages that ran no backward passes in this iteration; -1 if
            the number in the header applies.
        machine: Counters of events that kept the rank from computing, keyed by the names in
            ``machine_counters``. A missing counter was 0 or is unavailable on this machine. The
            mapping is empty if nothing was counted.
        layers: Times of the layers, with a row for each layer: index of the layer in the model,
            total time of the forward passes in ns, total time of the backward passes in ns, and
            number of forward passes.
        layer_passes: Times of the first forward and the first backward pass of each layer, with a
            row for each pass: index of the layer in the model, 0 for a forward or 1 for a backward
            pass, start and end in ns on the rank's monotonic clock. The file contains the start
            relative to the start of the iteration, and the duration instead of the end.
        collectives: Collectives of the rank's process groups, with one entry per group.
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
    slices: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    frozen_stages: int = -1
    machine: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[tuple[int, ...], ...] = ()
    layer_passes: tuple[tuple[int, int, int, int], ...] = ()
    collectives: tuple[GroupCollectives, ...] = ()

    def count(self, kind: str) -> int:
        """Returns the number of spans of ``kind`` that follow this marker."""
        index = KINDS.index(kind)
        return self.counts[index] if index < len(self.counts) else 0


def slices_of(header: TraceHeader, marker: IterationStart) -> SliceCounts:
    """Returns the number of slices of each microbatch of an iteration.

    Args:
        header: Header of the rank's trace file.
        marker: Marker of the iteration.
    """
    counts = marker.slices
    if len(counts) != max(marker.num_microbatches, 1):
        return header.num_slices
    return counts[0] if len(set(counts)) == 1 else counts


class ClockExchange(NamedTuple):
    """Contains the four times of a request to the reference rank and of the reply.

    Attributes:
        sent_ns: Time in ns at which the request was sent, on this rank's clock.
        received_ns: Time in ns at which the request arrived, on the reference rank's clock.
        answered_ns: Time in ns at which the reply was sent, on the reference rank's clock.
        returned_ns: Time in ns at which the reply arrived, on this rank's clock.
    """

    sent_ns: int
    received_ns: int
    answered_ns: int
    returned_ns: int


@dataclass(frozen=True, slots=True)
class ClockSamples:
    """Contains samples that compare this rank's clock with the clock of the reference rank.

    Attributes:
        reference: Global rank whose clock is the reference.
        samples: Times of each request to the reference rank and of the reply.
    """

    reference: int
    samples: tuple[ClockExchange, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """Describes iterations that are missing in a trace file because writing to the disk failed.

    Attributes:
        first: Number of the first missing iteration.
        last: Number of the last missing iteration.
        count: Number of missing iterations. May be smaller than the length of the range from
            ``first`` to ``last``, because some iterations in the range may not have been traced.
    """

    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """Represents a span like :class:`SpanRow`, but with names instead of indices.

    Attributes:
        action: Kind of span, one of :data:`KINDS`, such as F or ``wait``.
        chunk: Local index of the model chunk, or -1 if there is none.
        microbatch: Index of the microbatch within the iteration, or -1 if there is none. If
            microbatches are split into slices, this is the index of the slice, as in
            :class:`SpanRow`. Use :meth:`item` to format the index for users.
        start_ns: Start time in nanoseconds.
        end_ns: End time in nanoseconds, at or after the start.
        iteration: Iteration number.
        wait_ns: Time in ns that the rank was idle before this action.
        bytes: Size in bytes of a message, or of all messages that an action received and sent.
        in_flight_bytes: Total size in bytes of the activations in memory after the start of the
            span.
        piece: Index of the piece if a weight-gradient pass (W) is computed in several pieces;
            otherwise 0.
        queue_depth: Number of inputs that had arrived but were still unused when the span started.
        peer: Global rank of the other side of a message, or -1 if there is none.
        of: Kind of action that a wait or a message belongs to; empty if there is none.
        reason: Reason of the span, one of :data:`REASONS`; empty if there is none.
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
        """Time from start to end in nanoseconds."""
        return self.end_ns - self.start_ns

    def item(self, num_slices: SliceCounts) -> str:
        """Returns the microbatch as text: ``3``, or ``3.5`` for slice 5 of microbatch 3."""
        if self.action == "data" or not is_item(self.microbatch, num_slices):
            return str(self.microbatch)
        return item_label(self.microbatch, num_slices)

    def numbers(self, num_slices: SliceCounts) -> dict[str, int]:
        """Returns the index of the microbatch and, if microbatches are split, of the slice.

        The dict has the keys ``microbatch`` and ``slice``.
        """
        if self.microbatch < 0:
            return {}
        is_whole = num_slices == 1 or self.action == "data"
        if is_whole or not is_item(self.microbatch, num_slices):
            return {"microbatch": self.microbatch}
        position = place_of(self.microbatch, num_slices)
        return {"microbatch": position.microbatch, "slice": position.part}


def is_item(number: int, num_slices: SliceCounts) -> bool:
    """Returns whether ``number`` is a valid index of a slice in an iteration.

    Damaged files may contain invalid indices.
    """
    if isinstance(num_slices, int):
        return number >= 0
    return 0 <= number < item_count(len(num_slices), num_slices)


_ADDED: dict[str, int | str] = {"gpu_ranks": 1, "num_slices": 1}
_ADDED |= dict.fromkeys(("token_ranks", "frozen_stages"), 0)
_ADDED |= dict.fromkeys(("device", "transport", "order", "dealing"), "")
"""Header fields that older files do not contain, mapped to their default values."""
_ROW = "[%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d]\n"


SLICES = "time slices of a shared GPU"
"""Note that is printed after busy and bubble times of ranks that share a GPU."""


def shared_gpu_note(gpu_ranks: int) -> str:
    """Returns a warning that the times were measured on a shared GPU.

    Args:
        gpu_ranks: Maximum number of ranks on one GPU.
    """
    return (
        f"up to {gpu_ranks} ranks share a GPU, so the times of a rank include the work of the "
        "other ranks; they do not show the performance of a pipeline with one GPU per rank"
    )


def header_line(header: TraceHeader) -> str:
    """Returns ``header`` as a line of JSON, with the newline."""
    form = {"columns": COLUMNS, "kinds": KINDS, "reasons": REASONS}
    named = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **form, **asdict(header)}
    return json.dumps(named) + "\n"


def samples_line(samples: ClockSamples) -> str:
    """Returns ``samples`` as a line of JSON, with the newline."""
    return f'{{"clock_samples": {json.dumps(samples.samples)}, "reference": {samples.reference}}}\n'


def gap_line(gap: Gap) -> str:
    """Returns ``gap`` as a line of JSON, with the newline."""
    return f'{{"missing": [{gap.first}, {gap.last}, {gap.count}]}}\n'


def block_text(marker: IterationStart, rows: Sequence[SpanRow]) -> str:
    """Returns the lines of an iteration's marker and spans, to append to the trace file.

    Args:
        marker: Marker of the iteration. The attributes ``counts`` and ``size_bytes`` are ignored,
            and computed from ``rows`` instead.
        rows: Spans of the iteration.
    """
    counts = [0] * len(KINDS)
    start_ns = marker.start_ns
    lines = []
    for kind, chunk, microbatch, piece, start, end, *others in rows:
        counts[kind] += 1
        lines.append(
            _ROW % (kind, chunk, microbatch, piece, start - start_ns, end - start, *others)
        )
    spans = "".join(lines)
    record: dict[str, Any] = {
        "after_iteration" if marker.is_late else "begin_iteration": marker.iteration,
        "num_microbatches": marker.num_microbatches,
        "start_ns": start_ns,
        "counts": counts,
        "size_bytes": len(spans),
    }
    if marker.tokens:
        record |= {"exchange_ns": marker.exchange_ns, "tokens": marker.tokens}
    if marker.lengths:
        record["lengths"] = marker.lengths
    if marker.slices:
        record["slices"] = marker.slices
    if marker.sizes:
        record["sizes"] = marker.sizes
    if marker.frozen_stages >= 0:
        record["frozen_stages"] = marker.frozen_stages
    if marker.machine:
        record["machine"] = dict(marker.machine)
    if marker.layers:
        record["layers"] = marker.layers
    if marker.layer_passes:
        record["layer_passes"] = [
            (layer, kind, start - start_ns, end - start)
            for layer, kind, start, end in marker.layer_passes
        ]
    if marker.collectives:
        record["collectives"] = [group.to_record(start_ns) for group in marker.collectives]
    return f"{json.dumps(record)}\n{spans}"


def parse_line(
    line: str | bytes, origin: object
) -> TraceHeader | IterationStart | ClockSamples | Gap | None:
    """Parses a line of a trace file that contains a JSON object.

    Lines of spans contain JSON lists, and all other lines contain JSON objects.

    Args:
        line: Text of the line, with or without the newline.
        origin: Position of the line (``file:line``) for error messages.

    Returns:
        Record in the line, or ``None`` for a kind of JSON object that this version does not know.

    Raises:
        TraceError: The line is not a JSON object, has a missing field or a field of the wrong type,
            or belongs to another version of the format.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        raise TraceError(
            f"{origin} is not valid JSON ({error}); remove this line or the damaged file"
        ) from None
    if not isinstance(record, dict):
        raise TraceError(
            f"{origin} is not a JSON object, unlike the lines of a trace file; remove the file"
        )
    if "format" in record or "version" in record:
        return _header(record, origin)
    for key in ("begin_iteration", "after_iteration"):
        if key in record:
            iteration = value_of(record, key, "int", origin)
            if not 0 <= iteration <= MAX_ITERATION:
                raise TraceError(
                    f"{origin}: field {key!r} must be from 0 to {MAX_ITERATION:,}, got {iteration};"
                    " remove this line or the damaged file"
                )
            start_ns = value_of(record, "start_ns", "int", origin)
            groups = value_of(record, "collectives", "collectives", origin, [])
            return IterationStart(
                iteration=iteration,
                num_microbatches=number_of_microbatches(record, origin),
                start_ns=start_ns,
                counts=tuple(value_of(record, "counts", "counts", origin, [])),
                size_bytes=value_of(record, "size_bytes", "int", origin),
                is_late=key == "after_iteration",
                exchange_ns=value_of(record, "exchange_ns", "int", origin, 0),
                tokens=tuple(map(tuple, value_of(record, "tokens", "tokens", origin, []))),
                lengths=tuple(map(tuple, value_of(record, "lengths", "lengths", origin, []))),
                slices=tuple(value_of(record, "slices", "slices", origin, [])),
                sizes=tuple(value_of(record, "sizes", "counts", origin, [])),
                frozen_stages=value_of(record, "frozen_stages", "int", origin, -1),
                machine=value_of(record, "machine", "counters", origin, {}),
                layers=tuple(map(tuple, value_of(record, "layers", "layers", origin, []))),
                layer_passes=tuple(
                    (layer, kind, start_ns + start, start_ns + start + duration)
                    for layer, kind, start, duration in value_of(
                        record, "layer_passes", "passes", origin, []
                    )
                ),
                collectives=tuple(GroupCollectives.from_record(of, start_ns) for of in groups),
            )
    if "clock_samples" in record:
        samples = value_of(record, "clock_samples", "samples", origin)
        reference = value_of(record, "reference", "int", origin)
        return ClockSamples(reference, tuple(ClockExchange(*sample) for sample in samples))
    if "missing" in record:
        numbers = value_of(record, "missing", "counts", origin)
        if len(numbers) != 3:
            raise TraceError(
                f"{origin}: field 'missing' must be a list of three numbers, got {numbers}"
            )
        return Gap(*numbers)
    return None


def _header(record: Mapping[str, Any], origin: object) -> TraceHeader:
    name = record.get("format")
    version = record.get("version")
    if name != FORMAT_NAME:
        raise TraceError(
            f"{origin}: format must be {FORMAT_NAME!r}, got {name!r}; this is not a trace file"
        )
    if type(version) is not int or version < 1:
        raise TraceError(f"{origin}: version must be {FORMAT_VERSION}, got {version!r}")
    if version != FORMAT_VERSION:
        remedy = "use a newer version" if version > FORMAT_VERSION else "record the run again"
        raise TraceError(
            f"{origin} has format version {version}, but this program reads version "
            f"{FORMAT_VERSION}; {remedy}"
        )
    values = {
        spec.name: value_of(record, spec.name, spec.type, origin)
        for spec in fields(TraceHeader)
        if spec.type in EXPECTED and spec.name not in _ADDED
    }
    if values["placement"] not in PLACEMENTS:
        raise TraceError(
            f"{origin}: placement is {values['placement']!r}, but this program supports only "
            f"{' and '.join(PLACEMENTS)}; use a newer version"
        )
    for name, default in _ADDED.items():
        kind = "int" if isinstance(default, int) else "str"
        values[name] = value_of(record, name, kind, origin, default)
    values["layers"] = tuple(map(int, value_of(record, "layers", "numbers", origin, [])))
    values["work"] = tuple(value_of(record, "work", "numbers", origin, []))
    kinds = value_of(record, "layer_kinds", "numbers", origin, [])
    values["layer_kinds"] = tuple(map(int, kinds))
    values["layer_work"] = tuple(value_of(record, "layer_work", "numbers", origin, []))
    values["uncounted"] = tuple(value_of(record, "uncounted", "words", origin, []))
    columns = value_of(record, "columns", "words", origin)
    if tuple(columns) != COLUMNS:
        raise TraceError(
            f"{origin}: columns are {reprlib.repr(columns)}, but this program supports only "
            f"{', '.join(COLUMNS)}; use a newer version"
        )
    header = TraceHeader(**values)
    for size, most in MAX_SIZES.items():
        if not 1 <= getattr(header, size) <= most:
            raise TraceError(
                f"{origin}: {size} must be from 1 to {most:,}, got {getattr(header, size)}"
            )
    if header.num_ranks * header.num_chunks > MAX_STAGES:
        raise TraceError(f"{origin}: num_ranks * num_chunks must be at most {MAX_STAGES:,}")
    check_layers(values, origin)
    for position, limit in (("rank", header.world_size), ("pp_rank", header.num_ranks)):
        if not 0 <= getattr(header, position) < limit:
            raise TraceError(
                f"{origin}: {position} must be from 0 to {limit - 1}, got "
                f"{getattr(header, position)}"
            )
    return header
