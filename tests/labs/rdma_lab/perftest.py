"""Measures the link between nodes 0 and 1 with perftest. Both nodes call the same functions.

    python -m tests.labs.rdma_lab -- /usr/bin/python3 -m tests.labs.rdma_lab.perftest

This command prints a table. Node 0 is the server. The module needs only the standard library,
because Debian's Python starts faster on a node than an environment with torch.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["BANDWIDTH_SIZES", "LATENCY_SIZES", "PerftestError", "bandwidth", "latencies"]

BANDWIDTH_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
LATENCY_SIZES = (64, 1 << 10)

_PORT = 18515
_LISTEN = "0A"
_POLL_S = 0.02
_TRIES = 5
_MIB = 1 << 20


class PerftestError(Exception):
    """Raised if perftest measured nothing. The message is the output of perftest."""


def bandwidth(size_bytes: int, *, total_bytes: int = 64 * _MIB, timeout_s: float = 60.0) -> float:
    """Returns the bandwidth of many concurrent RDMA writes from node 1 to node 0, in bytes/s.

    Args:
        size_bytes: Size of a write, in bytes.
        total_bytes: Total size of all writes in bytes. There are at least five writes.
        timeout_s: Timeout in seconds.

    Returns:
        Average bandwidth that ``ib_write_bw`` reports, which is the same on both nodes.

    Raises:
        PerftestError: perftest failed or timed out.
    """
    count = max(5, total_bytes // size_bytes)
    _peak, average = _measure("ib_write_bw", size_bytes, count, timeout_s)[:2]
    return average * _MIB  # perftest prints MiB/s, although it labels the values MB/s.


def latencies(size_bytes: int, *, count: int = 500, timeout_s: float = 60.0) -> tuple[float, float]:
    """Returns the median and the mean one-way latency of an RDMA write, in microseconds.

    If other programs use the processors, some writes wait for a whole time slice. The mean is then
    several times the median.

    Args:
        size_bytes: Size of a write, in bytes.
        count: Number of writes in each direction. Each write answers the previous write.
        timeout_s: Timeout in seconds.

    Returns:
        Median and mean of ``ib_write_lat``, which are the same on both nodes. A latency is half of
        the round-trip time that node 1 measures.

    Raises:
        PerftestError: perftest failed or timed out.
    """
    _least, _most, typical, mean = _measure("ib_write_lat", size_bytes, count, timeout_s)[:4]
    return typical, mean


def _measure(tool: str, size_bytes: int, count: int, timeout_s: float) -> list[float]:
    """Runs ``tool``, and returns the measured numbers of the row that it prints.

    ``tool`` makes ``count`` transfers of ``size_bytes`` bytes within ``timeout_s`` seconds.
    """
    rank, result = int(os.environ["RANK"]), Path(os.environ["LAB_SHARE"], "perftest-result")
    if rank > 1:
        raise PerftestError(f"{tool} runs only on nodes 0 and 1, but this is node {rank}")
    deadline_s = time.monotonic() + timeout_s
    # If other programs use the processors, perftest may fail to measure the processor frequency and
    # print invalid numbers. So try again in this case.
    for _ in range(_TRIES):
        row = _run(tool, size_bytes, count, deadline_s)
        if rank == 1:
            new = result.with_suffix(".new")
            new.write_text(" ".join(row))
            new.rename(result)
        else:
            _await(result.exists, deadline_s)
            row = result.read_text().split()
            result.unlink()
        columns = [float(word) for word in row]
        if all(0 < value < math.inf for value in columns[:3]):
            return columns
    raise PerftestError(
        f"{tool} printed no valid numbers in {_TRIES} tries; the last were {columns}"
    )


def _run(tool: str, size_bytes: int, count: int, deadline_s: float) -> list[str]:
    """Runs ``tool`` as soon as node 0 listens, and returns the values in the printed table.

    The other arguments are those of :func:`_measure`.
    """
    mark = Path(os.environ["LAB_SHARE"], "perftest-listens")
    command = [tool, "-d", os.environ["LAB_RDMA_DEV"], "-x", os.environ["LAB_RDMA_GID"], "-F"]
    command += ["-s", str(size_bytes), "-n", str(count), "-p", str(_PORT)]
    is_server = os.environ["RANK"] == "0"
    if not is_server:
        _await(mark.exists, deadline_s)
        mark.unlink()
        command.append(os.environ["MASTER_ADDR"])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        if is_server:
            _await(lambda: _listens() or process.poll() is not None, deadline_s)
            mark.touch()
        text, _ = process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
    except (subprocess.TimeoutExpired, PerftestError):
        process.kill()
        text, _ = process.communicate()
        raise PerftestError(f"{tool} did not finish in time:\n{text}") from None
    rows = [line.split() for line in text.splitlines() if line.split()[:1] == [str(size_bytes)]]
    if process.returncode or len(rows) != 1:
        raise PerftestError(f"{tool} exited with status {process.returncode}:\n{text}")
    return rows[0][2:]


def _await(reached: Callable[[], bool], deadline_s: float) -> None:
    while not reached():
        if time.monotonic() > deadline_s:
            raise PerftestError("timed out waiting for the other node")
        time.sleep(_POLL_S)


def _listens() -> bool:
    """Returns whether a program on this node listens on the port, without connecting to it."""
    sockets = (Path("/proc/net", name).read_text().split("\n")[1:] for name in ("tcp", "tcp6"))
    rows = [line.split() for lines in sockets for line in lines if line]
    return any(row[1].endswith(f":{_PORT:04X}") and row[3] == _LISTEN for row in rows)


def main() -> None:
    """Measures the link, and prints a table of the results on node 0."""
    quiet = os.environ["RANK"] != "0"
    for size_bytes in BANDWIDTH_SIZES:
        rate = bandwidth(size_bytes)
        if not quiet:
            print(f"ib_write_bw  {size_bytes:>8} B  {rate / 1e6:>8.1f} MB/s", flush=True)
    for size_bytes in LATENCY_SIZES:
        time_us, _mean_us = latencies(size_bytes)
        if not quiet:
            print(f"ib_write_lat {size_bytes:>8} B  {time_us:>8.1f} us", flush=True)


if __name__ == "__main__":
    main()
