"""How much of the machine programs other than ours take, while runs are measured."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np

__all__ = ["Watch"]

_TICKS = os.sysconf("SC_CLK_TCK")


class Watch(threading.Thread):
    """Samples how busy the machine is, and how much of that a process and its descendants are."""

    def __init__(self, first: int) -> None:
        super().__init__(daemon=True)
        self._first, self._done = first, threading.Event()
        self.samples: list[tuple[int, float, float]] = []

    def run(self) -> None:
        """Sample every 250 ms until stopped."""
        while not self._done.wait(0.25):
            self._sample()

    def start(self) -> None:
        """Begin, with a sample of now."""
        self._sample()
        super().start()

    def stop(self) -> None:
        """End with a sample of now; blocks until it has."""
        self._done.set()
        self.join(timeout=5)
        self._sample()

    def _sample(self) -> None:
        self.samples.append((time.monotonic_ns(), _busy_s(), _family_s(self._first)))

    def others(self, start_ns: int, end_ns: int) -> float:
        """Part of the machine that others took between two moments."""
        at = np.array([sample[0] for sample in self.samples])
        low = max(int(np.searchsorted(at, start_ns)) - 1, 0)
        high = min(int(np.searchsorted(at, end_ns)), len(at) - 1)
        first, last = self.samples[low], self.samples[high]
        seconds = (last[0] - first[0]) / 1e9
        if seconds <= 0:
            return 1.0
        taken = (last[1] - first[1]) - (last[2] - first[2])
        return max(0.0, taken / seconds / (os.cpu_count() or 1))


def _busy_s() -> float:
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    numbers = [int(field) for field in fields]
    idle = numbers[3] + numbers[4]
    return (sum(numbers[:8]) - idle) / _TICKS


def _family_s(first: int) -> float:
    """Processor seconds of a process and all that it started."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
        seconds[int(folder.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    total = 0.0
    for process in parents:
        above = process
        while above in parents and above != first:
            above = parents[above]
        total += seconds[process] if above == first else 0.0
    return total
