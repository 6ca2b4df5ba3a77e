"""Stages of unequal width: how many replicas each has, and which of them works on a microbatch.

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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from megatron.adaptive.errors import ScheduleError


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
