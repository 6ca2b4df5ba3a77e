"""Exchanges JSON messages and heartbeats between the nodes of a job.

Both sides prove that they know the job's secret, and each message is authenticated. A machine that
loses power does not close its connections. A side that receives nothing for :data:`SILENCE_S`
seconds therefore considers the other side lost. Time in which the receiving process itself was
suspended does not count.
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
"""Time in seconds without a message after which an agent on a listed machine exits.

Listed machines are those in the machines file. If a job has such a file, no other manager can take
over the job, so the agent waits longer than :data:`SILENCE_S` for its manager.
"""


class Connection:
    """Sends and receives messages over one connection, in a single event loop.

    Args:
        reader: Stream from the other side.
        writer: Stream to the other side.
        session: Session that signs outgoing messages and verifies incoming messages.
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
        """Connects to a :class:`Listener` of the job, authenticates, and returns the connection.

        Args:
            address: Address of the listener.
            port: Port of the listener.
            within_s: Timeout in seconds for connecting and authenticating.
            secret: Secret of the job, which both sides must know.
            purpose: Label of the connection, which must be the same on both sides.

        Raises:
            StrangerError: The program at the address does not know the secret.
            OSError: The connection failed, for example because no program listens at the address.
                The error message contains the reason.
        """
        dialing = asyncio.get_running_loop().run_in_executor(
            None, dial, (address, port), secret, purpose, within_s
        )
        try:
            sealed = await asyncio.shield(dialing)
        except asyncio.CancelledError:
            dialing.add_done_callback(_close_dialed)
            raise
        except StrangerError:
            raise
        except OSError as error:
            raise OSError(error.strerror or f"no answer within {within_s:g} s") from None
        return await cls.over(sealed)

    @classmethod
    async def over(cls, sealed: SealedSocket) -> Connection:
        """Creates a connection from the socket ``sealed``, whose peer has been authenticated."""
        try:
            reader, writer = await asyncio.open_connection(sock=sealed.socket)
        except BaseException:
            sealed.socket.close()
            raise
        return cls(reader, writer, sealed.session)

    @property
    def peer(self) -> str:
        """Returns the address of the other side.

        An IPv4-mapped IPv6 address is returned in its IPv4 form.
        """
        return str(self._writer.get_extra_info("peername", ("",))[0]).removeprefix("::ffff:")

    @property
    def own_address(self) -> str:
        """Returns the address of this side of the connection."""
        return str(self._writer.get_extra_info("sockname", ("",))[0])

    def send(self, kind: str, **values: Any) -> None:
        """Sends a message of the type ``kind`` with the entries ``values``.

        If the connection is closed, this method drops the message and does not raise an error. The
        method :meth:`receive` reports that the connection is closed.
        """
        if not self._writer.is_closing():
            self._writer.write(self._session.seal(json.dumps({"what": kind, **values}).encode()))

    def beat(self) -> None:
        """Starts sending a heartbeat every :data:`BEAT_S` seconds."""
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def receive(self, silence_s: float = SILENCE_S) -> dict[str, Any] | None:
        """Waits for the next message and returns it, or returns ``None`` if the peer is lost.

        Skips heartbeats.

        Args:
            silence_s: Time in seconds without a message after which the peer is considered lost.
                Heartbeats count as messages.
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
        """Waits for the next payload and returns it.

        If the call times out, the next call continues the same read.
        """
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read())
            self._reading.add_done_callback(_take_error)
        reading = self._reading
        try:
            payload = await result_within(reading, silence_s)
        except asyncio.CancelledError:
            if reading.cancelled():  # :meth:`close` cancelled only the read, not this task.
                raise EOFError("this process closed the connection") from None
            raise
        self._reading = None
        return payload

    async def close(self) -> None:
        """Sends buffered messages and closes the connection. Safe to call more than once."""
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


def _close_dialed(dialing: asyncio.Future[SealedSocket]) -> None:
    """Closes the socket of ``dialing``, a connection attempt whose result is no longer needed."""
    if not dialing.cancelled() and dialing.exception() is None:
        dialing.result().socket.close()


def _take_error(reading: asyncio.Task[bytes]) -> None:
    """Retrieves the exception of ``reading``, so that asyncio does not print a warning about it."""
    if not reading.cancelled():
        reading.exception()


class Listener:
    """Accepts connections from programs that know the job's secret.

    The connections are handled in the current event loop.

    Args:
        attend: Coroutine function that handles one connection. The connection stays open when the
            coroutine returns. If the coroutine fails because of a malformed message, only this
            connection is closed.
        secret: Secret of the job, which both sides must know.
        purpose: Label of the connections, which must be the same on both sides.
        report: Function that prints a line of text. It is called when a connection is rejected.
        host: Address of this machine to listen on. If it is empty or is not an address of
            this machine, the listener listens on all addresses.
        port: Port to listen on; 0 for any free port.

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
        # Maps each task that handles a connection to the task's socket, or to ``None`` once the
        # task has created a :class:`Connection` from the socket.
        self._tasks: dict[asyncio.Task[None], SealedSocket | None] = {}
        self._is_closed = False
        self._gate = Gate(bind(host, port), lambda: secret, purpose, self._admit, report)
        self.port = self._gate.port

    def close(self) -> None:
        """Stops listening. Accepted connections stay open. Safe to call more than once."""
        self._is_closed = True
        self._gate.close()

    def _admit(self, sealed: SealedSocket) -> None:
        try:
            self._loop.call_soon_threadsafe(self._begin, sealed)
        except RuntimeError:  # Scheduling fails if the event loop is closed.
            sealed.socket.close()

    def _begin(self, sealed: SealedSocket) -> None:
        if self._is_closed:
            sealed.socket.close()
            return
        task = self._loop.create_task(self._serve(sealed))
        self._tasks[task] = sealed
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        """Removes ``task``. Closes the task's socket if the task was cancelled before using it."""
        sealed = self._tasks.pop(task)
        if sealed is not None:
            sealed.socket.close()

    async def _serve(self, sealed: SealedSocket) -> None:
        link = await Connection.over(sealed)
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        try:
            await self._attend(link)
        except (LookupError, TypeError, ValueError) as error:
            self._report(f"warning: an invalid message from {link.peer} was rejected: {error!r}")
            await link.close()
