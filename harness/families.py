"""Lists the descendants of a process, and kills them if a signal stops this program."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def children_of(pid: int) -> list[int]:
    """Returns the PIDs of the children of the process ``pid``, or an empty list if it has exited.

    Callers use this function often. ``psutil`` would be too slow, because each of its calls reads
    the state of every process on the machine.
    """
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (thread / "children").read_text().split())
    return children


def descendants_of(pid: int) -> list[int]:
    """Returns the PIDs of all descendants of the process ``pid``, with parents before children."""
    family = children_of(pid)
    for member in family:
        family += children_of(member)
    return family


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """Kills all processes that a ``with`` block has started if a signal stops this program.

    In the ``with`` block, SIGTERM and SIGHUP raise ``SystemExit`` with the exit status 128 + the
    signal number, so that context managers and ``finally`` clauses run. After that, the processes
    that were descendants of this process when the signal arrived are killed. Further signals are
    ignored until then.

    Python handles signals only in the main thread. In other threads, this context manager does
    nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Import psutil only here, because the GPU check also runs on machines without psutil.
    import psutil

    family: list[psutil.Process] = []
    stopped_by = 0

    def stop(number: int, frame: object) -> NoReturn:
        nonlocal stopped_by
        stopped_by = number
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        for pid in descendants_of(os.getpid()):
            with contextlib.suppress(psutil.NoSuchProcess):
                family.append(psutil.Process(pid))
        raise SystemExit(128 + number)

    # A program that was started with nohup must continue to ignore SIGHUP.
    handled = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    former = {each: signal.signal(each, stop) for each in handled}
    try:
        yield
    finally:
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)
        if stopped_by:
            print(f"stopped by signal {signal.Signals(stopped_by).name}", file=sys.stderr)
        for each, handler in former.items():
            signal.signal(each, handler)
