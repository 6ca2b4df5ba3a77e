"""Imitates the linear layers of Transformer Engine that can delay weight gradients.

The real layers need a GPU. These layers follow the documentation. Each layer has a ``wgrad_store``.
If the store delays gradients, a backward pass puts the inputs of the weight gradient into the
store, and ``backward_dw()`` computes the gradient from them.

With ``fuse_wgrad_accumulation``, the gradient is added to ``main_grad``, and the gradient that the
backward pass returns is meaningless. Otherwise, ``grad`` is overwritten. With ``fp8``, the gradient
of the bias is not delayed.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812


class WeightGradStore:
    """Queue with the inputs of delayed weight gradients, in first-in, first-out order."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        assert not (delay_wgrad_compute and ub_bulk_wgrad)
        self.enabled = delay_wgrad_compute
        self.context: queue.Queue[Any] | None = queue.Queue() if delay_wgrad_compute else None

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, tensors: list[torch.Tensor], function: Callable[..., Any]) -> None:
        assert self.context is not None
        self.context.put((tensors, function))

    def pop(self) -> Any:
        assert self.context is not None
        tensors, function = self.context.get_nowait()
        return function(*tensors), tensors


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, hidden: Any, bias: Any, layer: Any, store: Any) -> Any:
        ctx.save_for_backward(hidden)
        ctx.layer, ctx.store, ctx.has_bias = layer, store, bias is not None
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (hidden,), (gradient,), layer = ctx.saved_tensors, gradients, ctx.layer
        weight = layer.weight
        rows, hidden = (
            gradient.reshape(-1, gradient.shape[-1]),
            hidden.reshape(-1, hidden.shape[-1]),
        )
        early = layer.fp8 and ctx.has_bias
        bias_gradient = rows.sum(dim=0) if early else None

        def product(hidden: torch.Tensor, rows: torch.Tensor) -> Any:
            late = rows.sum(dim=0) if ctx.has_bias and not early else None
            whole = rows.t().mm(hidden)
            if layer.fuse_wgrad_accumulation:
                weight.main_grad.add_(whole)
            return whole, late

        weight_gradient = None
        if ctx.store.delay_wgrad_compute():
            ctx.store.put([hidden, rows], product)
        else:
            weight_gradient, late = product(hidden, rows)
            bias_gradient = bias_gradient if early else late
        if layer.fuse_wgrad_accumulation:
            weight.grad_added_to_main_grad = True
            weight_gradient = torch.full_like(weight, torch.nan)
        return weight_gradient, gradient.matmul(weight), bias_gradient, None, None


class Linear(torch.nn.Module):
    """Imitates ``transformer_engine.pytorch.Linear``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        return_bias: bool,
        fuse_wgrad_accumulation: bool,
        fp8: bool,
        normalizes: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features))
        torch.nn.init.xavier_normal_(self.weight)
        self.bias = torch.nn.Parameter(torch.zeros(out_features)) if bias else torch.empty(0)
        if normalizes:
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features))
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features))
        self.use_bias, self.apply_bias = bias, bias and not return_bias
        self.normalizes, self.fp8 = normalizes, fp8
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)

    def forward(self, hidden: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        if self.normalizes:
            hidden = F.layer_norm(
                hidden, hidden.shape[-1:], self.layer_norm_weight, self.layer_norm_bias
            )
        bias = self.bias if self.apply_bias else None
        output = _Linear.apply(self.weight, hidden, bias, self, self.wgrad_store)
        return (output, self.bias) if self.use_bias and not self.apply_bias else output

    def need_backward_dw(self) -> bool:
        return self.wgrad_store.delay_wgrad_compute()

    def backward_dw(self) -> None:
        if not self.need_backward_dw():
            return
        (weight_gradient, bias_gradient), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = weight_gradient.to(self.weight.dtype)
        if self.use_bias and self.bias.grad is None:
            self.bias.grad = bias_gradient.to(self.bias.dtype)


Linear.__module__ = "transformer_engine.pytorch.module.linear"


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, sizes: Any, store: Any, layer: Any, *trained: Any) -> Any:
        count = layer.num_gemms
        weights, biases = trained[:count], trained[count:] or [None] * count
        ctx.save_for_backward(hidden)
        ctx.sizes, ctx.store, ctx.weights, ctx.layer = sizes, store, weights, layer
        ctx.has_bias = bool(trained[count:])
        parts = zip(hidden.split(sizes), weights, biases, strict=True)
        return torch.cat([F.linear(*part) for part in parts])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (hidden,), (gradient,), layer = ctx.saved_tensors, gradients, ctx.layer
        parts = list(gradient.split(ctx.sizes))
        # The real layer returns uninitialized memory, which may contain anything.
        totals = [torch.full_like(weight, torch.nan) for weight in ctx.weights]
        early = layer.fp8 and ctx.has_bias
        empty = [torch.empty(0)] * len(totals)

        def products(rows: Any, parts: Any, totals: Any) -> Any:
            for row, part, total in zip(rows, parts, totals, strict=True):
                total.copy_(part.t().mm(row))
            sums = [part.sum(dim=0) for part in parts] if ctx.has_bias and not early else empty
            return None, sums, empty

        kept = [list(hidden.split(ctx.sizes)), parts, totals]
        later = ctx.store.delay_wgrad_compute()
        biases: list[Any] = [part.sum(dim=0) for part in parts] if early else [None] * len(totals)
        if later:
            ctx.store.put(kept, products)
        else:
            _, sums, _ = products(*kept)
            biases = biases if early else sums
        dgrad = torch.cat([p.mm(w) for p, w in zip(parts, ctx.weights, strict=True)])
        returned = [None] * len(totals) if later and layer.is_old else totals
        return dgrad, None, None, None, *returned, *(biases if ctx.has_bias else ())


class GroupedLinear(torch.nn.Module):
    """Imitates ``transformer_engine.pytorch.GroupedLinear``.

    If the layer delays gradients, a backward pass returns the memory in which ``backward_dw()``
    will compute the weight gradients. Before 2.8 (``is_old``), it returned ``None``.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        return_bias: bool = False,
        fp8: bool = False,
        is_old: bool = False,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.apply_bias = num_gemms, bias, bias and not return_bias
        self.fp8, self.is_old, self.te_return_bias = fp8, is_old, return_bias
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.randn(out_features, in_features))
            self.register_parameter(f"weight{number}", weight)
            if bias:
                self.register_parameter(
                    f"bias{number}", torch.nn.Parameter(torch.randn(out_features))
                )
        self.wgrad_store = WeightGradStore()

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        return [getattr(self, f"weight{number}") for number in range(self.num_gemms)]

    @property
    def biases(self) -> list[torch.nn.Parameter]:
        count = self.num_gemms if self.use_bias else 0
        return [getattr(self, f"bias{number}") for number in range(count)]

    def forward(self, hidden: torch.Tensor, sizes: list[int]) -> Any:
        biases = self.biases if self.apply_bias else []
        return _Grouped.apply(hidden, sizes, self.wgrad_store, self, *self.weights, *biases)

    def backward_dw(self) -> None:
        if not self.wgrad_store.delay_wgrad_compute():
            return
        (_, sums, _), (_, _, totals) = self.wgrad_store.pop()
        for weight, total in zip(self.weights, totals, strict=True):
            weight.grad = total
        for bias, total in zip(self.biases, sums, strict=False):
            if bias.grad is None:
                bias.grad = total.to(bias.dtype)


GroupedLinear.__module__ = "transformer_engine.pytorch.module.grouped_linear"


class TELinear(Linear):
    """Imitates megatron-core's wrapper, which returns output and bias and may delay gradients."""

    normalizes_input = False
    settings: dict[str, bool] = {}  # noqa: RUF012

    def __init__(self, inputs: int, out: int, *, config: Any, **settings: Any) -> None:
        self.te_return_bias = settings["skip_bias_add"] and settings["bias"]
        super().__init__(
            inputs,
            out,
            bias=settings["bias"],
            return_bias=self.te_return_bias,
            normalizes=self.normalizes_input,
            delay_wgrad_compute=config.delay_wgrad_compute,
            **{"fuse_wgrad_accumulation": False, "fp8": False, **self.settings},
        )
        self.config = config

    def forward(self, hidden: torch.Tensor) -> Any:
        answer = super().forward(hidden, is_first_microbatch=None)
        return answer if self.te_return_bias else (answer, None)

    def backward_dw(self) -> None:
        if self.config.delay_wgrad_compute:
            super().backward_dw()


class TELayerNormLinear(TELinear):
    """Applies a layer norm before :class:`TELinear`."""

    normalizes_input = True
