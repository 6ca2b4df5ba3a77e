"""Copies memory that a recorded forward pass uses but that was not created by a recorded call.

Such memory belongs to constants, and to arguments such as numpy arrays. The forward pass may change
it in place: if ``torch.as_tensor`` makes a tensor from an array, changes of the tensor also change
the array. So a recording keeps the values from before the change, and each replay copies them.
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
        # Maps the id() of each constant to the constant, its copy, and the constant's version when
        # it was copied.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def __contains__(self, key: object) -> bool:
        """Returns whether the constant whose ``id()`` is ``key`` has a copy."""
        return key in self._kept

    def add(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Stores ``copy``, which is a copy of the constant ``tensor``."""
        self._kept[id(tensor)] = (tensor, copy, tensor._version)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the copy of the constant ``tensor``, or ``tensor`` itself if there is no copy."""
        return self._kept[id(tensor)][1] if id(tensor) in self._kept else tensor

    def shared(self) -> dict[int, torch.Tensor]:
        """Returns the constants that have not changed, by the ``id()`` of their copies.

        Recordings can use these constants instead of the copies, and then share the memory of a
        large constant. Memory that torch did not allocate, such as that of a numpy array, may
        change without a torch call. So constants with such memory are not returned.
        """
        return {
            id(copy): tensor
            for tensor, copy, version in self._kept.values()
            if tensor._version == version and _is_torchs(tensor)
        }

    def clear(self) -> None:
        """Removes all copies. Copies that recordings still use stay in memory."""
        self._kept.clear()


def _is_torchs(tensor: torch.Tensor) -> bool:
    """Returns whether torch allocated the memory of ``tensor``."""
    if tensor.layout is not torch.strided:
        return True
    try:
        return tensor.untyped_storage().resizable()
    except (RuntimeError, NotImplementedError):
        # Some subclasses of tensors have no storage, so the access raises an error.
        return True
