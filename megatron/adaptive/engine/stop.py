"""Stops a run early on a signal or time limit, after the same iteration on all ranks.

::

    rank 0   iteration 7 ── start all-reduce 7 ──────────┐  iteration 8 ── start 8, read 7: stop
    rank 1   iteration 7 ── SIGTERM, start all-reduce 7 ─┘  iteration 8 ── start 8, read 7: stop

At the end of each iteration, the ranks start an all-reduce of their stop requests. They read the
result at the end of the next iteration, so that no rank waits for the all-reduce. If any rank has
requested a stop, the training loop saves a checkpoint and stops the run. While a
:class:`StopRequest` is open, it handles SIGTERM, SIGINT, SIGUSR1 and SIGHUP. If SIGHUP was ignored
before, for example under ``nohup``, it stays ignored. If another rank fails, the liveness watcher
stops this process without waiting for an agreement.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.errors import PeerLostError
from megatron.adaptive.trace.files import drop_closed_terminal, keep_printing

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], Any] | int | None


class StopRequest:
    """Collects requests to stop the run, and makes all ranks stop after the same iteration.

    The object must be created in the main thread. The first SIGINT requests a stop, and the second
    SIGINT raises ``KeyboardInterrupt`` immediately.

    Args:
        limit_minutes: Time limit of the run in minutes, measured from the creation of this object,
            or ``None`` for no limit. The run stops when the limit has passed on any rank.
    """

    def __init__(self, limit_minutes: float | None = None) -> None:
        # When a terminal is closed, writes to it fail even before SIGHUP arrives. Such a failed
        # write must not end the process before it has saved a checkpoint.
        keep_printing()
        self._limit_minutes = limit_minutes
        self._start_s = time.monotonic()
        self._received: set[int] = set()
        self._agreed: str | None = None
        self._flags: torch.Tensor | None = None
        self._work: Any = None
        self._old: dict[int, _Handler] = {
            number: signal.signal(number, self._on_signal)
            for number in _SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        # Unblock these signals, because the launcher may have blocked them until their handlers are
        # installed.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def reason(self) -> str | None:
        """Returns the agreed reason to stop, such as ``signal SIGTERM``, or ``None``."""
        return self._agreed

    def agreed(self, group: dist.ProcessGroup | None) -> bool:
        """Returns whether the run must stop now.

        All ranks must call this method after the same iterations.

        Args:
            group: Gloo group of all ranks, which must not be used for anything else between two
                calls, or ``None`` for a single process, which needs no agreement.

        Returns:
            True on all ranks if any rank had requested a stop by the previous call of this method.
            Once this method has returned True, all later calls return True.

        Raises:
            PeerLostError: A rank of the group has exited.
        """
        if self._agreed is not None:
            return True
        if group is None or group.size() == 1:
            self._settle(self._requests())
            return self._agreed is not None
        if self.finish():
            return True
        self._flags = torch.tensor(self._requests(), dtype=torch.int32)
        try:
            self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=group, async_op=True)
        except RuntimeError as error:
            raise _lost(error) from error
        return False

    def finish(self) -> bool:
        """Waits for the last all-reduce. Must be called before the group is destroyed.

        Returns:
            True if all ranks have agreed to stop.

        Raises:
            PeerLostError: A rank of the group has exited.
        """
        work = self._work
        self._work = None
        if work is not None:
            assert self._flags is not None
            try:
                work.wait()
            except RuntimeError as error:
                raise _lost(error) from error
            self._settle([bool(flag) for flag in self._flags.tolist()])
        return self._agreed is not None

    def close(self) -> None:
        """Restores the signal handlers that were installed before. Safe to call more than once."""
        while self._old:
            number, handler = self._old.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _requests(self) -> list[bool]:
        flags = [number in self._received for number in _SIGNALS]
        limit = self._limit_minutes
        over = limit is not None and time.monotonic() - self._start_s >= limit * 60
        return [*flags, over]

    def _settle(self, flags: list[bool]) -> None:
        reasons = [f"signal {number.name}" for number in _SIGNALS]
        if self._limit_minutes is not None:
            reasons.append(f"time limit of {self._limit_minutes:g} minutes")
        self._agreed = next(
            (text for text, flag in zip(reasons, flags, strict=False) if flag), None
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._received:
            raise KeyboardInterrupt
        drop_closed_terminal()
        self._received.add(number)


def _lost(error: RuntimeError) -> PeerLostError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return PeerLostError(
        f"a rank failed while the ranks agreed whether to stop: {reason}; restart the job from "
        "the last checkpoint"
    )
