"""Defines the durations of emulated actions, and which rank or link is slow.

All durations of a step are drawn from a seed before the step, and are the same for every
competitor. The durations are those of *half-stages*: the pipeline is split into two halves per
rank, in pipeline order. A competitor with two chunks per rank runs a half-stage as one stage. A
competitor with one chunk runs two neighbouring halves as one stage, which takes their total time::

    half-stage          0   1   2   3   4   5   6   7
    1 chunk, 4 ranks    └ 0 ┘   └ 1 ┘   └ 2 ┘   └ 3 ┘     stage and rank
    2 chunks, loop      0   1   2   3   0   1   2   3     rank of each stage
    2 chunks, V         0   1   2   3   3   2   1   0     rank of each stage

The factor of a slow or fast rank multiplies all actions of that rank, regardless of their stages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import Link, StageTimes, Workload, draw

HALVES = 2
"""Number of half-stages per rank."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Mean durations in seconds of the actions of a half-stage, on a rank with normal speed."""

    forward_s: float = 0.008
    backward_s: float = 0.008
    weight_s: float = 0.008


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Description of how the durations of actions and messages vary.

    Attributes:
        name: Title of the scenario in the table.
        jitter_sigma: Standard deviation of the logarithm of a random factor with mean 1, which is
            drawn for each action.
        length_sigma: Standard deviation of the logarithm of a random factor, which is drawn for
            each microbatch and applies to all its actions.
        length_mix: Pairs of a probability and a length of microbatches, which replace
            ``length_sigma``. The mean length is 1.
        rank_factor: Factor by which durations on the middle rank are multiplied.
        link_delay: Delay of messages on the middle link in both directions, as a multiple of the
            time of one forward pass through all stages of a rank.
    """

    name: str
    jitter_sigma: float = 0.0
    length_sigma: float = 0.0
    length_mix: tuple[tuple[float, float], ...] = ()
    rank_factor: float = 1.0
    link_delay: float = 0.0


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="quiet"),
        Scenario(name="jitter 0.1", jitter_sigma=0.1),
        Scenario(name="jitter 0.3", jitter_sigma=0.3),
        Scenario(name="jitter 0.5", jitter_sigma=0.5),
        Scenario(name="lengths", length_sigma=0.5),
        # Packed conversations have such lengths: most are short, and a few are as long as a
        # sequence.
        Scenario(name="long tail", length_mix=((0.75, 0.5), (0.15, 1.5), (0.1, 4.0))),
        Scenario(name="slow link", link_delay=1.0),
        Scenario(name="fast rank", rank_factor=1 / 1.43),
        Scenario(name="straggler", rank_factor=1.3),
    )
}


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Durations of all actions of a step, which depend only on the attributes of this object.

    Attributes:
        scenario: Scenario of the step.
        num_ranks: Number of ranks in the pipeline.
        num_microbatches: Number of microbatches in the step.
        times: Mean durations.
        seed: Seed of all random numbers.
        repetition: Index of the step.
    """

    scenario: Scenario
    num_ranks: int
    num_microbatches: int
    times: Times
    seed: int
    repetition: int

    def workload(self, placement: Placement) -> Workload:
        """Returns all durations for ``placement``, which has one or two chunks per rank.

        In the result, ``B`` is the part of the backward pass that computes the gradients of the
        inputs.
        """
        scenario, times, middle = self.scenario, self.times, self.num_ranks // 2
        factors = [1.0] * self.num_ranks
        factors[middle] = scenario.rank_factor
        text = f"{self.seed}/{scenario.name}/{self.num_ranks}/{self.num_microbatches}"
        rng = random.Random(f"{text}/{self.repetition}")
        work = draw(
            placement,
            self.num_microbatches,
            StageTimes.equal(
                HALVES * self.num_ranks,
                forward_s=times.forward_s,
                backward_s=times.backward_s,
                weight_s=times.weight_s,
            ),
            seed=rng.randrange(2**31),
            action_sigma=scenario.jitter_sigma,
            microbatch_sigma=scenario.length_sigma,
            links={
                pair: Link(latency_s=self.delay_s(*pair))
                for pair in ((middle - 1, middle), (middle, middle - 1))
            },
            rank_factors=tuple(factors),
        )
        if not scenario.length_mix:
            return work
        chances, lengths = zip(*scenario.length_mix, strict=True)
        drawn = rng.choices(lengths, weights=chances, k=self.num_microbatches)
        return replace(work, durations_ps=np.rint(work.durations_ps * drawn).astype(np.int64))

    def delay_s(self, from_rank: int, to_rank: int) -> float:
        """Returns the delay of messages from ``from_rank`` to ``to_rank`` in seconds."""
        middle = self.num_ranks // 2
        if {from_rank, to_rank} != {middle - 1, middle}:
            return 0.0
        return self.scenario.link_delay * HALVES * self.times.forward_s
