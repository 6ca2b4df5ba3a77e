"""Sends millions of messages through a channel, and checks for lost messages and memory growth.

The receiver keeps a few payloads and releases them in a different order, so that slots are freed
out of order. Both sides measure their memory and descriptors.

    python -m tests.soak.message_stream [--quick] [--messages 10000000] [--json FILE]
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import sys
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from harness.report import Result, Row, parser_of
from harness.report import measure as run_parts
from megatron.adaptive import extension
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.interface import Label
from megatron.adaptive.transport.native import NativeTransport

SLOT_BYTES, SLOTS = 64 << 10, 16
CHANNEL_FILE = "/memfd:megatron-adaptive-channel"
WORDS = (0, 1, 128, 1024, 8192)
"""Payload sizes in elements of 8 bytes.

The payloads are empty, small, or fill a whole slot.
"""
PIECES_WORDS = 40_000
"""Payload size in elements of 8 bytes that exceeds the size of a slot."""
LIMIT_S = 60.0
MOST_GROWTH_MIB, MOST_MAPPED = 2.0, 1.05
_LABEL = Label(0, Action(ActionKind.F, 0, 0))
_BATCH = 256
_HELD = 8
_LOOKS = 50
_ROTATING = 24
"""Number of tensors per size that the sender reuses in rotation.

There are fewer slots than that, so some tensors must wait for a free slot.
"""


class Link:
    """One end of a shared-memory link between two processes.

    Args:
        rank: Rank of this process, 0 or 1.
        connection: Connection to the parent process, which passes each process the address of the
            peer.
    """

    def __init__(self, rank: int, connection: Connection) -> None:
        node = extension.require("this soak").Node(rank, bytes(16), 1, 2)
        connection.send(node.listen("unix"))
        self._peer = 1 - rank
        node.open("shm", self._peer, connection.recv(), LIMIT_S, slot_bytes=SLOT_BYTES, slots=SLOTS)
        self.transport = NativeTransport(node, {self._peer: "shm"}, device=torch.device("cpu"))

    def send(self, payload: torch.Tensor) -> None:
        """Sends ``payload`` to the other process."""
        self.transport.send(self._peer, _LABEL, payload)

    def settle(self) -> None:
        """Waits until the memory of all sent payloads may be overwritten."""
        self.transport.flush(LIMIT_S)

    def receive(self) -> torch.Tensor:
        """Waits for the next tensor from the other process, and returns it."""
        arrival: Any = self.transport.completions.wait(time.monotonic() + LIMIT_S)
        assert arrival is not None, f"nothing arrived within {LIMIT_S:g} s"
        payload: torch.Tensor = arrival.take()
        return payload


def be_rank(rank: int, connection: Connection, messages: int) -> None:
    """Sends or receives ``messages`` messages as rank ``rank``.

    Then sends the measurements of this process, or an error, to ``connection``.
    """
    try:
        link = Link(rank, connection)
        looks: list[tuple[int, int]] = []
        every = max(_BATCH, messages // _LOOKS // _BATCH * _BATCH)
        start_s = time.monotonic()
        (_receive if rank else _send)(link, messages, every, looks)
        seconds = time.monotonic() - start_s
        figures = {"looks": looks, "mapped_bytes": mapped_bytes(), "seconds": seconds}
        link.settle()
        connection.send(figures)
        connection.recv()  # The parent sends a message when both processes have finished.
        link.transport.close()
    except Exception as error:
        connection.send(f"rank {rank}: {type(error).__name__}: {error}")


def stream(messages: int, limit_s: float) -> list[dict[str, Any]]:
    """Sends ``messages`` messages between two forked processes.

    Returns the measurements of each process.

    Raises:
        RuntimeError: A message was lost or wrong, or ``limit_s`` seconds passed.
    """
    context = multiprocessing.get_context("fork")
    ends, processes = [], []
    for rank in range(2):
        end, other_end = context.Pipe()
        process = context.Process(target=be_rank, args=(rank, other_end, messages), daemon=True)
        process.start()
        other_end.close()
        ends.append(end)
        processes.append(process)
    end_s = time.monotonic() + limit_s

    def said(end: Connection) -> Any:
        if not end.poll(max(0.0, end_s - time.monotonic())):
            raise RuntimeError(f"{messages} messages took more than {limit_s:g} s")
        answer = end.recv()
        if isinstance(answer, str) and answer.startswith("rank "):
            raise RuntimeError(answer)
        return answer

    try:
        for end, address in zip(ends, reversed([said(end) for end in ends]), strict=True):
            end.send(address)
        figures = [said(end) for end in ends]
        for end in ends:
            end.send("done")
        for process in processes:
            process.join(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for end in ends:
            end.close()
    return figures


def measure(messages: int) -> Result:
    """Sends ``messages`` messages, and returns rows that compare the memory growth with limits."""
    figures = stream(messages, 60.0 + messages / 5e3)
    asked_bytes = 2 * SLOTS * SLOT_BYTES
    gains = [growth(end["looks"]) for end in figures]
    rate = messages / max(end["seconds"] for end in figures)
    return Result(
        rows=[
            Row(
                what=f"{messages:,} messages over shm: memory growth",
                value=max(gain_bytes for gain_bytes, _ in gains) / 2**20,
                unit="MiB",
                goal=MOST_GROWTH_MIB,
                note=f"after the first fifth; {rate:,.0f} per second, all checked",
            ),
            Row(
                what="the same: additional file descriptors",
                value=max(descriptors for _, descriptors in gains),
                goal=0,
            ),
            Row(
                what="the same: memory of both channels, divided by the requested memory",
                value=max(end["mapped_bytes"] for end in figures) / asked_bytes,
                goal=MOST_MAPPED,
            ),
        ],
        facts={"looks": [end["looks"] for end in figures]},
    )


def mapped_bytes() -> int:
    """Returns the total size of this process's shared-memory channels, in bytes."""
    ranges = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if CHANNEL_FILE in line
    ]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


def look() -> tuple[int, int]:
    """Returns the resident memory of this process in bytes, and its number of file descriptors."""
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds()


def words_of(number: int) -> int:
    """Returns the number of elements of message ``number``. Sender and receiver both compute it."""
    if number % 1009 == 1008:
        return PIECES_WORDS
    return WORDS[2] if number % 16 else WORDS[number // 16 % len(WORDS)]


def _send(link: Link, messages: int, every: int, looks: list[tuple[int, int]]) -> None:
    rings = {
        size: [torch.arange(size, dtype=torch.int64) for _ in range(_ROTATING)]
        for size in (*WORDS, PIECES_WORDS)
    }
    used = dict.fromkeys(rings, 0)
    for number in range(messages):
        size = words_of(number)
        turn = used[size]
        used[size] += 1
        if turn % _ROTATING == 0:
            link.settle()  # A tensor must not be overwritten while it is being sent.
        payload = rings[size][turn % _ROTATING]
        if size:
            ctypes.c_int64.from_address(payload.data_ptr()).value = number
        link.send(payload)
        if number % _BATCH == _BATCH - 1:
            link.receive()
            if number % every == every - 1:
                looks.append(look())


def _receive(link: Link, messages: int, every: int, looks: list[tuple[int, int]]) -> None:
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
    size = words_of(number)
    assert payload.numel() == size, (
        f"message {number} has {payload.numel()} elements, expected {size}"
    )
    if size == 0:
        return
    address = payload.data_ptr()
    first = ctypes.c_int64.from_address(address).value
    assert first == number, f"received message {first}, expected message {number}"
    last = ctypes.c_int64.from_address(address + 8 * (size - 1)).value
    assert size == 1 or last == size - 1, f"message {number} ends with {last}, expected {size - 1}"


def growth(looks: list[tuple[int, int]]) -> tuple[int, int]:
    """Returns the growth in bytes and file descriptors of a process after the first fifth of a run.

    ``looks`` contains pairs (bytes, descriptors) that were measured at regular intervals. The
    minimum of the last fifth is compared with the minimum of the second fifth, because a process
    without a leak repeatedly returns to its former size.
    """
    fifth = max(1, len(looks) // 5)
    early, late = looks[fifth : 2 * fifth] or looks[:1], looks[-fifth:]
    return (
        min(look[0] for look in late) - min(look[0] for look in early),
        min(look[1] for look in late) - min(look[1] for look in early),
    )


def main() -> int:
    """Sends the messages and prints the results. Returns 1 if a measurement exceeds its limit."""
    parser = parser_of(__doc__, ("messages",), "send 200,000 messages")
    parser.add_argument("--messages", type=int, help="number of messages (10,000,000)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    messages = options.messages or (200_000 if options.quick else 10_000_000)
    return run_parts({"messages": lambda: measure(messages)}, options)


if __name__ == "__main__":
    sys.exit(main())
