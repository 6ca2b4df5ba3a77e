"""Runs schedules and rules of this project on emulated stages, over the gloo transport."""

from __future__ import annotations

from harness.emulated_work import EmulatedStages, RankWork
from harness.sleeping_ranks import Channels
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.rank_state import RankState

from .competitors import Competitor
from .scenarios import Draws


class OurRunner:
    """Runs a schedule or a rule of this project.

    Args:
        competitor: Competitor to run.
        channels: Executor and transport for the competitor's placement.
        rank: Pipeline rank of this process.
        num_ranks: Number of ranks in the pipeline.
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
        """Prepares a step with the durations ``draws``. This call is not timed."""
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
        """Runs the prepared step. Only this call is timed."""
        assert self._step is not None
        self._channels.executor.run(*self._step)

    def finish(self) -> None:
        """Ends the step. This call is not timed."""
        self._channels.executor.finish_step()
