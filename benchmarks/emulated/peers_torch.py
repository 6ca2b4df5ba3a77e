"""The schedules of ``torch.distributed.pipelining``, unchanged, on emulated stages over gloo.

Facts about its runtime (torch 2.13) that explain its rows:

* On the first stage a split backward does nothing at B and everything at W. These schedules run the
  two one after the other, so no time is lost.
* Each split backward searches the stage's autograd graph for paths to weights. This takes the host
  some tenths of a millisecond here; on a GPU the host would usually be ahead.
* 1F1B waits for a send together with its receive. gloo ends a send when the peer asks for the
  message, so a rank may wait for an action of a peer whose result it does not need.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from harness.sleeping_ranks import DTYPE, WIDTH

from .competitors import Competitor
from .modules import PeerRunner
from .scenarios import Draws
from .work import RankWork

_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


class TorchRunner(PeerRunner):
    """Runs one of torch's schedules; see ``PeerRunner``."""

    def __init__(self, competitor: Competitor, rank: int, num_ranks: int) -> None:
        super().__init__(competitor, rank, num_ranks)
        self._schedule_name = competitor.schedule
        self._group = dist.new_group(list(range(num_ranks)), backend="gloo")
        self._schedules: dict[int, Any] = {}
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._target: torch.Tensor | None = None

    def prepare(self, work: RankWork, draws: Draws) -> None:
        super().prepare(work, draws)
        count = self.num_microbatches
        if count not in self._schedules:
            self._schedules[count] = self._make(count)
        if any(chunk.is_first for chunk in self.chunks):
            self._inputs = (torch.cat(self.inputs((1, WIDTH))),)
        if any(chunk.is_last for chunk in self.chunks):
            self._target = torch.zeros(count, 1)

    def run(self) -> None:
        """Runs the step."""
        schedule = self._schedules[self.num_microbatches]
        schedule.step(*self._inputs, target=self._target, return_outputs=False)

    def _make(self, count: int) -> Any:
        stages = [
            PipelineStage(
                chunk,
                chunk.stage,
                self.placement.num_stages,
                torch.device("cpu"),
                input_args=torch.zeros(1, WIDTH, dtype=DTYPE, requires_grad=not chunk.is_first),
                output_args=torch.zeros(1, WIDTH, dtype=DTYPE, requires_grad=True),
                group=self._group,
            )
            for chunk in self.chunks
        ]
        schedule = _SCHEDULES[self._schedule_name]
        last = self.chunks[-1]
        return schedule(
            stages[0] if schedule is Schedule1F1B else stages,
            n_microbatches=count,
            loss_fn=lambda output, target: last.loss(output),
            scale_grads=False,
        )
