"""Opens the channels between the ranks of a job. Every rank must call :meth:`Connector.connect`.

::

    exchange endpoints                          gather
    each rank chooses for all pairs             select.choose
    native channels: listen, send addresses     gather
                     open them, pair by pair
                     report failures            gather
    other kinds:     each kind opens its own    kind.open

Native channels are those of the C++ extension (shared memory, RDMA, TCP). If one of them cannot be
opened, for example because of a memory limit or a firewall, the whole job uses gloo instead of the
native channels. If the user requested a specific transport, the failure is an error. Failures are
sent to all ranks, so that all ranks make the same decision.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import extension
from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.config.transport_specs import BUILT_IN
from megatron.adaptive.errors import AdaptiveError, SetupError, TransportError
from megatron.adaptive.network import own_address
from megatron.adaptive.transport.interface import Completions, Endpoint, Label, Transport
from megatron.adaptive.transport.kind import (
    Gather,
    Opening,
    Payloads,
    RankFacts,
    TransportKind,
    open_own,
    transport_kind,
)
from megatron.adaptive.transport.native import NativeTransport
from megatron.adaptive.transport.native_kinds import NativeChannels, NativeKind, rdma_ports
from megatron.adaptive.transport.nccl import OPEN_S
from megatron.adaptive.transport.select import (
    Choice,
    choose,
    log_lines,
    queue_warning,
    size_of_channel,
)

_SEED_BYTES = 40


def own_endpoint(
    rank: int,
    location: Mapping[str, Any],
    *,
    device: torch.device,
    own_gpu: bool,
    options: TransportConfig,
    address: str | None,
) -> Endpoint:
    """Returns the endpoint that describes this rank to other ranks.

    Args:
        rank: Global rank.
        location: Host and process of this rank, as returned by ``liveness.here``.
        device: Device that this rank uses for computation.
        own_gpu: Whether the device is a GPU that no other rank uses.
        options: Transport settings, including the name of an RDMA device if the user set one.
        address: Network address of this rank, or ``None`` if it has no address.
    """
    module = extension.load()
    ports, no_rdma = ((), "") if module is None else rdma_ports(module, options.rdma_device)
    facts = RankFacts(
        device=device,
        own_gpu=own_gpu,
        address=address,
        module=module,
        rdma_ports=ports,
        no_rdma=no_rdma,
    )
    names = dict.fromkeys([*BUILT_IN, *filter(None, [options.forced])])
    lacks = {name: transport_kind(name).lacks(facts) for name in names}
    return Endpoint(
        rank=rank,
        host=location["host"],
        machine=str(location.get("machine", location["host"])),
        user=os.getuid(),
        device=device.type,
        addresses={} if address is None else {"tcp": address},
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        ports=ports,
        lacks={name: lack for name, lack in lacks.items() if lack is not None},
    )


@dataclass(frozen=True, kw_only=True)
class Connector:
    """Opens the channels between this rank and its peers.

    Attributes:
        members: Global ranks of this rank's pipeline. Messages are only sent within a pipeline.
        gather: Function that exchanges values between all ranks of the job.
        accelerator: Device of this rank, where received tensors are placed.
        payloads: Shape and dtype of the messages, and maximum number in flight, as far as known in
            advance.
        describe: Function that returns the name of a rank for error messages.
        timeout_s: Maximum time in seconds that a send waits for a peer that is not receiving
            messages.
        collective_ranks: Number of ranks among which a stage runs collectives in its forward and
            backward passes.
    """

    members: list[int]
    gather: Gather
    accelerator: Accelerator
    payloads: Payloads
    describe: Callable[[int], str]
    timeout_s: float
    collective_ranks: int = 1

    def own_end(
        self, places: Sequence[Mapping[str, Any]], options: TransportConfig, host: str | None
    ) -> Endpoint:
        """Returns the endpoint of this rank, to be passed to :meth:`connect`.

        Args:
            places: Host and process of every rank, as returned by ``liveness.here``.
            options: Transport settings of the user.
            host: Address at which the job's ranks connect to each other at the start, or ``None``
                if this host is not on the network.
        """
        rank = dist.get_rank()
        interface = options.transport_interface
        alone = len({location["machine"] for location in places}) == 1
        address: str | None = None
        # A rank without a network address can still reach other ranks on the same machine.
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
        """Opens the channels to all peers. Every rank of the job must call this method.

        Args:
            endpoint: Endpoint of this rank.
            peers: Global ranks with which this rank exchanges messages. Each peer must also list
                this rank as a peer.
            options: Transport settings of the user.
            log: Function that rank 0 calls once for each line of the summary of chosen transports.

        Returns:
            Transport to all peers, or ``None`` for a rank without peers.

        Raises:
            SetupError: The requested transport cannot connect one of the pairs of ranks. The error
                is raised on all ranks.
            TransportError: A channel could not be opened, although its transport supports this pair
                of ranks.
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
        if any(_native_kind(choice.kind) for choice in choices.values()):
            native, failure, gpu_paths = self._open(
                endpoint, options, choices, ends, seed=gathered[0][2]
            )
            if failure is not None:
                if forced is not None:
                    raise TransportError(failure)
                for pair, choice in choices.items():
                    if _native_kind(choice.kind):
                        choices[pair] = Choice("gloo", f"no {choice.kind}: {failure}")
            for pair, path in gpu_paths.items():
                choices[pair] = replace(choices[pair], reason=f"{choices[pair].reason}; {path}")
        if endpoint.rank == 0:
            for line in log_lines(choices):
                log(line)
            queues = _hardware_queues() if endpoint.device == "cuda" else None
            if warning := queue_warning(choices, queues, self.collective_ranks):
                log(warning)
        return self._assemble(endpoint.rank, options, choices, native)

    def _open(
        self,
        endpoint: Endpoint,
        options: TransportConfig,
        choices: Mapping[tuple[int, int], Choice],
        ends: Sequence[Endpoint],
        *,
        seed: bytes,
    ) -> tuple[NativeTransport | None, str | None, dict[tuple[int, int], str]]:
        """Opens the native channels of this rank. Every rank must call this method.

        Args:
            endpoint: Endpoint of this rank.
            options: Transport settings of the user.
            choices: Chosen transport of each pair of ranks.
            ends: Endpoints of all ranks, keyed by global rank.
            seed: Random bytes that all ranks share. They contain the token that authenticates
                links, the job ID, and the name of the lock that guards memory allocation on a
                machine.

        Returns:
            Tuple of three values: the transport of this rank, or ``None`` if the rank has no native
            channels; the first failure on any rank, or ``None``; and a description of how GPU
            tensors are copied between each pair of ranks.
        """
        device = self.accelerator.device
        size = size_of_channel(
            self.payloads.nbytes,
            self.payloads.in_flight,
            options.transport_slot_bytes,
            options.transport_slots,
        )
        kinds = {
            sum(pair) - endpoint.rank: kind
            for pair, choice in choices.items()
            if endpoint.rank in pair and (kind := _native_kind(choice.kind)) is not None
        }
        links = {kind.link for kind in kinds.values()}
        node, addresses, failure = self._make_node(links, endpoint, ends, seed)
        listening = self.gather(addresses)
        failures = self.gather(failure)
        gpu_paths: dict[tuple[int, int], str] = {}
        if not any(failures):
            channels = NativeChannels(
                size=size, seed=seed, endpoint=endpoint, settings=options, device=device
            )
            failure = self._open_channels(node, channels, kinds, listening)
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
            node,
            {peer: kind.name for peer, kind in kinds.items()},
            device=device,
            describe=self.describe,
            least_free=size.least_free,
        )
        return transport, None, gpu_paths

    def _make_node(
        self, links: Set[str], endpoint: Endpoint, ends: Sequence[Endpoint], seed: bytes
    ) -> tuple[Any, dict[str, str], str | None]:
        """Creates the extension's node, which listens for peers and owns the native channels.

        Returns:
            Tuple of three values: the node, or ``None`` if ``links`` is empty; the addresses on
            which the node listens, keyed by kind of link; and the error message, or ``None``.
        """
        node: Any = None
        try:
            if not links:
                return None, {}, None
            module = extension.require("this transport")
            # Count the ranks that share CPUs with this rank, because such ranks slow each other
            # down.
            num_sharing = sum(end.shares_cpus(endpoint) for end in ends)
            job = int.from_bytes(seed[16:24], "little")
            node = module.Node(endpoint.rank, seed[:16], job, num_sharing, self.describe)
            return node, _listen(node, links, endpoint), None
        except AdaptiveError as error:
            return node, {}, f"rank {endpoint.rank} on {endpoint.host}: {error}"

    def _open_channels(
        self,
        node: Any,
        channels: NativeChannels,
        kinds: Mapping[int, NativeKind],
        listening: Sequence[Mapping[str, str]],
    ) -> str | None:
        """Opens the channels of ``node`` to all peers, and returns the first failure.

        Returns ``None`` on success. ``kinds`` maps each peer to its transport. ``listening``
        contains, for each rank, the addresses on which the rank listens, keyed by kind of link.

        All ranks open their channels in the same order to avoid deadlocks. If one channel fails,
        the remaining channels are still opened, because the peers at their other ends wait for this
        rank.
        """
        failure: str | None = None
        limit_s = min(self.timeout_s, OPEN_S)
        for peer, kind in sorted(kinds.items(), key=itemgetter(0)):
            address = listening[peer][kind.link]
            try:
                node.open(kind.name, peer, address, limit_s, **kind.channel_options(channels))
            except (AdaptiveError, ValueError) as error:
                endpoint = channels.endpoint
                failure = failure or f"rank {endpoint.rank} on {endpoint.host}: {error}"
        return failure

    def _assemble(
        self,
        rank: int,
        options: TransportConfig,
        choices: Mapping[tuple[int, int], Choice],
        native: NativeTransport | None,
    ) -> Transport | None:
        """Opens all other chosen transports, and combines them with ``native``.

        Every rank must call this method. ``choices`` maps each pair of ranks to the chosen
        transport.
        """
        kind_of = {
            sum(pair) - rank: choice.kind for pair, choice in choices.items() if rank in pair
        }
        completions: Completions | None = None if native is None else native.completions
        parts: dict[int, Transport] = {}
        if native is not None:
            parts = {peer: native for peer, kind in kind_of.items() if _native_kind(kind)}
        names = {choice.kind for choice in choices.values()}
        for name in sorted(name for name in names if _native_kind(name) is None):
            peers = [peer for peer, peer_kind in sorted(kind_of.items()) if peer_kind == name]
            part = self.open_part(name, peers, options, completions)
            if part is not None and peers:
                completions = completions or part.completions
                parts.update(dict.fromkeys(peers, part))
        distinct = list({id(part): part for part in parts.values()}.values())
        if len(distinct) < 2:
            return distinct[0] if distinct else None
        assert completions is not None
        return CompositeTransport(parts, completions)

    def open_part(
        self,
        name: str,
        peers: Sequence[int],
        options: TransportConfig,
        completions: Completions | None,
    ) -> Transport | None:
        """Opens this rank's channels of a transport that is not native.

        Every rank must call this method.

        Args:
            name: Name of the transport.
            peers: Global ranks of the peers. A rank without peers still takes part in the
                collective calls.
            options: Transport settings of the user.
            completions: Queue for received messages, or ``None`` to create a new queue.

        Raises:
            TransportError: A channel could not be opened. The error is raised on all ranks.
        """
        kind = self.kind(name)
        opening = Opening(
            rank=dist.get_rank(),
            peers=peers,
            members=self.members,
            gather=self.gather,
            accelerator=self.accelerator,
            payloads=self.payloads,
            describe=self.describe,
            timeout_s=self.timeout_s,
            options=options,
            completions=completions,
        )
        return kind.open(opening) if name in BUILT_IN else open_own(kind, opening)

    def kind(self, name: str) -> TransportKind:
        """Returns the declaration of the transport with the name ``name``."""
        return transport_kind(name)


def _hardware_queues() -> int | None:
    """Returns the value of ``CUDA_DEVICE_MAX_CONNECTIONS``, or ``None`` if it is not set."""
    # Ignore errors, because the user's launcher may set environment variables that only the trainer
    # rejects.
    with contextlib.suppress(SetupError):
        return Environment.read().cuda_device_max_connections
    return None


def _native_kind(name: str) -> NativeKind | None:
    """Returns the declaration of the transport ``name`` if it is native, or ``None``."""
    kind = transport_kind(name)
    return kind if isinstance(kind, NativeKind) else None


def _listen(node: Any, links: Set[str], endpoint: Endpoint) -> dict[str, str]:
    """Makes ``node`` listen for each kind of link in ``links``, and returns the address for each.

    The TCP address to listen on is taken from ``endpoint``.
    """
    addresses = {}
    if "unix" in links:
        addresses["unix"] = node.listen("unix")
    if "tcp" in links:
        addresses["tcp"] = node.listen("tcp", endpoint.addresses["tcp"])
    return addresses


def _gpu_paths(node: Any, peers: Iterable[int]) -> list[tuple[int, str]]:
    """Describes, for each peer, how GPU tensors are sent to it and received from it.

    Returns pairs of a peer and a description. Peers are omitted if ``node`` has no information
    about GPU tensors for them.
    """
    paths = []
    for peer in peers:
        info = node.info(peer)
        if info.get("gpu_path") == "cuda-ipc":
            paths.append((peer, "tensors stay in GPU memory, through CUDA IPC"))
        elif "gpu_path" in info:
            reason = info["gpu_reason"]
            paths.append((peer, f"tensors pass through pinned memory, without CUDA IPC: {reason}"))
    return paths


class CompositeTransport:
    """Combines several transports, and forwards each call to the transport of the peer concerned.

    Args:
        parts: Transport to each peer, keyed by global rank. All of these transports must add
            received messages to ``completions``.
        completions: Queue of received messages, shared by the transports.
    """

    def __init__(self, parts: Mapping[int, Transport], completions: Completions) -> None:
        self.completions = completions
        self._part_of = dict(parts)
        # Close the transport that owns the queue last, because the others use the queue until they
        # are closed.
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
