"""Messages between ranks: each send with the receive of the same message.

A message is known on both ends by its iteration, the ranks, and the action of the receiver that it
is the input of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron.adaptive.trace.table import REASON, Ints, Mask, TraceTable, find_rows

_SAME = ("iteration", "of", "chunk", "microbatch")
"""Columns that both ends of a message have alike."""


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages of which both ends are known; every column is ``[messages]``.

    Attributes:
        iteration: ``int64``.
        source: global rank of the sender.
        target: global rank of the receiver.
        of: kind of the action it is the input of, see ``table.KIND``.
        chunk: chunk of that action, on the receiver.
        microbatch: microbatch of it.
        sent_ns: the sender began to hand it over.
        handed_ns: the sender had handed it over and went on.
        arrived_ns: it was there, or, where not ``seen``, was found to be there.
        taken_ns: the action began.
        bytes: its size.
        seen: ``bool``, the arrival is exact.
    """

    iteration: Ints
    source: Ints
    target: Ints
    of: Ints
    chunk: Ints
    microbatch: Ints
    sent_ns: Ints
    handed_ns: Ints
    arrived_ns: Ints
    taken_ns: Ints
    bytes: Ints
    seen: Mask

    def __len__(self) -> int:
        """The number of messages."""
        return len(self.iteration)


def match_messages(tables: Mapping[int, TraceTable]) -> Messages:
    """Match the sends and receives of some ranks.

    Args:
        tables: spans by global rank. Messages to or from other ranks are left out.

    Returns:
        The messages, ordered by receiver, then as its file has them.
    """
    ranks = sorted(tables)
    sides, owners = [], []
    for kind in ("send", "receive"):
        parts = [tables[rank].of_kind(kind) for rank in ranks]
        sides.append(TraceTable.concat(parts))
        owners.append(np.repeat(np.array(ranks, dtype=np.int64), [len(part) for part in parts]))
    (sends, receives), (source, target) = sides, owners
    places = find_rows(
        [getattr(sends, name) for name in _SAME] + [source, sends.peer],
        [getattr(receives, name) for name in _SAME] + [receives.peer, target],
    )
    found = places >= 0
    sent, got = sends.take(places[found]), receives.take(found)
    return Messages(
        iteration=got.iteration,
        source=got.peer.astype(np.int64),
        target=target[found],
        of=got.of,
        chunk=got.chunk,
        microbatch=got.microbatch,
        sent_ns=sent.start_ns,
        handed_ns=sent.end_ns,
        arrived_ns=got.start_ns,
        taken_ns=got.end_ns,
        bytes=got.bytes,
        seen=(got.reason == REASON["seen"]) | (got.reason == REASON["posted"]),
    )
