"""Runs unchanged schedules of ``torch.distributed.pipelining`` on GPT chunks or emulated stages.

On GPT chunks, the data-parallel wrapper, the loss and the work after the last backward pass are the
same as in this project's executor. The following facts about torch's runtime (2.13) explain its
results:

* Backward passes are split along autograd's graph: B computes the gradients of the inputs, and W
  restarts at the functions that have both inputs and weights. A linear layer of megatron-core is
  one such function, and computes both of its gradients in each call. A split backward pass
  therefore computes both matmuls twice. Together with the forward pass, this makes five matmuls
  instead of three.
* On the first stage, a split backward pass does nothing in B and everything in W. These schedules
  run W immediately after B on that stage, so no time is lost.
* Each split backward pass searches the stage's autograd graph for paths to weights. On a CPU, this
  takes some tenths of a millisecond; on a GPU, the search usually overlaps with GPU work.
* 1F1B waits for a send together with its receive. gloo completes a send when the peer requests the
  message, so a rank may wait for an action of a peer although it does not need the result.
* A stage may split its backward pass itself, as in the rows with "our W". In B, the layers put
  their weight gradients into this project's store, and W computes them. The order and the messages
  are those of torch.
* W adds gradients along the graph to ``grad``, without the hook that adds them to ``main_grad``.
  They are added to ``main_grad`` after the step.
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
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.emulated.competitors import Competitor
from benchmarks.emulated.modules import PeerRunner
from benchmarks.emulated.scenarios import Draws
from harness.emulated_work import RankWork
from harness.sleeping_ranks import DTYPE, WIDTH
from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.gpt.forward import LOSS_NAME, Microbatch, masked_loss
from megatron.adaptive.gpt.setup import Run, payload_shape

SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


def make_schedule(
    name: str, stages: list[PipelineStage], num_microbatches: int, loss: Callable[..., Any]
) -> Any:
    """Returns torch's schedule ``name`` for ``stages``, the stages of this rank.

    A step has ``num_microbatches`` microbatches. ``loss`` is a function that computes the loss of a
    microbatch.
    """
    kind = SCHEDULES[name]
    return kind(
        stages[0] if kind is Schedule1F1B else stages,
        n_microbatches=num_microbatches,
        loss_fn=loss,
        scale_grads=False,
    )


class EmulatedTorchRunner(PeerRunner):
    """Runs a schedule of torch on emulated stages. See ``PeerRunner`` for the arguments."""

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
        """Runs the prepared step. Only this call is timed."""
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
        last = self.chunks[-1]
        return make_schedule(
            self._schedule_name, stages, count, lambda output, target: last.loss(output)
        )


class StageModule(torch.nn.Module):
    """Wraps a GPT chunk so that a stage of torch can call it.

    Args:
        chunk: Model chunk in its data-parallel wrapper.
        first: Whether the chunk is the first stage, whose inputs are tokens.
    """

    def __init__(self, chunk: torch.nn.Module, *, first: bool) -> None:
        super().__init__()
        self.chunk = chunk
        self._first = first
        # Store a bound method. If the module were an attribute, its parameters would be listed
        # twice.
        self._set_input: Callable[[list[torch.Tensor]], None] = unwrap_model(chunk).set_input_tensor

    def forward(
        self,
        received: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the forward pass of the chunk on a microbatch.

        Args:
            received: Tokens ``[b, s] int64`` on the first stage, otherwise activations ``[s, b,
                h]``.
            position_ids: Positions of the tokens, ``[b, s] int64``, if this rank gets data.
            labels: Next tokens, ``[b, s] int64``, if this rank gets data.

        Returns:
            Activations ``[s, b, h]``, or the losses ``[b, s]`` on the last stage.
        """
        if not self._first:
            self._set_input([received])
        tokens = received if self._first else None
        output: torch.Tensor = self.chunk(tokens, position_ids, None, labels=labels)
        return output


class StoreStage(PipelineStage):
    """Stage whose layers put their weight gradients into a store, to compute them later.

    Args:
        store: Object that stores deferred weight gradients. It is attached to the layers of the
            chunk.
        arguments: Positional arguments of ``PipelineStage``.
        options: Keyword arguments of ``PipelineStage``.
    """

    def __init__(self, store: WeightGradientStore, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "dw_builder": self._put_off})
        self._store = store
        self._microbatch = -1

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> None:
        """Runs B of the microbatch ``bwd_chunk_id``, and defers W. See ``PipelineStage``."""
        self._microbatch = bwd_chunk_id
        with self._store.collect(bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *arguments, **options)

    def _put_off(self) -> Callable[[], None]:
        microbatch = self._microbatch
        return lambda: self._store.run(microbatch, 0, 1)


class GptTorchRunner:
    """Runs a schedule of torch on GPT chunks. All ranks must create their runners together.

    Args:
        run: Run with a built model.
        schedule: Name of the schedule: ``1f1b``, ``interleaved`` or ``zb-v``.
        num_microbatches: Number of microbatches per step.
        stores: Objects that store deferred weight gradients, one for each chunk. They must be
            attached to the layers. The list is empty if backward passes are not split.
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
        self._schedule = make_schedule(schedule, stages, num_microbatches, self._loss)

    def __call__(self, microbatches: Sequence[Microbatch] | None) -> list[dict[str, torch.Tensor]]:
        """Runs the forward and backward passes of a step, and completes the gradients.

        Args:
            microbatches: Microbatches of the step, or ``None`` on a rank that does not need data.

        Returns:
            Losses of all microbatches on the last stage; an empty list on other stages.
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
        """Concatenates ``microbatches`` into positional inputs, a target and keyword inputs.

        The schedules of torch split these tensors into microbatches again.
        """
        if microbatches is None:
            return (), None, {}
        to_device = self._run.job.accelerator.to_device

        def join(key: str) -> torch.Tensor:
            return to_device(torch.cat([microbatch[key] for microbatch in microbatches]))

        tokens = (join("tokens"),) if self._first else ()
        target = join("loss_mask") if self._last else None
        return tokens, target, {"position_ids": join("position_ids"), "labels": join("labels")}

    def _loss(self, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = masked_loss(mask, losses)[0]
        return total / self._num_microbatches

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
