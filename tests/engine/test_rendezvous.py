"""Tests that ranks exit with a one-line error after a timeout if they cannot connect."""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megatron.adaptive.config.environment import Environment
from megatron.adaptive.engine.rendezvous import MeetingError, meet, no_rendezvous
from megatron.adaptive.errors import ConfigError, TransportError

from ..multiprocess.launch import free_port

LIMIT = datetime.timedelta(seconds=60)


def place(
    rank: int, port: int, host: str = "127.0.0.1", *, size: int = 2, s: int = 1
) -> Environment:
    return Environment.read(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "MEGATRON_ADAPTIVE_MEETING_S": str(s),
        }
    )


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Yields a port with a program that accepts connections but never replies."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def refusal(environment: Environment) -> str:
    """Checks that a rank cannot reach the other ranks, and returns its error message."""
    with pytest.raises((MeetingError, dist.DistError, ValueError)) as caught:
        meet(environment, LIMIT)
    error = no_rendezvous(environment, caught.value)
    assert isinstance(error, TransportError)
    assert "\n" not in str(error)
    return str(error)


def test_a_name_that_does_not_resolve_is_said() -> None:
    for rank in (0, 1):
        text = refusal(place(rank, free_port(), "no-such-host.invalid"))
        assert "no-such-host.invalid" in text
        assert "cannot be resolved" in text


def test_a_port_where_nobody_listens_is_said() -> None:
    port = free_port()
    assert f"127.0.0.1:{port} (after 1 s: nothing listens there" in refusal(place(1, port))


@pytest.mark.long
@pytest.mark.timeout(90)
def test_a_silent_program_at_the_port_is_no_store(silent_port: int) -> None:
    assert "did not reply like a torch store" in refusal(place(1, silent_port))


@pytest.mark.timeout(90)
def test_a_store_may_reply_late(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.adaptive.engine import rendezvous

    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.1)
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def forward(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(4096):
            target.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            listener.accept()[0].close()  # This connection only checks that a program listens.
            client, _ = listener.accept()
            time.sleep(1.0)
            store = socket.create_connection(("127.0.0.1", served.port))
            threading.Thread(target=forward, args=(client, store), daemon=True).start()
            forward(store, client)

        threading.Thread(target=relay, daemon=True).start()
        late = rendezvous.connect("127.0.0.1", listener.getsockname()[1], time.monotonic() + 60)
        late.set("word", "sent through the relay")
    assert served.get("word") == b"sent through the relay"


def test_more_ranks_get_more_time_to_meet() -> None:
    limits = []
    for size in (2, 64, 10_000):
        variables = {"RANK": "0", "WORLD_SIZE": str(size)}
        limits.append(Environment.read(variables).meeting_s)
    assert limits == [42, 104, 600]


def test_ranks_with_different_ports_are_named() -> None:
    text = refusal(place(0, free_port(), size=3))
    assert "1 of 3 ranks connected within 1 s, but not rank 1, 2" in text
    assert "MASTER_PORT" in text


def test_ranks_that_come_one_after_another_meet() -> None:
    port = free_port()
    stores = []
    late = threading.Timer(0.5, lambda: stores.append(meet(place(0, port, s=30), LIMIT)))
    late.start()
    store = meet(place(1, port, s=30), LIMIT)
    late.join()
    store.set("word", "from rank 1")
    assert stores[0].get("word") == b"from rank 1"
    assert store.timeout == LIMIT


def test_a_world_beyond_any_machine_is_refused() -> None:
    for size in (10**18, int("9" * 40)):
        with pytest.raises(ConfigError, match="WORLD_SIZE must be an integer .*got .*"):
            place(0, 1, size=size)
