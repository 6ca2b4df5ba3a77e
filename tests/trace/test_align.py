"""Tests how the clocks of ranks are aligned: by samples, by messages, or by wall-clock time."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.trace_format import ClockSamples, Span, TraceHeader
from tests.trace.conftest import make_header, record, write_spans

UNIX = 1_700_000_000_000_000_000
Header = Callable[..., TraceHeader]
Write = Callable[..., Path]


def starts(run: RunTrace, iteration: int = 1) -> list[int]:
    return [trace.spans(iteration)[0].start_ns for trace in run.ranks.values()]


def on_host(header: TraceHeader, name: str, monotonic_ns: int, unix_ns: int) -> TraceHeader:
    return replace(header, host=name, clock=name, monotonic_ns=monotonic_ns, unix_ns=unix_ns)


def test_ranks_of_one_clock_keep_their_monotonic_times(tmp_path: Path) -> None:
    # The monotonic clock and the time of day of the second rank have advanced by slightly different
    # amounts, because the time of day is adjusted and reading clocks takes time.
    header = make_header(0)
    write_spans(tmp_path, header, [Span("F", 0, 0, 100, 200, 1)])
    later = replace(make_header(1), unix_ns=header.unix_ns + 7_000_050_000)
    later = replace(later, monotonic_ns=header.monotonic_ns + 7_000_000_000)
    write_spans(tmp_path, later, [Span("F", 0, 0, 200, 300, 1)])
    run = read_run(tmp_path)
    assert starts(run) == [100, 200]
    assert run.alignment.describe() == "one for all ranks"
    assert run.notes() == []


def test_ranks_of_two_hosts_are_moved_onto_unix_time(tmp_path: Path) -> None:
    here = on_host(make_header(0), "a", 1_000, UNIX)
    there = on_host(make_header(1), "b", 9_000_000, UNIX + 500)
    write_spans(tmp_path, here, [Span("F", 0, 0, 1_100, 1_200, 1)])
    write_spans(tmp_path, there, [Span("F", 0, 0, 9_000_700, 9_000_900, 1)])
    run = read_run(tmp_path)
    assert starts(run) == [UNIX + 100, UNIX + 1_200]
    assert run.ranks[1].spans(1)[0].duration_ns == 200
    assert run.notes() == [
        "the clock offsets of ranks 1 were not measured, but estimated from the machines' time of "
        "day"
    ]


def exchanges(offset_ns: int, at_ns: Iterable[int]) -> ClockSamples:
    """Returns samples that compare a clock with a reference clock that is ``offset_ns`` ahead.

    Each message takes 20 us. ``at_ns`` contains the times at which requests were sent.
    """
    return ClockSamples(
        0,
        tuple(
            (sent_ns, sent_ns + offset_ns + 20_000, sent_ns + offset_ns + 30_000, sent_ns + 50_000)
            for sent_ns in at_ns
        ),
    )


def write_measured(folder: Path, offset_ns: int) -> None:
    """Writes the traces of rank 0 on one host, and of ranks 1 and 2 on another host.

    The wall clock of the second host is one hour ahead, and its monotonic clock is ``offset_ns``
    behind. Only the trace of rank 1 contains clock samples.
    """
    write_spans(
        folder, on_host(make_header(0, 3), "a", 0, UNIX), [Span("F", 0, 0, 10**9, 10**9, 1)]
    )
    for rank in (1, 2):
        header = on_host(make_header(rank, 3), "b", 0, UNIX + 3600 * 10**9)
        begin = 10**9 - offset_ns + 1000 * rank
        with Recorder(folder, header) as recorder:
            if rank == 1:
                recorder.add_clock_samples(exchanges(offset_ns, range(begin, begin + 10**7, 10**6)))
            recorder.begin_iteration(1, 4, start_ns=begin)
            record(recorder, "F", 0, 0, begin, begin + 10)


def test_samples_of_one_rank_place_all_ranks_of_its_clock(tmp_path: Path) -> None:
    write_measured(tmp_path, offset_ns=-5_000_000_123)
    run = read_run(tmp_path)
    assert starts(run) == pytest.approx([UNIX + 10**9 + 1000 * rank for rank in range(3)], abs=2)
    assert run.notes() == []
    text = run.alignment.describe()
    assert text.startswith("2 clocks, 1 with measured offsets: residual 0.0 us, error below")
    assert run.alignment.clocks[1].ranks == (1, 2)


def test_samples_serve_where_the_reference_itself_is_missing(tmp_path: Path) -> None:
    write_measured(tmp_path, offset_ns=700)
    (tmp_path / "trace_rank_00000.jsonl").unlink()
    first, second = starts(read_run(tmp_path))
    assert second - first == 1000
    assert first == pytest.approx(UNIX + 3600 * 10**9 + 10**9 + 300, abs=2)


def conversation(folder: Path, error_ns: int, *starts: int) -> RunTrace:
    """Returns a run in which rank 0 sends a forward message and rank 1 sends a backward message.

    ``starts`` contains four times: when the forward message was sent and received, and when the
    backward message was sent and received. The wall clock of rank 1 is ``error_ns`` ahead.
    """
    kinds = (("send", 0, "F"), ("receive", 1, "F"), ("send", 1, "B"), ("receive", 0, "B"))
    for rank in range(2):
        spans = [
            Span(kind, 0, 0, start, start + 10, 1, peer=1 - rank, of=of, reason="seen")
            for (kind, owner, of), start in zip(kinds, starts, strict=True)
            if owner == rank
        ]
        header = on_host(make_header(rank), "ab"[rank], 0, UNIX + rank * error_ns)
        write_spans(folder, header, sorted(spans, key=lambda span: span.start_ns))
    return read_run(folder)


def test_messages_place_a_clock_that_was_not_measured(tmp_path: Path) -> None:
    run = conversation(tmp_path, 70_000, 1000, 1300, 5000, 5100)
    # The offset between the clocks is unknown, so both messages are assumed to take the same time:
    # 200 ns, the mean of the two apparent times of 300 ns and 100 ns.
    assert starts(run) == [UNIX + 1000, UNIX + 1200]
    assert "estimated from messages" in run.notes()[0]
    assert run.alignment.contradiction_ns == 0


def test_clocks_that_contradict_their_messages_are_named(tmp_path: Path) -> None:
    notes = conversation(tmp_path, 0, 9000, 5000, 999, 1).notes()
    text = "do not match: according to them, a message arrives 2.5 us before"
    assert any(text in note for note in notes)
