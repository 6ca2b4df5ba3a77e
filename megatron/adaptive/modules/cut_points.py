"""Marks the places where a model may be cut into stages."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function


def mark(tensors: Any, cut_point: int, passing: int) -> Any:
    """Returns ``tensors`` unchanged; an active recorder notes that the cut point was reached.

    Args:
        tensors: A tensor, or tuples and lists of tensors.
        cut_point: ``id()`` of the :class:`CutPoint` module.
        passing: Sequence number of this call, counted over all cut points of the process.
    """
    # torch.export keeps only operations of torch, so pass each tensor through a custom operation.
    if torch.compiler.is_exporting():
        if isinstance(tensors, torch.Tensor):
            return _exported_mark(tensors, cut_point, passing)
        if isinstance(tensors, (tuple, list)):
            return type(tensors)(mark(entry, cut_point, passing) for entry in tensors)
    elif has_torch_function((_WITNESS,)):
        return handle_torch_function(mark, (), tensors, cut_point, passing)
    return tensors


@torch.library.custom_op("megatron_adaptive::mark", mutates_args=())
def _exported_mark(tensor: torch.Tensor, cut_point: int, passing: int) -> torch.Tensor:
    return tensor.clone()


_exported_mark.register_fake(lambda tensor, cut_point, passing: torch.empty_like(tensor))
# Tensor for mark() to test whether a recorder is active: if so, has_torch_function() returns true.
_WITNESS = torch.empty(0)
_PASSINGS = itertools.count()


class CutPoint(torch.nn.Module):
    """Marks a position in the forward pass where a model may be cut into stages.

    The module returns its arguments unchanged. A cut divides the whole forward pass, in the order
    of its operations. Every tensor that is computed before the cut and used after it is sent to the
    next stage, even if it is not an argument of the cut point. Each instance must be called exactly
    once per forward pass, for any input::

        for block, cut in zip(self.blocks, self.cuts):
            x = cut(block(x))

    If you cannot edit the model's ``forward``, :meth:`after` adds a cut point behind one of its
    modules.
    """

    @staticmethod
    def after(module: torch.nn.Module) -> CutPoint:
        """Adds a cut point behind a module of a model, and returns the cut point.

        Args:
            module: Module that is called once per forward pass. The cut point is added to it as the
                submodule ``cut_point``.
        """
        cut_point = CutPoint()
        module.add_module("cut_point", cut_point)
        module.register_forward_hook(_pass)
        return cut_point

    def forward(self, *values: Any) -> Any:
        """Returns the argument, or a tuple of the arguments if there are several."""
        value = values[0] if len(values) == 1 else values
        return mark(value, id(self), next(_PASSINGS))


def _pass(module: Any, inputs: Any, output: Any) -> Any:
    return module.cut_point(output)
