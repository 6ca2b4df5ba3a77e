"""Ends a step: makes gradients whole, updates the parameters, gives all ranks the totals.

::

    sums of shared weights over stages -> mean over replicas -> norm of all -> clipped, unscaled

The norm and the loss of the whole model are one message between all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from megatron.adaptive.errors import ConfigError

if TYPE_CHECKING:  # it imports megatron-core
    from megatron.adaptive.modules.mesh import Mesh

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


def _all_reduce(tensors: Sequence[torch.Tensor], group: Any, *, divide_by: int = 1) -> None:
    """Sum tensors over a group in few messages, each of one element type. Collective.

    Args:
        tensors: of the same shapes, in the same order, on all ranks of the group.
        group: the ranks.
        divide_by: divides the sums.
    """
    for bucket in _take_tensors(tensors, _BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        if divide_by != 1:
            flat /= divide_by
        for one, part in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            one.copy_(part)


def _squared_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares as ``[] float64``; not finite where an element is not."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(
        [one.float() if one.dtype.itemsize < 4 else one for one in gradients]
    )
    return torch.stack([one.double() for one in norms]).square().sum()


class Update:
    """Turns the gradients of a rank's stages into those of the whole model, and applies them.

    Args:
        mesh: the job.
        parameters: of this rank's stages, by name.
        shared: positions in the pipeline of the ranks that hold a parameter, ascending, by the
            names of parameters that several hold.
        groups: process groups of such positions, those that this rank is in.

    Attributes:
        parameters: as given.
        optimizer: of this rank's parameters, ``None`` without one.
        scaler: the loss scale, ``None`` except in fp16.
    """

    def __init__(
        self,
        *,
        mesh: Mesh,
        parameters: Mapping[str, torch.nn.Parameter],
        shared: Mapping[str, tuple[int, ...]],
        groups: Mapping[tuple[int, ...], Any],
    ) -> None:
        self.parameters = dict(parameters)
        self._mesh = mesh
        self._groups = groups
        self._shared: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        # A shared parameter counts on the first rank that has it.
        counted = dict(self.parameters)
        for name, positions in shared.items():
            if name in self.parameters:
                self._shared.setdefault(positions, []).append(self.parameters[name])
                if positions[0] != mesh.pp_rank:
                    del counted[name]
        self._counted = list(counted.values())
        self.optimizer: Any = None
        self._clip_norm: float | None = None
        self.scaler: LossScale | None = None

    @property
    def scale(self) -> float:
        """Factor of the loss."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def set_optimizer(
        self, optimizer: Any, clip_norm: float | None, initial_scale: float, interval: int
    ) -> None:
        """Takes the optimizer; see ``Pipeline.set_optimizer``."""
        if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm > 0):
            raise ConfigError(f"clip_norm {clip_norm}: give a finite number above 0, or None")
        if self.scaler is not None:
            if not (math.isfinite(initial_scale) and initial_scale >= 1 and interval >= 1):
                raise ConfigError(
                    f"initial_loss_scale {initial_scale} with loss_scale_interval {interval}: both "
                    "must be finite and at least 1"
                )
            self.scaler = LossScale(scale=initial_scale, growth_interval=interval)
        if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
            wanted = list(self.parameters.values())
            optimizer = optimizer(wanted) if wanted else None
        if optimizer is not None:
            self._check(optimizer)
        self.optimizer = optimizer
        self._clip_norm = clip_norm

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        mine = {id(one) for one in self.parameters.values()}
        given = [one for group in optimizer.param_groups for one in group["params"]]
        foreign = [one for one in given if id(one) not in mine]
        if foreign:
            raise ConfigError(
                f"the optimizer holds {len(foreign)} of {len(given)} parameters that are not of "
                f"this process's stages (the first of shape {list(foreign[0].shape)}): make it "
                "after the Pipeline, with pipeline.parameters()"
            )

    def reduce(self) -> None:
        """Sum shared weights over stages and average over replicas. Collective."""
        for parameter in self.parameters.values():  # ranks that sum them must agree in shape
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for positions, parameters in self._shared.items():
            _all_reduce(_gradients(parameters), self._groups[positions])
        if self._mesh.dp_size > 1:
            gradients = _gradients(self.parameters.values())
            _all_reduce(gradients, self._mesh.dp_group, divide_by=self._mesh.dp_size)

    def totals(
        self, losses: Sequence[torch.Tensor], count: int, *, with_norm: bool = True
    ) -> tuple[float, float]:
        """Return loss and gradient norm of the whole model. Collective over all ranks.

        Args:
            losses: of the microbatches, on the rank of the last stage.
            count: microbatches of the step.
            with_norm: compute the norm; 0 without.
        """
        device = self._mesh.accelerator.device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        if losses:
            totals[0] = torch.stack([one.double() for one in losses]).sum() / count
        if with_norm:
            totals[1] = _squared_norm(_gradients(self._counted), device)
        dist.all_reduce(totals)
        loss, square = (totals / self._mesh.dp_size).tolist()
        return loss, math.sqrt(square) / self.scale if math.isfinite(square) else math.nan

    def apply(self, norm: float) -> bool:
        """Unscale, clip and update; returns whether the gradient is not finite."""
        overflow = not math.isfinite(norm)
        if not overflow:
            factor = 1 / self.scale
            if self._clip_norm is not None and norm > self._clip_norm:
                factor *= self._clip_norm / (norm + 1e-6)
            gradients = _gradients(self.parameters.values())
            if factor != 1.0 and gradients:
                torch._foreach_mul_(gradients, factor)
            if self.optimizer is not None:
                self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update(overflow=overflow)
        return overflow


def _gradients(parameters: Any) -> list[torch.Tensor]:
    return [one.grad for one in parameters if one.grad is not None]
