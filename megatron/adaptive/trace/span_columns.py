"""Stores the spans of a rank as columns, for statistics and for views with many spans.

A table stores even millions of spans in one numpy array per column, without an object for each
span. For charts of a few spans, :meth:`TraceTable.spans` creates objects.

A message is identified by the iteration, the two ranks, and the action of the receiver that needs
the message as input. Both the sender and the receiver record these values, so that
:func:`match_messages` can find the receive that belongs to each send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron.adaptive.schedule.action import SliceCounts
from megatron.adaptive.trace.trace_format import COLUMNS, DRAWN_ACTIONS, KINDS, REASONS, Span

Ints: TypeAlias = npt.NDArray[Any]
"""Array of integers of any width (``int8`` to ``int64``)."""
Mask: TypeAlias = npt.NDArray[np.bool_]

KIND = {word: number for number, word in enumerate(KINDS)}
"""Maps each kind of span to the number used for it in the columns ``kind`` and ``of``."""

REASON = {word: number for number, word in enumerate(REASONS)}
"""Maps each reason to the number used for it in the column ``reason``."""

OTHER = len(KINDS)
"""Number for all kinds of spans that this version of the program does not know."""

_NAMES = (*KINDS, "other")
_OF_ACTION = ("iteration", "chunk", "microbatch", "piece")
"""Columns that have the same values for an action and for the wait before it."""
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


SlicesOf: TypeAlias = Callable[[int], SliceCounts]
"""Function that maps an iteration number to the number of slices of each microbatch."""


def rows_by_value(values: Ints) -> Iterator[tuple[int, Ints]]:
    """Yields the distinct values in ascending order, each with the indices of its occurrences."""
    order = np.argsort(values, kind="stable")
    distinct, begins = np.unique(values[order], return_index=True)
    yield from zip(distinct.tolist(), np.split(order, begins[1:]), strict=False)


def microbatches_of(iterations: Ints, items: Ints, slices: SlicesOf) -> tuple[Ints, Ints]:
    """Returns the microbatch of each item, and the number of slices of this microbatch.

    An item with the index -1 belongs to no microbatch and gets the microbatch -1.

    Args:
        iterations: Iteration of each item (a slice or a whole microbatch).
        items: Index of each item within the iteration, as in ``SpanRow.microbatch``.
        slices: Function that returns the number of slices of each microbatch in an iteration.
    """
    microbatch = np.array(items, dtype=np.int64)
    number = np.ones_like(microbatch)
    for iteration, group in rows_by_value(iterations):
        counts = slices(iteration)
        if counts == 1:
            continue
        rows = group[microbatch[group] >= 0]
        if isinstance(counts, int):
            microbatch[rows] //= counts
            number[rows] = counts
        else:
            whole = np.searchsorted(np.cumsum(counts), microbatch[rows], side="right")
            microbatch[rows] = whole
            number[rows] = np.array((*counts, 1))[whole]
    return microbatch, number


@dataclass(frozen=True, eq=False)
class TraceTable:
    """Contains the spans of one rank as columns. Each column is an array with one value per span.

    The columns are ``iteration`` (``int64``) and the fields of
    :class:`~megatron.adaptive.trace.trace_format.SpanRow` (integer types in ``_WIDTHS``). Times are
    on the run's common clock, and ``end_ns`` is never before ``start_ns``. Values of ``kind`` and
    ``of`` are numbers from :data:`KIND`; values of ``reason`` are numbers from :data:`REASON`.

    The spans of an iteration are consecutive, except for spans that were recorded late. Within an
    iteration, spans have the order in which they were written, and actions the order in which they
    ran.
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
        """Creates a table from the lists of numbers in a trace file.

        Args:
            iteration: ``[spans]``, iteration number of each span.
            rows: ``[spans, 12] int64``, in the order of
                :data:`~megatron.adaptive.trace.trace_format.COLUMNS`. Unlike in the file, start
                times are absolute.
        """
        columns = {
            name: rows[:, number].astype(_WIDTHS[name]) for number, name in enumerate(COLUMNS)
        }
        duration_ns = columns.pop("duration_ns")
        columns["end_ns"] = columns["start_ns"] + duration_ns
        return cls(iteration=np.asarray(iteration, dtype=np.int64), **columns)

    @classmethod
    def of_columns(cls, iteration: Ints, **columns: Ints | int) -> TraceTable:
        """Creates a table from some of the columns in ``trace_format.COLUMNS``.

        Args:
            iteration: ``[spans]``, iteration number of each span.
            columns: Keyword argument for each column: an array ``[spans]``, or a single number for
                all spans. Omitted columns get -1 or 0, which means that there is no value.
        """
        rows = np.zeros((len(iteration), len(COLUMNS)), dtype=np.int64)
        defaults = dict.fromkeys(("chunk", "microbatch", "peer", "of"), -1)
        for name, values in {**defaults, **columns}.items():
            rows[:, COLUMNS.index(name)] = values
        return cls.from_rows(iteration, rows)

    @classmethod
    def concat(cls, tables: Sequence[TraceTable]) -> TraceTable:
        """Returns a table with the rows of all ``tables``."""
        if len(tables) == 1:
            return tables[0]
        if not tables:
            return cls.of_columns(np.zeros(0))
        return cls(
            *(np.concatenate([getattr(t, field.name) for t in tables]) for field in fields(cls))
        )

    def __len__(self) -> int:
        """Returns the number of spans in the table."""
        return len(self.kind)

    @property
    def duration_ns(self) -> Ints:
        """Duration of each span in nanoseconds, ``[spans] int64``."""
        return self.end_ns - self.start_ns

    def where(self, *kinds: str) -> Mask:
        """Returns a mask ``[spans] bool`` that is true for spans whose kind is in ``kinds``."""
        is_chosen = np.zeros(len(_NAMES), dtype=np.bool_)
        is_chosen[[KIND[kind] for kind in kinds]] = True
        return is_chosen[self.kind]

    def take(self, rows: Ints | Mask | slice) -> TraceTable:
        """Returns a table with only the selected ``rows`` (a mask, indices or a slice)."""
        return TraceTable(*(getattr(self, field.name)[rows] for field in fields(self)))

    def of_kind(self, *kinds: str) -> TraceTable:
        """Returns a table with only the spans whose kind is in ``kinds``."""
        return self.take(self.where(*kinds))

    def spans(self) -> tuple[Span, ...]:
        """Returns the spans as objects, including the wait in ns before each action."""
        columns = {field.name: getattr(self, field.name).tolist() for field in fields(self)}
        columns["wait_ns"] = wait_before(self).tolist()
        columns["action"] = [_NAMES[kind] for kind in columns.pop("kind")]
        columns["of"] = ["" if of < 0 else _NAMES[of] for of in columns["of"]]
        columns["reason"] = [REASONS[reason] for reason in columns["reason"]]
        rows = zip(*columns.values(), strict=True)
        return tuple(Span(**dict(zip(columns, row, strict=True))) for row in rows)


def wait_before(table: TraceTable) -> Ints:
    """Returns the time in ns that the rank waited before each action, and 0 for other spans."""
    waited = np.zeros(len(table), dtype=np.int64)
    waits, actions = table.of_kind("wait"), table.of_kind(*DRAWN_ACTIONS)
    matches = find_rows(
        [getattr(actions, name) for name in ("kind", *_OF_ACTION)],
        [getattr(waits, name) for name in ("of", *_OF_ACTION)],
    )
    has_action = matches >= 0
    rows = np.flatnonzero(table.where(*DRAWN_ACTIONS))
    np.add.at(waited, rows[matches[has_action]], waits.duration_ns[has_action])
    return waited


def row_keys(columns: Sequence[Ints]) -> Ints:
    """Returns a number for each row of ``columns``, as an array ``[rows] int64``.

    Equal rows get equal numbers, and the numbers sort in the same order as the rows.
    """
    keys = np.zeros(len(columns[0]), dtype=np.int64)
    size = 1
    for column in columns:
        low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        if size * (high - low + 1) >= 2**63:
            distinct, keys = np.unique(keys, return_inverse=True)
            size = len(distinct)
        keys = keys * (high - low + 1) + column.astype(np.int64) - low
        size *= high - low + 1
    return keys


def find_rows(haystack: Sequence[Ints], needles: Sequence[Ints]) -> Ints:
    """Finds, for each row of one table, the equal row in another table.

    Args:
        haystack: Columns ``[rows]`` of the table to search.
        needles: Columns ``[needles]`` of the rows to find, in the same order as in ``haystack``.

    Returns:
        Index of the first row in ``haystack`` that equals each needle, ``[needles] int64``, or -1
        if there is no equal row.
    """
    count = len(haystack[0])
    key = row_keys([np.concatenate(pair) for pair in zip(haystack, needles, strict=True)])
    order = np.argsort(key[:count], kind="stable")
    # Keys beyond the largest key are compared with the appended -1, which equals no key.
    ordered = np.append(key[:count][order], -1)
    positions = np.searchsorted(ordered[:-1], key[count:])
    is_equal = ordered[positions] == key[count:]
    rows: Ints = np.where(is_equal, np.append(order, -1)[positions], -1)
    return rows


def nth_of_equal(keys: Sequence[Ints]) -> Ints:
    """Numbers the rows from 0 within each group of consecutive rows with equal keys."""
    new = np.zeros(len(keys[0]), dtype=np.bool_)
    for key in keys:
        new |= np.diff(key, prepend=key[:1] - 1) != 0
    heads = np.flatnonzero(new)
    nth: Ints = np.arange(len(new)) - np.repeat(heads, np.diff(np.append(heads, len(new))))
    return nth


_SAME = ("iteration", "of", "chunk", "microbatch")
"""Columns that have the same values for the send and for the receive of a message."""


@dataclass(frozen=True, eq=False)
class Messages:
    """Contains messages whose send and receive were both recorded, as arrays ``[messages]``.

    Attributes:
        iteration: Iteration number, ``int64``.
        source: Global rank of the sender.
        target: Global rank of the receiver.
        of: Kind of the receiver's action that needs the message as input, as a number from
            :data:`KIND`.
        chunk: Model chunk of this action on the receiver.
        microbatch: Microbatch of this action.
        sent_ns: Start of the send in nanoseconds.
        arrived_ns: Time in nanoseconds at which the receiver noticed the message. The message may
            have arrived earlier, unless ``seen`` is true.
        taken_ns: Start in nanoseconds of the action that needs the message.
        bytes: Size of the message in bytes.
        seen: Whether ``arrived_ns`` is the exact arrival time, ``bool``.
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
        """Returns the number of messages."""
        return len(self.iteration)

    def by_link(self) -> Iterator[tuple[tuple[int, int], Ints]]:
        """Yields each link (sender, receiver) in ascending order, with the rows of its messages."""
        if not len(self):
            return
        order = np.lexsort((self.target, self.source))
        links = np.stack([self.source[order], self.target[order]], axis=1)
        begins = np.flatnonzero((links[1:] != links[:-1]).any(axis=1)) + 1
        for rows in np.split(order, begins):
            yield (int(self.source[rows[0]]), int(self.target[rows[0]])), rows


def match_messages(tables: Mapping[int, TraceTable]) -> Messages:
    """Matches the sends and receives of the messages between the ranks in ``tables``.

    Args:
        tables: Tables of spans, keyed by global rank. Messages from or to other ranks are ignored.

    Returns:
        Messages, sorted by receiver, in the order of the receiver's file.
    """
    ranks = sorted(tables)
    sides, owners = [], []
    for kind in ("send", "receive"):
        parts = [tables[rank].of_kind(kind) for rank in ranks]
        sides.append(TraceTable.concat(parts))
        owners.append(np.repeat(np.array(ranks, dtype=np.int64), [len(part) for part in parts]))
    (sends, receives), (source, target) = sides, owners
    rows = find_rows(
        [getattr(sends, name) for name in _SAME] + [source, sends.peer],
        [getattr(receives, name) for name in _SAME] + [receives.peer, target],
    )
    has_send = rows >= 0
    sent = sends.take(rows[has_send])
    got = receives.take(has_send)
    return Messages(
        iteration=got.iteration,
        source=got.peer.astype(np.int64),
        target=target[has_send],
        of=got.of,
        chunk=got.chunk,
        microbatch=got.microbatch,
        sent_ns=sent.start_ns,
        arrived_ns=got.start_ns,
        taken_ns=got.end_ns,
        bytes=got.bytes,
        seen=(got.reason == REASON["seen"]) | (got.reason == REASON["posted"]),
    )
