"""Counts lost TCP segments of this process, and errors of this machine's network ports.

The kernel counts the segments of each connection (``TCP_INFO``), so lost segments of other programs
are not included. The connections of this process include those of gloo, of NCCL over sockets, and
of the job's store. Ethernet and RDMA ports have files with their error counts. The speed is read
only for the interface that the job uses, because other interfaces, such as management interfaces,
do not slow the job down::

    /sys/class/net/*/statistics              packets with errors, packets that were dropped
    /sys/class/net/*/speed                   Mbit/s
    /sys/class/infiniband/*/ports/*/         retransmitted packets, ticks without credits
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

SENT_SEGMENTS = "sent_segments"
"""Name of the counter for TCP segments that this process sent."""

RESENT_SEGMENTS = "resent_segments"
"""Name of the counter for TCP segments that this process retransmitted."""

LINK_ERRORS = "link_errors"
"""Name of the counter for faulty or dropped packets, on the port that has the most of them."""

LINK_RETRIES = "link_retries"
"""Name of the counter for packets that an RDMA port retransmitted for the most common reason."""

LINK_PAUSES = "link_pauses"
"""Name of the counter for ticks in which an RDMA port had data to send but no credits."""

LINK_SPEED = "job_link_mbit_per_s"
"""Name of the counter for the speed of the job's network interface in Mbit/s."""

_INFO_BYTES = 144
_RESENT_OFFSET = 100
"""Byte offset of ``tcpi_total_retrans`` in ``struct tcp_info``."""
_SENT_OFFSET = 136
"""Byte offset of ``tcpi_segs_out`` in ``struct tcp_info``, available since Linux 4.2."""
_MOST_CONNECTIONS = 64
_MOST_PORTS = 16
_NETWORKS = Path("/sys/class/net")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_ERRORS = ("rx_errors", "tx_errors", "tx_dropped")
_RETRIES = ("packet_seq_err", "out_of_sequence", "local_ack_timeout_err", "rnr_nak_retry_err")


class TcpCounters:
    """Reads the counters of this process's TCP connections.

    All methods must be called from the same thread.
    """

    def __init__(self) -> None:
        self._connections: list[int] = []
        self._library = _c_library()
        self._info = ctypes.create_string_buffer(_INFO_BYTES)
        self._size = ctypes.c_uint32()

    def list_connections(self) -> None:
        """Selects up to 64 open connections for later calls of :meth:`read`."""
        self._connections = []
        try:
            listed = os.listdir("/proc/self/fd")
        except OSError:
            return
        for name in sorted(listed, key=int):
            if len(self._connections) == _MOST_CONNECTIONS:
                return
            try:
                is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            except OSError:
                continue
            if is_socket and self._counts(int(name)) is not None:
                self._connections.append(int(name))

    def read(self) -> dict[int, tuple[int, int]]:
        """Returns the numbers of sent and of retransmitted segments, keyed by file descriptor."""
        counts = ((number, self._counts(number)) for number in self._connections)
        return {number: of_one for number, of_one in counts if of_one is not None}

    def _counts(self, descriptor: int) -> tuple[int, int] | None:
        """Returns the counts of ``descriptor``, or ``None`` if it is not an open TCP connection."""
        if self._library is None:
            return None
        self._size.value = _INFO_BYTES
        failed = self._library.getsockopt(
            descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, self._info, ctypes.byref(self._size)
        )
        if failed or self._size.value < _INFO_BYTES:
            return None
        (resent,) = struct.unpack_from("I", self._info, _RESENT_OFFSET)
        (sent,) = struct.unpack_from("I", self._info, _SENT_OFFSET)
        return sent, resent


def _c_library() -> ctypes.CDLL | None:
    """Returns the C library of this process, or ``None`` if it cannot be loaded."""
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


def increase(
    before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]
) -> tuple[int, int]:
    """Returns the numbers of segments sent and retransmitted between two readings.

    Args:
        before: First reading.
        after: Second reading. Connections that were not open at the first reading are not counted.
    """
    sent = resent = 0
    for descriptor, (sent_after, resent_after) in after.items():
        sent_before, resent_before = before.get(descriptor, (sent_after, resent_after))
        if sent_after >= sent_before and resent_after >= resent_before:
            sent += sent_after - sent_before
            resent += resent_after - resent_before
    return sent, resent


def error_files() -> list[Path]:
    """Returns the paths of the files with the error counters of this machine's Ethernet ports."""
    return [port / "statistics" / name for port in _ethernet() for name in _ERRORS]


def retry_files() -> list[Path]:
    """Returns the paths of the files that count retransmissions of this machine's RDMA ports."""
    return [port / "hw_counters" / name for port in _rdma() for name in _RETRIES]


def pause_files() -> list[Path]:
    """Returns the paths of the files that count ticks in which an RDMA port waited for credits."""
    return [port / "counters" / "port_xmit_wait" for port in _rdma()]


def speed_mbit_per_s(interface: str) -> int:
    """Returns the speed of a network interface in Mbit/s, or 0 if the speed is unknown.

    Args:
        interface: Name of the interface, such as ``eth0``; empty if unknown.
    """
    return max(0, _number(_NETWORKS / interface / "speed")) if interface else 0


def _ethernet() -> Iterator[Path]:
    """Yields the folder of each port of a physical device, and skips ``lo`` and bridges."""
    for port in _listed(_NETWORKS):
        if (port / "device").exists():
            yield port


def _rdma() -> Iterator[Path]:
    for device in _listed(_RDMA_DEVICES):
        yield from _listed(device / "ports")


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())[:_MOST_PORTS]
    except OSError:
        return []


def _number(path: Path) -> int:
    """Returns the first word of the file at ``path`` as an integer, or 0 if it is not a number."""
    try:
        return int(float(path.read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return 0
