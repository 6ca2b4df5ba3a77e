"""The schedules of ``torch.distributed.pipelining``, unchanged, on megatron-core's GPT chunks.

The chunks, their wrapper for data parallelism, the loss and what follows the last backward are
those that our executor runs. What to know of torch's runtime (2.13) when reading its rows:

* It splits a backward by autograd's graph: B asks for the gradients of the inputs, W starts again
  at the functions that inputs and weights meet in. A linear layer of megatron-core is one such
  function and computes both of its gradients whenever it is called, so that a split backward does
  both products twice: five with the forward's instead of three. On the first stage B does nothing
  and W is the whole backward.
* A stage may bring its own split instead, which is what "our W" means: the layers leave their
  weight gradients to our store in B and W runs it. Order and messages are torch's.
* Gradients of a W by the graph go to ``grad`` and pass by the hook that adds to ``main_grad``. They
  are added after the step: as many additions as there are microbatches, like everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.gpt.forward import LOSS_NAME, Microbatch, masked_loss
from megatron.adaptive.gpt.setup import Run, payload_shape

_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}


class StageModule(torch.nn.Module):
    """A GPT chunk called as torch's stages call a module.

    Args:
        chunk: the chunk in its data-parallel wrapper.
        first: whether it takes tokens.
    """

    def __init__(self, chunk: torch.nn.Module, *, first: bool) -> None:
        super().__init__()
        self.chunk = chunk
        self._first = first
        # A bound method, not the module: its parameters must not be listed twice.
        self._set_input: Callable[[list[torch.Tensor]], None] = unwrap_model(chunk).set_input_tensor

    def forward(
        self,
        given: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs a microbatch.

        Args:
            given: tokens ``[b, s] int64`` on the first stage, elsewhere ``[s, b, h]``.
            position_ids, labels: ``[b, s] int64`` on a rank that has data.

        Returns:
            ``[s, b, h]``, on the last stage the losses ``[b, s]``.
        """
        if not self._first:
            self._set_input([given])
        tokens = given if self._first else None
        output: torch.Tensor = self.chunk(tokens, position_ids, None, labels=labels)
        return output


class StoreStage(PipelineStage):
    """A stage whose layers leave weight gradients to a store.

    Args:
        store: of the chunk, attached to its layers.
        arguments, options: of ``PipelineStage``.
    """

    def __init__(self, store: WeightGradientStore, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "dw_builder": self._put_off})
        self._store = store
        self._microbatch = -1

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> None:
        """Runs a backward pass by inputs (see ``PipelineStage``)."""
        self._microbatch = bwd_chunk_id
        with self._store.collect(bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *arguments, **options)

    def _put_off(self) -> Callable[[], None]:
        microbatch = self._microbatch
        return lambda: self._store.run(microbatch, 0, 1)


class TorchRunner:
    """Runs one of torch's schedules on the chunks of a run. Collective to make.

    Args:
        run: the built run.
        schedule: ``1f1b``, ``interleaved`` or ``zb-v``.
        num_microbatches: of every step.
        stores: one per chunk, attached to its layers, to split backwards by them.
    """

    def __init__(
        self,
        run: Run,
        schedule: str,
        num_microbatches: int,
        stores: Sequence[WeightGradientStore] = (),
    ) -> None:
        self._run = run
        self._num_microbatches = num_microbatches
        self._stores = stores
        self._device = run.job.accelerator.device
        rank = parallel_state.get_pipeline_model_parallel_rank()
        ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        self._group = dist.new_group(ranks, backend=run.job.accelerator.backend)
        numbers = [run.placement.stage_of(rank, chunk) for chunk in range(len(run.chunks))]
        self._first = 0 in numbers
        self._last = run.placement.num_stages - 1 in numbers
        stages = [self._make_stage(chunk, stage) for chunk, stage in enumerate(numbers)]
        kind = _SCHEDULES[schedule]
        self._schedule = kind(
            stages[0] if kind is Schedule1F1B else stages,
            n_microbatches=num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def __call__(self, microbatches: Sequence[Microbatch] | None) -> list[dict[str, torch.Tensor]]:
        """Runs the forward and backward passes of a step, up to complete gradients.

        Args:
            microbatches: the step's, ``None`` on a rank that needs no data.

        Returns:
            The loss of each microbatch under its name, on the last stage; elsewhere nothing.
        """
        for store in self._stores:
            store.clear()
            store.active = True
        losses: list[torch.Tensor] = []
        tokens, target, options = self._batch(microbatches)
        self._schedule.step(*tokens, target=target, losses=losses, return_outputs=False, **options)
        for store in self._stores:
            store.active = False
        for chunk in self._run.chunks:
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
                    parameter.grad = None
        finalize = self._run.core.finalize_model_grads_func
        assert finalize is not None
        finalize(self._run.chunks, None)
        return [{LOSS_NAME: loss.detach() * self._num_microbatches} for loss in losses]

    def _batch(
        self, microbatches: Sequence[Microbatch] | None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None, dict[str, torch.Tensor]]:
        """Joins microbatches, which torch splits again: input, target and keyword inputs."""
        if microbatches is None:
            return (), None, {}
        to_device = self._run.job.accelerator.to_device

        def join(key: str) -> torch.Tensor:
            return to_device(torch.cat([microbatch[key] for microbatch in microbatches]))

        tokens = (join("tokens"),) if self._first else ()
        target = join("loss_mask") if self._last else None
        return tokens, target, {"position_ids": join("position_ids"), "labels": join("labels")}

    def _loss(self, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return masked_loss(mask, losses)[0] / self._num_microbatches

    def _make_stage(self, chunk: int, stage: int) -> PipelineStage:
        length, size, _ = shape = payload_shape(self._run.job.config)
        first, last = stage == 0, stage == self._run.placement.num_stages - 1
        device, dtype = self._device, self._run.core.pipeline_dtype
        tokens = torch.zeros(size, length, dtype=torch.int64, device=device)
        between = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        losses = torch.zeros(size, length, device=device, requires_grad=True)
        module = StageModule(self._run.chunks[chunk], first=first)
        options: dict[str, Any] = {
            "input_args": tokens if first else between,
            "output_args": losses if last else between,
            "group": self._group,
        }
        number = (stage, self._run.placement.num_stages)
        if self._stores:
            return StoreStage(self._stores[chunk], module, *number, device, **options)
        return PipelineStage(module, *number, device, **options)
