"""Writes spans (named time intervals) as a file for ui.perfetto.dev and chrome://tracing.

In these viewers, each rank appears as a process, with threads for the step, computations,
collectives, data, waits, inputs and sends. A flow (an arrow) leads from each send to the input at
the receiver. The last thread shows the computations of the ideal step, in which no rank is slower
than the others. Layers and collectives whose times were recorded are nested in the computations,
and each collective contains its wait and its transfer. Counters show the size of the activations in
bytes, the microbatches in flight and the queued inputs. Times are in microseconds on the run's
common clock, and the first span starts at 0.

The format imposes some rules. Slices (drawn spans) of a thread must nest, so spans that overlap
without nesting are put on additional threads with the same name. A viewer attaches the end of a
flow to the slice that is open on the same thread at that time. Therefore, each slice lasts at least
one nanosecond and is written before its flow. Process and thread IDs must be above 0, because 0
denotes the idle process.

Source: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megatron.adaptive.errors import TraceError
from megatron.adaptive.schedule.action import SliceCounts
from megatron.adaptive.trace.collectives import JoinedCollectives, join_collectives
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.kernels import OUTSIDE, actions_of, read_steps
from megatron.adaptive.trace.read import RankTrace, RunTrace, describe_numbers
from megatron.adaptive.trace.span_columns import Messages, TraceTable, match_messages
from megatron.adaptive.trace.step_view import stages_text
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, KINDS, Lengths, Span
from megatron.adaptive.trace.views.palette import ACTION_NAMES
from megatron.adaptive.trace.whatif.operations import ideal_steps

MAX_SPANS = 1_500_000
"""Maximum number of spans in a file. Browsers cannot open larger files."""

NS_PER_US = 1000
THREADS: dict[str, tuple[str, ...]] = {
    "step": ("step",),
    "compute": (*DRAWN_ACTIONS, "reduce", "optimizer", "evaluate", "checkpoint", "probe"),
    "collectives": ("collective",),
    "data": ("data",),
    "wait": ("wait",),
    "inputs": ("receive",),
    "sends": ("send",),
}
"""Kinds of spans on each thread. Viewers show the threads in this order."""
LANES = 10_000
"""Number of thread IDs that each rank reserves for each entry of :data:`THREADS`."""


Event = dict[str, Any]


def write_perfetto(
    run: RunTrace,
    target: str | os.PathLike[str],
    iterations: Sequence[int],
    dp_rank: int | None = None,
) -> list[str]:
    """Writes the spans of ``iterations`` to ``target``, and replaces an existing file.

    The file is compressed if its name ends with ``.gz``.

    Args:
        run: Trace of the run.
        target: Path of the file, ``.json.gz`` or ``.json``.
        iterations: Numbers of the iterations to write.
        dp_rank: Data-parallel replica whose ranks are written, or ``None`` for all.

    Returns:
        Lines that describe what was omitted to stay within the limit of :data:`MAX_SPANS`.

    Raises:
        TraceError: An iteration or the replica does not exist or has no spans, or the file cannot
            be written.
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
    """Yields the events of ``iterations`` in the Trace Event Format.

    Args:
        run: Trace of the run.
        iterations: Numbers of the iterations to convert.
        ranks: Global ranks to convert, or ``None`` for all.

    Yields:
        Events. On each thread, they are ordered by time, and a slice comes before the slices nested
        in it.
    """
    chosen_ranks = sorted(run.ranks if ranks is None else ranks)
    starts = [run.ranks[rank].table([min(iterations)]).start_ns for rank in chosen_ranks]
    origin_ns = min((int(start.min()) for start in starts if len(start)), default=0)
    tables = {rank: run.ranks[rank].table(iterations) for rank in chosen_ranks}
    flows = _flows(match_messages(tables))
    ideal = ideal_steps(run, chosen_ranks, iterations) or {}
    joined = join_collectives(run, iterations)
    for index, rank in enumerate(chosen_ranks):
        trace = run.ranks[rank]
        yield from _names_of(run, trace, index)
        about = {i: (trace.lengths(i), trace.slices(i)) for i in iterations}
        every = _by_start(tables.pop(rank))
        for number, (name, kinds) in enumerate(THREADS.items()):
            slices = [
                (span, _slice(span, *about.get(span.iteration, ((), 1))))
                for span in every
                if span.action in kinds
            ]
            if name == "compute":
                slices += [*_layer_slices(trace, iterations), *_collective_slices(joined, rank)]
                slices += _kernel_slices(run, rank, iterations, every, origin_ns)
                slices.sort(key=lambda entry: (entry[0].start_ns, -entry[0].end_ns))
            yield from _thread(rank, number, name, slices, origin_ns, flows)
        slices = [
            (span, _ideal(span, trace.slices(span.iteration)))
            for span in _by_start(ideal.get(rank))
        ]
        yield from _thread(rank, len(THREADS), _IDEAL, slices, origin_ns, flows)
        actions = [span for span in every if span.action in DRAWN_ACTIONS]
        yield from _counters(rank, actions, origin_ns)


def _by_start(table: TraceTable | None) -> list[Span]:
    """Returns the spans of ``table`` ordered by start.

    Among spans that start at the same time, the longest comes first.
    """
    spans = () if table is None else table.spans()
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


def _write(file: TextIO, run: RunTrace, iterations: Sequence[int], ranks: Sequence[int]) -> None:
    """Writes the events of ``ranks`` in ``iterations`` to ``file`` as JSON, one event per line."""
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
    """Returns the iterations and ranks to write, and notes on omitted iterations.

    If there are more than :data:`MAX_SPANS` spans, omits the first iterations. ``dp_rank`` is the
    replica to write, or ``None`` for all replicas.
    """
    for iteration in iterations:
        run.require_iteration(iteration)
    chosen = sorted(set(iterations))
    ranks = sorted(run.ranks)
    notes = []
    if dp_rank is not None:
        run.replica(dp_rank)
        ranks = [r for r in ranks if run.ranks[r].header.dp_rank == dp_rank]
    if not run.num_spans(chosen, ranks):
        raise TraceError(
            f"iterations {describe_numbers(iterations)} in {run.origin} do not contain any spans; "
            "choose other iterations"
        )
    asked = len(chosen)
    counts = _num_slices(run, chosen, ranks)
    while len(chosen) > 1 and sum(counts[iteration] for iteration in chosen) > MAX_SPANS:
        del chosen[0]
    if len(chosen) < asked:
        notes.append(
            f"only the last {len(chosen)} of {asked} iterations are written, because all of them "
            f"together have more than {MAX_SPANS:,} spans"
        )
    return chosen, ranks, notes


def _num_slices(run: RunTrace, iterations: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
    """Returns the approximate number of drawn spans (slices) of ``ranks`` in each iteration."""
    counts = {iteration: run.num_spans([iteration], ranks) for iteration in iterations}
    for rank in ranks:
        trace = run.ranks[rank]
        for step in read_steps(run, rank):
            if step.iteration in counts:
                counts[step.iteration] += len(step.kept)
        for iteration in iterations:
            counts[iteration] += len(trace.layer_passes(iteration))
            counts[iteration] += sum(3 * len(group.kept) for group in trace.collectives(iteration))
    return counts


def _names_of(run: RunTrace, trace: RankTrace, index: int) -> Iterator[Event]:
    """Yields the events that set the name, label and position (``index``) of a rank's process."""
    header = trace.header
    name = f"rank {header.rank}: {stages_text(header, header.pp_rank)}"
    if any(t.header.dp_rank for t in run.ranks.values()):
        name += f", replica {header.dp_rank}"
    yield _metadata("process_name", header.rank, 0, name=name)
    yield _metadata("process_labels", header.rank, 0, labels=f"{header.host} pid {header.pid}")
    yield _metadata("process_sort_index", header.rank, 0, sort_index=index)


def _metadata(event_name: str, rank: int, tid: int, **arguments: Any) -> Event:
    return {
        "name": event_name,
        "ph": "M",
        "pid": rank + 1,
        "tid": tid or _tid(rank, 0),
        "args": arguments,
    }


def _tid(rank: int, number: int) -> int:
    """Returns the ID of thread ``number`` of a rank.

    The ID differs from all process IDs, and from the thread IDs of other ranks.
    """
    return (rank + 1) * (len(THREADS) + 1) * LANES + number


_IDEAL = "ideal: no rank slower than others"
_SIDE_BY_SIDE = ("inputs", "sends", _IDEAL)
"""Threads whose overlapping spans are independent, so they must not be drawn as nested."""


def _thread(
    rank: int,
    number: int,
    name: str,
    slices: Sequence[tuple[Span, Event]],
    origin_ns: int,
    flows: dict[tuple[Any, ...], Event],
) -> Iterator[Event]:
    """Yields the slices and flows of a thread, spread over several threads if slices overlap.

    Args:
        rank: Global rank.
        number: Index of the thread in :data:`THREADS`.
        name: Name of the thread.
        slices: Spans in the order of :func:`_by_start`, each with its name, category and arguments.
        origin_ns: Time in nanoseconds that corresponds to the file's time 0.
        flows: Flows that have not been yielded yet. The flows that this function yields are
            removed.
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
        position = {"pid": rank + 1, "tid": _tid(rank, number * LANES + lane), "ts": start}
        yield {**event, "ph": "X", **position, "dur": length}
        message = (span.iteration, span.chunk, span.microbatch, span.of)
        if flow := flows.pop((rank, span.action, span.peer, *message), None):
            yield {"name": "message", "cat": "message", **flow, **position}


def _ideal(span: Span, num_slices: SliceCounts) -> Event:
    arguments = {"iteration": span.iteration, "chunk": span.chunk, **span.numbers(num_slices)}
    return {"name": _name(span, num_slices), "cat": "ideal", "args": arguments}


def _slice(span: Span, lengths: Lengths, num_slices: SliceCounts) -> Event:
    """Returns the name, category and arguments with which viewers show ``span``.

    Args:
        span: Span to show.
        lengths: Sizes of the microbatches in the span's iteration; empty if all microbatches have
            the same size.
        num_slices: Number of slices of each microbatch, or 1 if microbatches are not split.
    """
    kind = span.action
    arguments: dict[str, Any] = {"iteration": span.iteration}
    if span.chunk >= 0:
        arguments["chunk"] = span.chunk
    arguments |= span.numbers(num_slices)
    if span.peer >= 0:
        arguments["peer"] = span.peer
    if kind in DRAWN_ACTIONS:
        arguments["wait_us"] = span.wait_ns / NS_PER_US
        arguments.update(in_flight_bytes=span.in_flight_bytes, queue_depth=span.queue_depth)
    if kind == "W":
        arguments["piece"] = span.piece
    if span.of:
        arguments["of"] = span.of
    if span.bytes:
        arguments["bytes"] = span.bytes
    if span.reason:
        arguments["cause" if kind == "wait" else "reason"] = span.reason
    microbatch = arguments.get("microbatch", -1)
    if kind in (*DRAWN_ACTIONS, "data") and 0 <= microbatch < len(lengths):
        positions, *documents = lengths[microbatch]
        tokens = sum(documents)
        arguments.update(tokens=tokens, padding=positions - tokens, lengths=documents)
    return {"name": _name(span, num_slices), "cat": ACTION_NAMES.get(kind, kind), "args": arguments}


def _name(span: Span, num_slices: SliceCounts) -> str:
    kind = span.action
    item = span.item(num_slices)
    numbers = f"{span.chunk}-{item}"
    if kind in ACTION_NAMES:
        return f"{ACTION_NAMES[kind]} {numbers}"
    return {
        "step": f"iteration {span.iteration}",
        "wait": f"wait: {span.reason or 'unknown'}",
        "collective": span.reason or kind,
        "send": f"send {span.of}{numbers}",
        "receive": f"receive {span.of}{numbers}",
        "data": f"data {item}",
    }.get(kind, kind)


def _lanes(spans: Sequence[Span], *, may_nest: bool) -> list[int]:
    """Returns the index of the first thread on which each span can be drawn.

    A span can be drawn on a thread if it does not overlap the thread's other spans, or can be
    nested in one of them.

    Args:
        spans: Spans in the order of :func:`_by_start`.
        may_nest: Whether a span may nest in another span of the same thread.
    """
    lanes: list[int] = []
    # Each entry contains the end times of one thread's open spans, with the innermost span last.
    ends_of: list[list[int]] = []
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
    """Converts nanoseconds to microseconds so that viewers can recover the exact nanoseconds.

    As a float, a time divided by 1000 may be slightly too small. If a viewer truncates such a
    value, the slice begins a nanosecond early and overlaps the previous slice. Viewers discard such
    slices.
    """
    ns = np.array(times_ns, dtype=np.int64)
    values = ns / NS_PER_US
    early = np.floor(values * NS_PER_US) < ns
    values[early] = np.nextafter(values[early], np.inf)
    microseconds: list[float] = values.tolist()
    return microseconds


def _flows(messages: Messages) -> dict[tuple[Any, ...], Event]:
    """Returns the start and the end of a flow (an arrow) for each message.

    They are keyed by (rank, ``send`` or ``receive``, rank at the other end, ...). The other values
    of a key identify the message.
    """
    ends: dict[tuple[Any, ...], Event] = {}
    names = ("source", "target", "iteration", "chunk", "microbatch", "of")
    columns = [getattr(messages, name).tolist() for name in names]
    kinds = (*KINDS, "other")
    for number, (source, target, *numbers, of) in enumerate(zip(*columns, strict=True), start=1):
        message = (*numbers, kinds[of])
        begin = (source, "send", target, *message)
        end = (target, "receive", source, *message)
        ends[begin] = {"id": number, "ph": "s"}
        ends[end] = {"id": number, "ph": "f", "bp": "e"}
    return ends


def _counters(rank: int, actions: Sequence[Span], origin_ns: int) -> Iterator[Event]:
    """Yields the values of counters at each action, such as memory and queued inputs.

    ``origin_ns`` is the time in nanoseconds that corresponds to the file's time 0.
    """
    last: dict[str, int] = {}
    iteration = -1
    in_flight = 0
    times = _microseconds([action.start_ns - origin_ns for action in actions])
    for action, time in zip(actions, times, strict=True):
        if action.iteration != iteration:
            # Restart the count from 0 in each iteration, because the forward passes of an
            # interrupted iteration may have no backward passes.
            iteration = action.iteration
            in_flight = 0
        in_flight = max(0, in_flight + {"F": 1, "B": -1}.get(action.action, 0))
        for name, unit, value in (
            ("activation bytes in flight", "bytes", action.in_flight_bytes),
            ("microbatches in flight", "count", in_flight),
            ("inputs queued", "count", action.queue_depth),
        ):
            if last.get(name) != value:
                last[name] = value
                position = {"pid": rank + 1, "tid": _tid(rank, 0), "ts": time}
                yield {"name": name, "ph": "C", **position, "args": {unit: value}}


Slice = tuple[Span, Event]
"""Span, and the name, category and arguments with which viewers show it."""

_PASSES = ("forward", "backward")


def _layer_slices(trace: RankTrace, iterations: Sequence[int]) -> Iterator[Slice]:
    """Yields a rank's layer passes that have a recorded start and end.

    Args:
        trace: Trace of the rank.
        iterations: Numbers of the iterations.
    """
    for iteration in iterations:
        for kind, name in enumerate(_PASSES):
            passes = [row for row in trace.layer_passes(iteration) if row[1] == kind]
            passes.sort(key=lambda row: row[2])
            ends_ns = [row[3] for row in passes]
            # A backward pass may begin slightly before the pass of the previous layer ends. Shorten
            # the previous pass, because slices must nest.
            for index, (row, following) in enumerate(pairwise(passes)):
                if row[2] < following[2] < ends_ns[index] < following[3]:
                    ends_ns[index] = following[2]
            for (layer, _, start_ns, _), end_ns in zip(passes, ends_ns, strict=True):
                arguments = {"iteration": iteration, "layer": layer}
                event = {"name": f"layer {layer}", "cat": f"layer {name}", "args": arguments}
                yield _detail("layer", iteration, start_ns, end_ns), event


def _collective_slices(joined: Sequence[JoinedCollectives], rank: int) -> Iterator[Slice]:
    """Yields slices for the collectives of a rank, and for the wait and transfer in each of them.

    Only collectives are included whose times were recorded by all members of the group.

    Args:
        joined: Collectives of all groups, as returned by ``join_collectives``.
        rank: Global rank.
    """
    for group in joined:
        if rank not in group.ranks:
            continue
        column = group.ranks.index(rank)
        columns = (group.iteration, group.start_ns[:, column], group.end_ns[:, column])
        lasts = zip(group.last_ns.tolist(), group.start_ns.argmax(axis=1).tolist(), strict=True)
        rows = zip(*(values.tolist() for values in columns), lasts, strict=True)
        for iteration, start_ns, end_ns, (last_ns, last) in rows:
            middle_ns = min(last_ns, end_ns)
            arguments = {
                "iteration": iteration,
                "wait_us": (middle_ns - start_ns) / NS_PER_US,
                "transfer_us": (end_ns - middle_ns) / NS_PER_US,
                "ranks": len(group.ranks),
                "last rank": group.ranks[last],
            }
            event = {"name": group.name, "cat": "collective", "args": arguments}
            yield _detail("collective", iteration, start_ns, end_ns), event
            parts = (
                (f"wait for rank {group.ranks[last]}", "collective wait", start_ns, middle_ns),
                ("transfer", "transfer", middle_ns, end_ns),
            )
            for name, category, begin_ns, stop_ns in parts:
                if stop_ns > begin_ns:
                    part = {"name": name, "cat": category, "args": {"iteration": iteration}}
                    yield _detail(category, iteration, begin_ns, stop_ns), part


def _kernel_slices(
    run: RunTrace, rank: int, iterations: Sequence[int], spans: Sequence[Span], origin_ns: int
) -> Iterator[Slice]:
    """Yields the kernels that a rank recorded in ``iterations``.

    Args:
        run: Trace of the run.
        rank: Global rank.
        iterations: Numbers of the iterations.
        spans: Spans of the rank in these iterations.
        origin_ns: Time in nanoseconds that corresponds to the file's time 0.
    """
    for step in read_steps(run, rank):
        if step.iteration not in iterations:
            continue
        of_step = [span for span in spans if span.iteration == step.iteration]
        for kernel, action in zip(step.kept, actions_of(of_step, step.kept), strict=True):
            # The clocks of the profiler and of the actions differ by microseconds, so clip the
            # kernels to the actions. Also clip them at time 0, because Perfetto drops events with
            # negative times.
            start_ns = max(kernel.start_ns, origin_ns)
            end_ns = kernel.end_ns if action is None else min(kernel.end_ns, action.end_ns)
            kind = OUTSIDE if action is None else action.action
            arguments = {"iteration": step.iteration, "action": kind}
            event = {"name": kernel.name, "cat": "kernel", "args": arguments}
            yield _detail("kernel", step.iteration, start_ns, max(start_ns, end_ns)), event


def _detail(action: str, iteration: int, start_ns: int, end_ns: int) -> Span:
    return Span(action, -1, -1, start_ns, end_ns, iteration)
