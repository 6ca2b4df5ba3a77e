"""``--pipeline-schedule auto``: measures the first steps and takes what is fastest in simulation.

Steps 2 to 4 are measured (the first one warms up); before step 5 all ranks switch together, all
data-parallel replicas to the same choice. Losses and gradients do not depend on the order of work,
so that the switch is not seen in them.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.pipeline.calibrate import Sample, measure_link, profile_of
from megatron.adaptive.pipeline.executor import StepTimes
from megatron.adaptive.pipeline.forward_backward import ForwardBackward
from megatron.adaptive.schedule.auto import Choice, choose
from megatron.adaptive.schedule.workload import Link
from megatron.adaptive.training.setup import Run, payload_shape

__all__ = ["Tuner", "make_tuner"]

FIRST, LAST = 2, 4
"""Steps that are measured, counted from 1 in this process."""
_MEMORY_KEPT_FREE = 0.1
_NO_STEP = -1


def make_tuner(run: Run) -> Tuner | None:
    """Return what watches a run whose schedule is ``auto``, ``None`` for others."""
    if run.job.config.schedule.pipeline_schedule != "auto":
        return None
    return Tuner(run)


class Tuner:
    """Watches the steps of a run and makes the choice; every rank has one.

    Args:
        run: the built run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps = 0
        self._sample = Sample(pp_rank=parallel_state.get_pipeline_model_parallel_rank())

    def after_step(self, times: StepTimes, num_microbatches: int) -> str | None:
        """Take note of a training step; after the last measured one, switch. Collective then.

        Args:
            times: of the step.
            num_microbatches: of the step.

        Returns:
            What was chosen and why, on all ranks, after that step; ``None`` after others.

        Raises:
            TransportError: a neighbour is gone or silent.
        """
        self._steps += 1
        if not FIRST <= self._steps <= LAST:
            return None
        self._sample.add(times.actions)
        if self._steps < LAST:
            return None
        self._sample.most = self._most()
        self._sample.links = self._links()
        samples: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(samples, self._sample, group=self._run.job.control_group)
        answer: list[Any] = [None]
        if dist.get_rank() == 0:
            answer = [self._choose(samples, num_microbatches)]
        dist.broadcast_object_list(answer, src=0, group=self._run.job.control_group)
        best, reason = answer[0]
        if best is not None:
            assert isinstance(self._run.forward_backward, ForwardBackward)
            self._run.forward_backward.use(best)
        text: str = reason
        return text

    def _choose(self, samples: list[Sample], num_microbatches: int) -> tuple[Any, str]:
        run = self._run
        cap = run.job.config.schedule.activation_cap
        most = min(sample.most for sample in samples)
        try:
            choice: Choice = choose(
                profile_of(samples, run.placement),
                present=run.placement,
                num_microbatches=num_microbatches,
                placements=(run.placement.kind,),
                most=most if cap is None else min(most, cap),
                splittable=run.job.config.splits_backward,
                pieces=run.job.config.schedule.weight_pieces,
            )
        except ScheduleError as error:
            return None, f"auto keeps adaptive: {error}"
        return choice.best, choice.reason

    def _most(self) -> float:
        """Activations that this rank's memory allows, in whole-rank microbatches."""
        forward_backward = self._run.forward_backward
        assert isinstance(forward_backward, ForwardBackward)
        per_microbatch = max(1, forward_backward.activation_bytes())
        if self._run.job.accelerator.is_cuda:
            free, _ = torch.cuda.mem_get_info()
            free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        else:
            ranks_here = max(1, self._run.job.environment.local_world_size)
            free = psutil.virtual_memory().available // ranks_here
        return max(1.0, free * (1 - _MEMORY_KEPT_FREE) / per_microbatch)

    def _links(self) -> dict[int, Link]:
        """Measure the links to the neighbours, one pair of the pipeline after the other."""
        run = self._run
        transport = None if run.wiring is None else run.wiring.transport
        if transport is None:
            return {}
        pp_ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        me = self._sample.pp_rank
        config = run.job.config
        shape = payload_shape(config) or (1,)
        payload = torch.zeros(
            shape, dtype=run.core.pipeline_dtype, device=run.job.accelerator.device
        )
        found = {}
        for low, high in run.placement.neighbours():
            dist.barrier(group=run.job.control_group)
            if me in (low, high):
                other = high if me == low else low
                found[other] = measure_link(
                    transport,
                    pp_ranks[other],
                    leads=me == low,
                    payload=payload,
                    step=_NO_STEP,
                    timeout_s=config.schedule.pipeline_timeout_s,
                )
        dist.barrier(group=run.job.control_group)
        return found
