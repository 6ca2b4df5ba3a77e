"""Tests the limit on activations if replicas get different numbers and sizes of microbatches.

``python tests/engine/test_policy_factory.py`` simulates four thousand random steps. The tests
simulate a tenth of them.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from pathlib import Path

import numpy as np
import pytest

from megatron.adaptive.engine.policy_factory import Orders
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.schedule.catalog import Candidate, is_rule, make_schedule, policy_names
from megatron.adaptive.schedule.choose_by_simulation import candidates
from megatron.adaptive.schedule.document_rows import Batching
from megatron.adaptive.schedule.memory_caps import chunk_shares, default_cap
from megatron.adaptive.schedule.microbatch_assignment import Dealer
from megatron.adaptive.schedule.policy import Follow, RulePolicy
from megatron.adaptive.schedule.schedule_file import save
from megatron.adaptive.schedule.simulate import run_states
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.unequal_widths import Widths
from megatron.adaptive.schedule.workload import Link, StageTimes, draw

CASES = {name: 40 for name in policy_names() if is_rule(name)}
CASES |= {"adaptive": 220, "hinted": 100}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in ("bfc", "dfc") else [])
        for name in sorted(CASES)
    ],
)
def test_no_dealt_step_deadlocks(name: str) -> None:
    run_random(name, CASES[name])


def run_random(name: str, cases: int) -> None:
    """Simulates ``cases`` random steps of packed or padded documents with the policy ``name``.

    Checks that no step deadlocks or exceeds the limit on activations.
    """
    rng = random.Random(name)
    for case in range(cases):
        placement = Placement(
            num_ranks=rng.randint(1, 6),
            num_chunks=rng.choice([1, 2, 2, 3]),
            kind=rng.choice(["loop", "v"]),
        )
        replicas, pack_to = rng.randint(1, 3), rng.choice([None, 4096, 9000])
        batching = Batching(micro_batch_size=rng.randint(1, 3), pack_to=pack_to, replicas=replicas)
        count = replicas * batching.micro_batch_size * rng.randint(1, 9)
        spread = rng.choice([0.0, 0.8, 2.0])
        lengths = [min(4096, 1 + int(rng.lognormvariate(6, spread))) for _ in range(count)]
        rows = [[lengths[n] for n in row] for row in batching.plan(lengths)]
        dealer = Dealer("lengths", replicas=replicas, ranks=placement.num_ranks, pair=1e-3)
        dealt = dealer.deal([batching.size_of(row) for row in rows])
        pieces, cap = rng.choice([0, 1, 4]), rng.choice([None, 1.0, rng.uniform(1, 4)])
        for share in dealt:
            sizes = [batching.size_of(rows[n])[0] for n in share]
            orders = [
                Orders(
                    schedule=name,
                    placement=placement,
                    pp_rank=rank,
                    cap=cap,
                    splits=pieces > 0,
                    pieces=pieces,
                    beside=case % 4 == 0,
                )
                for rank in range(placement.num_ranks)
            ]
            for order in orders:
                order.use(dataclasses.replace(order.candidate(len(share)), shares=case % 3 > 0))
            states = [order.state(len(share), forward_only=False, sizes=sizes) for order in orders]
            largest = max(sizes) / statistics.fmean(sizes)
            least_cap = orders[0].candidate(len(share)).cap
            assert least_cap is not None
            assert {state.cap for state in states} == {max(least_cap, largest)}
            times = StageTimes(
                forward_s=tuple(rng.uniform(0, 2) for _ in range(placement.num_stages)),
                backward_s=tuple(rng.uniform(0, 4) for _ in range(placement.num_stages)),
                weight_s=tuple(rng.uniform(0, 2) for _ in range(placement.num_stages)),
            )
            workload = draw(
                placement,
                len(share),
                times,
                seed=case,
                action_sigma=0.4,
                latency_sigma=1.0,
                link=Link(latency_s=rng.choice([0.0, 0.5, 5.0])),
            )
            scaled = workload.durations_ps * np.array(sizes) / statistics.fmean(sizes)
            result = run_states(
                states,
                [order.policy(len(share), forward_only=False) for order in orders],
                dataclasses.replace(workload, durations_ps=scaled.astype(np.int64)),
                compiled=True,
            )
            assert result.num_actions == sum(state.num_actions for state in states)
            assert max(result.peak_units) <= max(least_cap, largest) * (1 + 1e-6) + 1e-3


def test_equal_sizes_change_nothing() -> None:
    orders = Orders(
        schedule="adaptive", placement=Placement(num_ranks=2, num_chunks=2, kind="v"), pp_rank=1
    )
    plain = orders.state(6, forward_only=False)
    assert orders.state(6, forward_only=False, sizes=[70.0] * 6).numbers == plain.numbers
    assert orders.state(6, forward_only=True, sizes=[70.0] * 5 + [2.0]).cap is None


def test_channels_take_the_short_ones_that_fill_the_cap() -> None:
    placement = Placement(num_ranks=4, num_chunks=1, kind="loop")
    orders = Orders(schedule="adaptive", placement=placement, pp_rank=0, cap=6.0)
    assert orders.inputs_in_flight(32) == 6
    assert orders.inputs_in_flight(32, smallest=0.5) == 12
    assert orders.inputs_in_flight(8, smallest=0.5) == 8


@pytest.mark.parametrize("num_slices", [1, 8])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_channels_take_what_auto_may_choose_to_keep(cap: float | None, num_slices: int) -> None:
    # The schedule may later choose a larger cap on activations than the initial one. Channels need
    # enough slots for it, because receivers would otherwise copy most messages.
    placement = Placement(num_ranks=4, num_chunks=2, kind="v")
    shares = (1 / num_slices,) * num_slices
    orders = Orders(
        schedule="auto", placement=placement, pp_rank=0, cap=cap, splits=True, slice_shares=shares
    )
    before = orders.inputs_in_flight(32)
    offered = candidates(
        placement, 32, most=cap or 99.0, splittable=True, also=["gpipe"], num_slices=num_slices
    )
    for candidate in (c for c in offered if c.cap is not None or cap is None):
        orders.use(candidate)
        assert orders.inputs_in_flight(32) <= before
    assert before == (32 if cap is None else 3) * placement.num_chunks * num_slices


def test_slices_are_items_of_a_step() -> None:
    placement = Placement(num_ranks=4, num_chunks=1, kind="loop")
    shares = (0.5, 0.25, 0.25)
    orders = Orders(
        schedule="adaptive", placement=placement, pp_rank=3, cap=6.0, slice_shares=shares
    )
    assert orders.inputs_in_flight(32) == 6 * 3
    state = orders.state(2, forward_only=False)
    assert (state.num_microbatches, state.num_slices, state.num_items) == (2, 3, 6)
    assert orders.state(2, forward_only=False, sizes=[30.0, 10.0]).num_items == 6
    assert orders.state(2, forward_only=True).num_items == 6


def test_the_number_of_slices_may_change_between_steps() -> None:
    placement = Placement(num_ranks=2, num_chunks=1, kind="loop")
    shares = [1 / 4] * 4
    orders = Orders(
        schedule="adaptive", placement=placement, pp_rank=0, cap=1.0, slice_shares=shares
    )
    assert orders.candidate(3).num_slices == 4
    policy = orders.policy(3, forward_only=False)
    orders.recut(2)
    assert orders.candidate(3).num_slices == 2
    assert orders.policy(3, forward_only=False) is not policy
    # The limit depends on the size of the largest microbatch, which is the sum of its slices.
    state = orders.state(3, forward_only=False, sizes=[10.0, 20.0, 60.0, 60.0, 10.0, 20.0])
    assert (state.num_items, state.cap) == (6, 2.0)
    orders.recut(4)
    assert orders.policy(3, forward_only=False) is policy
    assert orders.state(3, forward_only=False).num_items == 12


def test_a_candidate_for_any_number_of_slices_gets_that_of_each_step() -> None:
    # Each microbatch has two slices, whose length was chosen earlier. Each chunk must be able to
    # hold its share of the activations. If the share were counted in microbatches instead of
    # slices, it would be half as large.
    placement = Placement(num_ranks=2, num_chunks=2, kind="v")
    orders = Orders(schedule="auto", placement=placement, pp_rank=0, slice_shares=(0.5, 0.5))
    orders.use(Candidate(name="adaptive", placement=placement, cap=1.5))
    orders.recut(2)
    policy = orders.policy(4, forward_only=False)
    assert isinstance(policy, RulePolicy)
    assert policy.hint == chunk_shares(placement, 0, 1.5, 2) == (4,)
    assert orders.candidate(4).num_slices == 2


def test_a_file_needs_the_slices_of_the_run(tmp_path: Path) -> None:
    placement = Placement(num_ranks=2, num_chunks=1, kind="loop")
    save(make_schedule("seq-1f1b", placement, 2, num_slices=3), tmp_path / "order.json")

    def orders(slices: int) -> Orders:
        file = str(tmp_path / "order.json")
        shares = (1 / slices,) * slices
        return Orders(
            schedule="file", placement=placement, pp_rank=1, schedule_file=file, slice_shares=shares
        )

    policy = orders(3).policy(2, forward_only=False)
    assert isinstance(policy, Follow)
    assert len(policy.order) == 2 * 2 * 3
    for slices, text in ((1, "whole microbatches"), (2, "2 slices per microbatch")):
        message = f"has 3 slices per microbatch, but this run has {text}; set --sequence-slices 3"
        with pytest.raises(ConfigError, match=message):
            orders(slices)


def test_a_default_cap_counts_slices() -> None:
    placement = Placement(num_ranks=4, num_chunks=2, kind="v")
    shares = (0.25,) * 4
    orders = Orders(schedule="adaptive", placement=placement, pp_rank=0, slice_shares=shares)
    cap = orders.candidate(8).cap
    assert cap == default_cap(placement, 8, 4)
    assert cap is not None
    assert cap < default_cap(placement, 8)


def test_channels_hold_what_the_hungriest_rank_of_unequal_stages_keeps() -> None:
    def inputs_in_flight(count: int, schedule: str = "adaptive", cap: float | None = None) -> int:
        placement, widths = Placement(num_ranks=2, num_chunks=1), Widths((1, 2))
        orders = Orders(schedule=schedule, placement=placement, pp_rank=0, cap=cap, widths=widths)
        return orders.inputs_in_flight(count)

    assert inputs_in_flight(4) == 4
    assert inputs_in_flight(100) == 5
    assert inputs_in_flight(100, cap=2) == 2
    assert inputs_in_flight(100, "gpipe") == 100


if __name__ == "__main__":
    for policy, number in CASES.items():
        run_random(policy, 10 * number)
        print(f"{policy}: {10 * number} steps, no deadlock, no cap exceeded", flush=True)
