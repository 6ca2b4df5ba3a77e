"""Carries messages between the nodes of a job: an object of JSON each, and signs of life.

Both sides have proved the job's secret, and every message is known to come from the other one. A
side that hears nothing for :data:`SILENCE_S` takes the other for lost: a machine without power
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
"""Silence of a manager that the agents of its machines file bear: no other manager would come."""


class Connection:
    """Carries messages over one connection, from one event loop.

    Args:
        reader: of the connection.
        writer: of the connection.
        session: of the connection.
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
            address: of it.
            port: of it.
            within_s: for all of it.
            secret: of the job.
            purpose: of the connection, as the listener has it.

        Raises:
            StrangerError: what listens there does not know the secret.
            OSError: nobody listens there, and its text says why.
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
        """Returns the connection over a socket whose other side has proved the secret."""
        reader, writer = await asyncio.open_connection(sock=sealed.socket)
        return cls(reader, writer, sealed.session)

    @property
    def peer(self) -> str:
        """Returns the address of the other side; as IPv4 where it came so to a socket for both."""
        return str(self._writer.get_extra_info("peername", ("",))[0]).removeprefix("::ffff:")

    @property
    def own_address(self) -> str:
        """Returns the address of this side."""
        return str(self._writer.get_extra_info("sockname", ("",))[0])

    def send(self, what: str, **values: Any) -> None:
        """Sends a message; drops one to a side that is gone, which :meth:`receive` reports."""
        if not self._writer.is_closing():
            self._writer.write(self._session.seal(json.dumps({"what": what, **values}).encode()))

    def beat(self) -> None:
        """Gives signs of life from now on."""
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def receive(self, silence_s: float = SILENCE_S) -> dict[str, Any] | None:
        """Waits for the next message that is no sign of life; ``None`` where the other is lost.

        Args:
            silence_s: after which it is.
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
            if reading.cancelled():  # close() cancelled the read, nobody cancelled this task
                raise EOFError("the connection was closed here") from None
            raise
        self._reading = None
        return payload

    async def close(self) -> None:
        """Sends what is left and close. Idempotent."""
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
    """Takes a read's error, so that asyncio does not report it if nobody waits for the read."""
    if not reading.cancelled():
        reading.exception()


class Listener:
    """Serves connections that have proved the job's secret, in the event loop that it is made in.

    Args:
        attend: serves one connection, which stays open after it; a message that does not fit ends
            the connection and nothing else.
        secret: of the job.
        purpose: of the connections.
        report: prints a line about others that came.
        host: address of this machine to listen at; all where it is empty or not of this machine.
        port: 0 for one of this machine's own choice.

    Raises:
        OSError: the port cannot be had.
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
        """Stops listening; connections that were let in stay. Idempotent."""
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
