"""Makes the transports that go over process groups of torch: gloo and NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.transport.connect import Gather, Payloads
from megatron.adaptive.transport.gloo import GlooTransport, raw
from megatron.adaptive.transport.header import Header, Label, settled
from megatron.adaptive.transport.interface import Arrival, Completions, HeldArrival, Transport

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
    """Implements :class:`~megatron.adaptive.transport.connect.TorchGroups`.

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
        """Implements :class:`~megatron.adaptive.transport.connect.TorchGroups`."""
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


class NcclTransport(GlooTransport):
    """Channels over one NCCL communicator per direction and peer.

    Args:
        group: a gloo group of the pipeline's ranks for headers, used by nothing else.
        outgoing: NCCL group of the pair, by peer, for messages to it.
        incoming: NCCL group of the pair, by peer, for messages from it.
        peers: global ranks this rank exchanges messages with.
        device: this rank's GPU.
        describe: text for a peer in error messages.
        timeout_s: limit of a send that waits because the peer takes no messages.
        completions: where messages and failures go; a queue of its own where ``None``.
    """

    name = "nccl"

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        outgoing: Mapping[int, dist.ProcessGroup],
        incoming: Mapping[int, dist.ProcessGroup],
        peers: Sequence[int],
        device: torch.device,
        describe: Callable[[int], str],
        timeout_s: float = 600.0,
        completions: Completions | None = None,
    ) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        super().__init__(
            group,
            peers=peers,
            device=device,
            payload_shape=None,
            dtype=torch.float32,
            describe=describe,
            timeout_s=timeout_s,
            completions=completions,
        )

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """Implements :class:`~megatron.adaptive.transport.interface.Transport`."""
        payload = settled(tensor.detach())
        # Refuses what a header cannot carry before NCCL waits for a receive that will not come.
        Header(label, tuple(payload.shape), payload.dtype, 0).words()
        group = self._outgoing[peer]
        work = group.send([raw(payload)], dist.get_group_rank(group, peer), 0)
        self._send_header(peer, label, payload, (work,))

    def _receive_payload(self, peer: int, sequence: int, payload: torch.Tensor) -> None:
        """Nothing comes over gloo: the executor's thread posts the receive in :meth:`_arrival`."""

    def _arrival(self, label: Label, peer: int, payload: torch.Tensor) -> Arrival:
        shape, dtype = payload.shape, payload.dtype

        def take() -> torch.Tensor:
            group: Any = self._incoming[peer]
            received = torch.empty(shape, dtype=dtype, device=self._device)
            group.recv([raw(received)], dist.get_group_rank(group, peer), 0).wait()
            return received

        # The payload waits with NCCL on the sender from here on.
        return HeldArrival(label, peer, payload.nbytes, take, time.monotonic_ns())
