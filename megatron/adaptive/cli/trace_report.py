"""What is printed about a trace: the figures of each rank in a step, and of the steps in a run."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from megatron.adaptive.cli.trace_source import Selection
from megatron.adaptive.trace.read import describe_numbers
from megatron.adaptive.trace.summary import NS_PER_MS, format_table, summarize
from megatron.adaptive.trace.views.parts import PARTS, format_parts, parts_ms

__all__ = ["report_json", "report_lines", "report_warnings"]


def report_lines(selection: Selection) -> list[str]:
    """The report for people."""
    run, step = selection.run, selection.step
    summary = summarize(step)
    row, ranks = _drawn(selection)
    replica = f", replica {step.dp_rank} of {step.num_replicas}" if step.num_replicas > 1 else ""
    labels = [step.label(int(selection.figures.pp_rank[rank])) for rank in ranks]
    lines = [
        f"{run.origin}: run {run.run}, schedule {summary.schedule}, {run.num_ranks} ranks x "
        f"{run.num_chunks} chunks, {step.num_microbatches} microbatches{replica}",
        f"iteration {summary.iteration}: step {summary.step_ms:.2f} ms, "
        f"bubble {summary.bubble_fraction:.1%} (idle / step time)",
        format_table(summary),
        format_parts(labels, parts_ms(selection.figures)[row, ranks]),
    ]
    if len(selection.iterations) > 1:
        lines.append(_over_iterations(selection))
    lines.append(f"clocks: {run.alignment.describe()}")
    return lines


def report_json(selection: Selection) -> dict[str, Any]:
    """The report for programs."""
    row, ranks = _drawn(selection)
    parts = parts_ms(selection.figures)[row]
    report = summarize(selection.step).to_json()
    for rank, place in zip(report["ranks"], ranks, strict=True):
        rank["parts_ms"] = dict(zip(PARTS, parts[place].tolist(), strict=True))
    return {
        **report,
        "run": selection.run.run,
        "clocks": {
            "count": max(1, len(selection.run.alignment.clocks)),
            "residual_us": selection.run.alignment.residual_ns / 1e3,
        },
    }


def report_warnings(selection: Selection) -> list[str]:
    """What is wrong with the trace, or with the times of the iterations that are covered."""
    return list(dict.fromkeys(selection.warnings() + selection.figures.notes()))


def _drawn(selection: Selection) -> tuple[int, list[int]]:
    """Where the drawn iteration and the ranks that recorded it are in the figures."""
    figures = selection.figures
    row = int(np.searchsorted(figures.iterations, selection.step.iteration))
    known = np.flatnonzero(figures.num_actions[row])
    return row, sorted(known.tolist(), key=lambda rank: int(figures.pp_rank[rank]))


def _over_iterations(selection: Selection) -> str:
    figures = selection.figures
    known = (figures.num_actions > 0).any(axis=1)
    steps = (figures.step_ns[known].max(axis=1) / NS_PER_MS).tolist()
    bubbles = np.nanmean(figures.bubble_fraction[known], axis=1).tolist()
    return (
        f"over {len(selection.iterations)} complete iterations "
        f"({describe_numbers(selection.iterations)}): "
        f"step median {statistics.median(steps):.2f} ms ({min(steps):.2f} to {max(steps):.2f}), "
        f"bubble median {statistics.median(bubbles):.1%} "
        f"({min(bubbles):.1%} to {max(bubbles):.1%})"
    )
