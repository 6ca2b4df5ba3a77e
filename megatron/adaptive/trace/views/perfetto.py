"""The spans of a run in the trace event format, for https://ui.perfetto.dev and chrome://tracing.

One process per rank with threads for compute, waits, sends, inputs, data and the step; a flow from
each send to the input it became; on a last thread the computes of a step in which nobody is slower
than others; counters of activation bytes, microbatches in flight and inputs
queued. Times are microseconds on the run's common clock, from the first span on.

Rules of the format that shape this file: slices of a thread must nest, so spans that overlap
otherwise lie on further threads of the same name; an end of a flow is bound to the slice that is
open on its thread at its time, so a slice lasts at least a nanosecond and stands before its flow;
process and thread ids are above 0, which stands for the idle process.

Source: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.event import DRAWN_ACTIONS, KINDS, REASONS, Lengths
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.read import RankTrace, RunTrace, describe_numbers
from megatron.adaptive.trace.step import stages_text
from megatron.adaptive.trace.table import (
    KIND,
    Ints,
    Messages,
    TraceTable,
    match_messages,
    wait_before,
)
from megatron.adaptive.trace.views.palette import ACTION_NAMES
from megatron.adaptive.trace.whatif.operations import ideal_steps

MAX_SPANS = 1_500_000
"""Viewers in a browser still open a file of so many spans."""

NS_PER_US = 1000
THREADS: dict[str, tuple[str, ...]] = {
    "step": ("step",),
    "compute": (*DRAWN_ACTIONS, "reduce", "optimizer", "evaluate", "checkpoint"),
    "collectives": ("collective",),
    "data": ("data",),
    "wait": ("wait",),
    "inputs": ("receive",),
    "sends": ("send",),
}
"""Kinds of span by thread, from the top of a process."""
LANES = 10_000
"""Thread ids of one kind of a rank."""


Event = dict[str, Any]


def write_perfetto(
    run: RunTrace,
    target: str | os.PathLike[str],
    iterations: Sequence[int],
    dp_rank: int | None = None,
) -> list[str]:
    """Write some iterations, replacing the file; compressed where its name ends in ``.gz``.

    Args:
        run: the run.
        target: the file, ``.json.gz`` or ``.json``.
        iterations: their numbers.
        dp_rank: only the ranks of this data-parallel replica; ``None`` for all.

    Returns:
        What was left out because it would have been more than :data:`MAX_SPANS`, a line each.

    Raises:
        TraceError: an iteration or the replica does not exist, it holds nothing to write, or the
            file cannot be written.
    """
    chosen, ranks, notes = _within_limit(run, iterations, dp_rank)
    with replaced(target) as temporary:
        is_packed = Path(target).suffix == ".gz"
        binary: Any = gzip.GzipFile(temporary, "wb", 5, mtime=0) if is_packed else None
        with binary or temporary.open("wb") as raw, io.TextIOWrapper(raw, encoding="utf-8") as file:
            _write(file, run, chosen, ranks)
    return notes


def perfetto_events(
    run: RunTrace, iterations: Sequence[int], ranks: Iterable[int] | None = None
) -> Iterator[Event]:
    """The events of some iterations.

    Args:
        run: the run.
        iterations: their numbers.
        ranks: global ranks, ``None`` for all.

    Yields:
        Events; those of a thread are ordered by time, a slice before what lies in it.
    """
    wanted = sorted(run.ranks if ranks is None else ranks)
    messages = match_messages(
        {r: run.ranks[r].table(iterations).of_kind("send", "receive") for r in wanted}
    )
    starts = [run.ranks[rank].table([min(iterations)]).start_ns for rank in wanted]
    origin_ns = min((int(start.min()) for start in starts if len(start)), default=0)
    ends = _flow_ends(messages)
    ideal = ideal_steps(run, wanted, iterations) or {}
    for place, rank in enumerate(wanted):
        trace = run.ranks[rank]
        yield from _names_of(run, trace, place)
        table = trace.table(iterations)
        lengths = {iteration: trace.lengths(iteration) for iteration in iterations}
        for event in _slices(rank, table, ideal.get(rank), origin_ns, ends):
            yield _with_lengths(event, lengths)
        yield from _counters(rank, table, origin_ns)


def _write(file: TextIO, run: RunTrace, iterations: Sequence[int], ranks: Sequence[int]) -> None:
    about = {
        "run": run.run,
        "iterations": describe_numbers(iterations),
        "missing ranks": describe_numbers(run.missing_ranks),
        "clocks": run.alignment.describe(),
    }
    file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about))
    file.write(', "traceEvents": [\n')
    separator = ""
    encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
    for event in perfetto_events(run, iterations, ranks):
        file.write(separator + encode(event))
        separator = ",\n"
    file.write("\n]}\n")


def _within_limit(
    run: RunTrace, iterations: Sequence[int], dp_rank: int | None
) -> tuple[list[int], list[int], list[str]]:
    """Iterations and ranks whose spans are few enough, and what that left out."""
    for iteration in iterations:
        run.require_iteration(iteration)
    chosen, ranks, notes = sorted(set(iterations)), sorted(run.ranks), []
    if dp_rank is not None:
        run.replica(dp_rank)
        ranks = [r for r in ranks if run.ranks[r].header.dp_rank == dp_rank]
    if not run.num_spans(chosen, ranks):
        raise TraceError(
            f"iterations {describe_numbers(iterations)} in {run.origin} hold no spans; there is "
            "nothing to write"
        )
    if run.num_spans(chosen, ranks) > MAX_SPANS:
        places = {r: (run.ranks[r].header.dp_rank, run.ranks[r].header.tp_rank) for r in ranks}
        first = min(places.values())
        kept = [rank for rank in ranks if places[rank] == first]
        if len(kept) < len(ranks):
            notes.append(
                f"{len(kept)} of {len(ranks)} ranks: those of data-parallel rank {first[0]} and "
                f"tensor-parallel rank {first[1]}; all would be more than {MAX_SPANS:,} spans"
            )
        ranks = kept
    asked = len(chosen)
    while len(chosen) > 1 and run.num_spans(chosen, ranks) > MAX_SPANS:
        del chosen[0]
    if len(chosen) < asked:
        notes.append(
            f"the last {len(chosen)} of {asked} iterations; all would be more than "
            f"{MAX_SPANS:,} spans"
        )
    return chosen, ranks, notes


def _names_of(run: RunTrace, trace: RankTrace, place: int) -> Iterator[Event]:
    header = trace.header
    name = f"rank {header.rank}: {stages_text(header, header.pp_rank)}"
    if any(t.header.dp_rank for t in run.ranks.values()):
        name += f", replica {header.dp_rank}"
    yield _metadata("process_name", header.rank, 0, name=name)
    yield _metadata("process_labels", header.rank, 0, labels=f"{header.host} pid {header.pid}")
    yield _metadata("process_sort_index", header.rank, 0, sort_index=place)


def _metadata(what: str, rank: int, tid: int, **arguments: Any) -> Event:
    return {
        "name": what,
        "ph": "M",
        "pid": rank + 1,
        "tid": tid or _tid(rank, 0),
        "args": arguments,
    }


def _tid(rank: int, number: int) -> int:
    """Thread ids are unique over all processes and never a process id of the same rank."""
    return (rank + 1) * (len(THREADS) + 1) * LANES + number


def _slices(
    rank: int,
    table: TraceTable,
    ideal: TraceTable | None,
    origin_ns: int,
    ends: Mapping[tuple[int, ...], list[Event]],
) -> Iterator[Event]:
    waits = wait_before(table)
    threads = [(name, table.where(*kinds), table, waits) for name, kinds in THREADS.items()]
    if ideal is not None:
        every = ideal.where(*DRAWN_ACTIONS)
        threads.append((_IDEAL, every, ideal, np.zeros(len(ideal), dtype=np.int64)))
    for number, (name, chosen, spans, waits) in enumerate(threads):
        rows = np.flatnonzero(chosen)
        rows = rows[np.lexsort((-spans.duration_ns[rows], spans.start_ns[rows]))]
        mine = spans.take(rows)
        lanes = _lanes(mine.start_ns, mine.end_ns, may_nest=name not in _SIDE_BY_SIDE)
        for lane in range(max(lanes, default=-1) + 1):
            tid = _tid(rank, number * LANES + lane)
            title = name if not lane else f"{name} {lane + 1}"
            yield _metadata("thread_name", rank, tid, name=title)
            yield _metadata("thread_sort_index", rank, tid, sort_index=tid)
        columns = [mine.kind, mine.iteration, mine.chunk, mine.microbatch, mine.piece, mine.of]
        columns += [mine.peer, mine.reason, mine.bytes, mine.in_flight_bytes, mine.queue_depth]
        columns += [waits[rows]]
        starts = _microseconds(mine.start_ns - origin_ns)
        lengths = _microseconds(np.maximum(mine.duration_ns, 1))
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        for lane, start, length, row in zip(lanes, starts, lengths, numbers, strict=True):
            where = {"pid": rank + 1, "tid": _tid(rank, number * LANES + lane), "ts": start}
            shown = _slice(row)
            if name == _IDEAL:
                named = {n: v for n, v in shown["args"].items() if n in _OF_ANY_STEP}
                shown.update(cat="ideal", args=named)
            yield {**shown, "ph": "X", **where, "dur": length}
            if row[0] in _MESSAGES:
                for end in ends.get((row[0], rank, row[6], *row[1:4], row[5]), ()):
                    yield {**end, **where}


def _with_lengths(event: Event, known: Mapping[int, Lengths]) -> Event:
    """Adds to actions and reads what their microbatches hold, where these differ."""
    arguments = event.get("args", {})
    found, microbatch = known.get(arguments.get("iteration"), ()), arguments.get("microbatch", -1)
    if event.get("cat") in _OF_LENGTHS and 0 <= microbatch < len(found):
        positions, *lengths = found[microbatch]
        tokens = sum(lengths)
        arguments.update(tokens=tokens, padding=positions - tokens, lengths=lengths)
    return event


_IDEAL = "ideal: nobody slower than others"
_OF_ANY_STEP = ("iteration", "chunk", "microbatch")
_SIDE_BY_SIDE = ("inputs", "sends", _IDEAL)
"""Threads whose spans have nothing to do with those around them."""
_MESSAGES = (KIND["send"], KIND["receive"])
_OF_LENGTHS = (*ACTION_NAMES.values(), "data")
"""Categories of what is done with the tokens of one microbatch."""


def _slice(row: tuple[int, ...]) -> Event:
    """Name, category and arguments of a span."""
    kind, iteration, chunk, microbatch, piece, of, peer, reason, size, held, queued, wait_ns = row
    word = KINDS[kind] if kind < len(KINDS) else "other"
    arguments: dict[str, Any] = {"iteration": iteration}
    for name, value in (("chunk", chunk), ("microbatch", microbatch), ("peer", peer)):
        if value >= 0:
            arguments[name] = value
    if word in DRAWN_ACTIONS:
        arguments["wait_us"] = wait_ns / NS_PER_US
        arguments.update(in_flight_bytes=held, queue_depth=queued)
        if word == "W":
            arguments["piece"] = piece
    if of >= 0:
        arguments["of"] = KINDS[of] if of < len(KINDS) else "other"
    if size:
        arguments["bytes"] = size
    if REASONS[reason]:
        arguments["cause" if word == "wait" else "reason"] = REASONS[reason]
    return {
        "name": _name(word, chunk, microbatch, iteration, REASONS[reason], arguments.get("of", "")),
        "cat": ACTION_NAMES.get(word, word),
        "args": arguments,
    }


def _name(word: str, chunk: int, microbatch: int, iteration: int, cause: str, of: str) -> str:
    if word in ACTION_NAMES:
        return f"{ACTION_NAMES[word]} {chunk}-{microbatch}"
    if word == "step":
        return f"iteration {iteration}"
    if word == "wait":
        return f"wait: {cause or 'unknown'}"
    if word == "collective":
        return cause or word
    if word in ("send", "receive"):
        return f"{word} {of}{chunk}-{microbatch}"
    return f"data {microbatch}" if word == "data" else word


def _lanes(start_ns: Ints, end_ns: Ints, may_nest: bool) -> list[int]:
    """The lane of each span, the first where it overlaps none but what it lies within.

    Args:
        start_ns: ``[spans]``, ascending; of equal ones the longest first.
        end_ns: ``[spans]``.
        may_nest: whether a span may lie within another of its lane.
    """
    lanes: list[int] = []
    ends_of: list[list[int]] = []  # per lane, where its open spans end, the innermost last
    for start, end in zip(start_ns.tolist(), end_ns.tolist(), strict=True):
        stop = max(end, start + 1)
        lane = 0
        for ends in ends_of:
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or (may_nest and stop <= ends[-1]):
                break
            lane += 1
        else:
            ends_of.append([])
        ends_of[lane].append(stop)
        lanes.append(lane)
    return lanes


def _microseconds(ns: Ints) -> list[float]:
    """Microseconds that become the same nanoseconds again whether a reader rounds or cuts off.

    A thousandth of a number may lie a trace below it, and a slice that begins a nanosecond early
    overlaps the one before it, which readers drop.
    """
    values = ns / NS_PER_US
    early = np.floor(values * NS_PER_US) < ns
    values[early] = np.nextafter(values[early], np.inf)
    found: list[float] = values.tolist()
    return found


def _flow_ends(messages: Messages) -> dict[tuple[int, ...], list[Event]]:
    """Begin and end of each message's flow, by kind of span, rank, peer and what it is of."""
    ends: dict[tuple[int, ...], list[Event]] = {}
    columns = (
        *(messages.source, messages.target, messages.iteration, messages.chunk),
        *(messages.microbatch, messages.of),
    )
    for number, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        source, target, *what = row
        flow = {"name": "message", "cat": "message", "id": number + 1}
        send = (KIND["send"], source, target, *what)
        receive = (KIND["receive"], target, source, *what)
        ends.setdefault(send, []).append({**flow, "ph": "s"})
        ends.setdefault(receive, []).append({**flow, "ph": "f", "bp": "e"})
    return ends


def _counters(rank: int, table: TraceTable, origin_ns: int) -> Iterator[Event]:
    """Returns counters of memory held and inputs queued, whenever an action begins."""
    rows = np.flatnonzero(table.where(*DRAWN_ACTIONS))
    rows = rows[np.argsort(table.start_ns[rows], kind="stable")]
    mine = table.take(rows)
    step = np.where(mine.kind == KIND["F"], 1, np.where(mine.kind == KIND["B"], -1, 0))
    held = np.cumsum(step)
    # Every iteration starts with none: an interrupted one may have left forwards behind.
    heads = np.flatnonzero(np.diff(mine.iteration, prepend=mine.iteration[:1] - 1))
    before = np.repeat((held - step)[heads], np.diff(np.append(heads, len(rows))))
    inside = np.maximum(held - before, 0)
    start = _microseconds(mine.start_ns - origin_ns)
    for name, unit, values in (
        ("activation bytes in flight", "bytes", mine.in_flight_bytes),
        ("microbatches in flight", "count", inside),
        ("inputs queued", "count", mine.queue_depth),
    ):
        last = None
        for time, value in zip(start, values.tolist(), strict=True):
            if value != last:
                where = {"pid": rank + 1, "tid": _tid(rank, 0), "ts": time}
                yield {"name": name, "ph": "C", **where, "args": {unit: value}}
                last = value
