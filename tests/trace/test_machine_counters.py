"""What keeps a process from computing is counted, from the kernel's files as they are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron.adaptive.trace import machine_counters
from megatron.adaptive.trace.machine_counters import (
    COUNTERS,
    ELAPSED,
    OWN_BUSY,
    PROCESSOR_WAIT,
    PROCESSORS,
    MachineCounters,
)

STAT = b"cpu  100 20 30 4000 50 6 7 80 9 0\ncpu0 50 10 15 2000 25 3 4 40 0 0\nintr 1 2 3\n"
PRESSURE = (
    b"some avg10=0.04 avg60=0.48 avg300=22.80 total=27969741858\n"
    b"full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
)
OWN = b"17 (a name) of) R 1 17 17 0 -1 4194560 520 0 31 0 5 6 0 0 20 0 1 0 900 8000 700"
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
    assert set(counters.end()) <= {ELAPSED, OWN_BUSY, PROCESSORS}


def test_what_a_machine_lacks_or_forbids_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_counters, "_opened", lambda path: None)
    counters = MachineCounters()
    counters.begin()
    sum(range(1000))
    assert set(counters.end()) <= {ELAPSED, OWN_BUSY, PROCESSORS}
