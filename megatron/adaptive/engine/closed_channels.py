"""Detects ranks that have closed their channels while this rank still exchanges messages with them.

This happens if ranks run different numbers of steps. This module does not detect ranks that have
crashed: the transports report these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron.adaptive.errors import PeerLostError
from megatron.adaptive.schedule.action import Action
from megatron.adaptive.transport.interface import Transport


class Need(NamedTuple):
    """Message from another rank without which an action cannot start.

    Attributes:
        waiting: Action that cannot start.
        sender: Global rank that must send the message.
        action: Action for which the message is the input. It differs from ``waiting`` if the rank
            waits until another stage has acknowledged an output.
        chunk: Chunk of ``sender`` that computes the message.
        item: Index of the microbatch on ``sender``, or of the slice if sequences are cut into
            slices.
    """

    waiting: Action
    sender: int
    action: Action
    chunk: int
    item: int


def closed_peers(transport: Transport, peers: Iterable[int]) -> list[int]:
    """Returns the ranks in ``peers`` that have closed their channel to this rank, sorted.

    Args:
        transport: Transport with the channels of this rank.
        peers: Global ranks to check.
    """
    links = transport.describe_links()
    return sorted(peer for peer in set(peers) if links.get(peer, {}).get("peer_closed"))


def closed_channel_error(problem: str, peers: Iterable[int]) -> PeerLostError:
    """Returns the error for a step that cannot continue because other ranks closed their channels.

    Args:
        problem: Clause that names this rank, the step, and the message that cannot be exchanged.
        peers: Global ranks that have closed their channels.
    """
    names = " and ".join(f"rank {peer}" for peer in peers)
    return PeerLostError(
        f"{problem}, but {names} closed the channel, after fewer steps or because of an error; run "
        "the same number of steps on all ranks"
    )
