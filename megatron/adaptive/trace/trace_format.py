"""Defines the records of a trace (header, iterations, spans, clock samples) and their text form.

A trace file belongs to one rank. This module defines the names, the records and their form as lines
of JSON. It neither opens trace files nor imports large packages, because the recorder uses it
during training. It reads the clock only to make a new :class:`TraceHeader`.

``docs/reference/traces.md`` describes the contents of each kind of span. The sender's and the
receiver's span of a message have the same ``of`` and ``chunk`` (the receiver's), so that a reader
can match them.

The text form::

    {"format": "megatron-adaptive-trace", "version": 2, "columns": [...], "kinds": [...],
     "reasons": [...], "run": ..., "rank": 0, ...}                                        header
    {"begin_iteration": 7, "num_microbatches": 8, "start_ns": 812, "counts": [8, 8, 0, ...],
     "size_bytes": 1312, "lengths": [[64, 40, 21], ...], "slices": [2, 1, ...]}           marker
    {"begin_iteration": 8, ..., "exchange_ns": 91000, "tokens": [[3, 0, 511, 498], ...]}   experts
    {"begin_iteration": 9, ..., "machine": {"elapsed_ns": 310220, ...}}      machine's counters
    {"begin_iteration": 10, ..., "layers": [[0, 91000, 182000, 8], ...]}            layers' times
    {"begin_iteration": 11, ..., "collectives": [{"kind": "tensor", ...}]}           collectives
    [0,0,3,0,5120,2210000,4096,67108864,1,-1,-1,8]                                          span
    {"after_iteration": 7, ...}                               marker of late spans of iteration 7
    {"clock_samples": [[8, 93, 95, 11], ...], "reference": 0}                      clock samples
    {"missing": [8, 93, 80]}                    first, last and number of the lost iterations

The header comes first, because a file belongs to one start of a job. A span's line is a list of
integers, one per column, without spaces. The start of a span is relative to the ``start_ns`` of the
marker above it. A marker contains the size in bytes of the spans that follow, so that a reader can
skip iterations. On a rank with experts (MoE), the marker also has the experts' load.

New kinds and reasons are added at the end of their lists. Readers ignore kinds, reasons, fields and
objects that they do not know. So the version changes only if existing data change their meaning;
readers reject files of other versions.
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
"""Kinds of span. A span's line contains the kind's index in this list."""

DRAWN_ACTIONS = KINDS[:3]
"""Kinds of span that are computation; charts of a step draw only these.

F is a forward pass, B a backward pass, W a separate pass that computes weight gradients.
"""

CAUSES = ("input", "memory", "order", "group")
"""Causes of a wait between two actions of a rank.

- ``input``: no input had arrived.
- ``memory``: an input had arrived, but its activations would have exceeded the memory limit (cap).
- ``order``: an action was ready, but the schedule's fixed order required another action first.
- ``group``: another rank of the tensor-parallel group, which runs the same actions, was not ready.
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
"""Names of collectives in imported traces: phases of Megatron-LM first, then plain operations."""

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
"""Why a span occurred, such as what a rank waited for. A span's line has an index into this list.

- Wait: the cause, one of :data:`CAUSES`.
- Message: how exact the arrival time is. ``seen``: the receiver noticed the arrival at once.
  ``found``: it noticed the arrival only later. ``posted``: it noticed the arrival at once, but the
  transfer could not begin before the receiver waited for the message.
- Action: rule by which the run-time scheduling policy chose it (names of ``schedule.policy``).
- Collective: its name. The span's peer is the lowest rank of the collective's group, -1 if only
  this rank's part was recorded.
- ``optimizer``: ``gc`` for Python's garbage collection.
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
"""Names of the numbers in a span's line, in their order."""

PLACEMENTS = ("loop", "v")
"""Ways to assign stages to ranks: round-robin (``loop``), or down the ranks and back up (``v``)."""


Lengths: TypeAlias = tuple[tuple[int, ...], ...]
"""For each microbatch of a rank: number of token positions, then number of tokens per document.

Positions without a token are padding. Empty if all microbatches have the same size.
"""


class SpanRow(NamedTuple):
    """Holds a span as integers, in the form in which it is recorded and written to the file.

    Attributes:
        kind: Index of the kind of span in :data:`KINDS`.
        chunk: Local index of the model chunk, -1 for none.
        microbatch: Index of the microbatch within the iteration, -1 for none. If microbatches are
            cut into slices: index of the slice, counted over all microbatches of the iteration.
            Spans of kind ``data`` always have the index of the microbatch.
        piece: Index of the piece if an action W is computed in several pieces; otherwise 0.
        start_ns: Start time in nanoseconds on the rank's monotonic clock.
        end_ns: End time in nanoseconds on the same clock; the file stores the duration instead.
        bytes: Size of a message in bytes; for an action, the messages received plus those sent.
        in_flight_bytes: Size in bytes of all activations held after the span started.
        queue_depth: Number of inputs that had arrived but were still unused when the span started.
        peer: Global rank on the other side of a message, -1 for none.
        of: Index of the kind of action that a wait or a message belongs to, -1 for none.
        reason: Index of the reason in :data:`REASONS`.
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
    """Returns the name of the trace file of a global rank."""
    return f"trace_rank_{rank:05d}.jsonl"


def _clock_id() -> str:
    """Returns an id of the machine's monotonic clock, equal in all processes that share the clock.

    The id consists of the kernel's boot id and the Linux time namespace.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        name = f"{name} {os.readlink('/proc/self/ns/time')}"
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """Describes a rank and its clock, its pipeline's size, and the run; first line of a trace file.

    Host, process id, clock id and clock readings default to those of the current process.

    Attributes:
        run: Id of the run, equal on all ranks of the run.
        rank: Global rank, from 0 to ``world_size - 1``.
        world_size: Number of processes of the run.
        pp_rank: Position of the rank in the pipeline.
        tp_rank: Position of the rank in the tensor-parallel group.
        dp_rank: Position of the rank in the data-parallel group.
        num_ranks: Number of ranks in each pipeline.
        num_chunks: Number of model chunks on each rank.
        num_microbatches: Number of microbatches per step at the start of the run. Each iteration's
            marker has the number of that iteration.
        placement: Assignment of stages to ranks and chunks, one of :data:`PLACEMENTS`. For
            ``loop``, the stage is chunk * ranks + rank.
        schedule: Name of the static schedule or of the run-time scheduling policy.
        host: Name of the machine.
        pid: Id of the rank's process.
        monotonic_ns: Value of ``time.monotonic_ns()``, read at the same moment as ``unix_ns``.
        unix_ns: Value of ``time.time_ns()``, read at the same moment as ``monotonic_ns``.
        clock: Id of the monotonic clock; ranks with the same id share a clock. Empty in traces
            read from the older text format.
        layers: Number of transformer layers per stage, in pipeline order; empty if unknown.
        work: Expected computing time of each stage, including embedding and loss, expressed as an
            equivalent number of layers; empty if unknown.
        gpu_ranks: Number of ranks, including this one, that share this rank's GPU. 1 on a CPU, or
            if unknown.
        num_slices: Number of slices into which each microbatch is cut along its sequence; 1 for
            whole microbatches, and if numbers differ. Each iteration's marker then has ``slices``.
        uncounted: Names of the counters of :mod:`machine_counters` that the rank's machine lacks.
        device: Kind of device that the rank computes on, ``cpu`` or ``cuda``; empty if unknown.
        transport: Name of the transport of all messages between ranks; empty if it is unknown or
            differs between pairs of ranks.
        layer_kinds: For each layer, the number of its kind. Layers of the same kind do the same
            work. Empty if all layers do the same work.
        layer_work: Expected computing time of each layer, in any unit; empty if unknown.
        order: Setting ``order`` of a ``Pipeline``; empty in traces of other programs.
        dealing: Setting ``dealing`` of a ``Pipeline``, which distributes microbatches over
            replicas; empty in traces of other programs.
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

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(world_size, num_ranks, num_chunks)``, equal in all trace files of a run."""
        return (self.world_size, self.num_ranks, self.num_chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCollectives:
    """Holds the collectives that a rank ran in one process group during one iteration.

    Attributes:
        kind: Kind of the process group, such as ``tensor``. Groups of the same kind have no rank
            in common.
        lowest_rank: Lowest global rank of the group.
        size: Number of ranks of the group.
        operations: Names of the collectives, see :data:`COLLECTIVES`.
        totals: A row per operation: number of its collectives, their total time in ns, and their
            total size in bytes.
        kept: A row per collective whose times are kept: number of the collective in the iteration
            (from 0, equal on all members), index of the operation, start and end in ns on the
            rank's monotonic clock. The file has start and duration, relative to the iteration's
            start.
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
            start_ns: Start of the iteration on the rank's monotonic clock.
        """
        kept = [(number, of, start - start_ns, end - start) for number, of, start, end in self.kept]
        return {**asdict(self), "kept": kept}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], start_ns: int) -> GroupCollectives:
        """Makes the object from the group's entry in a marker, whose types were checked before."""
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
    """Describes a marker: the line before an iteration's spans in the file.

    Attributes:
        iteration: Iteration number, as in the training log.
        num_microbatches: Number of microbatches in this iteration; it varies if the batch size
            ramps up.
        start_ns: Time on the rank's monotonic clock from which the starts of the spans are counted.
        counts: Number of spans of each kind that follow, in the order of :data:`KINDS`.
        size_bytes: Total size in bytes of the spans' lines, so that a reader can skip them.
        is_late: Whether the spans were recorded after the iteration's own marker had been written.
        exchange_ns: Time in ns that actions waited for all-to-all exchanges of experts' tokens.
        tokens: Load of the experts, a row per MoE layer: index of the layer in the model (layers of
            multi-token prediction come last), index of this rank's first expert, then the number of
            tokens that each expert of this rank received.
        lengths: Sizes of the microbatches, see :data:`Lengths`; empty if all microbatches have the
            same size.
        slices: Number of slices of each microbatch, if microbatches may have different numbers;
            empty if the header's ``num_slices`` applies.
        machine: Counters of causes that kept the rank from computing, by the names in
            ``machine_counters``. A missing counter is 0, or this machine does not have the counter.
            Empty if nothing was counted.
        layers: Times of the layers, a row per layer: index of the layer in the model, time in ns of
            all forward passes, of all backward passes, and number of forward passes.
        layer_passes: First passes of layers in the iteration, a row each: index of the layer in the
            model, 0 for a forward or 1 for a backward pass, start and end in ns on the rank's
            monotonic clock. The file has start and duration, relative to the iteration's start.
        collectives: Collectives of the rank's process groups, an entry per group.
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
    machine: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[tuple[int, ...], ...] = ()
    layer_passes: tuple[tuple[int, int, int, int], ...] = ()
    collectives: tuple[GroupCollectives, ...] = ()

    def count(self, kind: str) -> int:
        """Returns the number of spans of a kind that follow this marker."""
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
    """Holds the four times of one request to the reference rank and its answer.

    Attributes:
        sent_ns: Time in ns at which the request was sent, on this rank's clock.
        received_ns: Time in ns at which the request arrived, on the reference rank's clock.
        answered_ns: Time in ns at which the answer was sent, on the reference rank's clock.
        returned_ns: Time in ns at which the answer arrived, on this rank's clock.
    """

    sent_ns: int
    received_ns: int
    answered_ns: int
    returned_ns: int


@dataclass(frozen=True, slots=True)
class ClockSamples:
    """Compares this rank's clock with the clock of a reference rank.

    Attributes:
        reference: Global rank whose clock is the reference.
        samples: Times of each request to the reference rank and of its answer.
    """

    reference: int
    samples: tuple[ClockExchange, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """Describes iterations that are missing in a trace file because writing to the disk failed.

    Attributes:
        first: Number of the first missing iteration.
        last: Number of the last missing iteration.
        count: Number of missing iterations. The range from ``first`` to ``last`` may be longer,
            because it may contain iterations that were not traced.
    """

    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """Describes one activity of a rank, with names where ``SpanRow`` has indices.

    Attributes:
        action: Kind of span, one of :data:`KINDS`, such as F or ``wait``.
        chunk: Local index of the model chunk, -1 for none.
        microbatch: Index of the microbatch within the iteration, -1 for none. With slices, an index
            as in :class:`SpanRow`; :meth:`item` returns it as people read it.
        start_ns: Start time in nanoseconds.
        end_ns: End time in nanoseconds, not before the start.
        iteration: Iteration number.
        wait_ns: Time in ns that the rank was idle before this action.
        bytes: Size of a message in bytes; for an action, the messages received plus those sent.
        in_flight_bytes: Size in bytes of all activations held after the span started.
        piece: Index of the piece if an action W is computed in several pieces; otherwise 0.
        queue_depth: Number of inputs that had arrived but were still unused when the span started.
        peer: Global rank on the other side of a message, -1 for none.
        of: Kind of action that a wait or a message belongs to, empty for none.
        reason: Reason of the span, one of :data:`REASONS`; empty for none.
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
        """Returns the microbatch as people read it: ``3``, or ``3.5`` for its slice 5."""
        if self.action == "data" or not is_item(self.microbatch, num_slices):
            return str(self.microbatch)
        return item_label(self.microbatch, num_slices)

    def numbers(self, num_slices: SliceCounts) -> dict[str, int]:
        """Returns the microbatch, and its slice if microbatches are cut; empty for none."""
        if self.microbatch < 0:
            return {}
        is_whole = num_slices == 1 or self.action == "data"
        if is_whole or not is_item(self.microbatch, num_slices):
            return {"microbatch": self.microbatch}
        position = place_of(self.microbatch, num_slices)
        return {"microbatch": position.microbatch, "slice": position.part}


def is_item(number: int, num_slices: SliceCounts) -> bool:
    """Returns whether a number is the index of a slice, as in ``SpanRow.microbatch``.

    Damaged files may contain other numbers.
    """
    if isinstance(num_slices, int):
        return number >= 0
    return 0 <= number < item_count(len(num_slices), num_slices)


_ADDED: dict[str, int | str] = {"gpu_ranks": 1, "num_slices": 1}
_ADDED |= dict.fromkeys(("device", "transport", "order", "dealing"), "")
"""Maps header fields that older files lack to the values that readers assume for them."""
_ROW = "[%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d]\n"


SLICES = "time slices of a shared GPU"
"""Remark printed next to the busy and bubble times of ranks that share a GPU."""


def shared_gpu_note(gpu_ranks: int) -> str:
    """Returns a warning that the times were measured on a shared GPU.

    Args:
        gpu_ranks: Maximum number of ranks on one GPU.
    """
    return (
        f"up to {gpu_ranks} ranks share a GPU: busy, wait and bubble are {SLICES}, and say nothing "
        "about a pipeline with a GPU for each rank"
    )


def header_line(header: TraceHeader) -> str:
    """Formats a header as a line of JSON, with the newline."""
    form = {"columns": COLUMNS, "kinds": KINDS, "reasons": REASONS}
    named = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **form, **asdict(header)}
    return json.dumps(named) + "\n"


def samples_line(samples: ClockSamples) -> str:
    """Formats clock samples as a line of JSON, with the newline."""
    return f'{{"clock_samples": {json.dumps(samples.samples)}, "reference": {samples.reference}}}\n'


def gap_line(gap: Gap) -> str:
    """Formats the record of missing iterations as a line of JSON, with the newline."""
    return f'{{"missing": [{gap.first}, {gap.last}, {gap.count}]}}\n'


def block_text(marker: IterationStart, rows: Sequence[SpanRow]) -> str:
    """Formats a marker and its spans as lines to append to the trace file.

    Args:
        marker: Marker of the iteration. Its ``counts`` and ``size_bytes`` are ignored, because they
            are computed from ``rows``.
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
    """Parses a line of a trace file that contains a JSON object (any line except spans).

    Args:
        line: Text of the line, with or without the newline.
        origin: Position of the line (``file:line``) for error messages.

    Returns:
        Record that the line contains; ``None`` for a JSON object that this version does not know.

    Raises:
        TraceError: The line is not a JSON object, lacks a field, has a field of the wrong type, or
            belongs to another version of the format.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        raise TraceError(
            f"{origin} is not a line of JSON ({error}); remove the damaged file or this line"
        ) from None
    if not isinstance(record, dict):
        raise TraceError(f"{origin} is not a JSON object; this is not a trace file")
    if "format" in record or "version" in record:
        return _header(record, origin)
    for key in ("begin_iteration", "after_iteration"):
        if key in record:
            iteration = value_of(record, key, "int", origin)
            if not 0 <= iteration <= MAX_ITERATION:
                raise TraceError(
                    f"{origin}: field {key!r} must be from 0 to {MAX_ITERATION:,}, got {iteration};"
                    " remove the damaged file or this line"
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
            raise TraceError(f"{origin}: field 'missing' must be three numbers, got {numbers}")
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
        remedy = "use a newer version of it" if version > FORMAT_VERSION else "record it again"
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
            f"{origin}: placement is {values['placement']!r}, but this program knows only "
            f"{' and '.join(PLACEMENTS)}; use a newer version of it"
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
            f"{origin}: columns are {reprlib.repr(columns)}, but this program knows only "
            f"{', '.join(COLUMNS)}; use a newer version of it"
        )
    header = TraceHeader(**values)
    for size, most in MAX_SIZES.items():
        if not 1 <= getattr(header, size) <= most:
            raise TraceError(
                f"{origin}: {size} must be from 1 to {most:,}, got {getattr(header, size)}"
            )
    if header.num_ranks * header.num_chunks > MAX_STAGES:
        raise TraceError(f"{origin}: num_ranks times num_chunks must be at most {MAX_STAGES:,}")
    check_layers(values, origin)
    for position, limit in (("rank", header.world_size), ("pp_rank", header.num_ranks)):
        if not 0 <= getattr(header, position) < limit:
            raise TraceError(
                f"{origin}: {position} must be from 0 to {limit - 1}, got "
                f"{getattr(header, position)}"
            )
    return header
