"""A run as one self-contained page for the browser: ``.html``.

The page needs nothing but itself: plotly.js, its own script and the spans are in it. It has a
timeline of a row per rank with what every rank waited for, arrows from sends to receives, the same
step simulated with mean times, the activation bytes held, and a slider over iterations. So that it
opens quickly after a run of any size, it holds some iterations and replicas of a large one, and
merges short spans where there are too many (see ``page_spans``); it says what it left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from megatron.adaptive.errors import SetupError
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.trace.event import DRAWN_ACTIONS, KINDS, REASONS
from megatron.adaptive.trace.figures import RunFigures, run_figures
from megatron.adaptive.trace.files import replaced
from megatron.adaptive.trace.messages import Messages, match_messages
from megatron.adaptive.trace.read import RankTrace, RunTrace
from megatron.adaptive.trace.step import stages_of_rank
from megatron.adaptive.trace.table import Ints, TraceTable
from megatron.adaptive.trace.views import page_choice
from megatron.adaptive.trace.views.page_blocks import (
    encode,
    message_columns,
    simulated_columns,
    span_columns,
)
from megatron.adaptive.trace.views.page_choice import Choice
from megatron.adaptive.trace.views.page_replay import replay
from megatron.adaptive.trace.views.page_spans import (
    Category,
    Rows,
    categories,
    merged,
    rows_of,
    stage_shares,
)
from megatron.adaptive.trace.views.palette import IDLE

__all__ = ["plotly_js", "write_page"]

MAX_SPANS = 300_000
"""Bars of all iterations and replicas of a page; with them it stays far below 30 MB."""
MAX_MESSAGES = 100_000
"""Messages of all of them."""
MAX_SHARES = 200_000
"""Numbers of the mean over replicas, of one iteration."""

SCRIPTS = ("page_data.js", "page_draw.js", "page.js")


@dataclass(frozen=True)
class _Group:
    """What the page shows at a time: a replica, or the mean over all of them."""

    name: str
    labels: list[str]
    traces: Sequence[RankTrace | None]


def write_page(
    run: RunTrace,
    target: str | os.PathLike[str],
    iterations: Sequence[int],
    dp_rank: int | None = None,
    simulated: Mapping[int, SimResult] | None = None,
    *,
    figures: RunFigures | None = None,
) -> list[str]:
    """Write the page, replacing the file.

    Args:
        run: the run.
        target: the file, ``.html``.
        iterations: those that the page may show; of many it shows some.
        dp_rank: only this data-parallel replica; ``None`` for some of them and, where there are
            several, the mean over all.
        simulated: simulated steps by iteration, to lie beside the measured ones of every replica;
            ``None`` simulates each anew (see ``page_replay``), an empty mapping none.
        figures: of the run, where they are known; they choose iterations and replicas.

    Returns:
        What was merged or left out, a line each.

    Raises:
        TraceError: there is no such iteration or replica, nothing is recorded of them, or the file
            cannot be written.
        SetupError: plotly is not installed.
    """
    for iteration in iterations:
        run.require_iteration(iteration)
    plotly = plotly_js()
    if figures is None:
        ranks = None if dp_rank is None else [t.header.rank for t in run.replica(dp_rank) if t]
        figures = run_figures(run, iterations, ranks=ranks)
    choice = page_choice.choose(run, figures, iterations, dp_rank)
    groups = _groups(run, choice)
    colors = categories(run.num_chunks)
    head = _head(run, figures, choice, groups, colors)
    notes = [*choice.notes]
    with replaced(target) as temporary, temporary.open("w", encoding="utf-8") as file:
        before, after = _asset("page.html").split("{{blocks}}")
        before = before.replace("{{title}}", escape(f"Trace of {run.run}"))
        file.write(before.replace("{{style}}", _asset("page.css")))
        for name, block in _blocks(run, choice, groups, colors, simulated, notes):
            file.write(f'<script type="application/json" id="{name}">{json.dumps(block)}</script>')
        head["notes"] = [*run.notes(), *figures.notes(), *notes]
        text = json.dumps(head).replace("<", "\\u003c")
        file.write(f'<script type="application/json" id="page">{text}</script>')
        code = "\n".join(map(_asset, SCRIPTS))
        for part in (plotly, code):
            file.write("<script>" + part.replace("</script", "<\\/script") + "</script>\n")
        file.write(after)
    return notes


def plotly_js() -> str:
    """Return the code of plotly.js.

    Raises:
        SetupError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise SetupError(
            "the page needs plotly, which is not installed; pip install plotly"
        ) from error
    text: str = get_plotlyjs()
    return text


def _asset(name: str) -> str:
    return (
        resources.files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")
    )


def _groups(run: RunTrace, choice: Choice) -> list[_Group]:
    groups = []
    for dp_rank in choice.replicas:
        traces = run.replica(dp_rank, choice.tp_rank)
        labels = [_label(run, pp_rank, trace) for pp_rank, trace in enumerate(traces)]
        groups.append(_Group(f"replica {dp_rank}", labels, traces))
    if choice.mean_of:
        every = [t for d in choice.mean_of for t in run.replica(d, choice.tp_rank)]
        some = next(trace for trace in every if trace)
        labels = [_stages(run, pp_rank, some) for pp_rank in range(run.num_ranks)]
        groups.append(_Group(f"mean of {len(choice.mean_of)} replicas", labels, every))
    return groups


def _label(run: RunTrace, pp_rank: int, trace: RankTrace | None) -> str:
    if trace is None:
        return f"stage {pp_rank}: no trace"
    text = _stages(run, pp_rank, trace)
    return text if trace.header.rank == pp_rank else f"{text}, rank {trace.header.rank}"


def _stages(run: RunTrace, pp_rank: int, trace: RankTrace) -> str:
    stages = stages_of_rank(pp_rank, run.num_ranks, run.num_chunks, trace.header.placement)
    if stages is None:
        return f"rank {pp_rank}"
    shown = stages if len(stages) <= 4 else (*stages[:3], "…")
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, shown))}"


def _head(
    run: RunTrace,
    figures: RunFigures,
    choice: Choice,
    groups: Sequence[_Group],
    colors: Sequence[Category],
) -> dict[str, Any]:
    """What the page says of the whole run."""
    header = next(trace for group in groups for trace in group.traces if trace).header
    last = choice.iterations[-1]
    microbatches = max(t.num_microbatches.get(last, 0) for g in groups for t in g.traces if t)
    shape = (
        f"{header.schedule}, {run.num_ranks} pipeline ranks x {run.num_chunks} "
        f"chunk{'s' * (run.num_chunks > 1)}, {microbatches} microbatches, "
        f"world size {run.world_size}"
    )
    step_ns = figures.step_ns.max(axis=1)
    idle = np.nan_to_num(figures.bubble_fraction)
    known = np.maximum(1, (figures.num_actions > 0).sum(axis=1))
    return {
        "title": f"Pipeline trace of {run.run}",
        "subtitle": shape,
        "idle": f"#{IDLE}",
        "kinds": KINDS,
        "reasons": REASONS,
        "categories": [asdict(category) for category in colors],
        "groups": [{"name": group.name, "rows": group.labels} for group in groups],
        "iterations": choice.iterations,
        "all_iterations": figures.iterations.tolist(),
        "step_ms": np.round(step_ns / 1e6, 4).tolist(),
        "bubble": np.round(idle.sum(axis=1) / known, 4).tolist(),
    }


def _blocks(
    run: RunTrace,
    choice: Choice,
    groups: Sequence[_Group],
    colors: Sequence[Category],
    simulated: Mapping[int, SimResult] | None,
    notes: list[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and content of the blocks of all groups and iterations; adds to the notes."""
    share = len(choice.iterations) * max(1, len(choice.replicas))
    shortest, unsent, unsimulated = 0, 0, 0
    for place, iteration in enumerate(choice.iterations):
        for number, group in enumerate(groups):
            tables = [trace.table([iteration]) if trace else _nothing() for trace in group.traces]
            if number >= len(choice.replicas):
                block = _mean_block(run, tables, colors)
            else:
                block = _block(run, iteration, group, tables, share, simulated)
                shortest = max(shortest, block["merged_below_ns"])
                unsent += block["messages_left_out"]
                unsimulated += not block["simulated_ms"]
            yield f"block-{number}-{place}", block
    if shortest:
        notes.append(f"spans shorter than up to {shortest / 1e6:.3g} ms are merged")
    if unsent:
        notes.append(f"{unsent} messages of large steps have no arrows")
    if unsimulated and simulated is None:
        notes.append(f"{unsimulated} steps, incomplete or very large, are not simulated")


def _block(
    run: RunTrace,
    iteration: int,
    group: _Group,
    tables: list[TraceTable],
    share: int,
    simulated: Mapping[int, SimResult] | None,
) -> dict[str, Any]:
    """One iteration of one replica."""
    present = {trace.header.rank: row for row, trace in enumerate(group.traces) if trace}
    messages = match_messages({rank: tables[row] for rank, row in present.items()})
    rows = rows_of(tables, run.num_chunks)
    small = merged(rows, MAX_SPANS // share)
    start_ns, end_ns, step_ns = _extent(tables, rows)
    unit_ns = 1 + (end_ns - start_ns) // (2**31 - 1)
    if simulated is None:
        header = next(trace for trace in group.traces if trace).header
        counts = [t.num_microbatches.get(iteration, 0) for t in group.traces if t]
        result = replay(tables, messages, header.placement, run.num_chunks, max(counts))
    else:
        result = simulated.get(iteration)
    limit = MAX_MESSAGES // share
    columns = {
        **span_columns(small, len(tables), start_ns, unit_ns),
        **message_columns(messages, present, start_ns, unit_ns, limit),
        **simulated_columns(result, run.num_chunks, unit_ns),
    }
    return encode(
        columns,
        kind="spans",
        unit_ms=unit_ns / 1e6,
        step_ms=step_ns / 1e6,
        extent_ms=(end_ns - start_ns) / 1e6,
        shown_ms=_shown_ms(tables, start_ns, step_ns),
        simulated_ms=result.makespan_s * 1e3 if result else 0,
        merged_below_ns=small.merged_below_ns,
        messages_left_out=len(messages) if len(messages) > limit else 0,
        **_figures(tables, messages, step_ns),
    )


def _figures(tables: list[TraceTable], messages: Messages, step_ns: int) -> dict[str, Any]:
    busy = sum(int(table.of_kind(*DRAWN_ACTIONS).duration_ns.sum()) for table in tables)
    ranks = sum(len(table) > 0 for table in tables)
    bubble = 1 - busy / (step_ns * ranks) if step_ns and ranks else 0.0
    return {"bubble": bubble, "messages": len(messages)}


def _mean_block(
    run: RunTrace, tables: list[TraceTable], colors: Sequence[Category]
) -> dict[str, Any]:
    """One iteration, the mean over replicas: how much of each bin of time each stage spent how."""
    rows = rows_of(tables, run.num_chunks)
    start_ns, end_ns, step_ns = _extent(tables, rows)
    number = run.num_ranks
    bins = min(480, max(60, MAX_SHARES // (number * len(colors))))
    columns = {**rows.columns, "row": rows.columns["row"] % number}
    shares = stage_shares(Rows(columns, rows.within), number, len(colors), start_ns, end_ns, bins)
    ranks = np.bincount(np.arange(len(tables)) % number, [len(t) > 0 for t in tables], number)
    shares = np.clip(np.rint(shares * 255 / np.maximum(ranks, 1)[:, None, None]), 0, 255)
    used: Ints = np.flatnonzero(shares.any(axis=(0, 2)))
    return encode(
        {"share": shares[:, used].reshape(-1).astype(np.int64), "used": used},
        kind="mean",
        bins=bins,
        step_ms=step_ns / 1e6,
        extent_ms=(end_ns - start_ns) / 1e6,
        shown_ms=_shown_ms(tables, start_ns, step_ns),
        simulated_ms=0,
        **_figures(tables, match_messages({}), step_ns),
    )


def _extent(tables: list[TraceTable], rows: Rows) -> tuple[int, int, int]:
    """Start of the first action, end of the last bar, and length from there to the last action."""
    drawn = [table.of_kind(*DRAWN_ACTIONS) for table in tables]
    starts = [int(table.start_ns.min()) for table in drawn if len(table)]
    ends = [int(table.end_ns.max()) for table in drawn if len(table)]
    if not starts:
        if not len(rows):
            return 0, 1, 0
        start = int(rows.columns["start"].min())
        return start, start + int(rows.columns["length"].max()), 0
    last = int((rows.columns["start"] + rows.columns["length"]).max())
    return min(starts), max(last, min(starts) + 1), max(ends) - min(starts)


def _shown_ms(tables: list[TraceTable], start_ns: int, step_ns: int) -> float:
    """How much a page shows at first: the step and the update after it, not what follows."""
    updates = [table.of_kind("reduce", "optimizer").end_ns for table in tables]
    ends = [int(end.max()) - start_ns for end in updates if len(end)]
    return max([step_ns, *ends]) / 1e6


def _nothing() -> TraceTable:
    return TraceTable.concat([])
