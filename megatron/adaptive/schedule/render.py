"""Text pictures of a schedule (by position) and of a simulated step (by time).

Owns text only; spreadsheets and images of real runs are the business of the trace views.
"""

from __future__ import annotations

from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.simulate import SimResult, SimSpan

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
    return _table(rows)


def render_timeline(result: SimResult, *, max_columns: int = 160) -> str:
    """Draw a simulated step, a row per rank, a column per slice of time.

    An action shows its name in its first column and ``=`` in further ones; ``.`` is idle time.
    Actions shorter than half a column may not show.

    ::

        rank 0 | F0-0 F0-1 .    .    B0-0 =    .    B0-1 =
        rank 1 | .    F0-0 B0-0 =    F0-1 B0-1 =    .    .

    Args:
        result: what ``simulate`` returned.
        max_columns: most columns. A column is as long as the shortest action, or longer.

    Returns:
        Lines without a final line feed.
    """
    lengths = [span.end_s - span.start_s for spans in result.spans for span in spans]
    shortest = min((length for length in lengths if length > 0), default=1.0)
    column_s = max(shortest, result.makespan_s / max_columns)
    # A hair is taken off so that a step that ends on a column's edge opens no further column.
    num_columns = max(1, int(result.makespan_s / column_s - 1e-6) + 1)
    return _table([_cells(spans, column_s, num_columns) for spans in result.spans])


def _cells(spans: tuple[SimSpan, ...], column_s: float, num_columns: int) -> list[str]:
    cells = ["."] * num_columns
    named = -1
    index = 0
    for column in range(num_columns):
        middle_s = (column + 0.5) * column_s
        while index < len(spans) and spans[index].end_s <= middle_s:
            index += 1
        if index < len(spans) and spans[index].start_s <= middle_s:
            cells[column] = "=" if named == index else str(spans[index].action)
            named = index
    return cells


def _table(rows: list[list[str]]) -> str:
    width = max((len(cell) for cells in rows for cell in cells), default=0)
    digits = len(str(max(len(rows) - 1, 0)))
    return "\n".join(
        f"rank {rank:>{digits}} | {' '.join(cell.ljust(width) for cell in cells)}".rstrip()
        for rank, cells in enumerate(rows)
    )
