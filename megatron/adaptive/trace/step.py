"""One iteration of one pipeline on one clock: what every view draws.

Only F, B and W are kept, and the waits between them; times start at the first of the actions, over
all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.event import DRAWN_ACTIONS, Span
from megatron.adaptive.trace.figures import BACK_NS
from megatron.adaptive.trace.read import RankTrace, RunTrace

__all__ = ["PipelineStep", "pipeline_step", "stages_of_rank"]


@dataclass(frozen=True)
class PipelineStep:
    """The F, B and W of one iteration.

    Attributes:
        iteration: number of the iteration.
        schedule: name of the schedule or policy.
        placement: how stages lie on ranks and chunks.
        num_ranks: pipeline ranks.
        num_chunks: chunks per rank.
        num_microbatches: microbatches of this iteration.
        rows: per pipeline rank its spans in executed order, times from the step's start.
        missing: pipeline ranks of which nothing is known; their rows are empty.
        start_ns: the step's start on the run's common clock.
        step_ns: from the first start to the last end, over all ranks.
        clock_jumps: pipeline ranks whose clock was set back in the middle of it.
        waits: per pipeline rank its spans of kind ``wait``, cut to the step; ``reason`` is the
            cause. Empty where nothing is known of waits.
        dp_rank: which data-parallel replica this is.
        num_replicas: how many there are traces of.
    """

    iteration: int
    schedule: str
    placement: str
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    rows: tuple[tuple[Span, ...], ...]
    missing: tuple[int, ...]
    start_ns: int
    step_ns: int
    clock_jumps: tuple[int, ...] = ()
    waits: tuple[tuple[Span, ...], ...] = ()
    dp_rank: int = 0
    num_replicas: int = 1

    @property
    def actions(self) -> tuple[str, ...]:
        """The kinds that occur, in the order F, B, W."""
        kinds = {span.action for row in self.rows for span in row}
        return tuple(action for action in DRAWN_ACTIONS if action in kinds)

    def label(self, pp_rank: int) -> str:
        """The name of a row: ``stage 1``, or ``rank 1 (stages 1, 3)`` with several chunks."""
        stages = stages_of_rank(pp_rank, self.num_ranks, self.num_chunks, self.placement)
        if stages is None:
            return f"rank {pp_rank}"
        if len(stages) == 1:
            return f"stage {stages[0]}"
        return f"rank {pp_rank} (stages {', '.join(map(str, stages))})"


def stages_of_rank(
    pp_rank: int, num_ranks: int, num_chunks: int, placement: str
) -> tuple[int, ...] | None:
    """Global stages on a pipeline rank, by chunk; ``None`` for a placement unknown here.

    ::

        loop, 2 ranks x 3 chunks       v, 2 ranks x 3 chunks
        rank 0:  0 2 4                 rank 0:  0 3 4
        rank 1:  1 3 5                 rank 1:  1 2 5
    """
    if placement == "loop":
        return tuple(chunk * num_ranks + pp_rank for chunk in range(num_chunks))
    if placement.lower() == "v":
        return tuple(
            chunk * num_ranks + (num_ranks - 1 - pp_rank if chunk % 2 else pp_rank)
            for chunk in range(num_chunks)
        )
    return None


def pipeline_step(
    run: RunTrace, iteration: int | None = None, *, dp_rank: int = 0, tp_rank: int = 0
) -> PipelineStep:
    """Pick one iteration of one pipeline out of a run.

    Args:
        run: the run.
        iteration: its number; by default the last complete one, or, where none is complete, the
            last one.
        dp_rank: which data-parallel replica.
        tp_rank: which rank of each tensor-parallel group.

    Raises:
        TraceError: there is no such iteration or replica, or nothing to draw in it.
    """
    ranks = run.replica(dp_rank, tp_rank)
    chosen = _choose(run, iteration, dp_rank)
    tables = [None if trace is None else _known(trace, chosen) for trace in ranks]
    found = [None if spans is None else _of_kinds(spans, *DRAWN_ACTIONS) for spans in tables]
    rows = [() if spans is None else _sorted(spans) for spans in found]
    if not any(rows):
        raise TraceError(
            f"iteration {chosen} in {run.origin} holds no F, B or W; it has nothing to draw"
        )
    start = min(span.start_ns for row in rows for span in row)
    end = max(span.end_ns for row in rows for span in row)
    first = next(trace for trace, row in zip(ranks, rows, strict=True) if trace and row)
    return PipelineStep(
        iteration=chosen,
        schedule=first.header.schedule,
        placement=first.header.placement,
        num_ranks=run.num_ranks,
        num_chunks=run.num_chunks,
        num_microbatches=first.num_microbatches[chosen],
        rows=tuple(_from(row, start) for row in rows),
        missing=tuple(pp_rank for pp_rank, row in enumerate(rows) if not row),
        start_ns=start,
        step_ns=end - start,
        clock_jumps=tuple(
            pp_rank for pp_rank, spans in enumerate(found) if spans and _went_back(spans)
        ),
        waits=tuple(
            () if spans is None else _cut(_of_kinds(spans, "wait"), start, end) for spans in tables
        ),
        dp_rank=dp_rank,
        num_replicas=len({trace.header.dp_rank for trace in run.ranks.values()}),
    )


def _choose(run: RunTrace, iteration: int | None, dp_rank: int) -> int:
    if not run.iterations:
        raise TraceError(f"{run.origin} holds no iteration; the run ended before its first one")
    if iteration is None:
        return (run.complete_iterations(dp_rank) or run.iterations)[-1]
    run.require_iteration(iteration)
    return iteration


def _known(trace: RankTrace, iteration: int) -> tuple[Span, ...]:
    """The actions and waits of an iteration in the order they were written."""
    return trace.table([iteration]).of_kind("wait", *DRAWN_ACTIONS).spans()


def _of_kinds(spans: Iterable[Span], *kinds: str) -> list[Span]:
    return [span for span in spans if span.action in kinds]


def _cut(waits: Iterable[Span], start_ns: int, end_ns: int) -> tuple[Span, ...]:
    """Cuts waits to the part between two times; they then count from the first of them."""
    inside = (
        replace(wait, start_ns=max(wait.start_ns, start_ns), end_ns=min(wait.end_ns, end_ns))
        for wait in waits
        if wait.end_ns > start_ns and wait.start_ns < end_ns
    )
    return _from(_sorted(inside), start_ns)


def _sorted(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: (span.start_ns, span.end_ns)))


def _went_back(spans: Sequence[Span]) -> bool:
    return any(b.start_ns < a.start_ns - BACK_NS for a, b in pairwise(spans))


def _from(spans: Iterable[Span], start_ns: int) -> tuple[Span, ...]:
    return tuple(
        replace(span, start_ns=span.start_ns - start_ns, end_ns=span.end_ns - start_ns)
        for span in spans
    )
