"""Text pictures of a schedule, by position.

Owns text only; spreadsheets and images of real runs are the business of the trace views.
"""

from __future__ import annotations

from megatron.adaptive.schedule.schedule import Schedule

_CONTEXT = 6
_ELLIPSIS = "..."


def render_schedule(schedule: Schedule, *, mark: tuple[int, int] | None = None) -> str:
    """Draw a schedule, a row per rank, a column per position in its order.

    ::

        rank 0 | F0-0 F0-1 B0-0 W0-0 B0-1 W0-1
        rank 1 | F0-0 B0-0 F0-1 B0-1 W0-0 W0-1

    Further pieces of a weight gradient carry their number: ``W0-0 W0-0.1 W0-0.2``.

    Args:
        schedule: need not be valid.
        mark: ``(rank, position)`` of a cell to put in brackets; only the columns around it are
            drawn. The position after a rank's last action is allowed and marks its missing end.

    Returns:
        Lines without a final line feed.
    """
    columns = max((len(order) for order in schedule.orders), default=0)
    first, last = 0, columns
    if mark is not None:
        first, last = max(0, mark[1] - _CONTEXT), max(mark[1] + 1, min(columns, mark[1] + _CONTEXT))
    rows = []
    for rank, order in enumerate(schedule.orders):
        cells = [str(action) for action in order[first:last]]
        if mark is not None and mark[0] == rank:
            at = mark[1] - first
            cells += ["missing"] * (at + 1 - len(cells))
            cells[at] = f"[{cells[at]}]"
        if first > 0:
            cells.insert(0, _ELLIPSIS)
        if len(order) > last:
            cells.append(_ELLIPSIS)
        rows.append(cells)
    width = max((len(cell) for cells in rows for cell in cells), default=0)
    digits = len(str(max(len(rows) - 1, 0)))
    return "\n".join(
        f"rank {rank:>{digits}} | {' '.join(cell.ljust(width) for cell in cells)}".rstrip()
        for rank, cells in enumerate(rows)
    )
