"""Our side: the executor of this package over its gloo transport, with emulated stages."""

from __future__ import annotations

import heapq
import threading
import time

import torch
import torch.distributed as dist

from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.transport.gloo import GlooTransport
from megatron.adaptive.transport.interface import (
    Arrival,
    CompletionQueue,
    HeldArrival,
    Item,
    delivered,
)

from .competitors import Competitor
from .scenarios import Draws
from .work import DTYPE, WIDTH, RankWork

_TIMEOUT_S = 60.0


class IdleStages:
    """Chunks that do and keep nothing, see ``Stages`` of the executor."""

    _nothing = torch.zeros(1)

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Any tensor will do."""
        return self._nothing

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The same."""
        return self._nothing

    def release(self, chunk: int, microbatch: int) -> None:
        """Nothing is kept."""

    def activation_bytes(self, chunk: int, microbatch: int) -> int:
        """Any number will do."""
        return 1

    def retained_bytes(self, chunk: int, microbatch: int) -> int:
        """All of them."""
        return 1

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Nothing, as for whole backwards."""


class EmulatedStages(IdleStages):
    """Chunks that sleep.

    Args:
        work: what they do in this step.
        placement: where stages live.
        rank: this rank.
        split: whether the backward by weights comes as actions of its own.
    """

    def __init__(self, work: RankWork, placement: Placement, rank: int, *, split: bool) -> None:
        self._work = work
        self._stages = [placement.stage_of(rank, chunk) for chunk in range(placement.num_chunks)]
        self._split = split

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Sleeps for the time of F."""
        return self._work.forward(self._stages[chunk], received, microbatch)

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Sleeps for the time of B, and of W if they are not split."""
        stage = self._stages[chunk]
        result = self._work.backward(stage, gradient, microbatch, whole=not self._split)
        return result if stage else None

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Sleeps for one of ``pieces`` equal parts of W."""
        self._work.weights(self._stages[chunk], microbatch, 1 / pieces)


class Channels:
    """Executor and transport of one placement, shared by all competitors that have it.

    Collective: all ranks make theirs at the same point.

    Args:
        placement: Placement of the stages.
        rank: Number of this rank.
    """

    def __init__(self, placement: Placement, rank: int) -> None:
        self._transport = GlooTransport(
            dist.new_group(list(range(placement.num_ranks)), backend="gloo"),
            peers=placement.neighbours_of(rank),
            device=torch.device("cpu"),
            payload_shape=(WIDTH,),
            dtype=DTYPE,
            timeout_s=_TIMEOUT_S,
        )
        self._plain = self._transport.completions
        self.executor = Executor(
            placement=placement, pp_rank=rank, transport=self._transport, timeout_s=_TIMEOUT_S
        )

    def delay(self, delays_s: dict[int, float]) -> None:
        """Delays messages, by global rank of the sender. Call it while no message is on its way."""
        is_slow = any(delays_s.values())
        self._transport.completions = DelayedQueue(delays_s) if is_slow else self._plain

    def close(self) -> None:
        """Closes the transport; collective."""
        self._transport.close()


class DelayedQueue(CompletionQueue):
    """Hands over each message a while after it was sent; others are not held up by it.

    Args:
        delays_s: seconds, by global rank of the sender.
    """

    def __init__(self, delays_s: dict[int, float]) -> None:
        super().__init__()
        self._delays_s = delays_s
        self._held: list[tuple[float, int, Item | Exception]] = []
        self._count = 0
        self._changed = threading.Condition()

    def put(self, item: Item | Exception) -> None:
        """Adds an item, as :class:`CompletionQueue` does."""
        due_s = time.monotonic()
        if isinstance(item, Arrival):
            payload = item.take()
            due_s = max(due_s, payload[2].item() + self._delays_s.get(item.peer, 0.0))
            arrived_ns = int(due_s * 1e9)
            item = HeldArrival(item.label, item.peer, item.nbytes, lambda: payload, arrived_ns)
        with self._changed:
            self._count += 1
            heapq.heappush(self._held, (due_s, self._count, item))
            self._changed.notify()

    def poll(self) -> Item | None:
        """Returns the next item, if any, as :class:`CompletionQueue` does."""
        return self.wait(0.0)

    def wait(self, deadline_s: float) -> Item | None:
        """Waits for the next item, as :class:`CompletionQueue` does."""
        with self._changed:
            while True:
                now = time.monotonic()
                next_s = deadline_s
                if self._held:
                    if self._held[0][0] <= now:
                        return delivered(heapq.heappop(self._held)[2])
                    next_s = min(next_s, self._held[0][0])
                if deadline_s <= now:
                    return None
                self._changed.wait(next_s - now)


class OurRunner:
    """Runs one of our schedules or policies.

    Args:
        competitor: which.
        channels: executor of its placement.
        rank: this rank.
        num_ranks: ranks of the pipeline.
    """

    delays_in_transport = True

    def __init__(
        self, competitor: Competitor, channels: Channels, rank: int, num_ranks: int
    ) -> None:
        self.placement = competitor.placement(num_ranks)
        self._competitor = competitor
        self._channels = channels
        self._rank = self.position = rank
        self._policies: dict[int, Policy] = {}
        self._step: tuple[EmulatedStages, Policy, RankState] | None = None

    def prepare(self, work: RankWork, draws: Draws) -> None:
        """Prepares a step; not timed."""
        competitor, count = self._competitor, draws.num_microbatches
        ranks = self.placement.num_ranks
        if count not in self._policies:
            self._policies[count] = competitor.policies(ranks, count)[self._rank]
        state = RankState(
            placement=self.placement,
            rank=self._rank,
            num_microbatches=count,
            cap=competitor.cap_for(ranks, count),
            weight_pieces=competitor.weight_pieces,
        )
        split = competitor.weight_pieces > 0
        stages = EmulatedStages(work, self.placement, self._rank, split=split)
        self._channels.delay({peer: draws.delay_s(peer, self._rank) for peer in range(ranks)})
        self._step = stages, self._policies[count], state

    def run(self) -> None:
        """Runs the step."""
        assert self._step is not None
        self._channels.executor.run(*self._step)

    def finish(self) -> None:
        """Clean up after the step; not timed."""
        self._channels.executor.finish_step()
