"""Makes a process exit when its parent process exits, even if the parent was killed."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when its parent process exits.

    The setting survives ``exec``. Child processes do not inherit it. If a parent with several
    threads is killed, the signal may come several times: the kernel sends it each time it hands
    this process from a thread that exits to one that has not exited yet.

    Args:
        number: Number of the signal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def ending_with_this_process(number: int) -> Callable[[], None]:
    """Returns a ``preexec_fn`` for ``subprocess`` that makes the new process exit with this one.

    Args:
        number: Number of the signal that the new process gets when this process exits.
    """
    parent = os.getpid()

    def prepare() -> None:
        end_with_parent(number)
        if os.getppid() != parent:  # the parent exited before the call above
            os._exit(1)

    return prepare
