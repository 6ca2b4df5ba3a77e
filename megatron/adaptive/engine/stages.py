"""Computes the model chunks of a rank by calling megatron-core's forward and backward steps.

This is the only module of the pipeline that calls ``megatron.core.pipeline_parallel.schedules``.
megatron-core's loops keep the inputs and outputs of forward passes in lists. This module keeps them
in a dictionary keyed by chunk and microbatch, so that actions can run in any order. It reduces the
gradients of a chunk over data-parallel ranks after the chunk's last microbatch. If weight gradients
are separate actions (W), the chunk's
:class:`~megatron.adaptive.engine.weight_gradient.WeightGradientStore` keeps the tensors for W after
B.

:class:`ForwardBackward` replaces the function that megatron-core's ``get_forward_backward_func()``
returns. It has the same arguments and result, but an ``Orders`` object determines the order of the
passes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    check_first_val_step,
    deallocate_output_tensor,
    forward_step,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import MakeViewlessTensor, get_model_config, get_model_type

from megatron.adaptive.accelerator import current_device
from megatron.adaptive.engine.executor import ActivationMeter, Executor
from megatron.adaptive.engine.policy_factory import Orders
from megatron.adaptive.engine.weight_gradient import SplitStages, WeightGradientStore
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.schedule.action import SliceCounts, item_count, mean_slices, place_of
from megatron.adaptive.schedule.catalog import Candidate
from megatron.adaptive.schedule.stage_placement import Placement


def default_process_groups() -> ProcessGroupCollection:
    """Returns the process groups that megatron-core's schedules use by default."""
    names = ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp", "dp", "tp_dp_cp"]
    return ProcessGroupCollection.use_mpu_process_groups(names)


class Slices(Protocol):
    """Cuts the sequences of each microbatch into slices, which a step processes separately.

    Slices are numbered across all microbatches. The number of a slice is called an item (see
    ``rank_kernel``).

    Attributes:
        count: Number of slices of each microbatch. It may change between two steps.
    """

    count: SliceCounts

    @property
    def sizes(self) -> Sequence[float] | None:
        """Returns the number of tokens of each slice in a step.

        Returns ``None`` if all microbatches of the run are cut in the same way.
        """

    def tokens(self, item: int) -> int:
        """Returns the number of tokens in the slice with the index ``item``."""

    def begin(self, chunk: int, item: int) -> None:
        """Selects the slice ``item`` before its forward or backward pass in ``chunk``."""

    def release(self, chunk: int, item: int) -> None:
        """Frees the tensors that ``chunk`` keeps for the microbatch containing slice ``item``."""

    def finish(self) -> None:
        """Frees all tensors that are kept for slices, at the end of a step or after an error."""

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yields the tensors that the slices of the current microbatch share in a chunk."""

    def kept_bytes(self, chunk: int, item: int) -> float:
        """Returns the size in bytes of the tensors of slice ``item`` that later slices need.

        The size is 0 before the chunk's first forward pass.
        """


class GradientSync:
    """Starts the data-parallel reduction of gradients after the last microbatch of each chunk.

    All replicas must start their reductions in the same order. Under every schedule, each chunk's
    last backward pass (B) needs the result of the next chunk's last B, so these passes run in
    descending order of chunks. If weight gradients are separate actions (W), however, the last W
    actions of the chunks run in any order. In this case, the reduction of a chunk only starts after
    the reductions of all later chunks have started.

    If the first pipeline rank has only one chunk, nothing follows the last backward pass of this
    chunk. The reduction of the chunk's gradients therefore overlaps with this pass even if there is
    a ``grad_sync_func``, as in megatron-core. Other ranks use their ``grad_sync_func`` while they
    wait for earlier stages.

    Args:
        config: megatron-core's configuration of the chunks.
        chunks: Model chunks of the rank.
        ends_step: Whether the step ends with the last backward pass of the first chunk. This is the
            case on the rank of the first stage, unless backward passes are split.
    """

    def __init__(
        self, config: Any, chunks: Sequence[torch.nn.Module], *, ends_step: bool = False
    ) -> None:
        self._chunks = chunks
        self._hold = _as_list(config.no_sync_func, len(chunks))
        self._start = _as_list(config.grad_sync_func, len(chunks))
        if ends_step and len(chunks) == 1 and self._hold[0] is not None:
            self._start = [None]
        self._held: list[contextlib.AbstractContextManager[Any] | None] = [None] * len(chunks)
        self._complete: set[int] = set()
        self._next_start = len(chunks) - 1

    def hold(self) -> None:
        """Disables data-parallel reduction, so that gradients are only accumulated locally."""
        for chunk, hold in enumerate(self._hold):
            if hold is not None and self._held[chunk] is None:
                context = hold()
                context.__enter__()
                self._held[chunk] = context

    def before_last_backward(self, chunk: int) -> None:
        """Enables gradient reduction for the last backward pass of ``chunk``.

        This method does nothing if the chunk has a ``grad_sync_func``, which is called after the
        backward pass.
        """
        if self._start[chunk] is None:
            self._let_go(chunk)

    def after_last_backward(self, chunk: int) -> None:
        """Starts the reduction of the gradients of ``chunk``, if it has a ``grad_sync_func``."""
        if self._start[chunk] is not None:
            self._reduce(chunk)

    def after_last_weights(self, chunk: int) -> None:
        """Starts to reduce the gradients of ``chunk`` after the chunk's last W.

        Reductions start in descending order of chunks. The reduction of this chunk may have to
        wait, or may be followed by the waiting reductions of earlier chunks. A chunk that only has
        a ``no_sync_func`` is also reduced here, because no backward pass remains that could reduce
        it.

        Raises:
            ConfigError: A chunk has a ``no_sync_func`` but no function that reduces its gradients.
        """
        self._complete.add(chunk)
        while self._next_start in self._complete:
            self._reduce(self._next_start)
            self._next_start -= 1

    def release(self) -> None:
        """Re-enables gradient reduction for all chunks, at the end of a step or after an error."""
        for chunk in range(len(self._held)):
            self._let_go(chunk)

    def _reduce(self, chunk: int) -> None:
        held = self._held[chunk]
        start = self._start[chunk]
        self._let_go(chunk)
        if start is not None:
            start(self._chunks[chunk].parameters())
        elif held is not None and _reduces_at_last_microbatch(self._chunks[chunk]):
            start = getattr(self._chunks[chunk], "start_grad_sync", None)
            if start is None:
                raise ConfigError(
                    f"chunk {chunk} has a no_sync_func, but is a "
                    f"{type(self._chunks[chunk]).__name__} without start_grad_sync(); set "
                    "grad_sync_func, or do not split backward passes"
                )
            start()

    def _let_go(self, chunk: int) -> None:
        context = self._held[chunk]
        self._held[chunk] = None
        if context is not None:
            context.__exit__(None, None, None)


def _reduces_at_last_microbatch(chunk: torch.nn.Module) -> bool:
    """Returns whether ``chunk`` reduces its gradients during the step's last backward pass.

    The result is False if the chunk reduces its gradients only when the step is finalized. It is
    also False if the caller accumulates gradients over several steps, and has turned the reduction
    off in this step.
    """
    config = getattr(chunk, "ddp_config", None)
    if config is not None and not config.overlap_grad_reduce:
        return False
    return all(getattr(bucket, "is_last_microbatch", True) for bucket in _buckets(chunk))


def _is_gathered(chunk: torch.nn.Module) -> bool:
    """Returns whether the parameters of ``chunk`` were gathered after their last update."""
    return any(getattr(bucket, "param_gather_dispatched", False) for bucket in _buckets(chunk))


def _buckets(chunk: torch.nn.Module) -> list[Any]:
    """Returns the gradient buckets of ``chunk`` if it has megatron-core's data-parallel wrapper."""
    names = ("bucket_groups", "expert_parallel_bucket_groups")
    return [bucket for name in names for bucket in getattr(chunk, name, [])]


def _as_list(value: Any, length: int) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if length > 1 and value is not None:
        raise ConfigError(
            f"gradient synchronization needs a list with one function for each of the {length} "
            f"chunks, got one function {value!r}"
        )
    return [value] * length


@dataclass(kw_only=True, eq=False)
class MegatronStages(SplitStages):
    """Computes the forward and backward passes of megatron-core chunks in one step.

    Attributes:
        forward_step_func: User's function for megatron-core, ``(data_iterator, model) -> (output,
            loss_func)``.
        data_iterators: Data iterators, one per chunk.
        chunks: Model chunks of the rank, in pipeline order.
        placement: Assignment of pipeline stages to ranks.
        pp_rank: Pipeline rank of this process.
        num_microbatches: Number of microbatches in the step.
        groups: Process groups that megatron-core uses in the step.
        meter: Object that measures the size of each chunk's activations in the first forward pass
            of the chunk.
        forward_only: Whether the step is an evaluation, which keeps nothing for backward passes.
        collect_non_loss_data: Argument for megatron-core's forward step.
        first_val_step: Argument for megatron-core's forward step.
        stores: Stores of deferred weight gradients, one per chunk, attached to the chunk's layers,
            or ``None`` if the backward pass computes weight gradients. They are not used in an
            evaluation.
        loss_parts: Number of microbatches to average the step's loss over, or ``None`` for
            ``num_microbatches``.
        sizes: Size of each microbatch, relative to the microbatch that ``meter`` has measured, or
            ``None`` if all microbatches are equal.
        slices: Object that cuts the sequences into slices, or ``None`` if microbatches are not cut.
        measured: Number of tokens in each measured slice, keyed by the slice's key in ``meter``.
            The key ``-1 - chunk`` is for the slice that was used to measure the weight gradients of
            ``chunk``.
        config: megatron-core's configuration of the chunks.
        reduced_losses: Values that the loss function returned for the log, in execution order.
        num_tokens: Number of tokens over which the loss was computed; 0 except on the last stage.
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
    slices: Slices | None = None
    measured: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reduced_losses: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=current_device())
        self.config = get_model_config(self.chunks[0])
        last = self.placement.num_stages - 1
        self._is_last = [
            self.placement.stage_of(self.pp_rank, chunk) == last
            for chunk in range(len(self.chunks))
        ]
        self._count = 1 if self.slices is None else self.slices.count
        # The last backward pass of a chunk processes the first slice of the last microbatch.
        last_item = item_count(self.num_microbatches, self._count) - 1
        self._last_backward = last_item - place_of(last_item, self._count).part
        # ``_kept`` contains the input and output of each forward pass whose backward pass has not
        # run yet, keyed by (chunk, item).
        self._kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        kind = (get_model_type(self.chunks[0]),) if _TAKES_TYPE else ()
        self._backward_rest = (*kind, self.config)
        self._sync = GradientSync(
            self.config,
            self.chunks,
            ends_step=self.stores is None and self.placement.stage_of(self.pp_rank, 0) == 0,
        )
        if not self.forward_only:
            self._sync.hold()
        super().__init__(None if self.forward_only else self.stores, num_slices=self._count)

    def gather_parameters(self) -> None:
        """Starts to gather the parameters of all chunks from data-parallel ranks.

        This must be called at the start of a step. Each chunk's first forward pass waits for its
        parameters. All replicas start in ascending order of chunks. Chunks without a
        ``param_sync_func``, and a single chunk, start to gather in their first forward pass.
        """
        if self.forward_only or len(self.chunks) == 1:
            return
        starts = _as_list(self.config.param_sync_func, len(self.chunks))
        for chunk, start in zip(self.chunks, starts, strict=True):
            if start is not None and not _is_gathered(chunk):
                start(chunk.parameters())

    def activation_bytes(self, chunk: int, microbatch: int) -> int:
        key = self._meter_key(chunk, microbatch)
        nbytes = self._sized(self.meter.bytes_of(key), microbatch, key)
        if self.slices is not None:
            nbytes += round(self.slices.kept_bytes(chunk, microbatch))
        return nbytes

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        trains = not self.forward_only
        slices = self.slices
        model_input = self._model_input(received) if trains else received
        model = self.chunks[chunk]
        position = place_of(microbatch, self._count)
        held: Iterable[torch.Tensor] = model.parameters()
        if slices is not None:
            slices.begin(chunk, microbatch)
            held = chain(held, slices.buffers())
            if trains:
                self.measured.setdefault(
                    self._meter_key(chunk, microbatch), slices.tokens(microbatch)
                )
        with self.meter.measure(self._meter_key(chunk, microbatch), held) if trains else _NOTHING:
            output: torch.Tensor
            output, num_tokens = forward_step(
                self.forward_step_func,
                self.data_iterators[chunk],
                model,
                self.loss_parts or self.num_microbatches,
                model_input,
                self.reduced_losses,
                self.config,
                self.groups.cp.size(),
                collect_non_loss_data=self.collect_non_loss_data,
                is_first_microbatch=microbatch == 0
                and check_first_val_step(self.first_val_step, self.forward_only, True),
                current_microbatch=position.microbatch,
                vp_stage=chunk if len(self.chunks) > 1 else None,
                is_last_stage=self._is_last[chunk],
            )
        if self._is_last[chunk]:
            self.num_tokens += num_tokens
        if received is not None and model_input is not received:
            # The backward pass reads only the shape of ``received``, so free its memory.
            received.data = received.new_empty(1).expand_as(received)
        if trains:
            self._kept[chunk, microbatch] = received, output
        elif slices is not None and position.part == position.slices - 1:
            slices.release(chunk, microbatch)
        return output

    def _model_input(self, received: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the chunk's input tensor. The gradient of this tensor flows to ``received``.

        With ``distribute_saved_activations``, megatron-core replaces the data of the input that it
        saves with this rank's part, and restores the whole data before the backward pass. Hooks for
        saved tensors, such as those of ``meter``, pass megatron-core a copy of the tensor object.
        If ``received`` itself were the input, it would keep the shape of the part, and autograd
        would reject its gradient.
        """
        if received is None:
            return None
        received.requires_grad_()
        if not getattr(self.config, "distribute_saved_activations", False):
            return received
        model_input: torch.Tensor = MakeViewlessTensor.apply(received, True)
        return model_input

    def release(self, chunk: int, microbatch: int) -> None:
        """Frees an output after the transport has copied it or taken a reference to it.

        The backward pass only needs the autograd graph of the output. The transport holds a
        reference to the memory until the message has been sent.
        """
        if not self._is_last[chunk] and self.config.deallocate_pipeline_outputs:
            kept = self._kept.get((chunk, microbatch))
            if kept is not None:
                deallocate_output_tensor(kept[1], True)

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        received, output = self._kept.pop((chunk, microbatch))
        arguments = (received, output, gradient, *self._backward_rest)
        slices = self.slices
        if slices is not None:
            slices.begin(chunk, microbatch)
        last = microbatch == self._last_backward and self._stores is None
        if last:
            self._sync.before_last_backward(chunk)
        with _NOTHING if self._stores is None else self._stores[chunk].collect(microbatch):
            input_gradient: torch.Tensor | None = backward_step(*arguments)
        if slices is not None and place_of(microbatch, self._count).part == 0:
            slices.release(chunk, microbatch)
        return input_gradient

    def after_backward(self, chunk: int, microbatch: int) -> None:
        """Starts the data-parallel reduction of a chunk's gradients after its last backward pass.

        Starting a reduction launches kernels and may wait for the device, so this happens after the
        input gradient has been sent.
        """
        if microbatch == self._last_backward and self._stores is None:
            self._sync.after_last_backward(chunk)

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Computes one part of the weight gradients that the backward pass (B) has deferred.

        After the last part of the last microbatch, the chunk's gradients are reduced over
        data-parallel ranks, once the reductions of all later chunks have started.
        """
        super().weights(chunk, microbatch, piece, pieces)
        if microbatch == self._last_backward and piece == pieces - 1:
            self._sync.after_last_weights(chunk)

    def retained_bytes(self, chunk: int, microbatch: int) -> int:
        # The store measures this size only in the first B of a chunk, which processes the last
        # slice of a microbatch.
        key = -1 - chunk
        if self.slices is not None:
            self.measured.setdefault(key, self.slices.tokens(microbatch))
        return self._sized(super().retained_bytes(chunk, microbatch), microbatch, key)

    def _meter_key(self, chunk: int, item: int) -> int:
        """Returns the key under which ``meter`` stores the size of slice ``item`` in ``chunk``.

        Each slice of a microbatch has its own key, because later slices may store more attention
        scores per token.
        """
        return place_of(item, self._count).part * len(self.chunks) + chunk

    def _sized(self, nbytes: int, item: int, key: int) -> int:
        """Estimates the size of ``item`` in bytes from the size of a measured item.

        An item is a slice or a whole microbatch.

        Args:
            nbytes: Size of the measured item in bytes.
            item: Index of the item to estimate.
            key: Key of the measured item in ``measured``.
        """
        if self.slices is not None:
            return round(nbytes * self.slices.tokens(item) / self.measured.get(key, 1))
        return nbytes if self.sizes is None else round(nbytes * self.sizes[item])

    def finish(self) -> None:
        """Frees tensors and re-enables reduction, at the end of a step or after an error."""
        self._sync.release()
        if self.slices is not None:
            self.slices.finish()
        super().finish()


class ForwardBackward:
    """Runs the passes of a step, with the same interface as megatron-core's step functions.

    Args:
        executor: Executor that runs this rank's steps.
        orders: Object that creates the policy and the state of this rank for each step. If stages
            have different numbers of ranks, the loss is divided by the number of microbatches of
            the whole step. In that case, the caller must sum gradients over the ranks of a stage
            instead of averaging them.
        stores: Stores of deferred weight gradients, one per chunk, or ``None`` if the backward pass
            computes weight gradients.
        slices: Object that cuts the sequences into the same number of slices as ``orders``, or
            ``None`` to run whole microbatches.
        span: Function that takes the kind of a span (here ``reduce``) and returns a context manager
            that traces the span. If ``span`` is ``None``, the caller traces the reduction.

    Attributes:
        orders: Object that creates the policy and the state of this rank for each step.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        orders: Orders,
        stores: Sequence[WeightGradientStore] | None = None,
        slices: Slices | None = None,
        span: Callable[[str], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._executor = executor
        self.orders = orders
        self._stores = stores
        self._slices = slices
        self._span = span or (lambda kind: contextlib.nullcontext())
        self._meter = ActivationMeter()
        self._measured: dict[int, int] = {}
        # Number of token positions in the microbatch whose activations were measured.
        self._measured_size = 0.0
        # Mean size of the microbatches in the last step, relative to the measured microbatch.
        self._mean_size = 1.0

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
        """Runs one step. The arguments that are not listed here are documented in megatron-core.

        Args:
            loss_parts: Divisor of the loss: the total number of microbatches in all
                replicas, or ``None`` if all replicas have the same number of microbatches and the
                caller averages gradients over replicas.
            sizes: Number of token positions in each microbatch of this rank, or ``None`` if all are
                equal.

        Returns:
            Values that ``loss_func`` returned for the log, one per microbatch in ascending order,
            or an empty list unless this is the last stage.

        Raises:
            ConfigError: The executor does not support an argument.
            TransportError: Another rank has exited or does not respond.
        """
        if adjust_tensor_shapes_fn is not None:
            raise ConfigError(
                "adjust_tensor_shapes_fn is not supported, because every message contains the "
                "shape of its tensor; remove this argument"
            )
        orders = self.orders
        widths = orders.widths
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        self._check_counts(len(chunks), len(iterators))
        stages = MegatronStages(
            forward_step_func=forward_step_func,
            data_iterators=iterators,
            chunks=chunks,
            placement=orders.placement,
            pp_rank=orders.pp_rank,
            num_microbatches=num_microbatches,
            groups=pg_collection or default_process_groups(),
            meter=self._meter,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            stores=self._stores if orders.weight_pieces else None,
            loss_parts=loss_parts
            or num_microbatches * (widths.sizes[orders.pp_rank] if widths else 1),
            sizes=None if forward_only or self._slices else self._relative_sizes(sizes),
            slices=self._slices,
            measured=self._measured,
        )
        timers = stages.config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(
                barrier=stages.config.barrier_with_L1_time
            )
        self._run(stages, sizes)
        if not forward_only and stages.config.finalize_model_grads_func is not None:
            self._reduce_gradients(stages, force_all_reduce=bool(force_all_reduce))
        if timers is not None:
            timers("forward-backward").stop()
        return _by_microbatch(stages.reduced_losses, self._slices)

    def _check_counts(self, num_chunks: int, num_iterators: int) -> None:
        """Checks that each chunk of this rank has a model and a data iterator.

        Args:
            num_chunks: Number of models that the caller passed.
            num_iterators: Number of data iterators that the caller passed.
        """
        expected = self.orders.placement.num_chunks
        if not num_chunks == num_iterators == expected:
            raise ConfigError(
                f"a pipeline with {expected} chunks per rank needs one model chunk and one data "
                f"iterator per chunk, got {num_chunks} model chunks and {num_iterators} data "
                "iterators"
            )

    def _reduce_gradients(self, stages: MegatronStages, *, force_all_reduce: bool) -> None:
        """Reduces the step's gradients over ranks by calling megatron-core's function."""
        with self._span("reduce"):
            stages.config.finalize_model_grads_func(
                stages.chunks,
                stages.num_tokens if stages.config.calculate_per_token_loss else None,
                pg_collection=stages.groups,
                # Pass this argument only if it is needed, because megatron-core 0.15 does not have
                # it.
                **({"force_all_reduce": True} if force_all_reduce else {}),
            )

    def _relative_sizes(self, sizes: Sequence[float] | None) -> list[float] | None:
        """Returns ``sizes`` divided by the size of the microbatch whose memory was measured."""
        if sizes is None:
            return None
        self._measured_size = self._measured_size or sizes[0]
        relative = [size / self._measured_size for size in sizes]
        self._mean_size = sum(relative) / len(relative)
        return relative

    def _run(self, stages: MegatronStages, sizes: Sequence[float] | None) -> None:
        """Runs all actions of ``stages``, and frees tensors at the end or after an error."""
        num_microbatches = stages.num_microbatches
        forward_only = stages.forward_only
        if self._slices is not None:
            self.orders.recut(self._slices.count)
            sizes = self._slices.sizes
        try:
            stages.gather_parameters()
            with torch.set_grad_enabled(not forward_only and torch.is_grad_enabled()):
                self._executor.run(
                    stages,
                    self.orders.policy(num_microbatches, forward_only=forward_only),
                    self.orders.state(num_microbatches, forward_only=forward_only, sizes=sizes),
                )
        finally:
            stages.finish()

    def use(self, candidate: Candidate) -> None:
        """Switches to the schedule or run-time rule of ``candidate``, starting with the next step.

        All ranks must call this method with the same candidate.

        Raises:
            ConfigError: The schedule needs a different placement, or has W actions although this
                object has no stores.
        """
        placement = self.orders.placement
        if candidate.placement != placement or (candidate.weight_pieces and not self._stores):
            raise ConfigError(
                f"{candidate} does not match this model, which has {placement.kind} placement "
                f"{'with' if self._stores else 'without'} split backward passes; build the model "
                "for this schedule"
            )
        self.orders.use(candidate)

    def activation_bytes(self) -> tuple[int, ...]:
        """Returns the activation size in bytes of a microbatch of mean size, for each chunk.

        All sizes are 0 before the first microbatch has run.
        """
        if self._slices is not None:
            return tuple(map(self._sliced_bytes, range(self.orders.placement.num_chunks)))
        return tuple(
            round(self._meter.bytes_of(chunk) * self._mean_size)
            for chunk in range(self.orders.placement.num_chunks)
        )

    def _sliced_bytes(self, chunk: int) -> int:
        """Returns the mean size in bytes of a sliced microbatch's activations in ``chunk``."""
        slices = self._slices
        assert slices is not None
        num_chunks = self.orders.placement.num_chunks
        keys = [key for key in self._measured if key >= 0 and key % num_chunks == chunk]
        if not keys:
            return 0
        per_token = sum(map(self._meter.bytes_of, keys)) / sum(self._measured[key] for key in keys)
        if slices.sizes is None:
            items = range(item_count(1, slices.count))
        else:
            items = range(len(slices.sizes))
        nbytes = sum(per_token * slices.tokens(n) + slices.kept_bytes(chunk, n) for n in items)
        return round(nbytes * mean_slices(slices.count) / len(items))


def _by_microbatch(values: list[Any], slices: Slices | None) -> list[Any]:
    """Returns the logged values, summed over the slices of each microbatch."""
    if slices is None:
        return values
    microbatches: dict[int, list[Any]] = {}
    for item, value in enumerate(values):
        microbatches.setdefault(place_of(item, slices.count).microbatch, []).append(value)
    return [
        {name: sum(item[name] for item in items) for name in items[0]}
        for items in microbatches.values()
    ]


if not hasattr(moe_utils, "te_general_gemm"):
    # megatron-core's router uses this name, but imports the function only if Transformer Engine is
    # installed. Without this line, the router would raise a NameError.
    moe_utils.te_general_gemm = None

_NOTHING = contextlib.nullcontext()
# Since release 0.17, megatron-core's ``backward_step`` has no parameter for the type of the model.
_TAKES_TYPE = "model_type" in inspect.signature(backward_step).parameters
