"""The state of a pipeline's rank, for copies of it in memory.

Copies and their keeping are ``checkpoint.snapshots``; what becomes of them after a
loss is a checkpoint as :meth:`Pipeline.save` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.adaptive.checkpoint.snapshot_plan import Part
from megatron.adaptive.checkpoint.snapshots import Piece
from megatron.adaptive.modules.checkpoint import Checkpointer
from megatron.adaptive.modules.saving import STATE, state_bytes

__all__ = ["PipelineState"]


class PipelineState:
    """What a rank holds; see ``CopiedState``.

    Args:
        checkpointer: takes it apart.
        head: what all ranks say of a checkpoint of now.
        state: the user's objects that are saved as well, by name.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        head: Callable[[], Mapping[str, Any]],
        state: Mapping[str, Any],
    ) -> None:
        self._checkpointer = checkpointer
        self._head = head
        self._state = state
        self._told: Mapping[str, Any] = {}
        self._layout: list[Any] = []
        self._is_checked = False

    def pieces(self) -> Mapping[Part, Piece]:
        """See ``CopiedState``; buffers are copied at once, for a forward may change them."""
        tensors, self._told = self._checkpointer.apart()
        self._layout = _layout(tensors)
        found = {}
        for name, one in tensors.items():
            size = list(one.shape)
            tensor = one.clone() if self._checkpointer.is_buffer(name) else one
            found[name, (0,) * one.dim()] = Piece(tensor=tensor, size=size, whole=size)
        return found

    def extra(self) -> bytes:
        """See ``CopiedState``."""
        line = json.dumps({**self._head(), **self._told}).encode() + b"\n"
        if not self._state:
            return line
        content = state_bytes(self._state, check=not self._is_checked)
        self._is_checked = True
        return line + content

    def head(self) -> Mapping[str, Any]:
        """See ``CopiedState``: all ranks have what is in common."""
        return {"has_common": True, "common": STATE}

    def is_changed(self) -> bool:
        """See ``CopiedState``: optimizers make their state with the first update."""
        return _layout(self._checkpointer.apart()[0]) != self._layout


def _layout(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    return [(name, one.shape, one.dtype) for name, one in tensors.items()]
