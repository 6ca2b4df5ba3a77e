"""Supports pipelines whose stages have different numbers of data-parallel replicas (widths).

The microbatches of a step are numbered from 0 for the whole job, and microbatch m runs on replica
``m % widths[s]`` of stage s. Each replica also numbers its microbatches from 0::

    widths 2-1-3          microbatch of the step     0  1  2  3  4  5
    stage 0, rank 0       index on the rank          0     1     2
             rank 1                                     0     1     2
    stage 1, rank 2                                  0  1  2  3  4  5
    stage 2, rank 3                                  0        1
             rank 4                                     0        1
             rank 5                                        0        1

A rank may therefore exchange messages with several ranks of a neighbouring stage, but it sends each
microbatch to only one of these ranks. Every rank has one chunk.

**Order of actions.** A rank orders its microbatches as in a pipeline of equal stages, except for
the warm-up. The warm-up of a replica contains enough forward passes for each rank of the next stage
to run its own warm-up and one more forward pass. ``docs/reference/schedules.md`` contains a
drawing.

1F1B cannot deadlock: The backward pass of microbatch m needs forward passes on every earlier stage,
and these wait only for backward passes of microbatches below m.

A run-time rule with a limit on activations cannot deadlock either. The first unfinished microbatch
is the next microbatch of every rank that still has to process it, and none of these ranks holds
another microbatch.
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
"""Names of the schedules and run-time rules that support stages of unequal widths."""

_SLACK = 1.5
"""Ratio of the default limit on activations to the activations that a replica holds under 1F1B.

``memory_caps`` uses the same ratio for stages of equal width.
"""


@dataclass(frozen=True)
class Widths:
    """Maps the replicas of all stages to global ranks, which are numbered stage by stage.

    Attributes:
        sizes: Number of replicas of each stage in pipeline order, each at least 1.

    Raises:
        ScheduleError: There are no stages, or a stage has no replicas.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ScheduleError(
                "widths must contain at least one stage, each with at least one replica, got "
                f"{self}"
            )

    def __str__(self) -> str:
        return "-".join(map(str, self.sizes))

    @property
    def num_stages(self) -> int:
        """Returns the number of stages of the pipeline."""
        return len(self.sizes)

    @property
    def num_ranks(self) -> int:
        """Returns the total number of ranks of all stages."""
        return sum(self.sizes)

    @property
    def round_size(self) -> int:
        """Returns the smallest number of microbatches that every stage can divide equally.

        All replicas of a stage then process the same number of microbatches.
        """
        return math.lcm(*self.sizes)

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))

    def rank_of(self, stage: int, replica: int) -> int:
        """Returns the global rank of the replica with index ``replica`` of ``stage``."""
        return self._firsts[stage] + replica

    def place_of(self, rank: int) -> tuple[int, int]:
        """Returns the stage of ``rank``, and the index of the rank's replica within this stage.

        Raises:
            ScheduleError: The rank does not exist.
        """
        for stage, size in enumerate(self.sizes):
            if 0 <= rank - self._firsts[stage] < size:
                return stage, rank - self._firsts[stage]
        raise ScheduleError(
            f"rank {rank} does not exist in a pipeline with {self} replicas per stage; ranks are "
            "numbered from 0"
        )

    def ranks_of(self, stage: int) -> range:
        """Returns the ranks of ``stage``, ordered by replica."""
        return range(self._firsts[stage], self._firsts[stage + 1])

    def pipeline_of(self, replica: int) -> list[int]:
        """Returns the global ranks that form a pipeline, one per stage.

        On each stage, this is the rank of the replica with the index ``replica`` modulo the stage's
        number of replicas.
        """
        return [self.rank_of(stage, replica % size) for stage, size in enumerate(self.sizes)]

    def route(self, rank: int, to_stage: int, microbatch: int) -> tuple[int, int]:
        """Returns the rank that runs a microbatch on another stage.

        Args:
            rank: Rank on which the microbatch has the index ``microbatch``.
            to_stage: Index of the other stage.
            microbatch: Index of the microbatch among the microbatches of ``rank``.

        Returns:
            Rank of the other stage, and index of the microbatch on that rank.
        """
        stage, replica = self.place_of(rank)
        whole = microbatch * self.sizes[stage] + replica
        index, to_replica = divmod(whole, self.sizes[to_stage])
        return self.rank_of(to_stage, to_replica), index

    def neighbours_of(self, rank: int) -> tuple[int, ...]:
        """Returns the sorted ranks with which ``rank`` exchanges messages."""
        stage, _ = self.place_of(rank)
        ranks = {
            self.route(rank, other, microbatch)[0]
            for other in (stage - 1, stage + 1)
            if 0 <= other < self.num_stages
            for microbatch in range(self.sizes[other])
        }
        return tuple(sorted(ranks))

    def own_microbatches(self, stage: int, num_microbatches: int) -> int:
        """Returns the number of microbatches per replica of ``stage``.

        Args:
            stage: Index of the stage.
            num_microbatches: Number of microbatches per step of the whole job.

        Raises:
            ScheduleError: The replicas of the stage would have different numbers of microbatches.
        """
        each, rest = divmod(num_microbatches, self.sizes[stage])
        if rest or not each:
            raise ScheduleError(
                f"the {self.sizes[stage]} replicas of stage {stage} (widths {self}) cannot "
                f"divide {num_microbatches} microbatches equally; use a multiple of "
                f"{self.round_size}"
            )
        return each

    def warmup(self, stage: int) -> int:
        """Returns the number of warm-up forward passes that a replica of ``stage`` runs.

        The number is large enough for each rank of the next stage to run its own warm-up and one
        more forward pass. If all stages have the same number of replicas, the result is the number
        of following stages.
        """
        warmup = 0
        for later in range(self.num_stages - 1, stage, -1):
            warmup = -(-(warmup + 1) * self.sizes[later] // self.sizes[later - 1])
        return warmup


def chosen(sizes: Sequence[int] | None) -> Widths | None:
    """Converts ``sizes`` to :class:`Widths`, or returns ``None`` if all stages are equally wide."""
    return Widths(tuple(sizes)) if sizes is not None and len(set(sizes)) > 1 else None


def placement_of(widths: Widths) -> Placement:
    """Returns the placement of a pipeline that has one replica of each stage in ``widths``."""
    return Placement(num_ranks=widths.num_stages, num_chunks=1)


def make_policy(name: str, widths: Widths, stage: int, num_microbatches: int) -> Policy:
    """Returns the policy that the replicas of ``stage`` use.

    Args:
        name: Name in :data:`SCHEDULES`, or ``forward-only``.
        widths: Number of replicas of each stage.
        stage: Index of the stage.
        num_microbatches: Number of microbatches per replica of this stage.

    Raises:
        ScheduleError: The schedule does not support stages of unequal width.
    """
    if name not in (*SCHEDULES, "forward-only"):
        raise ScheduleError(
            f"schedule {name} does not support stages of unequal widths ({widths}); choose one "
            f"of {', '.join(SCHEDULES)}"
        )
    if name == "1f1b":
        return Follow(order_after(widths.warmup(stage), num_microbatches), name)
    return make_policies(name, placement_of(widths), num_microbatches)[stage]


def default_cap(widths: Widths, stage: int, num_microbatches: int) -> float:
    """Returns the default limit on activations of a replica, in microbatches.

    The limit is 1.5 times the largest number of microbatches that a replica of this stage or of a
    later stage holds under 1F1B.

    Args:
        widths: Number of replicas of each stage.
        stage: Index of the replica's stage.
        num_microbatches: Number of microbatches per replica of this stage.
    """
    needed = max(widths.warmup(later) + 1 for later in range(stage, widths.num_stages))
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
    """Simulates a step with stages of unequal widths, and checks that the step finishes.

    Backward passes include weight gradients. Messages have a latency, but do not occupy a link.

    Args:
        name: Name in :data:`SCHEDULES`.
        widths: Number of replicas of each stage.
        num_microbatches: Number of microbatches per step of the whole job.
        forward_s: Time of a forward pass on each stage, in seconds.
        backward_s: Time of a backward pass on each stage, including weight gradients, in seconds.
        message_s: Latency in seconds of messages between each stage and the next, in both
            directions, or empty for no latency.
        cap: Maximum number of microbatches that a rank holds under a run-time rule, or ``None`` for
            the default of each stage.

    Returns:
        Result of the simulation for all ranks of all stages.

    Raises:
        ScheduleError: The microbatches cannot be divided equally on a stage, or the ranks deadlock.
    """
    states = []
    policies = []
    for rank in range(widths.num_ranks):
        stage, _ = widths.place_of(rank)
        microbatches = widths.own_microbatches(stage, num_microbatches)
        policies.append(make_policy(name, widths, stage, microbatches))
        state = RankState(
            placement=placement_of(widths),
            rank=stage,
            num_microbatches=microbatches,
            cap=default_cap(widths, stage, microbatches) if cap is None else cap,
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
