"""Tests that the handshake accepts only peers that know the job's secret."""

from __future__ import annotations

import contextlib
import functools
import gc
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megatron.adaptive import handshake
from megatron.adaptive.config.environment import job_secret
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.handshake import (
    LONGEST,
    Gate,
    Handshake,
    SealedSocket,
    StrangerError,
    bind,
    dial,
    write_private,
)

SECRET = "of the job, and long enough"
WATCHDOG_S = 20.0


class Door:
    """Runs a gate, and records the connections that it accepts and the messages that it logs."""

    def __init__(self, secret: str = SECRET) -> None:
        self.came: queue.Queue[SealedSocket] = queue.Queue()
        self.said: list[str] = []
        self._in: list[SealedSocket] = []
        listening = bind("127.0.0.1", 0)
        self.gate = Gate(listening, lambda: secret, "test", self._admit, self.said.append)
        self.place = "127.0.0.1", self.gate.port

    def _admit(self, sealed: SealedSocket) -> None:
        self._in.append(sealed)
        self.came.put(sealed)

    def dial(self) -> SealedSocket:
        """Connects to the gate with the correct secret, and returns the connection."""
        sealed = dial(self.place, SECRET, "test", WATCHDOG_S)
        self._in.append(sealed)
        return sealed

    def close(self) -> None:
        """Closes the gate and all of its connections, on both sides."""
        self.gate.close()
        for sealed in self._in:
            sealed.socket.close()

    def refuses(self, *parts: bytes) -> bool:
        """Sends ``parts``, and returns whether the gate rejected the connection and closed it."""
        stranger = socket.create_connection(self.place, WATCHDOG_S)
        with stranger, contextlib.suppress(ConnectionError):
            for part in parts:
                stranger.sendall(part)
                if part is not parts[-1]:
                    stranger.recv(1 << 16)
            while stranger.recv(1 << 16):
                pass
        return self.came.empty()


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


def both(first: str = SECRET, second: str = SECRET, purpose: str = "test") -> list[Handshake]:
    """Runs a handshake between a client and a listener, and returns both of its sides.

    The client has the secret ``first`` and states ``purpose``. The listener has the secret
    ``second`` and expects the purpose ``test``.
    """
    visitor = Handshake(first, purpose, visiting=True)
    listener = Handshake(second, "test", visiting=False)
    listener.advance(visitor.advance(listener.advance(visitor.first)))
    return [visitor, listener]


def test_messages_pass_both_ways(door: Door) -> None:
    sealed = door.dial()
    other = door.came.get(timeout=WATCHDOG_S)
    for side, far in ((sealed, other), (other, sealed)):
        for payload in (b"", b"one", bytes(LONGEST)):
            side.socket.settimeout(WATCHDOG_S)
            with _thread(functools.partial(side.send, payload)):
                assert far.receive() == payload
    sealed.send_memory(memoryview(b"a lot"), memoryview(b" of it"))
    received = bytearray(11)
    other.receive_memory(memoryview(received)[:5], memoryview(received)[5:])
    assert received == b"a lot of it"
    with pytest.raises(ValueError, match="above the limit"):
        sealed.send(bytes(LONGEST + 1))
    assert door.said == []


@contextlib.contextmanager
def _thread(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join(WATCHDOG_S)


@pytest.mark.parametrize(
    ("first", "second", "purpose"),
    [("another", SECRET, "test"), (SECRET, "another", "test"), ("", "", "test"), (SECRET,) * 3],
)
def test_sides_that_do_not_belong_together_find_out(first: str, second: str, purpose: str) -> None:
    with pytest.raises(StrangerError, match="does not know the job's secret"):
        both(first, second, purpose)


def test_own_words_sent_back_prove_nothing() -> None:
    visitor = Handshake(SECRET, "test", visiting=True)
    with pytest.raises(StrangerError):
        visitor.advance(visitor.first + bytes(32))
    listener = Handshake(SECRET, "test", visiting=False)
    answer = listener.advance(Handshake(SECRET, "test", visiting=True).first)
    with pytest.raises(StrangerError):
        listener.advance(answer[-32:])


@pytest.mark.parametrize("wrong", ["repeated", "dropped", "changed", "sent back"])
def test_a_message_that_is_not_the_next_one_is_seen(wrong: str) -> None:
    visitor, listener = (side.session for side in both())
    assert visitor is not None
    assert listener is not None
    head = handshake.HEAD_BYTES
    first, second, third = (visitor.seal(text) for text in (b"one", b"two", b"three"))
    came = {"repeated": first, "dropped": third, "changed": second[:-1] + b"x"}.get(wrong)
    came = came or listener.seal(b"two")
    assert listener.open(first[:head], first[head:]) == b"one"
    with pytest.raises(StrangerError, match="changed, repeated or reordered"):
        listener.open(came[:head], came[head:])
    with pytest.raises(StrangerError, match="above the limit"):
        listener.length(b"\xff" * head)


def test_strangers_are_refused_and_said_once_in_a_while(door: Door) -> None:
    hello = Handshake("guessed", "test", visiting=True).first
    assert door.refuses(b"GET / HTTP/1.1\r\n\r\n" * 9)
    assert door.refuses(b'{"what": "join", "node_rank": []}' + b"[" * 100_000)
    assert door.refuses(b"\xff" * (1 << 20))
    assert door.refuses(hello, bytes(32))
    recorded = Recorder(door)
    assert door.came.get(timeout=WATCHDOG_S)
    # Send the recorded bytes again, as in a replay attack.
    assert door.refuses(*recorded.sent)
    assert door.refuses(b"".join(recorded.sent))
    recorded.socket.close()
    (said,) = door.said
    assert "a connection from 127.0.0.1 to port" in said
    sealed = door.dial()
    sealed.send(b"still here")
    assert door.came.get(timeout=WATCHDOG_S).receive() == b"still here"


class Recorder:
    """Completes a handshake with the correct secret, and records the bytes that it sends."""

    def __init__(self, door: Door) -> None:
        shake = Handshake(SECRET, "test", visiting=True)
        self.socket = socket.create_connection(door.place, WATCHDOG_S)
        self.socket.sendall(shake.first)
        proof = shake.advance(handshake.read_exactly(self.socket, shake.wanted))
        self.socket.sendall(proof)
        self.sent = [shake.first, proof]


def test_whoever_only_looks_is_no_stranger(door: Door) -> None:
    socket.create_connection(door.place, WATCHDOG_S).close()
    sealed = door.dial()
    sealed.socket.close()
    assert door.came.get(timeout=WATCHDOG_S)
    assert door.said == []


def test_a_crowd_that_holds_on_keeps_nobody_out(door: Door) -> None:
    door.gate.most = 50
    with contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(socket.create_connection(door.place, WATCHDOG_S))
            for _ in range(100)
        ]
        for stranger in crowd:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(b"M")
        sealed = door.dial()
        stack.enter_context(sealed.socket)
        assert door.came.get(timeout=WATCHDOG_S)
        assert len(door.gate._waiting) <= door.gate.most
    assert len(door.said) == 1


def test_a_visitor_that_is_too_slow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_PROVE_S", 0.2)
    door = Door()
    assert door.refuses(b"MAdapt")
    assert "did not prove within 0.2 s" in door.said[0]
    door.close()


def test_nobody_is_let_in_without_a_secret() -> None:
    door = Door("")
    with pytest.raises(StrangerError):
        dial(door.place, "", "test", 0.3)
    door.close()


def test_what_listens_must_prove_the_secret_too() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = silent.getsockname()
        with pytest.raises(StrangerError, match="did not prove"):
            dial(address, SECRET, "test", 0.3)
    with pytest.raises(ConnectionRefusedError):
        dial(address, SECRET, "test", 0.3)


def test_an_address_of_this_machine_alone_is_listened_at() -> None:
    for host, expected in (("127.0.0.1", "127.0.0.1"), ("192.0.2.1", ("0.0.0.0", "::"))):
        with closing(bind(host, 0)) as listening:
            assert listening.getsockname()[0] in expected


def test_a_private_file_is_so_from_its_first_moment(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("of a run before")
    path.chmod(0o644)
    write_private(path, SECRET)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == SECRET
    (tmp_path / "link").symlink_to(path)
    write_private(tmp_path / "link", "another")
    assert path.read_text() == SECRET


def test_a_secret_comes_from_a_variable_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job_secret() is None
    path = tmp_path / "secret"
    write_private(path, SECRET + "\n")
    monkeypatch.setenv("MEGATRON_ADAPTIVE_SECRET_FILE", str(path))
    assert job_secret() == SECRET
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="every user can read the file"):
        job_secret()
    monkeypatch.setenv("MEGATRON_ADAPTIVE_SECRET", "short")
    with pytest.raises(ConfigError, match="too short"):
        job_secret()
    monkeypatch.setenv("MEGATRON_ADAPTIVE_SECRET", SECRET)
    assert job_secret() == SECRET
    monkeypatch.delenv("MEGATRON_ADAPTIVE_SECRET_FILE")
    # The first call has removed the secret from the environment, so that child processes do not
    # inherit it.
    assert job_secret() is None


def test_a_visitor_at_the_moment_of_the_end_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Door()
    is_held = threading.Event()
    go = threading.Event()

    def hold() -> None:
        is_held.set()
        go.wait(WATCHDOG_S)

    # While the event loop is blocked, a client connects and the gate is closed. Therefore, the loop
    # later processes both events at once.
    door.gate._loop.call_soon_threadsafe(hold)
    assert is_held.wait(WATCHDOG_S)
    with socket.create_connection(door.place, WATCHDOG_S):
        closing_gate = threading.Thread(target=door.gate.close)
        closing_gate.start()
        go.set()
        closing_gate.join(WATCHDOG_S)
    assert not closing_gate.is_alive()
    assert [record.getMessage() for record in caplog.records] == []


def test_a_visitor_that_nobody_can_attend_is_disconnected() -> None:
    taken: list[SealedSocket] = []

    def admit(sealed: SealedSocket) -> None:
        taken.append(sealed)
        raise RuntimeError("can't start new thread")

    gate = Gate(bind("127.0.0.1", 0), lambda: SECRET, "test", admit, print)
    with closing(gate):
        address = "127.0.0.1", gate.port
        with dial(address, SECRET, "test", WATCHDOG_S).socket as connection:
            connection.settimeout(WATCHDOG_S)
            assert connection.recv(1) == b""
    assert taken[0].socket.fileno() < 0


def test_a_gate_whose_thread_does_not_start_closes_its_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    listening = bind("127.0.0.1", 0)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Gate(listening, lambda: SECRET, "test", lambda sealed: None, print)
    assert listening.fileno() < 0


def test_a_visitor_that_was_dropped_at_the_end_is_disconnected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Door()
    is_ended = threading.Event()

    def end() -> None:
        door.gate._make_room()
        door.gate.close()
        is_ended.set()

    with socket.create_connection(door.place, WATCHDOG_S) as visitor:
        until_s = time.monotonic() + WATCHDOG_S
        while not door.gate._waiting and time.monotonic() < until_s:
            time.sleep(0.001)
        door.gate._loop.call_soon_threadsafe(end)
        assert is_ended.wait(WATCHDOG_S)
        visitor.settimeout(WATCHDOG_S)
        while visitor.recv(1 << 16):
            pass
    door.close()
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []
