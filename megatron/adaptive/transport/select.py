"""Chooses the transport for each pair of ranks, given the endpoints of both ranks.

::

    CPUs                                   GPUs, one per rank
      same machine    shm                    nccl, which moves device memory without the host
      otherwise       rdma if both ends      GPUs that ranks share: as on CPUs
                      have an active port,
                      else tcp
      no extension    gloo

Each transport declares which ranks it can connect (``kind.py``). This file tries the transports in
the order of ``config/transport_specs.py``, creates log lines with the reason for each choice, and
computes the memory size of a channel. Both ranks of a pair call the same function with the same
endpoints, so they agree on a transport without negotiation. ``connect.py`` opens the channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.adaptive.config.parallel import MOST_SLOTS
from megatron.adaptive.config.transport_specs import by_preference
from megatron.adaptive.errors import SetupError
from megatron.adaptive.transport.interface import Endpoint
from megatron.adaptive.transport.kind import transport_kind

DEFAULT_SLOT_BYTES = 1 << 20
_DEFAULT_SLOTS = 8
# A receiver keeps _FREE_SLOTS slots free, and also those that the sender may reserve in advance (at
# most _RESERVABLE_SLOTS).
_FREE_SLOTS = 2
_RESERVABLE_SLOTS = 2
_LEAST_SLOTS = 4
_CHANNEL_BYTES = 256 << 20
_PAIRS_PER_LINE = 8
_SMALLEST_SLOT_BYTES = 4096
_LARGEST_SLOT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """Transport that was chosen for a pair of ranks, and the reason.

    Attributes:
        kind: Name of the transport: ``shm``, ``rdma``, ``tcp``, ``nccl`` or ``gloo``.
        reason: Reason for the choice, which is logged.
    """

    kind: str
    reason: str


def why_not(kind: str, first: Endpoint, second: Endpoint) -> str | None:
    """Returns why ``kind`` cannot connect ``first`` and ``second``, or ``None`` if it can."""
    for end in (first, second):
        lack = end.lacks.get(kind)
        if lack is not None:
            return f"rank {end.rank} on {end.host}: {lack}"
    return transport_kind(kind).why_not(first, second)


def candidates(end: Endpoint, other: Endpoint) -> tuple[str, ...]:
    """Returns the transports to try between ``end`` and ``other``, best first.

    The last one can connect any two ranks.
    """
    return tuple(name for name in by_preference() if transport_kind(name).is_candidate(end, other))


def choose(first: Endpoint, second: Endpoint, forced: str | None = None) -> Choice:
    """Chooses the transport for a pair of ranks. The order of the two ranks does not matter.

    Args:
        first: Endpoint of one rank.
        second: Endpoint of the other rank.
        forced: Transport that the user requested, or ``None`` to choose the best transport.

    Raises:
        SetupError: The requested transport cannot connect the two ranks. The message contains the
            reason.
    """
    if first.rank > second.rank:
        first, second = second, first
    if forced is not None:
        reason = why_not(forced, first, second)
        if reason is not None:
            raise SetupError(
                f"--transport {forced} cannot connect ranks {first.rank} and {second.rank}: "
                f"{reason}; use --transport auto, or fix this problem"
            )
        return Choice(forced, "asked for")
    missed: list[str] = []
    for kind in candidates(first, second):
        reason = why_not(kind, first, second)
        if reason is None:
            return Choice(kind, _reason(kind, missed))
        missed.append(f"no {kind}: {reason}")
    raise AssertionError("gloo connects any two ranks")


def _reason(kind: str, missed: list[str]) -> str:
    """Returns why ``kind`` was chosen, and why each better transport in ``missed`` was not."""
    reason = transport_kind(kind).reason
    return "; ".join([reason, *missed] if reason else missed)


def log_lines(choices: Mapping[tuple[int, int], Choice]) -> list[str]:
    """Returns log lines that describe ``choices``. Pairs with the same choice share a line."""
    lines = []
    for choice in dict.fromkeys(choices.values()):
        pairs = [f"{low}-{high}" for (low, high), kind in sorted(choices.items()) if kind == choice]
        for start in range(0, len(pairs), _PAIRS_PER_LINE):
            ranks = " ".join(pairs[start : start + _PAIRS_PER_LINE])
            lines.append(f"transport: {choice.kind} for ranks {ranks} ({choice.reason})")
    return lines


def queue_warning(
    choices: Mapping[tuple[int, int], Choice], queues: int | None, collective_ranks: int
) -> str | None:
    """Returns a warning if the GPU's only hardware queue may block messages forever.

    Args:
        choices: Chosen transport of each pair of ranks. All of these ranks use GPUs.
        queues: Value of ``CUDA_DEVICE_MAX_CONNECTIONS``, or ``None`` if it is not set.
        collective_ranks: Number of ranks that communicate within forward and backward passes.

    Returns:
        Line to print, or ``None`` if there is nothing to warn about.
    """
    has_nccl = any(choice.kind == "nccl" for choice in choices.values())
    if queues != 1 or collective_ranks == 1 or not has_nccl:
        return None
    return (
        "warning: CUDA_DEVICE_MAX_CONNECTIONS is 1, so messages over nccl wait behind the "
        f"collectives of the {collective_ranks} ranks that compute each layer together; the job "
        "deadlocks if such a collective waits for a rank that needs such a message; set the "
        "variable to 8, unset it, or choose another transport"
    )


def rounds_of(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Groups pairs of ranks into rounds, so that ranks can connect their pairs round by round.

    No rank occurs twice in a round. Each pair is placed in the first round that contains neither of
    its two ranks. A chain or ring of ranks needs two or three rounds, regardless of its length. A
    rank that connects its pairs in this order only waits for pairs of earlier rounds.

    Args:
        pairs: Pairs of ranks to connect, with the lower rank first.
    """
    rounds: list[list[tuple[int, int]]] = []
    for pair in sorted(pairs):
        fitting = (
            connected
            for connected in rounds
            if not any(set(pair) & set(other) for other in connected)
        )
        connected = next(fitting, None)
        if connected is None:
            rounds.append([pair])
        else:
            connected.append(pair)
    return [pair for connected in rounds for pair in connected]


@dataclass(frozen=True, slots=True)
class ChannelSize:
    """Memory layout of a channel (one direction between two ranks).

    Attributes:
        slot_bytes: Size of a slot in bytes. Larger payloads are sent in several pieces.
        slots: Number of slots. Each slot contains a payload or a piece of a payload.
    """

    slot_bytes: int
    slots: int

    @property
    def reservable(self) -> int:
        """Returns the number of slots that a sender may reserve in advance."""
        return min(_RESERVABLE_SLOTS, self.slots // 4)

    @property
    def least_free(self) -> int:
        """Returns the number of slots that a receiver must keep free, including reserved slots.

        With fewer free slots, a deadlock is possible: the sender waits for a free slot, while the
        receiver does not return any slot until it has received the sender's next message.
        """
        return _FREE_SLOTS + self.reservable


def size_of_channel(
    payload_bytes: int | None,
    in_flight: int | None,
    slot_bytes: int | None = None,
    slots: int | None = None,
) -> ChannelSize:
    """Computes the number of slots of a channel and the size of a slot.

    A slot is occupied from the time its message is sent until the receiver releases the tensor,
    which for an activation is after the backward pass. A sender never waits if there is one slot
    for every microbatch in flight, two for messages that are being sent, and two for payloads that
    are being computed. The number of slots is limited to 64 and their memory to 256 MiB, but there
    are at least 4 slots. A receiver that occupies nearly all slots copies the next messages out of
    their slots, so that the input of its next action can always arrive.

    Args:
        payload_bytes: Size of the messages in bytes, or ``None`` if the size varies.
        in_flight: Maximum number of messages that the receiver holds at the same time, or ``None``
            if unknown.
        slot_bytes: Slot size in bytes that the user has set, or ``None`` for the default.
        slots: Number of slots that the user has set, or ``None`` for the default.
    """
    if slot_bytes is None:
        slot_bytes = DEFAULT_SLOT_BYTES if payload_bytes is None else payload_bytes
        slot_bytes = min(max(slot_bytes, _SMALLEST_SLOT_BYTES), _LARGEST_SLOT_BYTES)
    if slots is None:
        spare = _FREE_SLOTS + _RESERVABLE_SLOTS
        needed = _DEFAULT_SLOTS if in_flight is None else in_flight + spare
        affordable = max(_LEAST_SLOTS, _CHANNEL_BYTES // slot_bytes)
        slots = max(_LEAST_SLOTS, min(needed, affordable, MOST_SLOTS))
    return ChannelSize(slot_bytes, slots)
