"""Opens the channels between the ranks of a job: all ranks call :meth:`Connector.connect`.

::

    exchange endpoints                          gather
    each rank chooses for all pairs             select.choose
    native channels: listen, send addresses     gather
                     open them, pair by pair
                     report failures            gather
    gloo and NCCL:   groups, made by all        over_torch

Native channels are those of the C++ extension (shared memory, RDMA, TCP). If such a channel cannot
be opened, for example because of a memory limit or a firewall, all pairs that would use one use
gloo instead. If the user forced a transport, the failure is an error. All ranks learn of the
failure, so all make the same decision.
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
"""Function that takes this rank's value and returns the values of all ranks. Collective."""

_OPEN_S = 300.0
"""Maximum time in seconds to open a channel. Opening is fast, but ranks may begin minutes apart."""
_SEED_BYTES = 40
_ACTIVE = "ACTIVE"


@dataclass(frozen=True, kw_only=True)
class Payloads:
    """Describes what is known of the messages before any is sent. It is the same on all ranks.

    Attributes:
        shape: Shape of the largest message, ``None`` if unknown.
        dtype: Element type of the messages.
        varies: Whether some messages are smaller than ``shape``.
        in_flight: Maximum number of received messages of a channel that the receiver keeps at the
            same time.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    varies: bool = False
    in_flight: int | None = None

    @property
    def nbytes(self) -> int | None:
        """Returns the size of the largest message in bytes, ``None`` if unknown."""
        if self.shape is None:
            return None
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def own_endpoint(
    rank: int,
    location: Mapping[str, Any],
    *,
    device: torch.device,
    own_gpu: bool,
    options: TransportConfig,
    address: str | None,
) -> Endpoint:
    """Returns this rank's endpoint: its host, abilities and addresses, for the other ranks.

    Args:
        rank: Global rank.
        location: Host and process of this rank, as returned by ``liveness.here``.
        device: Device on which this rank computes.
        own_gpu: Whether the device is a GPU that no other rank uses.
        options: Transport settings, which may name the RDMA device.
        address: Network address of this rank, ``None`` if it has none.
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
        host=location["host"],
        machine=str(location.get("machine", location["host"])),
        user=os.getuid(),
        device=device.type,
        addresses={} if address is None else {"tcp": address},
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        ports=ports,
        lacks=lacks,
    )


@dataclass(frozen=True, kw_only=True)
class Connector:
    """Opens the channels between this rank and its peers.

    Attributes:
        members: Global ranks of this rank's pipeline, which send messages only to each other.
        gather: Function that exchanges values between all ranks of the job.
        accelerator: Device of this rank, on which received tensors are placed.
        payloads: Shape, type and number of the messages, as far as known.
        describe: Function that returns a rank's display name for error messages.
        timeout_s: Maximum time in seconds that a send waits for a peer which takes no messages.
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
        """Collects and returns this rank's endpoint, for :meth:`connect`.

        Args:
            places: Host and process of every rank, as returned by ``liveness.here``.
            options: Transport settings of the user.
            host: Host of the rendezvous where the job's ranks meet, ``None`` if it is not on the
                network.
        """
        rank = dist.get_rank()
        interface = options.transport_interface
        alone = len({location["machine"] for location in places}) == 1
        address: str | None = None
        # Without a network address the rank can still use transports within its machine.
        with contextlib.suppress(SetupError):
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
        endpoint: Endpoint,
        peers: Sequence[int],
        options: TransportConfig,
        log: Callable[[str], None] = lambda line: None,
    ) -> Transport | None:
        """Opens the channels to all peers. Collective over all ranks of the job.

        Args:
            endpoint: Endpoint of this rank.
            peers: Global ranks with which this rank exchanges messages; each peer must list this
                rank too.
            options: Transport settings of the user.
            log: Function that the job's first rank calls with each line of text about chosen
                transports.

        Returns:
            The transport to all peers, ``None`` for a rank without peers.

        Raises:
            SetupError: If the transport that the user forced cannot connect a pair. Raised on all
                ranks.
            TransportError: If opening a channel failed, though its transport can connect the pair.
        """
        gathered = self.gather((endpoint, list(peers), secrets.token_bytes(_SEED_BYTES)))
        ends = [end for end, _, _ in gathered]
        pairs = {
            (min(rank, peer), max(rank, peer))
            for rank, (_, rank_peers, _) in enumerate(gathered)
            for peer in rank_peers
        }
        forced = options.forced
        choices = {
            (low, high): choose(ends[low], ends[high], forced) for low, high in sorted(pairs)
        }
        native: NativeTransport | None = None
        if any(choice.kind in NATIVE for choice in choices.values()):
            native, failure, gpu_paths = self._open(
                endpoint, options, choices, ends, seed=gathered[0][2]
            )
            if failure is not None:
                if forced is not None:
                    raise TransportError(failure)
                for pair, choice in choices.items():
                    if choice.kind in NATIVE:
                        choices[pair] = Choice("gloo", f"no {choice.kind}: {failure}")
            for pair, path in gpu_paths.items():
                choices[pair] = replace(choices[pair], reason=f"{choices[pair].reason}; {path}")
        if endpoint.rank == 0:
            for line in log_lines(choices):
                log(line)
        return self._assemble(endpoint.rank, choices, native)

    def _open(
        self,
        endpoint: Endpoint,
        options: TransportConfig,
        choices: Mapping[tuple[int, int], Choice],
        ends: Sequence[Endpoint],
        *,
        seed: bytes,
    ) -> tuple[NativeTransport | None, str | None, dict[tuple[int, int], str]]:
        """Opens the native channels of this rank. Collective over all ranks.

        Args:
            endpoint: Endpoint of this rank.
            options: Transport settings of the user.
            choices: Chosen transport of each pair of ranks.
            ends: Endpoints of all ranks, by global rank.
            seed: Random bytes that all ranks share. From them come the token that authenticates
                links, the job's number, and the name of a machine's lock for allocating memory.

        Returns:
            The transport if this rank has native channels, else ``None``; the first failure of any
            rank; and by pair of ranks, the way in which GPU tensors are copied.
        """
        device = self.accelerator.device
        size = size_of_channel(
            self.payloads.nbytes,
            self.payloads.in_flight,
            options.transport_slot_bytes,
            options.transport_slots,
        )
        kinds = {
            sum(pair) - endpoint.rank: choice.kind
            for pair, choice in choices.items()
            if endpoint.rank in pair and choice.kind in NATIVE
        }
        node, addresses, failure = self._make_node(set(kinds.values()), endpoint, ends, seed)
        listening = self.gather(addresses)
        failures = self.gather(failure)
        gpu_paths: dict[tuple[int, int], str] = {}
        if not any(failures):

            def options_of(kind: str) -> dict[str, Any]:
                return _channel_options(kind, size, seed, endpoint, options, device)

            failure = self._open_channels(node, endpoint, kinds, listening, options_of)
            gathered = self.gather([failure, [] if failure else _gpu_paths(node, kinds)])
            failures = [text for text, _ in gathered]
            for low, (_, paths) in enumerate(gathered):
                gpu_paths.update({(low, high): path for high, path in paths if low < high})
        first = next((text for text in failures if text), None)
        if first is not None:
            if node is not None:
                node.close(0.0)
            return None, first, {}
        if node is None:
            return None, None, gpu_paths
        transport = NativeTransport(
            node, kinds, device=device, describe=self.describe, least_free=size.least_free
        )
        return transport, None, gpu_paths

    def _make_node(
        self, kinds: set[str], endpoint: Endpoint, ends: Sequence[Endpoint], seed: bytes
    ) -> tuple[Any, dict[str, str], str | None]:
        """Makes the extension's node, the object that listens for peers and owns the channels.

        Returns:
            The node, ``None`` if ``kinds`` contains no native transport; the node's addresses by
            kind of link; and the error, ``None`` if there was none.
        """
        node: Any = None
        try:
            if not kinds:
                return None, {}, None
            module = extension.require("this transport")
            # Count the ranks that may run on the same processors, because these slow each other
            # down.
            num_sharing = sum(end.shares_cpus(endpoint) for end in ends)
            job = int.from_bytes(seed[16:24], "little")
            node = module.Node(endpoint.rank, seed[:16], job, num_sharing, self.describe)
            return node, _listen(node, kinds, endpoint), None
        except AdaptiveError as error:
            return node, {}, f"rank {endpoint.rank} on {endpoint.host}: {error}"

    def _open_channels(
        self,
        node: Any,
        endpoint: Endpoint,
        kinds: Mapping[int, str],
        listening: Sequence[Mapping[str, str]],
        options_of: Callable[[str], dict[str, Any]],
    ) -> str | None:
        """Opens the channels to all peers and returns the first failure.

        All ranks open their channels in the same order, so that they do not wait in a circle. A
        rank continues after a failure, because its other peers wait for it.
        """
        failure: str | None = None
        for peer, kind in sorted(kinds.items()):
            address = listening[peer]["unix" if kind == "shm" else "tcp"]
            try:
                node.open(kind, peer, address, min(self.timeout_s, _OPEN_S), **options_of(kind))
            except (AdaptiveError, ValueError) as error:
                failure = failure or f"rank {endpoint.rank} on {endpoint.host}: {error}"
        return failure

    def _assemble(
        self, rank: int, choices: Mapping[tuple[int, int], Choice], native: NativeTransport | None
    ) -> Transport | None:
        """Makes the gloo and NCCL transports, and combines all. Collective over all ranks."""
        kind_of = {
            sum(pair) - rank: choice.kind for pair, choice in choices.items() if rank in pair
        }
        completions: Completions | None = None if native is None else native.completions
        parts: dict[int, Transport] = {}
        if native is not None:
            parts = {peer: native for peer, kind in kind_of.items() if kind in NATIVE}
        for kind in sorted({choice.kind for choice in choices.values()} - set(NATIVE)):
            peers = [peer for peer, peer_kind in sorted(kind_of.items()) if peer_kind == kind]
            part = self.over_torch(kind, peers, completions)
            if part is not None and peers:
                completions = completions or part.completions
                parts.update(dict.fromkeys(peers, part))
        distinct = list({id(part): part for part in parts.values()}.values())
        if len(distinct) < 2:
            return distinct[0] if distinct else None
        assert completions is not None
        return CompositeTransport(parts, completions)

    def over_torch(
        self, kind: str, peers: Sequence[int], completions: Completions | None
    ) -> Transport | None:
        """Makes this rank's transport over gloo or NCCL. Collective over all ranks of the job.

        Args:
            kind: Kind of transport, ``gloo`` or ``nccl``.
            peers: Global ranks of the peers. If empty, this rank only takes part in the collective
                calls.
            completions: Queue for received messages; ``None`` makes a new one.
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
        """Returns the CUDA streams that the NCCL channels use."""
        return CudaStreams(self.accelerator.device)

    def pair_group(self, store: dist.Store, index: int) -> Any:
        """Makes a communicator of two ranks, which find each other through a store.

        No other rank takes part. The two ranks connect when the first message is sent, and then
        hold one NCCL communicator.

        Args:
            store: Store that only the two ranks use.
            index: Index of this rank in the communicator, 0 for the lower of the two ranks.
        """
        # A high-priority stream has its own hardware queue, so messages do not wait behind kernels.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = datetime.timedelta(seconds=max(self.timeout_s, _OPEN_S))
        return dist.ProcessGroupNCCL(store, index, 2, options)

    def _nccl_channels(self, peers: Sequence[int]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Makes a communicator for each channel to or from this rank. Collective over all ranks.

        All ranks connect their pairs in the same order, in rounds in which no rank occurs twice. So
        ranks cannot wait in a circle, and the pairs of a round connect at the same time.

        Returns:
            Communicators for messages to each peer, and for messages from each peer, by peer.

        Raises:
            TransportError: If a channel could not be opened. Raised on all ranks.
        """
        me = dist.get_rank()
        gathered = self.gather((list(peers), secrets.token_hex(_SEED_BYTES)))
        pairs = {
            (min(rank, peer), max(rank, peer))
            for rank, (rank_peers, _) in enumerate(gathered)
            for peer in rank_peers
        }
        default: Any = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"channels/{gathered[0][1]}", default)
        groups: dict[tuple[int, int], Any] = {}
        failure: str | None = None
        try:
            for low, high in rounds_of(pairs):
                if me in (low, high):
                    for sender, receiver in ((low, high), (high, low)):
                        groups[sender, receiver] = self._open_channel(store, sender, receiver)
            self.accelerator.synchronize()
        except RuntimeError as error:
            failure = f"rank {me}: a channel over NCCL cannot be opened: {_first_line(error)}"
        failures = [text for text in self.gather(failure) if text]
        if failures:
            for group in groups.values():
                free(group, is_idle=False)
            raise TransportError(f"{failures[0]}; --transport names another")
        return (
            {receiver: group for (sender, receiver), group in groups.items() if sender == me},
            {sender: group for (sender, receiver), group in groups.items() if receiver == me},
        )

    def _open_channel(self, store: dist.Store, sender: int, receiver: int) -> Any:
        """Makes the communicator of a one-way channel and connects it with a first message."""
        me = dist.get_rank()
        index = int(me == max(sender, receiver))
        group = self.pair_group(dist.PrefixStore(f"{sender}-{receiver}", store), index)
        probe = torch.zeros(1, device=self.accelerator.device)
        (group.send if me == sender else group.recv)([probe], 1 - index, 0).wait()
        return group


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def gloo_group(members: list[int], gather: Gather) -> dist.ProcessGroup:
    """Makes a gloo process group for each pipeline's ranks and returns this rank's group.

    Collective over all ranks of the job.

    Args:
        members: Global ranks of this rank's group, including this rank.
        gather: Function that exchanges values between all ranks of the job.
    """
    joined: dist.ProcessGroup | None = None
    for ranks in sorted(set(map(tuple, gather(members)))):
        group = dist.new_group(list(ranks), backend="gloo")
        if list(ranks) == members:
            joined = group
    assert joined is not None
    return joined


def _listen(node: Any, kinds: set[str], endpoint: Endpoint) -> dict[str, str]:
    """Starts to listen for peers and returns the addresses by kind of link (``unix``, ``tcp``)."""
    addresses = {}
    if "shm" in kinds:
        addresses["unix"] = node.listen("unix")
    if kinds - {"shm"}:
        addresses["tcp"] = node.listen("tcp", endpoint.addresses["tcp"])
    return addresses


def _channel_options(
    kind: str,
    size: ChannelSize,
    seed: bytes,
    endpoint: Endpoint,
    settings: TransportConfig,
    device: torch.device,
) -> dict[str, Any]:
    """Returns the options with which the extension opens a channel of this kind."""
    options: dict[str, Any] = {
        "slot_bytes": size.slot_bytes,
        "slots": size.slots,
        "crc": settings.transport_crc,
        "reservable": size.reservable,
        "silent_limit_s": settings.transport_silence_s,
    }
    if kind == "rdma":
        options |= _rdma_options(endpoint, settings, device)
    if kind == "shm":
        options["turn_name"] = f"megatron-adaptive-{seed[24:].hex()}"
    if kind == "shm" and device.type == "cuda":
        index = device.index
        options["cuda_device"] = torch.cuda.current_device() if index is None else index
        if settings.transport_gpu == PINNED:
            options["cuda_refusal"] = f"--transport-gpu {PINNED}"
    return options


def _rdma_options(
    endpoint: Endpoint, settings: TransportConfig, device: torch.device
) -> dict[str, Any]:
    """Returns the additional options with which the extension opens an RDMA channel."""
    options: dict[str, Any] = {"num_qps": settings.rdma_queue_pairs}
    # If no device is set, the extension uses the device that has the link's address.
    if settings.rdma_device is not None:
        name, _, port = endpoint.ports[0].partition(":")
        options |= {"device": name, "port": int(port)}
    elif device.type == "cuda":
        options["near_pci"] = _pci_address(device)
    if settings.rdma_gid_index is not None:
        options["gid_index"] = settings.rdma_gid_index
    if settings.rdma_mtu_bytes is not None:
        options["mtu"] = settings.rdma_mtu_bytes
    return options


def _gpu_paths(node: Any, kinds: Mapping[int, str]) -> list[tuple[int, str]]:
    """Returns how GPU tensors are copied to each peer, for channels that report it."""
    paths = []
    for peer in kinds:
        info = node.info(peer)
        if info.get("gpu_path") == "cuda-ipc":
            paths.append((peer, "tensors stay in GPU memory by CUDA IPC"))
        elif "gpu_path" in info:
            reason = info["gpu_reason"]
            paths.append((peer, f"tensors through pinned memory, no CUDA IPC: {reason}"))
    return paths


def _pci_address(device: torch.device) -> str:
    """Returns the PCI address of a GPU as Linux writes it; empty if torch does not provide it."""
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )


def _rdma_ports(module: ModuleType, device_name: str | None) -> tuple[tuple[str, ...], str]:
    """Returns the active RDMA ports of this node, and the reason if there are none.

    Args:
        module: The C++ extension, as a Python module.
        device_name: Name of the RDMA device to use, such as ``mlx5_0``, or of a port, such as
            ``mlx5_0:1``; ``None`` for any device.
    """
    try:
        devices = module.rdma_devices()
    except AdaptiveError as error:
        return (), str(error)
    states = {
        f"{device.name}:{port.number}": port.state for device in devices for port in device.ports
    }
    if device_name is not None:
        states = {
            name: state
            for name, state in states.items()
            if device_name in (name, name.split(":")[0])
        }
    active = tuple(name for name, state in states.items() if state.upper().endswith(_ACTIVE))
    if active:
        return active, ""
    if states:
        return (), "its RDMA ports are not active: " + ", ".join(map(" is ".join, states.items()))
    return (), "it has no RDMA device" + (f" {device_name}" if device_name is not None else "")


class CompositeTransport:
    """Combines several transports: each call is passed to the transport of its peer.

    Args:
        parts: Transport of each peer. All these transports put received messages into
            ``completions``.
        completions: Queue of received messages that the transports share.
    """

    def __init__(self, parts: Mapping[int, Transport], completions: Completions) -> None:
        self.completions = completions
        self._part_of = dict(parts)
        # The transport that owns the queue is closed last, because the others use the queue until
        # then.
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
