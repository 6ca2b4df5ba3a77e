"""The lines of a trace file and their JSON form.

A trace file belongs to one rank. Each line is one JSON object::

    {"format": "megatron-adaptive-trace", "version": 1, "run": ..., "rank": 0, ...}   header
    {"begin_iteration": 7, "num_microbatches": 8}                                     marker
    {"action": "F", "chunk": 0, "microbatch": 3, "start_ns": ..., "end_ns": ..., ...}  span

The header comes first; it comes again where a resumed run went on in the same file. Readers
ignore fields they do not know, so a version only rises when an old field changes its meaning.
This module owns the text; it reads no clock except in :meth:`TraceHeader.create` and opens no
file.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron.adaptive.errors import TraceError

__all__ = [
    "DRAWN_ACTIONS",
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "IterationStart",
    "Span",
    "TraceHeader",
    "parse_line",
    "trace_file_name",
]

FORMAT_NAME = "megatron-adaptive-trace"
FORMAT_VERSION = 1

DRAWN_ACTIONS = ("F", "B", "W")
"""The kinds of span that the charts draw; every other kind is skipped by them."""


def trace_file_name(rank: int) -> str:
    """The name of the trace file of a global rank."""
    return f"trace_rank_{rank:05d}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """Who wrote a trace file, the shape of its pipeline, and how its clock relates to others.

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
    """

    run: str
    rank: int
    world_size: int
    pp_rank: int
    tp_rank: int
    dp_rank: int
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    placement: str
    schedule: str
    host: str
    pid: int
    monotonic_ns: int
    unix_ns: int

    @classmethod
    def create(
        cls,
        *,
        run: str,
        rank: int,
        world_size: int,
        pp_rank: int,
        num_ranks: int,
        num_chunks: int,
        num_microbatches: int,
        schedule: str,
        tp_rank: int = 0,
        dp_rank: int = 0,
        placement: str = "loop",
    ) -> TraceHeader:
        """A header of this process: host, pid and the pair of clocks are read here."""
        return cls(
            run=run,
            rank=rank,
            world_size=world_size,
            pp_rank=pp_rank,
            tp_rank=tp_rank,
            dp_rank=dp_rank,
            num_ranks=num_ranks,
            num_chunks=num_chunks,
            num_microbatches=num_microbatches,
            placement=placement,
            schedule=schedule,
            host=socket.gethostname(),
            pid=os.getpid(),
            monotonic_ns=time.monotonic_ns(),
            unix_ns=time.time_ns(),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(world_size, num_ranks, num_chunks)``: what all files of a folder agree on."""
        return (self.world_size, self.num_ranks, self.num_chunks)

    def to_line(self) -> str:
        """The header as one line of JSON, without the line end."""
        return json.dumps({"format": FORMAT_NAME, "version": FORMAT_VERSION, **asdict(self)})


@dataclass(frozen=True, slots=True)
class IterationStart:
    """The marker before the spans of an iteration.

    Attributes:
        iteration: number of the iteration, as in the training log.
        num_microbatches: microbatches of this iteration (they change while the batch ramps up).
    """

    iteration: int
    num_microbatches: int

    def to_line(self) -> str:
        """The marker as one line of JSON, without the line end."""
        return (
            f'{{"begin_iteration": {self.iteration}, "num_microbatches": {self.num_microbatches}}}'
        )


@dataclass(frozen=True, slots=True)
class Span:
    """One thing a rank did, from start to end.

    Attributes:
        action: ``F``, ``B``, ``W``, or another word for what the charts skip.
        chunk: local index of the model chunk.
        microbatch: microbatch within the iteration.
        start_ns: start on the rank's monotonic clock.
        end_ns: end on the same clock, not before the start.
        iteration: number of the iteration.
        wait_ns: idle time directly before, spent waiting for this action's input.
        bytes: payload received for this action plus payload it sent.
        in_flight_bytes: activation bytes held after it started.
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

    @property
    def duration_ns(self) -> int:
        """End minus start."""
        return self.end_ns - self.start_ns

    def to_line(self) -> str:
        """The span as one line of JSON, without the line end."""
        return json.dumps(asdict(self))


_HEADER_FIELDS = {field.name: field.type for field in fields(TraceHeader)}
_SPAN_REQUIRED = ("chunk", "microbatch", "start_ns", "end_ns", "iteration")
_SPAN_OPTIONAL = ("wait_ns", "bytes", "in_flight_bytes")


def parse_line(line: str | bytes, origin: str) -> TraceHeader | IterationStart | Span | None:
    """Read one line of a trace file.

    Args:
        line: the line, with or without its end.
        origin: where it stands (``file:line``), for the message of an error.

    Returns:
        The header, marker or span; ``None`` for a record of a kind this version does not know.

    Raises:
        TraceError: the line is no JSON object, lacks a field, has one of the wrong type, or
            belongs to a newer version of the format.
    """
    try:
        record = json.loads(line)
    except ValueError:
        raise TraceError(
            f"{origin} is not a line of JSON; the file is damaged, remove it or that line"
        ) from None
    if not isinstance(record, dict):
        raise TraceError(f"{origin} is not a JSON object; this is no trace file")
    if "action" in record:
        return _span(record, origin)
    if "format" in record or "version" in record:
        return _header(record, origin)
    if "begin_iteration" in record:
        return IterationStart(
            _integer(record, "begin_iteration", origin),
            _integer(record, "num_microbatches", origin),
        )
    return None


def _header(record: Mapping[str, Any], origin: str) -> TraceHeader:
    name, version = record.get("format"), record.get("version")
    if name != FORMAT_NAME:
        raise TraceError(f"{origin} has format {name!r}, expected {FORMAT_NAME!r}; no trace file")
    if not isinstance(version, int) or version < 1:
        raise TraceError(f"{origin} has version {version!r}, expected a number from 1 on")
    if version > FORMAT_VERSION:
        raise TraceError(
            f"{origin} has format version {version}, this program reads up to "
            f"{FORMAT_VERSION}; use a newer version of it"
        )
    values: dict[str, Any] = {}
    for field, kind in _HEADER_FIELDS.items():
        if kind == "int":
            values[field] = _integer(record, field, origin)
        elif isinstance(record.get(field), str):
            values[field] = record[field]
        else:
            raise TraceError(f"{origin}: header lacks the text field {field!r}")
    header = TraceHeader(**values)
    _check_header(header, origin)
    return header


def _check_header(header: TraceHeader, origin: str) -> None:
    for field in ("world_size", "num_ranks", "num_chunks"):
        if getattr(header, field) < 1:
            raise TraceError(f"{origin}: {field} is {getattr(header, field)}, expected at least 1")
    for position, size in (("rank", header.world_size), ("pp_rank", header.num_ranks)):
        if not 0 <= getattr(header, position) < size:
            raise TraceError(
                f"{origin}: {position} is {getattr(header, position)}, expected 0..{size - 1}"
            )


def _span(record: Mapping[str, Any], origin: str) -> Span:
    action = record["action"]
    try:
        numbers = [record[field] for field in _SPAN_REQUIRED]
    except KeyError as error:
        raise TraceError(f"{origin}: span lacks the field {error.args[0]!r}") from None
    numbers += [record.get(field, 0) for field in _SPAN_OPTIONAL]
    if not isinstance(action, str) or any(type(number) is not int for number in numbers):
        raise TraceError(f"{origin}: span has a field of the wrong type, expected whole numbers")
    span = Span(action, *numbers)
    if span.end_ns < span.start_ns:
        raise TraceError(
            f"{origin}: span {action} ends {span.start_ns - span.end_ns} ns before it starts"
        )
    return span


def _integer(record: Mapping[str, Any], field: str, origin: str) -> int:
    value = record.get(field)
    if type(value) is not int:
        raise TraceError(f"{origin}: field {field!r} is {value!r}, expected a whole number")
    return value
