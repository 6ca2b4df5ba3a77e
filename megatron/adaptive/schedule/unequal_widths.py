"""Stages of unequal width: how many replicas each has, who works on which microbatch, and when.

Of a step's microbatches, counted over the whole job, stage s gives microbatch m to its replica
``m % widths[s]``. Each replica counts its own from 0, as all of this package does::

    widths 2-1-3          microbatch of the step     0  1  2  3  4  5
    stage 0, rank 0       its own                    0     1     2
             rank 1                                     0     1     2
    stage 1, rank 2                                  0  1  2  3  4  5
    stage 2, rank 3                                  0        1
             rank 4                                     0        1
             rank 5                                        0        1

So a rank may exchange messages with several ranks of a neighbouring stage, each microbatch with
one. Every rank holds one chunk.

**Orders.** The rules of one rank are the usual ones, over its own microbatches. What differs is how
far a replica must be ahead: 1F1B does as many warm-up forwards as it takes that the ranks of the
next stage together can do theirs and one more each; ``docs/schedules.md`` has a picture.

It cannot deadlock: all forwards that a backward of microbatch m waits for come, at every earlier
stage, after backwards of microbatches below m only.

Nor can a rule under a cap: of the microbatches that are not finished the lowest is the next one
wherever it has to go, and every rank that has not had it holds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from megatron.adaptive.config.schedule_specs import selectable_names
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import rank_kernel
from megatron.adaptive.schedule.catalog import make_policies
from megatron.adaptive.schedule.fixed_in_loop import order_after
from megatron.adaptive.schedule.policy import Follow, Policy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.simulate import SimResult, run_states
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import Link, StageTimes, draw

SCHEDULES = selectable_names(lambda spec: spec.allows_unequal_stages)
"""Schedules that stages of unequal widths can follow."""

_SLACK = 1.5  # as for equal stages, see ``memory``


@dataclass(frozen=True)
class Widths:
    """The replicas of each stage, and the ranks that they are: stage by stage.

    Attributes:
        sizes: replicas of each stage in pipeline order, each at least 1.

    Raises:
        ScheduleError: there is no stage, or one without a replica.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ScheduleError(
                f"stages of widths {self}: there must be one at least, each with a replica or more"
            )

    def __str__(self) -> str:
        return "-".join(map(str, self.sizes))

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.sizes)

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages together."""
        return sum(self.sizes)

    @property
    def round_size(self) -> int:
        """Microbatches after which every replica has had the same number as its siblings."""
        return math.lcm(*self.sizes)

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))

    def rank_of(self, stage: int, replica: int) -> int:
        """The rank that is a replica of a stage."""
        return self._firsts[stage] + replica

    def place_of(self, rank: int) -> tuple[int, int]:
        """Stage and replica that a rank is.

        Raises:
            ScheduleError: there is no such rank.
        """
        for stage, size in enumerate(self.sizes):
            if 0 <= rank - self._firsts[stage] < size:
                return stage, rank - self._firsts[stage]
        raise ScheduleError(f"rank {rank} is none of stages of widths {self}: ranks count from 0")

    def ranks_of(self, stage: int) -> range:
        """The ranks of a stage, by replica."""
        return range(self._firsts[stage], self._firsts[stage + 1])

    def pipeline_of(self, replica: int) -> list[int]:
        """Ranks of a way through all stages, with that replica where a stage has so many."""
        return [self.rank_of(stage, replica % size) for stage, size in enumerate(self.sizes)]

    def route(self, rank: int, to_stage: int, microbatch: int) -> tuple[int, int]:
        """Returns the rank that holds a rank's microbatch at another stage.

        Args:
            rank: that knows the microbatch.
            to_stage: the other stage.
            microbatch: as ``rank`` counts.

        Returns:
            The rank there, and the microbatch as that one counts.
        """
        stage, replica = self.place_of(rank)
        own, other = divmod(microbatch * self.sizes[stage] + replica, self.sizes[to_stage])
        return self.rank_of(to_stage, other), own

    def neighbours_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that one exchanges messages with, sorted."""
        stage, _ = self.place_of(rank)
        found = {
            self.route(rank, other, microbatch)[0]
            for other in (stage - 1, stage + 1)
            if 0 <= other < self.num_stages
            for microbatch in range(self.sizes[other])
        }
        return tuple(sorted(found))

    def own_microbatches(self, stage: int, num_microbatches: int) -> int:
        """Microbatches of a step for each replica of a stage.

        Args:
            stage: the stage.
            num_microbatches: of the step, over the whole job.

        Raises:
            ScheduleError: the stage's replicas would not have the same number.
        """
        own, rest = divmod(num_microbatches, self.sizes[stage])
        if rest or not own:
            raise ScheduleError(
                f"{num_microbatches} microbatches over the {self.sizes[stage]} replicas of stage"
                f" {stage} (widths {self}): each must have the same number; give a multiple of"
                f" {self.round_size}"
            )
        return own

    def warmup(self, stage: int) -> int:
        """Forwards of a replica before its first backward: what the next stage holds at most.

        Its ranks do as many and one more each before they wait for a backward. For equal widths
        that is the number of stages that follow.
        """
        warmup = 0
        for later in range(self.num_stages - 1, stage, -1):
            warmup = -(-(warmup + 1) * self.sizes[later] // self.sizes[later - 1])
        return warmup


def chosen(sizes: Sequence[int] | None) -> Widths | None:
    """The widths where they differ, ``None`` for stages that are all alike."""
    return Widths(tuple(sizes)) if sizes is not None and len(set(sizes)) > 1 else None


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


def simulate(
    name: str,
    widths: Widths,
    num_microbatches: int,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    message_s: Sequence[float] = (),
    cap: float | None = None,
) -> SimResult:
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

    Returns:
        One entry per rank where ``SimResult`` has one per rank.

    Raises:
        ScheduleError: the microbatches do not divide, or no rank can go on.
    """
    states, policies = [], []
    for rank in range(widths.num_ranks):
        stage, _ = widths.place_of(rank)
        own = widths.own_microbatches(stage, num_microbatches)
        policies.append(make_policy(name, widths, stage, own))
        state = RankState(
            placement=placement_of(widths),
            rank=stage,
            num_microbatches=own,
            cap=default_cap(widths, stage, own) if cap is None else cap,
        )
        state.numbers[rank_kernel.RANK] = rank
        states.append(state)
    links = {}
    for stage, latency_s in enumerate(message_s):
        links[stage, stage + 1] = links[stage + 1, stage] = Link(latency_s=latency_s)
    times = StageTimes(forward_s=tuple(forward_s), backward_s=tuple(backward_s))
    workload = replace(
        draw(placement_of(widths), num_microbatches, times, links=links),
        occupancy_ps=np.zeros((widths.num_ranks, widths.num_ranks), dtype=np.int64),
    )
    return run_states(states, policies, workload, widths=widths.sizes)
