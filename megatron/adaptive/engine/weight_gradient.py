"""Weight gradients put off: a backward in two halves, B by inputs and W by weights.

A layer that defers runs its arithmetic as a :class:`LayerCall` through :func:`defer`. Its weight is
then unknown to autograd: the backward gives the input gradient only, and leaves what the weight
gradient needs in the chunk's :class:`WeightGradientStore`::

    forward      defer(call, x, store) ──> y
    B            dy ──> call.input_gradient ──> dx
                 (call, x, dy) ──> store
    W            store.run ──> call.weight_gradients ──> main_grad or grad

Weights outside of autograd have no ``AccumulateGrad`` node: hooks on them, those of
data-parallel wrappers included, do not run. This module knows layers of torch only; those of
megatron-core are in :mod:`~megatron.adaptive.engine.deferred_layers`.

Source: "Zero Bubble Pipeline Parallelism" (Qi et al., 2023), section 2.1, for the split as such.
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

# What moving one element costs, in multiply-adds it could do instead. Only balances pieces.
_FLOPS_PER_ELEMENT = 32


class LayerCall:
    """Computes the parts of one call of a layer: output, gradient of the input, those of weights.

    Attributes:
        weight: calls that share one are accumulated as autograd would.
    """

    __slots__ = ()
    weight: torch.nn.Parameter

    def output(self, given: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for its input."""
        raise AssertionError(f"{type(self).__name__}: the layer runs its own forward")

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input from that of the output."""
        raise AssertionError(f"{type(self).__name__}: there is no gradient of the input")

    def weight_gradients(
        self, given: torch.Tensor, gradient: torch.Tensor
    ) -> Iterable[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return the gradient of each parameter that is not already added where it belongs.

        Neither tensor requires a gradient, so that none of this is recorded.
        """
        raise NotImplementedError

    def flops(self, gradient: torch.Tensor) -> float:
        """Return roughly how much work :meth:`weight_gradients` is; here, of a product."""
        return 2.0 * gradient.numel() / gradient.shape[-1] * self.weight.numel()


@dataclass(frozen=True, slots=True)
class LinearCall(LayerCall):
    """A call of ``torch.nn.functional.linear``: ``[..., in] -> [..., out]``.

    Attributes:
        weight: ``[out, in]``, or ``[in, out]`` where it is ``turned``.
        bias: ``[out]``.
        turned: see ``weight``.
        dtype: that it computes in under autocast, ``None`` for the tensors' own.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    turned: bool = False
    dtype: torch.dtype | None = None

    def output(self, given: torch.Tensor) -> torch.Tensor:
        """Implements :class:`LayerCall`."""
        weight = self.weight.t() if self.turned else self.weight
        bias = None if self.bias is None else self._cast(self.bias)
        with torch.autocast(given.device.type, enabled=False):
            return F.linear(self._cast(given), self._cast(weight), bias)

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Implements :class:`LayerCall`."""
        weight = self._cast(self.weight)
        rows = gradient.reshape(-1, gradient.shape[-1]).mm(weight.t() if self.turned else weight)
        return rows.view(*gradient.shape[:-1], -1)

    def weight_gradients(
        self, given: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Implements :class:`LayerCall`."""
        gradient = gradient.reshape(-1, gradient.shape[-1])
        given = self._cast(given).reshape(-1, given.shape[-1])
        product = given.t().mm(gradient) if self.turned else gradient.t().mm(given)
        yield self.weight, product.to(self.weight.dtype)
        if self.bias is not None and self.bias.requires_grad:
            yield self.bias, gradient.sum(dim=0).to(self.bias.dtype)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.dtype is None else tensor.to(self.dtype)


@dataclass(frozen=True, slots=True)
class EmbeddingCall(LayerCall):
    """A call of ``torch.nn.Embedding`` with a dense gradient: ``[...] int -> [..., width]``.

    Attributes:
        weight: ``[rows, width]``.
        padding_idx: row without gradient, -1 for none.
        scale_grad_by_freq: as in torch.
        by_index: look up by indexing, whose backward is deterministic on a GPU.
    """

    weight: torch.nn.Parameter
    padding_idx: int = -1
    scale_grad_by_freq: bool = False
    by_index: bool = False

    def output(self, given: torch.Tensor) -> torch.Tensor:
        """Implements :class:`LayerCall`."""
        return self.weight[given] if self.by_index else F.embedding(given, self.weight)

    def weight_gradients(
        self, given: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Implements :class:`LayerCall`."""
        if self.by_index:
            total = gradient.new_zeros(self.weight.shape)
            yield self.weight, total.index_put_((given,), gradient, accumulate=True)
        else:
            yield (
                self.weight,
                torch.ops.aten.embedding_dense_backward(
                    gradient, given, self.weight.shape[0], self.padding_idx, self.scale_grad_by_freq
                ),
            )

    def flops(self, gradient: torch.Tensor) -> float:
        """Implements :class:`LayerCall`."""
        return float(_FLOPS_PER_ELEMENT) * (gradient.numel() + self.weight.numel())


def accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Add a microbatch's gradient where autograd and megatron-core's hook would have put it.

    That is ``main_grad`` of a parameter that has one, ``grad`` otherwise; the operations are
    theirs, so that the sums are equal to the bit.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class _Task(NamedTuple):
    """One call whose weight gradient is due."""

    call: LayerCall
    given: torch.Tensor
    gradient: torch.Tensor


@dataclass(slots=True)
class _Backlog:
    """Holds what one microbatch has left to do, in the order of its backward.

    A unit is the tasks of one weight: mostly one, more where a weight is shared.
    """

    microbatch: int
    units: deque[list[_Task]]
    counts: list[int] = field(default_factory=list)
    next_piece: int = 0


def _run_unit(unit: Sequence[_Task]) -> None:
    """Compute a weight's gradient of a microbatch.

    Autograd sums a microbatch's gradients of a parameter before they are added to those of
    earlier microbatches; so does this.
    """
    totals: dict[torch.nn.Parameter, torch.Tensor] = {}
    for task in unit:
        for parameter, gradient in task.call.weight_gradients(task.given, task.gradient):
            total = totals.get(parameter)
            totals[parameter] = gradient if total is None else total.add_(gradient)
    for parameter, total in totals.items():
        accumulate(parameter, total)


def piece_sizes(costs: Sequence[float], pieces: int) -> list[int]:
    """Cut a row of costs into contiguous groups of about equal sums.

    Args:
        costs: what each element costs, at least 0.
        pieces: number of groups.

    Returns:
        How many elements each group has; 0 for a group that is empty.
    """
    sizes = [0] * pieces
    whole, before = sum(costs), 0.0
    for cost in costs:
        middle = (before + cost / 2) / whole if whole > 0 else 0.0
        sizes[min(pieces - 1, int(middle * pieces))] += 1
        before += cost
    return sizes


def uneven_pieces(
    units: Iterable[list[_Task]], pieces: int
) -> tuple[deque[list[_Task]], list[int]]:
    """Cuts units whose work each rank has its own of, as experts have.

    Units that communicate are in the same piece on all ranks, whatever the others have: they are
    shared out by themselves, and the others fill the pieces up.

    Returns:
        The units in the order of their pieces, and how many each piece has.
    """
    common: list[tuple[float, list[_Task]]] = []
    own: deque[tuple[float, list[_Task]]] = deque()
    for unit in units:
        cost = sum(task.call.flops(task.gradient) for task in unit)
        meets = any(getattr(task.call, "sequence_group", None) is not None for task in unit)
        (common if meets else own).append((cost, unit))
    whole = sum(cost for cost, _ in (*common, *own))
    done, order, counts = 0.0, deque[list[_Task]](), []
    waiting = iter(common)
    for number, size in enumerate(piece_sizes([cost for cost, _ in common], pieces), 1):
        before = len(order)
        for cost, unit in itertools.islice(waiting, size):
            order.append(unit)
            done += cost
        while own and (number == pieces or (done + own[0][0] / 2) * pieces < whole * number):
            cost, unit = own.popleft()
            order.append(unit)
            done += cost
        counts.append(len(order) - before)
    return order, counts


class WeightGradientStore:
    """The weight gradients that one model chunk still owes.

    Layers look at :attr:`active` in their forward and defer only while it is set. One thread at a
    time uses a store; autograd's device threads count as part of the backward that started them.
    """

    def __init__(self) -> None:
        self.active = False
        # Layers set it whose work differs from microbatch to microbatch and from rank to rank.
        self.is_uneven = False
        self._collected: list[_Task] | None = None
        self._last_collected = -1
        self._backlog: deque[_Backlog] = deque()
        self._microbatch_bytes = 0
        self._anchors: dict[torch.device, torch.Tensor] = {}
        # Of the last microbatch that was cut: by what its calls have in common with the next one's.
        self._cut: tuple[tuple[int, int, torch.Size], list[int]] | None = None

    @property
    def pending(self) -> int:
        """Microbatches whose weight gradients are not all computed."""
        return len(self._backlog)

    @property
    def microbatch_bytes(self) -> int:
        """Bytes kept between B and W of the first microbatch that was collected, 0 before it."""
        return self._microbatch_bytes

    def anchor(self, device: torch.device) -> torch.Tensor:
        """Return a tensor that requires a gradient and never gets one.

        It keeps a call in the graph whose input requires no gradient.
        """
        if device not in self._anchors:
            self._anchors[device] = torch.empty(0, device=device, requires_grad=True)
        return self._anchors[device]

    def collect(self, microbatch: int) -> contextlib.AbstractContextManager[None]:
        """Take the weight gradients of the backward that runs within as those of ``microbatch``.

        Raises:
            ScheduleError: microbatches do not ascend, or another is being collected.
        """
        if self._collected is not None or microbatch <= self._last_collected:
            raise ScheduleError(
                f"a split backward of microbatch {microbatch} was started after or within that of "
                f"microbatch {self._last_collected}; run the backwards of a chunk one after the "
                "other in ascending order"
            )
        self._collected, self._last_collected = [], microbatch
        return _Collecting(self)

    def end(self, *, is_whole: bool) -> None:
        """End :meth:`collect`, whose context calls this; a backward that failed leaves nothing."""
        tasks, self._collected = self._collected, None
        if tasks is None or not is_whole:
            return
        units: dict[int, list[_Task]] = {}
        for task in tasks:
            units.setdefault(id(task.call.weight), []).append(task)
        self._backlog.append(_Backlog(self._last_collected, deque(units.values())))
        if not self._microbatch_bytes:
            tensors = [tensor for task in tasks for tensor in (task.given, task.gradient)]
            # By their object: those without memory all lie at one address.
            kept = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}
            self._microbatch_bytes = sum(kept.values())

    def add(self, call: LayerCall, given: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep what a call's weight gradient needs; within :meth:`collect` only.

        Raises:
            ScheduleError: a backward of a graph with deferring layers runs outside of it.
        """
        if self._collected is None:
            raise ScheduleError(
                "a backward ran through a layer that defers its weight gradient, but not as a "
                "split backward; run it within WeightGradientStore.collect, or set active to "
                "False before the forward"
            )
        self._collected.append(_Task(call, given, gradient))

    def run(self, microbatch: int, piece: int, pieces: int) -> None:
        """Compute one of ``pieces`` about equal parts of a microbatch's weight gradients.

        What a part needed is freed as soon as it is done. Collective over the tensor-parallel
        group where layers are sequence-parallel.

        Args:
            microbatch: ascending, after its backward.
            piece: ascending from 0 within the microbatch.
            pieces: the same for all pieces of a microbatch.

        Raises:
            ScheduleError: another piece is next.
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
        """Forget everything that is pending; the next step may start."""
        self._collected = None
        self._last_collected = -1
        self._backlog.clear()

    def _counts(self, units: Sequence[list[_Task]], pieces: int) -> list[int]:
        """Returns how many of the units each piece has; found anew where the first one differs."""
        if not units:
            return [0] * pieces
        like = (len(units), pieces, units[0][0].gradient.shape)
        if self._cut is None or self._cut[0] != like:
            costs = [sum(t.call.flops(t.gradient) for t in unit) for unit in units]
            self._cut = (like, piece_sizes(costs, pieces))
        return self._cut[1]

    def _check_turn(self, microbatch: int, piece: int, pieces: int) -> None:
        first, due = self._backlog[0] if self._backlog else None, "nothing"
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
    """The context of :meth:`WeightGradientStore.collect`; that of a generator is far slower."""

    __slots__ = ("_store",)

    def __init__(self, store: WeightGradientStore) -> None:
        self._store = store

    def __enter__(self) -> None: ...

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._store.end(is_whole=error is None)


class SplitStages:
    """Runs the weight gradients of a step's stages; base of classes of ``executor.Stages``.

    Args:
        stores: of the rank's chunks, ``None`` for whole backwards.
    """

    def __init__(self, stores: Sequence[WeightGradientStore] | None) -> None:
        self._stores = stores
        for store in stores or ():
            store.clear()
            store.active = True

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Compute a part of the weight gradients that a split backward left.

        Raises:
            ScheduleError: another part is next, or backwards are not split.
        """
        if self._stores is None:
            raise ScheduleError(
                f"weight gradients of chunk {chunk}, microbatch {microbatch} were asked for in a "
                "step whose backwards are whole; split them"
            )
        self._stores[chunk].run(microbatch, piece, pieces)

    def retained_bytes(self, chunk: int, microbatch: int) -> int:
        """Bytes that a split backward leaves, measured at the first one; 0 before it."""
        return 0 if self._stores is None else self._stores[chunk].microbatch_bytes

    def finish(self) -> None:
        """End the step, normally or after an error."""
        for store in self._stores or ():
            store.active = False
            store.clear()


class _Defer(torch.autograd.Function):
    """Runs a call without telling autograd of its parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        anchor: torch.Tensor | None,
        call: LayerCall,
        store: WeightGradientStore,
    ) -> torch.Tensor:
        ctx.save_for_backward(given)
        ctx.call = call
        ctx.store = store
        return call.output(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (given,), (gradient,) = ctx.saved_tensors, gradients
        # Detached, or it would keep the graph before it until the weight gradient is computed. So
        # would a gradient in the memory of an output: megatron-core's cross entropy makes one.
        own = gradient.detach() if gradient.requires_grad else gradient
        ctx.store.add(ctx.call, given.detach(), own)
        wanted = ctx.needs_input_grad[0]
        return ctx.call.input_gradient(gradient) if wanted else None, None, None, None


def is_deferring(store: WeightGradientStore, weight: torch.Tensor) -> bool:
    """Return whether a layer with this store defers the gradient of ``weight`` now.

    Not without gradients, and not of a weight that is computed from others.
    """
    return store.active and torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf


def defer(call: LayerCall, given: torch.Tensor, store: WeightGradientStore) -> torch.Tensor:
    """Return the output of a call whose weight gradient goes to ``store``.

    Args:
        call: the arithmetic, with its parameters.
        given: the layer's input; kept until the weight gradient is computed.
        store: the chunk's store.
    """
    anchor = None if given.requires_grad else store.anchor(call.weight.device)
    output: torch.Tensor = _Defer.apply(given, anchor, call, store)
    return output
