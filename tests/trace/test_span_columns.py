"""Tests that spans are converted to columns and back, and that sends and receives are matched."""

from typing import Any

import numpy as np

from megatron.adaptive.trace.span_columns import (
    KIND,
    match_messages,
    microbatches_of,
    rows_by_value,
    wait_before,
)
from megatron.adaptive.trace.trace_format import Span
from tests.trace.conftest import table_of

SPANS = (
    Span("wait", 1, 3, 10, 40, 7, of="B", peer=2, reason="input"),
    Span("B", 1, 3, 40, 90, 7, wait_ns=30, bytes=64, in_flight_bytes=128, queue_depth=1),
    Span("W", 0, 3, 95, 99, 7, piece=2, reason="filler"),
    Span("send", 0, 3, 91, 92, 8, bytes=64, peer=0, of="B"),
    Span("checkpoint", -1, -1, 200, 900, 8),
)


def test_spans_survive_the_table() -> None:
    table = table_of(SPANS)
    assert table.spans() == SPANS
    assert table.duration_ns.tolist() == [30, 50, 4, 1, 700]
    assert len(table) == 5


def test_a_wait_belongs_to_the_action_it_names() -> None:
    # The table contains two waits for the same action, a wait in iteration 2, and a wait for an
    # action that does not exist.
    rows = (
        Span("F", 0, 1, 0, 5, 1),
        Span("B", 0, 1, 50, 60, 1),
        Span("wait", 0, 1, 20, 25, 1, of="B"),
        Span("wait", 0, 1, 30, 33, 1, of="B"),
        Span("wait", 0, 1, 70, 71, 2, of="F"),
        Span("wait", 0, 9, 80, 90, 1, of="F"),
        Span("F", 0, 1, 71, 75, 2),
    )
    assert wait_before(table_of(rows)).tolist() == [0, 8, 0, 0, 0, 0, 1]


def test_pieces_are_distinguished() -> None:
    rows = [Span("W", 0, 0, 10 * piece, 10 * piece + 5, 1, piece=piece) for piece in range(3)]
    rows.append(Span("wait", 0, 0, 15, 20, 1, of="W", piece=2))
    assert wait_before(table_of(rows)).tolist() == [0, 0, 5, 0]


def end(kind: str, of: str, microbatch: int, peer: int, start_ns: int, **more: object) -> Span:
    values: dict[str, object] = {"bytes": 8, "peer": peer, "of": of, **more}
    return Span(kind, 0, microbatch, start_ns, start_ns + 5, 1, **values)  # type: ignore[arg-type]


def test_both_ends_of_each_message() -> None:
    tables = {
        4: table_of(
            [
                end("send", "F", 0, 7, 10),
                end("send", "F", 1, 7, 20),
                end("receive", "B", 0, 7, 90, reason="found"),
                end("send", "F", 2, 7, 30),  # Rank 7 has not received this message.
                Span("F", 0, 0, 0, 10, 1),
            ]
        ),
        7: table_of(
            [
                end("receive", "F", 1, 4, 26, reason="seen"),
                end("receive", "F", 0, 4, 17, reason="seen"),
                end("send", "B", 0, 4, 60),
                # The sender of this message is rank 3, which has no trace.
                end("receive", "F", 5, 3, 40, reason="seen"),
            ]
        ),
    }
    messages = match_messages(tables)
    assert len(messages) == 3
    rows = zip(
        *(messages.source, messages.target, messages.of, messages.microbatch, messages.sent_ns),
        *(messages.arrived_ns, messages.taken_ns, messages.seen),
        strict=True,
    )
    assert [tuple(map(int, row)) for row in rows] == [
        (7, 4, KIND["B"], 0, 60, 90, 95, 0),
        (4, 7, KIND["F"], 1, 20, 26, 31, 1),
        (4, 7, KIND["F"], 0, 10, 17, 22, 1),
    ]
    assert messages.bytes.tolist() == [8, 8, 8]


def test_iterations_are_distinguished() -> None:
    tables = {
        rank: table_of(
            [
                Span(kind, 0, 0, 100 * i + rank, 100 * i + rank, i, peer=1 - rank, of="F")
                for i in (1, 2)
            ]
        )
        for rank, kind in enumerate(("send", "receive"))
    }
    messages = match_messages(tables)
    assert (messages.arrived_ns - messages.sent_ns).tolist() == [1, 1]
    assert messages.iteration.tolist() == [1, 2]


def test_each_item_finds_its_microbatch_in_one_pass() -> None:
    """Checks that the number of passes over the spans does not grow with the iterations."""
    counts = {3: 1, 5: 2, 9: (3, 1)}
    iterations = np.array([9, 5, 3, 9, 9, 5, 9, 9])
    items = np.array([3, 2, 7, 0, 2, -1, 4, -1])
    microbatches, numbers = microbatches_of(iterations, items, counts.__getitem__)
    assert microbatches.tolist() == [1, 1, 7, 0, 0, -1, 2, -1]
    assert numbers.tolist() == [1, 2, 1, 3, 3, 1, 1, 1]

    class Compared(np.ndarray):  # type: ignore[type-arg]
        """Array that counts the elementwise comparisons with ``==``."""

        times = 0

        def __eq__(self, other: object) -> Any:
            Compared.times += 1
            return np.asarray(self) == other

    many = np.arange(1000).view(Compared)
    microbatches_of(many, np.zeros(1000, dtype=np.int64), lambda _: 2)
    assert Compared.times <= 2
    assert list(rows_by_value(np.array([], dtype=np.int64))) == []
