"""Stores snapshots of the ranks' state in memory that outlives the processes of the ranks.

::

    rank ── descriptor, "taken" ──> SnapshotKeeper ── head, steps ──> the buddy's SnapshotKeeper
         <── "kept" ──                             <── step ──

    [ lengths ][ head: JSON ] | [ slot 0 ] | [ slot 1 ]          each starts at a page boundary
                                    |
                     [ marks ][ extra ][ tensors to be sent ][ tensors with a replica elsewhere ]

The snapshots of each rank are stored in an anonymous memory file. The system frees the file when
the last process that has it open exits for any reason. The rank writes steps into the two slots
alternately. A slot is valid only if its begin mark and its end mark contain the same step. If the
rank is killed at any moment, the older step is therefore still complete. Another node, the buddy,
also stores this node's snapshots, but without the tensors that have a replica elsewhere.

While training continues, one thread per rank sends each copied step to the buddy, in messages with
an authentication code (MAC). The rank gets a reply once the buddy has received the whole step. Both
nodes store a checksum of the sent bytes with the step, and a restore verifies this checksum.
Ranks connect over a Unix socket, which only accepts connections of the same user. Buddies connect
over TCP, and must prove that they know the job's secret. A restore opens the files through the file
descriptors of this process (``/proc/<pid>/fd``). Snapshots are lost when this process exits.

This module does not import torch, because the agent of a node does not load torch.
"""

from __future__ import annotations

import contextlib
import functools
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
# Size of the file's JSON header (head) and size of a slot, in bytes.
_LENGTHS = struct.Struct("<QQ")
# Three numbers (marks) at the start of a slot: the step, stored when a write begins; the same step,
# stored when the write ends; and the size of the non-tensor state in bytes.
_MARKS = struct.Struct("<QQQ")
# Step and checksum, stored after the marks. The checksum covers the part of the snapshot that is
# sent to another node.
_SENT = struct.Struct("<QQ")
_MARKS_BYTES = ALIGN
_STEP_S = 30.0  # Maximum time in seconds for another node to receive a message.
_RUN_S = 30.0  # Maximum time in seconds until the agents of both nodes prepare the same run.
_AGAIN_S = 0.5
_MESSAGE = 1 << 16
_MOST_HEAD = 1 << 28
# Header of a message to another node: step, slot, and size of the non-tensor state in bytes.
_FRAME = struct.Struct("<QQQ")
_KEPT = struct.Struct("<Q")  # Reply of the other node: the step that it has stored.
_CREDENTIALS = struct.Struct("3i")


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def slot_bytes(extra_bytes: int, tensor_bytes: int) -> int:
    """Returns the size of a slot for non-tensor state and tensors. All sizes are in bytes."""
    return _rounded(_MARKS_BYTES + _rounded(extra_bytes, ALIGN) + tensor_bytes, _PAGE)


class SnapshotFile:
    """Maps the file that contains a rank's snapshots into memory.

    Args:
        descriptor: File descriptor of the open file. This object closes it.

    Raises:
        OSError: If the file cannot be mapped.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        head_bytes: int
        self._slot_bytes: int
        head_bytes, self._slot_bytes = _LENGTHS.unpack_from(self.memory)
        self.raw_head = self.memory[_LENGTHS.size : _LENGTHS.size + head_bytes]
        self.head: dict[str, Any] = parse_json(self.raw_head, strict=False)
        self._first = _rounded(_LENGTHS.size + head_bytes, _PAGE)

    @classmethod
    def create(cls, head: bytes, *, whole: bool) -> SnapshotFile:
        """Creates a snapshot file, allocates its memory, and returns it.

        Args:
            head: Header of the file: a JSON object with the size of all tensors (``tensor_bytes``),
                the size of the tensors that are also sent to another node (``sent_bytes``), and the
                maximum size of a step's non-tensor state (``extra_bytes``). Other entries are
                allowed.
            whole: Whether to allocate space for all tensors. Otherwise, the file has space only for
                the tensors that are sent to another node.

        Raises:
            OSError: If the memory cannot be allocated.
        """
        sizes = parse_json(head, strict=False)
        tensor_bytes = sizes["tensor_bytes" if whole else "sent_bytes"]
        size = slot_bytes(sizes["extra_bytes"], tensor_bytes)
        descriptor = os.memfd_create("megatron-adaptive-copies", os.MFD_CLOEXEC)
        try:
            first = _rounded(_LENGTHS.size + len(head), _PAGE)
            # Allocate all memory now. Otherwise, if the memory ran out later, the system would kill
            # the process at a write.
            os.posix_fallocate(descriptor, 0, first + SLOTS * size)
            os.pwrite(descriptor, _LENGTHS.pack(len(head), size) + head, 0)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def extra_offset(self, slot: int) -> int:
        """Returns the offset in the file at which the non-tensor state of ``slot`` begins."""
        return self._first + slot * self._slot_bytes + _MARKS_BYTES

    def tensors_offset(self, slot: int) -> int:
        """Returns the offset in the file at which the tensors of ``slot`` begin."""
        return self.extra_offset(slot) + _rounded(self.head["extra_bytes"], ALIGN)

    def begin(self, slot: int, step: int) -> None:
        """Marks ``slot`` as invalid while ``step`` is being written, until :meth:`finish`."""
        self._mark(slot, step, 0, 0)

    def finish(self, slot: int, step: int, extra_bytes: int) -> None:
        """Marks ``slot`` as valid after ``step`` has been written to it.

        ``extra_bytes`` is the size of the non-tensor state in bytes.
        """
        self._mark(slot, step, 0, extra_bytes)
        self._mark(slot, step, step, extra_bytes)

    def steps(self) -> dict[int, int]:
        """Returns the slot index of each complete snapshot, keyed by step."""
        slots = {}
        for slot in range(SLOTS):
            begun, done, _ = self._marks(slot)
            if done and begun == done:
                slots[done] = slot
        return slots

    def keep_sum(self, slot: int) -> None:
        """Computes and stores a checksum of the part of ``slot`` that is sent to another node."""
        step = self._marks(slot)[1]
        offset = self._marks_offset(slot) + _MARKS.size
        _SENT.pack_into(self.memory, offset, step, self._sum(slot))

    def is_whole(self, slot: int) -> bool:
        """Returns False if the data in ``slot`` do not match their checksum, and True otherwise."""
        step, expected = _SENT.unpack_from(self.memory, self._marks_offset(slot) + _MARKS.size)
        is_known = step == self._marks(slot)[1]
        return not is_known or self._sum(slot) == expected

    def _sum(self, slot: int) -> int:
        hasher = xxhash.xxh3_64(self.extra(slot))
        hasher.update(self.sent(slot))
        return int(hasher.intdigest())

    def extra(self, slot: int) -> memoryview:
        """Returns the non-tensor state in ``slot``, as bytes."""
        start = self.extra_offset(slot)
        return memoryview(self.memory)[start : start + self._marks(slot)[2]]

    def sent(self, slot: int) -> memoryview:
        """Returns the tensors in ``slot`` that are also sent to another node, as bytes."""
        start = self.tensors_offset(slot)
        return memoryview(self.memory)[start : start + self.head["sent_bytes"]]

    def close(self) -> None:
        """Closes the file. Its memory is freed once no process has the file open."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        # Closing fails while a view of the memory is in use.
        with contextlib.suppress(BufferError):
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
    """Node that also stores this node's snapshots.

    Attributes:
        name: Name of that node.
        address: Host name or IP address of that node.
        port: TCP port of the keeper on that node.
    """

    name: str
    address: str
    port: int


@dataclass(eq=False)
class _Store:
    """File with one rank's snapshots. ``key`` identifies the run, the rank and the file."""

    key: dict[str, Any]
    file: SnapshotFile
    taken: int = 0

    @classmethod
    def of(cls, about: Mapping[str, Any], kind: str, file: SnapshotFile) -> _Store:
        return cls(
            {name: about[name] for name in ("run", "rank", "generation")} | {"kind": kind}, file
        )


class SnapshotKeeper:
    """Stores snapshots of this node's ranks, and copies of the snapshots of another node's ranks.

    Args:
        host: Address at which to listen for other nodes; empty for all addresses of this machine.

    Raises:
        OSError: If a socket cannot be opened.
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
        with contextlib.ExitStack() as undo:
            undo.callback(self._local.close)
            listening = bind(host, 0)
            self._gate = Gate(listening, lambda: self._secret, _PURPOSE, self._admit, to_log(_LOG))
            undo.callback(self._gate.close)
            self._start(self._accept)
            undo.pop_all()
        self.port = self._gate.port

    def prepare(self, run: str, secret: str, buddy: Buddy | None) -> None:
        """Discards all snapshots, and prepares for the next start of the ranks.

        Args:
            run: Identifier of the next start of the ranks, which is the same on all nodes.
            secret: Secret that the keepers of a job use to authenticate each other.
            buddy: Node that also stores this node's snapshots, or ``None`` if there is no such
                node.
        """
        with self._changed:
            for store in self._stores:
                store.file.close()
            self._stores = []
            self._run = run
            self._secret = secret
            self._buddy = buddy
            self._changed.notify_all()

    def inventory(self, within_s: float) -> list[dict[str, Any]]:
        """Waits until all connections are closed, and returns a description of each snapshot file.

        Args:
            within_s: Maximum time in seconds to wait until ranks have exited and transfers are
                complete.
        """
        until_s = time.monotonic() + within_s
        with self._changed:
            while self._serving and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            needs: set[tuple[str, int]] = set()
            items = []
            for store in self._stores:
                item = {
                    **store.key,
                    "steps": sorted(store.file.steps()),
                    "has_common": store.file.head["has_common"],
                    "file": f"/proc/{os.getpid()}/fd/{store.file.descriptor}",
                }
                if (start := (store.key["run"], store.key["generation"])) not in needs:
                    needs.add(start)
                    item["needs"] = store.file.head["needs"]
                items.append(item)
            return items

    def close(self) -> None:
        """Stops listening and discards all snapshots. Safe to call more than once."""
        self._is_closed = True
        self._gate.close()
        with contextlib.suppress(OSError):
            # Wake up the thread that is blocked in accept().
            self._local.shutdown(socket.SHUT_RDWR)
        self._local.close()
        with self._changed:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.prepare("", "", None)

    @staticmethod
    def _start(action: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=action, args=arguments, name="snapshots", daemon=True).start()

    def _accept(self) -> None:
        """Accepts connections of ranks on the Unix socket. Rejects connections of other users."""
        while True:
            try:
                connection, _ = self._local.accept()
            except OSError:
                if self._local.fileno() < 0 or self._is_closed:
                    return
                time.sleep(_AGAIN_S)  # All file descriptors are in use, so retry later.
                continue
            credentials = connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
            if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
                connection.close()
                continue
            serve = functools.partial(self._serve_local, connection)
            try:
                self._start(self._guarded, connection, serve)
            except RuntimeError:  # The machine does not allow more threads.
                connection.close()

    def _admit(self, sealed: SealedSocket) -> None:
        self._start(self._guarded, sealed.socket, lambda: self._serve_buddy(sealed))

    def _guarded(self, connection: socket.socket, serve: Callable[[], None]) -> None:
        """Runs ``serve``, and then closes ``connection``, even after an error."""
        with self._changed:
            self._open.add(connection)
            self._serving += 1
        try:
            expected = (OSError, ValueError, LookupError, TypeError, RecursionError)
            with connection, contextlib.suppress(*expected):
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
        """Sends a rank's snapshots to another node, and reports each stored step to the rank.

        The rank writes its snapshots to ``file``. ``about`` describes the rank, and ``connection``
        is the connection to it.
        """
        store = _Store.of(about, "own", file)
        with self._changed:
            buddy = self._buddy
            secret = self._secret
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
                        answer = {"failed": f"copies cannot be sent to node{name}: {error}"}
                connection.send(json.dumps(answer).encode())
        finally:
            if stream is not None:
                stream.close()

    def _serve_buddy(self, sealed: SealedSocket) -> None:
        """Receives the snapshots of a rank on another node over the connection ``sealed``."""
        sealed.socket.settimeout(_RUN_S)
        about = parse_json(sealed.receive(_MESSAGE))
        with self._changed:
            if not self._changed.wait_for(lambda: self._run == about["run"], _RUN_S):
                return
        if not 0 < about["head_bytes"] <= _MOST_HEAD:
            raise ValueError(
                f"the header has {about['head_bytes']} bytes, but 1 to {_MOST_HEAD} are allowed"
            )
        head = bytearray(about["head_bytes"])
        sealed.receive_memory(memoryview(head))
        file = SnapshotFile.create(bytes(head), whole=False)
        store = _Store.of(about, "sent", file)
        if not self._add(store):
            return
        sealed.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        while True:
            sealed.socket.settimeout(None)  # Wait for the next step without a timeout.
            step, slot, extra_bytes = _FRAME.unpack(sealed.receive(_FRAME.size))
            if extra_bytes > file.head["extra_bytes"] or slot >= SLOTS:
                raise ValueError(
                    f"the snapshot of step {step} is for slot {slot} and has {extra_bytes} bytes "
                    f"of non-tensor state, but the last slot is {SLOTS - 1} and the maximum size "
                    f"is {file.head['extra_bytes']} bytes"
                )
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
            for former in [former for former in self._stores if former.key == store.key]:
                self._stores.remove(former)
                former.file.close()
            self._stores.append(store)
            return True

    def _count(self, store: _Store) -> None:
        """Counts a new snapshot in ``store``. After two snapshots, discards the rank's older files.

        A rank creates a new file if the number or the shapes of its tensors have changed, for
        example because stages have moved to another rank. Older files are no longer needed once
        both slots of the new file contain a snapshot.
        """
        store.taken += 1
        if store.taken != 2:
            return
        generation = store.key["generation"]
        with self._changed:
            old = [
                former
                for former in self._stores
                if {**former.key, "generation": generation} == store.key
                and former.key["generation"] < generation
            ]
            self._stores = [kept for kept in self._stores if kept not in old]
        for former in old:
            former.file.close()


class _Stream:
    """Sends the snapshots of one rank to another node, the buddy."""

    def __init__(self, buddy: Buddy, secret: str, store: _Store) -> None:
        self._file = store.file
        address = buddy.address, buddy.port
        # The other node may not be ready for this run yet, so let dial() retry (is_early).
        self._sealed = dial(address, secret, _PURPOSE, _RUN_S, is_early=True)
        self._sealed.socket.settimeout(_STEP_S)
        head = store.file.raw_head
        self._sealed.send(json.dumps({**store.key, "head_bytes": len(head)}).encode())
        self._sealed.send_memory(memoryview(head))

    def send(self, step: int, slot: int) -> None:
        """Sends the snapshot of ``step`` in ``slot``, and waits for the other node's reply."""
        extra = self._file.extra(slot)
        self._sealed.send(_FRAME.pack(step, slot, len(extra)))
        self._sealed.send_memory(extra, self._file.sent(slot))
        self._file.keep_sum(slot)
        self._sealed.receive(_KEPT.size)

    def close(self) -> None:
        self._sealed.socket.close()
