"""Defines cut points, which mark where a model may be cut into stages."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_map_only

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.blocks import repeated_blocks

NO_BLOCKS = (
    "no list of repeated blocks after which to cut; call CutPoint.after(module) for each module "
    "after which the model may be cut"
)
"""End of the error message for a model in which no repeated blocks are found."""


# torch.compiler.is_exporting was added in torch 2.7. In older releases, is_compiling returns True
# during an export.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def mark(tensors: Any, cut_point: int, passing: int) -> Any:
    """Returns ``tensors`` unchanged, and notifies the active recorder, if any, of the cut point.

    Args:
        tensors: A tensor, or a nested structure of tuples, lists and dictionaries with tensors.
        cut_point: ``id()`` of the :class:`CutPoint` module.
        passing: Number of cut-point calls in this process before this call.
    """
    # torch.export records only torch operations, so pass each tensor through a custom operation.
    if _is_exporting():
        return tree_map_only(
            torch.Tensor, lambda tensor: _exported_mark(tensor, cut_point, passing), tensors
        )
    if has_torch_function((_WITNESS,)):
        return handle_torch_function(mark, (), tensors, cut_point, passing)
    return tensors


@torch.library.custom_op("megatron_adaptive::mark", mutates_args=())
def _exported_mark(tensor: torch.Tensor, cut_point: int, passing: int) -> torch.Tensor:
    return tensor.clone()


_exported_mark.register_fake(lambda tensor, cut_point, passing: torch.empty_like(tensor))
# While a recorder is active, has_torch_function() returns True for this tensor. In this way, mark()
# detects a recorder.
_WITNESS = torch.empty(0)
_PASSINGS = itertools.count()


class CutPoint(torch.nn.Module):
    """Marks a position in the forward pass where a model may be cut into stages.

    The module returns its arguments unchanged. A cut divides the sequence of all operations of the
    forward pass, not only the operations on the arguments. Every tensor that is computed before the
    cut and used after it is sent to the next stage, even if the tensor is not an argument of the
    cut point. Each instance must be called exactly once per forward pass, for any input::

        for block, cut in zip(self.blocks, self.cuts):
            x = cut(block(x))

    If you cannot edit the model's ``forward``, :meth:`after` adds a cut point after one of its
    modules, and :meth:`between_blocks` adds one after each repeated block.

    Attributes:
        is_optional: Whether to ignore the cut point if the forward pass of the sample batch does
            not call it exactly once. If ``False``, such a forward pass raises an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_optional = False

    @staticmethod
    def after(module: torch.nn.Module) -> CutPoint:
        """Adds a cut point after ``module``, and returns the cut point.

        Args:
            module: Module that is called once per forward pass. The cut point becomes its submodule
                ``cut_point``.
        """
        cut_point = CutPoint()
        module.add_module("cut_point", cut_point)
        # A Sequential calls all its submodules, including the cut point, so it needs no hook.
        if type(module).forward is not torch.nn.Sequential.forward:
            module.register_forward_hook(_pass)
        return cut_point

    @staticmethod
    def between_blocks(model: torch.nn.Module) -> list[CutPoint]:
        """Adds a cut point after each repeated block of a model, and returns the cut points.

        ``Pipeline`` and ``Profiler`` call this for a model without cut points. Repeated blocks are
        the members of a ``ModuleList`` or ``Sequential`` that has at least two members of one
        class, such as the layers of an encoder or a decoder. The model is not cut after a block
        that the forward pass of the sample batch does not call exactly once.

        Args:
            model: Model without cut points.

        Raises:
            ConfigError: If the model already has cut points, or has no repeated blocks.
        """
        existing = next(iter(cut_points_of(model)), None)
        if existing is not None:
            raise ConfigError(
                f"{type(model).__name__} already has the cut point {existing}; add either all "
                "cut points yourself, or none"
            )
        lists = repeated_blocks(model)
        if not lists:
            raise ConfigError(f"{type(model).__name__} has {NO_BLOCKS}")
        cut_points = [CutPoint.after(block) for blocks in lists.values() for block in blocks]
        for cut_point in cut_points:
            cut_point.is_optional = True
        return cut_points

    def forward(self, *values: Any) -> Any:
        """Returns a single argument unchanged, or several arguments as a tuple."""
        value = values[0] if len(values) == 1 else values
        return mark(value, id(self), next(_PASSINGS))


def _pass(module: Any, inputs: Any, output: Any) -> Any:
    return module.cut_point(output)


def cut_points_of(model: torch.nn.Module) -> dict[str, CutPoint]:
    """Returns the cut points of ``model``, keyed by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, CutPoint)}


def are_added(model: torch.nn.Module) -> bool:
    """Returns whether the model's cut points were added by :meth:`CutPoint.between_blocks`."""
    cut_points = cut_points_of(model).values()
    return bool(cut_points) and all(cut_point.is_optional for cut_point in cut_points)


def describe(cut_points: Iterable[str]) -> str:
    """Returns the number of cut points in each list of blocks, such as ``32 in model.layers``.

    Args:
        cut_points: Names of the cut points in the model.
    """
    lists = Counter(".".join(name.split(".")[:-2]) for name in cut_points)
    return ", ".join(f"{count} in {name or 'the model'}" for name, count in lists.items())
