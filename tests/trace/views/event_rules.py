"""Checks files in the trace event format against the rules of the strictest reader.

Times are compared in whole nanoseconds. As in Perfetto's trace processor, fractions are truncated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

Event = dict[str, Any]

METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def nanoseconds(microseconds: float) -> int:
    """Converts the time ``microseconds`` of an event to nanoseconds, without fractions."""
    return int(microseconds * 1000)


def broken_rules(events: list[Event]) -> list[str]:
    """Returns a description of each event in ``events`` that violates the rules of the format."""
    broken = [line for event in events for line in _fields(event)]
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = nanoseconds(event["ts"])
            slices[event["pid"], event["tid"]].append((start, start + nanoseconds(event["dur"])))
    for thread, spans in slices.items():
        broken += _nesting(thread, spans)
    return [*broken, *_flows(events), *_counters(events), *_names(events)]


def _fields(event: Event) -> list[str]:
    lines = []
    allowed = {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args", "id", "bp"}
    if set(event) - allowed or event.get("ph") not in ("X", "M", "C", "s", "f"):
        lines.append(f"unknown: {event}")
    if not isinstance(event["name"], str) or not event["name"]:
        lines.append(f"no name: {event}")
    if not (event["pid"] > 0 and 0 < event["tid"] < 2**31):
        lines.append(f"ids: {event}")
    if event["ph"] != "M" and not (isinstance(event["ts"], float) and event["ts"] >= 0):
        lines.append(f"time: {event}")
    if event["ph"] == "X" and not (isinstance(event["dur"], float) and event["dur"] > 0):
        lines.append(f"length: {event}")
    if event["ph"] == "M":
        key, kind = METADATA[event["name"]]
        if list(event["args"]) != [key] or type(event["args"][key]) is not kind:
            lines.append(f"metadata: {event}")
    return lines


def _nesting(thread: tuple[int, int], spans: list[tuple[int, int]]) -> list[str]:
    lines, open_until = [], []
    if spans != sorted(spans, key=lambda span: (span[0], -span[1])):
        lines.append(f"not in order on {thread}")
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        if open_until and end > open_until[-1]:
            lines.append(f"overlap on {thread}: {start}..{end} and ..{open_until[-1]}")
        open_until.append(end)
    return lines


def _flows(events: list[Event]) -> list[str]:
    lines = []
    ends: dict[tuple[Any, str, str], list[str]] = defaultdict(list)
    times: dict[tuple[Any, str], int] = {}
    last: dict[tuple[int, int], tuple[int, int]] = {}
    for event in events:  # The order of the events matters, because a flow must follow its slice.
        where = (event["pid"], event["tid"])
        if event["ph"] == "X":
            start = nanoseconds(event["ts"])
            last[where] = (start, start + nanoseconds(event["dur"]))
        elif event["ph"] in "sf":
            time = nanoseconds(event["ts"])
            start, end = last.get(where, (0, 0))
            if not start <= time < end:
                lines.append(f"not within a slice: {event}")
            if event["ph"] == "f" and event.get("bp") != "e":
                lines.append(f"bound to the slice that follows: {event}")
            ends[event["id"], event["cat"], event["name"]].append(event["ph"])
            times[event["id"], event["ph"]] = time
    for key, phases in ends.items():
        if sorted(phases) != ["f", "s"]:
            lines.append(f"flow {key} has {phases}")
        elif times[key[0], "f"] < times[key[0], "s"]:
            lines.append(f"flow {key} ends before it begins")
    return lines


def _counters(events: list[Event]) -> list[str]:
    lines = []
    last: dict[tuple[int, str], float] = {}
    for event in events:
        if event["ph"] != "C":
            continue
        if any(type(value) not in (int, float) or value < 0 for value in event["args"].values()):
            lines.append(f"not a number: {event}")
        if event["ts"] < last.get((event["pid"], event["name"]), 0):
            lines.append(f"goes back: {event}")
        last[event["pid"], event["name"]] = event["ts"]
    return lines


def _names(events: list[Event]) -> list[str]:
    named = Counter((e["pid"], e["tid"], e["name"]) for e in events if e["ph"] == "M")
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    owners = defaultdict(set)
    for pid, tid in threads:
        owners[tid].add(pid)
    return [
        *(f"named twice: {key}" for key, count in named.items() if count > 1),
        *(f"no name: {key}" for key in threads if not named[(*key, "thread_name")]),
        *(f"thread of several processes: {tid}" for tid, pids in owners.items() if len(pids) > 1),
    ]
