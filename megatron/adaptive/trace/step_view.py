"""Selects one iteration of one pipeline from a trace, to draw a chart of it.

The selection contains only actions and the waits between them. Actions are forward passes (F),
backward passes (B) and separate weight-gradient passes (W). Times are relative to the start of the
first action of all ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megatron.adaptive.errors import TraceError
from megatron.adaptive.schedule.action import SliceCounts
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.metrics import RankFigures, rank_figures
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.span_columns import TraceTable
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, Lengths, Span, TraceHeader


@dataclass(frozen=True)
class PipelineStep:
    """Contains the actions (F, B and W) of one iteration in one pipeline.

    Attributes:
        iteration: Iteration number.
        schedule: Name of the static schedule or of the run-time scheduling policy.
        placement: Assignment of stages to ranks and chunks, one of ``trace_format.PLACEMENTS``.
        num_chunks: Number of model chunks per rank.
        num_microbatches: Number of microbatches in this iteration.
        rows: Actions of each pipeline rank in execution order, with times relative to the start of
            the step; empty for a rank without a trace.
        waits: Spans of the kind ``wait`` on each pipeline rank, clipped to the step. Their
            ``reason`` is the cause of the wait. Empty if the trace has no waits.
        dp_rank: Data-parallel rank of the pipeline.
        num_replicas: Number of data-parallel replicas that have traces.
        lengths: Sizes of the microbatches in the form of ``Lengths``; empty if all microbatches
            have the same size.
        figures: Statistics of this iteration, keyed by pipeline rank, for all ranks that have a
            trace.
        bubble_note: Note to print after the idle fraction; empty if no ranks share a GPU.
        num_slices: Number of slices of each microbatch, or 1 if microbatches are not split.
    """

    iteration: int
    schedule: str
    placement: str
    num_chunks: int
    num_microbatches: int
    rows: tuple[tuple[Span, ...], ...]
    waits: tuple[tuple[Span, ...], ...] = ()
    dp_rank: int = 0
    num_replicas: int = 1
    lengths: Lengths = ()
    figures: Mapping[int, RankFigures] = field(default_factory=dict)
    bubble_note: str = ""
    num_slices: SliceCounts = 1

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.rows)

    @property
    def missing(self) -> tuple[int, ...]:
        """Pipeline ranks without a trace, whose rows are empty."""
        return tuple(pp_rank for pp_rank, row in enumerate(self.rows) if not row)

    @cached_property
    def step_ns(self) -> int:
        """Time in ns from the start of the first action to the end of the last action."""
        return max(span.end_ns for row in self.rows for span in row)

    @property
    def actions(self) -> tuple[str, ...]:
        """Kinds of action in this step, in the order F, B, W."""
        kinds = {span.action for row in self.rows for span in row}
        return tuple(action for action in DRAWN_ACTIONS if action in kinds)

    @property
    def replica(self) -> str:
        """Suffix for the title of a chart, which names the replica if there are several."""
        return f", replica {self.dp_rank} of {self.num_replicas}" if self.num_replicas > 1 else ""

    @property
    def microbatches(self) -> str:
        """Text such as ``8 microbatches``, or ``8 microbatches in 4 slices``."""
        return microbatches_text(self.num_microbatches, self.num_slices)

    def numbers(self, span: Span) -> str:
        """Returns the chunk and the microbatch of ``span`` as text.

        For example, ``0-3`` is microbatch 3 on chunk 0, and ``0-3.5`` is slice 5 of this
        microbatch.
        """
        return f"{span.chunk}-{span.item(self.num_slices)}"

    @cached_property
    def bubble_fractions(self) -> dict[int, float]:
        """Maps each pipeline rank with a trace to the fraction of the step in which it was idle."""
        return {
            pp_rank: 1 - int(figures.busy_ns[0]) / self.step_ns if self.step_ns else 0.0
            for pp_rank, figures in self.figures.items()
        }

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of the step, averaged over the pipeline ranks with a trace."""
        return statistics.fmean(self.bubble_fractions.values())

    def label(self, pp_rank: int) -> str:
        """Returns the label for the row of ``pp_rank`` in a chart.

        Such labels are ``stage 1`` or, with several chunks per rank, ``rank 1 (stages 1, 3)``.
        """
        text = stages_text(self, pp_rank)
        return f"rank {pp_rank} ({text})" if self.num_chunks > 1 else text


def microbatches_text(num_microbatches: int, num_slices: SliceCounts) -> str:
    """Returns text such as ``8 microbatches``, or ``8 microbatches in 4 slices``.

    If the microbatches have different numbers of slices, the text contains the smallest and the
    largest number, for example ``8 microbatches in 1 to 4 slices``.
    """
    text = f"{num_microbatches} microbatches"
    if not isinstance(num_slices, int):
        return f"{text} in {min(num_slices)} to {max(num_slices)} slices"
    return f"{text} in {num_slices} slices" if num_slices > 1 else text


def stages_of_rank(header: TraceHeader | PipelineStep, pp_rank: int) -> tuple[int, ...]:
    """Returns the indices of the stages on ``pp_rank``, in the order of its chunks."""
    kind: Any = header.placement
    placement = Placement(num_ranks=header.num_ranks, num_chunks=header.num_chunks, kind=kind)
    return tuple(placement.stage_of(pp_rank, chunk) for chunk in range(header.num_chunks))


def stages_text(header: TraceHeader | PipelineStep, pp_rank: int, most: int | None = None) -> str:
    """Returns the stages on ``pp_rank`` as text, such as ``stages 0, 5``.

    Args:
        header: Trace header, or another object with the number of ranks, number of chunks and
            placement of the pipeline.
        pp_rank: Pipeline rank whose stages are listed.
        most: Maximum number of stages to list; ``None`` to list all.
    """
    stages = stages_of_rank(header, pp_rank)
    shown = [*map(str, stages)]
    if most is not None and len(stages) > most:
        shown = [*shown[: most - 1], "…"]
    return f"stage{'s' * (len(stages) > 1)} {', '.join(shown)}"


def pipeline_step(run: RunTrace, iteration: int | None = None, *, dp_rank: int = 0) -> PipelineStep:
    """Selects one iteration of one pipeline from a run's trace.

    Args:
        run: Trace of the run.
        iteration: Iteration number; ``None`` for the last complete iteration, or for the last
            iteration if none is complete.
        dp_rank: Data-parallel rank of the pipeline.

    Raises:
        TraceError: The iteration or the pipeline does not exist, or contains no actions.
    """
    ranks = run.replica(dp_rank)
    if not run.iterations:
        raise TraceError(
            f"{run.origin} does not contain iterations, because the run ended before its first "
            "iteration"
        )
    if iteration is None:
        iteration = (run.complete_iterations(dp_rank) or run.iterations)[-1]
    run.require_iteration(iteration)
    tables = [TraceTable.concat([] if t is None else [t.table([iteration])]) for t in ranks]
    spans_of_ranks = [table.of_kind("wait", *DRAWN_ACTIONS).spans() for table in tables]
    drawn = TraceTable.concat([table.of_kind(*DRAWN_ACTIONS) for table in tables])
    if not len(drawn):
        raise TraceError(
            f"iteration {iteration} in {run.origin} does not contain F, B or W actions to draw"
        )
    start = int(drawn.start_ns.min())
    end = int(drawn.end_ns.max())
    first = next(trace for trace in ranks if trace and iteration in trace.iterations)
    return PipelineStep(
        iteration=iteration,
        schedule=first.header.schedule,
        placement=first.header.placement,
        num_chunks=run.num_chunks,
        num_microbatches=first.num_microbatches[iteration],
        rows=tuple(_cut(spans, DRAWN_ACTIONS, start, end) for spans in spans_of_ranks),
        waits=tuple(_cut(spans, ("wait",), start, end) for spans in spans_of_ranks),
        dp_rank=dp_rank,
        num_replicas=len({trace.header.dp_rank for trace in run.ranks.values()}),
        lengths=first.lengths(iteration),
        figures={
            pp_rank: rank_figures(
                table,
                run.num_chunks,
                first.slices,
                device=first.header.device,
                frozen=trace.frozen_chunks,
            )
            for pp_rank, (trace, table) in enumerate(zip(ranks, tables, strict=True))
            if trace is not None and table.where(*DRAWN_ACTIONS).any()
        },
        bubble_note=run.bubble_note,
        num_slices=first.slices(iteration),
    )


def _cut(
    spans: Iterable[Span], kinds: Sequence[str], start_ns: int, end_ns: int
) -> tuple[Span, ...]:
    """Selects the spans of ``kinds`` in a step, and sorts them by time.

    The step begins at ``start_ns`` and ends at ``end_ns``. Spans are clipped to the step, and their
    times become relative to its start. Waits outside of the step are dropped. Actions are always
    kept, because they define the step.
    """
    inside = (
        replace(
            span,
            start_ns=max(span.start_ns, start_ns) - start_ns,
            end_ns=min(span.end_ns, end_ns) - start_ns,
        )
        for span in spans
        if span.action in kinds
        and (span.action in DRAWN_ACTIONS or (span.end_ns > start_ns and span.start_ns < end_ns))
    )
    return tuple(sorted(inside, key=lambda span: (span.start_ns, span.end_ns)))
