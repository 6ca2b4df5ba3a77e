"""Makes the channels of a job: every rank calls :meth:`Connector.connect` at the same point.

::

    each rank says what it is and can           gather
    each decides for all pairs alike            select.choose
    native channels: listen, send addresses     gather
                     open them, pair by pair
                     say whether it worked      gather
    gloo and NCCL:   groups, made by all        over_torch

A native channel that cannot be made after all (a limit on memory, a network that lets nothing
through) is no reason to stop where the user left the choice to us: all pairs of that kind then use
gloo. All ranks hear of it and do the same.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import extension
from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.parallel import NATIVE, PINNED, TransportConfig
from megatron.adaptive.errors import AdaptiveError, SetupError, TransportError
from megatron.adaptive.network import own_address
from megatron.adaptive.transport.gloo import GlooTransport
from megatron.adaptive.transport.interface import Completions, Endpoint, Label, Transport
from megatron.adaptive.transport.native import NativeTransport
from megatron.adaptive.transport.nccl import CudaStreams, NcclTransport, Streams, free
from megatron.adaptive.transport.select import (
    ChannelSize,
    Choice,
    choose,
    log_lines,
    rounds_of,
    size_of_channel,
)

Gather = Callable[[Any], list[Any]]
"""Returns what every rank of the job passed, by rank. Collective."""

# To open channels takes moments; ranks may come to it minutes apart.
_OPEN_S = 300.0
_SEED_BYTES = 40
_ACTIVE = "ACTIVE"


@dataclass(frozen=True, kw_only=True)
class Payloads:
    """Facts about the messages that are known beforehand, the same on all ranks.

    Attributes:
        shape: of the largest message, ``None`` where that is not known.
        dtype: their element type.
        varies: whether there are smaller ones.
        in_flight: most messages of a channel that its receiver keeps at a time.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    varies: bool = False
    in_flight: int | None = None

    @property
    def nbytes(self) -> int | None:
        """Size of the largest message, ``None`` where that is not known."""
        if self.shape is None:
            return None
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def own_endpoint(
    rank: int,
    place: Mapping[str, Any],
    *,
    device: torch.device,
    own_gpu: bool,
    options: TransportConfig,
    address: str | None,
) -> Endpoint:
    """Return what this rank says about itself.

    Args:
        rank: global rank.
        place: what ``liveness.here`` says.
        device: its device.
        own_gpu: it is a GPU that no other rank uses.
        options: the settings, for the RDMA device.
        address: its address on the network, ``None`` where it has none.
    """
    lacks: dict[str, str] = {}
    ports: tuple[str, ...] = ()
    module = extension.load()
    if module is None:
        reason = str(extension.why_missing())
        lacks = dict.fromkeys(NATIVE, reason)
    else:
        ports, reason = _rdma_ports(module, options.rdma_device)
        if not ports:
            lacks["rdma"] = reason
        if address is None:
            lacks["tcp"] = lacks["rdma"] = "it has no network address"
    if device.type != "cuda":
        lacks["nccl"] = "it has no GPU"
    elif not own_gpu:
        lacks["nccl"] = "it shares its GPU, or the job's backend is gloo"
    return Endpoint(
        rank=rank,
        host=place["host"],
        machine=str(place.get("machine", place["host"])),
        user=os.getuid(),
        device=device.type,
        addresses={} if address is None else {"tcp": address},
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        ports=ports,
        lacks=lacks,
    )


@dataclass(frozen=True, kw_only=True)
class Connector:
    """Connects this rank with its peers.

    Attributes:
        members: global ranks of this rank's pipeline, which send messages to each other alone.
        gather: exchanges values between all ranks of the job.
        accelerator: this rank's device, where received tensors go.
        payloads: what the messages are like.
        describe: text for a rank in error messages.
        timeout_s: limit of a send that waits because the peer takes no messages.
    """

    members: list[int]
    gather: Gather
    accelerator: Accelerator
    payloads: Payloads
    describe: Callable[[int], str]
    timeout_s: float

    def own_end(
        self, places: Sequence[Mapping[str, Any]], options: TransportConfig, host: str | None
    ) -> Endpoint:
        """Returns this rank's end of connections.

        Args:
            places: where every rank runs, see ``liveness.here``.
            options: the user's settings.
            host: where the job's ranks meet, ``None`` where that is none of the network.
        """
        rank, interface = dist.get_rank(), options.transport_interface
        alone = len({place["machine"] for place in places}) == 1
        address: str | None = None
        with contextlib.suppress(SetupError):  # without one there are other transports
            interface = interface or Environment.read().socket_interface
            address = own_address(interface, host, alone=alone)
        return own_endpoint(
            rank,
            places[rank],
            device=self.accelerator.device,
            own_gpu=self.accelerator.backend == "nccl",
            options=options,
            address=address,
        )

    def connect(
        self,
        own: Endpoint,
        peers: Sequence[int],
        options: TransportConfig,
        log: Callable[[str], None] = lambda line: None,
    ) -> Transport | None:
        """Make the channels. Collective over all ranks of the job.

        Args:
            own: what this rank is.
            peers: global ranks that it exchanges messages with; mutual.
            options: the user's settings.
            log: called once per choice, on the job's first rank.

        Returns:
            The transport, ``None`` for a rank without peers.

        Raises:
            SetupError: a forced transport cannot connect a pair; on all ranks alike.
            TransportError: it should have been possible, and failed.
        """
        gathered = self.gather((own, list(peers), secrets.token_bytes(_SEED_BYTES)))
        ends = [end for end, _, _ in gathered]
        pairs = {(min(r, p), max(r, p)) for r, (_, its, _) in enumerate(gathered) for p in its}
        forced = options.forced
        choices = {
            (low, high): choose(ends[low], ends[high], forced) for low, high in sorted(pairs)
        }
        native: NativeTransport | None = None
        if any(choice.kind in NATIVE for choice in choices.values()):
            native, failure, ways = self._open(own, options, choices, ends, seed=gathered[0][2])
            if failure is not None:
                if forced is not None:
                    raise TransportError(failure)
                for pair, choice in choices.items():
                    if choice.kind in NATIVE:
                        choices[pair] = Choice("gloo", f"no {choice.kind}: {failure}")
            for pair, way in ways.items():
                choices[pair] = replace(choices[pair], reason=f"{choices[pair].reason}; {way}")
        if own.rank == 0:
            for line in log_lines(choices):
                log(line)
        return self._assemble(own.rank, choices, native)

    def _open(
        self,
        own: Endpoint,
        options: TransportConfig,
        choices: Mapping[tuple[int, int], Choice],
        ends: Sequence[Endpoint],
        *,
        seed: bytes,
    ) -> tuple[NativeTransport | None, str | None, dict[tuple[int, int], str]]:
        """Open the native channels of this rank. Collective over all ranks.

        Args:
            own: what this rank is.
            options: the user's settings.
            choices: of all pairs.
            ends: all ranks.
            seed: bytes that the job's ranks share: the token of links, the job's number, and the
                name of the socket that those of a machine take in turn while they make memory.

        Returns:
            The transport, if this rank has such channels, why they failed somewhere, and by pair
            how tensors of GPUs go.
        """
        rank, gather, device = own.rank, self.gather, self.accelerator.device
        size = size_of_channel(
            self.payloads.nbytes, self.payloads.in_flight, options.transport_slot_bytes,
            options.transport_slots,
        )  # fmt: skip
        kinds = {
            sum(pair) - rank: choice.kind
            for pair, choice in choices.items()
            if rank in pair and choice.kind in NATIVE
        }
        node: Any = None
        who = f"rank {rank} on {own.host}"
        failure: str | None = None
        addresses: dict[str, str] = {}
        try:
            if kinds:
                module = extension.require("this transport")
                # Ranks that are bound to processors of their own do not stand in each other's way.
                here = sum(end.shares_cpus(own) for end in ends)
                job = int.from_bytes(seed[16:24], "little")
                node = module.Node(rank, seed[:16], job, here, self.describe)
                addresses = _listen(node, set(kinds.values()), own)
        except AdaptiveError as error:
            failure = f"{who}: {error}"
        listening = gather(addresses)
        failures = gather(failure)
        ways: dict[tuple[int, int], str] = {}
        if not any(failures):
            # In one order on all ranks. After a failure too: peers wait for this rank to come.
            for peer, kind in sorted(kinds.items()):
                address = listening[peer]["unix" if kind == "shm" else "tcp"]
                try:
                    given = _channel_options(kind, size, seed, own, options, device)
                    node.open(kind, peer, address, min(self.timeout_s, _OPEN_S), **given)
                except (AdaptiveError, ValueError) as error:
                    failure = failure or f"{who}: {error}"
            gathered = gather([failure, [] if failure else _gpu_ways(node, kinds)])
            failures = [one for one, _ in gathered]
            for low, (_, its) in enumerate(gathered):
                ways.update({(low, high): way for high, way in its if low < high})
        first = next((one for one in failures if one), None)
        if first is not None:
            if node is not None:
                node.close(0.0)
            return None, first, {}
        if node is None:
            return None, None, ways
        made = NativeTransport(
            node, kinds, device=device, describe=self.describe, least_free=size.least_free
        )
        return made, None, ways

    def _assemble(
        self, rank: int, choices: Mapping[tuple[int, int], Choice], native: NativeTransport | None
    ) -> Transport | None:
        """Add what goes over torch, for all ranks together, and make one transport of all."""
        mine = {sum(pair) - rank: choice.kind for pair, choice in choices.items() if rank in pair}
        completions: Completions | None = None if native is None else native.completions
        parts: dict[int, Transport] = {}
        if native is not None:
            parts = {peer: native for peer, kind in mine.items() if kind in NATIVE}
        for kind in sorted({choice.kind for choice in choices.values()} - set(NATIVE)):
            its_peers = [peer for peer, its in sorted(mine.items()) if its == kind]
            part = self.over_torch(kind, its_peers, completions)
            if part is not None and its_peers:
                completions = completions or part.completions
                parts.update(dict.fromkeys(its_peers, part))
        distinct = list({id(part): part for part in parts.values()}.values())
        if len(distinct) < 2:
            return distinct[0] if distinct else None
        assert completions is not None
        return CompositeTransport(parts, completions)

    def over_torch(
        self, kind: str, peers: Sequence[int], completions: Completions | None
    ) -> Transport | None:
        """Make this rank's transport over process groups. Collective over all ranks of the job.

        Args:
            kind: ``gloo`` or ``nccl``.
            peers: may be empty: the rank then only takes part.
            completions: the queue to use; one of its own where ``None``.
        """
        group = gloo_group(self.members, self.gather)
        common: dict[str, Any] = {
            "peers": peers,
            "device": self.accelerator.device,
            "describe": self.describe,
            "timeout_s": self.timeout_s,
            "completions": completions,
        }
        if kind == "nccl":
            outgoing, incoming = self._nccl_channels(peers)
            if not peers:
                return None
            common |= {"outgoing": outgoing, "incoming": incoming, "streams": self.streams()}
            return NcclTransport(group, **common)
        shape = None if self.payloads.varies else self.payloads.shape
        common |= {"payload_shape": shape, "dtype": self.payloads.dtype}
        return GlooTransport(group, **common) if peers else None

    def streams(self) -> Streams:
        """Returns the streams that NCCL's channels use."""
        return CudaStreams(self.accelerator.device)

    def pair_group(self, store: dist.Store, index: int) -> Any:
        """Makes a communicator of two ranks, which meet in a store.

        Only this process and its peer take part, no other rank. It connects with the first message
        and then holds one NCCL communicator.

        Args:
            store: Store that the two ranks alone use.
            index: This rank's place in it, 0 for the lower of the two.
        """
        # With a high-priority stream messages have their own queue, not behind compute kernels.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = datetime.timedelta(seconds=max(self.timeout_s, _OPEN_S))
        return dist.ProcessGroupNCCL(store, index, 2, options)

    def _nccl_channels(self, peers: Sequence[int]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Makes a communicator per directed channel of this rank. Collective over all ranks.

        A rank makes only its own communicators. All ranks take the pairs in one order, in rounds in
        which no rank occurs twice. So ranks cannot wait in a circle, and the pairs of a round
        connect at the same time.

        Returns:
            The communicators for messages to a peer and from it, by peer.

        Raises:
            TransportError: A channel could not be opened; all ranks raise it.
        """
        me = dist.get_rank()
        gathered = self.gather((list(peers), secrets.token_hex(_SEED_BYTES)))
        pairs = {(min(r, p), max(r, p)) for r, (its, _) in enumerate(gathered) for p in its}
        default: Any = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"channels/{gathered[0][1]}", default)
        made: dict[tuple[int, int], Any] = {}
        failure: str | None = None
        try:
            for low, high in rounds_of(pairs):
                if me in (low, high):
                    for sender, receiver in ((low, high), (high, low)):
                        made[sender, receiver] = self._open_channel(store, sender, receiver)
            self.accelerator.synchronize()
        except RuntimeError as error:
            failure = f"rank {me}: a channel over NCCL cannot be opened: {_first_line(error)}"
        failures = [text for text in self.gather(failure) if text]
        if failures:
            for group in made.values():
                free(group, is_idle=False)
            raise TransportError(f"{failures[0]}; --transport names another")
        return (
            {receiver: group for (sender, receiver), group in made.items() if sender == me},
            {sender: group for (sender, receiver), group in made.items() if receiver == me},
        )

    def _open_channel(self, store: dist.Store, sender: int, receiver: int) -> Any:
        """Makes the communicator of a directed channel and connects it by a first message."""
        me, index = dist.get_rank(), int(dist.get_rank() == max(sender, receiver))
        group = self.pair_group(dist.PrefixStore(f"{sender}-{receiver}", store), index)
        probe = torch.zeros(1, device=self.accelerator.device)
        (group.send if me == sender else group.recv)([probe], 1 - index, 0).wait()
        return group


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


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


def _listen(node: Any, kinds: set[str], own: Endpoint) -> dict[str, str]:
    addresses = {}
    if "shm" in kinds:
        addresses["unix"] = node.listen("unix")
    if kinds - {"shm"}:
        addresses["tcp"] = node.listen("tcp", own.addresses["tcp"])
    return addresses


def _channel_options(
    kind: str,
    size: ChannelSize,
    seed: bytes,
    own: Endpoint,
    wanted: TransportConfig,
    device: torch.device,
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "slot_bytes": size.slot_bytes,
        "slots": size.slots,
        "crc": wanted.transport_crc,
        "reservable": size.reservable,
        "silent_limit_s": wanted.transport_silence_s,
    }
    if kind == "rdma":
        options |= _rdma_options(own, wanted, device)
    if kind == "shm":
        options["turn_name"] = f"megatron-adaptive-{seed[24:].hex()}"
    if kind == "shm" and device.type == "cuda":
        index = device.index
        options["cuda_device"] = torch.cuda.current_device() if index is None else index
        if wanted.transport_gpu == PINNED:
            options["cuda_refusal"] = f"--transport-gpu {PINNED}"
    return options


def _rdma_options(own: Endpoint, wanted: TransportConfig, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {"num_qps": wanted.rdma_queue_pairs}
    if wanted.rdma_device is not None:
        # Else the extension finds the one that carries the link's address.
        name, _, port = own.ports[0].partition(":")
        options |= {"device": name, "port": int(port)}
    elif device.type == "cuda":
        options["near_pci"] = _pci_address(device)
    if wanted.rdma_gid_index is not None:
        options["gid_index"] = wanted.rdma_gid_index
    if wanted.rdma_mtu_bytes is not None:
        options["mtu"] = wanted.rdma_mtu_bytes
    return options


def _gpu_ways(node: Any, kinds: Mapping[int, str]) -> list[tuple[int, str]]:
    """Return peers and how tensors of GPUs go to them, where channels have found that out."""
    ways = []
    for peer in kinds:
        info = node.info(peer)
        if info.get("gpu_path") == "cuda-ipc":
            ways.append((peer, "tensors stay in GPU memory by CUDA IPC"))
        elif "gpu_path" in info:
            reason = info["gpu_reason"]
            ways.append((peer, f"tensors through pinned memory, no CUDA IPC: {reason}"))
    return ways


def _pci_address(device: torch.device) -> str:
    """Return where a GPU sits, as Linux names it; empty where torch does not say."""
    found: Any = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_bus_id"):
        return ""
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _rdma_ports(module: ModuleType, wanted: str | None) -> tuple[tuple[str, ...], str]:
    """Return this node's active ports, and why there are none."""
    try:
        devices = module.rdma_devices()
    except AdaptiveError as error:
        return (), str(error)
    found = {
        f"{device.name}:{port.number}": port.state for device in devices for port in device.ports
    }
    if wanted is not None:
        found = {
            name: state for name, state in found.items() if wanted in (name, name.split(":")[0])
        }
    active = tuple(name for name, state in found.items() if state.upper().endswith(_ACTIVE))
    if active:
        return active, ""
    if found:
        return (), "its RDMA ports are not active: " + ", ".join(map(" is ".join, found.items()))
    return (), "it has no RDMA device" + (f" {wanted}" if wanted is not None else "")


class CompositeTransport:
    """A ``Transport`` that hands every call to that of the peer.

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
        self._part_of[peer].send(peer, label, tensor)

    def reserve(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._part_of[peer].reserve(peer, shape, dtype)

    def describe_links(self) -> dict[int, dict[str, Any]]:
        return {peer: part.describe_links()[peer] for peer, part in self._part_of.items()}

    def flush(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        for part in self._parts:
            part.flush(max(0.0, end_s - time.monotonic()))

    def close(self) -> None:
        for part in self._parts:
            part.close()
