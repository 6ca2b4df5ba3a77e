"""Lists the transports between ranks: the values of ``--transport``.

Each transport of this package is an entry of the table below, which contains the path of its class.
Users' transports need no entry. A user derives a class from ``TransportKind`` in
``megatron.adaptive.transport.kind``, and passes ``--transport package.module:Class``. A package can
also publish its transports as entry points of the group ``megatron_adaptive.transports``. Such
transports are selected by name.

This module does not import the transports, because they import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.adaptive.config.own_code import find_object, import_object
from megatron.adaptive.errors import ConfigError

ENTRY_POINTS = "megatron_adaptive.transports"
"""Name of the entry-point group in which installed packages list their transports."""
_PACKAGE = "megatron.adaptive.transport"


@dataclass(frozen=True)
class TransportSpec:
    """Name, class and priority of a transport of this package.

    Attributes:
        name: Name of the transport on the command line.
        path: Path of the class that implements the transport, in the form ``package.module:Class``.
        preference: Position of the transport in the order that ``auto`` follows. It tries the
            transport with the smallest number first.
    """

    name: str
    path: str
    preference: int


_TABLE = (
    TransportSpec("shm", f"{_PACKAGE}.native_kinds:ShmKind", 2),
    TransportSpec("rdma", f"{_PACKAGE}.native_kinds:RdmaKind", 3),
    TransportSpec("tcp", f"{_PACKAGE}.native_kinds:TcpKind", 4),
    TransportSpec("gloo", f"{_PACKAGE}.gloo:GlooKind", 5),
    TransportSpec("nccl", f"{_PACKAGE}.nccl:NcclKind", 1),
)
BUILT_IN = {spec.name: spec for spec in _TABLE}
"""Specifications of the transports of this package, keyed by name."""


def by_preference() -> tuple[str, ...]:
    """Returns the names of this package's transports, in the order in which ``auto`` tries them."""
    return tuple(spec.name for spec in sorted(_TABLE, key=lambda spec: spec.preference))


def load_transport(name: str) -> Any:
    """Imports and returns the class that implements the transport ``name``.

    Args:
        name: Name of a transport of this package, name of an entry point, or path of a user's
            transport in the form ``package.module:Class``.

    Raises:
        ConfigError: The transport does not exist, or its module cannot be imported.
    """
    if name in BUILT_IN:
        return import_object(BUILT_IN[name].path, "transport")
    loaded = find_object(name, group=ENTRY_POINTS, subject="transport")
    if loaded is None:
        raise ConfigError(
            f"{name!r} is neither one of auto, {', '.join(BUILT_IN)} nor package.module:Class of "
            "your own transport"
        )
    return loaded
