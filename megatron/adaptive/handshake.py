"""Lets processes of a job prove its secret to each other, before either reads what the other says.

::

    visitor                                     listener
      magic, nonce a         ────────────────────>
                             <────────────────────  magic, nonce b, the listener's proof
      the visitor's proof    ────────────────────>
      length, MAC, payload   <───────────────────>  length, MAC, payload

Proofs and keys are HMAC-SHA256 under the secret over the purpose of the connection and both nonces:
what one connection has shown is worth nothing in another, and an answer sent back proves nothing.
The MAC of a message also covers its number, so that none can be repeated, dropped or moved. Nothing
is encrypted: secrets do not belong into messages.

:class:`Handshake` and :class:`Session` do no input or output. :class:`Gate` is the only place where
this package accepts TCP connections from Python; what it lets through has proved the secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import os
import resource
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron.adaptive.network import is_loopback

_MAGIC = b"MAdaptv1"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES
_LENGTH = struct.Struct("!I")
_COUNT = struct.Struct("!Q")
HEAD_BYTES = _LENGTH.size + _MAC_BYTES
"""Bytes of a message before its payload."""
LONGEST = 1 << 22
"""Bytes of the longest payload."""
_Payload = TypeVar("_Payload", bytes, memoryview)


class StrangerError(ConnectionError):
    """Says that the other side did not prove the secret; its text says how."""


def new_secret() -> str:
    """Returns a new secret, 256 bits as text."""
    return secrets.token_hex(32)


def write_private(path: Path, text: str) -> None:
    """Writes a new file, whole at any moment, that only this user may read from its first on.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(draft, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


class Session:
    """Holds the keys of a connection whose sides know each other; one thread in each direction.

    Args:
        sending: key of messages to the other side.
        receiving: key of messages from there.
    """

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0

    def head(self, payload: bytes | memoryview) -> bytes:
        """Returns what goes to the other side before a payload.

        Raises:
            ValueError: it is longer than :data:`LONGEST`.
        """
        if len(payload) > LONGEST:
            raise ValueError(f"a message of {len(payload)} bytes: {LONGEST} are the most")
        self._sent += 1
        return _LENGTH.pack(len(payload)) + _mac(self._sending, self._sent, payload)

    def seal(self, payload: bytes) -> bytes:
        """Returns the bytes that carry a payload; raises as :meth:`head` does."""
        return self.head(payload) + payload

    @staticmethod
    def length(head: bytes) -> int:
        """Returns the bytes of the payload that follows a head of :data:`HEAD_BYTES`.

        Raises:
            StrangerError: no message is so long.
        """
        (length,) = _LENGTH.unpack_from(head)
        if length > LONGEST:
            raise StrangerError(f"a message of {length} bytes: {LONGEST} are the most")
        return int(length)

    def open(self, head: bytes, payload: _Payload) -> _Payload:
        """Returns a payload that is what the other side sent next.

        Raises:
            StrangerError: it is not.
        """
        self._received += 1
        expected = _mac(self._receiving, self._received, payload)
        if not hmac.compare_digest(expected, head[_LENGTH.size :]):
            raise StrangerError("a message came changed, twice or out of order")
        return payload


def _mac(key: bytes, number: int, payload: bytes | memoryview) -> bytes:
    mac = hmac.new(key, _COUNT.pack(number), hashlib.sha256)
    mac.update(payload)
    return mac.digest()


class Handshake:
    """Proves a secret to the other side and has it proved; use once.

    Send :attr:`first`; then, while :attr:`wanted` is not 0, give :meth:`advance` so many bytes and
    send what it returns. Then :attr:`session` is there.

    Args:
        secret: of the job; nobody proves an empty one.
        purpose: of the connection, the same on both sides.
        visiting: whether this side connected.
    """

    def __init__(self, secret: str, purpose: str, *, visiting: bool) -> None:
        self._secret = secret.encode()
        self._purpose = purpose.encode()
        self._visiting = visiting
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._key = b""
        self.first = _MAGIC + self._nonce if visiting else b""
        self.wanted = _HELLO_BYTES + _MAC_BYTES if visiting else _HELLO_BYTES
        self.session: Session | None = None

    def advance(self, data: bytes) -> bytes:
        """Takes the :attr:`wanted` bytes and returns those to send.

        Raises:
            StrangerError: the other side is none of the job.
        """
        if len(data) != self.wanted:
            raise StrangerError("the connection ended before the job's secret was proved")
        if not self._key:
            if data[: len(_MAGIC)] != _MAGIC:
                raise StrangerError("what came is not of this program")
            self._derive(data[len(_MAGIC) : _HELLO_BYTES])
            if not self._visiting:
                self.wanted = _MAC_BYTES
                return _MAGIC + self._nonce + self._prove("listener")
        other = "listener" if self._visiting else "visitor"
        if not self._secret or not hmac.compare_digest(self._prove(other), data[-_MAC_BYTES:]):
            raise StrangerError("it does not know the job's secret")
        self.wanted = 0
        to_listener, to_visitor = (self._expand(f"to the {one}") for one in ("listener", "visitor"))
        if self._visiting:
            self.session = Session(to_listener, to_visitor)
            return self._prove("visitor")
        self.session = Session(to_visitor, to_listener)
        return b""

    def _derive(self, other: bytes) -> None:
        both = self._nonce + other if self._visiting else other + self._nonce
        self._key = hmac.digest(self._secret, self._purpose + b"\0" + both, "sha256")

    def _prove(self, who: str) -> bytes:
        return self._expand(f"proof of the {who}")

    def _expand(self, label: str) -> bytes:
        return hmac.digest(self._key, label.encode(), "sha256")


class SealedSocket:
    """Carries messages over a blocking socket whose other side has proved the secret.

    Args:
        connection: the socket.
        session: of it.
    """

    def __init__(self, connection: socket.socket, session: Session) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.session = session

    def send(self, payload: bytes) -> None:
        """Sends a message.

        Raises:
            OSError: it cannot be sent.
        """
        self.socket.sendall(self.session.seal(payload))

    def receive(self, most: int = LONGEST) -> bytes:
        """Waits for the next message, as long as the socket's timeout allows.

        Args:
            most: bytes that it may have.

        Raises:
            OSError: the connection ended, or what came is not of the other side.
        """
        head = read_exactly(self.socket, HEAD_BYTES)
        length = self.session.length(head)
        if length > most:
            raise StrangerError(f"a message of {length} bytes: {most} are the most here")
        return self.session.open(head, read_exactly(self.socket, length))

    def send_memory(self, *parts: memoryview) -> None:
        """Sends memory of a size that both sides know, in as many messages as it needs."""
        for piece in _pieces(parts):
            self.socket.sendall(self.session.head(piece))
            self.socket.sendall(piece)

    def receive_memory(self, *parts: memoryview) -> None:
        """Fills memory with what :meth:`send_memory` sent; it counts once this has returned.

        Raises:
            OSError: the connection ended, or what came is not of the other side.
        """
        for piece in _pieces(parts):
            head = read_exactly(self.socket, HEAD_BYTES)
            _fill(self.socket, piece)
            self.session.open(head, piece)


def _pieces(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        yield from (part[at : at + LONGEST] for at in range(0, len(part), LONGEST))


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Reads ``size`` bytes.

    Raises:
        OSError: the connection ended before.
    """
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, place: memoryview) -> None:
    while place:
        count = connection.recv_into(place)
        if not count:
            raise ConnectionResetError("the connection ended")
        place = place[count:]


def dial(
    place: tuple[str, int], secret: str, purpose: str, within_s: float, *, is_early: bool = False
) -> SealedSocket:
    """Connects to a listener of the job; whoever crowds it may get between for a while.

    Args:
        place: host and port.
        secret: of the job.
        purpose: of the connection.
        within_s: for all of it; the socket has it as timeout afterwards.
        is_early: whether the listener may not know the secret yet.

    Raises:
        StrangerError: what listens there does not know the secret.
        OSError: nobody listens there.
    """
    end_s = time.monotonic() + within_s
    while True:
        connection = socket.create_connection(place, max(0.01, end_s - time.monotonic()))
        try:
            shake = Handshake(secret, purpose, visiting=True)
            connection.sendall(shake.first)
            while shake.wanted:
                connection.sendall(shake.advance(read_exactly(connection, shake.wanted)))
            assert shake.session is not None
            connection.settimeout(within_s)
            return SealedSocket(connection, shake.session)
        except OSError as error:
            connection.close()
            if isinstance(error, StrangerError) and not is_early:
                raise
            if time.monotonic() + _AGAIN_S > end_s:
                raise StrangerError(_NO_PROOF) from None
        time.sleep(_AGAIN_S)


_AGAIN_S = 0.1
_NO_PROOF = "what listens there did not prove the job's secret"


def bind(host: str, port: int, *, backlog: int = 4096) -> socket.socket:
    """Listens at an address of this machine, at all of them where it has no such address.

    Args:
        host: address or name, empty for all of both versions of IP.
        port: 0 for one of this machine's own choice.
        backlog: connections that the kernel keeps until they are accepted.

    Raises:
        OSError: the port cannot be had.
    """
    if host and (own := _own(host)) is not None:
        kind, address = own
        return socket.create_server((address, port), family=kind, backlog=backlog)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # where it was turned off since
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=backlog)


def _own(host: str) -> tuple[socket.AddressFamily, str] | None:
    """Returns kind and address of a host that is this machine, as others have it."""
    with contextlib.suppress(OSError):
        entries = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        found = {(entry[0], str(entry[4][0])) for entry in entries}
        if len(found) == 1:
            ((kind, address),) = found
            if not is_loopback(address) or host in (address, "localhost"):  # as on Debian
                with socket.socket(kind) as probe:
                    probe.bind((address, 0))
                return kind, address
    return None


_MOST_WAITING = 4096
_SHARE = 4
"""Visitors take no more than one of so many of the files that the process may have open."""
_PROVE_S = 5.0
_CLOSE_S = 1.0
_REPORT_S = 60.0


class Gate:
    """Accepts connections in a thread of its own and lets through who proves the secret.

    A visitor has five seconds and room for some hundred bytes, and nobody waits for another. When
    too many have not proved the secret yet, one goes.

    Args:
        listening: socket; owned by this object from here on.
        secret: returns the job's secret at this moment; nobody is let in while it is empty.
        purpose: of the connections.
        admit: takes each connection that is let in, blocking and without timeout; called from the
            thread, must not wait.
        report: prints a line about visitors that were refused; once a minute at most.

    Attributes:
        port: where it listens.
        most: visitors that may be about to prove the secret at once.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: Callable[[], str],
        purpose: str,
        admit: Callable[[SealedSocket], None],
        report: Callable[[str], None],
    ) -> None:
        self._listening = listening
        self._secret, self._purpose = secret, purpose
        self._admit, self._report = admit, report
        self._waiting: dict[asyncio.Task[Session | None], str] = {}  # addresses, the oldest first
        self._refused, self._reported_s = 0, float("-inf")
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = files == resource.RLIM_INFINITY
        self.most = _MOST_WAITING if unlimited else max(1, min(_MOST_WAITING, files // _SHARE))
        self.port = int(listening.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._accepting = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name=f"{purpose}-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening; connections that were let in stay. Idempotent."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._accepting.cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        ended = contextlib.suppress(asyncio.CancelledError)
        with self._listening, contextlib.closing(self._loop), ended:
            self._loop.run_until_complete(self._accepting)

    async def _accept(self) -> None:
        self._listening.setblocking(False)
        try:
            while True:
                try:
                    connection, peer = await self._loop.sock_accept(self._listening)
                except ConnectionError:
                    continue  # it went away again
                except OSError:  # no descriptor is left
                    self._make_room()
                    await asyncio.sleep(0.01)
                    continue
                if len(self._waiting) >= self.most:
                    self._make_room()
                address = str(peer[0]).removeprefix("::ffff:")
                task = self._loop.create_task(self._attend(connection, address))
                self._waiting[task] = address
                task.add_done_callback(functools.partial(self._end, connection))
        finally:
            for task in list(self._waiting):
                task.cancel()
            await asyncio.gather(*self._waiting, return_exceptions=True)

    async def _attend(self, connection: socket.socket, address: str) -> Session | None:
        """Returns the session of a visitor that proves the secret in time."""
        try:
            return await asyncio.wait_for(self._prove(connection), _PROVE_S)
        except asyncio.TimeoutError:
            self._refuse(address, f"it did not prove the secret in {_PROVE_S:g} s")
        except OSError as error:
            self._refuse(address, str(error))
        return None

    def _end(self, connection: socket.socket, task: asyncio.Task[Session | None]) -> None:
        """Lets a visitor in, or ends its connection."""
        self._waiting.pop(task, None)
        session = None if task.cancelled() else task.result()
        if session is None:
            connection.close()
        else:
            connection.setblocking(True)
            self._admit(SealedSocket(connection, session))

    async def _prove(self, connection: socket.socket) -> Session | None:
        """Returns a visitor's session; ``None`` for who only looks whether somebody listens."""
        shake = Handshake(self._secret(), self._purpose, visiting=False)
        while shake.wanted:
            data = b""
            while len(data) < shake.wanted:
                came = await self._loop.sock_recv(connection, shake.wanted - len(data))
                data += came
                if not came and not data:
                    return None
                if not came:
                    break
            await self._loop.sock_sendall(connection, shake.advance(data))
        return shake.session

    def _make_room(self) -> None:
        """Ends the oldest visit from where most come, which seldom is the job's own."""
        if self._waiting:
            crowd = Counter(self._waiting.values()).most_common(1)[0][0]
            oldest = next(task for task, address in self._waiting.items() if address == crowd)
            del self._waiting[oldest]
            oldest.cancel()
            self._refuse(crowd, "too many came at once")

    def _refuse(self, address: str, why: str) -> None:
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_S:
            more = f"; {self._refused} refused by now" if self._refused > 1 else ""
            self._reported_s = now_s
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                self._report(
                    f"warning: a visitor from {address} to port {self.port} ({self._purpose}) is"
                    f" not of this job and was refused: {why}{more}"
                )


def to_log(log: Any) -> Callable[[str], None]:
    """Returns a report of a :class:`Gate` that goes to a logger."""
    return lambda text: log.warning("%s", text.removeprefix("warning: "))
