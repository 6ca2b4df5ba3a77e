"""Messages between ranks: each send with the receive of the same message.

A message is known on both ends by its iteration, the ranks, and the action of the receiver that it
is the input of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron.adaptive.trace.table import REASON, Ints, Mask, TraceTable

__all__ = ["Messages", "match_messages"]


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
    sends = TraceTable.concat([tables[rank].of_kind("send") for rank in ranks])
    receives = TraceTable.concat([tables[rank].of_kind("receive") for rank in ranks])
    source = _owners(tables, ranks, "send")
    target = _owners(tables, ranks, "receive")
    send_keys, receive_keys = _keys((sends, source, sends.peer), (receives, receives.peer, target))
    order = np.argsort(send_keys, kind="stable")
    places = np.searchsorted(send_keys[order], receive_keys)
    places = np.minimum(places, max(len(order) - 1, 0))
    found = np.zeros(len(receive_keys), dtype=np.bool_)
    if len(order):
        found = send_keys[order][places] == receive_keys
    sent, got = sends.take(order[places[found]]), receives.take(found)
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
        seen=got.reason == REASON["seen"],
    )


def _owners(tables: Mapping[int, TraceTable], ranks: list[int], kind: str) -> Ints:
    counts = [int(tables[rank].where(kind).sum()) for rank in ranks]
    return np.repeat(np.array(ranks, dtype=np.int64), counts)


def _keys(*sides: tuple[TraceTable, Ints, Ints]) -> tuple[Ints, ...]:
    """A number per row, the same on both sides for one message and for no other."""
    columns = [
        (table.iteration, source, target, table.of, table.chunk, table.microbatch)
        for table, source, target in sides
    ]
    keys = [np.zeros(len(table), dtype=np.int64) for table, _, _ in sides]
    span = 1
    for number in range(len(columns[0])):
        both = [side[number].astype(np.int64) for side in columns]
        values, places = np.unique(np.concatenate(both), return_inverse=True)
        span *= max(1, len(values))
        assert span < 2**63, "more kinds of messages than a number can distinguish"
        parts = np.split(places, [len(both[0])])
        keys = [key * max(1, len(values)) + part for key, part in zip(keys, parts, strict=True)]
    return tuple(keys)
