"""Computes gradient norms of layers, and changes the order of summation or adds errors for tests.

Two programs that compute the same values in different orders differ by rounding, and the difference
depends on the processor. Therefore, tests measure this difference: one process trains the same
model again, with every sum computed in a different order (:func:`other_sums`). Tests must still
detect an error that is added on purpose to one process (:func:`plant`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.adaptive.gpt.setup import Run
from megatron.adaptive.gpt.train_step import counted_parameters
from tests.multiprocess.variants import MISSING_SHARE, OTHER_SUMS, SCALED_LAYER


def layer_norms(run: Run) -> dict[str, float]:
    """Returns the gradient norm of each layer of ``run``, by the layer's name in the whole model.

    All ranks must call this function.

    Parameters outside of layers, such as the embedding, have separate entries with their names.
    Call this function when the gradients are complete, and before the optimizer uses the gradients.
    """
    _complete_gradients(run)
    scale = float(run.optimizer.get_loss_scale())
    squares: dict[str, float] = {}
    for chunk in run.chunks:
        layers = _layer_names(chunk)
        for name, parameter, copies in counted_parameters(run, chunk):
            gradient = getattr(parameter, "main_grad", None)
            if gradient is None:
                continue
            share = float(gradient.detach().double().pow(2).sum()) / copies
            layer = layers.get(name, name.rpartition("module.")[2])
            squares[layer] = squares.get(layer, 0.0) + share
    total: dict[str, float] = {}
    for part in run.job.gather(squares):
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return {name: math.sqrt(total[name]) / scale for name in sorted(total)}


def _complete_gradients(run: Run) -> None:
    """Gathers the gradients of ``run`` on each replica if a distributed optimizer shards them."""
    for chunk in run.chunks:
        if not chunk.ddp_config.use_distributed_optimizer:  # type: ignore[union-attr]
            continue
        for buffers in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):  # type: ignore[union-attr]
            for buffer in buffers:  # type: ignore[union-attr]
                group = buffer.intra_distributed_optimizer_instance_group
                for bucket in buffer.buckets:
                    parts = list(bucket.grad_data.chunk(group.size()))
                    dist.all_gather(parts, parts[group.rank()].clone(), group=group)


def _layer_names(chunk: torch.nn.Module) -> dict[str, str]:
    """Maps the name of each parameter in a layer of ``chunk`` to the layer's name in the model."""
    names: dict[str, str] = {}
    # Process prediction layers last, because each contains a transformer layer.
    for kind, name in (
        (TransformerLayer, "layer"),
        (MultiTokenPredictionLayer, "predicting layer"),
    ):
        for prefix, module in chunk.named_modules():
            if isinstance(module, kind):
                for parameter, _ in module.named_parameters():
                    names[f"{prefix}.{parameter}"] = f"{name} {module.layer_number}"
    return names


def _in_two(product: Any, left: torch.Tensor, right: torch.Tensor, divisor: int) -> torch.Tensor:
    """Multiplies matrices in two parts, and adds the part with the first terms last.

    Args:
        product: Operator overload that writes to ``out``, and that :func:`other_sums` does not
            replace.
        left: Left matrix or batch of matrices.
        right: Right matrix or batch of matrices.
        divisor: Total number of terms, divided by the number of terms in the first part.
    """

    def part(first: int, last: int) -> torch.Tensor:
        result = left.new_empty(*left.shape[:-1], right.shape[-1])
        product(left[..., first:last], right[..., first:last, :], out=result)
        return result

    terms = left.shape[-1]
    first = terms // divisor
    if first == 0:
        return part(0, terms)
    late = part(first, terms)
    return late + part(0, first)


class _OtherProducts:
    """Multiplies matrices in two parts. Each method replaces the operator with the same name.

    Args:
        divisor: Total number of terms, divided by the number of terms in the first part.
    """

    def __init__(self, divisor: int) -> None:
        self._divisor = divisor

    def mm(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return _in_two(torch.ops.aten.mm.out, left, right, self._divisor)

    def bmm(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return _in_two(torch.ops.aten.bmm.out, left, right, self._divisor)

    def addmm(
        self,
        bias: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        beta: Any = 1,
        alpha: Any = 1,
    ) -> torch.Tensor:
        if (beta, alpha) == (1, 1):
            return bias + self.mm(left, right)
        result = left.new_empty(left.shape[0], right.shape[1])
        torch.ops.aten.addmm.out(bias, left, right, beta=beta, alpha=alpha, out=result)
        return result

    def baddbmm(
        self,
        bias: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        beta: Any = 1,
        alpha: Any = 1,
    ) -> torch.Tensor:
        product = self.bmm(left, right)
        return alpha * product if beta == 0 else beta * bias + alpha * product


@contextlib.contextmanager
def other_sums(variant: str) -> Iterator[None]:
    """Computes matrix products with other orders of summation inside the ``with`` block.

    Does nothing if ``variant`` is not a key of ``OTHER_SUMS``.

    Only matrix multiplications are replaced. A ``TorchDispatchMode`` would intercept every
    operator, and training would take more than twice as long.
    """
    if variant not in OTHER_SUMS:
        yield
        return
    products = _OtherProducts(OTHER_SUMS[variant])
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        library.impl(name, getattr(products, name), "CPU")
    try:
        yield
    finally:
        library._destroy()


def plant(run: Run, variant: str) -> None:
    """Adds an error to the steps of ``run``, so that tests can check that it is detected.

    Args:
        run: Run that has not taken a step yet.
        variant: Error to add, an item of ``variants.PLANTED``.
    """
    if variant == SCALED_LAYER:
        layers = [m for m in run.chunks[0].modules() if isinstance(m, TransformerLayer)]
        for parameter in layers[len(layers) // 2].parameters():
            parameter.register_hook(lambda gradient: gradient * (1 - MISSING_SHARE))
        return
    waiting = [True]

    def leave_out(module: Any, inputs: Any, losses: torch.Tensor) -> torch.Tensor:
        if not (waiting and module.training):
            return losses
        waiting.clear()
        kept = torch.ones_like(losses)
        kept[0, losses.shape[1] // 4] = 0
        return losses * kept

    run.chunks[-1].register_forward_hook(leave_out)
