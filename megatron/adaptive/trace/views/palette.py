"""Defines the colours of the views.

Forward passes (F) are blue, backward passes (B) are green, weight-gradient passes (W) are orange,
and idle time is grey.

The lightness of an action depends on the index of its chunk, from dark (chunk 0) to light. People
with common kinds of colour blindness can distinguish the hues, because blue stays blue and this
green looks yellow-brown to them. The colour of a wait depends on its cause and is lighter than any
action. Idle time without a recorded wait is grey.
"""

from __future__ import annotations

import colorsys
from dataclasses import dataclass

from megatron.adaptive.trace.trace_format import CAUSES, DRAWN_ACTIONS, Span

ACTION_NAMES = {"F": "forward", "B": "backward", "W": "weight"}
IDLE = "E4E4E7"

WAIT_NAMES = {
    "input": "wait for input",
    "memory": "wait for memory",
    "order": "wait for order",
    "group": "wait for group",
    "": "wait, cause unknown",
}
"""Legend text for each cause of a wait (``Span.reason``). The empty key stands for other causes.
"""
WAIT_COLORS = {
    "input": "F6C9C9",
    "memory": "D6C4EE",
    "order": "F7E7A1",
    "group": "B5E3DF",
    "": "CACACF",
}
"""Fill colour for each cause of a wait, as ``RRGGBB``."""

OTHER_COLORS = {
    "data": "#B4477E",
    "reduce": "#5B5F97",
    "collective": "#3E7C8A",
    "optimizer": "#8A6D5B",
    "evaluate": "#9AA5B1",
    "checkpoint": "#6B7280",
    "probe": "#A3A380",
    "other": "#D4D4D8",
}
OTHER_NAMES = {"data": "reading data", "reduce": "gradient reduction"}
LEGEND_CHUNKS = 4
"""Maximum number of chunks in the legend. If there are more, an evenly spaced sample is listed.
"""

_HUES = {"F": (0.585, 0.72), "B": (0.350, 0.52), "W": (0.095, 0.85)}
_DARK, _LIGHT, _SINGLE = 0.33, 0.78, 0.44


def chunk_color(action: str, chunk: int, num_chunks: int) -> str:
    """Returns the fill colour of ``chunk`` for a kind of action, as ``RRGGBB``.

    ``num_chunks`` is the number of chunks per rank. The colours are unique for up to about 100
    chunks.
    """
    hue, saturation = _HUES[action]
    if num_chunks <= 1:
        lightness = _SINGLE
    elif num_chunks <= 3:
        lightness = _SINGLE - 0.06 + 0.19 * chunk
    else:
        lightness = _DARK + (_LIGHT - _DARK) * chunk / (num_chunks - 1)
    channels = colorsys.hls_to_rgb(hue, lightness, saturation)
    return "".join(f"{round(255 * channel):02X}" for channel in channels)


def cause_of(wait: Span) -> str:
    """Returns the cause of ``wait``, or an empty string if the cause has no separate colour."""
    return wait.reason if wait.reason in WAIT_NAMES else ""


def fill_of(span: Span | None, num_chunks: int) -> str:
    """Returns the fill colour of ``span`` as ``RRGGBB``. ``None`` stands for idle time."""
    if span is None:
        return IDLE
    if span.action == "wait":
        return WAIT_COLORS[cause_of(span)]
    return chunk_color(span.action, span.chunk, num_chunks)


def text_color(fill: str) -> str:
    """Returns white or almost black as ``RRGGBB``, whichever has more contrast with ``fill``."""
    channels = [int(fill[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "FFFFFF" if luminance < 0.22 else "1A1A1A"


@dataclass(frozen=True)
class Category:
    """Describes a category of spans that are drawn in the same colour.

    Attributes:
        name: Text for the category in the legend.
        color: Colour in CSS syntax.
        kind: Kind of span from ``trace_format.KINDS``, or ``other``.
        chunk: Index of the chunk for an action, or -1 for other spans.
        cause: Cause of a wait; empty for other spans.
        in_legend: Whether the legend lists the category.
    """

    name: str
    color: str
    kind: str
    chunk: int = -1
    cause: str = ""
    in_legend: bool = True


def categories(num_chunks: int) -> list[Category]:
    """Returns all categories of spans for ``num_chunks`` chunks, in the order of the legend."""
    shown = {round(i * (num_chunks - 1) / (LEGEND_CHUNKS - 1)) for i in range(LEGEND_CHUNKS)}
    listed = [
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
        listed.append(Category(WAIT_NAMES[cause], color, "wait", cause=cause))
    for kind, color in OTHER_COLORS.items():
        listed.append(Category(OTHER_NAMES.get(kind, kind), color, kind))
    return listed
