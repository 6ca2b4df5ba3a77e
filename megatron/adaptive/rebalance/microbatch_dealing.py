"""Deals the microbatches of a run's steps to its data-parallel replicas.

Before a step every rank deals it for itself (``schedule/microbatch_assignment.py``), from lengths
that all know and from times that all gathered: three numbers a rank, sent behind the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.engine.schedule_record import Shares
from megatron.adaptive.gpt.setup import Run
from megatron.adaptive.schedule.microbatch_assignment import EQUAL, Dealer, Dealt, Size

_TOKEN_PER_PAIR = 12  # hidden sizes of pairs of tokens cost as much as a token, in multiplications


class ReplicaDealing:
    """Deals the steps of a run and gathers what they took; every rank has one.

    Made by all ranks together.

    Args:
        run: the run.
        message: receives a line where what is assumed of the replicas changes.
    """

    def __init__(self, run: Run, message: Callable[[str], None]) -> None:
        config = run.job.config
        parallel = config.parallel
        self._run, self._message = run, message
        self._replica = parallel_state.get_data_parallel_rank()
        self._replicas, self._ranks = (
            parallel.data_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
        self._dealer = Dealer(
            config.balance,
            replicas=self._replicas,
            ranks=self._ranks,
            group=config.microbatch_group,
            least=config.least_microbatches,
            pair=1 / (_TOKEN_PER_PAIR * config.model.hidden_size),
        )
        is_first = (
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )
        place = (self._replica, parallel_state.get_pipeline_model_parallel_rank())
        places = run.job.gather(place if is_first else None)
        self._measured = [
            [places.index((replica, rank)) for rank in range(self._ranks)]
            for replica in range(self._replicas)
        ]
        self._own: list[Size] = []
        self._gathered: list[torch.Tensor] = []
        self._work: Any = None
        self._steps = 0
        self.shares: Shares = ()

    def take(self, loader: Any, num_microbatches: int, iteration: int) -> tuple[Any, Dealt]:
        """Takes this rank's part of the next step.

        Args:
            loader: of microbatches, ``None`` on a rank that needs no data.
            num_microbatches: of each replica, on the mean.
            iteration: the step.

        Returns:
            The microbatches, ``None`` without a loader, and which they are.
        """
        deal = partial(self._deal, iteration)
        microbatches = None
        if loader is None:
            deal([EQUAL] * (num_microbatches * self._replicas))
        else:
            microbatches = loader.step(num_microbatches, deal)
        return microbatches, Dealt(self.shares[self._replica], sum(map(len, self.shares)))

    def after_step(self, times: RankTimes) -> None:
        """Sends what the step took to all ranks; nobody waits for it before the next is dealt."""
        self._steps += 1
        # The first step of a process takes longer. A record says how it goes on, and a replica
        # alone has nothing to compare.
        if self._steps == 1 or self._run.replay is not None or self._replicas == 1:
            return
        sums = [0.0, 0.0, 0.0]
        for action, nanoseconds in times.actions:
            tokens, squares = self._own[action.microbatch]
            for n, factor in enumerate((1.0, tokens, squares)):
                sums[n] += factor * nanoseconds / 1e9
        mine = torch.tensor(sums, dtype=torch.float64)
        self._gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        self._work = dist.all_gather(
            self._gathered, mine, group=self._run.job.control_group, async_op=True
        )

    def finish(self) -> None:
        """Waits for the numbers that are on their way; call it before the run is taken down."""
        work, self._work = self._work, None
        if work is None:
            return
        work.wait()
        found: list[Any] = [tuple(one.tolist()) for one in self._gathered]
        text = self._dealer.add([[found[rank] for rank in of] for of in self._measured])
        if text is not None:
            self._message(f"  {text}")

    def _deal(self, iteration: int, sizes: Sequence[Size]) -> Shares:
        self.finish()
        if self._run.replay is not None:
            self.shares = self._run.replay.record.dealt(iteration, len(sizes))
        else:
            self.shares = self._dealer.deal(sizes)
        self._own = [sizes[number] for number in self.shares[self._replica]]
        return self.shares
