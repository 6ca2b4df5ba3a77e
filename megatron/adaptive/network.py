"""Lists this machine's network addresses, and finds the address that other machines can reach."""

from __future__ import annotations

import contextlib
import socket

import psutil

from megatron.adaptive.errors import ConfigError, SetupError

# This address is reserved for documentation, so no machine has it. Connecting a UDP socket to it
# sends nothing, but makes the kernel choose the source address of the default route.
_ANYWHERE = "192.0.2.1"
_PORT = 9


def is_loopback(address: str) -> bool:
    """Returns whether ``address`` is a loopback address, which other machines cannot reach."""
    return address.startswith("127.") or address == "::1"


def addresses() -> dict[str, list[str]]:
    """Returns the addresses of each active network interface, keyed by the interface's name.

    IPv4 addresses come first. Addresses that require a scope (``fe80::1%eth0``) are omitted.
    """
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    by_interface = {}
    for name, entries in psutil.net_if_addrs().items():
        families = (socket.AF_INET, socket.AF_INET6)
        listed = [
            entry.address for family in families for entry in entries if entry.family == family
        ]
        without_scope = [address for address in listed if "%" not in address]
        if without_scope and name in up:
            by_interface[name] = without_scope
    return by_interface


def interface_of(address: str) -> str | None:
    """Returns the name of the interface that has ``address``, or ``None`` if there is none."""
    return next((name for name, listed in addresses().items() if address in listed), None)


def own_address(interface: str | None, peer: str | None = None, *, alone: bool = False) -> str:
    """Returns the address at which other nodes can reach this node.

    Args:
        interface: Name of the network interface to use. With ``None``, this function tries the
            interface of the route to ``peer``, then the interface of the default route, and then
            the first active interface.
        peer: Address or host name of another node of the job, or ``None`` if unknown.
        alone: Whether the whole job runs on this machine. If True, a loopback address is enough.

    Raises:
        ConfigError: The network interface ``interface`` does not exist or has no address.
        SetupError: The node has only loopback addresses, but the job also runs on other nodes.
    """
    if interface is not None:
        by_interface = addresses()
        if interface not in by_interface:
            raise ConfigError(
                f"network interface {interface} is unknown on {socket.gethostname()} or has no "
                f"address; choose one of {', '.join(sorted(by_interface))}"
            )
        return by_interface[interface][0]
    routed = None
    if peer is not None:
        routed = _source_towards(peer)
        if routed is not None and (alone or is_loopback(peer) or not is_loopback(routed)):
            return routed
    all_addresses = (address for group in addresses().values() for address in group)
    outward = (address for address in all_addresses if not is_loopback(address))
    reachable = _source_towards() or next(outward, None)
    if reachable is None and alone:
        reachable = "127.0.0.1"
    if address := reachable or routed:
        return address
    raise SetupError(
        f"{socket.gethostname()} has only loopback addresses, so other nodes cannot reach it; "
        "bring an interface up, or choose an interface with IFNAME or --ifname"
    )


def interface_towards(interface: str | None, peer: str) -> str:
    """Returns the name of the network interface that a job uses, or ``""`` if the name is unknown.

    Args:
        interface: Name of the interface that the user selected. ``None`` selects the interface of
            the route to ``peer``.
        peer: Address or host name of a node of the job.
    """
    source = None if interface else _source_towards(peer)
    return interface or (source and interface_of(source)) or ""


def _source_towards(host: str = _ANYWHERE) -> str | None:
    """Returns the source address of packets to ``host``, or ``None`` if there is no route to it."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(
            host, _PORT, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return None
