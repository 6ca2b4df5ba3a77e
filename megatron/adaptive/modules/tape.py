"""What a forward did, as data: calls of torch in their order, and the values between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Call", "Ref", "Tape", "Value", "fill", "refs_in"]


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a value among the arguments of a call."""

    value: int


@dataclass(slots=True, kw_only=True)
class Value:
    """A tensor of the forward.

    Attributes:
        shape, dtype: of the tensor.
        requires_grad: whether a gradient flows through it.
        source: ``input``, ``parameter``, ``buffer`` or ``constant``; empty for a call's result.
        name: of an input, a parameter or a buffer.
        tensor: a constant.
        made_by: number of the call, -1 for a source.
        storage: tells which values share memory.
        varies: depends on an input, a parameter or a random number.
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
    """One call of a function of torch.

    Attributes:
        function: what was called.
        args, kwargs: its arguments, with a :class:`Ref` for every tensor.
        reads: values among the arguments.
        outputs: value and place in the result of each new tensor.
        changes: a changed argument's value before and after the call.
        segment: number of cut points passed before.
        is_random: it took from the random generator.
        with_grad: gradients were enabled.
        autocast: the element type that torch chose for matrix products, ``None`` if off.
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


@dataclass(slots=True, kw_only=True)
class Tape:
    """A recorded forward.

    Attributes:
        values: all tensors.
        calls: all calls in order.
        cuts: names of the cut points in the order they were passed.
        loss: value of the loss.
        loss_value: its number for the sample.
        device: where it was recorded.
        aliases: other names of a parameter or buffer, by its first name.
    """

    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)
    loss: int = -1
    loss_value: float = 0.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def num_segments(self) -> int:
        """Pieces between cut points."""
        return len(self.cuts) + 1

    @property
    def is_random(self) -> bool:
        """Whether any call draws random numbers."""
        return any(call.is_random for call in self.calls)


def refs_in(template: Any) -> Iterable[int]:
    """Yield the values that a template of arguments names."""
    if type(template) is Ref:
        yield template.value
    elif isinstance(template, (tuple, list)):
        for one in template:
            yield from refs_in(one)
    elif isinstance(template, dict):
        for one in template.values():
            yield from refs_in(one)
    elif isinstance(template, slice):
        yield from refs_in((template.start, template.stop, template.step))


def fill(template: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a nested structure with ``leaf`` applied to everything that is no container."""
    kind = type(template)
    if kind is tuple or kind is list:
        return kind(fill(one, leaf) for one in template)
    if kind is dict:
        return {name: fill(one, leaf) for name, one in template.items()}
    if isinstance(template, tuple):  # torch.Size, named tuples
        parts = [fill(one, leaf) for one in template]
        return kind(*parts) if hasattr(template, "_fields") else kind(parts)
    if kind is slice:
        parts = [fill(one, leaf) for one in (template.start, template.stop, template.step)]
        return slice(*parts)
    return leaf(template)
