"""Transport over NCCL for GPU tensors, with gloo messages that say what is coming.

NCCL has no tags and matches messages of a communicator in the order they were issued, and a posted
receive occupies the GPU until it is matched. So every directed channel has a communicator of its
own, made by all ranks in one order, and a receive is posted only after the sender's header has
arrived: the sender's kernel is already queued then.

::

    sender     ncclSend on its stream ─ header over gloo ────┐
    receiver                            header ─> queue ─> take(): ncclRecv on its stream
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.transport.completions import Arrival, Completions, HeldArrival
from megatron.adaptive.transport.gloo import GlooTransport, raw
from megatron.adaptive.transport.header import Header, Label, settled


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
        """See :class:`~megatron.adaptive.transport.interface.Transport`."""
        payload = settled(tensor.detach())
        # Refuses what a header cannot carry before NCCL waits for a receive that will not come.
        Header(label, tuple(payload.shape), payload.dtype, 0).encode()
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
