"""Records the sleeps of a test instead of waiting for them."""

from __future__ import annotations

import threading
import time

import pytest


def record_sleeps(patch: pytest.MonkeyPatch) -> list[float]:
    """Replaces ``time.sleep`` in the current thread with a function that does not wait.

    Calls on other threads of the process sleep as before, and are not recorded.

    Args:
        patch: Fixture or context that restores ``time.sleep``.

    Returns:
        List to which each later call appends the requested number of seconds.
    """
    recorded: list[float] = []
    thread, sleep = threading.get_ident(), time.sleep

    def record(seconds: float) -> None:
        if threading.get_ident() == thread:
            recorded.append(seconds)
        else:
            sleep(seconds)

    patch.setattr(time, "sleep", record)
    return recorded
