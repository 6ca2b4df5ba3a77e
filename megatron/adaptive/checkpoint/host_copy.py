"""Copies of tensors in the host's memory, which stays for the next time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["HostCopy"]

_ALIGN = 64


class HostCopy:
    """Room for copies.

    Args:
        tensors: like those that are to be copied.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._layout = _layout(tensors)
        self._is_cuda = any(one.is_cuda for one in tensors)
        starts, end = [], 0
        for one in tensors:
            starts.append(end)
            end += -(-one.nbytes // _ALIGN) * _ALIGN
        # Pinned, else copies go through a buffer of the driver's.
        memory = torch.empty(end, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._copies = [
            memory[start : start + one.nbytes].view(one.dtype).view(one.shape)
            for start, one in zip(starts, tensors, strict=True)
        ]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors are like those that it was made for."""
        return _layout(tensors) == self._layout

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy what tensors hold now; the same copies are returned each time. Blocks until done."""
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, list(tensors), non_blocking=True)
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()
        return self._copies


def _layout(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(one.dtype, one.shape) for one in tensors]
