"""The schedules of ``torch.distributed.pipelining``, unchanged, on emulated stages over gloo.

What to know of its runtime (torch 2.13) when reading its rows:

* On the first stage a split backward does nothing in the place of B and all of it in that of W. The
  schedules here place the two next to each other, so no time is lost by it.
* Each split backward searches the stage's autograd graph for what leads to weights. That is work of
  the host, some tenths of a millisecond here; a GPU would hide it where the host is ahead.
* 1F1B waits for a send together with the receive that goes with it. gloo ends a send when the peer
  has asked for the message, so a rank may wait for a peer's action without needing its result.
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

from .competitors import Competitor
from .modules import EmulatedChunk
from .scenarios import Draws
from .work import DTYPE, WIDTH, RankWork

_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


class TorchRunner:
    """Runs one of torch's schedules. Collective to make.

    Args:
        competitor: which.
        rank: this rank.
        num_ranks: ranks of the pipeline.
    """

    delays_in_transport = False

    def __init__(self, competitor: Competitor, rank: int, num_ranks: int) -> None:
        self.placement = competitor.placement(num_ranks)
        self._schedule_name = competitor.schedule
        self._group = dist.new_group(list(range(num_ranks)), backend="gloo")
        self._chunks = [
            EmulatedChunk(self.placement.stage_of(rank, chunk), self.placement.num_stages)
            for chunk in range(competitor.num_chunks)
        ]
        self._schedules: dict[int, Any] = {}
        self._count = 0
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._target: torch.Tensor | None = None

    def prepare(self, work: RankWork, draws: Draws) -> None:
        """Get ready for a step; not timed."""
        count = self._count = draws.num_microbatches
        if count not in self._schedules:
            self._schedules[count] = self._make(count)
        for chunk in self._chunks:
            chunk.work = work
            chunk.weight.grad = None
        like = torch.empty(1, WIDTH, dtype=DTYPE)
        if any(chunk.is_first for chunk in self._chunks):
            data = [RankWork.fresh(microbatch, like) for microbatch in range(count)]
            self._inputs = (torch.cat(data),)
        if any(chunk.is_last for chunk in self._chunks):
            self._target = torch.zeros(count, 1)

    def run(self) -> None:
        """Run the step."""
        self._schedules[self._count].step(*self._inputs, target=self._target, return_outputs=False)

    def finish(self) -> None:
        """Check the gradients of the weights; not timed."""
        for chunk in self._chunks:
            chunk.check_gradient(self._count)

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
            for chunk in self._chunks
        ]
        schedule = _SCHEDULES[self._schedule_name]
        last = self._chunks[-1]
        return schedule(
            stages[0] if schedule is Schedule1F1B else stages,
            n_microbatches=count,
            loss_fn=lambda output, target: last.loss(output),
            scale_grads=False,
        )
