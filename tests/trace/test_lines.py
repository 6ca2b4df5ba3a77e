"""Checks that lines of trace files can be written and read back, and that damage is reported."""

import json
from collections.abc import Callable

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.trace_format import (
    KINDS,
    ClockSamples,
    IterationStart,
    TraceHeader,
    block_text,
    header_line,
    parse_line,
    samples_line,
)
from tests.trace.conftest import make_header


def header(**changes: object) -> TraceHeader:
    return make_header(1, num_chunks=2, world_size=4, dp_rank=1, **changes)


def test_header_and_samples_survive_their_line() -> None:
    samples = ClockSamples(0, ((8, 93, 95, 11), (20, 104, 107, 25)))
    for line, record in ((header_line(h := header()), h), (samples_line(samples), samples)):
        assert line.endswith("}\n")
        assert line.count("\n") == 1
        assert parse_line(line, "file:1") == record


def test_a_header_says_what_stages_hold_or_does_not() -> None:
    full = header(layers=(2, 0, 3), work=(2.0, 0.0, 3.75))
    assert parse_line(header_line(full), "here") == full
    record = json.loads(header_line(full))
    del record["layers"], record["work"]
    bare = parse_line(json.dumps(record), "here")
    assert isinstance(bare, TraceHeader)
    assert (bare.layers, bare.work) == ((), ())
    for wrong in ("4", [-1], [None]):
        with pytest.raises(TraceError, match="field 'work' must be non-negative numbers, got"):
            parse_line(json.dumps({**record, "work": wrong}), "here")


def test_a_block_says_what_follows() -> None:
    rows = [
        (0, 1, 3, 0, 1100, 1250, 64, 128, 2, -1, -1, 9),
        (4, 0, 3, 0, 1250, 1260, 64, 0, 0, 5, 0, 0),
        (0, 1, 4, 0, 990, 1000, 0, 0, 0, -1, -1, 0),
    ]
    marker, *spans = block_text(IterationStart(7, 8, 1000), rows).splitlines(keepends=True)
    counts = [0] * len(KINDS)
    counts[0], counts[4] = 2, 1
    assert parse_line(marker, "file:2") == IterationStart(
        7, 8, 1000, tuple(counts), sum(map(len, spans))
    )
    assert spans == [
        "[0,1,3,0,100,150,64,128,2,-1,-1,9]\n",
        "[4,0,3,0,250,10,64,0,0,5,0,0]\n",
        "[0,1,4,0,-10,10,0,0,0,-1,-1,0]\n",
    ]
    late = parse_line(block_text(IterationStart(7, 8, is_late=True), []), "file:3")
    assert isinstance(late, IterationStart)
    assert late.is_late


def test_unknown_fields_and_records_are_ignored() -> None:
    line = samples_line(ClockSamples(0, ((8, 93, 95, 11),)))
    extended = {**json.loads(line), "mood": "good"}
    assert parse_line(json.dumps(extended), "file:2") == parse_line(line, "")
    assert parse_line('{"heartbeat": 1}', "file:3") is None


def changed(change: Callable[[dict[str, object]], object]) -> str:
    record = json.loads(header_line(header()))
    change(record)
    return json.dumps(record)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"action": "F", "chu', "is not valid JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"begin_iteration": -1, "num_microbatches": 1}', "must be from 0 to .*, got -1"),
        ('{"after_iteration": -1, "num_microbatches": 1}', "must be from 0 to .*, got -1"),
        ('{"format": "other", "version": 1}', "'other'"),
        ('{"format": "megatron-adaptive-trace", "version": "1"}', "version must be 2, got '1'"),
        (changed(lambda h: h.update(version=1)), "version 1, .* version 2; record the run again"),
        (changed(lambda h: h.update(version=6)), "version 6, .* version 2; use a newer"),
        (changed(lambda h: h.pop("run")), "field 'run' must be a string, got None"),
        (
            changed(lambda h: h.update(columns=["kind", 3])),
            "'columns' must be a list of strings, got",
        ),
        (changed(lambda h: h.update(columns=["kind"])), "columns are .* use a newer version"),
        (changed(lambda h: h.update(pp_rank=2)), "pp_rank must be from 0 to 1, got 2"),
        (changed(lambda h: h.update(world_size=0)), "world_size must be from 1 to .*, got 0"),
        (changed(lambda h: h.update(pid=1.5)), "'pid' must be an integer, got 1.5"),
        ('{"begin_iteration": "x"}', "'begin_iteration'"),
        (
            '{"begin_iteration": 1, "num_microbatches": 1, "start_ns": 0, "counts": [1.5]}',
            "'counts'",
        ),
        (
            '{"begin_iteration": 1, "num_microbatches": 1, "start_ns": 0, "size_bytes": null}',
            "'size_bytes'",
        ),
        (
            '{"begin_iteration": 1, "num_microbatches": 1, "start_ns": 0, "size_bytes": 0, '
            '"lengths": [[]]}',
            "'lengths'",
        ),
        ('{"clock_samples": [[1, 2, 3]], "reference": 0}', "lists of four"),
        ('{"clock_samples": [[1, 2, 3, 4]]}', "'reference'"),
    ],
)
def test_bad_lines_are_refused_in_one_line(line: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        parse_line(line, "trace.jsonl:12")
    assert "trace.jsonl:12" in str(caught.value)
    assert "\n" not in str(caught.value)
