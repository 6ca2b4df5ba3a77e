"""What a runtime adds to the durations that were drawn, read from when actions ran.

::

    rank 0   [ F 0 ]·[ F 1 ]           ·  own: the next action could start, the runtime was busy
                 ╲
    rank 1        ···[ F 0 ]           ··· message: the rank waited for nothing but this message

Whether an action waited for its input or for its rank is told by which of the two was free later.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.stage_placement import Placement

from .scenarios import Draws, seconds_of
from .work import Span

# Closer than this, either of the two may be what an action waited for.
_CLEAR_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Means over a step, in seconds.

    Attributes:
        late_s: by which an action took longer than drawn, for its rank had no core when it woke.
        after_f_s: from the end of a forward to the start of the next action where that was ready.
        after_b_s: the same after a backward, a whole one where they are not split.
        after_w_s: the same after a backward by weights that is an action of its own.
        message_s: from the end of an action to the start of the one on another rank that waited for
            its result, on top of what a slow link takes.
    """

    late_s: float
    after_f_s: float
    after_b_s: float
    after_w_s: float
    message_s: float


def overhead(
    placement: Placement, draws: Draws, spans: Sequence[Sequence[Span]], *, split: bool
) -> Overhead:
    """Read the overhead from a step.

    Args:
        placement: where stages live.
        draws: durations of the step.
        spans: per rank, in the order they ran.
        split: whether backwards by weights were actions of their own.
    """
    table = seconds_of(draws.workload(placement))
    late = [
        span.end_s - span.start_s - table[span.kind][span.stage][span.microbatch] * span.fraction
        for of_rank in spans
        for span in of_rank
    ]
    results = {
        (span.kind, span.stage, span.microbatch): span.end_s
        for of_rank in spans
        for span in of_rank
    }
    own: dict[ActionKind, list[float]] = {kind: [] for kind in ActionKind}
    message: list[float] = []
    for rank, of_rank in enumerate(spans):
        for before, span in itertools.pairwise(of_rank):
            if span.kind is ActionKind.B and not split:
                continue  # the second half of a whole backward
            kind, stage = _source(span, split=split)
            ready_s = results.get((kind, stage, span.microbatch), -math.inf)
            peer = placement.locate(stage)[0] if 0 <= stage < placement.num_stages else rank
            ready_s += draws.delay_s(peer, rank)
            if ready_s < before.end_s - _CLEAR_S:
                own[before.kind].append(span.start_s - before.end_s)
            elif peer != rank and ready_s > before.end_s + _CLEAR_S:
                message.append(span.start_s - ready_s)
    return Overhead(
        late_s=_mean(late),
        after_f_s=_mean(own[ActionKind.F]),
        after_b_s=_mean(own[ActionKind.B]),
        after_w_s=_mean(own[ActionKind.W]),
        message_s=_mean(message),
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _source(span: Span, *, split: bool) -> tuple[ActionKind, int]:
    """Kind and stage of the action whose result this one takes; the stage may not exist."""
    if span.kind is ActionKind.F:
        return ActionKind.F, span.stage - 1
    if span.kind is ActionKind.W and split:
        return ActionKind.B, span.stage
    return ActionKind.B, span.stage + 1
