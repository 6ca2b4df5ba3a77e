"""A small message in one block of memory: header and payload travel together.

::

    byte 0      128                          128 + payload
         | header [16] int64 | payload, of a shape and type known beforehand |

One message instead of two halves the work of a channel for payloads that are cheap to copy.
"""

from __future__ import annotations

import torch

from megatron.adaptive.transport.header import HEADER_WORDS, Header

_HEADER_BYTES = 8 * HEADER_WORDS


class Packet:
    """Memory for one message of a fixed shape.

    Args:
        shape: shape of the payload.
        dtype: its element type.

    Attributes:
        raw: the whole block, what is sent and received, ``[128 + payload bytes] uint8``.
        payload: the payload within it; keeps the block alive on its own.
    """

    __slots__ = ("_words", "payload", "raw")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        count = torch.Size(shape).numel()
        self.raw = torch.empty(_HEADER_BYTES + count * dtype.itemsize, dtype=torch.uint8)
        storage = self.raw.untyped_storage()
        self._words = self.raw[:_HEADER_BYTES].view(torch.int64).numpy()
        # Not a view of `raw` in autograd's sense: the receiver makes it a leaf of its own graph.
        offset = _HEADER_BYTES // dtype.itemsize
        self.payload = torch.empty(0, dtype=dtype)
        self.payload.set_(storage, offset, shape)  # type: ignore[call-overload]

    def fill(self, header: Header, payload: torch.Tensor) -> None:
        """Write header and payload, which is copied."""
        self._words[:] = header.words()
        self.payload.copy_(payload)

    def header(self, *, peer: int) -> Header:
        """Read the header that came from ``peer``.

        Raises:
            TransportError: it is no header.
        """
        return Header.decode(self._words.tolist(), peer=peer)
