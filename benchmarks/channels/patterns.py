"""What the two processes of a pair do, and which part of it is timed.

Both run the same function; the first, which sends, returns the seconds.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from .worker import Member

ROTATING = 4
"""Tensors that a producer writes in turns, as a pipeline does with its activations."""
_TOKEN_BYTES = 8
_WARMUPS = 20


def copy(member: Member, *, kind: str, nbytes: int, messages: int) -> float | None:
    """Seconds of a copy within one process, all memory cold: as many targets as sources."""
    if member.rank:
        return None
    function = getattr(member.copies, kind)
    pools = member.pool("targets", nbytes), member.pool("sources", nbytes)
    addresses = [tuple(map(member.address, pair)) for pair in zip(*pools, strict=True)]
    start = time.perf_counter()
    for index in range(messages):
        target, source = addresses[index % len(addresses)]
        function(target, source, nbytes)
    return (time.perf_counter() - start) / messages


def stream(
    member: Member,
    *,
    connector: str,
    nbytes: int,
    messages: int,
    options: dict[str, Any],
    name: str | None = None,
    fresh: bool = False,
    in_place: bool = False,
) -> float | None:
    """Seconds per message of a one-way stream of tensors whose memory is cold.

    Args:
        member: this process.
        connector: what sends.
        nbytes: size of a message.
        messages: how many.
        options: of the connector.
        name: of the connector, see :meth:`Member.connector`.
        fresh: whether each tensor is written before it is sent, and read when it has arrived.
        in_place: whether it is written into reserved memory; ours only.
    """
    link: Any = member.connector(connector, options, name)
    token = member.pool("token", _TOKEN_BYTES, 1)[0]
    if member.rank:
        link.expect(nbytes, messages)
        link.send(token)
        for _ in range(messages):
            payload = link.receive()
            if fresh:
                member.copies.read(member.address(payload), nbytes)
            del payload
        link.send(token)
        link.settle()
        return None
    sources = member.pool("sources", nbytes)
    if fresh:
        sources = sources[:ROTATING]
    gc.collect()  # rather than within the measurement
    link.expect(_TOKEN_BYTES, 2)
    link.receive()
    start = time.perf_counter()
    for index in range(messages):
        source = sources[index % len(sources)]
        if in_place:
            source = link.reserve(nbytes)
        elif fresh:
            link.settle(len(sources) - 1)
        if fresh:
            member.copies.write(member.address(source), nbytes, index)
        link.send(source)
    link.receive()
    seconds = (time.perf_counter() - start) / messages
    link.settle()
    return seconds


def half_round_trip(
    member: Member,
    *,
    connector: str,
    nbytes: int,
    rounds: int,
    options: dict[str, Any],
    name: str | None = None,
) -> float:
    """Seconds from one process to the other."""
    link = member.connector(connector, options, name)
    payload = member.pool("ping", nbytes, 1)[0]
    link.half_round_trip_s(payload, _WARMUPS)  # the other one may come to it later
    return link.half_round_trip_s(payload, rounds)


def hand_over(
    member: Member, *, connector: str, nbytes: int, rounds: int, options: dict[str, Any]
) -> list[float]:
    """Moments at which reserved memory left the one process and was in the other; ours only."""
    link: Any = member.connector(connector, options)
    moments: list[float] = link.hand_over(nbytes, rounds)
    return moments
