"""Copies memory that a recorded forward pass uses, but that no recorded call created.

This is the memory of constants, and of arguments such as numpy arrays. The forward pass may change
this memory in place. For example, ``torch.as_tensor`` returns a tensor that shares the memory of an
array, so changes of the tensor also change the array. A recording therefore keeps the original
values, and each replay uses a copy of them.
"""

from __future__ import annotations

import array
from typing import Any

import numpy
import torch

MUTABLE = (numpy.ndarray, bytearray, memoryview, array.array)
"""Types of Python objects whose memory a tensor may share."""


def copied(part: Any) -> Any:
    """Returns a copy of ``part`` if a tensor may share its memory; otherwise ``part`` itself."""
    if isinstance(part, numpy.ndarray):
        return part.copy(order="K")
    if isinstance(part, memoryview):
        return numpy.array(part).data
    if isinstance(part, (bytearray, array.array)):
        return part[:]
    return part


class Constants:
    """Keeps copies of constants, made before the first recorded call that uses each constant.

    A constant is a tensor that is not part of the model and was not created by a recorded call.
    """

    def __init__(self) -> None:
        # Maps the id() of each constant to the constant, its copy, and its version at the time of
        # the copy.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def __contains__(self, key: object) -> bool:
        """Returns whether there is a copy of the constant whose ``id()`` is ``key``."""
        return key in self._kept

    def add(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Stores ``copy`` as the copy of the constant ``tensor``."""
        self._kept[id(tensor)] = (tensor, copy, tensor._version)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the copy of the constant ``tensor``, or ``tensor`` itself if there is no copy."""
        return self._kept[id(tensor)][1] if id(tensor) in self._kept else tensor

    def shared(self) -> dict[int, torch.Tensor]:
        """Returns the constants that have not changed, keyed by the ``id()`` of their copies.

        To save memory, recordings can use these constants instead of their copies. Constants whose
        memory torch did not allocate, such as the memory of a numpy array, are not returned,
        because such memory may change without a torch call.
        """
        return {
            id(copy): tensor
            for tensor, copy, version in self._kept.values()
            if tensor._version == version and _is_torchs(tensor)
        }

    def clear(self) -> None:
        """Removes all copies. Recordings keep the copies that they use."""
        self._kept.clear()


def _is_torchs(tensor: torch.Tensor) -> bool:
    """Returns whether torch allocated the memory of ``tensor``."""
    if tensor.layout is not torch.strided:
        return True
    try:
        return tensor.untyped_storage().resizable()
    except (RuntimeError, NotImplementedError):
        # Some subclasses of Tensor have no storage, and raise an error.
        return True
