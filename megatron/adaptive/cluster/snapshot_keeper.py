"""Keeps copies of the state of a node's ranks, and of those of another node, in this one's memory.

::

    rank ── descriptor, "taken" ──> Keeper ── head, steps ──> Keeper of the buddy
         <── "kept" ──                     <── step ──
                                    |
    restore ── "open" ────────────> |  descriptor

What a rank has copied is sent behind training, by a thread for each rank, in frames that end with a
checksum; the rank is told once the buddy has a step whole. Ranks and whoever restores come over a
local socket of this machine, which gives way to the same user alone; buddies over TCP, with the
job's secret. Copies live as long as the process that keeps them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.adaptive.checkpoint.snapshot_file import CopyFile

__all__ = ["Buddy", "Keeper"]

_STEP_S = 30.0  # for a buddy to take in a piece
_CONNECT_S = 10.0
_RUN_S = 30.0  # for the buddy to hear of the same start
_PIECE = 4 << 20
_LONGEST = 1 << 20
_MESSAGE = 1 << 16
_FRAME = struct.Struct("<QQQ")  # step, slot, bytes of extra
_SUM = struct.Struct("<Q")  # checksum of a frame
_KEPT = struct.Struct("<Q")  # step
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, kw_only=True)
class Buddy:
    """The node that keeps copies for this one.

    Attributes:
        name: of the node.
        address: at which it is reached.
        port: of its keeper.
    """

    name: str
    address: str
    port: int


@dataclass(kw_only=True, eq=False)
class _Store:
    run: str
    rank: int
    generation: int
    kind: str
    file: CopyFile
    taken: int = 0


class Keeper:
    """Keeps copies until it is closed.

    Args:
        host: address to listen on for other nodes, the empty text for all.

    Raises:
        OSError: no socket can be had.
    """

    def __init__(self, host: str = "") -> None:
        self._changed = threading.Condition()
        self._stores: list[_Store] = []
        self._serving = 0
        self._run = self._secret = ""
        self._buddy: Buddy | None = None
        self._open: set[socket.socket] = set()
        self.address = f"megatron-adaptive-{secrets.token_hex(8)}"
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._local.bind(f"\0{self.address}")
        self._local.listen(128)
        self._wide = _listen(host)
        self.port = int(self._wide.getsockname()[1])
        self._start(self._accept, self._local, self._serve_local)
        self._start(self._accept, self._wide, self._serve_buddy)

    def prepare(self, run: str, secret: str, buddy: Buddy | None) -> None:
        """Forget all copies and get ready for those of new ranks.

        Args:
            run: of the ranks that are about to start, the same for all nodes.
            secret: by which keepers of the job know each other.
            buddy: who keeps copies for this node.
        """
        with self._changed:
            for store in self._stores:
                store.file.close()
            self._stores = []
            self._run, self._secret, self._buddy = run, secret, buddy
            self._changed.notify_all()

    def inventory(self, within_s: float) -> list[dict[str, Any]]:
        """Tell what is kept, once nobody writes or sends any more.

        Args:
            within_s: for ranks that are about to end and copies on their way.
        """
        until_s = time.monotonic() + within_s
        with self._changed:
            while self._serving and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            needs: set[tuple[str, int]] = set()
            found = []
            for store in self._stores:
                told = {
                    "run": store.run,
                    "rank": store.rank,
                    "generation": store.generation,
                    "kind": store.kind,
                    "steps": sorted(store.file.steps()),
                    "has_common": store.file.head["has_common"],
                    "socket": self.address,
                }
                if (store.run, store.generation) not in needs:
                    needs.add((store.run, store.generation))
                    told["needs"] = store.file.head["needs"]
                found.append(told)
            return found

    def close(self) -> None:
        """Stop listening and forget all copies. Idempotent."""
        for one in (self._local, self._wide):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes who accepts
            one.close()
        with self._changed:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.prepare("", "", None)

    @staticmethod
    def _start(action: Callable[..., None], *given: Any) -> None:
        threading.Thread(target=action, args=given, name="copies", daemon=True).start()

    def _accept(self, listening: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            self._start(self._guarded, connection, serve)

    def _guarded(self, connection: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        """Serve one connection; what goes wrong ends it, which the other side sees."""
        with self._changed:
            self._open.add(connection)
            self._serving += 1
        try:
            with connection, contextlib.suppress(OSError, ValueError, KeyError):
                serve(connection)
        finally:
            with self._changed:
                self._open.discard(connection)
                self._serving -= 1
                self._changed.notify_all()

    def _serve_local(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
            return
        data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE, 1)
        told = json.loads(data)
        if told["what"] == "store":
            self._serve_rank(connection, told, CopyFile(descriptors[0]))
        elif (store := self._find(told)) is not None:
            socket.send_fds(connection, [b"{}"], [store.file.descriptor])

    def _serve_rank(self, connection: socket.socket, told: dict[str, Any], file: CopyFile) -> None:
        """Send on what a rank says that it has copied, until it ends."""
        store = _Store(
            run=told["run"],
            rank=told["rank"],
            generation=told["generation"],
            kind="own",
            file=file,
        )
        with self._changed:
            buddy, secret = self._buddy, self._secret
        if not self._add(store):
            return
        stream = None
        try:
            while data := connection.recv(_MESSAGE):
                message = json.loads(data)
                self._count(store)
                answer: dict[str, Any] = {"kept": message["step"]}
                if file.head["sent_bytes"]:
                    try:
                        if stream is None and buddy is not None:
                            stream = _Stream(buddy, secret, store)
                        if stream is not None:
                            stream.send(message["step"], message["slot"])
                    except OSError as error:
                        name = "" if buddy is None else f" {buddy.name}"
                        answer = {"failed": f"node{name} does not take copies: {error}"}
                connection.send(json.dumps(answer).encode())
        finally:
            if stream is not None:
                stream.close()

    def _serve_buddy(self, connection: socket.socket) -> None:
        """Take in the copies of a rank of another node."""
        connection.settimeout(_RUN_S)
        told = _read_line(connection)
        with self._changed:
            ready = self._changed.wait_for(lambda: self._run == told["run"], _RUN_S)
            shown, expected = str(told["secret"]).encode(), self._secret.encode()
            if not (ready and expected and secrets.compare_digest(shown, expected)):
                return
        head = bytearray(told["head_bytes"])
        _receive(connection, memoryview(head))
        file = CopyFile.create(bytes(head), whole=False)
        store = _Store(
            run=told["run"],
            rank=told["rank"],
            generation=told["generation"],
            kind="sent",
            file=file,
        )
        if not self._add(store):
            return
        connection.settimeout(None)  # the next step comes when it comes
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        frame = bytearray(_FRAME.size)
        while _receive(connection, memoryview(frame), may_end=True):
            step, slot, extra_bytes = _FRAME.unpack(frame)
            connection.settimeout(_STEP_S)
            self._take_in(connection, file, step, slot, extra_bytes)
            connection.sendall(_KEPT.pack(step))
            connection.settimeout(None)
            self._count(store)

    @staticmethod
    def _take_in(
        connection: socket.socket, file: CopyFile, step: int, slot: int, extra_bytes: int
    ) -> None:
        if extra_bytes > file.head["extra_bytes"]:
            raise ValueError("more than there is room for")
        file.begin(slot, step)
        start = file.extra_offset(slot)
        found = _receive_summed(connection, memoryview(file.memory)[start : start + extra_bytes], 0)
        found = _receive_summed(connection, file.sent(slot), found)
        expected = bytearray(_SUM.size)
        _receive(connection, memoryview(expected))
        if _SUM.unpack(expected)[0] != found:
            raise OSError(f"the copy of step {step} came damaged")
        file.finish(slot, step, extra_bytes)

    def _add(self, store: _Store) -> bool:
        with self._changed:
            if store.run != self._run:
                store.file.close()
                return False
            for one in [one for one in self._stores if _same(one, store)]:
                self._stores.remove(one)
                one.file.close()
            self._stores.append(store)
            return True

    def _count(self, store: _Store) -> None:
        """Note a step; copies from before a move go once two steps after it are under way."""
        store.taken += 1
        if store.taken != 2:
            return
        with self._changed:
            old = [
                one
                for one in self._stores
                if (one.run, one.rank, one.kind) == (store.run, store.rank, store.kind)
                and one.generation < store.generation
            ]
            self._stores = [one for one in self._stores if one not in old]
        for one in old:
            one.file.close()

    def _find(self, told: Mapping[str, Any]) -> _Store | None:
        names = ("run", "rank", "generation", "kind")
        with self._changed:
            for store in self._stores:
                if all(getattr(store, name) == told[name] for name in names):
                    return store
        return None


class _Stream:
    """Sends the copies of one rank to a buddy."""

    def __init__(self, buddy: Buddy, secret: str, store: _Store) -> None:
        self._file = store.file
        self._socket = socket.create_connection((buddy.address, buddy.port), _CONNECT_S)
        self._socket.settimeout(_STEP_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = store.file.raw_head
        told = {
            "secret": secret,
            "run": store.run,
            "rank": store.rank,
            "generation": store.generation,
            "head_bytes": len(head),
        }
        self._socket.sendall(json.dumps(told).encode() + b"\n" + head)

    def send(self, step: int, slot: int) -> None:
        """Send a step and wait until the buddy has it whole."""
        file = self._file
        extra = file.extra(slot)
        self._socket.sendall(_FRAME.pack(step, slot, len(extra)))
        checksum = 0
        for part in (extra, file.sent(slot)):
            for start in range(0, len(part), _PIECE):
                piece = part[start : start + _PIECE]
                checksum = zlib.crc32(piece, checksum)
                self._socket.sendall(piece)
        self._socket.sendall(_SUM.pack(checksum))
        answer = bytearray(_KEPT.size)
        _receive(self._socket, memoryview(answer))

    def close(self) -> None:
        self._socket.close()


def _listen(host: str) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True
            )
    return socket.create_server((host, 0), backlog=128)


def _same(one: _Store, other: _Store) -> bool:
    return (one.run, one.rank, one.generation, one.kind) == (
        other.run,
        other.rank,
        other.generation,
        other.kind,
    )


def _read_line(connection: socket.socket) -> dict[str, Any]:
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _LONGEST:
        byte = connection.recv(1)
        if not byte:
            raise OSError("it ended")
        line += byte
    told = json.loads(line)
    if not isinstance(told, dict):
        raise ValueError("it is no object")
    return told


def _receive(connection: socket.socket, into: memoryview, *, may_end: bool = False) -> bool:
    """Fill a buffer; whether there was anything, where an end is in order before the first byte."""
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if not count:
            if may_end and not at:
                return False
            raise OSError("the connection ended")
        at += count
    return True


def _receive_summed(connection: socket.socket, into: memoryview, checksum: int) -> int:
    """Fill a buffer and go on with the checksum over it."""
    for start in range(0, len(into), _PIECE):
        piece = into[start : start + _PIECE]
        _receive(connection, piece)
        checksum = zlib.crc32(piece, checksum)
    return checksum
