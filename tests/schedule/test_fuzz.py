"""Ten thousand random pipelines: every rule finishes each of them, within its cap."""

from __future__ import annotations

import random

import pytest

from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.registry import make_policies
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.validate import validate
from megatron.adaptive.schedule.workload import Jitter, Link, StageTimes, draw

CASES = {"adaptive": 6000, "dfc": 1500, "bfc": 1500, "hinted": 1000}


@pytest.mark.parametrize("name", sorted(CASES))
def test_no_random_pipeline_deadlocks(name: str) -> None:
    rng = random.Random(name)
    for case in range(CASES[name]):
        chunks = rng.choice([1, 2, 2, 3, 4])
        placement = Placement(
            num_ranks=rng.randint(1, 8), num_chunks=chunks, kind=rng.choice(["loop", "v"])
        )
        microbatches = rng.randint(1, 10)
        units = tuple(rng.choice([0.1, 0.5, 1.0, 2.5]) for _ in range(chunks))
        least = sum(units)
        cap = rng.choice([least, least * rng.uniform(1, 3), least * 10])
        pieces = rng.choice([0, 1, 2, 4])
        stages = placement.num_stages
        times = StageTimes(
            forward_s=tuple(rng.choice([0.0, 1.0, rng.uniform(0, 5)]) for _ in range(stages)),
            backward_s=tuple(rng.uniform(0, 5) for _ in range(stages)),
            weight_s=tuple(rng.uniform(0, 5) for _ in range(stages)),
        )
        jitter = Jitter(seed=rng.getrandbits(30), action_sigma=0.5, latency_sigma=2.0)
        link = Link(latency_s=rng.choice([0.0, 0.5, 20.0]), occupancy_s=rng.choice([0.0, 3.0]))
        workload = draw(placement, microbatches, times, jitter=jitter, link=link)
        policies: tuple[Policy, ...] = make_policies(
            name, placement, microbatches, cap=None, weight_pieces=pieces
        )
        if name == "hinted":
            # A hint must fit its cap: the whole rank's microbatch is the unit there.
            units, cap = (1.0 / chunks,) * chunks, max(1.0, cap / least)
            policies = make_policies(name, placement, microbatches, cap=cap, weight_pieces=pieces)
        result = simulate(
            placement,
            microbatches,
            policies,
            workload,
            cap=cap,
            activation_units=units,
            weight_pieces=pieces,
            kept_fraction=rng.choice([0.0, 0.4, 1.0]),
            compiled=True,
        )
        assert max(result.peak_units) <= cap * (1 + 1e-6) + 1e-3
        if case % 20 == 0:  # each action once, in order, dependencies kept
            validate(result.to_schedule("run"))
