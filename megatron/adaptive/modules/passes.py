"""The forwards, and backwards, of a batch over the stages of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.adaptive.engine.executor import ActivationMeter, Executor
from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.modules.batch import BatchShape
from megatron.adaptive.modules.orders import Orders
from megatron.adaptive.modules.program import ProgramStages, RandomKey, StageProgram

__all__ = ["Passes"]


@dataclass(kw_only=True)
class Passes:
    """Runs batches. Collective over the processes of a pipeline.

    Attributes:
        programs, eval_programs: of this process's stages, in training and in evaluation.
        shape: of batches.
        orders: of the work.
        executor: that runs it.
        random: key of all that is random within the model.
        held: parameters and buffers of this process.
        device: where this process computes.
        stores: of weight gradients by stage, ``None`` where backwards are whole.
    """

    programs: Sequence[StageProgram]
    eval_programs: Sequence[StageProgram]
    shape: BatchShape
    orders: Orders
    executor: Executor
    random: RandomKey
    held: Mapping[str, torch.Tensor]
    device: torch.device
    stores: Sequence[WeightGradientStore] | None

    def __post_init__(self) -> None:
        self._meter = ActivationMeter()

    def run(
        self, batch: Mapping[str, torch.Tensor], count: int, *, step: int, scale: float | None
    ) -> list[torch.Tensor]:
        """Run a batch; returns the losses of its microbatches, of the last stage alone.

        Args:
            batch: of this replica.
            count: microbatches in it.
            step: that random numbers follow from.
            scale: what the loss is multiplied with, ``None`` for forwards in evaluation alone.
        """
        forward_only = scale is None
        programs = self.eval_programs if forward_only else self.programs
        names = {name for program in programs for name in program.plan.inputs}
        self.random.step, self.random.count = step, count
        stages = ProgramStages(
            programs=programs,
            microbatches=[
                self.shape.microbatch(batch, number, self.device, names) for number in range(count)
            ],
            random=self.random,
            held=self.held,
            device=self.device,
            meter=self._meter,
            stores=self.stores,
            scale=1.0 if scale is None else scale,
            forward_only=forward_only,
        )
        before = self.random.generator.get_state()
        try:
            with torch.set_grad_enabled(not forward_only):
                self.executor.run(
                    stages,
                    self.orders.policy(count, forward_only=forward_only),
                    self.orders.state(count, forward_only=forward_only),
                )
        finally:
            stages.finish()
            self.random.generator.set_state(before)
        return stages.losses
