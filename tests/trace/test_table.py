"""Columns of spans: made from objects and back, chosen by kind, waits put down to actions."""

from megatron.adaptive.trace.event import Span
from megatron.adaptive.trace.table import TraceTable, wait_before

SPANS = (
    Span("wait", 1, 3, 10, 40, 7, of="B", peer=2, reason="input"),
    Span("B", 1, 3, 40, 90, 7, wait_ns=30, bytes=64, in_flight_bytes=128, queue_depth=1),
    Span("W", 0, 3, 95, 99, 7, piece=2, reason="filler"),
    Span("send", 0, 3, 91, 92, 8, bytes=64, peer=0, of="B"),
    Span("checkpoint", -1, -1, 200, 900, 8),
)


def test_spans_survive_the_table() -> None:
    table = TraceTable.from_spans(SPANS)
    assert table.spans() == SPANS
    assert table.duration_ns.tolist() == [30, 50, 4, 1, 700]
    assert len(table) == 5


def test_a_wait_belongs_to_the_action_it_names() -> None:
    # Two waits for one action, one for another iteration's, one for an action that is not there.
    rows = (
        Span("F", 0, 1, 0, 5, 1),
        Span("B", 0, 1, 50, 60, 1),
        Span("wait", 0, 1, 20, 25, 1, of="B"),
        Span("wait", 0, 1, 30, 33, 1, of="B"),
        Span("wait", 0, 1, 70, 71, 2, of="F"),
        Span("wait", 0, 9, 80, 90, 1, of="F"),
        Span("F", 0, 1, 71, 75, 2),
    )
    assert wait_before(TraceTable.from_spans(rows)).tolist() == [0, 8, 0, 0, 0, 0, 1]


def test_pieces_are_distinguished() -> None:
    rows = [Span("W", 0, 0, 10 * piece, 10 * piece + 5, 1, piece=piece) for piece in range(3)]
    rows.append(Span("wait", 0, 0, 15, 20, 1, of="W", piece=2))
    assert wait_before(TraceTable.from_spans(rows)).tolist() == [0, 0, 5, 0]
