"""Describes a recorded forward pass (a tape): its tensors, and its torch calls in order.

Every recorded tensor has an index on the tape. The arguments of recorded calls refer to a tensor by
this index.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch

from megatron.adaptive.modules.host_memory import MUTABLE


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor in recorded arguments, and contains the tensor's index on the tape."""

    value: int


@dataclass(slots=True, kw_only=True)
class Value:
    """Describes a tensor of the recorded forward pass.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        requires_grad: Whether the tensor required a gradient in the recorded forward pass.
        source: Origin of the tensor: ``input``, ``parameter``, ``buffer`` or ``constant``; empty if
            a recorded call computed it.
        name: Name of the input, parameter or buffer; empty for other tensors.
        tensor: The tensor itself if it is a constant, otherwise ``None``.
        made_by: Index of the call that computed the tensor; -1 if no recorded call computed it.
        storage: Address of the tensor's memory, the same for tensors that share memory; 0 if the
            tensor has no storage.
        varies: Whether the tensor depends on an input, a parameter or a random number.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    source: str = ""
    name: str = ""
    tensor: torch.Tensor | None = None
    made_by: int = -1
    storage: int = 0
    varies: bool = True


@dataclass(slots=True, kw_only=True)
class Call:
    """Describes a recorded call of a torch function.

    Attributes:
        function: Function that was called.
        args: Positional arguments, with a :class:`Ref` in place of every tensor.
        kwargs: Keyword arguments, with a :class:`Ref` in place of every tensor.
        reads: Tape indices of the tensors in the arguments.
        outputs: Tape index of each new tensor, and the tensor's path (indices and keys) in the
            result of the call.
        changes: Two tape indices for each argument that the call changed in place: the index before
            the call, and the index after the call.
        segment: Index of the call's segment, which is the number of cut points reached before.
        is_random: Whether the call drew random numbers.
        with_grad: Whether gradients were enabled during the call.
        autocast: Autocast dtype; ``None`` if autocast was off.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    outputs: tuple[tuple[int, tuple[Any, ...]], ...]
    changes: tuple[tuple[int, int], ...]
    segment: int
    is_random: bool
    with_grad: bool
    autocast: torch.dtype | None


class SegmentWork(NamedTuple):
    """Contains a segment's operation counts for a microbatch, separately for each action.

    Attributes:
        forward: Operation count of the forward pass (F).
        backward: Operation count of B (gradients of inputs) in a split backward pass.
        weight: Operation count of W (gradients of weights) in a split backward pass.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    @property
    def total(self) -> float:
        """Returns the total operation count of all actions."""
        return sum(self)


@dataclass(slots=True, kw_only=True)
class Tape:
    """Contains a recorded forward pass.

    Attributes:
        values: All tensors. Calls refer to a tensor by its index in this list.
        calls: All calls, in the order in which the model made them.
        cuts: Names of the cut points in the order in which the forward pass reaches them.
        loss: Index of the loss on the tape.
        device: Device on which the forward pass was recorded.
        aliases: Additional names of each parameter or buffer, keyed by its first name.
        autocast: Autocast dtype of the whole forward pass; ``None`` if mixed precision is disabled.
        read_buffers: Names of the buffers whose values the model's Python code read.
    """

    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)
    loss: int = -1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    read_buffers: set[str] = field(default_factory=set)

    @property
    def num_segments(self) -> int:
        """Returns the number of segments into which the cut points divide the forward pass."""
        return len(self.cuts) + 1

    @property
    def is_random(self) -> bool:
        """Returns whether any call draws random numbers."""
        return any(call.is_random for call in self.calls)

    def remove_cuts(self, names: Container[str]) -> None:
        """Removes the cut points ``names``, and merges the segments before and after each one."""
        kept = [name not in names for name in self.cuts]
        segments = list(itertools.accumulate(kept, initial=0))
        self.cuts = [name for name, is_kept in zip(self.cuts, kept, strict=True) if is_kept]
        for call in self.calls:
            call.segment = segments[call.segment]


def makes_same_calls(first: Tape, second: Tape) -> bool:
    """Returns whether two recordings make the same calls.

    Arguments and constants must also be equal. Objects that can be compared only by identity count
    as equal if they have the same type. Gradient modes are not compared.
    """
    return (
        len(first.calls) == len(second.calls)
        and len(first.values) == len(second.values)
        and all(map(_is_same_call, first.calls, second.calls))
        and all(map(_is_same_value, first.values, second.values))
    )


def _is_same_call(first: Call, second: Call) -> bool:
    names = {getattr(call.function, "__name__", "") for call in (first, second)}
    # Compare functions under torch.vmap only by name, because each recording creates new function
    # objects.
    return (first.function == second.function or names == {"vmap"}) and (
        _is_same((first.args, first.kwargs), (second.args, second.kwargs))
        and first.outputs == second.outputs
        and first.changes == second.changes
        and first.is_random == second.is_random
        and first.autocast == second.autocast
    )


def _is_same_value(first: Value, second: Value) -> bool:
    if (first.source, first.name, first.shape) != (second.source, second.name, second.shape):
        return False
    tensors = first.tensor, second.tensor
    if tensors[0] is None or tensors[1] is None or tensors[0] is tensors[1]:
        return True
    try:
        return torch.equal(tensors[0], tensors[1])
    except (RuntimeError, NotImplementedError):
        # Some kinds of tensors, such as sparse tensors, cannot be compared, and count as equal.
        return True


def _is_same(first: Any, second: Any) -> bool:
    """Returns whether two arguments of recorded calls are equal."""
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _is_same(part, second[name]) for name, part in first.items()
        )
    if type(first) is not type(second):
        return False
    if isinstance(first, MUTABLE):
        return numpy.array_equal(first, second)
    return repr(first) == repr(second) or " at 0x" in repr(first)
