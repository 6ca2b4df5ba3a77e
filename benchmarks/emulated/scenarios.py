"""What the emulated ranks do: how long each action takes, which rank or link is slow.

All durations of a step are drawn before it, from a seed, and are the same for every competitor.
They belong to *half-stages*: the pipeline is cut into two halves per rank, in pipeline order. A
competitor with two chunks per rank runs a half-stage as one stage; one with a single chunk runs two
neighbouring halves as one, and takes the sum::

    half-stage          0   1   2   3   4   5   6   7
    1 chunk, 4 ranks    └ 0 ┘   └ 1 ┘   └ 2 ┘   └ 3 ┘     stage and rank
    2 chunks, loop      0   1   2   3   0   1   2   3     rank of each stage
    2 chunks, V         0   1   2   3   3   2   1   0     rank of each stage

What a rank is (slow, fast) multiplies all that it runs, whichever stages these are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.placement import Placement

HALVES = 2
"""Half-stages per rank."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Mean duration of one half-stage's actions on a rank of ordinary speed, in seconds."""

    forward_s: float = 0.008
    backward_s: float = 0.008
    weight_s: float = 0.008

    @property
    def rank_s(self) -> float:
        """Mean time of one microbatch on one rank: forward and whole backward of both halves."""
        return HALVES * (self.forward_s + self.backward_s + self.weight_s)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One kind of disturbance.

    Attributes:
        name: heading in the table.
        jitter_sigma: sigma of the logarithm of each action's own random factor, whose mean is 1.
        length_sigma: the same for a factor that a microbatch carries through all its actions.
        length_mix: instead, ``(probability, length)`` of a microbatch; lengths average to 1.
        rank_factor: what the durations of one rank, the one in the middle, are multiplied by.
        link_delay: time that a message takes on one link, the one in the middle, either way, in
            forwards of a whole rank.
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
        # Packed conversations: most are short, a few fill the window.
        Scenario(name="long tail", length_mix=((0.75, 0.5), (0.15, 1.5), (0.1, 4.0))),
        Scenario(name="slow link", link_delay=1.0),
        Scenario(name="fast rank", rank_factor=1 / 1.43),
        Scenario(name="straggler", rank_factor=1.3),
    )
}


@dataclass(frozen=True, kw_only=True)
class Draws:
    """All durations of one step.

    Attributes:
        num_ranks: ranks of the pipeline.
        num_microbatches: microbatches of the step.
        halves_s: seconds on a rank of ordinary speed, ``[kind][half-stage][microbatch]``.
        rank_factors: multiplies the durations of each rank.
        slow_link: the two ranks of the slow link, ``None`` for none.
        link_delay_s: seconds that a message takes there.
    """

    num_ranks: int
    num_microbatches: int
    halves_s: dict[ActionKind, tuple[tuple[float, ...], ...]]
    rank_factors: tuple[float, ...]
    slow_link: tuple[int, int] | None = None
    link_delay_s: float = 0.0

    def table_s(self, placement: Placement) -> dict[ActionKind, tuple[tuple[float, ...], ...]]:
        """Return the seconds of all actions, ``[kind][stage][microbatch]``.

        ``B`` is the backward by inputs alone; ``placement`` has one or two chunks per rank.
        """
        each = HALVES // placement.num_chunks
        factors = [self.rank_factors[placement.locate(s)[0]] for s in range(placement.num_stages)]
        return {
            kind: tuple(
                tuple(sum(halves) * factor for halves in zip(*rows, strict=True))
                for rows, factor in zip(
                    (of_kind[at : at + each] for at in range(0, len(of_kind), each)),
                    factors,
                    strict=True,
                )
            )
            for kind, of_kind in self.halves_s.items()
        }

    def delay_s(self, from_rank: int, to_rank: int) -> float:
        """Seconds that a message takes from one rank to another, on top of what gloo takes."""
        if self.slow_link is None or {from_rank, to_rank} != set(self.slow_link):
            return 0.0
        return self.link_delay_s


def draw(
    scenario: Scenario,
    *,
    num_ranks: int,
    num_microbatches: int,
    times: Times,
    seed: int,
    repetition: int,
) -> Draws:
    """Draw the durations of one step; equal arguments give equal draws, in every process."""
    rng = random.Random(f"{seed}/{scenario.name}/{num_ranks}/{num_microbatches}/{repetition}")
    lengths = _lengths(scenario, num_microbatches, rng)
    halves_s = {
        kind: tuple(
            tuple(mean_s * length * _factor(rng, scenario.jitter_sigma) for length in lengths)
            for _ in range(HALVES * num_ranks)
        )
        for kind, mean_s in zip(
            ActionKind, (times.forward_s, times.backward_s, times.weight_s), strict=True
        )
    }
    middle = num_ranks // 2
    factors = [1.0] * num_ranks
    factors[middle] = scenario.rank_factor
    return Draws(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        halves_s=halves_s,
        rank_factors=tuple(factors),
        slow_link=(middle - 1, middle) if scenario.link_delay else None,
        link_delay_s=scenario.link_delay * HALVES * times.forward_s,
    )


def _factor(rng: random.Random, sigma: float) -> float:
    """A lognormal factor with mean 1."""
    return rng.lognormvariate(-sigma * sigma / 2, sigma) if sigma else 1.0


def _lengths(scenario: Scenario, count: int, rng: random.Random) -> list[float]:
    if scenario.length_mix:
        chances, lengths = zip(*scenario.length_mix, strict=True)
        return rng.choices(lengths, weights=chances, k=count)
    return [_factor(rng, scenario.length_sigma) for _ in range(count)]
