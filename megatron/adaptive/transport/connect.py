"""Makes the channels of a job: every rank calls :meth:`Connector.connect` at the
same point.

::

    each rank says what it is and can           gather
    each decides for all pairs alike            select.choose
    native channels: listen, send addresses     gather
                     open them, pair by pair
                     say whether it worked      gather
    gloo and NCCL:   groups, made by all        TorchGroups

A native channel that cannot be made after all (a limit on memory, a network that lets nothing
through) is no reason to stop where the user left the choice to us: all pairs of that kind then use
gloo. All ranks hear of it and do the same.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol

import torch

from megatron.adaptive import extension
from megatron.adaptive.config.parallel import NATIVE, PINNED, TransportConfig
from megatron.adaptive.errors import AdaptiveError, SetupError, TransportError
from megatron.adaptive.network import addresses, is_loopback, outside_address, source_towards
from megatron.adaptive.transport.interface import Completions, Endpoint, Label, Transport
from megatron.adaptive.transport.native import NativeTransport
from megatron.adaptive.transport.select import (
    ChannelSize,
    Choice,
    choose,
    log_lines,
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


class TorchGroups(Protocol):
    """Makes transports over process groups of torch."""

    def make(
        self, kind: str, peers: Sequence[int], completions: Completions | None
    ) -> Transport | None:
        """Make this rank's transport to ``peers``. Collective over all ranks of the job.

        Args:
            kind: ``gloo`` or ``nccl``.
            peers: may be empty: the rank then only takes part.
            completions: the queue to use; one of its own where ``None``.
        """


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
        own: what this rank is.
        peers: global ranks that it exchanges messages with; mutual.
        gather: exchanges values between all ranks.
        groups: makes what goes over torch.
        options: the user's settings.
        payloads: what the messages are like.
        device: where received tensors go.
        describe: text for a rank in error messages.
        timeout_s: limit of sends that must wait.
    """

    own: Endpoint
    peers: Sequence[int]
    gather: Gather
    groups: TorchGroups
    options: TransportConfig
    payloads: Payloads
    device: torch.device
    describe: Callable[[int], str]
    timeout_s: float

    def connect(self, log: Callable[[str], None] = lambda line: None) -> Transport | None:
        """Make the channels. Collective over all ranks of the job.

        Args:
            log: called once per choice, on the job's first rank.

        Returns:
            The transport, ``None`` for a rank without peers.

        Raises:
            SetupError: a forced transport cannot connect a pair; on all ranks alike.
            TransportError: it should have been possible, and failed.
        """
        gathered = self.gather((self.own, list(self.peers), secrets.token_bytes(_SEED_BYTES)))
        ends = [end for end, _, _ in gathered]
        pairs = {(min(r, p), max(r, p)) for r, (_, peers, _) in enumerate(gathered) for p in peers}
        forced = self.options.forced
        choices = {
            (low, high): choose(ends[low], ends[high], forced) for low, high in sorted(pairs)
        }
        native: NativeTransport | None = None
        if any(choice.kind in NATIVE for choice in choices.values()):
            native, failure, ways = self._open(choices, ends, seed=gathered[0][2])
            if failure is not None:
                if forced is not None:
                    raise TransportError(failure)
                for pair, choice in choices.items():
                    if choice.kind in NATIVE:
                        choices[pair] = Choice("gloo", f"no {choice.kind}: {failure}")
            for pair, way in ways.items():
                choices[pair] = replace(choices[pair], reason=f"{choices[pair].reason}; {way}")
        if self.own.rank == 0:
            for line in log_lines(choices):
                log(line)
        return _assemble(self.own.rank, choices, native, self.groups)

    def _open(
        self, choices: Mapping[tuple[int, int], Choice], ends: Sequence[Endpoint], *, seed: bytes
    ) -> tuple[NativeTransport | None, str | None, dict[tuple[int, int], str]]:
        """Open the native channels of this rank. Collective over all ranks.

        Args:
            choices: of all pairs.
            ends: all ranks.
            seed: bytes that the job's ranks share: the token of links, the job's number, and the
                name of the socket that those of a machine take in turn while they make memory.

        Returns:
            The transport, if this rank has such channels, why they failed somewhere, and by pair
            how tensors of GPUs go.
        """
        rank, gather = self.own.rank, self.gather
        size = size_of_channel(
            self.payloads.nbytes, self.payloads.in_flight, self.options.transport_slot_bytes,
            self.options.transport_slots,
        )  # fmt: skip
        kinds = {
            sum(pair) - rank: choice.kind
            for pair, choice in choices.items()
            if rank in pair and choice.kind in NATIVE
        }
        node: Any = None
        failure: str | None = None
        addresses: dict[str, str] = {}
        try:
            if kinds:
                module = extension.require("this transport")
                # Ranks that are bound to processors of their own do not stand in each other's way.
                here = sum(end.shares_cpus(self.own) for end in ends)
                job = int.from_bytes(seed[16:24], "little")
                node = module.Node(rank, seed[:16], job, here, self.describe)
                addresses = self._listen(node, set(kinds.values()))
        except AdaptiveError as error:
            failure = self._failed(error)
        listening = gather(addresses)
        failures = gather(failure)
        ways: dict[tuple[int, int], str] = {}
        if not any(failures):
            # In one order on all ranks. After a failure too: peers wait for this rank to come.
            for peer, kind in sorted(kinds.items()):
                address = listening[peer]["unix" if kind == "shm" else "tcp"]
                try:
                    options = self._channel_options(kind, size, seed)
                    node.open(kind, peer, address, min(self.timeout_s, _OPEN_S), **options)
                except (AdaptiveError, ValueError) as error:
                    failure = failure or self._failed(error)
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
            node, kinds, device=self.device, describe=self.describe, least_free=size.least_free
        )
        return made, None, ways

    def _listen(self, node: Any, kinds: set[str]) -> dict[str, str]:
        addresses = {}
        if "shm" in kinds:
            addresses["unix"] = node.listen("unix")
        if kinds - {"shm"}:
            addresses["tcp"] = node.listen("tcp", self.own.addresses["tcp"])
        return addresses

    def _channel_options(self, kind: str, size: ChannelSize, seed: bytes) -> dict[str, Any]:
        options: dict[str, Any] = {
            "slot_bytes": size.slot_bytes,
            "slots": size.slots,
            "crc": self.options.transport_crc,
            "reservable": size.reservable,
            "silent_limit_s": self.options.transport_silence_s,
        }
        if kind == "rdma":
            options |= self._rdma_options()
        if kind == "shm":
            options["turn_name"] = f"megatron-adaptive-{seed[24:].hex()}"
        if kind == "shm" and self.device.type == "cuda":
            index = self.device.index
            options["cuda_device"] = torch.cuda.current_device() if index is None else index
            if self.options.transport_gpu == PINNED:
                options["cuda_refusal"] = f"--transport-gpu {PINNED}"
        return options

    def _rdma_options(self) -> dict[str, Any]:
        wanted = self.options
        options: dict[str, Any] = {"num_qps": wanted.rdma_queue_pairs}
        if wanted.rdma_device is not None:
            # Else the extension finds the one that carries the link's address.
            device, _, port = self.own.ports[0].partition(":")
            options |= {"device": device, "port": int(port)}
        elif self.device.type == "cuda":
            options["near_pci"] = _pci_address(self.device)
        if wanted.rdma_gid_index is not None:
            options["gid_index"] = wanted.rdma_gid_index
        if wanted.rdma_mtu_bytes is not None:
            options["mtu"] = wanted.rdma_mtu_bytes
        return options

    def _failed(self, error: Exception) -> str:
        return f"rank {self.own.rank} on {self.own.host}: {error}"


def _assemble(
    rank: int,
    choices: Mapping[tuple[int, int], Choice],
    native: NativeTransport | None,
    groups: TorchGroups,
) -> Transport | None:
    """Add what goes over torch, for all ranks together, and make one transport of all."""
    mine = {sum(pair) - rank: choice.kind for pair, choice in choices.items() if rank in pair}
    completions: Completions | None = None if native is None else native.completions
    parts: dict[int, Transport] = {}
    if native is not None:
        parts = {peer: native for peer, kind in mine.items() if kind in NATIVE}
    for kind in sorted({choice.kind for choice in choices.values()} - set(NATIVE)):
        over_torch = [peer for peer, its in sorted(mine.items()) if its == kind]
        part = groups.make(kind, over_torch, completions)
        if part is not None and over_torch:
            completions = completions or part.completions
            parts.update(dict.fromkeys(over_torch, part))
    distinct = list({id(part): part for part in parts.values()}.values())
    if len(distinct) < 2:
        return distinct[0] if distinct else None
    assert completions is not None
    return CompositeTransport(parts, completions)


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


def network_address(interface: str | None, store_host: str | None, *, alone: bool) -> str | None:
    """Return the numeric address that others reach this process at.

    Args:
        interface: the network interface to use.
        store_host: host of the job's store, whose route decides where no interface is given.
        alone: all ranks are on this machine, so that a loopback address will do.

    Raises:
        SetupError: there is no such interface, or it has no address.
    """
    if interface is not None:
        known = addresses()
        if interface not in known:
            raise SetupError(
                f"network interface {interface} is unknown on {socket.gethostname()} or has no "
                f"address: it has {', '.join(sorted(known))}"
            )
        return known[interface][0]
    address = None if store_host is None else source_towards(store_host)
    if address is None or (is_loopback(address) and not alone):
        address = source_towards() or outside_address() or address
    return address or ("127.0.0.1" if alone else None)


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
