"""Splits backward passes into input gradients (B) and deferred weight gradients (W).

A layer that defers its weight gradient describes its computation as a :class:`LayerCall` and runs
the call through :func:`defer`, which hides the weight from autograd. The backward pass then
computes only the input gradient, and keeps the tensors for the weight gradient in the chunk's
:class:`WeightGradientStore`::

    forward      defer(call, x, store) ──> y
    B            dy ──> call.input_gradient ──> dx
                 (call, x, dy) ──> store
    W            store.run ──> call.weight_gradients ──> main_grad or grad

Weights that are hidden from autograd have no ``AccumulateGrad`` node, so hooks on them do not run,
including the hooks of data-parallel wrappers. This module describes the calls of torch's layers,
and :mod:`~megatron.adaptive.engine.deferred_layers` describes the calls of megatron-core's layers.

Source: "Zero Bubble Pipeline Parallelism" (Qi et al., 2023), section 2.1, for splitting the
backward pass.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import SliceCounts, item_label, mirrored

_FLOPS_PER_ELEMENT = 32
"""Cost of moving one element, in floating-point operations.

It is only used to split weight gradients into pieces of equal cost.
"""


class LayerCall:
    """Computes the output, the input gradient and the weight gradients of a layer call.

    Attributes:
        weight: Weight that the call uses. If several calls share the weight, their gradients are
            summed before they are accumulated, as in autograd.
    """

    __slots__ = ()
    weight: torch.nn.Parameter

    def output(self, inputs: torch.Tensor) -> torch.Tensor:
        """Computes the output of the layer from its ``inputs``."""
        raise AssertionError(
            f"{type(self).__name__} does not implement output(), because the layer computes its "
            "output in its own forward pass"
        )

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the input, given the gradient of the layer's output."""
        raise AssertionError(f"{type(self).__name__} does not compute an input gradient")

    def weight_gradients(
        self, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> Iterable[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Returns (parameter, gradient) pairs, except those that the call itself accumulates.

        ``inputs`` are the layer's inputs, and ``gradient`` is the gradient of the layer's output.
        Autograd does not record the operations of this method, because neither argument requires a
        gradient.
        """
        raise NotImplementedError

    def flops(self, gradient: torch.Tensor) -> float:
        """Returns the approximate number of FLOPs of :meth:`weight_gradients` for ``gradient``.

        The default is the cost of a matmul.
        """
        return 2.0 * gradient.numel() / gradient.shape[-1] * self.weight.numel()


@dataclass(frozen=True, slots=True)
class LinearCall(LayerCall):
    """Describes a call of ``torch.nn.functional.linear``: ``[..., in] -> [..., out]``.

    Attributes:
        weight: Weight ``[out, in]``, or ``[in, out]`` if ``turned`` is true.
        bias: Bias ``[out]``, or ``None`` for a layer without a bias.
        turned: Whether the weight is stored in transposed form.
        dtype: Dtype that autocast selects, or ``None`` to keep the dtypes of the tensors.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    turned: bool = False
    dtype: torch.dtype | None = None

    def output(self, inputs: torch.Tensor) -> torch.Tensor:
        """Computes the output of the layer from its ``inputs``."""
        weight = self.weight.t() if self.turned else self.weight
        bias = None if self.bias is None else self._cast(self.bias)
        with torch.autocast(inputs.device.type, enabled=False):
            return F.linear(self._cast(inputs), self._cast(weight), bias)

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the input, given the gradient of the layer's output."""
        weight = self._cast(self.weight)
        rows = gradient.reshape(-1, gradient.shape[-1]).mm(weight.t() if self.turned else weight)
        return rows.view(*gradient.shape[:-1], -1)

    def weight_gradients(
        self, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yields (parameter, gradient) pairs for the weight and, if it is trained, the bias."""
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
    """Describes a call of ``torch.nn.Embedding`` whose weight gradient is dense.

    The shapes are ``[...] int -> [..., width]``.

    Attributes:
        weight: Weight ``[rows, width]``.
        padding_idx: Index of the padding row, which gets no gradient, or -1 if there is no padding
            row.
        scale_grad_by_freq: Whether to divide the gradient of a row by its number of occurrences.
        by_index: Whether to look up rows by indexing, whose backward pass is deterministic on a
            GPU.
    """

    weight: torch.nn.Parameter
    padding_idx: int = -1
    scale_grad_by_freq: bool = False
    by_index: bool = False

    def output(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of the indices in ``inputs``."""
        return self.weight[inputs] if self.by_index else F.embedding(inputs, self.weight)

    def weight_gradients(
        self, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yields the weight and its gradient, as a single pair.

        ``inputs`` are the indices, and ``gradient`` is the gradient of the embeddings.
        """
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
        """Returns the approximate number of FLOPs of :meth:`weight_gradients`."""
        return float(_FLOPS_PER_ELEMENT) * (gradient.numel() + self.weight.numel())


def accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Adds ``gradient`` to the parameter's ``main_grad`` if it exists, otherwise to its ``grad``.

    Autograd and megatron-core's hook use the same tensor and the same operations, so all results
    are bitwise equal.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class _Task(NamedTuple):
    """Call of a layer, with the tensors that are needed to compute its weight gradient."""

    call: LayerCall
    inputs: torch.Tensor
    gradient: torch.Tensor


@dataclass(slots=True)
class _Backlog:
    """Weight gradients of one microbatch that have not been computed yet.

    The weight gradients are in the order in which the backward pass reached the layers. A unit is
    the list of all tasks for one weight. Usually, this is a single task, but there are several
    tasks if several calls share the weight.
    """

    microbatch: int
    units: deque[list[_Task]]
    counts: list[int] = field(default_factory=list)
    next_piece: int = 0


def _run_unit(unit: Sequence[_Task]) -> None:
    """Computes the gradient of one weight for one microbatch, and accumulates it.

    ``unit`` contains the calls in the microbatch that use the weight.

    The gradients of all calls in the microbatch are summed first. Then this sum is added to the
    gradient of earlier microbatches. Autograd uses the same order.
    """
    totals: dict[torch.nn.Parameter, torch.Tensor] = {}
    for task in unit:
        for parameter, gradient in task.call.weight_gradients(task.inputs, task.gradient):
            total = totals.get(parameter)
            totals[parameter] = gradient if total is None else total.add_(gradient)
    for parameter, total in totals.items():
        accumulate(parameter, total)


def piece_sizes(costs: Sequence[float], pieces: int) -> list[int]:
    """Splits a sequence of costs into contiguous groups with approximately equal sums.

    Args:
        costs: Non-negative cost of each element.
        pieces: Number of groups.

    Returns:
        Number of elements in each group, which may be 0.
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
    """Splits ``units`` into ``pieces`` groups, for layers whose cost differs between ranks.

    A unit contains all work for the gradient of one weight, and a group is called a piece. Units
    that communicate must be in the same piece on all ranks. These units are therefore assigned to
    pieces first, by their costs, which are equal on all ranks. The other units then fill up the
    pieces.

    Returns:
        Units in order of pieces, and the number of units in each piece.
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
    """Keeps the tensors for a chunk's deferred weight gradients, and computes the gradients later.

    Layers read :attr:`active` in their forward pass, and only defer weight gradients if it is true.
    A store must not be used by several threads at the same time. Autograd's device threads count as
    the thread that started the backward pass.

    If sequences are cut into slices, "microbatch" here means the index of a slice, counted across
    all microbatches. The slices of a microbatch are processed in descending order.
    """

    def __init__(self) -> None:
        self.active = False
        self.num_slices: SliceCounts = 1
        # Layers whose cost differs between microbatches and ranks, such as experts, set this
        # attribute to True.
        self.is_uneven = False
        self._collected: list[_Task] | None = None
        self._last_collected = -1
        self._after_backward: list[Callable[[], None]] = []
        self._backlog: deque[_Backlog] = deque()
        self._microbatch_bytes = 0
        self._anchors: dict[torch.device, torch.Tensor] = {}
        # Key and result of the last split into pieces. The key consists of the number of units, the
        # number of pieces and a shape. The result is the number of units in each piece. Later
        # microbatches with an equal key are split in the same way.
        self._cut: tuple[tuple[int, int, torch.Size], list[int]] | None = None

    @property
    def pending(self) -> int:
        """Returns the number of microbatches whose weight gradients have not been computed yet."""
        return len(self._backlog)

    @property
    def microbatch_bytes(self) -> int:
        """Returns the size in bytes of the tensors that one microbatch keeps for weight gradients.

        The size is measured for the first collected microbatch, and is 0 until then.
        """
        return self._microbatch_bytes

    def anchor(self, device: torch.device) -> torch.Tensor:
        """Returns an empty tensor on ``device`` that requires a gradient but never gets one.

        A function that has this tensor as an input has a backward pass, even if its other input
        requires no gradient.
        """
        if device not in self._anchors:
            self._anchors[device] = torch.empty(0, device=device, requires_grad=True)
        return self._anchors[device]

    def collect(self, microbatch: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that collects the weight gradients of ``microbatch``.

        The microbatch's backward pass must run within this context.

        Raises:
            ScheduleError: The microbatches are not in ascending order, or another microbatch is
                being collected.
        """
        last = self._last_collected
        if self._collected is not None or self._turn(microbatch) <= self._turn(last):
            raise ScheduleError(
                f"the split backward pass of microbatch {self._label(microbatch)} was started "
                f"after or within the backward pass of microbatch {self._label(last)}; run the "
                "backward passes of a chunk one after the other, with microbatches in ascending "
                "order"
            )
        self._collected = []
        self._last_collected = microbatch
        return _Collecting(self)

    def _turn(self, item: int) -> int:
        """Returns the position of ``item`` in the order of backward passes.

        An ``item`` of -1 means that there is none. In this case, the result is -1.
        """
        if item < 0:
            return -1
        return mirrored(item, self.num_slices)

    def end(self, *, is_whole: bool) -> None:
        """Ends the collection of weight gradients when the context of :meth:`collect` exits.

        If ``is_whole`` is false, the backward pass failed, and the collected tensors are discarded.
        """
        tasks = self._collected
        self._collected = None
        while self._after_backward:
            # Undo changes in reverse order, because a layer may have been called several times.
            self._after_backward.pop()()
        if tasks is None or not is_whole:
            return
        units: dict[int, list[_Task]] = {}
        for task in tasks:
            units.setdefault(id(task.call.weight), []).append(task)
        self._backlog.append(_Backlog(self._last_collected, deque(units.values())))
        if not self._microbatch_bytes:
            tensors = [tensor for task in tasks for tensor in (task.inputs, task.gradient)]
            # Identify storages by object instead of address, because all storages without memory
            # have the same address.
            kept = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}
            self._microbatch_bytes = sum(kept.values())

    def add(self, call: LayerCall, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keeps the tensors that are needed to compute the weight gradient of ``call``.

        The tensors are the layer's ``inputs`` and the ``gradient`` of its output. This method must
        be called within the context of :meth:`collect`.

        Raises:
            ScheduleError: The backward pass of a deferring layer runs outside of :meth:`collect`.
        """
        if self._collected is None:
            raise ScheduleError(
                "the backward pass of a layer that defers its weight gradient must run within "
                "WeightGradientStore.collect; otherwise set active to False before the forward "
                "pass"
            )
        self._collected.append(_Task(call, inputs, gradient))

    def call_after_backward(self, function: Callable[[], None]) -> None:
        """Calls ``function`` when the context of :meth:`collect` exits, even after an error."""
        self._after_backward.append(function)

    def run(self, microbatch: int, piece: int, pieces: int) -> None:
        """Computes one part (piece) of a microbatch's weight gradients.

        All pieces take about the same time. The tensors of a piece are freed after its computation.
        All ranks of the tensor-parallel group must call this method if layers are
        sequence-parallel.

        Args:
            microbatch: Index of the microbatch. The microbatch's backward pass must have run, and
                microbatches must be passed in ascending order.
            piece: Index of the piece. Pieces must be computed in ascending order from 0.
            pieces: Number of pieces, which must be the same in all calls for a microbatch.

        Raises:
            ScheduleError: Another piece of the weight gradients must be computed first.
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
        """Discards all weight gradients not computed yet, so that the next step can start."""
        self._collected = None
        self._last_collected = -1
        self._backlog.clear()

    def _counts(self, units: Sequence[list[_Task]], pieces: int) -> list[int]:
        """Returns the number of units in each of ``pieces`` pieces.

        A unit contains all work for the gradient of one weight.

        The last result is reused if the number of units and the shape of the first gradient have
        not changed.
        """
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
            due = f"microbatch {self._label(first.microbatch)}, piece {first.next_piece} of "
            due += str(expected)
            if (microbatch, piece, pieces) == (first.microbatch, first.next_piece, expected):
                return
        raise ScheduleError(
            f"weight gradients of microbatch {self._label(microbatch)}, piece {piece} of "
            f"{pieces} were requested, but {due} is due; request each piece once, after its "
            "backward pass, with microbatches and pieces in ascending order"
        )

    def _label(self, item: int) -> str:
        return item_label(item, self.num_slices)


class _Collecting:
    """Implements the context manager of :meth:`WeightGradientStore.collect`.

    A class is faster here than a generator with ``contextlib.contextmanager``.
    """

    __slots__ = ("_store",)

    def __init__(self, store: WeightGradientStore) -> None:
        self._store = store

    def __enter__(self) -> None: ...

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._store.end(is_whole=error is None)


class SplitStages:
    """Base class of a rank's stages, which computes the deferred weight gradients of a step.

    Implementations of ``executor.Stages`` derive from this class.

    Args:
        stores: Store of deferred weight gradients for each chunk of this rank, or ``None`` if the
            backward pass computes weight gradients.
        num_slices: Number of slices into which the sequences of each microbatch are cut.
    """

    def __init__(
        self, stores: Sequence[WeightGradientStore] | None, *, num_slices: SliceCounts = 1
    ) -> None:
        self._stores = stores
        self._num_slices = num_slices
        for store in stores or ():
            store.clear()
            store.num_slices = num_slices
            store.active = True

    def after_backward(self, chunk: int, microbatch: int) -> None:
        """Does nothing, because these stages do no work after a backward pass."""

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Computes one part of the weight gradients that the backward pass (B) has deferred.

        See ``executor.Stages`` for the arguments.

        Raises:
            ScheduleError: Another part must be computed first, or the backward passes of this step
                do not defer weight gradients.
        """
        if self._stores is None:
            raise ScheduleError(
                f"weight gradients of chunk {chunk}, microbatch "
                f"{item_label(microbatch, self._num_slices)} were requested in a step that does "
                "not split backward passes; request them only after split backward passes"
            )
        self._stores[chunk].run(microbatch, piece, pieces)

    def retained_bytes(self, chunk: int, microbatch: int) -> int:
        """Returns the size in bytes of the tensors that a microbatch keeps for weight gradients.

        The size is measured in the first B, and is 0 until then.
        """
        return 0 if self._stores is None else self._stores[chunk].microbatch_bytes

    def finish(self) -> None:
        """Discards remaining weight gradients and deactivates the stores.

        This must be called at the end of a step and after an error.
        """
        for store in self._stores or ():
            store.active = False
            store.clear()


class _Defer(torch.autograd.Function):
    """Runs a layer call as an autograd function that hides the parameters from autograd."""

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
        # Detach the inputs and the gradient. Otherwise, they would keep their autograd graph alive
        # until the weight gradient is computed. The gradient itself may require a gradient if it
        # shares memory with an output. This happens with megatron-core's cross entropy.
        kept = gradient.detach() if gradient.requires_grad else gradient
        ctx.store.add(ctx.call, inputs.detach(), kept)
        needs_input = ctx.needs_input_grad[0]
        return ctx.call.input_gradient(gradient) if needs_input else None, None, None, None


def is_deferring(store: WeightGradientStore, weight: torch.Tensor) -> bool:
    """Returns whether a layer must defer the gradient of ``weight`` to ``store``.

    The result is False if the store is inactive, if gradients are disabled, or if the weight is
    computed from other tensors.
    """
    return store.active and torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf


def defer(call: LayerCall, inputs: torch.Tensor, store: WeightGradientStore) -> torch.Tensor:
    """Runs a layer call and returns its output. The weight gradient is computed later.

    Args:
        call: Layer call to run, which contains the layer's parameters.
        inputs: Input of the layer, which ``store`` keeps until the weight gradient is computed.
        store: Store of the layer's chunk.
    """
    anchor = None if inputs.requires_grad else store.anchor(call.weight.device)
    function: Any = _Defer  # torch declares no types for ``apply``.
    output: torch.Tensor = function.apply(inputs, anchor, call, store)
    return output
