"""Makes a process exit when its parent exits, even if the parent is killed."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send a signal to this process when its parent process exits.

    The request remains in effect after ``exec``, but child processes do not inherit it. If a parent
    process with several threads is killed, the signal may arrive several times, because the kernel
    sends it for each parent thread that exits.

    Args:
        number: Number of the signal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def ending_with_this_process(number: int) -> Callable[[], None]:
    """Returns a ``preexec_fn`` for ``subprocess`` that makes the new process end with this one.

    Args:
        number: Number of the signal sent to the new process when this process exits.
    """
    parent = os.getpid()

    def prepare() -> None:
        end_with_parent(number)
        if os.getppid() != parent:  # The parent exited before the call above could take effect.
            os._exit(1)

    return prepare
