"""Tests that a keeper accepts only complete snapshots of its job from other nodes."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.adaptive.checkpoint import snapshot_keeper
from megatron.adaptive.checkpoint.snapshot_keeper import SnapshotKeeper
from megatron.adaptive.handshake import StrangerError, dial

SECRET = "known to the job"
HEAD = {"extra_bytes": 64, "sent_bytes": 128, "tensor_bytes": 256, "needs": [], "has_common": True}


@pytest.fixture
def keeper() -> Iterator[SnapshotKeeper]:
    made = SnapshotKeeper("127.0.0.1")
    made.prepare("run", SECRET, None)
    yield made
    made.close()


class Sender:
    """Sends snapshots as the keeper of another node does, optionally with errors."""

    def __init__(self, keeper: SnapshotKeeper, secret: str = SECRET, run: str = "run") -> None:
        head = json.dumps(HEAD).encode()
        about = {"run": run, "rank": 0, "generation": 1, "head_bytes": len(head)}
        self.sealed = dial(("127.0.0.1", keeper.port), secret, "snapshots", 1.0)
        self.sealed.socket.settimeout(10.0)
        self.sealed.send(json.dumps(about).encode())
        self.sealed.send_memory(memoryview(head))

    def send(
        self, step: int, slot: int, *, extra: int = 8, wrong: int = 0, whole: bool = True
    ) -> bool:
        """Sends the snapshot of ``step``, and returns whether the keeper confirms it.

        The snapshot is stored in slot ``slot``. ``extra`` is the number of bytes in addition to
        tensors. If ``wrong`` is not 0, the message authentication code is invalid. If ``whole`` is
        false, the last byte is not sent.
        """
        body = b"x" * HEAD["sent_bytes"]  # type: ignore[operator]
        try:
            self.sealed.send(struct.pack("<QQQ", step, slot, extra))
            self.sealed.send(bytes(range(extra)))
            head = self.sealed.session.head(body)
            self.sealed.socket.sendall(head[:-1] + bytes([head[-1] ^ wrong]))
            self.sealed.socket.sendall(body if whole else body[:-1])
            if not whole:
                self.sealed.socket.shutdown(socket.SHUT_WR)
            return self.sealed.receive() == struct.pack("<Q", step)
        except ConnectionError:  # The keeper closes the connection if it rejects the message.
            return False


def steps_of(keeper: SnapshotKeeper) -> list[list[int]]:
    return [copy["steps"] for copy in keeper.inventory(10.0)]


def test_a_step_counts_once_all_of_it_has_come(keeper: SnapshotKeeper) -> None:
    sender = Sender(keeper)
    assert sender.send(1, 0)
    assert sender.send(2, 1)
    assert not sender.send(3, 0, whole=False)
    assert steps_of(keeper) == [[2]]


@pytest.mark.parametrize("fault", [{"wrong": 1}, {"extra": 65}])
def test_damage_is_not_kept(keeper: SnapshotKeeper, fault: dict[str, Any]) -> None:
    sender = Sender(keeper)
    assert sender.send(1, 0)
    assert not sender.send(2, 1, **fault)
    assert steps_of(keeper) == [[1]]


def test_strangers_and_others_runs_are_refused(
    keeper: SnapshotKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_keeper, "_RUN_S", 0.2)
    with pytest.raises(StrangerError):
        Sender(keeper, "guessed")
    with socket.create_connection(("127.0.0.1", keeper.port), 10) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\n" * 9)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    # This sender belongs to another job, or to an earlier start of the same job.
    with pytest.raises(ConnectionError):
        Sender(keeper, run="other").sealed.receive()
    assert steps_of(keeper) == []
    keeper.prepare("", "", None)  # This call restores the state in which no job is running.
    for secret in ("", SECRET):
        with pytest.raises(StrangerError):
            Sender(keeper, secret, run="")
    keeper.prepare("run", SECRET, None)
    assert Sender(keeper).send(1, 0)
    # For a new job, the keeper must drop the snapshots of the previous job.
    keeper.prepare("the next run", SECRET, None)
    assert keeper.inventory(0.0) == []
