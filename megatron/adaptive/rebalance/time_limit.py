"""Bounds a choice that one rank makes while all others wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 60.0
"""Seconds that ranks wait for a choice, at most."""
SIMULATED_OF_LIMIT = 0.75
"""Share of the limit after which a choice is made among what has been simulated so far."""


def result_within(limit_s: float, action: Callable[[], T], instead: T) -> T:
    """Runs an action in a thread and waits for its result.

    The action cannot be stopped: after the limit its thread goes on in the background, and what
    it returns or raises is dropped.

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
