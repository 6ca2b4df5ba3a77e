"""Keeps snapshots of the state of ranks in memory that outlives them.

::

    rank ── descriptor, "taken" ──> SnapshotKeeper ── head, steps ──> that of the buddy
         <── "kept" ──                             <── step ──

    [ lengths ][ head: JSON ] | [ slot 0 ] | [ slot 1 ]          each begins on a page
                                    |
                     [ marks ][ extra ][ tensors to be sent ][ tensors with a replica elsewhere ]

A rank's file has no name: it is gone with the last process that holds its descriptor, however that
ends. A rank writes its steps into the two slots by turns, and what it writes in a slot counts only
once both marks bear the same step: whatever moment it is killed at, the older step is whole. A node
that keeps snapshots for another one holds the same file without the last part.

What a rank has copied is sent behind training, by a thread for each rank, in messages with their
MAC; the rank gets an answer once the buddy has a step whole. Both keep a checksum of what was
sent with the step, and who makes a checkpoint of it checks it before. Ranks come over a local
socket of this machine, which gives way to the same user alone; buddies over TCP, once they have
proved the job's secret; who restores opens the files in this process, by their descriptors.
Snapshots live as long as the process that keeps them.

Imports no torch: those who keep and send snapshots have none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from megatron.adaptive.config.input_files import parse_json
from megatron.adaptive.handshake import Gate, SealedSocket, bind, dial, to_log

_LOG = logging.getLogger(__name__)
_PURPOSE = "snapshots"
SLOTS = 2
ALIGN = 64
_PAGE = 4096
_LENGTHS = struct.Struct("<QQ")  # bytes of the head, bytes of a slot
_MARKS = struct.Struct("<QQQ")  # step begun, step done, bytes of extra
_SENT = struct.Struct("<QQ")  # after the marks: step whose checksum is known, and that
_MARKS_BYTES = ALIGN
_STEP_S = 30.0  # for a buddy to take in a piece
_RUN_S = 30.0  # for the buddy to hear of the same start
_AGAIN_S = 0.5
_MESSAGE = 1 << 16
_MOST_HEAD = 1 << 28
_FRAME = struct.Struct("<QQQ")  # step, slot, bytes of extra
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
        self.head: dict[str, Any] = parse_json(self.raw_head, strict=False)
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
        sizes = parse_json(head, strict=False)
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

    def keep_sum(self, slot: int) -> None:
        """Keep the checksum of what is sent of a slot's step with it."""
        step, at = self._marks(slot)[1], self._marks_offset(slot) + _MARKS.size
        _SENT.pack_into(self.memory, at, step, self._sum(slot))

    def is_whole(self, slot: int) -> bool:
        """Return whether what is sent of a slot's step is as it was when it was sent."""
        step, expected = _SENT.unpack_from(self.memory, self._marks_offset(slot) + _MARKS.size)
        is_known = step == self._marks(slot)[1]
        return not is_known or self._sum(slot) == expected

    def _sum(self, slot: int) -> int:
        found = xxhash.xxh3_64(self.extra(slot))
        found.update(self.sent(slot))
        return int(found.intdigest())

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
        self._is_closed = False
        self.address = f"megatron-adaptive-{secrets.token_hex(16)}"
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._local.bind(f"\0{self.address}")
        self._local.listen(128)
        self._gate = Gate(bind(host, 0), lambda: self._secret, _PURPOSE, self._admit, to_log(_LOG))
        self.port = self._gate.port
        self._start(self._accept)

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
                    "file": f"/proc/{os.getpid()}/fd/{store.file.descriptor}",
                }
                if (start := (store.key["run"], store.key["generation"])) not in needs:
                    needs.add(start)
                    one["needs"] = store.file.head["needs"]
                found.append(one)
            return found

    def close(self) -> None:
        """Stop listening and forget all snapshots. Idempotent."""
        self._is_closed = True
        self._gate.close()
        with contextlib.suppress(OSError):
            self._local.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._local.close()
        with self._changed:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.prepare("", "", None)

    @staticmethod
    def _start(action: Callable[..., None], *given: Any) -> None:
        threading.Thread(target=action, args=given, name="snapshots", daemon=True).start()

    def _accept(self) -> None:
        """Accept who comes over the local socket; other users are no reason to wait or to end."""
        while True:
            try:
                connection, _ = self._local.accept()
            except OSError:
                if self._local.fileno() < 0 or self._is_closed:
                    return
                time.sleep(_AGAIN_S)  # no descriptor is left
                continue
            credentials = connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
            if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
                connection.close()
                continue
            self._start(self._guarded, connection, lambda one=connection: self._serve_local(one))

    def _admit(self, sealed: SealedSocket) -> None:
        self._start(self._guarded, sealed.socket, lambda: self._serve_buddy(sealed))

    def _guarded(self, connection: socket.socket, serve: Callable[[], None]) -> None:
        """Serve one connection; what goes wrong ends it, which the other side sees."""
        with self._changed:
            self._open.add(connection)
            self._serving += 1
        try:
            wrong = (OSError, ValueError, LookupError, TypeError, RecursionError)
            with connection, contextlib.suppress(*wrong):
                serve()
        finally:
            with self._changed:
                self._open.discard(connection)
                self._serving -= 1
                self._changed.notify_all()

    def _serve_local(self, connection: socket.socket) -> None:
        data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE, 1)
        self._serve_rank(connection, parse_json(data), SnapshotFile(descriptors[0]))

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
                message = parse_json(data)
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

    def _serve_buddy(self, sealed: SealedSocket) -> None:
        """Take in the snapshots of a rank of another node."""
        sealed.socket.settimeout(_RUN_S)
        about = parse_json(sealed.receive(_MESSAGE))
        with self._changed:
            if not self._changed.wait_for(lambda: self._run == about["run"], _RUN_S):
                return
        if not 0 < about["head_bytes"] <= _MOST_HEAD:
            raise ValueError("a head of no such size")
        head = bytearray(about["head_bytes"])
        sealed.receive_memory(memoryview(head))
        file = SnapshotFile.create(bytes(head), whole=False)
        store = _Store.of(about, "sent", file)
        if not self._add(store):
            return
        sealed.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        while True:
            sealed.socket.settimeout(None)  # the next step comes when it comes
            step, slot, extra_bytes = _FRAME.unpack(sealed.receive(_FRAME.size))
            if extra_bytes > file.head["extra_bytes"] or slot >= SLOTS:
                raise ValueError("more than there is room for")
            sealed.socket.settimeout(_STEP_S)
            file.begin(slot, step)
            start = file.extra_offset(slot)
            extra = memoryview(file.memory)[start : start + extra_bytes]
            sealed.receive_memory(extra, file.sent(slot))
            file.finish(slot, step, extra_bytes)
            file.keep_sum(slot)
            sealed.send(_KEPT.pack(step))
            self._count(store)

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


class _Stream:
    """Sends the snapshots of one rank to a buddy."""

    def __init__(self, buddy: Buddy, secret: str, store: _Store) -> None:
        self._file = store.file
        place = buddy.address, buddy.port  # which may not have heard of this start yet
        self._sealed = dial(place, secret, _PURPOSE, _RUN_S, is_early=True)
        self._sealed.socket.settimeout(_STEP_S)
        head = store.file.raw_head
        self._sealed.send(json.dumps({**store.key, "head_bytes": len(head)}).encode())
        self._sealed.send_memory(memoryview(head))

    def send(self, step: int, slot: int) -> None:
        """Send a step and wait until the buddy has it whole."""
        extra = self._file.extra(slot)
        self._sealed.send(_FRAME.pack(step, slot, len(extra)))
        self._sealed.send_memory(extra, self._file.sent(slot))
        self._file.keep_sum(slot)
        self._sealed.receive(_KEPT.size)

    def close(self) -> None:
        self._sealed.socket.close()
