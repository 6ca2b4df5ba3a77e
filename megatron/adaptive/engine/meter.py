"""Measures what a forward keeps for its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["ActivationMeter"]


class ActivationMeter:
    """Measures what one forward of each chunk keeps for its backward.

    Counts the distinct storages that autograd saves during the first forward of a chunk, without
    those of parameters. Later forwards run unobserved.
    """

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def bytes_of(self, chunk: int) -> int:
        """Bytes of one microbatch of the chunk, 0 before its first forward."""
        return self._bytes.get(chunk, 0)

    @contextlib.contextmanager
    def measure(self, chunk: int, model: torch.nn.Module) -> Iterator[None]:
        """Observe a forward of ``chunk`` unless one was observed before."""
        if chunk in self._bytes:
            yield
            return
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        seen: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        self._bytes[chunk] = sum(seen.values())
