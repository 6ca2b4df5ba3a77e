"""Reimplements the protocol of the RDMA channel, based only on docs/reference/transport.md.

The program runs as rank 1 of the RDMA lab, with Debian's Python and ``python3-pyverbs``. Rank 0 may
be any program of this project. This program sends back every message that it receives::

    python -m tests.labs.rdma_lab -- sh -c 'if [ $RANK = 1 ]; then
        /usr/bin/python3 tests/labs/pyverbs_peer.py --port 21001; else ...; fi'

The program imports only pyverbs and the standard library, and nothing from this package. It uses
one lane (one queue pair for each direction), and returns slots in random order on purpose.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import struct
import sys
import time
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

HELLO = struct.Struct("<IHBx16sii16s")
HELLO_MAGIC = 0x4D41484C
RECORD = struct.Struct("<III")
RECORD_MAGIC = 0x4D415243
ENDPOINT = struct.Struct("<4sHHI4xQQQQQ8x")
LANE = struct.Struct("<IIIIIIHBB4x16s16x")
MESSAGE = struct.Struct("<IHBBBBBxIQQqiiQQQ7q")
MESSAGE_MAGIC = 0x4D415032
HEADER_BYTES = 128
KIND_END = 255
CONTROL_GONE = 0x80
CONTROL_HURRY = 0x81
PAGE_BYTES = 4096
PATIENCE_S = 30.0


class ProtocolError(Exception):
    """Raised if the other endpoint violates the RDMA channel's protocol."""


class Wire:
    """Exchanges a first message (hello), and then records with headers, over a TCP connection."""

    def __init__(self, host: str, port: int, token: bytes, rank: int, target: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.socket = socket.create_connection((host, port), timeout=PATIENCE_S)
                break
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        self.socket.sendall(HELLO.pack(HELLO_MAGIC, 1, 0, token, rank, target, b"rdma"))
        magic, version, verdict, back, who, _, purpose = HELLO.unpack(self._read(HELLO.size))
        if (magic, version, verdict, back, who) != (HELLO_MAGIC, 1, 0, token, target):
            raise ProtocolError(
                f"unexpected hello: verdict {verdict}, rank {who}, purpose {purpose!r}"
            )

    def send(self, record: bytes) -> None:
        """Sends ``record`` with a header that contains its size."""
        self.socket.sendall(RECORD.pack(RECORD_MAGIC, len(record), 0) + record)

    def receive(self) -> bytes:
        """Receives the next record, and returns its content without its header."""
        magic, size, num_fds = RECORD.unpack(self._read(RECORD.size))
        if magic != RECORD_MAGIC or num_fds != 0:
            raise ProtocolError("received data that is not a record")
        record = self._read(size)
        if record[:4] == b"DRX1":
            raise ProtocolError(record[4:].decode(errors="replace"))
        return record

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise ProtocolError("the peer closed the connection")
            data += part
        return data


class Peer:
    """One endpoint of a bidirectional channel with a single lane.

    Args:
        wire: Connection to the other endpoint.
        job: ID of the job.
        slots: Number of slots in each direction.
        slot_bytes: Maximum size of the payload in a slot, in bytes.
        device: Name of the verbs device.
        gid_index: Index of the device's RoCE v2 GID.
    """

    def __init__(
        self, wire: Wire, *, job: int, slots: int, slot_bytes: int, device: str, gid_index: int
    ) -> None:
        self._wire = wire
        self._job = job
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._stride = -(-(HEADER_BYTES + slot_bytes) // PAGE_BYTES) * PAGE_BYTES
        self._context = Context(name=device)
        self._domain = PD(self._context)
        both = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self._arena = MR(self._domain, slots * self._stride, both)
        self._staging = MR(self._domain, slots * self._stride, e.IBV_ACCESS_LOCAL_WRITE)
        self._credit = MR(self._domain, PAGE_BYTES, both)
        self._source = MR(self._domain, PAGE_BYTES, e.IBV_ACCESS_LOCAL_WRITE)
        self._credit.write(bytes(8), 8)
        # pyverbs supports no work requests without a memory segment, so this segment has length
        # zero.
        self._nothing = [SGE(self._source.buf, 0, self._source.lkey)]
        # Both directions use the same completion queue. Each completion contains the number of its
        # queue pair.
        self._queue = CQ(self._context, 16 * slots + 64)
        cap = QPCap(max_send_wr=4 * slots, max_recv_wr=4 * slots + 8)
        init = QPInitAttr(
            qp_type=e.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=cap, sq_sig_all=1
        )
        self._out = QP(self._domain, init)
        self._in = QP(self._domain, init)
        self._psns = (random.getrandbits(24), random.getrandbits(24))
        self._returned = 0
        self._seen = 0
        self._in_flight = 0
        self._num_credit_writes = 0
        self._num_sent = 0
        self._sequence = 0
        self._due_number = 0
        self._due_sequence = 0
        self._pending_sends = 0
        self._arrived: list[int] = []
        self.held: list[int] = []
        self.urgent = False
        self.peer_gone = False
        self._meet(gid_index)

    def _meet(self, gid_index: int) -> None:
        gid = self._context.query_gid(1, gid_index)
        raw = socket.inet_pton(socket.AF_INET6, gid.gid)
        mtu = self._context.query_port(1).active_mtu
        lane = LANE.pack(
            self._out.qp_num, self._in.qp_num, *self._psns, self._arena.rkey, self._credit.rkey,
            0, mtu, 2, raw,
        )  # fmt: skip
        fixed = ENDPOINT.pack(
            b"DRP1", 1, 1, self._slots, self._job, self._slot_bytes, self._stride,
            self._arena.buf, self._credit.buf,
        )  # fmt: skip
        self._wire.send(fixed + lane)
        record = self._wire.receive()
        magic, version, lanes, slots, job, slot_bytes, stride, arena, credit = ENDPOINT.unpack(
            record[: ENDPOINT.size]
        )
        expected = (b"DRP1", 1, 1, self._slots, self._job, self._slot_bytes, self._stride)
        if (magic, version, lanes, slots, job, slot_bytes, stride) != expected:
            raise ProtocolError(
                "the other endpoint has different parameters: "
                f"{(magic, version, lanes, slots, slot_bytes)}"
            )
        self._peer_arena, self._peer_credit = arena, credit
        qp_out, qp_in, psn_out, psn_in, self._arena_key, self._credit_key, _, peer_mtu, _, raw = (
            LANE.unpack(record[ENDPOINT.size :])
        )
        dgid = GID(":".join(raw[i : i + 2].hex() for i in range(0, 16, 2)))
        path_mtu = min(mtu, peer_mtu)
        self._connect(self._out, qp_in, psn_in, self._psns[0], dgid, gid_index, path_mtu)
        self._connect(self._in, qp_out, psn_out, self._psns[1], dgid, gid_index, path_mtu)
        self._wire.send(b"DRY1")
        if self._wire.receive() != b"DRY1":
            raise ProtocolError("the other endpoint is not ready")

    def _connect(
        self, pair: Any, number: int, psn: int, own_psn: int, dgid: Any, gid_index: int, mtu: int
    ) -> None:
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        pair.to_init(attr)
        for _ in range(4 * self._slots + 8):
            pair.post_recv(RecvWR(num_sge=1, sg=self._nothing))
        route = GlobalRoute(dgid=dgid, sgid_index=gid_index)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attr.dest_qp_num = number
        attr.path_mtu = mtu
        attr.rq_psn = psn
        attr.min_rnr_timer = 12
        attr.max_dest_rd_atomic = 0
        pair.to_rtr(attr)
        attr.sq_psn = own_psn
        attr.timeout = 16
        attr.retry_cnt = 6
        attr.rnr_retry = 6
        attr.max_rd_atomic = 0
        pair.to_rts(attr)

    def _poll(self) -> None:
        count, completions = self._queue.poll(16)
        for completion in completions[:count]:
            if completion.status != e.IBV_WC_SUCCESS:
                raise ProtocolError(f"a completion has status {completion.status}")
            if completion.opcode != e.IBV_WC_RECV_RDMA_WITH_IMM:
                self._pending_sends -= 1
                continue
            pair = self._in if completion.qp_num == self._in.qp_num else self._out
            pair.post_recv(RecvWR(num_sge=1, sg=self._nothing))
            if pair is self._in:
                self._arrived.append(socket.ntohl(completion.imm_data))
            else:
                self._take_credits()

    def _take_credits(self) -> None:
        word = int.from_bytes(self._credit.read(8, 0), "little")
        returned = word ^ self._seen
        if returned & ~self._in_flight:
            raise ProtocolError("the peer returned slots that it did not hold")
        self._seen = word
        self._in_flight &= ~returned

    def _wait(self, condition: Any, event: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            self._poll()
            if time.monotonic() > end:
                raise TimeoutError(event)

    def _post(self, pair: Any, parts: list[Any], address: int, key: int, immediate: int) -> None:
        request = SendWR(
            opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM,
            num_sge=len(parts),
            sg=parts,
            imm_data=socket.htonl(immediate),
            send_flags=e.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(key, address)
        self._pending_sends += 1
        pair.post_send(request)

    def receive(self) -> tuple[tuple[int, ...], bytes, int] | None:
        """Receives the next piece of a message.

        Returns the header, the content and the slot of the piece, or ``None`` if the peer has
        closed the channel.
        """
        while True:
            self._wait(lambda: self._arrived, "timed out waiting for a message")
            bits = self._arrived.pop(0)
            if bits >> 8 != self._due_number:
                raise ProtocolError(f"expected write {self._due_number}, got write {bits >> 8}")
            self._due_number = (self._due_number + 1) & 0xFFFFFF
            if bits & 0xFF == CONTROL_GONE:
                self.peer_gone = True
                return None
            if bits & 0xFF != CONTROL_HURRY:
                break
            self.give_back()
        self.urgent = bool(bits & 0x40)
        slot = bits & 0x3F
        start = slot * self._stride
        header = MESSAGE.unpack(self._arena.read(HEADER_BYTES, start))
        if header[0] != MESSAGE_MAGIC or header[8] != self._job:
            raise ProtocolError("received data that is not a message of this job")
        if header[2] == KIND_END:
            return None
        nbytes, offset, piece_bytes = header[13:16]
        if header[9] != self._due_sequence:
            raise ProtocolError(f"expected message {self._due_sequence}, got message {header[9]}")
        if offset + piece_bytes == nbytes:
            self._due_sequence += 1
        payload = self._arena.read(piece_bytes, start + HEADER_BYTES) if piece_bytes else b""
        return header, payload, slot

    def give_back(self) -> None:
        """Returns the slots in ``held`` to the sender with a single RDMA write."""
        for slot in self.held:
            self._returned ^= 1 << slot
        self.held.clear()
        # Each write uses a different word of the buffer, because the previous write may still be
        # reading its word.
        offset = self._num_credit_writes % 512 * 8
        self._source.write(self._returned.to_bytes(8, "little"), 8, offset)
        self._num_credit_writes += 1
        part = SGE(self._source.buf + offset, 8, self._source.lkey)
        self._post(self._in, [part], self._peer_credit, self._credit_key, self._num_credit_writes)

    def send(self, header: tuple[int, ...], payload: bytes) -> None:
        """Sends ``payload`` as a message with the labels, type and shape of ``header``."""
        offset = 0
        while True:
            piece = payload[offset : offset + self._slot_bytes]
            self._send_piece(header, len(payload), offset, piece)
            offset += len(piece)
            if offset == len(payload):
                break
        self._sequence += 1

    def _send_piece(self, header: tuple[int, ...], nbytes: int, offset: int, piece: bytes) -> None:
        everything = (1 << self._slots) - 1
        self._wait(lambda: self._in_flight != everything, "timed out waiting for a free slot")
        free = [slot for slot in range(self._slots) if not self._in_flight >> slot & 1]
        slot = random.choice(free)
        self._in_flight |= 1 << slot
        fields = list(header)
        fields[6:8] = [0, 0]  # These fields are 0 because there is no checksum.
        fields[9] = self._sequence
        fields[13:16] = [nbytes, offset, len(piece)]
        data = MESSAGE.pack(*fields) + piece
        start = slot * self._stride
        self._staging.write(data, len(data), start)
        part = SGE(self._staging.buf + start, len(data), self._staging.lkey)
        urgent = 0x40 if len(free) - 1 <= self._slots // 4 else 0
        immediate = self._num_sent << 8 | urgent | slot
        self._num_sent = (self._num_sent + 1) & 0xFFFFFF
        address = self._peer_arena + slot * self._stride
        self._post(self._out, [part], address, self._arena_key, immediate)

    def close(self) -> None:
        """Sends the end marker, waits for acknowledgements, and closes the connection."""
        labels = (0, 0, 0)
        end = (MESSAGE_MAGIC, 1, KIND_END, 1, 8, 0, 0, 0, self._job, 0, *labels, 0, 0, 0)
        self._send_piece((*end, *[0] * 7), 0, 0, b"")
        self._wait(lambda: self._pending_sends == 0, "timed out waiting for acknowledgements")
        if not self.peer_gone:
            gone = self._num_sent << 8 | CONTROL_GONE
            self._post(self._out, self._nothing, self._peer_arena, self._arena_key, gone)
            self._wait(lambda: self._pending_sends == 0, "timed out waiting for acknowledgements")
        self._wire.socket.sendall(b"g")
        self._wire.socket.close()


def echo(peer: Peer) -> int:
    """Sends all messages that ``peer`` receives back, and returns the number of messages."""
    parts: list[bytes] = []
    count = 0
    while (arrival := peer.receive()) is not None:
        header, payload, slot = arrival
        parts.append(payload)
        peer.held.append(slot)
        random.shuffle(peer.held)
        if len(peer.held) >= 3 or peer.urgent:
            peer.give_back()
        nbytes, offset, piece_bytes = header[13:16]
        if offset + piece_bytes == nbytes:
            peer.send(header, b"".join(parts))
            parts = []
            count += 1
    return count


def main() -> int:
    """Connects to the other endpoint, and sends received messages back until it closes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="10.77.0.1")
    parser.add_argument("--port", type=int, default=21001)
    parser.add_argument("--token", default="07" * 16, help="token of the job, in hexadecimal")
    parser.add_argument("--job", type=int, default=0x1234_5678_9ABC)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--slot-bytes", type=int, default=8192)
    parser.add_argument("--device", default=os.environ.get("LAB_RDMA_DEV", "rxe0"))
    parser.add_argument("--gid-index", type=int, default=int(os.environ.get("LAB_RDMA_GID", "1")))
    args = parser.parse_args()
    wire = Wire(args.host, args.port, bytes.fromhex(args.token), rank=1, target=0)
    peer = Peer(
        wire,
        job=args.job,
        slots=args.slots,
        slot_bytes=args.slot_bytes,
        device=args.device,
        gid_index=args.gid_index,
    )
    count = echo(peer)
    peer.close()
    print(f"echoed {count} messages", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
