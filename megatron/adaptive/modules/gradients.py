"""What happens to gradients between the last backward and the optimizer.

::

    sums of shared weights over stages -> mean over replicas -> norm of all -> clipped, unscaled

The norm and the loss of the whole model are one message between all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LossScale", "all_reduce_flat", "clip_factor", "fill_missing", "squared_norm"]

_BUCKET_BYTES = 32 << 20


@dataclass(slots=True, kw_only=True)
class LossScale:
    """The factor of the loss in fp16: halved after an overflow, doubled after long peace.

    Attributes:
        scale: the present factor.
        growth_interval: steps without an overflow before it doubles.
        least: it never falls below.
        good_steps: steps since the last change.
    """

    scale: float = 65536.0
    growth_interval: int = 2000
    least: float = 1.0
    good_steps: int = 0

    def update(self, *, overflow: bool) -> None:
        """Take note of a step."""
        if overflow:
            self.scale = max(self.least, self.scale / 2)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0


def fill_missing(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give zeros to parameters without a gradient: ranks that sum them must agree in shape."""
    for parameter in parameters:
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def all_reduce_flat(tensors: Sequence[torch.Tensor], group: Any, *, divide_by: int = 1) -> None:
    """Sum tensors over a group in few messages, each of one element type. Collective.

    Args:
        tensors: of the same shapes, in the same order, on all ranks of the group.
        group: the ranks.
        divide_by: divides the sums.
    """
    for bucket in _buckets(tensors):
        flat = torch.cat([one.reshape(-1) for one in bucket])
        dist.all_reduce(flat, group=group)
        if divide_by != 1:
            flat /= divide_by
        offset = 0
        for one in bucket:
            one.copy_(flat[offset : offset + one.numel()].view_as(one))
            offset += one.numel()


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for one in tensors:
        kinds.setdefault(one.dtype, []).append(one)
    for members in kinds.values():
        bucket: list[torch.Tensor] = []
        size = 0
        for one in members:
            if bucket and size + one.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(one)
            size += one.nbytes
        yield bucket


def squared_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares as ``[] float64``; not finite where an element is not."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(
        [one.float() if one.dtype.itemsize < 4 else one for one in gradients]
    )
    return torch.stack([one.double() for one in norms]).square().sum()


def clip_factor(norm: float, limit: float | None) -> float:
    """Return what gradients of that norm are multiplied with, at most 1."""
    if limit is None or norm <= limit or not math.isfinite(norm):
        return 1.0
    return limit / (norm + 1e-6)
