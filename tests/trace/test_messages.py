"""Sends find their receives."""

from megatron.adaptive.trace.event import Span
from megatron.adaptive.trace.messages import match_messages
from megatron.adaptive.trace.table import KIND, TraceTable


def end(kind: str, of: str, microbatch: int, peer: int, at: int, **more: object) -> Span:
    values: dict[str, object] = {"bytes": 8, "peer": peer, "of": of, **more}
    return Span(kind, 0, microbatch, at, at + 5, 1, **values)  # type: ignore[arg-type]


def test_both_ends_of_each_message() -> None:
    tables = {
        4: TraceTable.from_spans(
            [
                end("send", "F", 0, 7, 10),
                end("send", "F", 1, 7, 20),
                end("receive", "B", 0, 7, 90, reason="found"),
                end("send", "F", 2, 7, 30),  # never arrived
                Span("F", 0, 0, 0, 10, 1),
            ]
        ),
        7: TraceTable.from_spans(
            [
                end("receive", "F", 1, 4, 26, reason="seen"),
                end("receive", "F", 0, 4, 17, reason="seen"),
                end("send", "B", 0, 4, 60),
                end("receive", "F", 5, 3, 40, reason="seen"),  # of a rank without a trace
            ]
        ),
    }
    found = match_messages(tables)
    assert len(found) == 3
    rows = zip(
        *(found.source, found.target, found.of, found.microbatch, found.sent_ns),
        *(found.handed_ns, found.arrived_ns, found.taken_ns, found.seen),
        strict=True,
    )
    assert [tuple(map(int, row)) for row in rows] == [
        (7, 4, KIND["B"], 0, 60, 65, 90, 95, 0),
        (4, 7, KIND["F"], 1, 20, 25, 26, 31, 1),
        (4, 7, KIND["F"], 0, 10, 15, 17, 22, 1),
    ]
    assert found.bytes.tolist() == [8, 8, 8]


def test_iterations_are_told_apart() -> None:
    tables = {
        rank: TraceTable.from_spans(
            [
                Span(kind, 0, 0, 100 * i + rank, 100 * i + rank, i, peer=1 - rank, of="F")
                for i in (1, 2)
            ]
        )
        for rank, kind in enumerate(("send", "receive"))
    }
    found = match_messages(tables)
    assert (found.arrived_ns - found.sent_ns).tolist() == [1, 1]
    assert found.iteration.tolist() == [1, 2]
