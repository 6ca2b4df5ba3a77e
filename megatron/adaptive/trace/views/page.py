"""Writes a run as a self-contained ``.html`` page for the browser.

The page contains plotly.js, the package's scripts and the trace's spans (named time intervals), and
loads no other files. The timeline has one row per rank with actions and waits, and arrows from
sends to receives. The page can also show the size of the activations in memory, and the ideal step,
in which no rank is slower than the others. A slider selects the iteration. To open quickly, the
page of a large run contains only some iterations and replicas, and lists what is omitted.

A page contains at most :data:`MAX_SPANS` spans. If the run has more, the page contains fewer
iterations. If a single step has too many spans, its shortest spans are omitted. The page draws
visible spans as bars. If too many spans are visible, it draws the fraction of time spent on each
kind of span instead (``page_draw.js``).
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs

from megatron.adaptive.config.input_files import printable
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.metrics import RunFigures, run_figures
from megatron.adaptive.trace.read import RankTrace, RunTrace, describe_numbers
from megatron.adaptive.trace.span_columns import (
    KIND,
    OTHER,
    REASON,
    Ints,
    Messages,
    TraceTable,
    match_messages,
)
from megatron.adaptive.trace.step_view import microbatches_text, stages_text
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, KINDS, REASONS
from megatron.adaptive.trace.views.palette import IDLE, categories, text_color
from megatron.adaptive.trace.whatif.operations import ideal_steps

MAX_SPANS = 1_000_000
"""Maximum number of spans in a page. It keeps the file below 30 MB."""
MAX_ACTIONS = 40_000
"""Maximum number of actions in a step. For larger steps, the page omits the ideal step."""

SCRIPTS = ("page_data.js", "page_draw.js", "page.js")


@dataclass(frozen=True)
class _Group:
    """Contains the rows that a page shows at the same time: the ranks of one replica, or all ranks.

    Attributes:
        name: Name that the user selects on the page to show the group.
        labels: Label of each row.
        traces: Trace of each row's rank, or ``None`` if it was not recorded.
    """

    name: str
    labels: list[str]
    traces: Sequence[RankTrace | None]


def write_page(
    run: RunTrace,
    target: str | os.PathLike[str],
    iterations: Sequence[int],
    dp_rank: int | None = None,
    *,
    figures: RunFigures | None = None,
    labels: Mapping[int, str] | None = None,
    nodes: Mapping[str, Sequence[int]] | None = None,
) -> list[str]:
    """Writes the page of a run to ``target``, and replaces an existing file.

    Args:
        run: Trace of the run.
        target: Path of the ``.html`` file.
        iterations: Numbers of the iterations to show. If the run is large, only some are shown.
        dp_rank: Data-parallel replica to show. ``None`` means all replicas, or some of them if
            there are many.
        figures: Statistics of all ranks in these iterations, such as step and idle times, or
            ``None`` to compute them.
        labels: Row label of each global rank to show. If not ``None``, all these ranks are shown in
            one chart instead of one chart per replica.
        nodes: Row numbers of the ranks on each node, keyed by the node's name, so that the user can
            select a node. Only used together with ``labels``.

    Returns:
        Lines that describe the omitted parts of the run.

    Raises:
        TraceError: An iteration or the replica does not exist or has no actions, or the file cannot
            be written.
    """
    for iteration in iterations:
        run.require_iteration(iteration)
    ranks = None if dp_rank is None else [t.header.rank for t in run.replica(dp_rank) if t]
    figures = figures or run_figures(run, iterations, ranks=ranks)
    shown, groups, notes = choose(run, figures, iterations, dp_rank, labels)

    def blocks() -> Iterator[tuple[str, Any]]:
        yield from _blocks(run, figures, shown, groups, notes)
        head = _head(run, shown, groups)
        yield "page", {**head, "nodes": nodes or {}, "notes": [*run.notes(), *notes]}

    write_html(target, f"Trace of {run.run}", __package__, "page", blocks(), SCRIPTS)
    return notes


# Matches JSON escapes of unprintable characters. A backslash is added in front of each, so that the
# page shows the escape instead of the character.
_UNPRINTABLE = re.compile(
    r"(?<!\\)((?:\\\\)*)\\(u(?:00[01]|00[89]|007(?=f)|061(?=c)|200(?=[ef])|202(?=[89a-e])|206(?=[6-9])).)"
)


def write_html(
    target: str | os.PathLike[str],
    title: str,
    package: str,
    name: str,
    blocks: Iterable[tuple[str, Any]],
    scripts: Sequence[str],
) -> None:
    """Writes a self-contained HTML page to ``target``, and replaces an existing file.

    Args:
        target: Path of the ``.html`` file.
        title: Title of the browser window.
        package: Python package whose folder ``assets`` contains ``NAME.html``, ``NAME.css`` and the
            scripts.
        name: Name of the template (``NAME``). In the template, ``{{blocks}}`` is replaced with the
            data and the scripts.
        blocks: (ID, content) of each block of data. The content is written as JSON.
        scripts: File names of the scripts, in the order in which they run after plotly.js.

    Raises:
        TraceError: The file cannot be written.
    """

    def asset(file_name: str) -> str:
        return (resources.files(package) / "assets" / file_name).read_text(encoding="utf-8")

    before, after = asset(f"{name}.html").split("{{blocks}}")
    before = before.replace("{{title}}", escape(printable(title))).replace(
        "{{style}}", asset(f"{name}.css")
    )
    with replaced(target) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(before)
        for block, content in blocks:
            text = _UNPRINTABLE.sub(r"\1\\\\\2", json.dumps(content)).replace("<", "\\u003c")
            file.write(f'<script type="application/json" id="{block}">{text}</script>\n')
        for part in (plotly_js(), "\n".join(map(asset, scripts))):
            file.write(f"<script>{part}</script>\n")
        file.write(after)


def plotly_js() -> str:
    """Returns the code of plotly.js, escaped for a ``<script>`` element."""
    text: str = get_plotlyjs().replace("</script", "<\\/script")
    return text


def _label(pp_rank: int, trace: RankTrace | None) -> str:
    if trace is None:
        return f"stage {pp_rank}: no trace"
    text = stages_text(trace.header, pp_rank, 4)
    return text if trace.header.rank == pp_rank else f"{text}, rank {trace.header.rank}"


def _head(run: RunTrace, iterations: Sequence[int], groups: Sequence[_Group]) -> dict[str, Any]:
    """Returns the data about the whole run: title, kinds, groups and iterations."""
    header = next(trace for group in groups for trace in group.traces if trace).header
    last = iterations[-1]
    present = [trace for group in groups for trace in group.traces if trace]
    largest = max(present, key=lambda trace: trace.num_microbatches.get(last, 0))
    work = microbatches_text(largest.num_microbatches.get(last, 0), largest.slices(last))
    shape = (
        f"{header.schedule}, {run.num_ranks} pipeline ranks x {run.num_chunks} "
        f"chunk{'s' * (run.num_chunks > 1)}, {work}, "
        f"world size {run.world_size}"
    )
    return {
        "title": f"Pipeline trace of {run.run}",
        "subtitle": shape + run.bubble_note,
        "idle": f"#{IDLE}",
        "kinds": KINDS,
        "reasons": REASONS,
        "categories": [
            {**asdict(category), "ink": f"#{text_color(category.color[1:])}"}
            for category in categories(run.num_chunks)
        ],
        "groups": [{"name": group.name, "rows": group.labels} for group in groups],
        "iterations": iterations,
    }


def _blocks(
    run: RunTrace,
    figures: RunFigures,
    iterations: Sequence[int],
    groups: Sequence[_Group],
    notes: list[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (ID, data block) for each group and iteration.

    Appends notes on omitted parts to ``notes``.
    """
    num_short = 0
    num_unsimulated = 0
    for index, iteration in enumerate(iterations):
        idle = figures.bubble_fraction[np.searchsorted(figures.iterations, iteration)]
        for number, group in enumerate(groups):
            ranks = [trace.header.rank for trace in group.traces if trace]
            group_idle = idle[np.isin(figures.ranks, ranks) & ~np.isnan(idle)]
            bubble = float(group_idle.mean()) if len(group_idle) else 0.0
            block = _block(run, iteration, group, MAX_SPANS // len(groups), bubble)
            num_short += block["left_out"]
            num_unsimulated += not block["simulated_ms"]
            yield f"block-{number}-{index}", block
    if num_short:
        notes.append(f"the {num_short:,} shortest spans of large steps are not drawn")
    if num_unsimulated:
        notes.append(f"the ideal step is missing for {num_unsimulated} incomplete or large steps")


def _block(
    run: RunTrace, iteration: int, group: _Group, budget: int, bubble: float
) -> dict[str, Any]:
    """Returns the data block for one iteration of one group of ranks.

    Args:
        run: Trace of the run.
        iteration: Iteration number.
        group: Group of ranks whose spans are included.
        budget: Maximum number of bars (drawn spans) in the block.
        bubble: Mean idle fraction of the step over the group's ranks.
    """
    nothing = TraceTable.concat([])
    tables = [trace.table([iteration]) if trace else nothing for trace in group.traces]
    rows, left_out = _longest(rows_of(tables, run.num_chunks), budget)
    start_ns, end_ns, step_ns = _extent(tables, rows)
    # The page initially shows the time up to the end of the optimizer step.
    updates = [table.of_kind("reduce", "optimizer").end_ns for table in tables]
    updated_ns = [int(end.max()) - start_ns for end in updates if len(end)]
    head = {
        "step_ms": step_ns / 1e6,
        "extent_ms": (end_ns - start_ns) / 1e6,
        "shown_ms": max([step_ns, *updated_ns]) / 1e6,
        "bubble": bubble,
        "slices": next((t.slices(iteration) for t in group.traces if t), 1),
    }
    present = {trace.header.rank: row for row, trace in enumerate(group.traces) if trace}
    messages = match_messages({rank: tables[row] for rank, row in present.items()})
    actions = sum(int(table.where(*DRAWN_ACTIONS).sum()) for table in tables)
    ideal_tables = None
    if 0 < actions <= MAX_ACTIONS and len(present) == len(tables):
        ideal_tables = ideal_steps(run, list(present), [iteration])
    ideal = TraceTable.concat(list((ideal_tables or {}).values()))
    first_ns = int(ideal.start_ns.min()) if ideal_tables else 0
    last_ns = int(ideal.end_ns.max()) if ideal_tables else 0
    # Store times as multiples of ``unit_ns``, so that they fit into 32 bits.
    unit_ns = 1 + (end_ns - start_ns) // (2**31 - 1)
    lower = rows_of([(ideal_tables or {}).get(rank, nothing) for rank in present], run.num_chunks)
    bars = span_columns(lower, len(tables), first_ns, unit_ns)
    columns = {
        **span_columns(rows, len(tables), start_ns, unit_ns),
        **message_columns(messages, present, start_ns, unit_ns),
        **{f"s_{name}": bars[name] for name in (*_IDEAL_COLUMNS, "offset")},
    }
    return encode(
        columns,
        unit_ms=unit_ns / 1e6,
        simulated_ms=(last_ns - first_ns) / 1e6,
        left_out=left_out,
        **head,
    )


def _extent(tables: list[TraceTable], rows: Mapping[str, Ints]) -> tuple[int, int, int]:
    """Returns the start, the end and the step time of an iteration.

    Returns:
        Start of the first action, end of the last bar, and time from the start of the first action
        to the end of the last action, all in nanoseconds.
    """
    drawn = TraceTable.concat([table.of_kind(*DRAWN_ACTIONS) for table in tables])
    bars = rows["start"]
    if not len(drawn):
        start = int(bars.min()) if len(bars) else 0
        return start, start + int(rows["length"].max(initial=1)), 0
    start, end = int(drawn.start_ns.min()), int(drawn.end_ns.max())
    return start, max(int((bars + rows["length"]).max()), start + 1), end - start


MAX_ITERATIONS = 20
"""Maximum number of iterations in a page."""
SLOWEST = 4
"""Number of slowest iterations that a page always contains."""
MAX_REPLICAS = 4
"""Maximum number of replicas to show. If there are more, only the first and the slowest are shown.
"""


def choose(
    run: RunTrace,
    figures: RunFigures,
    iterations: Sequence[int],
    dp_rank: int | None,
    labels: Mapping[int, str] | None,
) -> tuple[list[int], list[_Group], list[str]]:
    """Selects the iterations and replicas that a page shows.

    Args:
        run: Trace of the run.
        figures: Statistics of the run, such as step times.
        iterations: Numbers of the iterations to select from.
        dp_rank: Data-parallel replica to show, or ``None`` to select from all replicas.
        labels: Row label of each global rank, as in :func:`write_page`, or ``None``.

    Returns:
        Selected iterations in ascending order, groups of ranks, and lines that describe what is
        omitted.

    Raises:
        TraceError: Nothing was recorded in these iterations.
    """
    recorded = set(figures.iterations[figures.num_actions.any(axis=1)].tolist())
    asked = sorted(set(iterations) & recorded)
    if not asked:
        raise TraceError(
            f"iterations {describe_numbers(iterations)} in {run.origin} do not contain F, B or W "
            "actions to draw; choose other iterations"
        )
    groups, notes = _groups(run, figures, dp_rank, labels)
    ranks = [trace.header.rank for group in groups for trace in group.traces if trace]
    spans = max(1, run.num_spans(asked, ranks) // len(asked))
    shown = _iterations(figures, asked, max(1, min(MAX_ITERATIONS, MAX_SPANS // spans)))
    if len(shown) < len(asked):
        notes.append(
            f"the page shows only {len(shown)} of {len(asked)} iterations: the slowest, and evenly "
            "spaced ones"
        )
    return shown, groups, notes


def _groups(
    run: RunTrace, figures: RunFigures, dp_rank: int | None, labels: Mapping[int, str] | None
) -> tuple[list[_Group], list[str]]:
    """Returns the groups of ranks that a page shows, and notes on omitted ranks.

    The parameters are the same as in :func:`choose`.
    """
    if labels is not None:
        every = [run.ranks[rank] for rank in labels]
        return [_Group("all ranks", list(labels.values()), every)], []
    notes = []
    present = sorted({trace.header.dp_rank for trace in run.ranks.values()})
    tensor = sorted({trace.header.tp_rank for trace in run.ranks.values()})
    replicas = _replicas(figures, present) if dp_rank is None else (dp_rank,)
    if len(replicas) < len(present) and dp_rank is None:
        notes.append(
            f"the page shows only {len(replicas)} of {len(present)} replicas (the first and the "
            "slowest)"
        )
    if len(tensor) > 1:
        notes.append(
            f"the page shows only rank {tensor[0]} of every tensor-parallel group, not ranks "
            f"{describe_numbers(tensor[1:])}"
        )
    groups = []
    for replica in replicas:
        traces = run.replica(replica, tensor[0])
        names = [_label(pp_rank, trace) for pp_rank, trace in enumerate(traces)]
        groups.append(_Group(f"replica {replica}", names, traces))
    return groups, notes


def _iterations(figures: RunFigures, asked: Sequence[int], most: int) -> list[int]:
    """Returns at most ``most`` of the iterations in ``asked``.

    Selects the slowest iterations, and others at even intervals.
    """
    if len(asked) <= most:
        return list(asked)
    step_ns = figures.step_ns.max(axis=1)[np.searchsorted(figures.iterations, asked)]
    slowest = np.argsort(-step_ns, kind="stable")[: min(SLOWEST, most // 2)]
    spaced = np.linspace(len(asked) - 1, 0, most - len(slowest)).round().astype(int)
    return [asked[index] for index in np.union1d(slowest, spaced).tolist()]


def _replicas(figures: RunFigures, present: Sequence[int]) -> tuple[int, ...]:
    """Returns the replicas in ``present``, or only the first and the slowest if there are many."""
    if len(present) <= MAX_REPLICAS:
        return tuple(present)
    steps = [figures.step_ns[:, figures.dp_rank == d].max(axis=1).mean() for d in present]
    return tuple(sorted({present[0], present[int(np.argmax(steps))]}))


def encode(columns: Mapping[str, Ints], **head: Any) -> dict[str, Any]:
    """Returns a block of data for the page: compressed columns, and other values.

    Args:
        columns: Columns of integers below 2^53, keyed by column name.
        head: Other values of the block, keyed by name. The page receives them as JSON.
    """
    most = np.iinfo("int32").max
    typed = {
        name: column.astype("float64" if np.abs(column).max(initial=0) > most else "int32")
        for name, column in columns.items()
    }
    # Columns with wide elements come first, so that the offset of each column is a multiple of its
    # element size.
    ordered = sorted(typed.items(), key=lambda pair: -pair[1].itemsize)
    listed = [[name, column.dtype.name, len(column)] for name, column in ordered]
    packed = gzip.compress(b"".join(column.tobytes() for _, column in ordered), 6, mtime=0)
    return {**head, "columns": listed, "data": base64.b64encode(packed).decode("ascii")}


def span_columns(
    rows: Mapping[str, Ints], num_rows: int, start_ns: int, unit_ns: int
) -> dict[str, Ints]:
    """Returns the columns of bars (drawn spans), with times in the page's unit.

    An additional column, ``offset``, contains the index of each row's first bar.

    Args:
        rows: Columns of bars, as returned by :func:`rows_of`.
        num_rows: Number of rows in the chart.
        start_ns: Time in nanoseconds that corresponds to the page's time 0.
        unit_ns: Unit of the page's times in nanoseconds.
    """
    columns = {name: column for name, column in rows.items() if name != "row"}
    columns["offset"] = np.searchsorted(rows["row"], np.arange(num_rows + 1))
    start = rows["start"] - start_ns
    end = start + rows["length"]
    columns["start"] = start // unit_ns
    columns["length"] = end // unit_ns - columns["start"]
    return columns


def message_columns(
    messages: Messages, row_of: Mapping[int, int], start_ns: int, unit_ns: int
) -> dict[str, Ints]:
    """Returns columns that describe the messages between rows, in the order of sending.

    Args:
        messages: Messages of one iteration.
        row_of: Maps each global rank to the index of its row.
        start_ns: Time in nanoseconds that corresponds to the page's time 0.
        unit_ns: Unit of the page's times in nanoseconds.
    """
    order = np.argsort(messages.sent_ns, kind="stable")
    rows = np.full(max(row_of, default=0) + 1, -1, dtype=np.int64)
    rows[list(row_of)] = list(row_of.values())
    return {
        "sent": (messages.sent_ns[order] - start_ns) // unit_ns,
        "arrived": (messages.arrived_ns[order] - start_ns) // unit_ns,
        "source": rows[messages.source[order]],
        "target": rows[messages.target[order]],
        "m_bytes": messages.bytes[order],
    }


_IDEAL_COLUMNS = ("start", "length", "category", "chunk", "microbatch", "piece")
_SPAN_COLUMNS = (
    "chunk",
    "microbatch",
    "reason",
    "bytes",
    "in_flight_bytes",
    "queue_depth",
    "peer",
    "piece",
    "of",
)


def rows_of(tables: list[TraceTable], num_chunks: int) -> dict[str, Ints]:
    """Returns the bars that represent spans. Messages and whole steps have no bars.

    Args:
        tables: Spans of one iteration, with one table for each row of the chart.
        num_chunks: Number of chunks per rank.

    Returns:
        Columns of bars, ordered by row and start: ``row``, ``start`` (nanoseconds on the trace's
        clock), ``length`` (nanoseconds), ``category``, and the other columns in ``_SPAN_COLUMNS``.
    """
    rows = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    table = TraceTable.concat(tables)
    category = _category_of(table, num_chunks)
    keep = category >= 0
    rows, table, category = rows[keep], table.take(keep), category[keep]
    order = np.lexsort((table.start_ns, rows))
    table = table.take(order)
    return {
        "row": rows[order],
        "start": table.start_ns,
        "length": table.duration_ns,
        "category": category[order],
        **{name: getattr(table, name).astype(np.int64) for name in _SPAN_COLUMNS},
    }


def _longest(rows: Mapping[str, Ints], budget: int) -> tuple[Mapping[str, Ints], int]:
    """Returns the ``budget`` longest bars in ``rows``, and the number of omitted bars."""
    left_out = max(0, len(rows["row"]) - budget)
    kept = np.sort(np.argsort(rows["length"], kind="stable")[left_out:])
    return {name: column[kept] for name, column in rows.items()}, left_out


def _category_of(table: TraceTable, num_chunks: int) -> Ints:
    """Returns the index of each span's category in :func:`categories`.

    The index is -1 if the span is not drawn as a bar.
    """
    index_of = {
        (category.kind, category.chunk, category.cause): index
        for index, category in enumerate(categories(num_chunks))
    }
    by_kind = np.full((OTHER + 1, num_chunks), -1, dtype=np.int64)
    by_cause = np.full(len(REASON), index_of["wait", -1, ""], dtype=np.int64)
    for (kind, chunk, cause), index in index_of.items():
        if kind != "wait":
            by_kind[KIND.get(kind, OTHER), slice(None) if chunk < 0 else chunk] = index
        elif cause:
            by_cause[REASON[cause]] = index
    category: Ints = by_kind[table.kind, np.clip(table.chunk, 0, num_chunks - 1)]
    idle = table.where("wait")
    category[idle] = by_cause[table.reason[idle]]
    return category
