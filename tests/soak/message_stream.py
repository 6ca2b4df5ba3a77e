"""Millions of messages through one channel: none may be lost, and nothing may grow.

The receiver keeps a few payloads and drops them in another order, so that slots come back out of
order. Both ends look at their memory and descriptors all the way.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.channels.ours import TransportConnector
from benchmarks.channels.worker import Member

SLOT_BYTES, SLOTS = 64 << 10, 16
CHANNEL_FILE = "/memfd:megatron-adaptive-channel"
WORDS = (0, 1, 128, 1024, 8192)
"""Elements of 8 bytes: nothing, little, and a whole slot."""
PIECES_WORDS = 40_000
"""More than a slot."""
_BATCH = 256
_HELD = 8
_LOOKS = 50
_ROTATING = 24
"""Tensors of a size that the sender uses in turns: more than there are slots, so that some wait."""


def run(
    member: Member, *, connector: str, messages: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Send ``messages`` from rank 0 to rank 1.

    Returns:
        ``looks``: resident bytes and descriptors of this process along the way; ``mapped_bytes``
        of its channels; ``seconds`` of the whole.

    Raises:
        AssertionError: a message came out of order, or with other contents.
    """
    member.forget()  # its memory would show
    link = member.connector(connector, options)
    assert isinstance(link, TransportConnector)
    looks: list[tuple[int, int]] = []
    every = max(_BATCH, messages // _LOOKS // _BATCH * _BATCH)
    start = time.monotonic()
    if member.rank == 0:
        _send(link, messages, every, looks)
    else:
        _receive(link, messages, every, looks)
    seconds = time.monotonic() - start
    return {"looks": looks, "mapped_bytes": mapped_bytes(), "seconds": seconds}


def mapped_bytes() -> int:
    """Size of all channels over shared memory that this process has."""
    ranges = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if CHANNEL_FILE in line
    ]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


def look() -> tuple[int, int]:
    """Resident bytes and descriptors of this process."""
    own = psutil.Process()
    return own.memory_info().rss, own.num_fds()


def words_of(number: int) -> int:
    """Size of a message, the same on both ends."""
    if number % 1009 == 1008:
        return PIECES_WORDS
    return WORDS[2] if number % 16 else WORDS[number // 16 % len(WORDS)]


def _send(
    link: TransportConnector, messages: int, every: int, looks: list[tuple[int, int]]
) -> None:
    rings = {
        words: [torch.arange(words, dtype=torch.int64) for _ in range(_ROTATING)]
        for words in (*WORDS, PIECES_WORDS)
    }
    used = dict.fromkeys(rings, 0)
    for number in range(messages):
        words = words_of(number)
        turn = used[words]
        used[words] += 1
        if turn % _ROTATING == 0:
            link.settle()  # none of this size may still be on its way when it is written again
        payload = rings[words][turn % _ROTATING]
        if words:
            ctypes.c_int64.from_address(payload.data_ptr()).value = number
        link.send(payload)
        if number % _BATCH == _BATCH - 1:
            link.receive()
            if number % every == every - 1:
                looks.append(look())


def _receive(
    link: TransportConnector, messages: int, every: int, looks: list[tuple[int, int]]
) -> None:
    held: deque[torch.Tensor] = deque()
    draw = random.Random(1)
    token = torch.zeros(1, dtype=torch.int64)
    for number in range(messages):
        payload = link.receive()
        _check(payload, number)
        held.append(payload)
        del payload
        if len(held) > _HELD:
            if draw.random() < 0.5:
                held.pop()
            held.popleft()
        if number % _BATCH == _BATCH - 1:
            held.clear()
            link.send(token)
            if number % every == every - 1:
                looks.append(look())


def _check(payload: torch.Tensor, number: int) -> None:
    words = words_of(number)
    assert payload.numel() == words, f"message {number} has {payload.numel()} elements, not {words}"
    if words == 0:
        return
    address = payload.data_ptr()
    first = ctypes.c_int64.from_address(address).value
    assert first == number, f"message {first} came where {number} was due"
    last = ctypes.c_int64.from_address(address + 8 * (words - 1)).value
    assert words == 1 or last == words - 1, f"message {number} ends with {last}, not {words - 1}"


def growth(looks: list[tuple[int, int]]) -> tuple[int, int]:
    """Bytes and descriptors by which a process grew, after the first fifth of the soak.

    Compared are the least of the second fifth and the least of the last: a process that grows does
    not come back.
    """
    fifth = max(1, len(looks) // 5)
    early, late = looks[fifth : 2 * fifth] or looks[:1], looks[-fifth:]
    return (
        min(one[0] for one in late) - min(one[0] for one in early),
        min(one[1] for one in late) - min(one[1] for one in early),
    )
