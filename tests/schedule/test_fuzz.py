"""Tests random pipelines, in many of which actions overlap or microbatches have different sizes.

``python tests/schedule/test_fuzz.py`` simulates ten thousand pipelines with whole microbatches, and
ten thousand with sequences that are cut into slices. The tests simulate a tenth of these.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from megatron.adaptive.schedule.action import Action
from megatron.adaptive.schedule.catalog import is_rule, make_policies, policy_names
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.validate import validate
from megatron.adaptive.schedule.workload import Link, StageTimes, draw

CASES = {name: 150 for name in policy_names() if is_rule(name)}
CASES |= {"adaptive": 500, "hinted": 200, "any": 15}


@dataclass
class AnyThatFits:
    """Policy that chooses a random action among those that are ready and fit into memory.

    The memory limit must be respected with any policy.
    """

    rng: random.Random
    name: str = "any"

    def pick(self, state: RankState) -> Action | None:
        options = [action for action in state.ready() if state.fits(action)]
        return self.rng.choice(options) if options else None


@pytest.mark.parametrize("name", sorted(CASES))
def test_no_random_pipeline_deadlocks(name: str) -> None:
    run_random(name, CASES[name])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "hinted" else [])
        for name in sorted(CASES)
    ],
)
def test_no_random_pipeline_of_slices_deadlocks(name: str) -> None:
    run_random(name, CASES[name], most_slices=9)


def run_random(name: str, cases: int, most_slices: int = 1) -> None:
    rng = random.Random(name)
    for case in range(cases):
        chunks = rng.choice([1, 2, 2, 3, 4])
        placement = Placement(
            num_ranks=rng.randint(1, 8), num_chunks=chunks, kind=rng.choice(["loop", "v"])
        )
        microbatches = rng.randint(1, 10)
        num_slices = rng.randint(2, most_slices) if most_slices > 1 else 1
        cap = rng.choice([1.0, rng.uniform(1, 3), 10.0])
        sizes = None
        if case % 2:
            spread = rng.choice([0.3, 1.0, 2.0])
            sizes = [
                rng.choice([0.1, rng.lognormvariate(0, spread)])
                for _ in range(microbatches * num_slices)
            ]
            wholes = [
                sum(sizes[first : first + num_slices]) / num_slices
                for first in range(0, len(sizes), num_slices)
            ]
            cap = rng.choice([max(1.0, *wholes), max(cap, *wholes)])
        pieces = rng.choice([0, 1, 2, 4])
        forward_only = case % 20 == 1
        stages = placement.num_stages
        cuts, share = rng.choice([0, 0, 1, 2, 8]), rng.random()
        forward_s = tuple(rng.choice([0.0, 1.0, rng.uniform(0, 5)]) for _ in range(stages))
        backward_s = tuple(rng.uniform(0, 5) for _ in range(stages))
        times = StageTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            weight_s=tuple(rng.uniform(0, 5) for _ in range(stages)),
            exchange_s=tuple(share * min(pair) for pair in zip(forward_s, backward_s, strict=True))
            * bool(cuts),
            exchanges=cuts,
        )
        seed = rng.getrandbits(30)
        link = Link(latency_s=rng.choice([0.0, 0.5, 20.0]), occupancy_s=rng.choice([0.0, 3.0]))
        workload = draw(
            placement,
            microbatches,
            times,
            seed=seed,
            action_sigma=0.5,
            latency_sigma=2.0,
            link=link,
            num_slices=num_slices,
        )
        policies: tuple[Policy, ...] = (AnyThatFits(rng),) * placement.num_ranks
        if name != "any":
            policies = make_policies(
                name,
                placement,
                microbatches,
                cap=cap,
                weight_pieces=pieces,
                shares=case % 3 > 0,
                pace=(link.latency_s, rng.uniform(0, 3), 1.0),
                num_slices=num_slices,
            )
        result = simulate(
            placement,
            microbatches,
            policies,
            workload,
            cap=cap,
            sizes=sizes,
            weight_pieces=pieces,
            beside=cuts > 0,
            forward_only=forward_only and name != "hinted",
            compiled=True,
        )
        assert max(result.peak_units) <= cap * (1 + 1e-6) + 1e-3
        # This checks that each action ran once and in a valid order.
        if case % 20 < 3 or name == "any":
            validate(result.to_schedule("run"))


if __name__ == "__main__":
    for policy, count in CASES.items():
        for most_slices in (1, 16):
            run_random(policy, 10 * count, most_slices)
            print(
                f"{policy}, up to {most_slices} slices: {10 * count} pipelines, no deadlock, no cap"
                " exceeded",
                flush=True,
            )
