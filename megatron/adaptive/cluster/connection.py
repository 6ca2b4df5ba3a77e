"""Carries messages between the nodes of a job: one JSON object each, and heartbeats.

Both sides have proved that they know the job's secret, and each message is authenticated. A side
that hears nothing for :data:`SILENCE_S` counts the other as lost, because a machine without power
closes no connection. Time in which the listening side was itself stopped does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from megatron.adaptive.cluster.awake_time import result_within
from megatron.adaptive.config.input_files import parse_json
from megatron.adaptive.handshake import (
    HEAD_BYTES,
    Gate,
    SealedSocket,
    Session,
    StrangerError,
    bind,
    dial,
)

BEAT_S = 1.0
SILENCE_S = 20.0
PATIENCE_S = 60.0
"""Longest silence of a manager in seconds, for agents that a machines file names.

No other manager could take over such a job.
"""


class Connection:
    """Carries messages over one connection, from one event loop.

    Args:
        reader: Reader of the connection.
        writer: Writer of the connection.
        session: Session that seals and opens the messages.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._session = session
        self._beating: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[bytes] | None = None

    @classmethod
    async def connect(
        cls, address: str, port: int, within_s: float, secret: str, purpose: str
    ) -> Connection:
        """Connects to a listener of the job.

        Args:
            address: Address of the listener.
            port: Port of the listener.
            within_s: Time limit for connecting and proving the secret, in seconds.
            secret: Secret of the job.
            purpose: Purpose of the connection, equal to the listener's.

        Raises:
            StrangerError: The listener does not know the secret.
            OSError: Nobody listens at the address; the text gives the reason.
        """
        try:
            sealed = await asyncio.to_thread(dial, (address, port), secret, purpose, within_s)
        except StrangerError:
            raise
        except OSError as error:
            raise OSError(error.strerror or f"no answer within {within_s:g} s") from None
        return await cls.over(sealed)

    @classmethod
    async def over(cls, sealed: SealedSocket) -> Connection:
        """Creates the connection over a socket whose other side has proved the secret."""
        reader, writer = await asyncio.open_connection(sock=sealed.socket)
        return cls(reader, writer, sealed.session)

    @property
    def peer(self) -> str:
        """Returns the address of the other side; an IPv4 address mapped to IPv6 as plain IPv4."""
        return str(self._writer.get_extra_info("peername", ("",))[0]).removeprefix("::ffff:")

    @property
    def own_address(self) -> str:
        """Returns the address of this side."""
        return str(self._writer.get_extra_info("sockname", ("",))[0])

    def send(self, kind: str, **values: Any) -> None:
        """Sends a message; drops it if the other side is gone, which :meth:`receive` reports."""
        if not self._writer.is_closing():
            self._writer.write(self._session.seal(json.dumps({"what": kind, **values}).encode()))

    def beat(self) -> None:
        """Starts sending heartbeats."""
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def receive(self, silence_s: float = SILENCE_S) -> dict[str, Any] | None:
        """Waits for the next message except heartbeats; returns ``None`` if the other side is lost.

        Args:
            silence_s: Time without a message, in seconds, after which the other side counts as
                lost.
        """
        while True:
            try:
                payload = await self._next_payload(silence_s)
                message = parse_json(payload, strict=False)
            except (OSError, EOFError, ValueError, asyncio.TimeoutError):
                return None
            if not isinstance(message, dict) or not isinstance(message.get("what"), str):
                return None
            if message["what"] != "beat":
                return message

    async def _next_payload(self, silence_s: float) -> bytes:
        """Waits for the next payload. A read under way continues after a time-out."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read())
            self._reading.add_done_callback(_take_error)
        reading = self._reading
        try:
            payload = await result_within(reading, silence_s)
        except asyncio.CancelledError:
            if reading.cancelled():  # close() cancelled the read; nobody cancelled this task.
                raise EOFError("the connection was closed here") from None
            raise
        self._reading = None
        return payload

    async def close(self) -> None:
        """Sends what is left and closes the connection. Idempotent."""
        for task in (self._beating, self._reading):
            if task is not None:
                task.cancel()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 1.0)
        self._writer.close()

    async def _read(self) -> bytes:
        head = await self._reader.readexactly(HEAD_BYTES)
        payload = await self._reader.readexactly(self._session.length(head))
        return self._session.open(head, payload)

    async def _beat(self) -> None:
        while not self._writer.is_closing():
            self.send("beat", unix_ns=time.time_ns())
            await asyncio.sleep(BEAT_S)


def _take_error(reading: asyncio.Task[bytes]) -> None:
    """Retrieves a read's error, so that asyncio does not report it if nobody awaits the read."""
    if not reading.cancelled():
        reading.exception()


class Listener:
    """Accepts connections that prove the job's secret, and serves them in the current event loop.

    Args:
        attend: Coroutine function that serves one connection. The connection stays open after it. A
            malformed message ends this connection only.
        secret: Secret of the job.
        purpose: Purpose of the connections.
        report: Function that prints a line about refused connections.
        host: Address of this machine to listen at; all addresses if it is empty or of another
            machine.
        port: Port to listen at, 0 for any free port.

    Raises:
        OSError: The port is not available.
    """

    def __init__(
        self,
        attend: Callable[[Connection], Awaitable[None]],
        secret: str,
        purpose: str,
        report: Callable[[str], None],
        *,
        host: str = "",
        port: int = 0,
    ) -> None:
        self._attend = attend
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = Gate(bind(host, port), lambda: secret, purpose, self._admit, report)
        self.port = self._gate.port

    def close(self) -> None:
        """Stops listening; accepted connections stay open. Idempotent."""
        self._gate.close()

    def _admit(self, sealed: SealedSocket) -> None:
        try:
            self._loop.call_soon_threadsafe(self._begin, sealed)
        except RuntimeError:  # the loop has ended
            sealed.socket.close()

    def _begin(self, sealed: SealedSocket) -> None:
        task = self._loop.create_task(self._serve(sealed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, sealed: SealedSocket) -> None:
        link = await Connection.over(sealed)
        try:
            await self._attend(link)
        except (LookupError, TypeError, ValueError) as error:
            self._report(
                f"warning: a message of {link.peer} does not fit and is refused: {error!r}"
            )
            await link.close()
