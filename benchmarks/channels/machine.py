"""The machine that a run had: its processors' distance, who else was busy, what lies about."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

NEAR_NS, FAR_NS = 110.0, 130.0
"""A cache line there and back takes less than the first between near processors, more than the
second between far ones."""


@dataclass(frozen=True)
class Cores:
    """The two processors that the processes of a pair are bound to."""

    first: int
    second: int

    @staticmethod
    def choose() -> Cores:
        """Two of those that this process may use; one twice where there is only one."""
        allowed = sorted(os.sched_getaffinity(0))
        return Cores(allowed[0], allowed[min(1, len(allowed) - 1)])

    def of(self, rank: int) -> int:
        """The processor of a rank."""
        return self.second if rank % 2 else self.first


def state_of(cache_line_ns: float) -> str:
    """``near``, ``far`` or ``between``; ``unknown`` for not-a-number."""
    if math.isnan(cache_line_ns):
        return "unknown"
    if cache_line_ns < NEAR_NS:
        return "near"
    return "far" if cache_line_ns > FAR_NS else "between"


def others_busy(seconds: float = 1.0) -> float:
    """Share of the processors that is in use while this process sleeps, 0 to 1."""

    def read() -> tuple[int, int]:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        numbers = [int(field) for field in fields]
        return numbers[3] + numbers[4], sum(numbers)  # idle and waiting for a disk; all

    idle, total = read()
    time.sleep(seconds)
    idle_after, total_after = read()
    return 1.0 - (idle_after - idle) / max(1, total_after - total)


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is in RAM, shared parts included."""
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int | str = "self") -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))
