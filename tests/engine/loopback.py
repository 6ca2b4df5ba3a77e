"""Runs the executors of all pipeline ranks in threads of one process, connected by queues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.trace_format import TraceHeader
from megatron.adaptive.transport.interface import Arrival, CompletionQueue, HeldArrival, Label

WATCHDOG_S = 30.0
# These are the sizes of the tensors that :class:`Counting` sends.
FORWARD_BYTES, BACKWARD_BYTES = 8, 16
ACTIVATION_BYTES, RETAINED_BYTES = 100, 30
F, B, W = ActionKind.F, ActionKind.B, ActionKind.W


class TickingClock(CpuClock):
    """Simulates the clock of a device that needs one second between two consecutive marks."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def resolve_ns(self, mark: int) -> int:
        return 1_000_000_000 * mark


class Loopback:
    """Transport between executors in one process. Sending adds a message to the receiver's queue.

    Args:
        me: Global rank that sends with this transport.
        network: Queue of received messages for each rank. Messages to ranks without a queue are
            dropped.
    """

    name = "loopback"

    def __init__(self, me: int, network: dict[int, CompletionQueue]) -> None:
        self.completions = network[me]
        self.sent: list[Label] = []
        self._me = me
        self._network = network

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        self.sent.append(label)
        if peer in self._network:
            self._network[peer].put(arrival(label, self._me, tensor.detach().clone()))

    def reserve(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def describe_links(self) -> dict[int, dict[str, Any]]:
        return {peer: {"kind": self.name} for peer in self._network if peer != self._me}

    def flush(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


def arrival(label: Label, peer: int, tensor: torch.Tensor) -> Arrival:
    return HeldArrival(label, peer, tensor.nbytes, lambda: tensor)


class Writing:
    """Simulates stages that compute nothing, and records the calls of their methods."""

    def __init__(self, when_run: Callable[[Action], None] = lambda action: None) -> None:
        self.calls: list[str] = []
        self._when_run = when_run

    def forward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        return self._run(Action(F, chunk, microbatch))

    def release(self, chunk: int, microbatch: int) -> None:
        self.calls.append(f"release{chunk}-{microbatch}")

    def activation_bytes(self, chunk: int, microbatch: int) -> int:
        return ACTIVATION_BYTES

    def retained_bytes(self, chunk: int, microbatch: int) -> int:
        return RETAINED_BYTES

    def backward(self, chunk: int, microbatch: int, gradient: Any) -> torch.Tensor | None:
        return self._run(Action(B, chunk, microbatch))

    def after_backward(self, chunk: int, microbatch: int) -> None:
        self.calls.append(f"after{chunk}-{microbatch}")

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        assert 0 <= piece < pieces
        self._run(Action(W, chunk, microbatch, piece))

    @property
    def actions(self) -> list[str]:
        return [call for call in self.calls if not call.startswith(("release", "after"))]

    def _run(self, action: Action) -> torch.Tensor:
        self.calls.append(str(action))
        self._when_run(action)
        return torch.zeros(1)


class Counting(Writing):
    """Simulates stages whose tensors count how many stages they have passed.

    Each tensor is ``[microbatch, number of stages passed]``. Forward passes send float32 tensors
    and backward passes send float64 tensors, so that the two kinds cannot be confused.
    """

    def __init__(
        self,
        placement: Placement,
        pp_rank: int,
        when_run: Callable[[Action], None] = lambda action: None,
    ) -> None:
        super().__init__(when_run)
        self.last_gradients: list[list[float]] = []
        self._placement = placement
        self._pp_rank = pp_rank

    def whole(self, microbatch: int) -> int:
        """Returns the index of ``microbatch`` in the step, which is the value stored in tensors."""
        return microbatch

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        self._run(Action(F, chunk, microbatch))
        stage = self._placement.stage_of(self._pp_rank, chunk)
        if received is None:
            assert stage == 0
            received = torch.tensor([self.whole(microbatch), 0], dtype=torch.float32)
        assert received.tolist() == [self.whole(microbatch), stage]
        return received + torch.tensor([0.0, 1.0])

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        self._run(Action(B, chunk, microbatch))
        stage = self._placement.stage_of(self._pp_rank, chunk)
        after = self._placement.num_stages - 1 - stage
        if gradient is None:
            assert after == 0
            gradient = torch.tensor([self.whole(microbatch), 0], dtype=torch.float64)
        assert gradient.tolist() == [self.whole(microbatch), after]
        if stage == 0:
            self.last_gradients.append(gradient.tolist())
            return None
        return gradient + torch.tensor([0.0, 1.0], dtype=torch.float64)


def each_in_its_thread(run: Callable[[int], None], count: int) -> None:
    """Calls ``run`` with each of ``count`` ranks in a separate thread. Raises the first error."""
    errors: list[BaseException] = []

    def watched(rank: int) -> None:
        try:
            run(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=watched, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WATCHDOG_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


class Ranks:
    """All ranks of a pipeline in this process. Each rank has an executor and a transport."""

    def __init__(
        self,
        placement: Placement,
        recorders: Sequence[Recorder | None] | None = None,
        timeout_s: float = WATCHDOG_S,
        when_run: Callable[[int, Action], None] = lambda rank, action: None,
    ) -> None:
        self.placement = placement
        self.when_run = when_run
        count = placement.num_ranks
        # The global ranks differ from the pipeline ranks, as in jobs with several process groups.
        network = {10 + rank: CompletionQueue() for rank in range(count)}
        self.transports = [Loopback(10 + rank, network) for rank in range(count)]
        self.executors = [
            make_executor(
                self,
                pp_rank=rank,
                recorder=recorders[rank] if recorders else None,
                timeout_s=timeout_s,
            )
            for rank in range(count)
        ]

    def state(self, rank: int, microbatches: int, **options: Any) -> RankState:
        return RankState(
            placement=self.placement, rank=rank, num_microbatches=microbatches, **options
        )

    def step(
        self, policies: Sequence[Policy], microbatches: int, **options: Any
    ) -> tuple[list[Counting], list[RankState]]:
        """Runs one step on all ranks, each in a separate thread.

        The step has ``microbatches`` microbatches. ``policies`` contains the policy of each rank,
        and ``options`` contains arguments of :class:`RankState`. Returns the stages and the final
        states of the ranks.
        """
        count = self.placement.num_ranks
        stages = [
            Counting(self.placement, rank, partial(self.when_run, rank)) for rank in range(count)
        ]
        states = [self.state(rank, microbatches, **options) for rank in range(count)]

        def run(rank: int) -> None:
            self.executors[rank].run(stages[rank], policies[rank], states[rank])

        each_in_its_thread(run, count)
        return stages, states


def recorder_of(folder: Path, rank: int, placement: Placement, microbatches: int) -> Recorder:
    """Returns a recorder that writes the trace of ``rank`` to ``folder``.

    The trace is that of a job with a single pipeline. Its header contains ``placement`` and the
    number of ``microbatches``.
    """
    header = TraceHeader(
        run="run-1",
        rank=rank,
        world_size=placement.num_ranks,
        pp_rank=rank,
        num_ranks=placement.num_ranks,
        num_chunks=placement.num_chunks,
        num_microbatches=microbatches,
        schedule="1f1b",
    )
    return Recorder(folder, header)


class Picks:
    """Policy that calls ``pick`` with the state of the rank to choose the next action."""

    name = "made-up"

    def __init__(self, pick: Callable[[RankState], Action | None]) -> None:
        self.pick = pick


def ready_first(state: RankState) -> Action | None:
    return next(iter(state.ready()), None)


def last_rank(timeout_s: float = WATCHDOG_S) -> tuple[Ranks, CompletionQueue]:
    """Returns a pipeline with two ranks, and the queue of messages that rank 1 receives.

    Executors wait for an input for at most ``timeout_s`` seconds.
    """
    pipeline = Ranks(Placement(num_ranks=2, num_chunks=1), timeout_s=timeout_s)
    return pipeline, pipeline.transports[1].completions


def forward_of(step: int, microbatch: int) -> Arrival:
    return arrival(
        Label(step, Action(F, 0, microbatch)), 10, torch.tensor([microbatch, 1], dtype=torch.float)
    )


def make_executor(pipeline: Ranks, *, pp_rank: int = 1, **options: Any) -> Executor:
    """Returns a new executor for pipeline rank ``pp_rank`` of ``pipeline``.

    ``options`` contains other arguments of :class:`Executor`.
    """
    alone = pipeline.placement.num_ranks == 1
    settings: dict[str, Any] = {"timeout_s": WATCHDOG_S, **options}
    return Executor(
        placement=pipeline.placement,
        pp_rank=pp_rank,
        route=lambda position, microbatch: (10 + position, microbatch),
        transport=None if alone else pipeline.transports[pp_rank],
        **settings,
    )
