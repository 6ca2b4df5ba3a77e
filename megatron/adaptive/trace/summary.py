"""Figures of one step: how long each rank worked, waited and idled."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.adaptive.trace.event import Span
from megatron.adaptive.trace.figures import WAIT_CAUSES, Floats, RunFigures, rank_figures
from megatron.adaptive.trace.step import PipelineStep
from megatron.adaptive.trace.table import TraceTable

__all__ = [
    "ActionTime",
    "PARTS",
    "PART_NAMES",
    "RankSummary",
    "StepSummary",
    "format_parts",
    "format_table",
    "parts_ms",
    "summarize",
]


NS_PER_MS = 1e6


@dataclass(frozen=True)
class ActionTime:
    """Durations of one kind of action on one rank.

    Attributes:
        count: how many there were.
        mean_ms: their mean.
        stdev_ms: their spread, as the standard deviation of the whole population.
    """

    count: int
    mean_ms: float
    stdev_ms: float


@dataclass(frozen=True)
class RankSummary:
    """Figures of one pipeline rank in one step.

    Attributes:
        pp_rank: position in the pipeline.
        label: name of its row in the charts.
        num_actions: actions it did.
        busy_ms: time in which it did at least one.
        wait_ms: time it reported as waiting for input.
        bubble_fraction: (step time - busy) / step time.
        times: durations by kind of action.
        peak_microbatches: most (chunk, microbatch) pairs forwarded and not yet backwarded.
        peak_in_flight_bytes: most activation bytes held; 0 if the trace does not say.
        transfer_bytes: payload received and sent.
    """

    pp_rank: int
    label: str
    num_actions: int
    busy_ms: float
    wait_ms: float
    bubble_fraction: float
    times: dict[str, ActionTime]
    peak_microbatches: int
    peak_in_flight_bytes: int
    transfer_bytes: int


@dataclass(frozen=True)
class StepSummary:
    """Figures of a step over all its ranks.

    Attributes:
        iteration: number of the iteration.
        schedule: name of the schedule or policy.
        step_ms: from the first start to the last end over all ranks.
        bubble_fraction: mean over the ranks that are known.
        ranks: per known rank.
        missing: pipeline ranks without a trace.
    """

    iteration: int
    schedule: str
    step_ms: float
    bubble_fraction: float
    ranks: tuple[RankSummary, ...]
    missing: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists."""
        return asdict(self)


def summarize(step: PipelineStep) -> StepSummary:
    """Compute the figures of a step.

    The bubble is measured against the step time (idle / step), not against the work.
    """
    ranks = tuple(
        _summarize_rank(step, pp_rank, row) for pp_rank, row in enumerate(step.rows) if row
    )
    return StepSummary(
        iteration=step.iteration,
        schedule=step.schedule,
        step_ms=step.step_ns / NS_PER_MS,
        bubble_fraction=statistics.fmean(rank.bubble_fraction for rank in ranks),
        ranks=ranks,
        missing=step.missing,
    )


def format_table(summary: StepSummary) -> str:
    """The figures as an aligned table, one line per rank, without a final line end."""
    kinds = [k for k in ("F", "B", "W") if any(k in rank.times for rank in summary.ranks)]
    show_bytes = any(rank.peak_in_flight_bytes for rank in summary.ranks)
    head = ["", "actions", "busy ms", "wait ms", "bubble"]
    head += [f"{kind} ms" for kind in kinds] + ["peak in flight"]
    table = [head]
    for rank in summary.ranks:
        peak = str(rank.peak_microbatches)
        if show_bytes:
            peak += f" ({rank.peak_in_flight_bytes / 2**20:.1f} MiB)"
        line = [
            rank.label,
            str(rank.num_actions),
            f"{rank.busy_ms:.2f}",
            f"{rank.wait_ms:.2f}",
            f"{rank.bubble_fraction:.1%}",
        ]
        table.append([*line, *(_time_text(rank.times.get(kind)) for kind in kinds), peak])
    return _aligned(table)


def _aligned(table: Sequence[Sequence[str]]) -> str:
    """Lines of a table, its first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _summarize_rank(step: PipelineStep, pp_rank: int, row: Sequence[Span]) -> RankSummary:
    figures = rank_figures(TraceTable.from_spans(row), step.num_chunks)
    busy_ns = int(figures.busy_ns[0])
    times: dict[str, ActionTime] = {}
    for action in step.actions:
        durations = [span.duration_ns / NS_PER_MS for span in row if span.action == action]
        if durations:
            times[action] = ActionTime(
                len(durations), statistics.fmean(durations), statistics.pstdev(durations)
            )
    return RankSummary(
        pp_rank=pp_rank,
        label=step.label(pp_rank),
        num_actions=len(row),
        busy_ms=busy_ns / NS_PER_MS,
        wait_ms=sum(span.wait_ns for span in row) / NS_PER_MS,
        bubble_fraction=(step.step_ns - busy_ns) / step.step_ns if step.step_ns else 0.0,
        times=times,
        peak_microbatches=int(figures.peak_microbatches[0]),
        peak_in_flight_bytes=int(figures.peak_in_flight_bytes[0]),
        transfer_bytes=int(figures.transfer_bytes[0]),
    )


def _time_text(time: ActionTime | None) -> str:
    return "-" if time is None else f"{time.mean_ms:.2f} ± {time.stdev_ms:.2f}"


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
    return _aligned(table)
