"""Several tensors in one message between two stages.

A border between stages has a fixed row of tensors, the same for every microbatch. One alone travels
as it is; several are laid into one block of bytes, each at a place that follows from shapes and
types, so that nothing but the block is sent::

    byte 0            64                        block
         | tensor 0   .. | tensor 1             .. |

The receiver takes views of the block: nothing is copied there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.tape import Value

__all__ = ["Layout"]

_ALIGNED = 64
_Place = tuple[int, int, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one kind of message.

    Attributes:
        places: of each tensor the first byte, the number of bytes, shape and type.
        nbytes: of the message.
    """

    places: tuple[_Place, ...]
    nbytes: int

    @classmethod
    def of(cls, values: Sequence[Value]) -> Layout:
        """Return the layout of a row of tensors, at least one byte long."""
        places: list[_Place] = []
        offset = 0
        for value in values:
            size = torch.Size(value.shape).numel() * value.dtype.itemsize
            places.append((offset, size, value.shape, value.dtype))
            offset += -(-size // _ALIGNED) * _ALIGNED
        if len(places) == 1:
            offset = places[0][1]
        return cls(tuple(places), max(1, offset))

    def pack(self, tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
        """Return the message of these tensors; ``None`` counts as zeros.

        Raises:
            ConfigError: a tensor has another shape than the sample's.
        """
        for tensor, (_, _, shape, dtype) in zip(tensors, self.places, strict=True):
            if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
                raise ConfigError(
                    f"a tensor of {list(tensor.shape)} {tensor.dtype} is to go to the next stage, "
                    f"but with the sample it was {list(shape)} {dtype}: shapes between stages must "
                    "be the same for every microbatch; move the cut point"
                )
        if len(self.places) == 1:
            _, _, shape, dtype = self.places[0]
            alone = tensors[0]
            if alone is None:
                return torch.zeros(shape, dtype=dtype, device=device)
            return alone.detach()
        block = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        for tensor, place in zip(tensors, self.places, strict=True):
            view = _view(block, place)
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach())
        return block

    def unpack(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a message, views of it."""
        if len(self.places) == 1:
            return [message]
        return [_view(message, place) for place in self.places]


def _view(block: torch.Tensor, place: _Place) -> torch.Tensor:
    offset, size, shape, dtype = place
    return block[offset : offset + size].view(dtype).view(shape)
