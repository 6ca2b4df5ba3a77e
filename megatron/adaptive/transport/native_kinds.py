"""Declares the transports of the C++ extension: shared memory, RDMA and TCP.

Each class declares which ranks its transport can connect, and with which options the channels are
opened. ``connect.py`` opens the channels of all three transports together, because they belong to
the same node of the extension.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch

from megatron.adaptive import extension
from megatron.adaptive.config.parallel import PINNED, TransportConfig
from megatron.adaptive.errors import AdaptiveError
from megatron.adaptive.network import is_loopback
from megatron.adaptive.transport.interface import Endpoint, Transport
from megatron.adaptive.transport.kind import Opening, RankFacts, TransportKind
from megatron.adaptive.transport.select import ChannelSize

_ACTIVE = "ACTIVE"


@dataclass(frozen=True, kw_only=True)
class NativeChannels:
    """Values from which the options of a rank's native channels are computed.

    Attributes:
        size: Number and size of a channel's slots.
        seed: Random bytes that all ranks of the job share.
        endpoint: Endpoint of this rank.
        settings: Transport settings of the user.
        device: Device for received tensors.
    """

    size: ChannelSize
    seed: bytes
    endpoint: Endpoint
    settings: TransportConfig
    device: torch.device


class NativeKind(TransportKind):
    """Declares a transport of the C++ extension. ``connect.py`` opens all of these together.

    Attributes:
        link: Kind of socket that two ranks use to set up their channel, ``unix`` or ``tcp``.
    """

    link: ClassVar[Literal["unix", "tcp"]]

    def lacks(self, facts: RankFacts) -> str | None:
        return str(extension.why_missing()) if facts.module is None else None

    def open(self, opening: Opening) -> Transport | None:
        """Raises ``NotImplementedError``, because one node opens all native channels of a rank."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot be opened separately, because transport/connect.py "
            "opens shm, tcp and rdma together; base your own transport on GlooKind or NcclKind"
        )

    def channel_options(self, channels: NativeChannels) -> dict[str, Any]:
        """Returns the options with which the extension opens a channel of this transport."""
        return {
            "slot_bytes": channels.size.slot_bytes,
            "slots": channels.size.slots,
            "crc": channels.settings.transport_crc,
            "reservable": channels.size.reservable,
            "silent_limit_s": channels.settings.transport_silence_s,
        }


class ShmKind(NativeKind):
    """Declares shared memory, which can connect ranks of the same user on the same machine."""

    link = "unix"
    reason = "same machine"

    def is_candidate(self, first: Endpoint, second: Endpoint) -> bool:
        return first.machine == second.machine

    def why_not(self, first: Endpoint, second: Endpoint) -> str | None:
        if first.machine != second.machine:
            return (
                f"rank {first.rank} on {first.host} and rank {second.rank} on {second.host} do "
                "not see each other's processes"
            )
        if first.user != second.user:
            return (
                f"rank {first.rank} belongs to user {first.user} and rank {second.rank} to user "
                f"{second.user}"
            )
        return None

    def channel_options(self, channels: NativeChannels) -> dict[str, Any]:
        device = channels.device
        options = super().channel_options(channels)
        options["turn_name"] = f"megatron-adaptive-{channels.seed[24:].hex()}"
        if device.type == "cuda":
            index = device.index
            options["cuda_device"] = torch.cuda.current_device() if index is None else index
            if channels.settings.transport_gpu == PINNED:
                options["cuda_refusal"] = f"--transport-gpu {PINNED}"
        return options


class RdmaKind(NativeKind):
    """Declares RDMA, which can connect ranks whose machines have an active RDMA port."""

    link = "tcp"
    reason = "both have an active port"

    def lacks(self, facts: RankFacts) -> str | None:
        lack = super().lacks(facts)
        if lack is None and facts.address is None:
            return "it has no network address"
        return lack or (None if facts.rdma_ports else facts.no_rdma)

    def is_candidate(self, first: Endpoint, second: Endpoint) -> bool:
        return first.machine != second.machine

    def channel_options(self, channels: NativeChannels) -> dict[str, Any]:
        settings = channels.settings
        options = super().channel_options(channels)
        options["num_qps"] = settings.rdma_queue_pairs
        # If no device is set, the extension uses the RDMA device that has the network address of
        # the link.
        if settings.rdma_device is not None:
            name, _, port = channels.endpoint.ports[0].partition(":")
            options |= {"device": name, "port": int(port)}
        elif channels.device.type == "cuda":
            options["near_pci"] = _pci_address(channels.device)
        if settings.rdma_gid_index is not None:
            options["gid_index"] = settings.rdma_gid_index
        if settings.rdma_mtu_bytes is not None:
            options["mtu"] = settings.rdma_mtu_bytes
        return options


class TcpKind(NativeKind):
    """Declares TCP, which can connect ranks that can reach each other's network addresses."""

    link = "tcp"

    def lacks(self, facts: RankFacts) -> str | None:
        lack = super().lacks(facts)
        return "it has no network address" if lack is None and facts.address is None else lack

    def why_not(self, first: Endpoint, second: Endpoint) -> str | None:
        if first.machine == second.machine:
            return None
        for end in (first, second):
            if is_loopback(end.addresses.get("tcp", "")):
                return (
                    f"rank {end.rank} on {end.host} has only the address {end.addresses['tcp']}, "
                    "which other machines cannot reach; select a network interface with "
                    "--transport-interface"
                )
        return None


def _pci_address(device: torch.device) -> str:
    """Returns the PCI address of the GPU ``device``, or an empty string if unknown."""
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )


def rdma_ports(module: ModuleType, device_name: str | None) -> tuple[tuple[str, ...], str]:
    """Returns the active RDMA ports of this machine, and the reason if there are none.

    Args:
        module: Python module of the C++ extension.
        device_name: Name of the RDMA device or port to use, such as ``mlx5_0`` or ``mlx5_0:1``, or
            ``None`` for any device.
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
