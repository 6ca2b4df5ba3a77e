"""Makes the transports that go over process groups of torch: gloo and NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.transport.completions import Completions
from megatron.adaptive.transport.connect import Gather, Payloads
from megatron.adaptive.transport.gloo import GlooTransport
from megatron.adaptive.transport.interface import Transport
from megatron.adaptive.transport.nccl import NcclTransport

__all__ = ["ProcessGroups", "gloo_group"]


def gloo_group(members: list[int], gather: Gather) -> dist.ProcessGroup:
    """Make a gloo group for each distinct ``members`` of the job; returns this rank's.

    Collective over all ranks, each of which is one of its own members.
    """
    mine = None
    for ranks in sorted(set(map(tuple, gather(members)))):
        group = dist.new_group(list(ranks), backend="gloo")
        if list(ranks) == members:
            mine = group
    assert mine is not None
    return mine


class ProcessGroups:
    """See :class:`~megatron.adaptive.transport.connect.TorchGroups`.

    Args:
        members: this rank's pipeline, whose ranks exchange messages with each other alone.
        gather: exchanges values between all ranks of the job.
        accelerator: this rank's device.
        payloads: what the messages are like.
        describe: text for a rank in error messages.
        timeout_s: limit of a send that waits because the peer takes no messages.
    """

    def __init__(
        self,
        *,
        members: list[int],
        gather: Gather,
        accelerator: Accelerator,
        payloads: Payloads,
        describe: Callable[[int], str],
        timeout_s: float,
    ) -> None:
        self._members = members
        self._gather = gather
        self._accelerator = accelerator
        self._payloads = payloads
        self._describe = describe
        self._timeout_s = timeout_s

    def make(
        self, kind: str, peers: Sequence[int], completions: Completions | None
    ) -> Transport | None:
        """See :class:`~megatron.adaptive.transport.connect.TorchGroups`."""
        group = gloo_group(self._members, self._gather)
        common: dict[str, Any] = {
            "peers": peers,
            "device": self._accelerator.device,
            "describe": self._describe,
            "timeout_s": self._timeout_s,
            "completions": completions,
        }
        if kind == "nccl":
            outgoing, incoming = self._nccl_channels(peers)
            common |= {"outgoing": outgoing, "incoming": incoming}
            return NcclTransport(group, **common) if peers else None
        common |= {"payload_shape": self._payloads.shape, "dtype": self._payloads.dtype}
        return GlooTransport(group, **common) if peers else None

    def _nccl_channels(
        self, peers: Sequence[int]
    ) -> tuple[dict[int, dist.ProcessGroup], dict[int, dist.ProcessGroup]]:
        """Make a communicator per directed channel, all ranks in one order, and connect each."""
        device = self._accelerator.device
        outgoing: dict[int, dist.ProcessGroup] = {}
        incoming: dict[int, dist.ProcessGroup] = {}
        me = dist.get_rank()
        for sender, receivers in enumerate(self._gather(list(peers))):
            for receiver in receivers:
                pair = sorted((sender, receiver))
                group = dist.new_group(pair, backend="nccl", device_id=device)
                if me == sender:
                    outgoing[receiver] = group
                    dist.send(torch.zeros(1, device=device), receiver, group=group)
                elif me == receiver:
                    incoming[sender] = group
                    dist.recv(torch.zeros(1, device=device), sender, group=group)
        self._accelerator.synchronize()
        return outgoing, incoming
