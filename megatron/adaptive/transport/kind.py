"""Defines how a transport declares which ranks it can connect, and how it opens its channels.

A transport is declared by a subclass of :class:`TransportKind`. ``select.py`` uses these classes to
find out which pairs of ranks each transport can connect, and ``connect.py`` uses them to open the
chosen transports. ``config/transport_specs.py`` lists the transports of this package. A user's own
class can be in any module, and is selected by ``--transport package.module:Class``.
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
"""Function that takes this rank's value and returns a list of the values of all ranks.

Every rank must call this function.
"""

_TRANSPORT = ("name", "completions", "send", "reserve", "describe_links", "flush", "close")
_COMPLETIONS = ("listen", "put", "poll", "wait")


@dataclass(frozen=True, kw_only=True)
class Payloads:
    """Properties of a job's messages that are known in advance. Must be equal on all ranks.

    Attributes:
        shape: Shape of the largest message, or ``None`` if unknown.
        dtype: Dtype of the messages.
        varies: Whether some messages are smaller than ``shape``.
        in_flight: Maximum number of messages of one channel that the receiver holds at the same
            time.
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
    """Properties of a rank that determine which transports the rank can use.

    Attributes:
        device: Device that the rank uses for computation.
        own_gpu: Whether the device is a GPU that no other rank uses.
        address: Network address of the rank, or ``None`` if it has no address.
        module: Module of the C++ extension, or ``None`` if the extension is not installed.
        rdma_ports: Active RDMA ports of the rank's machine, such as ``mlx5_0:1``.
        no_rdma: Reason why ``rdma_ports`` is empty, if it is.
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
        members: Global ranks of this rank's pipeline. Messages are only sent within a pipeline.
        gather: Function that exchanges values between all ranks of the job.
        accelerator: Device of this rank, where received tensors are placed.
        payloads: Shape and dtype of the messages, and maximum number in flight, as far as known in
            advance.
        describe: Function that returns the name of a rank for error messages.
        timeout_s: Maximum time in seconds that a send waits for a peer that is not receiving
            messages.
        options: Transport settings of the user.
        completions: Queue for received messages, or ``None`` if the transport must create its own
            queue.
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
    """Declares a transport: which ranks it can connect, and how its channels are opened.

    Subclasses must define at least :meth:`open`.

    Attributes:
        name: Name of the transport on the command line.
        reason: Reason for choosing this transport, shown in the log. May be empty.
    """

    name: str = ""
    reason: ClassVar[str] = ""

    def lacks(self, facts: RankFacts) -> str | None:
        """Returns the reason why a rank with ``facts`` cannot use this transport, or ``None``."""
        return None

    def is_candidate(self, first: Endpoint, second: Endpoint) -> bool:
        """Returns whether ``--transport auto`` tries this transport between two ranks.

        The result must not change if ``first`` and ``second`` are swapped.
        """
        return True

    def why_not(self, first: Endpoint, second: Endpoint) -> str | None:
        """Returns the reason why this transport cannot connect two ranks, or ``None`` if it can.

        This method is only called if :meth:`lacks` returned ``None`` for both ranks. Swapping
        ``first`` and ``second`` may change the text of the reason, but must not turn a reason into
        ``None``.
        """
        return None

    def open(self, opening: Opening) -> Transport | None:
        """Opens this rank's channels. Every rank of the job must call this method.

        Returns:
            Object that has all members of ``interface.Transport``, or ``None`` for a rank without
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
    """Raised on all ranks if one of them could not open a user's transport."""


def open_own(kind: TransportKind, opening: Opening) -> Transport | None:
    """Opens a user's transport, and checks that it has all members of the interface.

    Every rank of the job must call this function. If opening fails on one rank, the error is raised
    on all ranks at their next call of ``opening.gather``. A rank that waits for the failed rank in
    another way does not notice the error.

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
    """Returns a message that names the missing members of ``transport``, or ``None`` if it has all.

    If ``peers`` is empty, ``transport`` may be ``None``.
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
