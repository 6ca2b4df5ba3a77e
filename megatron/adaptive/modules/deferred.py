"""Weight gradients of recorded layers, put off where backwards are split.

Three kinds of calls are known: ``linear``, ``addmm`` with a weight of ``[in, out]`` and
``embedding``, each with a parameter as weight. Everything else has its weight gradient in B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from megatron.adaptive.engine.weight_gradient import (
    EmbeddingCall,
    LayerCall,
    WeightGradientStore,
    defer,
    is_deferring,
)
from megatron.adaptive.modules.tape import Call, Ref, Tape

__all__ = ["Deferred", "deferred_call"]

_LINEAR = (F.linear, torch.ops.aten.linear.default)
_ADDMM = (torch.addmm, torch.ops.aten.addmm.default)


@dataclass(frozen=True, slots=True)
class _Product:
    """``given @ weight + bias`` in ``dtype``, or in the tensors' own where that is ``None``.

    Attributes:
        weight: ``[out, in]``, or ``[in, out]`` where it is ``turned``.
        bias: ``[out]``.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    turned: bool
    dtype: torch.dtype | None

    def output(self, given: torch.Tensor) -> torch.Tensor:
        """See :class:`~megatron.adaptive.engine.weight_gradient.LayerCall`."""
        weight = self.weight.t() if self.turned else self.weight
        with torch.autocast(given.device.type, enabled=False):
            return F.linear(self._cast(given), self._cast(weight), self._cast_bias())

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """See :class:`~megatron.adaptive.engine.weight_gradient.LayerCall`."""
        weight = self._cast(self.weight)
        rows = gradient.reshape(-1, gradient.shape[-1]).mm(weight.t() if self.turned else weight)
        return rows.view(*gradient.shape[:-1], -1)

    def weight_gradients(
        self, given: torch.Tensor, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """See :class:`~megatron.adaptive.engine.weight_gradient.LayerCall`."""
        gradient = gradient.reshape(-1, gradient.shape[-1])
        given = self._cast(given).reshape(-1, given.shape[-1])
        product = given.t().mm(gradient) if self.turned else gradient.t().mm(given)
        yield self.weight, product.to(self.weight.dtype)
        if self.bias is not None and self.bias.requires_grad:
            yield self.bias, gradient.sum(dim=0).to(self.bias.dtype)

    def flops(self, gradient: torch.Tensor) -> float:
        """See :class:`~megatron.adaptive.engine.weight_gradient.LayerCall`."""
        width = gradient.shape[-1]
        return 2.0 * gradient.numel() / width * self.weight.numel()

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def _cast_bias(self) -> torch.Tensor | None:
        return None if self.bias is None else self._cast(self.bias)


@dataclass(frozen=True, slots=True)
class Deferred:
    """A recorded call whose weight gradient can be put off.

    Attributes:
        kind: ``linear``, ``addmm`` or ``embedding``.
        given, weight, bias: numbers of the values.
        padding: row of an embedding without gradient, -1 for none.
        by_frequency: ``scale_grad_by_freq`` of an embedding.
    """

    kind: str
    given: int
    weight: int
    bias: int | None = None
    padding: int = -1
    by_frequency: bool = False

    def run(
        self, env: dict[int, torch.Tensor], store: WeightGradientStore, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """Return the layer's output, ``None`` if it must be computed as recorded."""
        weight: Any = env[self.weight]
        if not is_deferring(store, weight):
            return None
        call: LayerCall
        if self.kind == "embedding":
            call = EmbeddingCall(weight, self.padding, self.by_frequency)
        else:
            bias: Any = None if self.bias is None else env[self.bias]
            call = _Product(weight, bias, self.kind == "addmm", dtype)
        return defer(call, env[self.given], store)


def deferred_call(call: Call, tape: Tape) -> Deferred | None:
    """Return how a call's weight gradient is put off, ``None`` if it cannot be."""
    if not call.with_grad or call.changes or len(call.outputs) != 1:
        return None
    found: Deferred | None = None
    if call.function in _LINEAR:
        found = _linear(*call.args, **call.kwargs)
    elif call.function in _ADDMM and not call.kwargs and len(call.args) == 3:
        bias, given, weight = call.args
        found = _linear(given, weight, bias, kind="addmm")
    elif call.function is F.embedding:
        found = _embedding(*call.args, **call.kwargs)
    elif call.function is torch.ops.aten.embedding.default and len(call.args) >= 2:
        weight, given, *more = call.args
        options = [*more, *[-1, False, False][len(more) :]]
        found = _embedding(given, weight, None, None, 2.0, *options[1:])
        if found is not None:
            found = dataclasses.replace(found, padding=options[0])
    if found is None:
        return None
    given = tape.values[found.given]
    parameters = [tape.values[n] for n in (found.weight, found.bias) if n is not None]
    if any(one.source != "parameter" or one.dtype != parameters[0].dtype for one in parameters):
        return None
    if found.kind != "embedding" and given.dtype != parameters[0].dtype and call.autocast is None:
        return None
    if found.kind == "addmm" and len(given.shape) != 2:
        return None
    return found


def _linear(given: Any, weight: Any, bias: Any = None, *, kind: str = "linear") -> Deferred | None:
    if not isinstance(given, Ref) or not isinstance(weight, Ref):
        return None
    if bias is not None and not isinstance(bias, Ref):
        return None
    return Deferred(kind, given.value, weight.value, None if bias is None else bias.value)


def _embedding(
    given: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Deferred | None:
    if max_norm is not None or sparse or not isinstance(given, Ref) or not isinstance(weight, Ref):
        return None
    padding = -1 if padding_idx is None else padding_idx
    if padding < -1:
        return None
    return Deferred("embedding", given.value, weight.value, None, padding, scale_grad_by_freq)
