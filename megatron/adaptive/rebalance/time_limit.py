"""Bounds a choice that one rank makes while all others wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 60.0
"""Longest time in seconds that ranks wait for a choice."""
SIMULATED_OF_LIMIT = 0.75
"""Fraction of the limit after which the choice is made among the results so far."""


def result_within(limit_s: float, action: Callable[[], T], instead: T) -> T:
    """Runs an action in a thread and waits for its result.

    The action cannot be stopped: after the limit its thread continues in the background, and its
    result or exception is dropped.

    Args:
        limit_s: Limit of the wait in seconds.
        action: Function that reads the run and changes nothing in it.
        instead: Result after the limit.

    Raises:
        BaseException: The action raised it within the limit.
    """
    results: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(action())
        except BaseException as error:  # raised again by the caller
            results.put(error)

    threading.Thread(target=run, name="choice", daemon=True).start()
    try:
        result = results.get(timeout=limit_s)
    except queue.Empty:
        return instead
    if isinstance(result, BaseException):
        raise result
    return result
