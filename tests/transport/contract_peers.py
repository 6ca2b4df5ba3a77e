"""Programs of the contract suite about peers: several of them, lost ones, those of other jobs."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from megatron.adaptive import extension
from megatron.adaptive.errors import AdaptiveError
from megatron.adaptive.transport.interface import Arrival, Transport

from .contract_rank import (
    LIMIT_S,
    SLOT_BYTES,
    SLOTS,
    Rank,
    error_of,
    label,
    numbers,
    require_equal,
    wait,
)


def all_to_all(rank: Rank, kind: str, count: int) -> dict[int, int]:
    """Every rank sends to every other one; returns how many messages came from whom."""
    transport, _ = rank.open(kind)
    peers = [peer for peer in range(rank.num_ranks) if peer != rank.rank]
    for number in range(count):
        for peer in peers:
            tensor = numbers(10 + number * 13 % 2000, number + 7 * rank.rank)
            transport.send(peer, label(number, chunk=rank.rank), tensor)
    came = dict.fromkeys(peers, 0)
    for _ in range(count * len(peers)):
        arrival = wait(transport)
        number = came[arrival.peer]
        assert arrival.label == label(number, chunk=arrival.peer)
        expected = numbers(10 + number * 13 % 2000, number + 7 * arrival.peer)
        require_equal(arrival.take(), expected)
        came[arrival.peer] += 1
    transport.close()
    return came


def meet_killed(rank: Rank, kind: str, doing: str) -> list[Any]:
    """Rank 0 is killed by the test while rank 1 sends to it, receives from it or waits for it.

    Returns:
        What rank 1 saw: errors of its queue and of further sends, and how long that took.
    """
    transport, _ = rank.open(kind)
    if rank.rank == 0:
        transport.send(1, label(5, chunk=2), torch.ones(3))
        rank.await_mark("going")
        rank.mark("ready")
        number = 0
        while True:
            if doing == "receiving":
                transport.send(1, label(number), torch.ones(SLOT_BYTES * 8))
                number += 1
                transport.flush(LIMIT_S)
            elif doing == "sending":
                wait(transport).take()
            else:
                time.sleep(LIMIT_S)
    wait(transport).take()
    rank.mark("going")
    end_s = time.monotonic() + LIMIT_S
    first = ["none", ""]
    while first[0] == "none" and time.monotonic() < end_s:
        if doing == "sending":
            first = error_of(lambda: transport.send(0, label(1), torch.ones(SLOT_BYTES)))
            if first[0] == "none":
                first = error_of(lambda: _take(transport, 0.0))
        else:
            first = error_of(lambda: _take(transport, 1.0))
    noticed_s = time.time()
    if kind != "gloo" and "of step" not in first[1]:
        told = error_of(lambda: _take(transport, 5.0))  # the queue says it as well, with more
        first = told if told[0] != "none" else first
    sending = ["none", ""]
    while sending[0] == "none" and time.monotonic() < end_s:
        sending = error_of(lambda: transport.send(0, label(1), torch.ones(SLOT_BYTES)))
        if kind == "gloo" and sending[0] == "none":
            sending = error_of(lambda: transport.flush(1.0))
    begin_s = time.monotonic()
    closing = error_of(transport.close)
    return [first, sending, closing, time.monotonic() - begin_s, noticed_s]


def _take(transport: Transport, limit_s: float) -> None:
    arrival = transport.completions.wait(time.monotonic() + limit_s)
    if isinstance(arrival, Arrival):
        arrival.take()


def survive(rank: Rank, kind: str) -> str:
    """Keep channels of an earlier job open while a new one starts and ends; then be killed."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        transport.send(peer, label(0), torch.ones(10))
    else:
        wait(transport).take()
    rank.mark(f"open-{rank.rank}")
    time.sleep(LIMIT_S)
    return "not killed"


def ping_pong(rank: Rank, kind: str, rounds: int, value: float) -> float:
    """Two ranks of one job among others exchange their job's number."""
    transport, peer = rank.open(kind)
    total = 0.0
    for number in range(rounds):
        transport.send(peer, label(number), torch.full((200,), value))
        received = wait(transport).take()
        assert received.unique().tolist() == [value]
        total += float(received[0])
    transport.close()
    return total


def pieces(rank: Rank, kind: str, count: int) -> int:
    """Messages of many pieces come whole though the receiver, who waited in vain, takes none."""
    transport, peer = rank.open(kind)
    for number in range(count):
        message = numbers(3 * SLOTS * SLOT_BYTES // 4, number)
        if rank.rank == 1:
            assert transport.completions.wait(time.monotonic() + 0.01) is None
            rank.mark(f"waited {number}")
            rank.await_mark(f"sent {number}")
            require_equal(wait(transport).take(), message)
        else:
            rank.await_mark(f"waited {number}")
            transport.send(peer, label(number), message)
            transport.flush(LIMIT_S / 3)
            rank.mark(f"sent {number}")
    transport.close()
    return count


def listen(rank: Rank, kind: str, count: int) -> list[Any]:
    """Rank 1 hears of arrivals in another thread while its main thread takes none."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        rank.await_mark("listens")
        for number in range(count):
            transport.send(peer, label(number), torch.full((8,), float(number)))
    if rank.rank == 0:
        transport.close()
        return []
    heard: list[tuple[int, bool]] = []
    done = threading.Event()
    main = threading.get_ident()

    def hear(item: Any) -> None:
        if isinstance(item, Exception):
            return
        heard.append((item.label.action.microbatch, threading.get_ident() != main))
        if len(heard) == count:
            done.set()

    transport.completions.listen(hear)
    rank.mark("listens")
    assert done.wait(LIMIT_S)
    values = [float(wait(transport).take()[0]) for _ in range(count)]
    transport.completions.put(AdaptiveError("from here"))
    ended = error_of(lambda: wait(transport))
    transport.close()
    return [heard, values, ended]


def arrivals(rank: Rank, kind: str, count: int) -> list[tuple[int | None, int, int]]:
    """When messages arrived by the channel's word, before they were looked for and after."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        for number in range(count):
            transport.send(peer, label(number), torch.full((8,), float(number)))
        rank.mark("sent")
    told = []
    if rank.rank == 1:
        rank.await_mark("sent")
        time.sleep(0.3)  # meanwhile all of them come
        looked_ns = time.monotonic_ns()
        for _ in range(count):
            arrival = wait(transport)
            told.append((arrival.arrived_ns, looked_ns, time.monotonic_ns()))
            arrival.take()
    transport.close()
    return told


def mixed(rank: Rank) -> list[Any]:
    """Three ranks in a row: 0 and 1 over shm, 1 and 2 over gloo, one queue on rank 1."""
    peers = {0: [1], 1: [0, 2], 2: [1]}[rank.rank]
    rank.join_group()
    original = extension._attempt
    if rank.rank == 2:
        extension._attempt = lambda: (None, "not built here")  # type: ignore[assignment]
    try:
        transport, _ = rank.open("auto", peers)
    finally:
        extension._attempt = original
    links = {peer: link["kind"] for peer, link in transport.describe_links().items()}
    seen: list[Any] = [transport.name, links]
    if rank.rank == 1:
        came = sorted((a.peer, float(a.take()[0])) for a in (wait(transport) for _ in range(6)))
        for peer in peers:
            transport.send(peer, label(9), torch.full((4,), 10.0 + peer))
        transport.flush(LIMIT_S)
        seen.append(came)
    else:
        for number in range(3):
            transport.send(1, label(number), torch.full((4,), float(number)))
        seen.append(float(wait(transport).take()[0]))
    transport.close()
    return seen
