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

    The thread also gets real-time priority if the system allows it. Without this priority, a rank
    that wakes up may wait for milliseconds until the time slice of another program ends.

    Returns:
        Whether the system allowed real-time priority.
    """
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        return False
    return True


class Sleeper:
    """Sleeps until shortly before a given time, and then runs a busy loop until that time."""

    def __init__(self) -> None:
        self._late_s = 100e-6

    def until(self, moment_s: float) -> None:
        """Waits until ``time.monotonic`` reaches ``moment_s``, or returns at once if it has."""
        left_s = moment_s - time.monotonic()
        if left_s > self._late_s:
            wake_s = moment_s - self._late_s
            time.sleep(left_s - self._late_s)
            late_s = time.monotonic() - wake_s
            # A single long delay on a busy core should have little effect, so adjust the estimate
            # of the usual delay slowly.
            self._late_s += 5e-6 if late_s > self._late_s else -1e-6
        while time.monotonic() < moment_s:
            pass


class IdleStages:
    """Implements the interface ``Stages`` with chunks that neither compute nor store anything."""

    _nothing = torch.zeros(1)

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Returns a tensor with one element without computing anything."""
        return self._nothing

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns a tensor with one element without computing anything."""
        return self._nothing

    def after_backward(self, chunk: int, microbatch: int) -> None:
        """Does nothing, because there are no gradients."""

    def release(self, chunk: int, microbatch: int) -> None:
        """Does nothing, because no activations are stored."""

    def activation_bytes(self, chunk: int, microbatch: int) -> int:
        """Returns 1, so that each forward pass counts as one unit of activations."""
        return 1

    def retained_bytes(self, chunk: int, microbatch: int) -> int:
        """Returns 1, so that each microbatch counts as one unit of retained memory."""
        return 1

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Does nothing, because there are no weights."""


class Channels:
    """Executor and transport for one placement. All ranks must create this object together.

    Args:
        placement: Placement of the stages.
        position: Rank of this process in its pipeline. If there are several replicas, the processes
            with the same position have consecutive global ranks.
        replica: Index of the pipeline replica to which this rank belongs.
        replicas: Number of pipeline replicas.
        recorder: Object that records the executor's actions for a trace, or ``None``.
        agree: Function that takes this rank's completion queue, and returns an agreement for ranks
            that must run the same actions. If ``None``, each rank chooses its actions alone.
        varies: Whether the shape may change between messages. If true, each message is sent as two
            gloo messages, a header and a payload.
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
        """Delays each message by a time that depends on the rank of the sender.

        ``delays_s`` maps global ranks to seconds. Call this method only while no message is in
        flight.
        """
        is_slow = any(delays_s.values())
        self._transport.completions = DelayedQueue(delays_s) if is_slow else self._plain

    def close(self) -> None:
        """Closes the channels to the other ranks. All ranks must call this together."""
        self.agreement.close()
        self._transport.close()


class DelayedQueue(CompletionQueue):
    """Queue that delivers each message after a delay that depends on the sender of the message.

    Args:
        delays_s: Delays in seconds, keyed by the sender's global rank.
    """

    def __init__(self, delays_s: dict[int, float]) -> None:
        super().__init__()
        self._delays_s = delays_s
        self._held: list[tuple[float, int, Item | Exception]] = []
        self._count = 0
        self._changed = threading.Condition()

    def put(self, item: Item | Exception) -> None:
        """Adds ``item``, which can be taken after its delay. See :class:`CompletionQueue`."""
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
        """Returns a message whose delay has passed, or ``None`` if there is no such message.

        See :class:`CompletionQueue`.
        """
        return self.wait(0.0)

    def wait(self, deadline_s: float) -> Item | None:
        """Returns the next message whose delay has passed, or ``None`` if there is none in time.

        Waits until ``deadline_s`` at most. See :class:`CompletionQueue`.
        """
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
