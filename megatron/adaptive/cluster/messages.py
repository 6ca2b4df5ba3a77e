"""Messages between manager and agents: a line of JSON each, and a sign of life every second.

A side that hears nothing for :data:`SILENCE_S` takes the other for lost: a machine without power
closes no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

__all__ = ["BEAT_S", "SILENCE_S", "Link"]

BEAT_S = 1.0
SILENCE_S = 20.0
_LONGEST = 1 << 22


class Link:
    """One connection, to be used from one event loop.

    Args:
        reader: of the connection.
        writer: of the connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._beating: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, address: str, port: int, within_s: float) -> Link:
        """Connect to a listening side.

        Raises:
            OSError: nobody listens there; ``TimeoutError`` is one.
        """
        opened = asyncio.open_connection(address, port, limit=_LONGEST)
        try:
            return cls(*await asyncio.wait_for(opened, within_s))
        except asyncio.TimeoutError:
            raise TimeoutError(f"no answer within {within_s:g} s") from None

    @property
    def peer(self) -> str:
        """Address of the other side; as IPv4 where it came so to a socket for both."""
        return str(self._writer.get_extra_info("peername", ("",))[0]).removeprefix("::ffff:")

    def send(self, what: str, **values: Any) -> None:
        """Send a message; one to a side that is gone is dropped, which :meth:`receive` tells."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"what": what, **values}).encode() + b"\n")

    def beat(self) -> None:
        """Give signs of life from now on."""
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def receive(self) -> dict[str, Any] | None:
        """Wait for the next message that is no sign of life; ``None`` where the other is lost."""
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readline(), SILENCE_S)
            except (OSError, ValueError, asyncio.TimeoutError):
                return None
            try:
                message = json.loads(line)
            except ValueError:
                return None
            if not isinstance(message, dict) or "what" not in message:
                return None
            if message["what"] != "beat":
                return message

    async def close(self) -> None:
        """Send what is left and close. Idempotent."""
        if self._beating is not None:
            self._beating.cancel()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 1.0)
        self._writer.close()

    async def _beat(self) -> None:
        while not self._writer.is_closing():
            self.send("beat", unix_ns=time.time_ns())
            await asyncio.sleep(BEAT_S)
