"""Decides which transport connects a pair of ranks, from what both ends say about themselves.

::

    processors                             GPUs, one per rank
      same machine    shm                    nccl, which moves device memory without the host
      else            rdma where both ends   GPUs that ranks share: as processors
                      have an active port
                      else tcp
      no extension    gloo

Owns the rules, the wording of their reasons and the size of a channel. Both ends of a pair call the
same function with the same facts and so come to the same result; nothing is negotiated. Making the
channels is ``connect.py``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.adaptive.config.parallel import MOST_SLOTS
from megatron.adaptive.errors import SetupError
from megatron.adaptive.network import is_loopback
from megatron.adaptive.transport.interface import Endpoint

DEFAULT_SLOT_BYTES = 1 << 20
_DEFAULT_SLOTS = 8
# Of a channel: what its receiver leaves free, and what its sender may have reserved and not sent.
_FREE_SLOTS, _RESERVABLE_SLOTS = 2, 2
_LEAST_SLOTS = 4
_CHANNEL_BYTES = 256 << 20
_PAIRS_PER_LINE = 8
_SMALLEST_SLOT_BYTES, _LARGEST_SLOT_BYTES = 4096, 64 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """The transport of a pair, with the reason.

    Attributes:
        kind: the transport.
        reason: why, for the log.
    """

    kind: str
    reason: str


def why_not(kind: str, one: Endpoint, other: Endpoint) -> str | None:
    """Return why ``kind`` cannot connect the two, ``None`` where it can."""
    for end in (one, other):
        lack = end.lacks.get(kind)
        if lack is not None:
            return f"rank {end.rank} on {end.host}: {lack}"
    if kind == "shm":
        if one.machine != other.machine:
            return (
                f"rank {one.rank} on {one.host} and rank {other.rank} on {other.host} do not see "
                "each other's processes"
            )
        if one.user != other.user:
            return (
                f"rank {one.rank} belongs to user {one.user} and rank {other.rank} to user "
                f"{other.user}"
            )
    if kind == "tcp" and one.machine != other.machine:
        for end in (one, other):
            if is_loopback(end.addresses.get("tcp", "")):
                return (
                    f"rank {end.rank} on {end.host} has only the address "
                    f"{end.addresses['tcp']}, which others cannot reach; name its network with "
                    "--transport-interface"
                )
    return None


def candidates(one: Endpoint, other: Endpoint) -> tuple[str, ...]:
    """Return the transports to try for a pair, the best first; the last one is always possible."""
    first = ("nccl",) if "cuda" in (one.device, other.device) else ()
    near = ("shm",) if one.machine == other.machine else ("rdma",)
    return (*first, *near, "tcp", "gloo")


def choose(one: Endpoint, other: Endpoint, forced: str | None = None) -> Choice:
    """Return what connects a pair; the same for both ends, in either order.

    Args:
        one: one end.
        other: the other end.
        forced: the transport that the user asked for.

    Raises:
        SetupError: that one cannot be; names the pair and the reason.
    """
    if one.rank > other.rank:
        one, other = other, one
    if forced is not None:
        reason = why_not(forced, one, other)
        if reason is not None:
            raise SetupError(
                f"--transport {forced} cannot connect ranks {one.rank} and {other.rank}: {reason}; "
                "use --transport auto, or mend that"
            )
        return Choice(forced, "asked for")
    missed: list[str] = []
    for kind in candidates(one, other):
        reason = why_not(kind, one, other)
        if reason is None:
            return Choice(kind, _why(kind, one, other, missed))
        missed.append(f"no {kind}: {reason}")
    raise AssertionError("gloo connects any two ranks")


def _why(kind: str, one: Endpoint, other: Endpoint, missed: list[str]) -> str:
    said = {
        "shm": "same machine",
        "rdma": "both have an active port",
        "nccl": "each has a GPU of its own",
    }.get(kind, "")
    return "; ".join([said] * bool(said) + missed)


def log_lines(choices: Mapping[tuple[int, int], Choice]) -> list[str]:
    """Return the choices of all pairs as text, pairs with the same one on a line together."""
    lines = []
    for choice in dict.fromkeys(choices.values()):
        pairs = [f"{low}-{high}" for (low, high), one in sorted(choices.items()) if one == choice]
        for start in range(0, len(pairs), _PAIRS_PER_LINE):
            said = " ".join(pairs[start : start + _PAIRS_PER_LINE])
            lines.append(f"transport: {choice.kind} for ranks {said} ({choice.reason})")
    return lines


def rounds_of(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorts pairs of ranks into the order in which all ranks connect them.

    The order consists of rounds in which no rank occurs twice. Each pair is in the first round that
    has neither of its ranks. A row of ranks or a ring takes two or three rounds, however long it
    is. A rank that connects its own pairs in this order waits only for earlier rounds.

    Args:
        pairs: Pairs of ranks, the lower one first.
    """
    rounds: list[list[tuple[int, int]]] = []
    for pair in sorted(pairs):
        free = (part for part in rounds if not any(set(pair) & set(other) for other in part))
        part = next(free, None)
        if part is None:
            rounds.append([pair])
        else:
            part.append(pair)
    return [pair for part in rounds for pair in part]


@dataclass(frozen=True, slots=True)
class ChannelSize:
    """Memory of one directed channel.

    Attributes:
        slot_bytes: largest payload in one piece.
        slots: payloads that it holds at a time.
    """

    slot_bytes: int
    slots: int

    @property
    def reservable(self) -> int:
        """Slots that a sender may have reserved and not sent."""
        return min(_RESERVABLE_SLOTS, self.slots // 4)

    @property
    def least_free(self) -> int:
        """Slots that a receiver leaves to the sender, reserved ones included.

        Else a sender might wait for a slot with a message that the receiver needs to go on and to
        give slots back.
        """
        return _FREE_SLOTS + self.reservable


def size_of_channel(
    payload_bytes: int | None,
    in_flight: int | None,
    slot_bytes: int | None = None,
    slots: int | None = None,
) -> ChannelSize:
    """Return how large a channel is made.

    A slot is taken from the moment its message is sent until the receiver has dropped the tensor,
    for an activation that is until its backward. With a slot for every microbatch in flight, two
    for messages under way and two to compute into, no sender waits for one. Where that is more than
    256 MiB or 64 slots, the channel gets as many as fit, at least 4; a receiver that holds nearly
    all of them copies further messages out, so that there is always room for what its next action
    needs.

    Args:
        payload_bytes: size of the messages, ``None`` where it varies.
        in_flight: most messages that the receiver keeps at a time, ``None`` where nobody knows.
        slot_bytes: what the user wants.
        slots: what the user wants.
    """
    if slot_bytes is None:
        slot_bytes = DEFAULT_SLOT_BYTES if payload_bytes is None else payload_bytes
        slot_bytes = min(max(slot_bytes, _SMALLEST_SLOT_BYTES), _LARGEST_SLOT_BYTES)
    if slots is None:
        spare = _FREE_SLOTS + _RESERVABLE_SLOTS
        wanted = _DEFAULT_SLOTS if in_flight is None else in_flight + spare
        affordable = max(_LEAST_SLOTS, _CHANNEL_BYTES // slot_bytes)
        slots = max(_LEAST_SLOTS, min(wanted, affordable, MOST_SLOTS))
    return ChannelSize(slot_bytes, slots)
