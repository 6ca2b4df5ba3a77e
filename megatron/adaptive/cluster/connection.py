"""Carries messages between the nodes of a job: a line of JSON each, and signs of life.

A side that hears nothing for :data:`SILENCE_S` takes the other for lost: a machine without power
closes no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from megatron.adaptive.config.outside import parse_json

BEAT_S = 1.0
SILENCE_S = 20.0
_LONGEST = 1 << 22
"""Bytes of the longest message."""
_AT_ONCE = 4096
"""Nodes that may connect at the same moment; what is beyond tries again a second later."""


class Connection:
    """Carries messages over one connection, from one event loop.

    Args:
        reader: of the connection.
        writer: of the connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._beating: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, address: str, port: int, within_s: float) -> Connection:
        """Connects to a listening side.

        Raises:
            OSError: nobody listens there, and its text says why; ``TimeoutError`` is one.
        """
        opened = asyncio.open_connection(address, port, limit=_LONGEST)
        try:
            return cls(*await asyncio.wait_for(opened, within_s))
        except asyncio.TimeoutError:
            raise TimeoutError(f"no answer within {within_s:g} s") from None
        except OSError as error:  # asyncio's own text names the call alone
            raise OSError(os.strerror(error.errno) if error.errno else str(error)) from None

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
            self._writer.write(json.dumps({"what": what, **values}).encode() + b"\n")

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
                line = await asyncio.wait_for(self._reader.readline(), silence_s)
                message = parse_json(line, strict=False)
            except (OSError, ValueError, asyncio.TimeoutError):
                return None
            if not isinstance(message, dict) or "what" not in message:
                return None
            if message["what"] != "beat":
                return message

    async def close(self) -> None:
        """Sends what is left and close. Idempotent."""
        if self._beating is not None:
            self._beating.cancel()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 1.0)
        self._writer.close()

    async def _beat(self) -> None:
        while not self._writer.is_closing():
            self.send("beat", unix_ns=time.time_ns())
            await asyncio.sleep(BEAT_S)


async def listen(
    attend: Callable[[Connection], Awaitable[None]], port: int = 0, *, is_local: bool = False
) -> asyncio.Server:
    """Listens on one port for both versions of IP, and serves whoever connects.

    Args:
        attend: serves one connection, which stays open after it.
        port: 0 for one of this machine's own choice.
        is_local: for this machine alone.

    Raises:
        OSError: the port cannot be had.
    """

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Python 3.11 prints a traceback for a connection that is still served when the loop ends.
        with contextlib.suppress(asyncio.CancelledError):
            await attend(Connection(reader, writer))

    own = None
    if not is_local and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # where it was turned off since
            own = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    own = own or socket.create_server(("127.0.0.1" if is_local else "", port))
    return await asyncio.start_server(connected, sock=own, limit=_LONGEST, backlog=_AT_ONCE)
