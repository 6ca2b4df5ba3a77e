"""Defines the records of a trace (header, iterations, spans, clock samples) and their text form.

A trace file belongs to one rank. This module owns the vocabulary, the records and how each stands
in a line of JSON. It reads no clock except for a new :class:`TraceHeader`, opens no trace file and
imports nothing heavy: the recorder writes with it.

``docs/traces.md`` says what is recorded of each kind of span. ``of`` and ``chunk`` of a message are
those of the receiving rank, so that both ends name it alike.

The text form::

    {"format": "megatron-adaptive-trace", "version": 2, "columns": [...], "kinds": [...],
     "reasons": [...], "run": ..., "rank": 0, ...}                                        header
    {"begin_iteration": 7, "num_microbatches": 8, "start_ns": 812, "counts": [8, 8, 0, ...],
     "size_bytes": 1312, "lengths": [[64, 40, 21], ...]}                                  marker
    {"begin_iteration": 8, ..., "exchange_ns": 91000, "tokens": [[3, 0, 511, 498], ...]}   experts
    [0,0,3,0,5120,2210000,4096,67108864,1,-1,-1,8]                                          span
    {"after_iteration": 7, ...}                                     marker of more of its spans
    {"clock_samples": [[8, 93, 95, 11], ...], "reference": 0}                      clock samples
    {"missing": [8, 93, 80]}               first and last of iterations that are lost, their number

The header comes first: a file is of one start of a job. A span's line holds whole numbers only, one
per column, without spaces; its start counts from the ``start_ns`` of the marker above it. A marker
says how many bytes of spans follow, so that a reader passes over what it was not asked for; a rank
with experts adds what they did. New kinds and reasons come behind the known ones. Readers ignore
them where they do not know them, fields and objects likewise, so the version only rises when an old
one changes its meaning; a file of another version is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

from megatron.adaptive.config.input_files import parse_json, printable
from megatron.adaptive.errors import TraceError

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

PLACEMENTS = ("loop", "v")
"""Layouts of stages on ranks and chunks, see ``schedule.stage_placement``."""

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
        run: id of the run; equal on all its ranks.
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
        gpu_ranks: Number of ranks that compute on this rank's GPU, itself included; 1 also on a
            CPU, and if the file does not say it.
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
        counts: how many spans of each kind follow.
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

    def count(self, kind: str) -> int:
        """Returns how many spans of a kind follow."""
        place = KINDS.index(kind)
        return self.counts[place] if place < len(self.counts) else 0


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


_MAX_SIZES = {
    "world_size": 1 << 17,
    "num_ranks": 1 << 14,
    "num_chunks": 1 << 10,
    "num_microbatches": 1 << 20,
}
"""Of a run that a header describes: readers go over all of its ranks, present or not."""
_MAX_STAGES = 1 << 16
_ROW = "[%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d]\n"


SLICES = "time slices of a shared GPU"
"""Words beside busy and bubble of ranks that share a GPU, wherever they are shown."""


def shared_gpu_note(gpu_ranks: int) -> str:
    """Returns a line that warns a reader of times measured on a shared GPU.

    Args:
        gpu_ranks: Largest number of ranks on one GPU.
    """
    return (
        f"up to {gpu_ranks} ranks share a GPU: busy, wait and bubble are {SLICES}, and say nothing "
        "about a pipeline with a GPU for each rank"
    )


def header_line(header: TraceHeader) -> str:
    """Returns the header as one line of JSON with its line end."""
    form = {"columns": COLUMNS, "kinds": KINDS, "reasons": REASONS}
    named = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **form, **asdict(header)}
    return json.dumps(named) + "\n"


def samples_line(samples: ClockSamples) -> str:
    """Returns clock samples as one line of JSON with its line end."""
    return f'{{"clock_samples": {json.dumps(samples.samples)}, "reference": {samples.reference}}}\n'


def gap_line(gap: Gap) -> str:
    """Returns what is said of missing iterations as one line of JSON with its line end."""
    return f'{{"missing": [{gap.first}, {gap.last}, {gap.count}]}}\n'


def block_text(marker: IterationStart, rows: Sequence[Row]) -> str:
    """Returns a marker and the spans below it, ready to be appended.

    Args:
        marker: of the iteration; ``counts`` and ``size_bytes`` are those of the rows.
        rows: the spans.
    """
    counts, start_ns = [0] * len(KINDS), marker.start_ns
    lines = []
    for kind, chunk, microbatch, piece, start, end, size, held, depth, peer, of, reason in rows:
        counts[kind] += 1
        lines.append(
            _ROW
            % (
                *(kind, chunk, microbatch, piece, start - start_ns, end - start),
                *(size, held, depth, peer, of, reason),
            )
        )
    spans = "".join(lines)
    said: dict[str, Any] = {
        "after_iteration" if marker.is_late else "begin_iteration": marker.iteration,
        "num_microbatches": marker.num_microbatches,
        "start_ns": start_ns,
        "counts": counts,
        "size_bytes": len(spans),
    }
    if marker.tokens:
        said |= {"exchange_ns": marker.exchange_ns, "tokens": marker.tokens}
    if marker.lengths:
        said["lengths"] = marker.lengths
    return f"{json.dumps(said)}\n{spans}"


def parse_line(
    line: str | bytes, origin: object
) -> TraceHeader | IterationStart | ClockSamples | Gap | None:
    """Reads a line that is an object: anything but a span.

    Args:
        line: the line, with or without its end.
        origin: where it stands (``file:line``), shown in the message of an error.

    Returns:
        The record; ``None`` for an object of a kind this version does not know.

    Raises:
        TraceError: the line is no JSON object, lacks a field, has one of the wrong type, or
            belongs to another version of the format.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        raise TraceError(
            f"{origin} is not a line of JSON ({error}); the file is damaged, remove it or that line"
        ) from None
    if not isinstance(record, dict):
        raise TraceError(f"{origin} is not a JSON object; this is no trace file")
    if "format" in record or "version" in record:
        return _header(record, origin)
    for word in ("begin_iteration", "after_iteration"):
        if word in record:
            iteration = _value(record, word, "int", origin)
            if iteration < 0:
                raise TraceError(
                    f"{origin}: field {word!r} is {iteration}, expected a number from 0; the file"
                    " is damaged, remove it or that line"
                )
            return IterationStart(
                iteration=iteration,
                num_microbatches=_value(record, "num_microbatches", "int", origin),
                start_ns=_value(record, "start_ns", "int", origin),
                counts=tuple(_value(record, "counts", "counts", origin, [])),
                size_bytes=_value(record, "size_bytes", "int", origin),
                is_late=word == "after_iteration",
                exchange_ns=_value(record, "exchange_ns", "int", origin, 0),
                tokens=tuple(map(tuple, _value(record, "tokens", "tokens", origin, []))),
                lengths=tuple(map(tuple, _value(record, "lengths", "lengths", origin, []))),
            )
    if "clock_samples" in record:
        samples = _value(record, "clock_samples", "samples", origin)
        reference = _value(record, "reference", "int", origin)
        return ClockSamples(reference, tuple(map(tuple, samples)))
    if "missing" in record:
        numbers = _value(record, "missing", "counts", origin)
        if len(numbers) != 3:
            raise TraceError(f"{origin}: field 'missing' is {numbers}, expected three numbers")
        return Gap(*numbers)
    return None


def _header(record: Mapping[str, Any], origin: object) -> TraceHeader:
    name, version = record.get("format"), record.get("version")
    if name != FORMAT_NAME:
        raise TraceError(f"{origin} has format {name!r}, expected {FORMAT_NAME!r}; no trace file")
    if type(version) is not int or version < 1:
        raise TraceError(f"{origin} has version {version!r}, expected {FORMAT_VERSION}")
    if version != FORMAT_VERSION:
        remedy = "use a newer version of it" if version > FORMAT_VERSION else "record it again"
        raise TraceError(
            f"{origin} has format version {version}, this program reads version "
            f"{FORMAT_VERSION}; {remedy}"
        )
    values = {
        one.name: _value(record, one.name, one.type, origin)
        for one in fields(TraceHeader)
        if one.type in _EXPECTED and one.name != "gpu_ranks"
    }
    if values["placement"] not in PLACEMENTS:
        raise TraceError(
            f"{origin}: placement is {values['placement']!r}, this program knows "
            f"{' and '.join(PLACEMENTS)}; use a newer version of it"
        )
    values["gpu_ranks"] = _value(record, "gpu_ranks", "int", origin, 1)
    values["layers"] = tuple(map(int, _value(record, "layers", "numbers", origin, [])))
    values["work"] = tuple(_value(record, "work", "numbers", origin, []))
    columns = _value(record, "columns", "words", origin)
    if tuple(columns) != COLUMNS:
        raise TraceError(
            f"{origin}: columns are {reprlib.repr(columns)}, this program knows "
            f"{', '.join(COLUMNS)}; use a newer version of it"
        )
    header = TraceHeader(**values)
    for size, most in _MAX_SIZES.items():
        if not 1 <= getattr(header, size) <= most:
            raise TraceError(f"{origin}: {size} is {getattr(header, size)}, expected 1 to {most:,}")
    if header.num_ranks * header.num_chunks > _MAX_STAGES:
        raise TraceError(f"{origin}: num_ranks times num_chunks is more than {_MAX_STAGES:,}")
    for position, limit in (("rank", header.world_size), ("pp_rank", header.num_ranks)):
        if not 0 <= getattr(header, position) < limit:
            raise TraceError(
                f"{origin}: {position} is {getattr(header, position)}, expected 0..{limit - 1}"
            )
    return header


def _is_list(value: Any, kind: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(kind, value))


def _is_int(value: Any) -> bool:
    return type(value) is int


_EXPECTED: dict[Any, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_int, "a whole number"),
    "str": (lambda value: isinstance(value, str), "text"),
    "words": (lambda value: _is_list(value, lambda word: isinstance(word, str)), "a list of words"),
    "counts": (lambda value: _is_list(value, _is_int), "whole numbers"),
    "numbers": (
        lambda value: _is_list(value, lambda n: type(n) in (int, float) and n >= 0),
        "numbers from 0",
    ),
    "lengths": (
        lambda value: _is_list(value, lambda one: bool(one) and _is_list(one, _is_int)),
        "lists of whole numbers, none empty",
    ),
    "samples": (
        lambda value: _is_list(value, lambda one: _is_list(one, _is_int) and len(one) == 4),
        "lists of four whole numbers",
    ),
    "tokens": (
        lambda value: _is_list(
            value,
            lambda one: _is_list(one, lambda n: _is_int(n) and 0 <= n < 1 << 53) and len(one) > 2,
        ),
        "lists of three whole numbers from 0 at least",
    ),
}
"""By kind of field: what is one, and the words for it."""


def _value(
    record: Mapping[str, Any], name: str, kind: Any, origin: object, default: Any = None
) -> Any:
    """Returns a field of a record, which must be of a kind of :data:`_EXPECTED`."""
    value = record.get(name, default)
    is_sound, expected = _EXPECTED[kind]
    if not is_sound(value):
        shown = reprlib.repr(value)
        raise TraceError(f"{origin}: field {name!r} is {shown}, expected {expected}")
    # All views show them, among them sheets, which cannot hold control characters.
    return printable(value) if isinstance(value, str) else value
