"""What the programs of the contract suite share: a rank, its transports, and tensors to send."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.errors import AdaptiveError
from megatron.adaptive.profiling.transport_check import StoreGather
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.connect import Payloads, connect_ranks, own_endpoint
from megatron.adaptive.transport.gloo import GlooTransport
from megatron.adaptive.transport.header import Label
from megatron.adaptive.transport.interface import Arrival, Completions, Transport
from megatron.adaptive.transport.liveness import here

LIMIT_S = 30.0
CPU = torch.device("cpu")
SLOT_BYTES, SLOTS = 4096, 4


class Rank:
    """One rank of a program.

    Attributes:
        rank: its number.
        num_ranks: how many there are.
        store: shared with the other ranks and the test.
        address: what others reach this one at over a network.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, call: str) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.store = dist.PrefixStore(call, store)
        self.address = "127.0.0.1"
        self._root = store
        self._call = call
        self._opened = 0
        self._transports: list[Transport] = []

    def open(
        self, kind: str, peers: Sequence[int] | None = None, **options: Any
    ) -> tuple[Transport, int]:
        """Connect with the peers, by default all others.

        Returns:
            The transport and the first peer.
        """
        self._opened += 1
        options = {"transport_slot_bytes": SLOT_BYTES, "transport_slots": SLOTS, **options}
        if peers is None:
            peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        config = TransportConfig(transport=kind, **options)
        device = CPU
        made = connect_ranks(
            own=own_endpoint(
                self.rank,
                here(self.rank),
                device=device,
                own_gpu=False,
                options=config,
                address=self.address,
            ),
            peers=peers,
            gather=StoreGather(
                self._root, self.rank, self.num_ranks, f"{self._call}/open{self._opened}", LIMIT_S
            ),
            groups=Groups(self),
            options=config,
            payloads=Payloads(shape=None, dtype=torch.float32),
            device=device,
            describe=describe,
            timeout_s=LIMIT_S,
        )
        assert made is not None
        self._transports.append(made)
        return made, peers[0]

    def mark(self, name: str) -> None:
        """Tell the others that this rank got here."""
        self.store.set(name, "set")

    def await_mark(self, name: str) -> None:
        """Wait until somebody got there."""
        self.store.wait([name], datetime.timedelta(seconds=LIMIT_S))

    def join_group(self) -> None:
        """Make the process group that gloo needs."""
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=datetime.timedelta(seconds=LIMIT_S),
            )

    def finish(self) -> None:
        """Close what the program left open."""
        for transport in self._transports:
            transport.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class Groups:
    """Makes gloo's transports; see ``connect.TorchGroups``."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def make(
        self, kind: str, peers: Sequence[int], completions: Completions | None
    ) -> Transport | None:
        assert kind == "gloo"
        self._rank.join_group()
        group = dist.new_group(backend="gloo")
        if not peers:
            return None
        return GlooTransport(
            group,
            peers=peers,
            device=CPU,
            payload_shape=None,
            dtype=torch.float32,
            describe=describe,
            completions=completions,
        )


def describe(rank: int) -> str:
    return f"rank {rank} (stage {rank} on host-{rank})"


def label(microbatch: int, kind: ActionKind = ActionKind.F, step: int = 3, chunk: int = 0) -> Label:
    return Label(step, Action(kind, chunk, microbatch))


def wait(transport: Transport, limit_s: float = LIMIT_S) -> Arrival:
    arrival = transport.completions.wait(time.monotonic() + limit_s)
    assert isinstance(arrival, Arrival), "nothing arrived"
    return arrival


def error_of(action: Callable[[], Any]) -> list[str]:
    """Return class and text of the error that ``action()`` raises."""
    try:
        action()
    except AdaptiveError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in order, as bytes."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def require_equal(seen: torch.Tensor, expected: torch.Tensor) -> None:
    assert (seen.dtype, seen.shape) == (expected.dtype, expected.shape)
    assert torch.equal(bytes_of(seen), bytes_of(expected)), (seen.dtype, seen.shape)


def make_tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of random bits; both sides make the same."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        generator = torch.Generator().manual_seed(seed)
        most = 2 if dtype == torch.bool else 256
        bits = bytes_of(tensor)
        bits.random_(0, most, generator=generator)
        return bits.view(dtype).view(shape)
    return tensor


def numbers(count: int, seed: float) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * seed
