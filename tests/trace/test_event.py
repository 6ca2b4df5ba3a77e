"""The lines of a trace file: what is written can be read, and what is wrong is named."""

import json

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.event import (
    FORMAT_VERSION,
    IterationStart,
    Span,
    TraceHeader,
    parse_line,
    trace_file_name,
)


def header(**changes: object) -> TraceHeader:
    values: dict[str, object] = {
        "run": "run-1",
        "rank": 1,
        "world_size": 4,
        "pp_rank": 1,
        "num_ranks": 2,
        "num_chunks": 2,
        "num_microbatches": 8,
        "schedule": "adaptive",
        "dp_rank": 1,
    }
    return TraceHeader.create(**{**values, **changes})  # type: ignore[arg-type]


SPAN = Span("F", 1, 3, 100, 250, 7, wait_ns=20, bytes=4096, in_flight_bytes=8192)


@pytest.mark.parametrize("record", [header(), IterationStart(7, 8), SPAN])
def test_a_record_survives_its_line(record: TraceHeader | IterationStart | Span) -> None:
    line = record.to_line()
    assert "\n" not in line
    assert parse_line(line, "file:1") == record


def test_header_carries_format_version_and_clock_pair() -> None:
    written = json.loads(header().to_line())
    assert written["format"] == "megatron-adaptive-trace"
    assert written["version"] == FORMAT_VERSION
    assert written["monotonic_ns"] > 0
    assert written["unix_ns"] > written["monotonic_ns"]


def test_file_name_sorts_by_rank() -> None:
    assert trace_file_name(3) == "trace_rank_00003.jsonl"
    assert trace_file_name(123456) == "trace_rank_123456.jsonl"


def test_unknown_fields_and_records_are_ignored() -> None:
    extended = {**json.loads(SPAN.to_line()), "queue_depth": 3, "reason": "oldest"}
    assert parse_line(json.dumps(extended), "file:2") == SPAN
    assert parse_line('{"heartbeat": 1}', "file:3") is None


def test_optional_span_fields_default_to_zero() -> None:
    line = (
        '{"action": "send", "chunk": 0, "microbatch": 1, "start_ns": 1, "end_ns": 1, '
        '"iteration": 2}'
    )
    assert parse_line(line, "file:1") == Span("send", 0, 1, 1, 1, 2)


def test_newer_version_is_refused_naming_both() -> None:
    record = {**json.loads(header().to_line()), "version": FORMAT_VERSION + 4}
    with pytest.raises(TraceError, match=rf"version {FORMAT_VERSION + 4}.*up to {FORMAT_VERSION}"):
        parse_line(json.dumps(record), "file:1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"action": "F", "chu', "not a line of JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"format": "other", "version": 1}', "'other'"),
        ('{"format": "megatron-adaptive-trace", "version": "1"}', "version '1'"),
        ('{"format": "megatron-adaptive-trace", "version": 1}', "lacks the text field 'run'"),
        ('{"begin_iteration": "x"}', "'begin_iteration'"),
        ('{"action": "F", "chunk": 0}', "lacks the field 'microbatch'"),
        (SPAN.to_line().replace("250", "2.5"), "wrong type"),
        (SPAN.to_line().replace("250", "90"), "ends 10 ns before it starts"),
        (header().to_line().replace('"pp_rank": 1', '"pp_rank": 2'), "pp_rank is 2"),
    ],
)
def test_bad_lines_are_refused_in_one_line(line: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        parse_line(line, "trace.jsonl:12")
    assert "trace.jsonl:12" in str(caught.value)
    assert "\n" not in str(caught.value)
