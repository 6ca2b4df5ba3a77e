"""Measures message times between two processes, without torch, so that MPI ranks can use it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol


class Link(Protocol):
    """Bidirectional connection between two processes that carries messages."""

    def expect(self, nbytes: int, count: int) -> None:
        """Prepares to receive ``count`` messages of ``nbytes`` bytes, for example posts buffers."""

    def send(self, payload: Any) -> None:
        """Starts sending ``payload``. May wait until older messages have been sent."""

    def settle(self) -> None:
        """Waits until the buffers of all sent payloads may be reused."""

    def receive(self) -> Any:
        """Waits for the next message and returns it. The buffer is valid until the next call."""

    def close(self) -> None:
        """Closes the link. Both processes must call this together."""


def stream_s(
    link: Link, sources: Sequence[Any], messages: int, *, token: Any, sends: bool
) -> float | None:
    """Returns the seconds per message of a one-way stream, or ``None`` on the receiver.

    Args:
        link: Link between the two processes.
        sources: Payloads, which are sent in rotation.
        messages: Number of messages.
        token: Small payload that the receiver sends when it is ready, and again when it is done.
        sends: Whether this process is the sender.
    """
    if not sends:
        link.expect(sources[0].nbytes, messages)
        link.send(token)
        for _ in range(messages):
            link.receive()
        link.send(token)
        link.settle()
        return None
    link.expect(token.nbytes, 2)
    link.receive()
    start_s = time.perf_counter()
    for number in range(messages):
        link.send(sources[number % len(sources)])
    link.receive()
    seconds = (time.perf_counter() - start_s) / messages
    link.settle()
    return seconds


def half_round_trip_s(link: Link, payload: Any, *, rounds: int, warmups: int, sends: bool) -> float:
    """Returns the mean time in seconds of a message in one direction (half of a round trip).

    Args:
        link: Link between the two processes.
        payload: Message to send.
        rounds: Number of measured round trips.
        warmups: Number of round trips before the measurement starts.
        sends: Whether this process sends first.
    """
    link.expect(payload.nbytes, warmups + rounds)
    start_s = 0.0
    for number in range(warmups + rounds):
        if number == warmups:
            start_s = time.perf_counter()
        if sends:
            link.send(payload)
        link.receive()
        if not sends:
            link.send(payload)
    seconds = (time.perf_counter() - start_s) / rounds / 2
    link.settle()
    return seconds
