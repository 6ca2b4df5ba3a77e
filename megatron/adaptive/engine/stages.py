"""The chunks of a rank as megatron-core sees them: its forward and backward steps, unchanged.

This is the only module of the pipeline that calls ``megatron.core.pipeline_parallel.schedules``.
It keeps, per chunk and microbatch, what megatron-core's own loops keep in lists, and switches the
gradient synchronization of data parallelism on for the last microbatch of each chunk. Where
backwards are split, weight gradients go through the chunk's
:class:`~megatron.adaptive.engine.weight_gradient.WeightGradientStore`.

:class:`ForwardBackward` replaces what megatron-core's ``get_forward_backward_func()`` returns: same
signature, same return value; the order of work is that of its ``Orders``.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    check_first_val_step,
    deallocate_output_tensor,
    forward_step,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import get_model_config, get_model_type

from megatron.adaptive.accelerator import current_device
from megatron.adaptive.engine.executor import ActivationMeter, Executor
from megatron.adaptive.engine.policy_factory import Orders
from megatron.adaptive.engine.weight_gradient import SplitStages, WeightGradientStore
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.schedule.catalog import Candidate
from megatron.adaptive.schedule.stage_placement import Placement


def default_process_groups() -> ProcessGroupCollection:
    """Return the groups that megatron-core's schedules take from its global state."""
    names = ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp", "dp", "tp_dp_cp"]
    return ProcessGroupCollection.use_mpu_process_groups(names)


class GradientSync:
    """Holds data-parallel gradient reduction back until a chunk's last microbatch.

    Of one rank's chunks the last backward comes in descending order under every schedule (a
    chunk's backward needs that of the next chunk), so replicas enqueue their reductions alike. The
    last weight gradient of a split backward comes in whatever order the rank picks: a chunk's
    reduction then waits for those of all later chunks.

    Args:
        config: megatron-core's configuration of the chunks.
        chunks: the rank's model chunks.
    """

    def __init__(self, config: Any, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._hold = _as_list(config.no_sync_func, len(chunks))
        self._start = _as_list(config.grad_sync_func, len(chunks))
        self._held: list[contextlib.AbstractContextManager[Any] | None] = [None] * len(chunks)
        self._complete: set[int] = set()
        self._next_start = len(chunks) - 1

    def hold(self) -> None:
        """Accumulate gradients locally from here on."""
        for chunk, hold in enumerate(self._hold):
            if hold is not None and self._held[chunk] is None:
                context = hold()
                context.__enter__()
                self._held[chunk] = context

    def before_last_backward(self, chunk: int) -> None:
        """The chunk's next backward completes its gradients."""
        if self._start[chunk] is None:
            self._let_go(chunk)

    def after_last_backward(self, chunk: int) -> None:
        """The chunk's gradients are complete: reduce them where that is explicit."""
        if self._start[chunk] is not None:
            self._reduce(chunk)

    def after_last_weights(self, chunk: int) -> None:
        """The chunk's gradients are complete, its backwards having been split.

        Starts the reduction of every chunk whose turn has come, in descending order, that of a
        chunk with ``no_sync`` alone included: no backward is left to start it.

        Raises:
            ConfigError: gradients were held back that nothing can reduce.
        """
        self._complete.add(chunk)
        while self._next_start in self._complete:
            self._reduce(self._next_start)
            self._next_start -= 1

    def release(self) -> None:
        """Leave nothing held back, whatever happened in the step."""
        for chunk in range(len(self._held)):
            self._let_go(chunk)

    def _reduce(self, chunk: int) -> None:
        held, start = self._held[chunk], self._start[chunk]
        self._let_go(chunk)
        if start is not None:
            start(self._chunks[chunk].parameters())
        elif held is not None:
            start = getattr(self._chunks[chunk], "start_grad_sync", None)
            if start is None:
                raise ConfigError(
                    f"chunk {chunk} is a {type(self._chunks[chunk]).__name__} with a no_sync_func, "
                    "but without start_grad_sync; set grad_sync_func to split its backward"
                )
            start()

    def _let_go(self, chunk: int) -> None:
        context, self._held[chunk] = self._held[chunk], None
        if context is not None:
            context.__exit__(None, None, None)


def _as_list(value: Any, length: int) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if length > 1 and value is not None:
        raise ConfigError(
            f"one function {value!r} was given for the gradient synchronization of {length} "
            "chunks; give a list with one function per chunk"
        )
    return [value] * length


@dataclass(kw_only=True, eq=False)
class MegatronStages(SplitStages):
    """The ``Stages`` of one step: a rank's megatron-core chunks.

    Attributes:
        forward_step_func: megatron-core's user function ``(data_iterator, model) -> (output,
            loss_func)``.
        data_iterators: one per chunk.
        chunks: the rank's model chunks, in order.
        placement: where stages live.
        pp_rank: position of this rank.
        num_microbatches: microbatches of the step.
        groups: process groups of the step.
        meter: measures activations once.
        forward_only: evaluation: nothing is kept for a backward.
        collect_non_loss_data: as in megatron-core.
        first_val_step: as in megatron-core.
        stores: one per chunk, attached to its layers, where backwards leave weight gradients to
            :meth:`weights`; ``None`` for whole ones. Not used in evaluation.
        loss_parts: microbatches that the step's loss is the mean of; those of this rank where
            ``None``.
        sizes: of each microbatch, in those of the one that was measured; ``None`` where all are
            alike.
        config: megatron-core's configuration of the chunks.
        reduced_losses: what the loss function returned for logging, by microbatch.
        num_tokens: of the loss, on the last stage.
    """

    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Any]
    chunks: Sequence[torch.nn.Module]
    placement: Placement
    pp_rank: int
    num_microbatches: int
    groups: ProcessGroupCollection
    meter: ActivationMeter
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    stores: Sequence[WeightGradientStore] | None = None
    loss_parts: int | None = None
    sizes: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self.reduced_losses: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=current_device())
        self.config = get_model_config(self.chunks[0])
        last, chunks = self.placement.num_stages - 1, range(len(self.chunks))
        self._is_last = [self.placement.stage_of(self.pp_rank, one) == last for one in chunks]
        # Input and output of forwards whose backward is to come, by chunk and microbatch.
        self._kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        kind = (get_model_type(self.chunks[0]),) if _TAKES_TYPE else ()
        self._backward_rest = (*kind, self.config)
        self._sync = GradientSync(self.config, self.chunks)
        if not self.forward_only:
            self._sync.hold()
        super().__init__(None if self.forward_only else self.stores)

    def activation_bytes(self, chunk: int, microbatch: int) -> int:
        return self._sized(self.meter.bytes_of(chunk), microbatch)

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        trains = not self.forward_only
        if received is not None and trains:
            received.requires_grad_()
        model = self.chunks[chunk]
        with self.meter.measure(chunk, model.parameters()) if trains else _NOTHING:
            output, num_tokens = forward_step(
                self.forward_step_func,
                self.data_iterators[chunk],
                model,
                self.loss_parts or self.num_microbatches,
                received,
                self.reduced_losses,
                self.config,
                self.groups.cp.size(),
                collect_non_loss_data=self.collect_non_loss_data,
                is_first_microbatch=microbatch == 0
                and check_first_val_step(self.first_val_step, self.forward_only, True),
                current_microbatch=microbatch,
                vp_stage=chunk if len(self.chunks) > 1 else None,
                is_last_stage=self._is_last[chunk],
            )
        if self._is_last[chunk]:  # elsewhere there are none
            self.num_tokens += num_tokens
        if trains:
            self._kept[chunk, microbatch] = received, output
        return output

    def release(self, chunk: int, microbatch: int) -> None:
        """Implements :class:`~megatron.adaptive.engine.executor.Stages`.

        Only the graph of an output is needed from here on. Its storage lives as long as the
        transport holds it.
        """
        if not self._is_last[chunk] and self.config.deallocate_pipeline_outputs:
            kept = self._kept.get((chunk, microbatch))
            if kept is not None:
                deallocate_output_tensor(kept[1], True)

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        received, output = self._kept.pop((chunk, microbatch))
        given = (received, output, gradient, *self._backward_rest)
        if self._stores is not None:
            with self._stores[chunk].collect(microbatch):
                return backward_step(*given)  # type: ignore[no-any-return]
        last = microbatch == self.num_microbatches - 1
        if last:
            self._sync.before_last_backward(chunk)
        answer = backward_step(*given)
        if last:
            self._sync.after_last_backward(chunk)
        return answer  # type: ignore[no-any-return]

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Implements :class:`~megatron.adaptive.engine.executor.Stages`.

        After the last part of the last microbatch the chunk's gradients are reduced over
        data-parallel ranks as soon as those of all later chunks are.
        """
        super().weights(chunk, microbatch, piece, pieces)
        if microbatch == self.num_microbatches - 1 and piece == pieces - 1:
            self._sync.after_last_weights(chunk)

    def retained_bytes(self, chunk: int, microbatch: int) -> int:
        return self._sized(super().retained_bytes(chunk, microbatch), microbatch)

    def _sized(self, nbytes: int, microbatch: int) -> int:
        return nbytes if self.sizes is None else round(nbytes * self.sizes[microbatch])

    def finish(self) -> None:
        """End the step, normally or after an error."""
        self._sync.release()
        super().finish()


class ForwardBackward:
    """Runs forward and backward passes of a step; call it like megatron-core's function.

    Args:
        executor: the engine of this rank.
        orders: of this rank's work. Where stages are unequal the loss is the mean over the whole
            step, and gradients are to be summed, not averaged, over the ranks of a stage.
        stores: where the chunks' layers leave their weight gradients, for split backwards.
        span: traces a block as a span of a kind; called with ``reduce``, ``None`` where the caller
            traces that.

    Attributes:
        orders: as given.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        orders: Orders,
        stores: Sequence[WeightGradientStore] | None = None,
        span: Callable[[str], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._executor = executor
        self.orders = orders
        self._stores = stores
        self._span = span or (lambda kind: contextlib.nullcontext())
        self._meter = ActivationMeter()
        self._measured_size = 0.0  # positions of the microbatch that was measured
        self._mean_size = 1.0  # of the last step, in measured ones

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
        loss_parts: int | None = None,
        sizes: Sequence[float] | None = None,
    ) -> list[Any]:
        """Run one step; see megatron-core for the arguments.

        Args:
            loss_parts: microbatches of all replicas, where their numbers differ and gradients are
                to be summed over replicas, not averaged.
            sizes: positions of each microbatch of this rank, ``None`` where all are alike.

        Returns:
            What ``loss_func`` returned for logging, one entry per microbatch in ascending order, on
            the last stage; an empty list elsewhere.

        Raises:
            ConfigError: an argument asks for what this executor does not do.
            TransportError: another rank is gone or silent.
        """
        if adjust_tensor_shapes_fn is not None:
            raise ConfigError(
                "adjust_tensor_shapes_fn was given, but channels here carry each tensor's own "
                "shape; leave it out"
            )
        orders, placement, widths = self.orders, self.orders.placement, self.orders.widths
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        if not len(chunks) == len(iterators) == placement.num_chunks:
            raise ConfigError(
                f"{len(chunks)} model chunks and {len(iterators)} data iterators were given to a "
                f"pipeline of {placement.num_chunks} chunks per rank; give one of each per "
                "chunk"
            )
        groups = pg_collection or default_process_groups()
        relative = None
        if sizes is not None and not forward_only:
            self._measured_size = self._measured_size or sizes[0]
            relative = [size / self._measured_size for size in sizes]
            self._mean_size = sum(relative) / len(relative)
        stages = MegatronStages(
            forward_step_func=forward_step_func,
            data_iterators=iterators,
            chunks=chunks,
            placement=placement,
            pp_rank=orders.pp_rank,
            num_microbatches=num_microbatches,
            groups=groups,
            meter=self._meter,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            stores=self._stores if orders.weight_pieces else None,
            loss_parts=loss_parts
            or num_microbatches * (widths.sizes[orders.pp_rank] if widths else 1),
            sizes=relative,
        )
        timers = stages.config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(
                barrier=stages.config.barrier_with_L1_time
            )
        try:
            with torch.set_grad_enabled(not forward_only and torch.is_grad_enabled()):
                self._executor.run(
                    stages,
                    orders.policy(num_microbatches, forward_only=forward_only),
                    orders.state(num_microbatches, forward_only=forward_only, sizes=sizes),
                )
        finally:
            stages.finish()
        if not forward_only and stages.config.finalize_model_grads_func is not None:
            with self._span("reduce"):
                stages.config.finalize_model_grads_func(
                    chunks,
                    stages.num_tokens if stages.config.calculate_per_token_loss else None,
                    pg_collection=groups,
                    # megatron-core 0.15 does not know it.
                    **({"force_all_reduce": True} if force_all_reduce else {}),
                )
        if timers is not None:
            timers("forward-backward").stop()
        return stages.reduced_losses

    def use(self, candidate: Candidate) -> None:
        """Take another schedule or rule from the next step on; all ranks must do so alike.

        Raises:
            ConfigError: it needs another placement, or stores that this object was not made with.
        """
        placement = self.orders.placement
        if candidate.placement != placement or (candidate.weight_pieces and not self._stores):
            raise ConfigError(
                f"{candidate} cannot run on chunks that lie in a {placement.kind} with "
                f"{'split' if self._stores else 'whole'} backwards; build the model for it"
            )
        self.orders.use(candidate)

    def activation_bytes(self) -> tuple[int, ...]:
        """Bytes that a mean microbatch keeps in each chunk of this rank, 0 before the first."""
        return tuple(
            round(self._meter.bytes_of(chunk) * self._mean_size)
            for chunk in range(self.orders.placement.num_chunks)
        )


if not hasattr(moe_utils, "te_general_gemm"):
    # Its router asks for this name, which it imports only with Transformer Engine.
    moe_utils.te_general_gemm = None

_NOTHING = contextlib.nullcontext()
# Since megatron-core 0.17 it does not ask for the model's type.
_TAKES_TYPE = "model_type" in inspect.signature(backward_step).parameters
