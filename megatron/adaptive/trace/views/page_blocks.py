"""What the page holds of one iteration: numbers in columns, compressed, as text.

A block is a head in JSON, which names columns and their types, and the columns behind each other,
deflated with gzip and written in base64. Every column has the narrowest type that holds it.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.trace.event import DRAWN_ACTIONS
from megatron.adaptive.trace.messages import Messages
from megatron.adaptive.trace.table import Ints
from megatron.adaptive.trace.views.page_spans import Rows

__all__ = ["encode", "message_columns", "simulated_columns", "span_columns"]

PS_PER_NS = 1000
TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float64")
"""Of a column, narrowest first; all have an array in JavaScript."""


def encode(columns: Mapping[str, Ints], **head: Any) -> dict[str, Any]:
    """A block.

    Args:
        columns: whole numbers below 2^53.
        head: what else to tell, as JSON.
    """
    found, parts = [], []
    for name, column in columns.items():
        narrow = column.astype(_type_of(column))
        found.append((name, narrow))
    # Wide ones first, so that each begins at a multiple of its width.
    found.sort(key=lambda pair: -pair[1].itemsize)
    for _, column in found:
        parts.append(column.tobytes())
    listed = [[name, column.dtype.name, len(column)] for name, column in found]
    packed = gzip.compress(b"".join(parts), 6, mtime=0)
    return {**head, "columns": listed, "data": base64.b64encode(packed).decode("ascii")}


def span_columns(rows: Rows, num_rows: int, start_ns: int, unit_ns: int) -> dict[str, Ints]:
    """Columns of bars; ``offset`` says where each row begins.

    Args:
        rows: the bars.
        num_rows: how many rows there are.
        start_ns: time 0 of the page.
        unit_ns: of all times.
    """
    columns = {name: column for name, column in rows.columns.items() if name != "row"}
    columns["offset"] = np.searchsorted(rows.columns["row"], np.arange(num_rows + 1))
    start = rows.columns["start"] - start_ns
    end = start + rows.columns["length"]
    columns["start"] = start // unit_ns
    columns["length"] = end // unit_ns - columns["start"]
    return columns


def message_columns(
    messages: Messages, row_of: Mapping[int, int], start_ns: int, unit_ns: int, limit: int
) -> dict[str, Ints]:
    """Columns of the messages between rows, ordered by sending.

    Args:
        messages: of one iteration.
        row_of: rows by global rank.
        start_ns: time 0 of the page.
        unit_ns: of all times.
        limit: of more messages than this none is kept.
    """
    order = np.argsort(messages.sent_ns, kind="stable")
    if len(order) > limit:
        order = order[:0]
    rows = np.full(max(row_of, default=0) + 1, -1, dtype=np.int64)
    rows[list(row_of)] = list(row_of.values())
    return {
        "sent": (messages.sent_ns[order] - start_ns) // unit_ns,
        "arrived": (messages.arrived_ns[order] - start_ns) // unit_ns,
        "source": rows[messages.source[order]],
        "target": rows[messages.target[order]],
        "m_bytes": messages.bytes[order],
    }


def simulated_columns(result: SimResult | None, num_chunks: int, unit_ns: int) -> dict[str, Ints]:
    """Columns of a simulated step, from its start; empty ones for none."""
    spans = () if result is None else result.spans
    kinds = {kind: number for number, kind in enumerate(DRAWN_ACTIONS)}
    flat = [
        (
            kinds[span.action.kind.value] * num_chunks + span.action.chunk,
            span.action.microbatch,
        )
        for row in spans
        for span in row
    ]
    labels = np.array(flat, dtype=np.int64).reshape(-1, 2)
    starts = () if result is None else result.starts_ps
    ends = () if result is None else result.ends_ps
    none = np.zeros(0, dtype=np.int64)
    start = np.concatenate([none, *starts]) // (PS_PER_NS * unit_ns)
    end = np.concatenate([none, *ends]) // (PS_PER_NS * unit_ns)
    return {
        "s_start": start,
        "s_length": end - start,
        "s_category": labels[:, 0],
        "s_microbatch": labels[:, 1],
        "s_offset": np.cumsum([0, *(len(row) for row in spans)]),
    }


def _type_of(column: Ints) -> str:
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    for name in TYPES[:-1]:
        limits = np.iinfo(name)
        if limits.min <= low and high <= limits.max:
            return name
    return TYPES[-1]
