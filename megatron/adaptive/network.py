"""Finds the addresses of this machine, and which of them others reach it by."""

from __future__ import annotations

import contextlib
import socket

import psutil

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


def source_towards(host: str = _ANYWHERE) -> str | None:
    """Returns the address that packets to ``host`` leave from, ``None`` without a route."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(
            host, _PORT, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return None


def outside_address() -> str | None:
    """Returns the first address that is not the loopback's, ``None`` if there is none."""
    every = (address for own in addresses().values() for address in own)
    return next((address for address in every if not is_loopback(address)), None)
