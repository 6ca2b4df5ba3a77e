"""Distributes each step's microbatches over the data-parallel replicas of a run.

Before a step, every rank computes the same assignment (``schedule/microbatch_assignment.py``) from
the microbatches' lengths, which all ranks know, and from measured times. To obtain these times,
three sums are gathered from each rank after each step. Each adds up the times of the rank's
actions: unweighted, weighted by the microbatch's number of tokens, or weighted by the sum of its
documents' squared lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive.config.sequence_slices import Cut
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.engine.schedule_record import Shares
from megatron.adaptive.gpt.setup import Run
from megatron.adaptive.schedule.action import place_of
from megatron.adaptive.schedule.document_rows import costliest_replica, make_dealer
from megatron.adaptive.schedule.microbatch_assignment import EQUAL, Dealt, Size


def rows_with_tokens(config: TrainerConfig, tokens: int, lengths: Sequence[int]) -> list[Cut]:
    """Returns the microbatches of the replica with the most work, for slices of ``tokens`` tokens.

    Args:
        config: Settings of a run with ``--slice-tokens auto``.
        tokens: Number of tokens of a slice.
        lengths: Number of tokens of each document in the step, over all replicas.
    """
    schedule = replace(config.schedule, chosen_tokens=tokens)
    return costliest_replica(replace(config, schedule=schedule), lengths)


class ReplicaDealing:
    """Distributes the microbatches of each step over replicas, and gathers the step's times.

    Every rank creates one object of this class. The constructor is collective over all ranks.

    Args:
        run: Run whose microbatches are assigned.
        message: Function that writes a line to the log. It is called when the estimated speeds of
            the replicas change.
    """

    def __init__(self, run: Run, message: Callable[[str], None]) -> None:
        parallel = run.job.config.parallel
        self._run = run
        self._message = message
        self._replica = parallel_state.get_data_parallel_rank()
        self._replicas = parallel.data_parallel_size
        self._ranks = parallel.pipeline_model_parallel_size
        self._dealer = make_dealer(run.job.config)
        is_first = (
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )
        position = (self._replica, parallel_state.get_pipeline_model_parallel_rank())
        positions = run.job.gather(position if is_first else None)
        self._measured = [
            [positions.index((replica, rank)) for rank in range(self._ranks)]
            for replica in range(self._replicas)
        ]
        self._own: list[Size] = []
        self._gathered: list[torch.Tensor] = []
        self._work: Any = None
        self._steps = 0
        self.shares: Shares = ()

    def take(self, loader: Any, num_microbatches: int, iteration: int) -> tuple[Any, Dealt]:
        """Distributes the microbatches of the next step, and returns this rank's microbatches.

        Args:
            loader: Data loader, or ``None`` on a rank that does not need data.
            num_microbatches: Mean number of microbatches per replica.
            iteration: Index of the iteration, which identifies the recorded assignment in a replay.

        Returns:
            Data of this rank's microbatches (``None`` without a loader), and the indices of these
            microbatches among all microbatches of the step.
        """
        deal = partial(self._deal, iteration)
        microbatches = None
        if loader is None:
            deal([EQUAL] * (num_microbatches * self._replicas))
        else:
            microbatches = loader.step(num_microbatches, deal)
        return microbatches, Dealt(self.shares[self._replica], sum(map(len, self.shares)))

    def after_step(self, times: RankTimes) -> None:
        """Starts to gather the times of a step on all ranks. :meth:`finish` waits for the result.

        Args:
            times: Durations of this rank's actions in the step.
        """
        self._steps += 1
        # The first step of a process includes warm-up, so its times are too long. Times are not
        # needed if a recorded assignment is replayed, or if there is only one replica.
        if self._steps == 1 or self._run.replay is not None or self._replicas == 1:
            return
        sums = [0.0, 0.0, 0.0]
        counts = 1 if self._run.slices is None else self._run.slices.count
        for action, nanoseconds in times.actions:
            tokens, squares = self._own[place_of(action.microbatch, counts).microbatch]
            for n, factor in enumerate((1.0, tokens, squares)):
                sums[n] += factor * nanoseconds / 1e9
        local = torch.tensor(sums, dtype=torch.float64)
        self._gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        self._work = dist.all_gather(
            self._gathered, local, group=self._run.job.control_group, async_op=True
        )

    def finish(self) -> None:
        """Waits for times that are still being gathered, and updates the replicas' speeds.

        Call this method before shutting down the run, which destroys the process groups.
        """
        work, self._work = self._work, None
        if work is None:
            return
        work.wait()
        sums: list[Any] = [tuple(of_rank.tolist()) for of_rank in self._gathered]
        text = self._dealer.add([[sums[rank] for rank in replica] for replica in self._measured])
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
