"""Keeps snapshots of the state of ranks in memory that outlives them.

::

    rank ── descriptor, "taken" ──> SnapshotKeeper ── head, steps ──> that of the buddy
         <── "kept" ──                             <── step ──
                                    |
    restore ── "open" ────────────> |  descriptor

    [ lengths ][ head: JSON ] | [ slot 0 ] | [ slot 1 ]          each begins on a page
                                    |
                     [ marks ][ extra ][ tensors to be sent ][ tensors with a replica elsewhere ]

A rank's file has no name: it is gone with the last process that holds its descriptor, however that
ends. A rank writes its steps into the two slots by turns, and what it writes in a slot counts only
once both marks bear the same step: whatever moment it is killed at, the older step is whole. A node
that keeps snapshots for another one holds the same file without the last part.

What a rank has copied is sent behind training, by a thread for each rank, in frames that end with a
checksum; the rank gets an answer once the buddy has a step whole. Both keep the checksum with the
step, and who makes a checkpoint of it checks it before. Ranks and whoever restores come
over a local socket of this machine, which gives way to the same user alone; buddies over TCP, with
the job's secret. Snapshots live as long as the process that keeps them.

Imports no torch: those who keep and send snapshots have none.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import xxhash

SLOTS = 2
ALIGN = 64
_PAGE = 4096
_LENGTHS = struct.Struct("<QQ")  # bytes of the head, bytes of a slot
_MARKS = struct.Struct("<QQQ")  # step begun, step done, bytes of extra
_SENT = struct.Struct("<QQ")  # after the marks: step whose checksum is known, and that
_MARKS_BYTES = ALIGN
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


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def slot_bytes(extra_bytes: int, tensor_bytes: int) -> int:
    """Return the size of a slot with so much in it."""
    return _rounded(_MARKS_BYTES + _rounded(extra_bytes, ALIGN) + tensor_bytes, _PAGE)


class SnapshotFile:
    """Maps the snapshots of one rank.

    Args:
        descriptor: of the file; owned by this object from here on.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        head_bytes, self._slot_bytes = _LENGTHS.unpack_from(self.memory)
        self.raw_head = self.memory[_LENGTHS.size : _LENGTHS.size + head_bytes]
        self.head: dict[str, Any] = json.loads(self.raw_head)
        self._first = _rounded(_LENGTHS.size + head_bytes, _PAGE)

    @classmethod
    def create(cls, head: bytes, *, whole: bool) -> SnapshotFile:
        """Make a file with its memory.

        Args:
            head: JSON with at least ``extra_bytes``, the most that a step has besides tensors,
                ``sent_bytes`` and ``tensor_bytes``.
            whole: with all tensors, not only those that are sent.

        Raises:
            OSError: the memory cannot be had.
        """
        sizes = json.loads(head)
        tensor_bytes = sizes["tensor_bytes" if whole else "sent_bytes"]
        size = slot_bytes(sizes["extra_bytes"], tensor_bytes)
        descriptor = os.memfd_create("megatron-adaptive-copies", os.MFD_CLOEXEC)
        try:
            first = _rounded(_LENGTHS.size + len(head), _PAGE)
            # Taken now: memory that is missing later kills who writes to it.
            os.posix_fallocate(descriptor, 0, first + SLOTS * size)
            os.pwrite(descriptor, _LENGTHS.pack(len(head), size) + head, 0)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def extra_offset(self, slot: int) -> int:
        """Return where a slot's part besides tensors begins."""
        return self._first + slot * self._slot_bytes + _MARKS_BYTES

    def tensors_offset(self, slot: int) -> int:
        """Return where a slot's tensors begin."""
        return self.extra_offset(slot) + _rounded(self.head["extra_bytes"], ALIGN)

    def begin(self, slot: int, step: int) -> None:
        """Mark a slot that is about to be written; it holds nothing until :meth:`finish`."""
        self._mark(slot, step, 0, 0)

    def finish(self, slot: int, step: int, extra_bytes: int) -> None:
        """Mark a slot as holding a step."""
        self._mark(slot, step, 0, extra_bytes)
        self._mark(slot, step, step, extra_bytes)

    def steps(self) -> dict[int, int]:
        """Return steps that are held whole, with their slots."""
        found = {}
        for slot in range(SLOTS):
            begun, done, _ = self._marks(slot)
            if done and begun == done:
                found[done] = slot
        return found

    def keep_sum(self, slot: int, step: int, checksum: int) -> None:
        """Keep the checksum of what is sent of a step with it."""
        _SENT.pack_into(self.memory, self._marks_offset(slot) + _MARKS.size, step, checksum)

    def is_whole(self, slot: int) -> bool:
        """Return whether what is sent of a slot's step is as it was when it was sent."""
        step, expected = _SENT.unpack_from(self.memory, self._marks_offset(slot) + _MARKS.size)
        if step != self._marks(slot)[1]:
            return True  # it was not sent
        found = xxhash.xxh3_64(self.extra(slot))
        found.update(self.sent(slot))
        return bool(found.intdigest() == expected)

    def extra(self, slot: int) -> memoryview:
        """Return what a slot holds besides tensors."""
        start = self.extra_offset(slot)
        return memoryview(self.memory)[start : start + self._marks(slot)[2]]

    def sent(self, slot: int) -> memoryview:
        """Return the tensors of a slot that are sent."""
        start = self.tensors_offset(slot)
        return memoryview(self.memory)[start : start + self.head["sent_bytes"]]

    def close(self) -> None:
        """Unmap it; the memory is free once nobody else has it. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        with contextlib.suppress(BufferError):  # a view of it is in use, and keeps it
            self.memory.close()

    def _marks(self, slot: int) -> tuple[int, int, int]:
        begun, done, extra = _MARKS.unpack_from(self.memory, self._marks_offset(slot))
        return begun, done, extra

    def _marks_offset(self, slot: int) -> int:
        return self.extra_offset(slot) - _MARKS_BYTES

    def _mark(self, slot: int, begun: int, done: int, extra: int) -> None:
        _MARKS.pack_into(self.memory, self._marks_offset(slot), begun, done, extra)


@dataclass(frozen=True, kw_only=True)
class Buddy:
    """Names the node that keeps snapshots for this one.

    Attributes:
        name: of the node.
        address: at which it is reached.
        port: of its keeper.
    """

    name: str
    address: str
    port: int


@dataclass(eq=False)
class _Store:
    """Holds the snapshots of one rank; identified by ``key``."""

    key: dict[str, Any]
    file: SnapshotFile
    taken: int = 0

    @classmethod
    def of(cls, about: Mapping[str, Any], kind: str, file: SnapshotFile) -> _Store:
        return cls(
            {name: about[name] for name in ("run", "rank", "generation")} | {"kind": kind}, file
        )


class SnapshotKeeper:
    """Keeps snapshots until it is closed.

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
        self.address = f"megatron-adaptive-{secrets.token_hex(16)}"
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._local.bind(f"\0{self.address}")
        self._local.listen(128)
        self._wide = _listen(host)
        self.port = int(self._wide.getsockname()[1])
        self._start(self._accept, self._local, self._serve_local)
        self._start(self._accept, self._wide, self._serve_buddy)

    def prepare(self, run: str, secret: str, buddy: Buddy | None) -> None:
        """Forget all snapshots and get ready for those of new ranks.

        Args:
            run: of the ranks that are about to start, the same for all nodes.
            secret: by which keepers of the job know each other.
            buddy: that keeps snapshots for this node.
        """
        with self._changed:
            for store in self._stores:
                store.file.close()
            self._stores = []
            self._run, self._secret, self._buddy = run, secret, buddy
            self._changed.notify_all()

    def inventory(self, within_s: float) -> list[dict[str, Any]]:
        """List what is kept, once nobody writes or sends any more.

        Args:
            within_s: for ranks that are about to end and snapshots on their way.
        """
        until_s = time.monotonic() + within_s
        with self._changed:
            while self._serving and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            needs: set[tuple[str, int]] = set()
            found = []
            for store in self._stores:
                one = {
                    **store.key,
                    "steps": sorted(store.file.steps()),
                    "has_common": store.file.head["has_common"],
                    "socket": self.address,
                }
                if (start := (store.key["run"], store.key["generation"])) not in needs:
                    needs.add(start)
                    one["needs"] = store.file.head["needs"]
                found.append(one)
            return found

    def close(self) -> None:
        """Stop listening and forget all snapshots. Idempotent."""
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
        threading.Thread(target=action, args=given, name="snapshots", daemon=True).start()

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
        message = json.loads(data)
        if message["what"] == "store":
            self._serve_rank(connection, message, SnapshotFile(descriptors[0]))
        elif (store := self._find(message)) is not None:
            socket.send_fds(connection, [b"{}"], [store.file.descriptor])

    def _serve_rank(
        self, connection: socket.socket, about: Mapping[str, Any], file: SnapshotFile
    ) -> None:
        """Send on what a rank reports as copied, until it ends."""
        store = _Store.of(about, "own", file)
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
        """Take in the snapshots of a rank of another node."""
        connection.settimeout(_RUN_S)
        with connection.makefile("rb") as reader:
            about = json.loads(reader.readline(_LONGEST))
            if not isinstance(about, dict):
                raise ValueError("it is no object")
            with self._changed:
                ready = self._changed.wait_for(lambda: self._run == about["run"], _RUN_S)
                shown, expected = str(about["secret"]).encode(), self._secret.encode()
                if not (ready and expected and secrets.compare_digest(shown, expected)):
                    return
            file = SnapshotFile.create(reader.read(about["head_bytes"]), whole=False)
            store = _Store.of(about, "sent", file)
            if not self._add(store):
                return
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            while True:
                connection.settimeout(None)  # the next step comes when it comes
                step, slot, extra_bytes = _read(reader, _FRAME)
                connection.settimeout(_STEP_S)
                self._take_in(reader, file, step, slot, extra_bytes)
                connection.sendall(_KEPT.pack(step))
                self._count(store)

    @staticmethod
    def _take_in(
        reader: BinaryIO, file: SnapshotFile, step: int, slot: int, extra_bytes: int
    ) -> None:
        if extra_bytes > file.head["extra_bytes"]:
            raise ValueError("more than there is room for")
        file.begin(slot, step)
        start = file.extra_offset(slot)
        found = xxhash.xxh3_64()
        _read_summed(reader, memoryview(file.memory)[start : start + extra_bytes], found)
        _read_summed(reader, file.sent(slot), found)
        if _read(reader, _SUM) != (found.intdigest(),):
            raise OSError(f"the copy of step {step} came damaged")
        file.keep_sum(slot, step, found.intdigest())
        file.finish(slot, step, extra_bytes)

    def _add(self, store: _Store) -> bool:
        with self._changed:
            if store.key["run"] != self._run:
                store.file.close()
                return False
            for one in [one for one in self._stores if one.key == store.key]:
                self._stores.remove(one)
                one.file.close()
            self._stores.append(store)
            return True

    def _count(self, store: _Store) -> None:
        """Count a step; snapshots from before a move go once two steps after it are under way."""
        store.taken += 1
        if store.taken != 2:
            return
        generation = store.key["generation"]
        with self._changed:
            old = [
                one
                for one in self._stores
                if {**one.key, "generation": generation} == store.key
                and one.key["generation"] < generation
            ]
            self._stores = [one for one in self._stores if one not in old]
        for one in old:
            one.file.close()

    def _find(self, wanted: Mapping[str, Any]) -> _Store | None:
        with self._changed:
            found = (one for one in self._stores if one.key.items() <= wanted.items())
            return next(found, None)


class _Stream:
    """Sends the snapshots of one rank to a buddy."""

    def __init__(self, buddy: Buddy, secret: str, store: _Store) -> None:
        self._file = store.file
        self._socket = socket.create_connection((buddy.address, buddy.port), _CONNECT_S)
        self._socket.settimeout(_STEP_S)
        self._reader = self._socket.makefile("rb")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = store.file.raw_head
        about = {**store.key, "secret": secret, "head_bytes": len(head)}
        self._socket.sendall(json.dumps(about).encode() + b"\n" + head)

    def send(self, step: int, slot: int) -> None:
        """Send a step and wait until the buddy has it whole."""
        file = self._file
        extra = file.extra(slot)
        self._socket.sendall(_FRAME.pack(step, slot, len(extra)))
        checksum = xxhash.xxh3_64()
        for part in (extra, file.sent(slot)):
            for start in range(0, len(part), _PIECE):
                piece = part[start : start + _PIECE]
                checksum.update(piece)
                self._socket.sendall(piece)
        file.keep_sum(slot, step, checksum.intdigest())
        self._socket.sendall(_SUM.pack(checksum.intdigest()))
        _read(self._reader, _KEPT)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


def _listen(host: str) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True
            )
    return socket.create_server((host, 0), backlog=128)


def _read(reader: BinaryIO, form: struct.Struct) -> tuple[Any, ...]:
    data = reader.read(form.size)
    if len(data) < form.size:
        raise OSError("the connection ended")
    return form.unpack(data)


def _read_summed(reader: BinaryIO, into: memoryview, checksum: xxhash.xxh3_64) -> None:
    """Fill a buffer and go on with the checksum over it."""
    for start in range(0, len(into), _PIECE):
        piece = into[start : start + _PIECE]
        if reader.readinto(piece) != len(piece):  # type: ignore[attr-defined]
            raise OSError("the connection ended")
        checksum.update(piece)
