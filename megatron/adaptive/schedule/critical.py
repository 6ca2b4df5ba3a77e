"""The critical path of a simulated step: the chain of actions and messages that made it so long.

It starts at the action that ended last and goes back: to the action that kept the rank busy until
this one's start, or to the one whose message arrived just then.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.simulate import SimResult, SimSpan

__all__ = ["PathStep", "critical_path"]

_TOLERANCE_S = 1e-12


@dataclass(frozen=True, kw_only=True)
class PathStep:
    """One action on the path.

    Attributes:
        rank: where it ran.
        span: the action with its times.
        wait_s: seconds between the end of the step before it on the path and its start: the
            message's way, or time in which a rule kept back what was ready.
    """

    rank: int
    span: SimSpan
    wait_s: float


def critical_path(result: SimResult) -> tuple[PathStep, ...]:
    """Return the critical path, first action first.

    The times of its actions and its waits add up to the makespan.
    """
    ends = {
        (rank, span.action): (index, span)
        for rank, spans in enumerate(result.spans)
        for index, span in enumerate(spans)
    }
    rank = max(range(len(result.spans)), key=lambda r: result.spans[r][-1].end_s)
    index = len(result.spans[rank]) - 1
    path: list[PathStep] = []
    while True:
        span = result.spans[rank][index]
        before = [(rank, index - 1)] if index else []
        producer = _producer(result, rank, span.action)
        if producer is not None:
            before.append((producer[0], ends[producer][0]))
        if not before:
            path.append(PathStep(rank=rank, span=span, wait_s=span.start_s))
            return tuple(reversed(path))
        # The later end is what this action waited for; on a tie its own rank was busy.
        latest = max(before, key=lambda place: result.spans[place[0]][place[1]].end_s)
        wait_s = span.start_s - result.spans[latest[0]][latest[1]].end_s
        if producer is not None and latest[0] == rank and wait_s > _TOLERANCE_S:
            # The rank was idle: it waited for the message, however early that was sent.
            latest = before[1]
            wait_s = span.start_s - result.spans[latest[0]][latest[1]].end_s
        path.append(PathStep(rank=rank, span=span, wait_s=wait_s))
        rank, index = latest


def _producer(result: SimResult, rank: int, action: Action) -> tuple[int, Action] | None:
    """Where the input of an action comes from, with its rank; None for the first forwards."""
    placement = result.placement
    kind, chunk, microbatch = action.kind, action.chunk, action.microbatch
    if kind is ActionKind.W:
        if action.piece:
            return rank, Action(kind, chunk, microbatch, action.piece - 1)
        return rank, Action(ActionKind.B, chunk, microbatch)
    place = (placement.previous_of if kind is ActionKind.F else placement.next_of)(rank, chunk)
    if place is not None:
        return place[0], Action(kind, place[1], microbatch)
    return None if kind is ActionKind.F else (rank, Action(ActionKind.F, chunk, microbatch))
