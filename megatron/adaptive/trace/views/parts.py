"""Where the time of a step went on each rank: parts that together are the step.

::

    |<------------------------------ step ------------------------------>|
    | before | F | F | wait: input | B | rest | F | B | wait: memory | B | after |

A wait before the first action belongs to ``before``: the pipeline fills. ``rest`` is what neither
an action nor a wait explains: handing over results, choosing, reading the clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.adaptive.trace.figures import WAIT_CAUSES, Floats, RunFigures
from megatron.adaptive.trace.summary import NS_PER_MS

__all__ = ["PARTS", "PART_NAMES", "format_parts", "parts_ms"]

PARTS = ("busy", *WAIT_CAUSES[1:], WAIT_CAUSES[0], "before", "after", "rest")
"""The last axis of :func:`parts_ms`."""

PART_NAMES = {
    "busy": "busy",
    **{cause: f"wait {cause}" for cause in WAIT_CAUSES},
    "before": "before",
    "after": "after",
    "rest": "rest",
}
"""Heads of columns."""


def parts_ms(figures: RunFigures) -> Floats:
    """The parts of each step on each rank.

    Args:
        figures: of the pipeline's ranks.

    Returns:
        ``[iterations, ranks, parts]`` in milliseconds, by :data:`PARTS`; the sum over the parts is
        the step's time, but where clocks disagree. NaN where nothing was recorded.
    """
    waits = figures.wait_in_step_ns.copy()
    first = np.minimum(figures.first_wait_ns, figures.before_ns)
    rows, columns = np.nonzero(first)
    waits[rows, columns, figures.first_cause[rows, columns]] -= first[rows, columns]
    parts = np.concatenate(
        [
            figures.busy_ns[..., None],
            waits[..., 1:],
            waits[..., :1],
            figures.before_ns[..., None],
            figures.after_ns[..., None],
        ],
        axis=-1,
    ).astype(np.float64)
    rest = np.maximum(0, figures.step_ns - parts.sum(axis=-1))
    parts = np.concatenate([parts, rest[..., None]], axis=-1) / NS_PER_MS
    parts[figures.num_actions == 0] = np.nan
    return parts


def format_parts(labels: Sequence[str], parts: Floats) -> str:
    """An aligned table, one line per rank, without a final line end; parts that are nil left out.

    Args:
        labels: of the ranks.
        parts: ``[ranks, parts]`` in milliseconds, no NaN.
    """
    shown = [
        number for number, name in enumerate(PARTS) if name == "busy" or parts[:, number].any()
    ]
    head = ["of the step, ms", *(PART_NAMES[PARTS[number]] for number in shown)]
    step = np.maximum(parts.sum(axis=1), 1e-9)
    table = [head]
    for label, row, whole in zip(labels, parts, step.tolist(), strict=True):
        cells = [f"{row[number]:.2f} ({row[number] / whole:.0%})" for number in shown]
        table.append([label, *cells])
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in table
    )
