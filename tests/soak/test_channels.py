"""Tests that killed ranks are detected, and that long message streams do not leak."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.adaptive import extension
from tests.soak import killed_ranks, message_stream

needs_extension = pytest.mark.skipif(
    extension.load() is None, reason="shared memory needs the C++ extension"
)


def test_kills_count_wrong_errors_slow_survivors_and_what_is_left() -> None:
    outcome = {"raised": "PeerLostError", "seconds": 0.5, "text": ""}
    good = {"victim": 1, "outcomes": {"0": outcome, "2": outcome}, "left": []}
    rows = killed_ranks.rows_of({"trials": [good], "litter": []}, "kills")
    assert [(row.value, row.met) for row in rows] == [(0, True), (0.5, True), (0, True)]
    slow = {"raised": "DeadlineError", "seconds": 6.0, "text": "waited"}
    bad = {"victim": 0, "outcomes": {"1": slow, "2": {"raised": "x", "seconds": None}}, "left": []}
    report = {"trials": [good, bad, {"failed": "hung"}], "litter": ["/dev/shm/x"]}
    rows = killed_ranks.rows_of(report, "kills")
    assert [(row.value, row.met) for row in rows] == [(2, False), (6.0, False), (1, False)]
    assert "hung" in rows[0].note
    assert "/dev/shm/x" in rows[2].note
    assert killed_ranks.rows_of({"trials": [], "litter": []}, "kills")[1].met is False


def test_growth_is_what_does_not_come_back() -> None:
    steady = [(100 + number % 3, 10) for number in range(50)]
    assert message_stream.growth(steady) == (0, 0)
    growing = [(100 + number, 10 + number // 40) for number in range(50)]
    assert message_stream.growth(growing) == (30, 1)
    warming_up = [(min(number * 10, 90), 10) for number in range(50)]
    assert message_stream.growth(warming_up) == (0, 0)


@needs_extension
@pytest.mark.multiprocess
def test_a_short_stream_has_the_memory_that_was_asked_for() -> None:
    asked_bytes = 2 * message_stream.SLOT_BYTES * message_stream.SLOTS
    for end in message_stream.stream(3000, 60.0):
        assert asked_bytes <= end["mapped_bytes"] <= message_stream.MOST_MAPPED * asked_bytes
        assert len(end["looks"]) >= 5


@needs_extension
@pytest.mark.multiprocess
def test_a_stream_that_takes_too_long_is_ended() -> None:
    with pytest.raises(RuntimeError, match=r"took more than 0\.01 s"):
        message_stream.stream(100_000, 0.01)


@contextlib.contextmanager
def neighbour(name: str) -> Iterator[None]:
    """Repeatedly creates sockets and shared memory named after ``name``, like another job."""
    is_over = threading.Event()
    sockets: list[socket.socket] = []
    files: list[Path] = []

    def make() -> None:
        while not is_over.wait(0.1):
            sockets.append(socket.socket(socket.AF_UNIX))
            sockets[-1].bind(f"\0megatron-adaptive-{name}-{len(sockets)}")
            files.append(Path(f"/dev/shm/megatron-adaptive-{name}-{len(files)}"))
            files[-1].touch()

    job = threading.Thread(target=make)
    job.start()
    try:
        yield
    finally:
        is_over.set()
        job.join()
        for end in sockets:
            end.close()
        for file in files:
            file.unlink()


@needs_extension
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_killed_ranks_leave_nothing_and_are_missed(kind: str, tmp_path: Path) -> None:
    """Checks that killed ranks leave nothing behind and that their neighbours fail.

    A different program creates sockets and shared memory at the same time.
    """
    around = neighbour(tmp_path.name) if killed_ranks.private() else contextlib.nullcontext()
    with around:
        result = killed_ranks.measure(2, kind)
    assert [row.met for row in result.rows] == [True] * 3, result
