"""Orders of work where stages have unequal widths, and the simulation of a step with them.

The rules of one rank are the usual ones, over its own microbatches (see ``widths``). What differs
is how far a replica must be ahead: 1F1B does as many warm-up forwards as it takes that the ranks of
the next stage together can do theirs and one more each::

    widths 1-2, four microbatches       stage 0          | F0 F1 F2 B0 F3 B1 B2 B3
                                        stage 1, rank 1  |    F0    B0    F1 B1          (0 and 2)
                                                 rank 2  |       F0 B0       F1 B1       (1 and 3)

It cannot deadlock: all forwards that a backward of microbatch m waits for come, at every earlier
stage, after backwards of microbatches below m only. Simulated for all widths up to 4 of three
stages, with work in proportion to the width, ranks are idle for 9% of 60 microbatches; were the
warm-up only as long as all later ranks are many, for 16%, and for 59% with 1-4-1.

Nor can a rule under a cap: of the microbatches that are not finished the lowest is the next one
wherever it has to go, and every rank that has not had it holds nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.adaptive.config.schedule import UNEQUAL_SCHEDULES
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import memory
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.one_f_one_b import order_after
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow, Policy
from megatron.adaptive.schedule.registry import make_policies
from megatron.adaptive.schedule.state import RankState
from megatron.adaptive.schedule.widths import Widths

__all__ = ["SCHEDULES", "StepOfRanks", "default_cap", "make_policy", "simulate"]

SCHEDULES = UNEQUAL_SCHEDULES
"""Schedules that stages of unequal widths can follow."""

_SLACK = 1.5  # as for equal stages, see ``memory``


def placement_of(widths: Widths) -> Placement:
    """The stages without their replicas."""
    return Placement(num_ranks=widths.num_stages, num_chunks=1)


def make_policy(name: str, widths: Widths, stage: int, num_microbatches: int) -> Policy:
    """Make the policy of a stage's replicas.

    Args:
        name: one of :data:`SCHEDULES`, or ``forward-only``.
        widths: of all stages.
        stage: whose policy it is.
        num_microbatches: of each replica of this stage.

    Raises:
        ScheduleError: the schedule does not know such stages.
    """
    if name not in (*SCHEDULES, "forward-only"):
        raise ScheduleError(
            f"schedule {name} for stages of widths {widths}: choose one of {', '.join(SCHEDULES)}"
        )
    if name == "1f1b":
        return Follow(order_after(widths.warmup(stage), num_microbatches), name)
    return make_policies(name, placement_of(widths), num_microbatches)[stage]


def default_cap(widths: Widths, stage: int, num_microbatches: int) -> float:
    """The most microbatches that a replica keeps if nobody gives a cap.

    As for equal stages: what 1F1B needs at its hungriest stage, and half as much again.

    Args:
        widths: of all stages.
        stage: whose cap it is.
        num_microbatches: of each replica of this stage.
    """
    needed = max(widths.warmup(one) + 1 for one in range(stage, widths.num_stages))
    return max(1.0, float(min(math.ceil(needed * _SLACK), num_microbatches)))


@dataclass(frozen=True, kw_only=True)
class StepOfRanks:
    """A simulated step.

    Attributes:
        seconds: from its begin to its last action's end.
        orders: what each rank did, in its own microbatches.
        peaks: microbatches that each rank held at most.
        busy_s: seconds that each rank worked.
        ends_s: end of each rank's last action.
    """

    seconds: float
    orders: tuple[tuple[Action, ...], ...]
    peaks: tuple[float, ...]
    busy_s: tuple[float, ...]
    ends_s: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """Idle part of all ranks' time."""
        return 1.0 - sum(self.busy_s) / (self.seconds * len(self.busy_s))


def simulate(
    name: str,
    widths: Widths,
    num_microbatches: int,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    message_s: Sequence[float] = (),
    cap: float | None = None,
) -> StepOfRanks:
    """Run a step with the policies and states that a run has, and check that it ends.

    Backwards are whole. Messages take their time on the way and hold up nobody.

    Args:
        name: one of :data:`SCHEDULES`.
        widths: of the stages.
        num_microbatches: of the step, over the whole job.
        forward_s: of one microbatch at each stage.
        backward_s: likewise, weight gradients included.
        message_s: from each stage to the next and back; none where empty.
        cap: microbatches that a rank keeps, for a rule; the default where ``None``.

    Raises:
        ScheduleError: the microbatches do not divide, or no rank can go on.
    """
    ranks = [_Rank(name, widths, rank, num_microbatches, cap) for rank in range(widths.num_ranks)]
    work = {ActionKind.F: forward_s, ActionKind.B: backward_s}
    events: list[tuple[float, int, Callable[[], None], int]] = []
    counter = iter(range(1 << 62))

    def later(at: float, then: Callable[[], None], rank: int) -> None:
        heapq.heappush(events, (at, next(counter), then, rank))

    def begin(rank: int, now: float) -> None:
        own = ranks[rank]
        action = own.start()
        if action is None:
            return
        seconds = work[action.kind][own.stage]
        own.busy_s += seconds
        later(now + seconds, lambda: end(rank, action, now + seconds), rank)

    def end(rank: int, action: Action, now: float) -> None:
        own = ranks[rank]
        own.finish(action)
        own.end_s = now
        to_stage = own.stage + (1 if action.kind is ActionKind.F else -1)
        if not 0 <= to_stage < widths.num_stages:
            return
        peer, microbatch = widths.route(rank, to_stage, action.microbatch)
        delay = message_s[min(own.stage, to_stage)] if message_s else 0.0
        state, kind = ranks[peer].state, action.kind
        later(now + delay, lambda: state.arrive(kind, 0, microbatch), peer)

    for rank in range(widths.num_ranks):
        begin(rank, 0.0)
    now = 0.0
    while events:
        now, _, happens, rank = heapq.heappop(events)
        happens()
        begin(rank, now)
    stuck = next((own for own in ranks if not own.state.done), None)
    if stuck is not None:
        raise ScheduleError(
            f"{name} with widths {widths}: no rank can go on; {stuck.state.describe()}"
        )
    return StepOfRanks(
        seconds=now,
        orders=tuple(tuple(own.order) for own in ranks),
        peaks=tuple(own.state.peak_in_flight for own in ranks),
        busy_s=tuple(own.busy_s for own in ranks),
        ends_s=tuple(own.end_s for own in ranks),
    )


class _Rank:
    """One rank of a simulated step."""

    def __init__(
        self, name: str, widths: Widths, rank: int, num_microbatches: int, cap: float | None
    ) -> None:
        self.stage, _ = widths.place_of(rank)
        own = widths.own_microbatches(self.stage, num_microbatches)
        self.policy = make_policy(name, widths, self.stage, own)
        if cap is not None:
            memory.check_cap(cap, num_chunks=1)
        self.state = RankState(
            placement=placement_of(widths),
            rank=self.stage,
            num_microbatches=own,
            cap=default_cap(widths, self.stage, own) if cap is None else cap,
        )
        self.order: list[Action] = []
        self.busy_s = self.end_s = 0.0
        self._is_busy = False

    def start(self) -> Action | None:
        """Start what the policy picks, if the rank is free and something is ready."""
        action = None if self._is_busy or self.state.done else self.policy.pick(self.state)
        if action is not None:
            self.state.start(action)
            self.order.append(action)
            self._is_busy = True
        return action

    def finish(self, action: Action) -> None:
        """Note that it is done."""
        self.state.finish(action)
        self._is_busy = False
