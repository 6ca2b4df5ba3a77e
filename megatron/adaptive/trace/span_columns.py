"""Spans of a rank as columns: what every figure and every large view is computed from.

A table holds millions of spans in one numpy array per column and makes no object of any of them.
Where a few are wanted as objects, for a chart, :meth:`TraceTable.spans` makes them.

A message is known on both ends by its iteration, the ranks, and the action of the receiver that it
is the input of: :func:`match_messages` finds each send's receive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron.adaptive.trace.trace_format import COLUMNS, DRAWN_ACTIONS, KINDS, REASONS, Span

Ints: TypeAlias = npt.NDArray[Any]
"""Whole numbers, of the width that :data:`TraceTable`'s column has."""
Mask: TypeAlias = npt.NDArray[np.bool_]

KIND = {word: number for number, word in enumerate(KINDS)}
"""The number of a kind in the columns ``kind`` and ``of``."""
REASON = {word: number for number, word in enumerate(REASONS)}
"""The number of a word in the column ``reason``."""
OTHER = len(KINDS)
"""The number of a kind that only a newer program knows."""

_NAMES = (*KINDS, "other")
_OF_ACTION = ("iteration", "chunk", "microbatch", "piece")
"""Columns that an action and the wait before it have alike."""
_WIDTHS: dict[str, type[np.signedinteger[Any]]] = {
    "kind": np.int8,
    "chunk": np.int16,
    "microbatch": np.int32,
    "piece": np.int16,
    "start_ns": np.int64,
    "duration_ns": np.int64,
    "bytes": np.int64,
    "in_flight_bytes": np.int64,
    "queue_depth": np.int32,
    "peer": np.int32,
    "of": np.int8,
    "reason": np.int8,
}


@dataclass(frozen=True, eq=False)
class TraceTable:
    """Spans of one rank; every column is ``[spans]``, ``iteration`` as ``int64``.

    Spans of one iteration lie together, the late ones of it maybe apart; within an iteration they
    lie in the order they were written, actions in the order they ran. Columns are those of
    :data:`~megatron.adaptive.trace.trace_format.Row`, of the widths above; times are on the run's
    common clock, ``end_ns`` is not before ``start_ns``. See :data:`KIND` for ``kind`` and ``of``,
    :data:`REASON` for ``reason``.
    """

    iteration: Ints
    kind: Ints
    chunk: Ints
    microbatch: Ints
    piece: Ints
    start_ns: Ints
    end_ns: Ints
    bytes: Ints
    in_flight_bytes: Ints
    queue_depth: Ints
    peer: Ints
    of: Ints
    reason: Ints

    @classmethod
    def from_rows(cls, iteration: Ints, rows: Ints) -> TraceTable:
        """A table of rows as they are written.

        Args:
            iteration: ``[spans]``.
            rows: ``[spans, 12] int64``, :data:`~megatron.adaptive.trace.trace_format.COLUMNS` with
                absolute starts.
        """
        columns = {
            name: rows[:, number].astype(_WIDTHS[name]) for number, name in enumerate(COLUMNS)
        }
        duration_ns = columns.pop("duration_ns")
        columns["end_ns"] = columns["start_ns"] + duration_ns
        return cls(iteration=np.asarray(iteration, dtype=np.int64), **columns)

    @classmethod
    def of_columns(cls, iteration: Ints, **columns: Ints | int) -> TraceTable:
        """A table of some columns of :data:`~megatron.adaptive.trace.trace_format.COLUMNS`.

        Args:
            iteration: ``[spans]``.
            columns: ``[spans]`` each, or one number for all; those left out say nothing.
        """
        rows = np.zeros((len(iteration), len(COLUMNS)), dtype=np.int64)
        nothing = dict.fromkeys(("chunk", "microbatch", "peer", "of"), -1)
        for name, values in {**nothing, **columns}.items():
            rows[:, COLUMNS.index(name)] = values
        return cls.from_rows(iteration, rows)

    @classmethod
    def concat(cls, tables: Sequence[TraceTable]) -> TraceTable:
        """The rows of several tables, in turn."""
        if len(tables) == 1:
            return tables[0]
        if not tables:
            return cls.of_columns(np.zeros(0))
        return cls(
            *(np.concatenate([getattr(t, field.name) for t in tables]) for field in fields(cls))
        )

    def __len__(self) -> int:
        """The number of spans."""
        return len(self.kind)

    @property
    def duration_ns(self) -> Ints:
        """``[spans] int64``: end minus start."""
        return self.end_ns - self.start_ns

    def where(self, *kinds: str) -> Mask:
        """Marks the rows of one of these kinds, ``[spans] bool``."""
        wanted = np.zeros(len(_NAMES), dtype=np.bool_)
        wanted[[KIND[kind] for kind in kinds]] = True
        return wanted[self.kind]

    def take(self, rows: Ints | Mask | slice) -> TraceTable:
        """Some of the rows: a mask, their numbers, or a slice."""
        return TraceTable(*(getattr(self, field.name)[rows] for field in fields(self)))

    def of_kind(self, *kinds: str) -> TraceTable:
        """The rows of these kinds."""
        return self.take(self.where(*kinds))

    def spans(self) -> tuple[Span, ...]:
        """The rows as objects, waits put down to the actions that ended them as well."""
        columns = {field.name: getattr(self, field.name).tolist() for field in fields(self)}
        columns["wait_ns"] = wait_before(self).tolist()
        columns["action"] = [_NAMES[kind] for kind in columns.pop("kind")]
        columns["of"] = ["" if of < 0 else _NAMES[of] for of in columns["of"]]
        columns["reason"] = [REASONS[reason] for reason in columns["reason"]]
        rows = zip(*columns.values(), strict=True)
        return tuple(Span(**dict(zip(columns, row, strict=True))) for row in rows)


def wait_before(table: TraceTable) -> Ints:
    """``[spans] int64``: how long the rank waited for each action, 0 for what is none."""
    waited = np.zeros(len(table), dtype=np.int64)
    waits, actions = table.of_kind("wait"), table.of_kind(*DRAWN_ACTIONS)
    places = find_rows(
        [getattr(actions, name) for name in ("kind", *_OF_ACTION)],
        [getattr(waits, name) for name in ("of", *_OF_ACTION)],
    )
    found = places >= 0
    rows = np.flatnonzero(table.where(*DRAWN_ACTIONS))
    np.add.at(waited, rows[places[found]], waits.duration_ns[found])
    return waited


def row_keys(columns: Sequence[Ints]) -> Ints:
    """``[rows] int64``: numbers that are equal where rows are, and in the order of these."""
    keys, size = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        if size * (high - low + 1) >= 2**63:
            distinct, keys = np.unique(keys, return_inverse=True)
            size = len(distinct)
        keys = keys * (high - low + 1) + column.astype(np.int64) - low
        size *= high - low + 1
    return keys


def find_rows(known: Sequence[Ints], wanted: Sequence[Ints]) -> Ints:
    """Finds rows by their values.

    Args:
        known: columns ``[rows]`` of the rows to look in.
        wanted: the same columns ``[wanted]`` of the rows to find.

    Returns:
        ``[wanted] int64``, the number of the first known row with these values, -1 for none.
    """
    count = len(known[0])
    key = row_keys([np.concatenate(pair) for pair in zip(known, wanted, strict=True)])
    order = np.argsort(key[:count], kind="stable")
    ordered = np.append(key[:count][order], -1)  # a key that no row has, behind the last
    places = np.searchsorted(ordered[:-1], key[count:])
    found: Ints = np.where(ordered[places] == key[count:], np.append(order, -1)[places], -1)
    return found


def nth_of_equal(keys: Sequence[Ints]) -> Ints:
    """Numbers each row among those with the same keys, from 0; equal ones must lie together."""
    new = np.zeros(len(keys[0]), dtype=np.bool_)
    for key in keys:
        new |= np.diff(key, prepend=key[:1] - 1) != 0
    heads = np.flatnonzero(new)
    nth: Ints = np.arange(len(new)) - np.repeat(heads, np.diff(np.append(heads, len(new))))
    return nth


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
        arrived_ns=got.start_ns,
        taken_ns=got.end_ns,
        bytes=got.bytes,
        seen=(got.reason == REASON["seen"]) | (got.reason == REASON["posted"]),
    )
