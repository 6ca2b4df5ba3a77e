"""Tests counters for events that keep a process from computing, which are read from the kernel."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron.adaptive.trace import machine_counters, network_counters
from megatron.adaptive.trace.machine_counters import (
    CLOCK,
    CLOCK_LIMIT,
    COUNTERS,
    DISK_READ,
    ELAPSED,
    FULL_CLOCK,
    KERNEL,
    OWN_BUSY,
    PROCESSOR_WAIT,
    PROCESSORS,
    TURN_WAIT,
    MachineCounters,
)
from megatron.adaptive.trace.network_counters import (
    LINK_ERRORS,
    LINK_PAUSES,
    LINK_RETRIES,
    LINK_SPEED,
    SENT_SEGMENTS,
    increase,
)

STAT = b"cpu  100 20 30 4000 50 6 7 80 9 0\ncpu0 50 10 15 2000 25 3 4 40 0 0\nintr 1 2 3\n"
PRESSURE = (
    b"some avg10=0.04 avg60=0.48 avg300=22.80 total=27969741858\n"
    b"full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
)
OWN = b"17 (a name) of) R 1 17 17 0 -1 4194560 520 0 31 0 5 6 0 0 20 0 1 0 900 8000 700"
ON_PROCESSOR = b"17 (a) R" + b" 0" * 35 + b" 5 0 0"
IO = b"rchar: 9\nwchar: 8\nsyscr: 7\nsyscw: 6\nread_bytes: 4096\nwrite_bytes: 5\n"
V1 = b"nr_periods 8\nnr_throttled 3\nthrottled_time 5000000\nnr_bursts 0\n"
V2 = b"usage_usec 9\nuser_usec 8\nnr_periods 8\nnr_throttled 3\nthrottled_usec 5000\n"

BESIDE_ANOTHER = """
import os, subprocess, sys, time
from megatron.adaptive.trace.machine_counters import MachineCounters

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    counters = MachineCounters()
    while True:  # until the other process has begun
        counters.begin()
        end_s = time.monotonic() + 0.5
        while time.monotonic() < end_s:
            pass
        counts = counters.end()
        if counts.get("processor_wait_ns", 0) > 0.2 * counts["elapsed_ns"]:
            break
finally:
    other.kill()
print(counts["processors"], counts["own_busy_ns"] < 0.9 * counts["elapsed_ns"])
"""


def test_files_of_the_kernel_are_read() -> None:
    tick = 10**9 // os.sysconf("SC_CLK_TCK")
    assert machine_counters._steal_ns(STAT) == 80 * tick // (os.cpu_count() or 1)
    assert machine_counters._machine_busy_ns(STAT) == (100 + 20 + 30 + 6 + 7) * tick
    assert machine_counters._pressure_ns(PRESSURE) == 27969741858 * 1000
    assert machine_counters._major_faults(OWN) == 31
    assert machine_counters._last_processor(ON_PROCESSOR) == 5
    assert machine_counters._turns(b"17 23 4\n") == (23, 4)
    assert machine_counters._bytes_from_disk(IO) == 4096
    assert machine_counters._throttled_ns(V1) == machine_counters._throttled_ns(V2) == 5_000_000


@pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="the kernel does not count waits"
)
def test_a_process_that_shares_its_processor_waits_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_ANOTHER], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("1 True\n", "")


def test_counts_are_differences_and_name_known_counters() -> None:
    counters = MachineCounters()
    counters.begin()
    sum(range(2_000_000))
    counts = counters.end()
    assert set(counts) <= set(COUNTERS)
    assert counts[OWN_BUSY] > 0
    assert counts[ELAPSED] > 0
    assert counts.get(PROCESSOR_WAIT, 0) <= counts[ELAPSED]
    assert counts[PROCESSORS] == len(os.sched_getaffinity(0))
    counters.close()
    counters.close()
    assert set(counters.end()) <= {ELAPSED, OWN_BUSY, KERNEL, PROCESSORS}


def test_what_a_machine_lacks_or_forbids_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_counters, "_opened", lambda path: None)
    counters = MachineCounters()
    counters.begin()
    sum(range(1000))
    assert set(counters.end()) <= {ELAPSED, OWN_BUSY, KERNEL, PROCESSORS}


@pytest.fixture
def clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes files with the clock frequencies of all processors, and returns their root folder."""
    for processor in range(os.cpu_count() or 1):
        folder = tmp_path / f"cpu{processor}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text("1800000\n")
        (folder / "scaling_max_freq").write_text("2000000\n")
        (folder / "cpuinfo_max_freq").write_text("3500000\n")
    monkeypatch.setattr(machine_counters, "_PROCESSORS", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("clocks")
def test_clocks_of_the_processor_in_use() -> None:
    counters = MachineCounters()
    counts = counters.end()
    counters.close()
    expected = {CLOCK: 1_800_000, CLOCK_LIMIT: 2_000_000, FULL_CLOCK: 3_500_000}
    assert {name: counts[name] for name in expected} == expected


def open_files_in(folder: Path) -> set[str]:
    """Returns the names of the files in ``folder`` that this process has open."""
    return {
        str(link.resolve())
        for link in Path("/proc/self/fd").iterdir()
        if link.resolve().is_relative_to(folder)
    }


def named_thread(name: str, end: threading.Event) -> threading.Thread:
    """Starts and returns a thread called ``name`` that waits for the event ``end``."""
    thread = threading.Thread(target=end.wait, args=(60,), name=name, daemon=True)
    thread.start()
    return thread


def test_threads_that_sleep_are_not_read_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # Earlier tests may have left many threads in this process, so raise the limit.
    monkeypatch.setattr(machine_counters, "_MOST_THREADS", 10_000)
    end = threading.Event()
    sleeping = {str(named_thread("sleeping", end).native_id) for _ in range(12)}
    time.sleep(0.2)
    counters = MachineCounters()
    try:
        for _ in range(6):
            counters.begin()
            counters.end()
        assert sleeping <= set(counters._threads)
        assert len(sleeping & set(counters._turns)) < 6
        assert str(threading.get_native_id()) in counters._turns
    finally:
        end.set()
        counters.close()


@pytest.mark.parametrize(
    ("name", "kernel_name", "counts"),
    [
        ("receive-from-1", "python", True),
        ("lane", "python", True),
        ("", "adaptive-io", True),
        ("snapshots", "python", False),
        ("", "iou-wrk-17", False),
    ],
)
def test_only_waits_of_threads_with_messages_make_a_message_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kernel_name: str, counts: bool
) -> None:
    end = threading.Event()
    thread = named_thread(name, end) if name else None
    other = str(thread.native_id) if thread is not None else "99999"
    monkeypatch.setattr(machine_counters, "_TASKS", str(tmp_path))
    caller = str(threading.get_native_id())
    for task, comm in ((caller, "python"), (other, kernel_name)):
        (tmp_path / task).mkdir()
        (tmp_path / task / "comm").write_text(f"{comm}\n")
        (tmp_path / task / "schedstat").write_text("0 100 10")
    counters = MachineCounters()
    counters.begin()
    (tmp_path / caller / "schedstat").write_text("0 1100 20")
    (tmp_path / other / "schedstat").write_text("0 50100 20")
    counted = counters.end()
    counters.close()
    end.set()
    assert counted[PROCESSOR_WAIT] == 50_000
    assert counted[TURN_WAIT] == (5000 if counts else 100)


def test_only_files_of_one_processor_stay_open(clocks: Path) -> None:
    allowed = os.sched_getaffinity(0)
    counters = MachineCounters()
    try:
        for processor in sorted(allowed):
            os.sched_setaffinity(0, {processor})
            assert counters.end()[CLOCK] == 1_800_000
            folder = clocks / f"cpu{processor}"
            assert len(open_files_in(folder)) == 3
            assert open_files_in(clocks) == open_files_in(folder)
    finally:
        os.sched_setaffinity(0, allowed)
        counters.close()
    assert not open_files_in(clocks)


def test_bytes_that_a_child_reads_from_disk_count(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(1 << 20))
    code = (
        "import os, sys\n"
        "sys.stdin.readline()\n"
        f"file = os.open({str(path)!r}, os.O_RDONLY)\n"
        "os.fsync(file)\n"
        "os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "print(len(os.pread(file, 1 << 20, 0)), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        counters = MachineCounters()
        counters.begin()
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == f"{1 << 20}\n"
        counts = counters.end()
        counters.close()
        child.communicate("\n", timeout=60)
    if counts.get(DISK_READ, 0) == 0:
        pytest.skip("files here are in memory, or the kernel does not count reads from disks")
    assert counts[DISK_READ] >= 1 << 20


def test_segments_of_own_connections_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        counters = MachineCounters()
        counters.begin()
        for _ in range(20):
            sender.sendall(b"x" * 1000)
            assert receiver.recv(1000, socket.MSG_WAITALL)
        counts = counters.end()
        counters.close()
    assert counts[SENT_SEGMENTS] >= 20
    # Connections that are closed at the end of the step are not counted.
    assert SENT_SEGMENTS not in counters.end()


def test_a_connection_that_was_replaced_does_not_count() -> None:
    before = {3: (50, 4), 4: (10, 0), 5: (7, 1)}
    assert increase(before, {3: (60, 5), 4: (2, 0), 6: (99, 9)}) == (10, 1)


def test_ports_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    networks, devices = tmp_path / "net", tmp_path / "infiniband"
    for name, speed, has_device in (
        ("eth0", "25000", True),
        ("eth1", "-1", True),
        ("lo", "", False),
    ):
        folder = networks / name / "statistics"
        folder.mkdir(parents=True)
        (networks / name / "speed").write_text(f"{speed}\n")
        if has_device:
            (networks / name / "device").mkdir()
        for counter in ("rx_errors", "tx_errors", "tx_dropped"):
            (folder / counter).write_text("4\n")
    port = devices / "mlx5_0" / "ports" / "1"
    for path, text in (("counters/port_xmit_wait", "70\n"), ("hw_counters/packet_seq_err", "1\n")):
        (port / path).parent.mkdir(parents=True, exist_ok=True)
        (port / path).write_text(text)
    monkeypatch.setattr(network_counters, "_NETWORKS", networks)
    monkeypatch.setattr(network_counters, "_RDMA_DEVICES", devices)
    (networks / "eth1" / "speed").write_text("1000\n")
    counters = MachineCounters(interface="eth0")
    counters.begin()
    (networks / "eth0" / "statistics" / "rx_errors").write_text("10\n")
    (networks / "lo" / "statistics" / "rx_errors").write_text("999\n")
    (port / "counters" / "port_xmit_wait").write_text("90\n")
    (port / "hw_counters" / "packet_seq_err").write_text("4\n")
    counts = counters.end()
    counters.close()
    assert (counts[LINK_ERRORS], counts[LINK_PAUSES], counts[LINK_RETRIES]) == (6, 20, 3)
    assert counts[LINK_SPEED] == 25_000
