"""The mark that a user puts between two operations of a model's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["CutPoint", "mark"]


def mark(given: Any, cut_point: torch.nn.Module) -> Any:
    """Return ``given``; a recorder that is active sees the call."""
    if has_torch_function((_WITNESS,)):
        return handle_torch_function(mark, (), given, cut_point)
    return given


_WITNESS = torch.empty(0)  # an active recorder claims every tensor


class CutPoint(torch.nn.Module):
    """A place where a model may be cut into stages.

    Returns what it is given. The whole forward is cut there, in the order of its operations: what
    was computed before and is used after crosses the cut by itself, whether it was given or not.
    Each instance is called once per forward, whatever the inputs' values::

        for block, cut in zip(self.blocks, self.cuts):
            x = cut(block(x))

    Where the forward is not yours, :meth:`after` marks the end of a module in it.
    """

    @staticmethod
    def after(module: torch.nn.Module) -> CutPoint:
        """Put a cut point behind a module of a model, and return it.

        Args:
            module: called once per forward; gets the cut point as its part ``cut_point``.
        """
        cut_point = CutPoint()
        module.add_module("cut_point", cut_point)
        module.register_forward_hook(_pass)
        return cut_point

    def forward(self, *given: Any) -> Any:
        """Return the argument, or the tuple of them where there are several."""
        value = given[0] if len(given) == 1 else given
        if torch.compiler.is_exporting():
            return _copied(value)  # torch.export drops a module without operations
        return mark(value, self)


def _pass(module: torch.nn.Module, given: Any, output: Any) -> Any:
    return module.cut_point(output)  # type: ignore[operator]


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (tuple, list)):
        return type(value)(_copied(one) for one in value)
    return value
