"""Measures message times between two processes, without torch, so that MPI ranks can use it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol


class Link(Protocol):
    """Bidirectional connection that carries messages between two processes."""

    def expect(self, nbytes: int, count: int) -> None:
        """Prepares for ``count`` messages of ``nbytes`` bytes, for example by posting receives."""

    def send(self, payload: Any) -> None:
        """Starts to send ``payload``. May wait until previous messages have been sent."""

    def settle(self) -> None:
        """Waits until the buffers of all sent messages may be reused."""

    def receive(self) -> Any:
        """Waits for the next message and returns it. The message is valid until the next call."""

    def close(self) -> None:
        """Closes the link. Both processes must call this together."""


def stream_s(
    link: Link, sources: Sequence[Any], messages: int, *, token: Any, sends: bool
) -> float | None:
    """Measures a stream of messages in one direction, and returns the seconds per message.

    The result is ``None`` on the receiver.

    Args:
        link: Link between the two processes.
        sources: Payloads of the messages, which are sent in rotation.
        messages: Number of messages.
        token: Small payload that the receiver sends when it is ready, and again when it has
            received all messages.
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
    """Returns the duration of one message, which is half of a mean round trip, in seconds.

    Args:
        link: Link between the two processes.
        payload: Message to send.
        rounds: Number of measured round trips.
        warmups: Number of additional round trips before the measurement starts.
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
