"""One iteration of one pipeline as columns for the page, with fewer spans where it has too many.

Level of detail: spans shorter than a bin of time are merged, bin by bin, into one bar per rank and
colour. A bar is as long as what it stands for took together, so sums stay true; bars of a bin lie
one behind the other from where its first span began.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.adaptive.trace.event import CAUSES, DRAWN_ACTIONS
from megatron.adaptive.trace.table import KIND, OTHER, REASON, Ints, TraceTable
from megatron.adaptive.trace.views.palette import (
    ACTION_NAMES,
    WAIT_COLORS,
    WAIT_NAMES,
    chunk_color,
)

OTHER_COLORS = {
    "data": "#B4477E",
    "reduce": "#5B5F97",
    "collective": "#3E7C8A",
    "optimizer": "#8A6D5B",
    "evaluate": "#9AA5B1",
    "checkpoint": "#6B7280",
    "other": "#D4D4D8",
}
OTHER_NAMES = {"data": "reading data", "reduce": "gradient reduction"}
LEGEND_CHUNKS = 4
"""Up to so many chunks the legend names each; beyond, some of them, evenly spaced."""

_MERGED = {
    **dict.fromkeys(("length", "count", "bytes"), np.add),
    **dict.fromkeys(("in_flight_bytes", "queue_depth"), np.maximum),
    "start": np.minimum,
}
"""Joins columns of merged spans; of the other columns the first value counts."""
_NOTHING = {"microbatch": -1, "piece": 0, "reason": 0, "peer": -1, "of": -1}
"""Values of what a bar that stands for several spans does not have."""
_SPAN_COLUMNS = ("microbatch", "bytes", "in_flight_bytes", "queue_depth", "peer", "piece", "of")


@dataclass(frozen=True)
class Category:
    """Describes a category of spans with a colour of its own.

    Attributes:
        name: in the legend.
        color: CSS.
        kind: one of ``event.KINDS``, or ``other``.
        chunk: of an action, -1 for what is none.
        cause: of a wait.
        in_legend: whether the legend names it.
    """

    name: str
    color: str
    kind: str
    chunk: int = -1
    cause: str = ""
    in_legend: bool = True


@dataclass(frozen=True, eq=False)
class Rows:
    """Bars of the rows of a chart, ordered by row and start; every column is ``[bars]``.

    Attributes:
        columns: ``row``, ``start`` (ns, absolute), ``length`` (ns), ``category``, ``chunk``,
            ``count`` (spans it stands for) and others of a table by name.
        within: the category whose bars lie within others of their row.
        merged_below_ns: spans shorter than this were merged, 0 for none.
    """

    columns: dict[str, Ints]
    within: int
    merged_below_ns: int = 0

    def __len__(self) -> int:
        """The number of bars."""
        return len(self.columns["row"])


def categories(num_chunks: int) -> list[Category]:
    """Everything that can have a colour, in the order of a legend."""
    shown = {round(i * (num_chunks - 1) / (LEGEND_CHUNKS - 1)) for i in range(LEGEND_CHUNKS)}
    found = [
        Category(
            f"{ACTION_NAMES[kind]} {chunk}" if num_chunks > 1 else ACTION_NAMES[kind],
            f"#{chunk_color(kind, chunk, num_chunks)}",
            kind,
            chunk,
            in_legend=chunk in shown or num_chunks <= LEGEND_CHUNKS,
        )
        for kind in DRAWN_ACTIONS
        for chunk in range(num_chunks)
    ]
    for cause in (*CAUSES, ""):
        color = f"#{WAIT_COLORS[cause]}"
        found.append(Category(WAIT_NAMES[cause], color, "wait", cause=cause))
    for kind, color in OTHER_COLORS.items():
        found.append(Category(OTHER_NAMES.get(kind, kind), color, kind))
    return found


def rows_of(tables: list[TraceTable], num_chunks: int) -> Rows:
    """The bars of some ranks' spans; messages and the step as a whole are none.

    Args:
        tables: spans of one iteration by row.
        num_chunks: chunks per rank.
    """
    rows = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    table = TraceTable.concat(tables)
    category = _category_of(table, num_chunks)
    keep = category >= 0
    rows, table, category = rows[keep], table.take(keep), category[keep]
    order = np.lexsort((table.start_ns, rows))
    table = table.take(order)
    columns = {
        "row": rows[order],
        "start": table.start_ns,
        "length": table.duration_ns,
        "category": category[order],
        "chunk": table.chunk.astype(np.int64),
        "reason": table.reason.astype(np.int64),
        "count": np.ones(len(table), dtype=np.int64),
        **{name: getattr(table, name).astype(np.int64) for name in _SPAN_COLUMNS},
    }
    return Rows(columns, _first_other(num_chunks) + list(OTHER_COLORS).index("data"))


def merged(rows: Rows, budget: int) -> Rows:
    """Rows with about ``budget`` bars at most, short ones merged."""
    if len(rows) <= budget:
        return rows
    start = rows.columns["start"]
    extent = int((start + rows.columns["length"]).max() - start.min()) + 1
    num_rows = int(rows.columns["row"].max()) + 1
    width = max(1, extent * num_rows * 2 // max(budget, 1))
    while True:
        found = _merged_below(rows, min(width, extent))
        if len(found) <= budget or width >= extent:
            return found
        width = width * 3 // 2 + 1


def stage_shares(
    rows: Rows, num_rows: int, num_categories: int, start_ns: int, end_ns: int, bins: int
) -> Ints:
    """Returns the share of each bin of time that each row spent on each category.

    Args:
        rows: the bars; several ranks may share a row, their shares then add up.
        num_rows: rows of the result.
        num_categories: categories of the result.
        start_ns: where the first bin begins.
        end_ns: where the last one ends.
        bins: how many there are.

    Returns:
        ``[rows, categories, bins] float64``, 1 for a rank that did nothing else.
    """
    width = max(1.0, (end_ns - start_ns) / bins)
    begin = np.clip((rows.columns["start"] - start_ns) / width, 0, bins)
    end = np.clip((rows.columns["start"] + rows.columns["length"] - start_ns) / width, 0, bins)
    place = (rows.columns["row"] * num_categories + rows.columns["category"]) * (bins + 2)
    first, last = begin.astype(np.int64), end.astype(np.int64)
    size = num_rows * num_categories * (bins + 2)

    def added(at: Ints, values: Ints) -> Ints:
        sums: Ints = np.bincount(place + at, weights=values, minlength=size)
        return sums

    # Whole bins between the ends by a running sum of +1 and -1, the ends by what they lack.
    whole = added(first, np.ones(len(first))) - added(last, np.ones(len(last)))
    parts = added(last, end - last) - added(first, begin - first)
    shape = (num_rows, num_categories, bins + 2)
    shares: Ints = whole.reshape(shape).cumsum(axis=2) + parts.reshape(shape)
    return shares[:, :, :bins]


def _category_of(table: TraceTable, num_chunks: int) -> Ints:
    """``[spans] int64``: places in :func:`categories`, -1 for what is no bar."""
    waits = len(DRAWN_ACTIONS) * num_chunks
    others = _first_other(num_chunks)
    by_kind = np.full(OTHER + 1, -1, dtype=np.int64)
    for number, kind in enumerate(OTHER_COLORS):
        by_kind[KIND.get(kind, OTHER)] = others + number
    by_cause = np.full(len(REASON), waits + len(CAUSES), dtype=np.int64)
    by_cause[[REASON[cause] for cause in CAUSES]] = waits + np.arange(len(CAUSES))
    category: Ints = by_kind[table.kind]
    actions, idle = table.where(*DRAWN_ACTIONS), table.where("wait")
    chunk = np.clip(table.chunk, 0, num_chunks - 1).astype(np.int64)
    category[actions] = (table.kind.astype(np.int64) * num_chunks + chunk)[actions]
    category[idle] = by_cause[table.reason[idle]]
    return category


def _first_other(num_chunks: int) -> int:
    """The place in :func:`categories` behind actions and waits."""
    return len(DRAWN_ACTIONS) * num_chunks + len(CAUSES) + 1


def _merged_below(rows: Rows, width: int) -> Rows:
    """Spans shorter than a bin of ``width`` ns merged."""
    columns = rows.columns
    is_short = (columns["length"] < width) & (columns["length"] >= 0)
    bins = (columns["start"] - columns["start"].min()) // width
    place_of = (columns["row"] * (int(bins.max()) + 1) + bins)[is_short]
    short = {name: column[is_short] for name, column in columns.items()}
    order = np.lexsort((short["category"], place_of))
    short = {name: column[order] for name, column in short.items()}
    is_new = (np.diff(place_of[order], prepend=-1) != 0) | (
        np.diff(short["category"], prepend=-1) != 0
    )
    heads = np.flatnonzero(is_new)
    new = {
        name: _MERGED[name].reduceat(column, heads) if name in _MERGED else column[heads]
        for name, column in short.items()
    }
    alone = new["count"] == 1
    for name, nothing in _NOTHING.items():
        new[name] = np.where(alone, new[name], nothing)
    _pack(new, 2 * place_of[order][heads] + (new["category"] == rows.within))
    both = {name: np.concatenate([columns[name][~is_short], new[name]]) for name in columns}
    order = np.lexsort((both["start"], both["row"]))
    return Rows({name: column[order] for name, column in both.items()}, rows.within, width)


def _pack(columns: dict[str, Ints], bin_of: Ints) -> None:
    """Lay the bars of each bin one behind the other, from the start of the first."""
    order = np.lexsort((columns["start"], bin_of))
    start, length, bins = columns["start"][order], columns["length"][order], bin_of[order]
    heads = np.flatnonzero(np.diff(bins, prepend=-1))
    sizes = np.diff(np.append(heads, len(bins)))
    before = np.cumsum(length) - length
    packed = np.repeat(start[heads] - before[heads], sizes) + before
    moved = np.empty_like(packed)
    moved[order] = packed
    columns["start"] = moved
