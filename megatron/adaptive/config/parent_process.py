"""Ends a process when the process that started it ends, also if that one was killed."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when its parent ends.

    The setting stays when the process runs another program, and is not passed on to its children.

    Args:
        number: Number of the signal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def ending_with_this_process(number: int) -> Callable[[], None]:
    """Returns a ``preexec_fn`` of ``subprocess`` for a process that ends with this one.

    Args:
        number: Number of the signal that the new process gets.
    """
    parent = os.getpid()

    def prepare() -> None:
        end_with_parent(number)
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)

    return prepare
