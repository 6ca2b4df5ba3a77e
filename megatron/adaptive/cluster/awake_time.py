"""Measures how long a process has waited, without the time in which it was stopped.

Ctrl-Z, a debugger or a paused virtual machine may stop a process. When it continues, all of its
time limits seem to have passed, although its peers answered in time. Time is therefore counted in
short waits: a stop, however long, counts as one of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SLICE_S = 1.0
# A running process reads the clock more often than this, even on a busy machine.
_LONGEST_GAP_S = 5.0


class AwakeClock:
    """Counts the seconds in which this process ran.

    Read it at least every two seconds: a longer gap between two readings counts as a stop.

    Args:
        clock: Source of the time in seconds, ``time.monotonic`` by default.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_s = clock()
        self._stopped_s = 0.0

    def now_s(self) -> float:
        """Returns the present time in seconds, without the time of stops."""
        now_s = self._clock()
        gap_s = now_s - self._read_s
        self._read_s = now_s
        if gap_s > _LONGEST_GAP_S:
            self._stopped_s += gap_s
        return now_s - self._stopped_s


async def result_within(future: asyncio.Future[T], limit_s: float) -> T:
    """Waits for a future in slices of at most :data:`SLICE_S`; at the limit it keeps running.

    Args:
        future: Future or task to wait for.
        limit_s: Limit in seconds, without the time in which this process was stopped.

    Raises:
        asyncio.TimeoutError: The limit has passed.
    """
    left_s = limit_s
    pending: Any = {future}
    while True:
        slice_s = min(SLICE_S, max(left_s, 0.0))
        done, _ = await asyncio.wait(pending, timeout=slice_s)
        if done:
            return future.result()
        left_s -= slice_s
        if left_s <= 0:
            raise asyncio.TimeoutError
