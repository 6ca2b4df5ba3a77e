"""Provides ranks whose stages sleep instead of computing, and channels that can delay messages."""

from __future__ import annotations

import ctypes
import heapq
import os
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.adaptive.engine.agreement import Agreement
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.transport.gloo import GlooTransport
from megatron.adaptive.transport.interface import (
    Arrival,
    CompletionQueue,
    Completions,
    HeldArrival,
    Item,
    delivered,
)

WIDTH = 16
DTYPE = torch.float64
_TIMEOUT_S = 60.0
_PR_SET_TIMERSLACK = 29


def sharpen_timers() -> bool:
    """Makes sleeps of this thread end within microseconds of the requested time.

    Ranks also get real-time priority if the system allows it. Otherwise, a rank that wakes up may
    wait for milliseconds until another program's time slice ends.

    Returns:
        Whether ranks have real-time priority.
    """
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        return False
    return True


class Sleeper:
    """Sleeps until a given time, by waking up a little early and then spinning."""

    def __init__(self) -> None:
        self._late_s = 100e-6

    def until(self, moment_s: float) -> None:
        """Waits until the ``time.monotonic`` time ``moment_s``, if it has not passed yet."""
        left_s = moment_s - time.monotonic()
        if left_s > self._late_s:
            wake_s = moment_s - self._late_s
            time.sleep(left_s - self._late_s)
            late_s = time.monotonic() - wake_s
            # Track the usual delay, but ignore a single long delay, as on a busy core.
            self._late_s += 5e-6 if late_s > self._late_s else -1e-6
        while time.monotonic() < moment_s:
            pass


class IdleStages:
    """Chunks that neither compute nor store anything, with the interface ``Stages``."""

    _nothing = torch.zeros(1)

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Returns a tensor with one element."""
        return self._nothing

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns a tensor with one element."""
        return self._nothing

    def release(self, chunk: int, microbatch: int) -> None:
        """Does nothing."""

    def activation_bytes(self, chunk: int, microbatch: int) -> int:
        """Returns 1."""
        return 1

    def retained_bytes(self, chunk: int, microbatch: int) -> int:
        """Returns 1."""
        return 1

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Does nothing."""


class Channels:
    """Executor and transport for one placement. All ranks must create this object together.

    Args:
        placement: Placement of the stages.
        position: Pipeline rank of this process. Replicas of the same pipeline rank have consecutive
            global ranks.
        replica: Index of this rank's pipeline replica.
        replicas: Number of pipeline replicas.
        recorder: Recorder of the executor.
        agree: Function that creates this rank's agreement from its completion queue.
        varies: Whether messages differ in shape. Then each takes two sends.
    """

    def __init__(
        self,
        placement: Placement,
        position: int,
        *,
        replica: int = 0,
        replicas: int = 1,
        recorder: Recorder | None = None,
        agree: Callable[[Completions], Agreement] | None = None,
        varies: bool = False,
    ) -> None:
        positions = range(placement.num_ranks)
        groups = [
            dist.new_group([p * replicas + number for p in positions], backend="gloo")
            for number in range(replicas)
        ]
        self._transport = GlooTransport(
            groups[replica],
            peers=[p * replicas + replica for p in placement.neighbours_of(position)],
            device=torch.device("cpu"),
            payload_shape=None if varies else (WIDTH,),
            dtype=DTYPE,
            timeout_s=_TIMEOUT_S,
        )
        self._plain = self._transport.completions
        self.agreement = Agreement() if agree is None else agree(self._plain)
        self.executor = Executor(
            placement=placement,
            pp_rank=position,
            route=lambda position, microbatch: (position * replicas + replica, microbatch),
            transport=self._transport,
            agreement=self.agreement,
            recorder=recorder,
            timeout_s=_TIMEOUT_S,
        )

    def delay(self, delays_s: dict[int, float]) -> None:
        """Delays messages by ``delays_s``, by sender's rank. No message may be in flight."""
        is_slow = any(delays_s.values())
        self._transport.completions = DelayedQueue(delays_s) if is_slow else self._plain

    def close(self) -> None:
        """Closes the transport. All ranks must call this together."""
        self.agreement.close()
        self._transport.close()


class DelayedQueue(CompletionQueue):
    """Delivers each message after a delay that depends on its sender.

    Args:
        delays_s: Delay in seconds, by the sender's global rank.
    """

    def __init__(self, delays_s: dict[int, float]) -> None:
        super().__init__()
        self._delays_s = delays_s
        self._held: list[tuple[float, int, Item | Exception]] = []
        self._count = 0
        self._changed = threading.Condition()

    def put(self, item: Item | Exception) -> None:
        """Adds the message ``item`` to the queue. See :class:`CompletionQueue`."""
        due_s = time.monotonic()
        if isinstance(item, Arrival):
            payload = item.take()
            due_s = max(due_s, payload[2].item() + self._delays_s.get(item.peer, 0.0))
            item = HeldArrival(
                item.label, item.peer, item.nbytes, lambda: payload, int(due_s * 1e9)
            )
        with self._changed:
            self._count += 1
            heapq.heappush(self._held, (due_s, self._count, item))
            self._changed.notify()

    def poll(self) -> Item | None:
        """Returns a message whose delay has passed, or ``None``. See :class:`CompletionQueue`."""
        return self.wait(0.0)

    def wait(self, deadline_s: float) -> Item | None:
        """Waits for a message whose delay has passed. See :class:`CompletionQueue`."""
        with self._changed:
            while True:
                now_s = time.monotonic()
                next_s = deadline_s
                if self._held:
                    if self._held[0][0] <= now_s:
                        return delivered(heapq.heappop(self._held)[2])
                    next_s = min(next_s, self._held[0][0])
                if deadline_s <= now_s:
                    return None
                self._changed.wait(next_s - now_s)
