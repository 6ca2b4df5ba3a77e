"""Makes megatron-core's optimizer faster on a GPU without Transformer Engine and apex.

Without these packages, megatron-core processes the parameters one by one: it reads the norm of each
gradient from the GPU, and runs separate kernels to clip each gradient and to copy each parameter.
torch has kernels that process many tensors at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads, optimizer


def fuse_adam(inner: Any) -> None:
    """Enables the fused kernel of torch's Adam if all parameters are on a GPU.

    megatron-core uses torch's Adam if neither Transformer Engine nor apex is installed, but does
    not enable the fused kernel.

    Args:
        inner: Torch optimizer inside an optimizer of megatron-core, before its first step.
            Optimizers other than Adam are not changed.
    """
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        return
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    if all(parameter.is_cuda and parameter.is_floating_point() for parameter in parameters):
        for group in (inner.defaults, *inner.param_groups):
            group.update(fused=True, foreach=False)


def use_foreach_kernels() -> None:
    """Replaces megatron-core's loops over parameters with functions that process all at once.

    Does nothing if megatron-core uses Transformer Engine or apex. The results may differ from those
    of the loops by rounding errors, so call this only if the model is on a GPU.
    """
    for module, name, loop, function in (
        (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm, _norm),
        (clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale, _scale),
        (optimizer, "multi_tensor_scale_impl", utils.local_multi_tensor_scale, _scale),
    ):
        if getattr(module, name) is loop:
            setattr(module, name, function)


def _norm(
    _: int, __: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], ___: bool
) -> tuple[torch.Tensor, None]:
    """Returns the joint norm of all tensors in ``lists[0]``, ``[1] float32``."""
    norms = torch._foreach_norm(list(lists[0]))
    together = torch.stack([norm.float() for norm in norms])
    return torch.linalg.vector_norm(together).reshape(1), None


def _scale(
    chunk_size: int, flag: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], scale: float
) -> None:
    """Writes the tensors in ``lists[0]``, multiplied by ``scale``, to the tensors in ``lists[1]``.

    The two cases that occur in a step, copying without scaling and scaling in place, process all
    tensors at once. In other cases, this would need a copy of all tensors, so megatron-core's
    function is used.
    """
    sources, targets = map(list, lists)
    if scale == 1.0:
        torch._foreach_copy_(targets, sources)
    elif all(source is target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_mul_(targets, scale)
    else:
        utils.local_multi_tensor_scale(chunk_size, flag, lists, scale)
