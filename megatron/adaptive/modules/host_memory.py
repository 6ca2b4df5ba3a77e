"""Copies the memory that a recorded forward pass uses but that no recorded call made.

Such memory belongs to constants, and to arguments such as numpy arrays. The forward pass may change
it in place: a tensor that ``torch.as_tensor`` makes from an array is changed together with the
array. So a recording keeps the values from before the change, and each replay copies them.
"""

from __future__ import annotations

import array
from typing import Any

import numpy
import torch

MUTABLE = (numpy.ndarray, bytearray, memoryview, array.array)
"""Types of Python objects with memory that a tensor may share."""


def copied(part: Any) -> Any:
    """Returns a copy of ``part`` if a tensor may share its memory, else ``part`` itself."""
    if isinstance(part, numpy.ndarray):
        return part.copy(order="K")
    if isinstance(part, memoryview):
        return numpy.array(part).data
    if isinstance(part, (bytearray, array.array)):
        return part[:]
    return part


class Constants:
    """Keeps the values that constants had before the first recorded call that uses them.

    A constant is a tensor that no recorded call made and that is not part of the model.
    """

    def __init__(self) -> None:
        # The constant, its copy and its version, by the id() of the constant.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def __contains__(self, key: object) -> bool:
        """Returns whether a constant with the ``id()`` ``key`` has a copy."""
        return key in self._kept

    def add(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Stores ``copy``, which has the present values of the constant ``tensor``."""
        self._kept[id(tensor)] = (tensor, copy, tensor._version)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the copy of the constant ``tensor``, or ``tensor`` itself if it has none."""
        return self._kept[id(tensor)][1] if id(tensor) in self._kept else tensor

    def shared(self) -> dict[int, torch.Tensor]:
        """Returns the constants that did not change, by the ``id()`` of their copies.

        Recordings that use the constants themselves share the memory of a large constant. Memory
        that torch did not allocate, such as that of a numpy array, may still change without a torch
        call, so such constants are not returned.
        """
        return {
            id(copy): tensor
            for tensor, copy, version in self._kept.values()
            if tensor._version == version and _is_torchs(tensor)
        }

    def clear(self) -> None:
        """Frees all copies that are not in use."""
        self._kept.clear()


def _is_torchs(tensor: torch.Tensor) -> bool:
    """Returns whether torch allocated the memory of ``tensor``."""
    if tensor.layout is not torch.strided:
        return True
    try:
        return tensor.untyped_storage().resizable()
    except (RuntimeError, NotImplementedError):
        # Some subclasses of tensors have no storage of their own.
        return True
