"""A replacement for what megatron-core's ``get_forward_backward_func()`` returns.

Same signature, same return value; the order of work is that of its ``Orders``. One object serves a
whole run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.adaptive.engine.executor import ActivationMeter, Executor
from megatron.adaptive.engine.orders import Orders
from megatron.adaptive.engine.stages import MegatronStages, default_process_groups
from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.schedule.compare import Candidate


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
            split=orders.weight_pieces > 0 and not forward_only,
            stores=self._stores,
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

    def candidate(self, num_microbatches: int) -> Candidate:
        """Returns what runs; see :meth:`Orders.candidate`."""
        return self.orders.candidate(num_microbatches)

    def activation_bytes(self) -> tuple[int, ...]:
        """Bytes that a mean microbatch keeps in each chunk of this rank, 0 before the first."""
        return tuple(
            round(self._meter.bytes_of(chunk) * self._mean_size)
            for chunk in range(self.orders.placement.num_chunks)
        )
