"""Counts the TCP segments that this process sent, and those that it sent again.

The kernel counts both for each connection (``TCP_INFO``), so that what other programs lose does not
matter. Connections of gloo, of NCCL over sockets and of the job's store are among these.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Mapping

_INFO_BYTES = 144
_RESENT_OFFSET = 100
"""Offset in bytes of ``tcpi_total_retrans`` in ``struct tcp_info``."""
_SENT_OFFSET = 136
"""Offset in bytes of ``tcpi_segs_out``, which has existed since Linux 4.2."""
_MOST_CONNECTIONS = 64


class TcpCounters:
    """Reads the counters of this process's TCP connections. One thread must call all methods."""

    def __init__(self) -> None:
        self._connections: list[int] = []
        self._library = _c_library()
        self._info = ctypes.create_string_buffer(_INFO_BYTES)
        self._size = ctypes.c_uint32()

    def list_connections(self) -> None:
        """Finds the connections that are open now, up to 64."""
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
        """Returns (segments sent, segments sent again) by file descriptor."""
        counts = ((number, self._counts(number)) for number in self._connections)
        return {number: of_one for number, of_one in counts if of_one is not None}

    def _counts(self, descriptor: int) -> tuple[int, int] | None:
        """Returns the counts of a descriptor; ``None`` if it is no TCP connection (any more)."""
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
    """Returns the C library of this process; ``None`` if it cannot be called."""
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


def increase(
    before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]
) -> tuple[int, int]:
    """Returns how many segments were sent, and sent again, between two readings.

    Args:
        before: First reading.
        after: Second reading. A connection that was not open before, or that was replaced by
            another one, does not count.
    """
    sent = resent = 0
    for descriptor, (sent_after, resent_after) in after.items():
        sent_before, resent_before = before.get(descriptor, (sent_after, resent_after))
        if sent_after >= sent_before and resent_after >= resent_before:
            sent += sent_after - sent_before
            resent += resent_after - resent_before
    return sent, resent
