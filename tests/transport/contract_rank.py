"""Provides the ranks on which the programs of the contract tests run, and their tensors."""

from __future__ import annotations

import datetime
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.config.transport_specs import BUILT_IN
from megatron.adaptive.errors import AdaptiveError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.connect import Connector, own_endpoint
from megatron.adaptive.transport.interface import Arrival, Completions, Label, Transport
from megatron.adaptive.transport.kind import Opening, Payloads, TransportKind, transport_kind
from megatron.adaptive.transport.liveness import here
from megatron.adaptive.transport.native_kinds import NativeKind
from megatron.adaptive.transport.nccl import HostStreams, NcclKind, Streams

LIMIT_S = 30.0
FREE_LIMIT = datetime.timedelta(seconds=20)
CPU = torch.device("cpu")
SLOT_BYTES, SLOTS = 4096, 4
OVER_TORCH = tuple(name for name in BUILT_IN if not isinstance(transport_kind(name), NativeKind))
"""Transports outside of the extension. In these tests, gloo and host streams replace NCCL."""


class Rank:
    """Rank on which a test program runs.

    Attributes:
        rank: Rank of this process.
        num_ranks: Number of ranks.
        store: Store that all ranks and the test share.
        address: Address at which other machines can reach this rank.
        streams: Streams that the NCCL transport uses.
        num_pairs: Number of NCCL channels that this rank has opened.
        fails_at: Number of the NCCL channel that fails to open, starting at 1, or 0 for none.
        pair_limit_s: Timeout of operations in NCCL channels, in seconds.
        stuck_pairs: Text for each NCCL channel that the other end did not free in time.
    """

    def __init__(
        self, store: dist.Store, rank: int, num_ranks: int, call: str, connection: Connection
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.store = dist.PrefixStore(call, store)
        self.address = "127.0.0.1"
        self.streams: Streams = HostStreams()
        self.num_pairs = 0
        self.fails_at = 0
        self.pair_limit_s = LIMIT_S
        self.stuck_pairs: list[str] = []
        self._root = store
        self._call = call
        self._connection = connection
        self._opened = 0
        self._transports: list[Transport] = []

    def open(
        self,
        kind: str,
        peers: Sequence[int] | None = None,
        *,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> tuple[Transport, int]:
        """Opens channels to the ranks in ``peers``, which are all other ranks by default.

        Args:
            kind: Name of the transport.
            peers: Global ranks of the peers.
            shape: Shape of all messages, or ``None`` if their shapes differ.
            dtype: Dtype of all messages, used only if ``shape`` is given.
            options: Additional transport settings.

        Returns:
            The transport, and the first rank in ``peers``.
        """
        self._opened += 1
        options = {"transport_slot_bytes": SLOT_BYTES, "transport_slots": SLOTS, **options}
        if peers is None:
            peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        config = TransportConfig(transport=kind, **options)
        payloads = Payloads(shape=shape, dtype=dtype)
        host = here(self.rank)
        endpoint = own_endpoint(
            self.rank, host, device=CPU, own_gpu=False, options=config, address=self.address
        )
        if kind == "nccl":
            endpoint = replace(endpoint, lacks={})
        made = LateConnector(
            members=list(range(self.num_ranks)),
            gather=self._gather("open"),
            accelerator=Accelerator(device=CPU, backend="gloo", name="CPU"),
            payloads=payloads,
            describe=describe,
            timeout_s=LIMIT_S,
            rank=self,
        ).connect(endpoint, peers, config)
        assert made is not None
        self._transports.append(made)
        return made, peers[0]

    def mark(self, name: str) -> None:
        """Signals to the other ranks and the test that this rank has reached the point ``name``."""
        self.store.set(name, "set")

    def await_mark(self, name: str) -> None:
        """Waits until another rank or the test has reached the point ``name``."""
        self.store.wait([name], datetime.timedelta(seconds=LIMIT_S))

    def join_group(self, store: dist.Store | None = None) -> None:
        """Joins the gloo process group of all ranks, through ``store`` if it is given."""
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=store or dist.PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=datetime.timedelta(seconds=LIMIT_S),
            )

    def exit_with(self, value: Any) -> NoReturn:
        """Exits this process immediately, with ``value`` as the result of the program."""
        self._connection.send(("done", value))
        os._exit(0)

    def finish(self) -> None:
        """Closes all channels and the process group that the program left open."""
        for transport in self._transports:
            transport.close()
        assert not self.stuck_pairs, self.stuck_pairs
        if dist.is_initialized():
            dist.destroy_process_group()

    def _gather(self, name: str) -> StoreGather:
        prefix = f"{self._call}/{name}{self._opened}"
        return StoreGather(self._root, self.rank, self.num_ranks, prefix)


class StoreGather:
    """Gathers values from all ranks through a store, because there is no process group yet."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, prefix: str) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self._rank = rank
        self._world_size = world_size
        self._count = 0

    def __call__(self, value: Any) -> list[Any]:
        self._count += 1
        self._store.set(f"{self._count}/{self._rank}", pickle.dumps(value))
        keys = [f"{self._count}/{rank}" for rank in range(self._world_size)]
        self._store.wait(keys, datetime.timedelta(seconds=LIMIT_S))
        return [pickle.loads(self._store.get(key)) for key in keys]


@dataclass(frozen=True, kw_only=True)
class LateConnector(Connector):
    """Opens channels like :class:`Connector`, but creates the process group only when needed."""

    rank: Rank

    def open_part(
        self,
        name: str,
        peers: Sequence[int],
        options: TransportConfig,
        completions: Completions | None,
    ) -> Transport | None:
        self.rank.join_group()
        return super().open_part(name, peers, options, completions)

    def kind(self, name: str) -> TransportKind:
        return HostNccl(self.rank) if name == "nccl" else super().kind(name)


class HostNccl(NcclKind):
    """Opens NCCL channels without GPUs: gloo and host streams replace NCCL and GPU streams."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def streams(self, opening: Opening) -> Streams:
        """Returns the rank's streams, which are host streams by default."""
        return self._rank.streams

    def pair_group(self, opening: Opening, store: dist.Store, index: int) -> Any:
        """Creates and returns a gloo process group of two ranks instead of an NCCL group.

        ``index`` is the index of this rank in the group. The ranks connect through ``store``.
        """
        self._rank.num_pairs += 1
        if self._rank.fails_at == self._rank.num_pairs:
            raise RuntimeError("unhandled system error\nin a made-up library")
        limit = datetime.timedelta(seconds=self._rank.pair_limit_s)
        group = dist.ProcessGroupGloo(store, index, 2, limit)
        return PairGroup(group, store, index, self._rank.stuck_pairs)


class PairGroup:
    """Simulates the communicator of an NCCL channel with ``group``.

    As in NCCL, freeing an idle communicator waits for the other end, and an abort may fail.

    Args:
        group: Process group of the two ranks, which sends and receives.
        store: Store that only the two ranks use.
        index: Index of this rank in the group.
        stuck: List to which a text is added if the other end does not free the channel in time.
    """

    def __init__(self, group: Any, store: dist.Store, index: int, stuck: list[str]) -> None:
        self.send = group.send
        self.recv = group.recv
        self._store = store
        self._index = index
        self._stuck = stuck

    def shutdown(self) -> None:
        self._store.set(f"freed-{self._index}", "")
        try:
            self._store.wait([f"freed-{1 - self._index}"], FREE_LIMIT)
        except RuntimeError:
            self._stuck.append(f"the other end of index {self._index} did not free the channel")

    def abort(self) -> None:
        raise RuntimeError("the communicator cannot be aborted")


def describe(rank: int) -> str:
    return f"rank {rank} (stage {rank} on host-{rank})"


def label(microbatch: int, kind: ActionKind = ActionKind.F, step: int = 3, chunk: int = 0) -> Label:
    return Label(step, Action(kind, chunk, microbatch))


def wait(transport: Transport, limit_s: float = LIMIT_S) -> Arrival:
    arrival = transport.completions.wait(time.monotonic() + limit_s)
    assert isinstance(arrival, Arrival), "no message arrived"
    return arrival


def error_of(action: Callable[[], Any]) -> list[str]:
    """Returns the class name and text of the error of ``action()``, or ``["none", ""]``."""
    try:
        action()
    except AdaptiveError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of ``tensor`` as a flat tensor, with the elements in row-major order."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def require_equal(seen: torch.Tensor, expected: torch.Tensor) -> None:
    assert (seen.dtype, seen.shape) == (expected.dtype, expected.shape)
    assert torch.equal(bytes_of(seen), bytes_of(expected)), (seen.dtype, seen.shape)


def make_tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of random bits that depend only on ``seed``, ``shape`` and ``dtype``."""
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
