"""Schedules and rules of this project on emulated stages, over its gloo transport."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from harness.sleeping_ranks import Channels, IdleStages
from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement

from .competitors import Competitor
from .scenarios import Draws
from .work import RankWork


class EmulatedStages(IdleStages):
    """Chunks whose actions are those of the emulated work.

    Args:
        work: Work of this rank in the step.
        placement: Placement of the stages.
        rank: Position of this rank in the pipeline.
        split: Whether backwards by weights are actions of their own.
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
        """Sleeps for the time of B, and of W if it is not split off."""
        stage = self._stages[chunk]
        result = self._work.backward(stage, gradient, microbatch, whole=not self._split)
        return result if stage else None

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Sleeps for one of the equal parts of W."""
        self._work.weights(self._stages[chunk], microbatch, 1 / pieces)


class TimedStep(NamedTuple):
    """Holds what was measured of a step.

    Attributes:
        seconds: Time of the step, the same on all ranks.
        peak: Most activations that a rank held at once.
        times: Times of this rank's actions.
    """

    seconds: float
    peak: float
    times: RankTimes


def timed_step(
    channels: Channels, work: RankWork, policy: Policy, state: RankState, unit: float = 1.0
) -> TimedStep:
    """Runs a step that begins on all ranks together. Collective.

    Args:
        channels: Executor and transport of this rank.
        work: Work of this rank in the step.
        policy: Policy of this rank.
        state: State of this rank at the start of the step.
        unit: Activations of a mean microbatch, in the unit of the result.
    """
    split = state.weight_pieces > 0
    stages = EmulatedStages(work, state.placement, state.rank, split=split)
    dist.barrier()
    start_s = time.monotonic()
    channels.executor.run(stages, policy, state)
    dist.barrier()
    seconds = time.monotonic() - start_s
    times = channels.executor.finish_step()
    work.check_complete()
    peak = torch.tensor(state.peak_in_flight * unit)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return TimedStep(seconds, float(peak), times)


class OurRunner:
    """Runs a schedule or rule of this project.

    Args:
        competitor: Competitor to run.
        channels: Executor and transport of the competitor's placement.
        rank: Position of this rank in the pipeline.
        num_ranks: Number of ranks of the pipeline.
    """

    delays_in_transport = True

    def __init__(
        self, competitor: Competitor, channels: Channels, rank: int, num_ranks: int
    ) -> None:
        self.placement = competitor.placement(num_ranks)
        self.position = rank
        self._competitor = competitor
        self._channels = channels
        self._policies: dict[int, Policy] = {}
        self._step: tuple[EmulatedStages, Policy, RankState] | None = None

    def prepare(self, work: RankWork, draws: Draws) -> None:
        """Prepares a step; not timed."""
        competitor, count = self._competitor, draws.num_microbatches
        ranks = self.placement.num_ranks
        if count not in self._policies:
            self._policies[count] = competitor.policies(ranks, count)[self.position]
        state = RankState(
            placement=self.placement,
            rank=self.position,
            num_microbatches=count,
            cap=competitor.cap_for(ranks, count),
            weight_pieces=competitor.weight_pieces,
        )
        split = competitor.weight_pieces > 0
        stages = EmulatedStages(work, self.placement, self.position, split=split)
        self._channels.delay({peer: draws.delay_s(peer, self.position) for peer in range(ranks)})
        self._step = stages, self._policies[count], state

    def run(self) -> None:
        """Runs the step."""
        assert self._step is not None
        self._channels.executor.run(*self._step)

    def finish(self) -> None:
        """Ends the step; not timed."""
        self._channels.executor.finish_step()
