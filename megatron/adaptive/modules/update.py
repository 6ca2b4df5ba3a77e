"""Ends a step: reduces gradients, updates parameters, and computes the loss and gradient norm.

::

    sum shared weights over stages -> mean over replicas -> norm -> unscale, clip -> optimizer

A single all-reduce over all ranks computes the gradient norm and the loss of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from megatron.adaptive.engine.progress import skipped_line
from megatron.adaptive.errors import ConfigError

# Import this only for type checkers, because it imports megatron-core, which is slow.
if TYPE_CHECKING:
    from megatron.adaptive.modules.mesh import Mesh
    from megatron.adaptive.modules.segments import MakeOptimizer

PARAMETER_NAMES = "param_names"
PARAMETER_LISTS = frozenset({"params", PARAMETER_NAMES})
"""Keys in an optimizer's parameter group for lists that have one item per parameter."""
_BUCKET_BYTES = 32 << 20
_REMEDY = "use bf16, or a lower initial loss scale (initial_loss_scale of Pipeline.set_optimizer)"


@dataclass(slots=True, kw_only=True)
class LossScale:
    """Contains the dynamic loss scale of fp16, which halves after an overflow and later doubles.

    Attributes:
        scale: Factor by which the loss is currently multiplied.
        growth_interval: Number of steps without overflow after which the scale doubles.
        least: Minimum scale.
        good_steps: Number of steps since the last overflow or change of the scale.
    """

    scale: float = 65536.0
    growth_interval: int = 2000
    least: float = 1.0
    good_steps: int = 0

    def update(self, *, overflow: bool) -> None:
        """Halves the scale after an overflow, or doubles it after enough steps without overflow."""
        if overflow:
            self.scale = max(self.least, self.scale / 2)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0


def _all_reduce(tensors: Sequence[torch.Tensor], group: Any, *, divide_by: int = 1) -> None:
    """Sums tensors over a process group in buckets. All ranks of ``group`` must call this.

    Args:
        tensors: Tensors to replace with their sums. All ranks of the group must pass tensors of the
            same shapes in the same order.
        group: Process group over which to sum the tensors.
        divide_by: Number by which the sums are divided.
    """
    for bucket in _take_tensors(tensors, _BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        if divide_by != 1:
            flat /= divide_by
        for gradient, part in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(part)


def _squared_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns the sum of the squares of all elements of ``gradients`` as a float64 scalar.

    The result is not finite if any element is not finite.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms: dict[int, torch.Tensor] = {}
    for is_short in (False, True):
        indices = [
            index
            for index, gradient in enumerate(gradients)
            if (gradient.dtype.itemsize < 4) is is_short
        ]
        if indices:
            # Accumulate the norms of 16-bit gradients in float32, without converting the gradients.
            dtype = torch.float32 if is_short else None
            of_kind = torch._foreach_norm([gradients[index] for index in indices], 2, dtype)
            norms.update(zip(indices, of_kind, strict=True))
    return torch.stack([norms[index].double() for index in sorted(norms)]).square().sum()


class Update:
    """Reduces a rank's gradients with those of other ranks, and updates the parameters.

    Args:
        mesh: Replica and pipeline position of this process, and its process groups.
        parameters: Trained parameters of this rank's stages, keyed by name.
        shared: Sorted pipeline positions of the ranks that have a copy of each shared parameter,
            keyed by the parameter's name.
        groups: Process groups for the sets of positions in ``shared`` that contain this rank, keyed
            by the positions.

    Attributes:
        parameters: Parameters of this rank's stages, keyed by name.
        optimizer: Optimizer of this rank's parameters; ``None`` if no optimizer is set.
        scaler: Loss scale of fp16 training; ``None`` if fp16 is not used.
        num_steps: Number of steps, including skipped steps.
        num_skipped: Number of steps that did not update the parameters because the gradient norm
            was not finite.
    """

    def __init__(
        self,
        *,
        mesh: Mesh,
        parameters: Mapping[str, torch.nn.Parameter],
        shared: Mapping[str, tuple[int, ...]],
        groups: Mapping[tuple[int, ...], Any],
    ) -> None:
        self._mesh = mesh
        self._groups = dict(groups)
        self._own(parameters, shared)
        self.optimizer: Any = None
        self._clip_norm: float | None = None
        self.scaler: LossScale | None = None
        self.num_steps = 0
        self.num_skipped = 0

    def _own(
        self, parameters: Mapping[str, torch.nn.Parameter], shared: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.parameters = dict(parameters)
        self._shared: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        # Include a shared parameter in the gradient norm only on the first rank that has a copy.
        counted = dict(self.parameters)
        for name, positions in shared.items():
            if name in self.parameters:
                self._shared.setdefault(positions, []).append(self.parameters[name])
                if positions[0] != self._mesh.pp_rank:
                    del counted[name]
        self._counted = list(counted.values())
        self._was_trained = {name: p.requires_grad for name, p in self.parameters.items()}

    def use(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        shared: Mapping[str, tuple[int, ...]],
        groups: Mapping[tuple[int, ...], Any],
    ) -> None:
        """Replaces the parameters after segments have moved, but keeps the optimizer object.

        Args:
            parameters: Trained parameters of this rank's stages, keyed by name.
            shared: Sorted pipeline positions of the ranks that have a copy of each shared
                parameter, keyed by the parameter's name.
            groups: Process groups for new sets of positions, keyed by the positions.
        """
        self._groups.update(groups)
        self._own(parameters, shared)

    @property
    def scale(self) -> float:
        """Returns the factor by which the loss is multiplied."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def set_optimizer(
        self,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None,
        clip_norm: float | None,
        initial_scale: float,
        interval: int,
    ) -> torch.optim.Optimizer | None:
        """Sets and returns the optimizer. ``Pipeline.set_optimizer`` describes the arguments."""
        if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm > 0):
            raise ConfigError(
                f"clip_norm must be a positive finite number or None, got {clip_norm}"
            )
        if self.scaler is not None:
            if not (math.isfinite(initial_scale) and initial_scale >= 1 and interval >= 1):
                raise ConfigError(
                    "initial_loss_scale and loss_scale_interval must be finite and at least 1, "
                    f"got {initial_scale} and {interval}"
                )
            self.scaler = LossScale(scale=initial_scale, growth_interval=interval)
        if optimizer is not None:
            self._require_wide_parameters()
        if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
            trained = [p for p in self.parameters.values() if p.requires_grad]
            optimizer = optimizer(trained) if trained else None
        if optimizer is not None:
            self._check(optimizer)
        self.optimizer = optimizer
        self._clip_norm = clip_norm
        return optimizer

    def _require_wide_parameters(self) -> None:
        """Checks that no trained parameter is in float16.

        The state of an optimizer has the same dtype as its parameter. In float16, the ``eps`` of
        AdamW would become 0, and the first update would divide by 0.

        Raises:
            ConfigError: If a trained parameter of this rank is in float16.
        """
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and parameter.dtype == torch.float16:
                raise ConfigError(
                    f"{name} is a trained parameter in float16, which an optimizer's update would "
                    'destroy; use float32 parameters with mixed_precision="fp16", or bfloat16 '
                    "parameters (dtype=torch.float32 or torch.bfloat16 of from_pretrained)"
                )

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks that ``optimizer`` contains only parameters of this rank's stages."""
        owned = {id(parameter) for parameter in self.parameters.values()}
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        foreign = [parameter for parameter in parameters if id(parameter) not in owned]
        if foreign:
            raise ConfigError(
                f"{len(foreign)} of the optimizer's {len(parameters)} parameters do not belong "
                f"to this process's stages (the first has shape {list(foreign[0].shape)}); "
                "create the optimizer after the Pipeline, with pipeline.parameters()"
            )

    def check_trained(self) -> None:
        """Checks that no parameter's ``requires_grad`` has changed since the pipeline was created.

        Raises:
            ConfigError: If ``requires_grad`` of one of this rank's parameters has changed.
        """
        for name, parameter in self.parameters.items():
            if parameter.requires_grad != self._was_trained[name]:
                raise ConfigError(
                    f"requires_grad of {name} is {parameter.requires_grad}, but was "
                    f"{not parameter.requires_grad} when the Pipeline was created, and the "
                    "messages between stages depend on it; undo the change, or create a new "
                    "Pipeline after it"
                )

    def process_groups(self) -> dict[str, Any]:
        """Returns the process groups used at the end of a step, keyed by name.

        The group ``optimizer`` sums losses and squared gradient norms over all ranks. Groups with
        only one rank are omitted.
        """
        groups = {
            f"shared weights {'-'.join(map(str, positions))}": group
            for positions, group in self._groups.items()
        }
        if self._mesh.dp_size > 1:
            groups["data"] = self._mesh.dp_group
        if dist.get_world_size() > 1:
            groups["optimizer"] = dist.group.WORLD
        return groups

    def reduce(self) -> None:
        """Sums gradients of shared weights, and averages all gradients over replicas.

        All ranks must call this. If no rank has a gradient for a parameter, its ``grad`` remains
        ``None``, so that the optimizer skips the parameter, as in an ordinary training loop.
        """
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        has_gradient = {id(parameter): parameter.grad is not None for parameter in trained}
        # Ranks without a gradient add zeros, because all ranks must take part in the all-reduce.
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for positions, parameters in self._shared.items():
            _all_reduce(_gradients(parameters), self._groups[positions])
        if self._mesh.dp_size > 1:
            gradients = _gradients(self.parameters.values())
            _all_reduce(gradients, self._mesh.dp_group, divide_by=self._mesh.dp_size)
        self._drop_unused(trained, has_gradient)

    def _drop_unused(
        self, trained: Sequence[torch.nn.Parameter], has_gradient: dict[int, bool]
    ) -> None:
        """Resets ``grad`` to ``None`` for all parameters that received no gradient on any rank.

        All ranks must call this.

        Args:
            trained: Trained parameters of this rank's stages.
            has_gradient: Whether this rank computed a gradient for each parameter, keyed by the
                parameter's ``id()``.
        """
        exchanges: list[tuple[Sequence[torch.nn.Parameter], Any]] = [
            (parameters, self._groups[positions]) for positions, parameters in self._shared.items()
        ]
        if self._mesh.dp_size > 1:
            exchanges.append((trained, self._mesh.dp_group))
        for parameters, group in exchanges:
            flags = [float(has_gradient.get(id(parameter), False)) for parameter in parameters]
            sums = torch.tensor(flags, device=self._mesh.accelerator.device)
            dist.all_reduce(sums, group=group)
            has_gradient.update(
                (id(parameter), total > 0)
                for parameter, total in zip(parameters, sums.tolist(), strict=True)
            )
        for parameter in trained:
            if not has_gradient[id(parameter)]:
                parameter.grad = None

    def totals(
        self,
        losses: Sequence[torch.Tensor],
        count: int,
        *,
        weights: Sequence[float] | None = None,
        with_norm: bool = True,
    ) -> tuple[float, float]:
        """Returns the loss and the gradient norm of the whole model. All ranks must call this.

        Args:
            losses: Losses of the microbatches; empty on ranks without the last stage.
            count: Number of microbatches of this replica.
            weights: Weight of each microbatch's loss; ``None`` computes the mean. Losses with
                weight 0 are ignored, even if they are NaN.
            with_norm: Whether to compute the norm. If ``False``, the returned norm is 0.
        """
        device = self._mesh.accelerator.device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        if losses:
            stacked = torch.stack([loss_of_microbatch.double() for loss_of_microbatch in losses])
            if weights is None:
                totals[0] = stacked.sum() / count
            else:
                factors = torch.tensor(weights, dtype=torch.float64, device=device)
                # Ignore losses with weight 0, because a mean over zero items is NaN.
                totals[0] = stacked.where(factors > 0, 0.0) @ factors
        if with_norm:
            totals[1] = _squared_norm(_gradients(self._counted), device)
        dist.all_reduce(totals)
        loss, square = (totals / self._mesh.dp_size).tolist()
        return loss, math.sqrt(square) / self.scale if math.isfinite(square) else math.nan

    def apply(self, norm: float, step: int) -> bool:
        """Unscales and clips the gradients, and updates the parameters.

        If there is no loss scale, the first rank prints a warning about the first skipped update.

        Args:
            norm: Gradient norm of the whole model.
            step: Number of the training step, counted from 1.

        Returns:
            Whether the update was skipped because the norm is not finite.
        """
        overflow = not math.isfinite(norm)
        self.num_steps += 1
        self.num_skipped += overflow
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
        elif overflow and self.num_skipped == 1 and self._mesh.is_first:
            print(
                f"warning: step {step} did not update the parameters, because its gradient is "
                "infinite or NaN; lower the learning rate, or check the batch and the "
                "parameters (later skipped steps are not reported)",
                flush=True,
            )
        return overflow

    def report_skipped(self) -> None:
        """Prints a warning on the first rank if many steps were skipped in fp16.

        Call this after the last step. Later calls print nothing.
        """
        line = skipped_line(self.num_skipped, self.num_steps, _REMEDY)
        self.num_steps = 0
        self.num_skipped = 0
        if self.scaler is not None and line is not None and self._mesh.is_first:
            print(line, flush=True)


def _gradients(parameters: Any) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
