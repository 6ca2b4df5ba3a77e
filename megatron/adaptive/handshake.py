"""Lets two processes of a job prove to each other that they know the job's secret.

The visitor is the side that opens the connection, and the listener is the side that accepts it.
Neither side reads a message before it has checked the other side's proof::

    visitor                                     listener
      magic, nonce a         ────────────────────>
                             <────────────────────  magic, nonce b, the listener's proof
      the visitor's proof    ────────────────────>
      length, MAC, payload   <───────────────────>  length, MAC, payload

Proofs and keys are computed with HMAC-SHA256 from the purpose of the connection and both nonces,
using the secret as the key. A proof is therefore useless on any other connection, and a received
proof that is sent back proves nothing. The MAC (message authentication code) of a message also
covers the index of the message, so repeated, dropped or reordered messages are detected. Nothing is
encrypted, so messages must not contain secrets.

:class:`Handshake` and :class:`Session` do no I/O: their callers send and receive the bytes. In this
package's Python code, only :class:`Gate` accepts TCP connections. It passes a connection on only
after the peer has proved that it knows the secret.
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
"""Size in bytes of the header that precedes each payload and contains its length and MAC."""
LONGEST = 1 << 22
"""Maximum size of a payload in bytes."""
_Payload = TypeVar("_Payload", bytes, memoryview)


class StrangerError(ConnectionError):
    """Raised if the other side of a connection did not prove that it knows the secret."""


def new_secret() -> str:
    """Returns a new random secret of 256 bits as a hexadecimal string."""
    return secrets.token_hex(32)


def write_private(path: Path, text: str) -> None:
    """Writes ``text`` atomically to the file ``path``, which other users can never read.

    Raises:
        OSError: The file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(draft, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


class Session:
    """Signs and checks the messages of a connection after the handshake.

    One thread may send messages while another one receives messages.

    Args:
        sending: HMAC key that signs messages to the other side.
        receiving: HMAC key that checks messages from the other side.
    """

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._sending = sending
        self._receiving = receiving
        self._sent = self._received = 0

    def head(self, payload: bytes | memoryview) -> bytes:
        """Returns the header (length and MAC) to send before ``payload``.

        Raises:
            ValueError: The payload is longer than :data:`LONGEST`.
        """
        if len(payload) > LONGEST:
            raise ValueError(f"a message of {len(payload)} bytes is above the limit of {LONGEST}")
        self._sent += 1
        return _LENGTH.pack(len(payload)) + _mac(self._sending, self._sent, payload)

    def seal(self, payload: bytes) -> bytes:
        """Returns the header and the payload as bytes. Raises the same errors as :meth:`head`."""
        return self.head(payload) + payload

    @staticmethod
    def length(head: bytes) -> int:
        """Returns the size in bytes of the payload that follows the header ``head``.

        Raises:
            StrangerError: The payload would be longer than :data:`LONGEST`.
        """
        (length,) = _LENGTH.unpack_from(head)
        if length > LONGEST:
            raise StrangerError(f"a message of {length} bytes is above the limit of {LONGEST}")
        return int(length)

    def open(self, head: bytes, payload: _Payload) -> _Payload:
        """Checks that ``payload`` is the next message of the other side, and returns ``payload``.

        Raises:
            StrangerError: The message was changed, repeated or reordered.
        """
        self._received += 1
        expected = _mac(self._receiving, self._received, payload)
        if not hmac.compare_digest(expected, head[_LENGTH.size :]):
            raise StrangerError("a message was changed, repeated or reordered during transfer")
        return payload


def _mac(key: bytes, number: int, payload: bytes | memoryview) -> bytes:
    mac = hmac.new(key, _COUNT.pack(number), hashlib.sha256)
    mac.update(payload)
    return mac.digest()


class Handshake:
    """Lets both sides of a connection prove to each other that they know the secret.

    Each connection needs a new object. First send :attr:`first`. Then, as long as :attr:`wanted` is
    not 0, read that number of bytes, pass them to :meth:`advance`, and send the returned bytes.
    After that, :attr:`session` is set.

    Args:
        secret: Secret of the job. If the secret is empty, every handshake fails.
        purpose: Text that states the purpose of the connection. Both sides must use the same text.
        visiting: Whether this side opened the connection.

    Attributes:
        first: Bytes to send at the start. Empty if this side is the listener.
        wanted: Number of bytes to pass to the next call of :meth:`advance`, or 0 after the
            handshake.
        session: Object that signs and checks later messages, or ``None`` during the handshake.
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
        """Processes the bytes ``data`` from the other side, and returns the bytes to send.

        Raises:
            StrangerError: The other side did not prove that it knows the job's secret.
        """
        if len(data) != self.wanted:
            raise StrangerError(
                "the peer disconnected before it proved that it knows the job's secret"
            )
        if not self._key:
            if data[: len(_MAGIC)] != _MAGIC:
                raise StrangerError("the received data does not follow this program's protocol")
            self._derive(data[len(_MAGIC) : _HELLO_BYTES])
            if not self._visiting:
                self.wanted = _MAC_BYTES
                return _MAGIC + self._nonce + self._prove("listener")
        other = "listener" if self._visiting else "visitor"
        if not self._secret or not hmac.compare_digest(self._prove(other), data[-_MAC_BYTES:]):
            raise StrangerError("the peer does not know the job's secret")
        self.wanted = 0
        to_listener = self._expand("to the listener")
        to_visitor = self._expand("to the visitor")
        if self._visiting:
            self.session = Session(to_listener, to_visitor)
            return self._prove("visitor")
        self.session = Session(to_visitor, to_listener)
        return b""

    def _derive(self, other: bytes) -> None:
        nonces = self._nonce + other if self._visiting else other + self._nonce
        self._key = hmac.digest(self._secret, self._purpose + b"\0" + nonces, "sha256")

    def _prove(self, side: str) -> bytes:
        return self._expand(f"proof of the {side}")

    def _expand(self, label: str) -> bytes:
        return hmac.digest(self._key, label.encode(), "sha256")


class SealedSocket:
    """Sends and receives authenticated messages over a blocking socket.

    Args:
        connection: Connected socket on which the handshake is complete.
        session: Session from the handshake. It signs and checks the messages on this socket.
    """

    def __init__(self, connection: socket.socket, session: Session) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.session = session

    def send(self, payload: bytes) -> None:
        """Sends ``payload`` as one message.

        Raises:
            OSError: The connection failed, or the socket timed out.
        """
        self.socket.sendall(self.session.seal(payload))

    def receive(self, most: int = LONGEST) -> bytes:
        """Waits for the next message, and returns its payload.

        Args:
            most: Maximum size of the payload in bytes.

        Raises:
            OSError: The connection ended, the socket timed out, or the message is too long or is
                not from the peer.
        """
        head = read_exactly(self.socket, HEAD_BYTES)
        length = self.session.length(head)
        if length > most:
            raise StrangerError(f"a message of {length} bytes is above the limit of {most} bytes")
        return self.session.open(head, read_exactly(self.socket, length))

    def send_memory(self, *parts: memoryview) -> None:
        """Sends the memory blocks ``parts`` in messages of at most :data:`LONGEST` bytes.

        The receiver must know the sizes of the blocks.
        """
        for piece in _pieces(parts):
            self.socket.sendall(self.session.head(piece))
            self.socket.sendall(piece)

    def receive_memory(self, *parts: memoryview) -> None:
        """Fills ``parts`` with the bytes that the peer has sent with :meth:`send_memory`.

        Do not use the bytes before this method has returned, because until then they may be
        unverified.

        Raises:
            OSError: The connection ended, or a message is not from the peer.
        """
        for piece in _pieces(parts):
            head = read_exactly(self.socket, HEAD_BYTES)
            _fill(self.socket, piece)
            self.session.open(head, piece)


def _pieces(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        yield from (part[start : start + LONGEST] for start in range(0, len(part), LONGEST))


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Reads exactly ``size`` bytes from the blocking socket ``connection``, and returns the bytes.

    Raises:
        OSError: The connection ended before all bytes had arrived.
    """
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, rest: memoryview) -> None:
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionResetError("the connection ended")
        rest = rest[count:]


def dial(
    address: tuple[str, int], secret: str, purpose: str, within_s: float, *, is_early: bool = False
) -> SealedSocket:
    """Connects to a listener of the job, completes the handshake, and returns the socket.

    If the connection is lost during the handshake, this function connects again, because a busy
    listener drops some connections.

    Args:
        address: Host and port of the listener.
        secret: Secret of the job.
        purpose: Text that states the purpose of the connection. Both sides must use the same text.
        within_s: Time limit in seconds for the connection and the handshake. The returned socket
            has the same timeout.
        is_early: Whether the listener may not have received the secret yet. If True, this function
            connects again after a wrong proof.

    Raises:
        StrangerError: The listener did not prove that it knows the secret.
        OSError: No process listens at ``address``.
    """
    end_s = time.monotonic() + within_s
    while True:
        connection = socket.create_connection(address, max(0.01, end_s - time.monotonic()))
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
_NO_PROOF = "the listener did not prove that it knows the job's secret"


def bind(host: str, port: int, *, backlog: int = 4096) -> socket.socket:
    """Returns a socket that listens on one address of this machine, or on all addresses.

    Args:
        host: Address or host name of this machine to which the socket is bound. If it is empty, or
            belongs to a different machine, the socket listens on all IPv4 and IPv6 addresses.
        port: Port number, or 0 to let the kernel choose a free port.
        backlog: Maximum number of connections that wait in the kernel to be accepted.

    Raises:
        OSError: The port cannot be used.
    """
    if host and (local := _local_address(host)) is not None:
        family, address = local
        return socket.create_server((address, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        # The administrator may have disabled IPv6 at run time.
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=backlog)


def _local_address(host: str) -> tuple[socket.AddressFamily, str] | None:
    """Returns the address family and the address of ``host``, or ``None``.

    The result is ``None`` if ``host`` is a different machine or a name with several addresses.
    """
    with contextlib.suppress(OSError):
        entries = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        resolved = {(entry[0], str(entry[4][0])) for entry in entries}
        if len(resolved) == 1:
            ((family, address),) = resolved
            # Debian resolves a machine's own name to a loopback address, which other machines
            # cannot reach. Listen on such an address only if the caller passed it explicitly.
            if not is_loopback(address) or host in (address, "localhost"):
                with socket.socket(family) as probe:
                    probe.bind((address, 0))
                return family, address
    return None


_MOST_WAITING = 4096
_SHARE = 4
"""Unauthenticated peers may use at most ``1 / _SHARE`` of the allowed number of open files.
"""
_PROVE_S = 5.0
_CLOSE_S = 1.0
_REPORT_S = 60.0


class Gate:
    """Accepts connections in a thread, and admits peers that prove that they know the secret.

    A peer must prove this within five seconds, and may send only about a hundred bytes until then.
    The gate handles all peers concurrently. If too many peers wait for admission, the gate drops
    one of them.

    Args:
        listening: Listening socket, which the gate closes at the end.
        secret: Function that returns the job's current secret. While the secret is empty, the gate
            admits no peer.
        purpose: Text that states the purpose of the connections. Both sides must use the same text.
        admit: Function that is called with each admitted connection. The socket is blocking and has
            no timeout. The function runs in the gate's thread, so it must return quickly. If it
            raises an exception, the gate closes the connection.
        report: Function that prints a line about rejected peers. The gate calls it at most once a
            minute.

    Attributes:
        port: Port on which the gate listens.
        most: Maximum number of peers that wait for admission at the same time.
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
        self._secret = secret
        self._purpose = purpose
        self._admit = admit
        self._report = report
        # Maps each task that waits for a peer's proof to the peer's address, oldest peer first.
        self._waiting: dict[asyncio.Task[Session | None], str] = {}
        # Tasks that were cancelled to make room for new peers, but have not closed their
        # connections yet.
        self._dropped: set[asyncio.Task[Session | None]] = set()
        self._is_closed = False
        self._refused = 0
        self._reported_s = float("-inf")
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = files == resource.RLIM_INFINITY
        self.most = _MOST_WAITING if unlimited else max(1, min(_MOST_WAITING, files // _SHARE))
        self.port = int(listening.getsockname()[1])
        self._accepting: asyncio.Task[None]  # The gate's thread creates this task.
        # If the event loop or the thread cannot be created, close what was opened before.
        with contextlib.ExitStack() as undo:
            undo.callback(listening.close)
            self._loop = asyncio.new_event_loop()
            undo.callback(self._loop.close)
            self._thread = threading.Thread(target=self._run, name=f"{purpose}-gate", daemon=True)
            self._thread.start()
            undo.pop_all()

    def close(self) -> None:
        """Stops listening, but keeps admitted connections open. A second call does nothing.

        Peers that have not been admitted yet are disconnected.
        """
        self._is_closed = True
        # The event loop raises this error if it has already been closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _stop(self) -> None:
        # Cancel the task that accepts connections. This also ends the event loop.
        self._accepting.cancel()

    def _run(self) -> None:
        ended = contextlib.suppress(asyncio.CancelledError)
        with self._listening, contextlib.closing(self._loop), ended:
            self._accepting = self._loop.create_task(self._accept())
            self._loop.run_until_complete(self._accepting)

    async def _accept(self) -> None:
        self._listening.setblocking(False)
        try:
            while True:
                try:
                    connection, peer = await self._next_visitor()
                except ConnectionError:
                    continue  # The peer closed the connection before it was accepted.
                except OSError:  # The usual cause is that too many files are open.
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
            self._is_closed = True
            visitors = [*self._waiting, *self._dropped]
            for task in visitors:
                task.cancel()
            # A task closes its connection when it ends, so wait for all tasks.
            await asyncio.gather(*visitors, return_exceptions=True)

    async def _next_visitor(self) -> tuple[socket.socket, Any]:
        """Waits for the next connection, and returns its socket and the peer's address.

        This method does not use asyncio's ``sock_accept``, which logs a traceback if it is
        cancelled just as a connection arrives.
        """
        while True:
            try:
                connection, peer = self._listening.accept()
            except BlockingIOError:
                await self._wait_until_readable()
            else:
                connection.setblocking(False)
                return connection, peer

    async def _wait_until_readable(self) -> None:
        """Waits until a peer has connected to the listening socket."""
        is_readable = asyncio.Event()
        self._loop.add_reader(self._listening, is_readable.set)
        try:
            await is_readable.wait()
        finally:
            self._loop.remove_reader(self._listening)

    async def _attend(self, connection: socket.socket, address: str) -> Session | None:
        """Waits until the peer has proved that it knows the secret, and returns the session.

        Returns ``None`` if the proof fails.
        """
        try:
            return await asyncio.wait_for(self._prove(connection), _PROVE_S)
        except asyncio.TimeoutError:
            self._refuse(
                address, f"the peer did not prove within {_PROVE_S:g} s that it knows the secret"
            )
        except OSError as error:
            self._refuse(address, str(error))
        return None

    def _end(self, connection: socket.socket, task: asyncio.Task[Session | None]) -> None:
        """Admits the peer of ``task`` if it knows the secret, otherwise closes ``connection``."""
        self._waiting.pop(task, None)
        self._dropped.discard(task)
        is_admitted = False
        try:
            session = None if task.cancelled() else task.result()
            if session is not None and not self._is_closed:
                connection.setblocking(True)
                self._admit(SealedSocket(connection, session))
                is_admitted = True
        finally:
            if not is_admitted:
                connection.close()

    async def _prove(self, connection: socket.socket) -> Session | None:
        """Completes the handshake with the peer on ``connection``, and returns the session.

        Returns ``None`` if the peer sent nothing, for example because it only checked that the port
        is open.
        """
        shake = Handshake(self._secret(), self._purpose, visiting=False)
        while shake.wanted:
            data = b""
            while len(data) < shake.wanted:
                received = await self._loop.sock_recv(connection, shake.wanted - len(data))
                data += received
                if not received and not data:
                    return None
                if not received:
                    break
            await self._loop.sock_sendall(connection, shake.advance(data))
        return shake.session

    def _make_room(self) -> None:
        """Disconnects the oldest peer from the address with the most connections.

        Only peers that have not been admitted yet are counted. An attacker's address usually has
        the most of them, so the job's own processes are rarely disconnected.
        """
        if self._waiting:
            crowd = Counter(self._waiting.values()).most_common(1)[0][0]
            oldest = next(task for task, address in self._waiting.items() if address == crowd)
            del self._waiting[oldest]
            self._dropped.add(oldest)
            oldest.cancel()
            self._refuse(crowd, "there were too many connections at the same time")

    def _refuse(self, address: str, reason: str) -> None:
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_S:
            total = f"; {self._refused} refused so far" if self._refused > 1 else ""
            self._reported_s = now_s
            # The output stream may already be closed.
            with contextlib.suppress(OSError, ValueError):
                self._report(
                    f"warning: a connection from {address} to port {self.port} ({self._purpose}) "
                    f"does not belong to this job and was refused: {reason}{total}"
                )


def to_log(log: Any) -> Callable[[str], None]:
    """Returns a function that logs a message as a warning in the logger ``log``.

    Pass this function as the argument ``report`` of :class:`Gate`.
    """
    return lambda text: log.warning("%s", text.removeprefix("warning: "))
