"""Defines how a transport declares which ranks it connects, and how it is opened.

A transport is declared by a subclass of :class:`TransportKind`. From these classes, ``select.py``
determines which pairs of ranks each transport connects, and ``connect.py`` opens the transports
that were chosen. The transports of this package are listed in ``config/transport_specs.py``. A
user's class can be in any module, and is selected with ``--transport package.module:Class``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

import torch

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.own_code import line_of_error, source_of
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.config.transport_specs import load_transport
from megatron.adaptive.errors import AdaptiveError, ConfigError, TransportError
from megatron.adaptive.transport.interface import Completions, Endpoint, Transport

Gather = Callable[[Any], list[Any]]
"""Function that takes a value of this rank and returns a list of the values of all ranks.

All ranks must call this function.
"""

_TRANSPORT = ("name", "completions", "send", "reserve", "describe_links", "flush", "close")
_COMPLETIONS = ("listen", "put", "poll", "wait")


@dataclass(frozen=True, kw_only=True)
class Payloads:
    """Describes what is known in advance about a job's messages. Equal on all ranks.

    Attributes:
        shape: Shape of the largest message, or ``None`` if unknown.
        dtype: Dtype of the messages.
        varies: Whether some messages are smaller than ``shape``.
        in_flight: Maximum number of messages on a channel that the receiver keeps at the same time.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    varies: bool = False
    in_flight: int | None = None

    @property
    def nbytes(self) -> int | None:
        """Returns the size of the largest message in bytes, or ``None`` if unknown."""
        if self.shape is None:
            return None
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Properties of a rank that determine which transports it can use.

    Attributes:
        device: Device on which the rank computes.
        own_gpu: Whether the device is a GPU that no other rank uses.
        address: Network address of the rank, or ``None`` if it has no address.
        module: Module of the C++ extension, or ``None`` if the extension is missing.
        rdma_ports: Active RDMA ports of the rank's machine, such as ``mlx5_0:1``.
        no_rdma: Reason why there are no active RDMA ports.
    """

    device: torch.device
    own_gpu: bool
    address: str | None
    module: ModuleType | None
    rdma_ports: tuple[str, ...] = ()
    no_rdma: str = ""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Arguments for opening the channels of a transport.

    Attributes:
        rank: Global rank of this process.
        peers: Global ranks with which this rank exchanges messages over this transport. A rank
            without peers still takes part in collective calls.
        members: Global ranks of this rank's pipeline. They only send messages to each other.
        gather: Function that exchanges values between all ranks of the job.
        accelerator: Device of this rank, on which received tensors are placed.
        payloads: Shape, dtype and number of the messages, if known.
        describe: Function that returns the name of a rank for error messages.
        timeout_s: Maximum time in seconds for which a send waits for a peer that does not receive
            messages.
        options: Transport settings of the user.
        completions: Queue for received messages, or ``None`` if the transport must create a queue.
    """

    rank: int
    peers: Sequence[int]
    members: list[int]
    gather: Gather
    accelerator: Accelerator
    payloads: Payloads
    describe: Callable[[int], str]
    timeout_s: float
    options: TransportConfig
    completions: Completions | None


class TransportKind:
    """Declares a transport: which ranks it connects, and how its channels are opened.

    Subclasses must define at least :meth:`open`.

    Attributes:
        name: Name of the transport on the command line.
        reason: Reason for choosing this transport, which is logged, or empty.
    """

    name: str = ""
    reason: ClassVar[str] = ""

    def lacks(self, facts: RankFacts) -> str | None:
        """Returns the reason why a rank with ``facts`` cannot use this transport, or ``None``."""
        return None

    def is_candidate(self, first: Endpoint, second: Endpoint) -> bool:
        """Returns whether ``--transport auto`` tries this transport between two ranks.

        The two ranks are ``first`` and ``second``.

        Swapping the two ranks must not change the result.
        """
        return True

    def why_not(self, first: Endpoint, second: Endpoint) -> str | None:
        """Returns the reason why this transport cannot connect two ranks, or ``None`` if it can.

        The two ranks are ``first`` and ``second``.

        This method is only called for ranks that can use the transport. Whether the result is
        ``None`` must not depend on the order of the ranks.
        """
        return None

    def open(self, opening: Opening) -> Transport | None:
        """Opens this rank's channels. All ranks of the job must call this method.

        Returns:
            Object with all members of ``interface.Transport``, or ``None`` for a rank without
            peers.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define open(opening), which returns this rank's transport"
        )


@lru_cache(maxsize=64)
def transport_kind(name: str) -> TransportKind:
    """Returns the declaration of the transport with the name ``name``.

    Args:
        name: Name of a transport of this package or of an entry point, or ``package.module:Class``
            for a user's transport.

    Raises:
        ConfigError: The transport does not exist, cannot be imported, or is not a subclass of
            :class:`TransportKind`.
    """
    loaded = load_transport(name)
    if not (isinstance(loaded, type) and issubclass(loaded, TransportKind)):
        raise ConfigError(
            f"transport {name} must be a subclass of TransportKind of "
            f"megatron.adaptive.transport.kind, got {type(loaded).__name__} {loaded!r:.60}"
        )
    kind: TransportKind = loaded()
    kind.name = name
    return kind


class _OpeningError(TransportError):
    """Raised on all ranks if a user's transport could not be opened on one rank."""


def open_own(kind: TransportKind, opening: Opening) -> Transport | None:
    """Opens a user's transport, and checks that it has all members of the interface.

    All ranks of the job must call this function. An error on one rank is raised on all ranks,
    unless other ranks are waiting for this rank outside of ``opening.gather``.

    Args:
        kind: Declaration of the transport.
        opening: Argument that is passed to the ``open`` method of the transport.

    Raises:
        TransportError: The transport of a rank could not be opened, or a member is missing.
    """

    def exchange(value: Any, failure: str | None = None) -> list[Any]:
        gathered = opening.gather((failure, value))
        first = next((text for text, _ in gathered if text is not None), None)
        if first is not None:
            raise _OpeningError(first)
        return [shared for _, shared in gathered]

    part: Transport | None = None
    failure: str | None = None
    where = f"transport {kind.name} ({source_of(type(kind))}), rank {opening.rank}"
    try:
        part = kind.open(replace(opening, gather=exchange))
        failure = _what_lacks(part, opening.peers)
    except _OpeningError:
        raise
    except AdaptiveError as error:
        failure = str(error)
    except Exception as error:  # A user's class may raise any exception.
        failure = f"{line_of_error(error, type(kind))} raised {type(error).__name__}: {error}"
    exchange(None, None if failure is None else f"{where}: {failure}")
    return part


def _what_lacks(transport: Any, peers: Sequence[int]) -> str | None:
    """Returns a message that names the members that ``transport`` lacks, or ``None``.

    If ``transport`` is complete, the result is ``None``. If ``peers`` is empty, ``transport`` may
    be ``None``.
    """
    if transport is None and not peers:
        return None
    missing = [name for name in _TRANSPORT if not hasattr(transport, name)]
    if not missing:
        completions = transport.completions
        missing = [f"completions.{n}" for n in _COMPLETIONS if not hasattr(completions, n)]
    if not missing:
        return None
    return (
        f"open returned {type(transport).__name__} without {', '.join(missing)}; define all "
        "members of Transport in megatron.adaptive.transport.interface"
    )
