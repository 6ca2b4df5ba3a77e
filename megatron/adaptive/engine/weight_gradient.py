"""Defers weight gradients: splits a backward into B by inputs and W by weights.

A layer that defers runs its arithmetic as a :class:`LayerCall` through :func:`defer`, which hides
the weight from autograd. The backward then computes the input gradient only. It keeps the tensors
for the weight gradient in the chunk's :class:`WeightGradientStore`::

    forward      defer(call, x, store) ──> y
    B            dy ──> call.input_gradient ──> dx
                 (call, x, dy) ──> store
    W            store.run ──> call.weight_gradients ──> main_grad or grad

Hidden weights have no ``AccumulateGrad`` node, so hooks on them do not run, including those of
data-parallel wrappers. This module owns the calls of torch's layers; those of megatron-core are in
:mod:`~megatron.adaptive.engine.deferred_layers`.

Source: "Zero Bubble Pipeline Parallelism" (Qi et al., 2023), section 2.1, for the split itself.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from megatron.adaptive.errors import ScheduleError

_FLOPS_PER_ELEMENT = 32
"""Cost of moving one element, in floating-point operations; used only to balance pieces."""


class LayerCall:
    """Computes the output of one call of a layer, its input gradient and its weight gradients.

    Attributes:
        weight: Weight of the call. Gradients of calls that share it are summed first, as in
            autograd.
    """

    __slots__ = ()
    weight: torch.nn.Parameter

    def output(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the output of the layer for its input."""
        raise AssertionError(f"{type(self).__name__}: the layer runs its own forward")

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the input from that of the output."""
        raise AssertionError(f"{type(self).__name__}: there is no gradient of the input")

    def weight_gradients(
        self, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> Iterable[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Returns the gradient of each parameter, except those that it has already accumulated.

        Neither argument requires a gradient, so autograd records nothing.
        """
        raise NotImplementedError

    def flops(self, gradient: torch.Tensor) -> float:
        """Returns the approximate cost of :meth:`weight_gradients` in FLOPs, here of a product."""
        return 2.0 * gradient.numel() / gradient.shape[-1] * self.weight.numel()


@dataclass(frozen=True, slots=True)
class LinearCall(LayerCall):
    """Computes a call of ``torch.nn.functional.linear``: ``[..., in] -> [..., out]``.

    Attributes:
        weight: Weight ``[out, in]``, or ``[in, out]`` if it is ``turned``.
        bias: Bias ``[out]`` or ``None``.
        turned: Whether the weight is transposed.
        dtype: Element type of the computation under autocast, ``None`` for that of the tensors.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    turned: bool = False
    dtype: torch.dtype | None = None

    def output(self, inputs: torch.Tensor) -> torch.Tensor:
        """Implements :class:`LayerCall`."""
        weight = self.weight.t() if self.turned else self.weight
        bias = None if self.bias is None else self._cast(self.bias)
        with torch.autocast(inputs.device.type, enabled=False):
            return F.linear(self._cast(inputs), self._cast(weight), bias)

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Implements :class:`LayerCall`."""
        weight = self._cast(self.weight)
        rows = gradient.reshape(-1, gradient.shape[-1]).mm(weight.t() if self.turned else weight)
        return rows.view(*gradient.shape[:-1], -1)

    def weight_gradients(
        self, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Implements :class:`LayerCall`."""
        gradient = gradient.reshape(-1, gradient.shape[-1])
        inputs = self._cast(inputs).reshape(-1, inputs.shape[-1])
        product = inputs.t().mm(gradient) if self.turned else gradient.t().mm(inputs)
        yield self.weight, product.to(self.weight.dtype)
        if self.bias is not None and self.bias.requires_grad:
            yield self.bias, gradient.sum(dim=0).to(self.bias.dtype)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.dtype is None else tensor.to(self.dtype)


@dataclass(frozen=True, slots=True)
class EmbeddingCall(LayerCall):
    """Computes a call of ``torch.nn.Embedding`` with a dense gradient.

    The shapes are ``[...] int -> [..., width]``.

    Attributes:
        weight: Weight ``[rows, width]``.
        padding_idx: Index of the row without a gradient, -1 for none.
        scale_grad_by_freq: Same as in torch.
        by_index: True to look up by indexing, whose backward is deterministic on a GPU.
    """

    weight: torch.nn.Parameter
    padding_idx: int = -1
    scale_grad_by_freq: bool = False
    by_index: bool = False

    def output(self, inputs: torch.Tensor) -> torch.Tensor:
        """Implements :class:`LayerCall`."""
        return self.weight[inputs] if self.by_index else F.embedding(inputs, self.weight)

    def weight_gradients(
        self, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Implements :class:`LayerCall`."""
        if self.by_index:
            total = gradient.new_zeros(self.weight.shape)
            yield self.weight, total.index_put_((inputs,), gradient, accumulate=True)
        else:
            yield (
                self.weight,
                torch.ops.aten.embedding_dense_backward(
                    gradient,
                    inputs,
                    self.weight.shape[0],
                    self.padding_idx,
                    self.scale_grad_by_freq,
                ),
            )

    def flops(self, gradient: torch.Tensor) -> float:
        """Implements :class:`LayerCall`."""
        return float(_FLOPS_PER_ELEMENT) * (gradient.numel() + self.weight.numel())


def accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Adds a microbatch's gradient to the tensor that autograd and megatron-core's hook would use.

    This is ``main_grad`` if the parameter has one, else ``grad``. The operations are the same, so
    that the sums are equal bit by bit.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class _Task(NamedTuple):
    """Describes a call whose weight gradient is still to be computed."""

    call: LayerCall
    inputs: torch.Tensor
    gradient: torch.Tensor


@dataclass(slots=True)
class _Backlog:
    """Lists the remaining tasks of one microbatch, in the order of its backward.

    A unit contains the tasks of one weight: usually one, and several if calls share the weight.
    """

    microbatch: int
    units: deque[list[_Task]]
    counts: list[int] = field(default_factory=list)
    next_piece: int = 0


def _run_unit(unit: Sequence[_Task]) -> None:
    """Computes the gradient of a weight for one microbatch.

    Sums the gradients of a parameter within the microbatch first, and then adds them to those of
    earlier microbatches, in the same order as autograd.
    """
    totals: dict[torch.nn.Parameter, torch.Tensor] = {}
    for task in unit:
        for parameter, gradient in task.call.weight_gradients(task.inputs, task.gradient):
            total = totals.get(parameter)
            totals[parameter] = gradient if total is None else total.add_(gradient)
    for parameter, total in totals.items():
        accumulate(parameter, total)


def piece_sizes(costs: Sequence[float], pieces: int) -> list[int]:
    """Cuts a row of costs into contiguous groups of about equal sums.

    Args:
        costs: Cost of each element, at least 0.
        pieces: Number of groups.

    Returns:
        Number of elements of each group, which may be 0.
    """
    sizes = [0] * pieces
    whole = sum(costs)
    before = 0.0
    for cost in costs:
        middle = (before + cost / 2) / whole if whole > 0 else 0.0
        sizes[min(pieces - 1, int(middle * pieces))] += 1
        before += cost
    return sizes


def uneven_pieces(
    units: Iterable[list[_Task]], pieces: int
) -> tuple[deque[list[_Task]], list[int]]:
    """Cuts units into pieces if their costs differ from rank to rank, as those of experts do.

    Units that communicate must be in the same piece on all ranks. So they are divided first, by
    their costs alone, and the other units fill up the pieces.

    Returns:
        Units in the order of their pieces, and number of units of each piece.
    """
    common: list[tuple[float, list[_Task]]] = []
    local: deque[tuple[float, list[_Task]]] = deque()
    for unit in units:
        cost = sum(task.call.flops(task.gradient) for task in unit)
        meets = any(getattr(task.call, "sequence_group", None) is not None for task in unit)
        (common if meets else local).append((cost, unit))
    whole = sum(cost for cost, _ in (*common, *local))
    done = 0.0
    order = deque[list[_Task]]()
    counts = []
    waiting = iter(common)
    for number, size in enumerate(piece_sizes([cost for cost, _ in common], pieces), 1):
        before = len(order)
        for cost, unit in itertools.islice(waiting, size):
            order.append(unit)
            done += cost
        while local and (number == pieces or (done + local[0][0] / 2) * pieces < whole * number):
            cost, unit = local.popleft()
            order.append(unit)
            done += cost
        counts.append(len(order) - before)
    return order, counts


class WeightGradientStore:
    """Keeps the deferred weight gradients of one model chunk.

    Layers read :attr:`active` in their forward and defer only while it is set. One thread at a time
    uses a store; autograd's device threads count as part of the backward that started them.
    """

    def __init__(self) -> None:
        self.active = False
        # Layers whose cost differs between microbatches and ranks set it.
        self.is_uneven = False
        self._collected: list[_Task] | None = None
        self._last_collected = -1
        self._backlog: deque[_Backlog] = deque()
        self._microbatch_bytes = 0
        self._anchors: dict[torch.device, torch.Tensor] = {}
        # Pieces of the last microbatch, with a key: the next microbatch reuses them if its key is
        # equal.
        self._cut: tuple[tuple[int, int, torch.Size], list[int]] | None = None

    @property
    def pending(self) -> int:
        """Returns the number of microbatches whose weight gradients are not all computed."""
        return len(self._backlog)

    @property
    def microbatch_bytes(self) -> int:
        """Returns the bytes kept from B to W of the first collected microbatch, 0 before it."""
        return self._microbatch_bytes

    def anchor(self, device: torch.device) -> torch.Tensor:
        """Returns a tensor that requires a gradient and never gets one.

        It keeps a call in the graph if the input of the call requires no gradient.
        """
        if device not in self._anchors:
            self._anchors[device] = torch.empty(0, device=device, requires_grad=True)
        return self._anchors[device]

    def collect(self, microbatch: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context that collects the weight gradients of a microbatch's backward.

        Raises:
            ScheduleError: Microbatches do not ascend, or another one is being collected.
        """
        if self._collected is not None or microbatch <= self._last_collected:
            raise ScheduleError(
                f"a split backward of microbatch {microbatch} was started after or within that of "
                f"microbatch {self._last_collected}; run the backwards of a chunk one after the "
                "other in ascending order"
            )
        self._collected = []
        self._last_collected = microbatch
        return _Collecting(self)

    def end(self, *, is_whole: bool) -> None:
        """Ends :meth:`collect`; its context calls this. A failed backward leaves nothing."""
        tasks = self._collected
        self._collected = None
        if tasks is None or not is_whole:
            return
        units: dict[int, list[_Task]] = {}
        for task in tasks:
            units.setdefault(id(task.call.weight), []).append(task)
        self._backlog.append(_Backlog(self._last_collected, deque(units.values())))
        if not self._microbatch_bytes:
            tensors = [tensor for task in tasks for tensor in (task.inputs, task.gradient)]
            # Identify storages by object, because those without memory share one address.
            kept = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}
            self._microbatch_bytes = sum(kept.values())

    def add(self, call: LayerCall, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keeps the tensors for the weight gradient of a call, within :meth:`collect` only.

        Raises:
            ScheduleError: A backward through deferring layers runs outside of :meth:`collect`.
        """
        if self._collected is None:
            raise ScheduleError(
                "a backward ran through a layer that defers its weight gradient, but not as a "
                "split backward; run it within WeightGradientStore.collect, or set active to "
                "False before the forward"
            )
        self._collected.append(_Task(call, inputs, gradient))

    def run(self, microbatch: int, piece: int, pieces: int) -> None:
        """Computes one of ``pieces`` about equal parts of a microbatch's weight gradients.

        The tensors of a part are freed as soon as it is done. Collective over the tensor-parallel
        group if layers are sequence-parallel.

        Args:
            microbatch: Index of the microbatch, ascending; its backward must have run.
            piece: Index of the part, ascending from 0 within the microbatch.
            pieces: Number of parts, the same for all parts of a microbatch.

        Raises:
            ScheduleError: Another part is next.
        """
        self._check_turn(microbatch, piece, pieces)
        backlog = self._backlog[0]
        if piece == 0:
            if self.is_uneven:
                backlog.units, backlog.counts = uneven_pieces(backlog.units, pieces)
            else:
                backlog.counts = self._counts(backlog.units, pieces)
        backlog.next_piece += 1
        for _ in range(backlog.counts[piece]):
            _run_unit(backlog.units.popleft())
        if backlog.next_piece == pieces:
            self._backlog.popleft()

    def clear(self) -> None:
        """Removes everything that is pending, before the next step."""
        self._collected = None
        self._last_collected = -1
        self._backlog.clear()

    def _counts(self, units: Sequence[list[_Task]], pieces: int) -> list[int]:
        """Returns the number of units of each piece; reuses the last result for like units."""
        if not units:
            return [0] * pieces
        key = (len(units), pieces, units[0][0].gradient.shape)
        if self._cut is None or self._cut[0] != key:
            costs = [sum(t.call.flops(t.gradient) for t in unit) for unit in units]
            self._cut = (key, piece_sizes(costs, pieces))
        return self._cut[1]

    def _check_turn(self, microbatch: int, piece: int, pieces: int) -> None:
        first = self._backlog[0] if self._backlog else None
        due = "nothing"
        if first is not None and 0 <= piece < pieces:
            expected = len(first.counts) or pieces
            due = f"microbatch {first.microbatch}, piece {first.next_piece} of {expected}"
            if (microbatch, piece, pieces) == (first.microbatch, first.next_piece, expected):
                return
        raise ScheduleError(
            f"weight gradients of microbatch {microbatch}, piece {piece} of {pieces} were asked "
            f"for where {due} is due: ask for each once, after its backward, microbatches and "
            "pieces in ascending order"
        )


class _Collecting:
    """Implements the context of :meth:`WeightGradientStore.collect`, faster than a generator."""

    __slots__ = ("_store",)

    def __init__(self, store: WeightGradientStore) -> None:
        self._store = store

    def __enter__(self) -> None: ...

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._store.end(is_whole=error is None)


class SplitStages:
    """Computes the weight gradients of a step, as a base class for ``executor.Stages``.

    Args:
        stores: Stores of the rank's chunks, ``None`` for whole backwards.
    """

    def __init__(self, stores: Sequence[WeightGradientStore] | None) -> None:
        self._stores = stores
        for store in stores or ():
            store.clear()
            store.active = True

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Computes a part of the weight gradients that a split backward deferred.

        Raises:
            ScheduleError: Another part is next, or backwards are not split.
        """
        if self._stores is None:
            raise ScheduleError(
                f"weight gradients of chunk {chunk}, microbatch {microbatch} were asked for in a "
                "step whose backwards are whole; split them"
            )
        self._stores[chunk].run(microbatch, piece, pieces)

    def retained_bytes(self, chunk: int, microbatch: int) -> int:
        """Returns the bytes that a split backward keeps, measured at the first one; 0 before it."""
        return 0 if self._stores is None else self._stores[chunk].microbatch_bytes

    def finish(self) -> None:
        """Ends the step, normally or after an error."""
        for store in self._stores or ():
            store.active = False
            store.clear()


class _Defer(torch.autograd.Function):
    """Runs a call and hides its parameters from autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        anchor: torch.Tensor | None,
        call: LayerCall,
        store: WeightGradientStore,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.call = call
        ctx.store = store
        return call.output(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        (gradient,) = gradients
        # Detach both, or they would keep the graph before them until the weight gradient is
        # computed. A gradient requires one itself if it shares memory with an output, as the
        # gradient of megatron-core's cross entropy does.
        kept = gradient.detach() if gradient.requires_grad else gradient
        ctx.store.add(ctx.call, inputs.detach(), kept)
        needs_input = ctx.needs_input_grad[0]
        return ctx.call.input_gradient(gradient) if needs_input else None, None, None, None


def is_deferring(store: WeightGradientStore, weight: torch.Tensor) -> bool:
    """Returns whether a layer with this store defers the gradient of ``weight`` now.

    It does not if gradients are off, or if the weight is computed from other tensors.
    """
    return store.active and torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf


def defer(call: LayerCall, inputs: torch.Tensor, store: WeightGradientStore) -> torch.Tensor:
    """Returns the output of a call whose weight gradient goes to ``store``.

    Args:
        call: Arithmetic of the call, with its parameters.
        inputs: Input of the layer; kept until the weight gradient is computed.
        store: Store of the chunk.
    """
    anchor = None if inputs.requires_grad else store.anchor(call.weight.device)
    output: torch.Tensor = _Defer.apply(inputs, anchor, call, store)
    return output
