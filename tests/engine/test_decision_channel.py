"""Channels between the members of a tensor-parallel group, in shared memory and as messages."""

from __future__ import annotations

import pytest

from .conftest import BOARDS, Start

pytestmark = [pytest.mark.multiprocess, pytest.mark.parametrize("board", BOARDS)]


def test_numbers_keep_their_order_and_silence_is_an_error(board: str, start: Start) -> None:
    # There are more numbers than fit into the channel.
    writer, *readers = start("many", board, 3)
    for reader in readers:
        assert reader["read"] == writer["read"]
        kind, text = reader["error"]
        assert text.splitlines() == [text]
        assert text.startswith("no word of rank 0 (stage 1)")
        if board == "memory":
            assert kind == "DeadlineError"
        else:
            assert kind == "PeerLostError"
            assert "within 0.2 s" in text


def test_a_reader_that_takes_nothing_is_an_error(board: str, start: Start) -> None:
    (kind, text), _ = start("deaf", board, 2)
    assert text.splitlines() == [text]
    assert "rank 1 (stage 1)" in text
    assert "within 0.2 s" in text
    assert kind == ("DeadlineError" if board == "memory" else "PeerLostError")
