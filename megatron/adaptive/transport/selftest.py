"""Tries a pair's channels out: do payloads arrive as they were sent, how fast, after how long.

Both ranks of the pair call :func:`try_out` on a transport with nothing under way::

    contents     one message of each size both ways, compared bit by bit
    latency      1 KiB to and fro for a quarter of the time
    bandwidth    4 MiB one way, acknowledged in batches, for the rest of it
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from megatron.adaptive.errors import DeadlineError, TransportError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.completions import Arrival
from megatron.adaptive.transport.header import Label
from megatron.adaptive.transport.interface import Transport

__all__ = ["LARGE_BYTES", "SMALL_BYTES", "Speed", "try_out"]

SMALL_BYTES, LARGE_BYTES = 1 << 10, 4 << 20
_SIZES = (0, 1, 1000, SMALL_BYTES, 1 << 20, LARGE_BYTES + 1)
_BATCH = 8
_WAIT_S = 10.0
_GO, _STOP = 0, 1  # chunk of a label: whether another round follows
_PATTERN = 251  # prime, so that a payload that is shifted by a slot is not the same


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a channel did, as its leader saw it.

    Attributes:
        latency_s: half of a round trip of 1 KiB, the median.
        bytes_per_s: of a stream of 4 MiB messages.
    """

    latency_s: float
    bytes_per_s: float


def try_out(
    transport: Transport, peer: int, *, leads: bool, device: torch.device, seconds: float
) -> Speed | None:
    """Send to and fro between two ranks that do nothing else meanwhile.

    Args:
        transport: the channels.
        peer: global rank of the other one, which calls this too.
        leads: whether this rank measures; exactly one of the two does.
        device: where payloads are.
        seconds: how long to measure.

    Returns:
        The speed on the rank that leads.

    Raises:
        DeadlineError: the peer did not answer.
        TransportError: a payload came otherwise than it was sent, or the peer is gone.
    """
    for size in _SIZES:
        payload = (torch.arange(size, device=device) % _PATTERN).to(torch.uint8)
        _send(transport, peer, payload)
        if not torch.equal(_take(transport, peer).take(), payload):
            raise TransportError(
                f"{size} bytes from rank {peer} over {transport.name} came changed; try "
                "--transport-crc, and look at the memory and the network of both nodes"
            )
    latency_s = _ping_pong(transport, peer, leads, device, seconds / 4)
    bytes_per_s = _stream(transport, peer, leads, device, seconds * 3 / 4)
    transport.flush(_WAIT_S)
    if not leads:
        return None
    return Speed(latency_s=latency_s, bytes_per_s=bytes_per_s)


def _ping_pong(
    transport: Transport, peer: int, leads: bool, device: torch.device, seconds: float
) -> float:
    payload = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    rounds = []
    end_s = time.perf_counter() + seconds
    while leads:
        begin_s = time.perf_counter()
        last = begin_s > end_s
        _send(transport, peer, payload, _STOP if last else _GO)
        _take(transport, peer).take()
        rounds.append(time.perf_counter() - begin_s)
        if last:
            rounds.sort()
            return rounds[len(rounds) // 2] / 2
    while True:
        arrival = _take(transport, peer)
        arrival.take()
        _send(transport, peer, payload)
        if arrival.label.action.chunk == _STOP:
            return 0.0


def _stream(
    transport: Transport, peer: int, leads: bool, device: torch.device, seconds: float
) -> float:
    """Keep two batches under way, so that the channel is never idle."""
    payload = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=device)
    word = torch.zeros(1, device=device)
    if not leads:
        last = False
        while not last:
            for _ in range(_BATCH):
                arrival = _take(transport, peer)
                arrival.take()
            last = arrival.label.action.chunk == _STOP
            _send(transport, peer, word)
        return 0.0
    begin_s = time.perf_counter()
    sent = acknowledged = 0
    last = False
    while acknowledged < sent or not last:
        while not last and sent - acknowledged < 2:
            last = time.perf_counter() - begin_s > seconds
            for _ in range(_BATCH):
                _send(transport, peer, payload, _STOP if last else _GO)
            sent += 1
        _take(transport, peer).take()
        acknowledged += 1
    return acknowledged * _BATCH * LARGE_BYTES / (time.perf_counter() - begin_s)


def _send(transport: Transport, peer: int, payload: torch.Tensor, chunk: int = _GO) -> None:
    transport.send(peer, Label(0, Action(ActionKind.F, chunk, 0)), payload)


def _take(transport: Transport, peer: int) -> Arrival:
    arrival = transport.completions.wait(time.monotonic() + _WAIT_S)
    if arrival is None:
        raise DeadlineError(f"rank {peer} did not answer within {_WAIT_S:g} s")
    assert isinstance(arrival, Arrival), "nobody else puts into this queue"
    return arrival
