"""Finds the addresses of this machine, and which of them others reach it by."""

from __future__ import annotations

import contextlib
import socket

import psutil

from megatron.adaptive.errors import ConfigError, SetupError

# Reserved for documentation: a socket connected to it finds the default route, nothing is sent.
_ANYWHERE = "192.0.2.1"
_PORT = 9


def is_loopback(address: str) -> bool:
    """Returns whether an address only reaches its own machine."""
    return address.startswith("127.") or address == "::1"


def addresses() -> dict[str, list[str]]:
    """Returns addresses that need no scope by interface, IPv4 first; interfaces that are up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    known = {}
    for name, entries in psutil.net_if_addrs().items():
        kinds = (socket.AF_INET, socket.AF_INET6)
        found = [one.address for kind in kinds for one in entries if one.family == kind]
        plain = [address for address in found if "%" not in address]
        if plain and name in up:
            known[name] = plain
    return known


def interface_of(address: str) -> str | None:
    """Returns the interface that has ``address``, ``None`` if none has."""
    return next((name for name, own in addresses().items() if address in own), None)


def own_address(interface: str | None, peer: str | None = None, *, alone: bool = False) -> str:
    """Returns the address of this node that others reach it by.

    Args:
        interface: the network interface to use; by default the one towards ``peer``, or that of
            the default route, or the first that is up.
        peer: another node.
        alone: all is on this machine, so that a loopback address will do.

    Raises:
        ConfigError: there is no such interface, or it has no address.
        SetupError: the node has no address but the loopback.
    """
    if interface is not None:
        known = addresses()
        if interface not in known:
            raise ConfigError(
                f"network interface {interface} is unknown on {socket.gethostname()} or has no"
                f" address: name one of {', '.join(sorted(known))}"
            )
        return known[interface][0]
    routed = None
    if peer is not None:
        routed = _source_towards(peer)
        if routed is not None and (alone or is_loopback(peer) or not is_loopback(routed)):
            return routed
    every = (address for own in addresses().values() for address in own)
    far = _source_towards() or next((one for one in every if not is_loopback(one)), None)
    if far is None and alone:
        far = "127.0.0.1"
    if found := far or routed:
        return found
    raise SetupError(
        f"{socket.gethostname()} has no network address but the loopback: other nodes cannot reach "
        "it; bring an interface up, or name one with IFNAME or --ifname"
    )


def _source_towards(host: str = _ANYWHERE) -> str | None:
    """Returns the address that packets to ``host`` leave from, ``None`` without a route."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(
            host, _PORT, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return None
