"""Channels of gloo for payloads of one shape, between real processes.

What gloo does with any shape, ``test_contract.py`` shows.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.multiprocess

Start = Callable[..., Any]


@pytest.mark.parametrize("shape", [[5, 2, 8], [0, 8], []], ids=["matrices", "empty", "scalar"])
def test_both_directions_keep_order_and_content(start: Start, shape: list[int]) -> None:
    assert start("exchange", 2, shape=shape).results() == [30, 30]


def test_sending_does_not_wait_for_the_peers_work(start: Start) -> None:
    """A receiver that takes nothing yet holds up no sender, whatever the number of messages."""
    assert start("pile_up", 2, shape=[64, 64]).results()[1] == list(range(300))


def test_killed_peer_is_named(start: Start) -> None:
    job = start("bereaved", 2, shape=[4])
    job.await_mark(1, "waits")
    job.signal(0)
    assert job.status(1) == 0, job.text(1)
    waiting, sending, closing, again = job.result(1)
    for kind, text in (waiting, sending, closing):
        assert kind == "PeerLostError"
        assert "rank 0 (stage 0 on host-0)" in text
        assert "\n" not in text
    assert again == ["none", ""]


def test_clean_close_loses_nothing(start: Start) -> None:
    seen, threads = start("close_cleanly", 2, shape=[4]).results()[1]
    assert seen == [[number, [float(number)] * 4] for number in range(3)]
    assert threads == []


def test_what_a_channel_does_not_carry_is_refused_by_the_sender(start: Start) -> None:
    """The channel still works afterwards: nothing of a refused message was sent."""
    sender, receiver = start("refused", 2).results()
    assert [kind for kind, _ in sender] == ["TransportError"] * 2
    assert "shape (3, 2) of torch.float32" in sender[0][1]
    assert "opened for (2, 3) of torch.float32" in sender[0][1]
    assert "float16" in sender[1][1]
    assert receiver == [5]


@pytest.mark.parametrize("shape", [None, [4]], ids=["any-shape", "fixed-shape"])
@pytest.mark.parametrize("words", [[1, 2, 3], [0x4D415031, 9, 0, 0, 0, 0, 0, 1, 4]])
def test_foreign_header_ends_the_channel(
    start: Start, words: list[int], shape: list[int] | None
) -> None:
    """Words of something else, or a message that is not the next one."""
    kind, text = start("foreign", 2, words=words, shape=shape).results()[1]
    assert kind == "TransportError"
    assert "rank 0" in text


@pytest.mark.parametrize("shape", [[3, 2], [4, 4]])
def test_ranks_that_disagree_about_the_shape_are_told(start: Start, shape: list[int]) -> None:
    """A payload of another shape was handed over as if it fitted."""
    kind, text = start("disagree", 2, shape=shape).results()[1]
    assert kind == "TransportError"
    assert "(2, 3)" in text
    assert str(tuple(shape)) in text


def test_flush_has_a_deadline(start: Start) -> None:
    """A peer that is stopped keeps its connection; only the time limit tells."""
    job = start("stuck", 2)
    job.await_mark(1, "ready")
    job.signal(1, signal.SIGSTOP)
    job.mark(0, "stopped")
    assert job.status(0) == 0, job.text(0)
    kind, text = job.result(0)
    assert kind == "DeadlineError"
    assert "rank 1 (stage 1 on host-1)" in text
