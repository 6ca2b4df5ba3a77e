"""Processes that a program started: lists them, and ends all of them when a signal stops it."""

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
    """Returns the children of a process, none if it has ended.

    Who looks at them often saves much: for the same question ``psutil`` reads the state of every
    process of the machine.
    """
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (thread / "children").read_text().split())
    return children


def descendants_of(pid: int) -> list[int]:
    """Returns all processes below a process, parents before their children."""
    family = children_of(pid)
    for member in family:
        family += children_of(member)
    return family


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """Lets no process that the block started outlive this program when a signal stops it.

    SIGTERM and SIGHUP raise ``SystemExit`` in the block, with status 128 + number of the signal. So
    context managers and ``finally`` clauses of the block run. Then all processes are killed that
    were below this one when the signal came. Further signals are ignored meanwhile.

    Only the main thread can handle signals; in another thread, the block runs as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    import psutil  # not at the top: the check of a GPU starts on machines that lack it

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

    # A program that nohup started keeps ignoring SIGHUP.
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
