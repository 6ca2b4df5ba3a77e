"""Plain ``torch.nn.Module`` chunks as stages of the executor, with whole or split backwards.

For models that are not megatron-core's: one tensor goes from stage to stage, gradients end in
``grad``, and nothing is reduced over data-parallel ranks. To split a backward, the ``Linear`` and
``Embedding`` layers of a chunk defer their weight gradients; everything else stays in B.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.adaptive.engine.meter import ActivationMeter
from megatron.adaptive.engine.weight_gradient import (
    EmbeddingCall,
    LinearCall,
    WeightGradientStore,
    defer,
    is_deferring,
)
from megatron.adaptive.errors import ConfigError, ScheduleError
from megatron.adaptive.schedule.placement import Placement


class DeferringLinear(torch.nn.Linear):
    """``torch.nn.Linear`` that puts its weight gradient off while its store is active."""

    weight_gradient_store: WeightGradientStore

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """See ``torch.nn.Linear``: ``[..., in] -> [..., out]``."""
        store, weight = self.weight_gradient_store, self.weight
        if not isinstance(weight, torch.nn.Parameter) or not is_deferring(store, weight):
            return super().forward(input)
        return defer(LinearCall(weight, self.bias), input, store)


class DeferringEmbedding(torch.nn.Embedding):
    """``torch.nn.Embedding`` that puts its weight gradient off while its store is active."""

    weight_gradient_store: WeightGradientStore

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """See ``torch.nn.Embedding``: ``[...] int -> [..., width]``."""
        store, weight = self.weight_gradient_store, self.weight
        if not isinstance(weight, torch.nn.Parameter) or not is_deferring(store, weight):
            return super().forward(input)
        padding = -1 if self.padding_idx is None else self.padding_idx
        return defer(EmbeddingCall(weight, padding, self.scale_grad_by_freq), input, store)


def _deferring_class(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """Return the class that ``module`` defers as; subclasses may have forwards of their own."""
    if type(module) is torch.nn.Linear:
        return DeferringLinear
    if type(module) is torch.nn.Embedding and not module.sparse and module.max_norm is None:
        return DeferringEmbedding
    return None


@contextlib.contextmanager
def defer_linears(module: torch.nn.Module, store: WeightGradientStore) -> Iterator[None]:
    """Let the ``Linear`` and ``Embedding`` layers of ``module`` defer to ``store`` within.

    They do so while ``store.active``. Their class changes and changes back; parameters, buffers,
    hooks and names are not touched. Left as they are: subclasses of the two, embeddings with sparse
    gradients or ``max_norm``, and weights that are no parameters of their own. Hooks on the
    parameters do not run.
    """
    changed: list[tuple[torch.nn.Module, type[torch.nn.Module]]] = []
    try:
        for layer in module.modules():
            deferring = _deferring_class(layer)
            if deferring is not None:
                changed.append((layer, type(layer)))
                layer.__class__ = deferring
                layer.__dict__["weight_gradient_store"] = store
        yield
    finally:
        for layer, plain in changed:
            layer.__class__ = plain
            del layer.__dict__["weight_gradient_store"]


class ModuleStages:
    """One step of a rank's plain modules; see :class:`~.executor.Stages` for what it offers.

    Gradients are those of the mean loss over the microbatches.

    Args:
        chunks: the rank's chunks, in order; each takes and returns one tensor.
        placement: where stages live.
        pp_rank: position of this rank.
        num_microbatches: microbatches of the step.
        batch: gives a microbatch's ``(input, target)``; asked for the input by the first stage
            and for the target by the last.
        loss: ``(output, target) -> scalar``, used by the last stage.
        split: backwards leave weight gradients to :meth:`weights`.
        stores: one per chunk, to keep them from step to step; new ones where ``None``.
        meter: measures activations, once if it is kept from step to step.
        forward_only: evaluation: nothing is kept for a backward.

    Attributes:
        losses: losses of the microbatches, detached, in the order of their forwards; empty without
            the last stage.
    """

    def __init__(
        self,
        *,
        chunks: Sequence[torch.nn.Module],
        placement: Placement,
        pp_rank: int,
        num_microbatches: int,
        batch: Callable[[int], tuple[torch.Tensor, Any]],
        loss: Callable[[torch.Tensor, Any], torch.Tensor],
        split: bool = False,
        stores: Sequence[WeightGradientStore] | None = None,
        meter: ActivationMeter | None = None,
        forward_only: bool = False,
    ) -> None:
        self.losses: list[torch.Tensor] = []
        self._chunks = chunks
        self._num_microbatches = num_microbatches
        self._batch = batch
        self._loss = loss
        self._meter = meter or ActivationMeter()
        self._forward_only = forward_only
        stages = [placement.stage_of(pp_rank, chunk) for chunk in range(len(chunks))]
        self._is_last = [stage == placement.num_stages - 1 for stage in stages]
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}
        self._outputs: dict[tuple[int, int], torch.Tensor | GradientEdge | None] = {}
        self._stores: Sequence[WeightGradientStore] | None = None
        self._deferring = contextlib.ExitStack()
        if split and not forward_only:
            self._split(stores)

    def _split(self, stores: Sequence[WeightGradientStore] | None) -> None:
        if stores is not None and len(stores) != len(self._chunks):
            raise ConfigError(
                f"{len(stores)} stores were given to split the backwards of {len(self._chunks)} "
                "chunks; give one per chunk, or none to have them made"
            )
        self._stores = stores or [WeightGradientStore() for _ in self._chunks]
        for chunk, store in zip(self._chunks, self._stores, strict=True):
            self._deferring.enter_context(defer_linears(chunk, store))
            store.clear()
            store.active = True

    def activation_bytes(self, chunk: int) -> int:
        """See :class:`~megatron.adaptive.engine.executor.Stages`."""
        return self._meter.bytes_of(chunk)

    def retained_bytes(self, chunk: int) -> int:
        """See :class:`~megatron.adaptive.engine.stages.MegatronStages`."""
        return 0 if self._stores is None else self._stores[chunk].microbatch_bytes

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """See :class:`~megatron.adaptive.engine.executor.Stages`."""
        given = self._batch(microbatch)[0] if received is None else received
        if self._forward_only:
            with torch.no_grad():
                return self._output(chunk, microbatch, given)
        if received is not None:
            received.requires_grad_()
            self._inputs[chunk, microbatch] = received
        with self._meter.measure(chunk, self._chunks[chunk]):
            output = self._output(chunk, microbatch, given)
        self._outputs[chunk, microbatch] = output if output.requires_grad else None
        return output

    def _output(self, chunk: int, microbatch: int, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._chunks[chunk](given)
        if not self._is_last[chunk]:
            return output
        loss = self._loss(output, self._batch(microbatch)[1])
        self.losses.append(loss.detach())
        return loss / self._num_microbatches

    def release(self, chunk: int, microbatch: int) -> None:
        """See :class:`~megatron.adaptive.engine.executor.Stages`."""
        output = self._outputs.get((chunk, microbatch))
        if isinstance(output, torch.Tensor) and not self._is_last[chunk]:
            self._outputs[chunk, microbatch] = get_gradient_edge(output)

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """See :class:`~megatron.adaptive.engine.executor.Stages`."""
        received = self._inputs.pop((chunk, microbatch), None)
        output = self._outputs.pop((chunk, microbatch))
        with _NOTHING if self._stores is None else self._stores[chunk].collect(microbatch):
            if isinstance(output, torch.Tensor):
                torch.autograd.backward(output, gradient)
            elif output is not None:
                assert gradient is not None
                torch.autograd.backward([output], [gradient])
        return None if received is None else received.grad

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """See :class:`~megatron.adaptive.engine.stages.MegatronStages`."""
        if self._stores is None:
            raise ScheduleError(
                f"weight gradients of chunk {chunk}, microbatch {microbatch} were asked for in a "
                "step whose backwards are whole; make its stages with split=True"
            )
        self._stores[chunk].run(microbatch, piece, pieces)

    def finish(self) -> None:
        """End the step, normally or after an error: no layer defers from here on."""
        for store in self._stores or ():
            store.active = False
            store.clear()
        self._deferring.close()


_NOTHING = contextlib.nullcontext()
