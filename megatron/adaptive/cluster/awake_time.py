"""Measures how long a process has waited, excluding the time during which it was suspended.

A process may be suspended by Ctrl-Z, a debugger or a paused virtual machine. When the process
resumes, all of its timeouts seem to have expired, even if its peers replied in time. Each wait is
therefore divided into short slices, and a suspension of any length counts as one slice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SLICE_S = 1.0
# If more than this number of seconds pass between two readings of the clock, the process was
# suspended. A running process reads the clock more often, even on a busy machine.
_LONGEST_GAP_S = 5.0


class AwakeClock:
    """Measures elapsed time in seconds, excluding time during which this process was suspended.

    :meth:`now_s` must be called at least every two seconds. If more than five seconds pass between
    two calls, the process is assumed to have been suspended in between.

    Args:
        clock: Function that returns the time in seconds; ``time.monotonic`` by default.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_s = clock()
        self._stopped_s = 0.0

    def now_s(self) -> float:
        """Returns the current time in seconds, excluding suspensions."""
        now_s = self._clock()
        gap_s = now_s - self._read_s
        self._read_s = now_s
        if gap_s > _LONGEST_GAP_S:
            self._stopped_s += gap_s
        return now_s - self._stopped_s


async def result_within(future: asyncio.Future[T], limit_s: float) -> T:
    """Waits for ``future`` in slices of at most :data:`SLICE_S` seconds, and returns its result.

    A timeout does not cancel ``future``.

    Args:
        future: Future or task to wait for.
        limit_s: Timeout in seconds, excluding time during which this process was suspended.

    Raises:
        asyncio.TimeoutError: The future was not done before the timeout.
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
