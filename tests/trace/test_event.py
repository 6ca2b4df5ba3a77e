"""The vocabulary: words that files of others are read with stay where they are."""

from megatron.adaptive.trace.event import (
    CAUSES,
    COLUMNS,
    KINDS,
    REASONS,
    Span,
    SpanFormat,
    TraceHeader,
    trace_file_name,
)


def test_file_name_sorts_by_rank() -> None:
    assert trace_file_name(3) == "trace_rank_00003.jsonl"
    assert trace_file_name(123456) == "trace_rank_123456.jsonl"


def test_nothing_said_is_the_first_reason_and_words_are_named_once() -> None:
    assert REASONS[0] == ""
    assert set(CAUSES) <= set(REASONS)
    for words in (KINDS, REASONS, COLUMNS):
        assert len(set(words)) == len(words)
    assert KINDS[:3] == ("F", "B", "W")


def test_processes_of_one_machine_have_one_clock() -> None:
    numbers = {"run": "r", "world_size": 2, "num_ranks": 2, "num_chunks": 1, "schedule": "x"}
    headers = [
        TraceHeader(**numbers, rank=rank, pp_rank=rank, num_microbatches=1)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    assert headers[0].clock == headers[1].clock != ""
    assert headers[0].unix_ns > headers[0].monotonic_ns > 0
    assert headers[0].span_format == SpanFormat(COLUMNS, KINDS, REASONS)
    assert headers[0].shape == (2, 2, 1)


def test_a_span_has_a_length() -> None:
    assert Span("F", 0, 1, 10, 25, 3).duration_ns == 15
