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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.read import RankTrace, RunTrace, describe_numbers
from megatron.adaptive.trace.span_columns import Messages, TraceTable, match_messages
from megatron.adaptive.trace.step_view import stages_text
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, KINDS, Lengths, Span
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
    starts = [run.ranks[rank].table([min(iterations)]).start_ns for rank in wanted]
    origin_ns = min((int(start.min()) for start in starts if len(start)), default=0)
    tables = {rank: run.ranks[rank].table(iterations) for rank in wanted}
    flows = _flows(match_messages(tables))
    ideal = ideal_steps(run, wanted, iterations) or {}
    for place, rank in enumerate(wanted):
        trace = run.ranks[rank]
        yield from _names_of(run, trace, place)
        lengths = {iteration: trace.lengths(iteration) for iteration in iterations}
        every = _by_start(tables.pop(rank))
        for number, (name, kinds) in enumerate(THREADS.items()):
            slices = [
                (span, _slice(span, lengths.get(span.iteration, ())))
                for span in every
                if span.action in kinds
            ]
            yield from _thread(rank, number, name, slices, origin_ns, flows)
        slices = [(span, _ideal(span)) for span in _by_start(ideal.get(rank))]
        yield from _thread(rank, len(THREADS), _IDEAL, slices, origin_ns, flows)
        yield from _counters(rank, [one for one in every if one.action in DRAWN_ACTIONS], origin_ns)


def _by_start(table: TraceTable | None) -> list[Span]:
    """Returns spans in the order of slices: a longer one before what begins with it."""
    spans = () if table is None else table.spans()
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


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


_IDEAL = "ideal: nobody slower than others"
_SIDE_BY_SIDE = ("inputs", "sends", _IDEAL)
"""Threads whose spans have nothing to do with those around them."""


def _thread(
    rank: int,
    number: int,
    name: str,
    slices: Sequence[tuple[Span, Event]],
    origin_ns: int,
    flows: dict[tuple[Any, ...], Event],
) -> Iterator[Event]:
    """Yields the slices of a thread, of several where they overlap, with their flows.

    Args:
        rank: global rank.
        number: of the thread.
        name: of the thread.
        slices: spans, in the order of slices, with name, category and arguments.
        origin_ns: time 0.
        flows: those to come, of which what is yielded is taken out.
    """
    spans = [span for span, _ in slices]
    lanes = _lanes(spans, may_nest=name not in _SIDE_BY_SIDE)
    for lane in range(max(lanes, default=-1) + 1):
        tid = _tid(rank, number * LANES + lane)
        title = name if not lane else f"{name} {lane + 1}"
        yield _metadata("thread_name", rank, tid, name=title)
        yield _metadata("thread_sort_index", rank, tid, sort_index=tid)
    starts = _microseconds([span.start_ns - origin_ns for span in spans])
    lengths = _microseconds([max(span.duration_ns, 1) for span in spans])
    for (span, event), lane, start, length in zip(slices, lanes, starts, lengths, strict=True):
        where = {"pid": rank + 1, "tid": _tid(rank, number * LANES + lane), "ts": start}
        yield {**event, "ph": "X", **where, "dur": length}
        what = (span.iteration, span.chunk, span.microbatch, span.of)
        if flow := flows.pop((rank, span.action, span.peer, *what), None):
            yield {"name": "message", "cat": "message", **flow, **where}


def _ideal(span: Span) -> Event:
    where = {name: getattr(span, name) for name in ("iteration", "chunk", "microbatch")}
    return {"name": _name(span), "cat": "ideal", "args": where}


def _slice(span: Span, lengths: Lengths) -> Event:
    """Returns name, category and arguments of a span.

    Args:
        span: the span.
        lengths: what the microbatches of its iteration hold, empty where they are alike.
    """
    word = span.action
    arguments: dict[str, Any] = {"iteration": span.iteration}
    for name in ("chunk", "microbatch", "peer"):
        if getattr(span, name) >= 0:
            arguments[name] = getattr(span, name)
    if word in DRAWN_ACTIONS:
        arguments["wait_us"] = span.wait_ns / NS_PER_US
        arguments.update(in_flight_bytes=span.in_flight_bytes, queue_depth=span.queue_depth)
    if word == "W":
        arguments["piece"] = span.piece
    if span.of:
        arguments["of"] = span.of
    if span.bytes:
        arguments["bytes"] = span.bytes
    if span.reason:
        arguments["cause" if word == "wait" else "reason"] = span.reason
    if word in (*DRAWN_ACTIONS, "data") and 0 <= span.microbatch < len(lengths):
        positions, *documents = lengths[span.microbatch]
        tokens = sum(documents)
        arguments.update(tokens=tokens, padding=positions - tokens, lengths=documents)
    return {"name": _name(span), "cat": ACTION_NAMES.get(word, word), "args": arguments}


def _name(span: Span) -> str:
    word, place = span.action, f"{span.chunk}-{span.microbatch}"
    if word in ACTION_NAMES:
        return f"{ACTION_NAMES[word]} {place}"
    return {
        "step": f"iteration {span.iteration}",
        "wait": f"wait: {span.reason or 'unknown'}",
        "collective": span.reason or word,
        "send": f"send {span.of}{place}",
        "receive": f"receive {span.of}{place}",
        "data": f"data {span.microbatch}",
    }.get(word, word)


def _lanes(spans: Sequence[Span], *, may_nest: bool) -> list[int]:
    """Returns the lane of each span, the first where it overlaps none but what it lies within.

    Args:
        spans: by start; of equal ones the longest first.
        may_nest: whether a span may lie within another of its lane.
    """
    lanes: list[int] = []
    ends_of: list[list[int]] = []  # per lane, where its open spans end, the innermost last
    for span in spans:
        stop = max(span.end_ns, span.start_ns + 1)
        lane = 0
        for ends in ends_of:
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or (may_nest and stop <= ends[-1]):
                break
            lane += 1
        else:
            ends_of.append([])
        ends_of[lane].append(stop)
        lanes.append(lane)
    return lanes


def _microseconds(times_ns: Sequence[int]) -> list[float]:
    """Microseconds that become the same nanoseconds again whether a reader rounds or cuts off.

    A thousandth of a number may lie a trace below it, and a slice that begins a nanosecond early
    overlaps the one before it, which readers drop.
    """
    ns = np.array(times_ns, dtype=np.int64)
    values = ns / NS_PER_US
    early = np.floor(values * NS_PER_US) < ns
    values[early] = np.nextafter(values[early], np.inf)
    found: list[float] = values.tolist()
    return found


def _flows(messages: Messages) -> dict[tuple[Any, ...], Event]:
    """Returns begin and end of each message's flow, by rank, kind of span and message."""
    ends: dict[tuple[Any, ...], Event] = {}
    names = ("source", "target", "iteration", "chunk", "microbatch", "of")
    columns = [getattr(messages, name).tolist() for name in names]
    words = (*KINDS, "other")
    for number, (source, target, *what, of) in enumerate(zip(*columns, strict=True), start=1):
        message = (*what, words[of])
        begin, end = (source, "send", target, *message), (target, "receive", source, *message)
        ends[begin] = {"id": number, "ph": "s"}
        ends[end] = {"id": number, "ph": "f", "bp": "e"}
    return ends


def _counters(rank: int, actions: Sequence[Span], origin_ns: int) -> Iterator[Event]:
    """Returns counters of memory held and inputs queued, whenever an action begins."""
    last: dict[str, int] = {}
    iteration, inside = -1, 0
    times = _microseconds([action.start_ns - origin_ns for action in actions])
    for action, time in zip(actions, times, strict=True):
        if action.iteration != iteration:
            # Every iteration starts with none: an interrupted one may have left forwards behind.
            iteration, inside = action.iteration, 0
        inside = max(0, inside + {"F": 1, "B": -1}.get(action.action, 0))
        for name, unit, value in (
            ("activation bytes in flight", "bytes", action.in_flight_bytes),
            ("microbatches in flight", "count", inside),
            ("inputs queued", "count", action.queue_depth),
        ):
            if last.get(name) != value:
                last[name] = value
                where = {"pid": rank + 1, "tid": _tid(rank, 0), "ts": time}
                yield {"name": name, "ph": "C", **where, "args": {unit: value}}
