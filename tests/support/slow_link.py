"""Defines a gloo transport that delays each message on one link.

Environment variables:

``SLOW_LINK``    global ranks of the link, such as ``2-3``
``SLOW_LINK_S``  delay of each message in seconds
"""

from __future__ import annotations

import os
import time

import torch

from megatron.adaptive.transport.gloo import GlooKind
from megatron.adaptive.transport.interface import Label, Transport
from megatron.adaptive.transport.kind import Opening


class SlowLink(GlooKind):
    """Opens gloo transports that delay each message on the slow link."""

    def open(self, opening: Opening) -> Transport | None:
        transport = super().open(opening)
        low, high = map(int, os.environ["SLOW_LINK"].split("-"))
        if transport is None or opening.rank not in (low, high):
            return transport
        slow_peer = low + high - opening.rank
        delay_s = float(os.environ["SLOW_LINK_S"])
        send = transport.send

        def send_late(peer: int, label: Label, tensor: torch.Tensor) -> None:
            if peer == slow_peer:
                time.sleep(delay_s)
            send(peer, label, tensor)

        transport.send = send_late  # type: ignore[method-assign]
        return transport
