"""Tests the message header and the queue of received messages, which all transports share."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megatron.adaptive.errors import PeerLostError, TransportError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.interface import (
    HEADER_WORDS,
    Arrival,
    CompletionQueue,
    Header,
    HeldArrival,
    Label,
)

WATCHDOG_S = 30.0
FORWARD = Label(4, Action(ActionKind.F, 1, 9))


def arrival(microbatch: int, tensor: torch.Tensor | None = None) -> Arrival:
    payload = torch.zeros(1) if tensor is None else tensor
    label = Label(0, Action(ActionKind.F, 0, microbatch))
    return HeldArrival(label, 2, payload.nbytes, lambda: payload)


@pytest.mark.parametrize(
    "header",
    [
        Header(FORWARD, (3, 0, 5), torch.bfloat16, 0),
        Header(Label(10**9, Action(ActionKind.B, 0, 70_000)), (), torch.float64, 2**40),
        Header(FORWARD, (1, 2, 3, 4, 5, 6, 7), torch.float8_e5m2, 1),
        Header(None, (0,), torch.float32, 12),
    ],
    ids=["forward", "backward", "most-dimensions", "end"],
)
def test_header_survives_the_way(header: Header) -> None:
    numbers = header.words()
    assert len(numbers) == HEADER_WORDS
    assert Header.decode(numbers, peer=1) == header


@pytest.mark.parametrize(
    ("word", "value"),
    [(0, 7), (3, 2), (3, -2), (6, 99), (6, -1), (7, 8), (7, -1), (8, -3)],
    ids=["magic", "kind", "kind-", "dtype", "dtype-", "dimensions", "dimensions-", "size"],
)
def test_foreign_words_are_refused(word: int, value: int) -> None:
    numbers = Header(FORWARD, (2, 2), torch.float32, 0).words()
    numbers[word] = value
    with pytest.raises(TransportError, match="from rank 5 is not valid"):
        Header.decode(numbers, peer=5)


def test_a_failed_channel_is_told_in_its_turn() -> None:
    """Checks that messages that arrived before a failure are returned before it is raised."""
    queue = CompletionQueue()
    for _ in range(2):
        queue.put(arrival(0))
        queue.put(PeerLostError("rank 3 is gone"))
    assert queue.poll() is not None
    with pytest.raises(PeerLostError, match="rank 3 is gone"):
        queue.poll()
    assert queue.wait(time.monotonic() + WATCHDOG_S) is not None
    with pytest.raises(PeerLostError, match="rank 3 is gone"):
        queue.wait(time.monotonic() + WATCHDOG_S)


def test_a_wait_that_is_almost_over_returns() -> None:
    """Checks that very short waits end. Before Python 3.13, those of ``SimpleQueue`` may hang."""
    completions = CompletionQueue()

    def wait_often() -> None:
        for number in range(3000):
            completions.put(arrival(0))
            assert completions.poll() is not None
            assert completions.wait(time.monotonic() + number * 1e-9) is None

    thread = threading.Thread(target=wait_often, daemon=True)
    thread.start()
    thread.join(WATCHDOG_S)
    assert not thread.is_alive()
