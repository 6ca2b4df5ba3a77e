"""Limits the time that one rank may take for a decision while all other ranks wait for it."""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 60.0
"""Maximum time in seconds that all ranks wait while rank 0 chooses a schedule or partition."""

SIMULATED_OF_LIMIT = 0.75
"""Fraction of the time limit after which simulations stop and the best result so far is used."""


def limit_of_search(limit_s: float, timeout: datetime.timedelta) -> float:
    """Returns a limit in seconds for a search on rank 0, so that no other rank times out.

    Args:
        limit_s: Maximum time in seconds if the timeout of the other ranks is long enough.
        timeout: Timeout of a rank that waits for rank 0.
    """
    return min(limit_s, timeout.total_seconds() / 2)


def result_within(limit_s: float, action: Callable[[], T], instead: T) -> T:
    """Runs ``action`` in a thread, and waits for its result for up to ``limit_s`` seconds.

    ``action`` cannot be stopped. After the time limit, its thread continues in the background, and
    the result or exception is discarded.

    Args:
        limit_s: Maximum time to wait, in seconds.
        action: Function to call. It may read the state of the training run, but must not change it.
        instead: Result to return if the time limit is exceeded.

    Raises:
        BaseException: Any exception that ``action`` raises within the time limit.
    """
    results: queue.Queue[T | BaseException] = queue.Queue()

    def run() -> None:
        try:
            results.put(action())
        except BaseException as error:  # The waiting thread raises this exception.
            results.put(error)

    threading.Thread(target=run, name="choice", daemon=True).start()
    try:
        result = results.get(timeout=limit_s)
    except queue.Empty:
        return instead
    if isinstance(result, BaseException):
        raise result
    return result
