"""Several transports as one, each for some of the peers, over one completion queue."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from megatron.adaptive.transport.completions import Completions
from megatron.adaptive.transport.header import Label
from megatron.adaptive.transport.interface import Channel, Transport

__all__ = ["CompositeTransport"]


class CompositeTransport:
    """Hands every call to the transport of the peer.

    Args:
        parts: the transport of each peer; all of them put into ``completions``.
        completions: the queue they share.
    """

    def __init__(self, parts: Mapping[int, Transport], completions: Completions) -> None:
        self.completions = completions
        self._part_of = dict(parts)
        # The owner of the queue comes last: the others put into it until they are closed.
        distinct = {id(part): part for part in parts.values()}.values()
        self._parts = sorted(distinct, key=lambda part: part.completions is completions)
        self.name = "+".join(dict.fromkeys(part.name for part in parts.values()))

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """See :class:`~megatron.adaptive.transport.interface.Transport`."""
        self._part_of[peer].send(peer, label, tensor)

    def channel(self, peer: int) -> Channel:
        """See :class:`~megatron.adaptive.transport.interface.Transport`."""
        return self._part_of[peer].channel(peer)

    def describe_links(self) -> dict[int, dict[str, Any]]:
        """See :class:`~megatron.adaptive.transport.interface.Transport`."""
        return {peer: part.describe_links()[peer] for peer, part in self._part_of.items()}

    def flush(self, timeout_s: float) -> None:
        """See :class:`~megatron.adaptive.transport.interface.Transport`."""
        end_s = time.monotonic() + timeout_s
        for part in self._parts:
            part.flush(max(0.0, end_s - time.monotonic()))

    def close(self) -> None:
        """See :class:`~megatron.adaptive.transport.interface.Transport`."""
        for part in self._parts:
            part.close()
