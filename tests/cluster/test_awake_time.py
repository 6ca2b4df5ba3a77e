"""Tests that timeouts do not count the time during which a process was suspended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cluster.awake_time import AwakeClock, result_within
from megatron.adaptive.handshake import SealedSocket, Session

ROOT = Path(__file__).resolve().parents[2]

LISTENING = """
import asyncio, os, sys
from megatron.adaptive.cluster.connection import Connection

async def main():
    link = await Connection.connect("127.0.0.1", int(sys.argv[1]), 20, "s" * 32, "test")
    link.send("here")
    link.beat()
    message = await link.receive(3.0)
    print("lost" if message is None else message["what"], flush=True)

asyncio.run(main())
"""


def test_a_gap_between_readings_does_not_count() -> None:
    times = iter([100.0, 101.0, 103.0, 143.0, 144.0])
    clock = AwakeClock(lambda: next(times))
    assert [clock.now_s() for _ in range(4)] == [101.0, 103.0, 103.0, 104.0]


def test_a_result_is_waited_for_until_the_limit() -> None:
    async def wait() -> int:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        with pytest.raises(asyncio.TimeoutError):
            await result_within(future, 0.05)
        assert not future.done()
        loop.call_later(0.05, future.set_result, 7)
        return await result_within(future, 10.0)

    assert asyncio.run(wait()) == 7


def test_a_connection_that_is_closed_ends_its_own_wait() -> None:
    from megatron.adaptive.cluster.connection import Connection, Listener

    async def wait() -> None:
        async def attend(link: Connection) -> None:
            await link.receive(60.0)

        listener = Listener(attend, "s" * 32, "test", print, host="127.0.0.1")
        link = await Connection.connect("127.0.0.1", listener.port, 20, "s" * 32, "test")
        waiting = asyncio.create_task(link.receive(60.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await link.close()
        assert await waiting is None
        listener.close()

    asyncio.run(wait())


def test_a_connection_for_which_nobody_waits_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.adaptive.cluster import connection

    go = threading.Event()
    dialed = socket.socket()

    def dial(*arguments: Any) -> SealedSocket:
        assert go.wait(60.0)
        return SealedSocket(dialed, Session(b"k" * 32, b"k" * 32))

    async def wait() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(
                connection.Connection.connect("127.0.0.1", 1, 20, "s" * 32, "test"), 0.05
            )
        go.set()
        end_s = time.monotonic() + 60.0
        while dialed.fileno() >= 0 and time.monotonic() < end_s:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(connection, "dial", dial)
    asyncio.run(wait())
    assert dialed.fileno() < 0


@pytest.mark.long
@pytest.mark.slow
def test_a_process_that_was_stopped_does_not_lose_the_other_side() -> None:
    from megatron.adaptive.cluster.connection import Connection, Listener

    async def serve() -> str:
        joined: asyncio.Queue[Connection] = asyncio.Queue()

        async def attend(link: Connection) -> None:
            assert await link.receive() is not None
            link.beat()
            joined.put_nowait(link)

        listener = Listener(attend, "s" * 32, "test", print, host="127.0.0.1")
        command = [sys.executable, "-c", LISTENING, str(listener.port)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            link = await asyncio.wait_for(joined.get(), 60)
            os.kill(child.pid, signal.SIGSTOP)
            # Wait for twice the timeout, while this process continues to send heartbeats.
            end_s = time.monotonic() + 6.0
            while time.monotonic() < end_s:
                await asyncio.sleep(0.1)
            os.kill(child.pid, signal.SIGCONT)
            await asyncio.sleep(1.5)
            link.send("news")
            said, _ = await asyncio.to_thread(child.communicate, timeout=60)
            await link.close()
            return said.strip()
        finally:
            child.kill()
            listener.close()

    assert asyncio.run(serve()) == "news"
