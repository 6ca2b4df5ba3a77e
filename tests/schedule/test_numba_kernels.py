"""Tests that the compiled simulation is fast, and gives the same results as the Python code."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import numba_kernels, runtime_rules
from megatron.adaptive.schedule.action import Action
from megatron.adaptive.schedule.catalog import hint_for, make_policies, make_schedule
from megatron.adaptive.schedule.memory_caps import chunk_shares
from megatron.adaptive.schedule.numba_kernels import COMPILED_FROM, LOADED_FROM
from megatron.adaptive.schedule.policy import Follow, RulePolicy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.simulate import SimResult, simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import Link, StageTimes, draw

RULES = {
    "ready_first": runtime_rules.ready_first,
    "depth_first": runtime_rules.depth_first,
    "breadth_first": runtime_rules.breadth_first,
}


def random_case(seed: int) -> tuple[Placement, int, Any, dict[str, Any]]:
    rng = random.Random(seed)
    chunks = rng.choice([1, 2, 2, 3])
    placement = Placement(
        num_ranks=rng.randint(1, 5), num_chunks=chunks, kind=rng.choice(["loop", "v"])
    )
    microbatches = rng.randint(1, 9)
    stages = placement.num_stages
    times = StageTimes(
        forward_s=tuple(rng.uniform(0.5, 1.5) for _ in range(stages)),
        backward_s=tuple(rng.uniform(0.5, 2) for _ in range(stages)),
        weight_s=tuple(rng.uniform(0, 1) for _ in range(stages)),
        exchange_s=tuple(rng.uniform(0, 0.5) for _ in range(stages)),
        exchanges=3,
    )
    workload = draw(
        placement,
        microbatches,
        times,
        seed=seed,
        action_sigma=0.3,
        microbatch_sigma=0.2,
        latency_sigma=0.5,
        link=Link(latency_s=rng.choice([0.0, 0.3]), occupancy_s=rng.choice([0.0, 0.4])),
    )
    options = {
        "cap": rng.choice([None, 4.0, 6.5]),
        "sizes": rng.choice([None, [rng.uniform(0, 4) for _ in range(microbatches)]]),
        "weight_pieces": rng.choice([0, 1, 4]),
        "beside": bool(seed % 2),
    }
    return placement, microbatches, workload, options


def same(first: SimResult, second: SimResult) -> bool:
    return first.peak_units == second.peak_units and all(
        np.array_equal(a, b)
        for field in ("codes", "starts_ps", "ends_ps")
        for a, b in zip(getattr(first, field), getattr(second, field), strict=True)
    )


@pytest.mark.parametrize("name", sorted(RULES))
def test_compiled_and_plain_loops_agree_to_the_picosecond(name: str) -> None:
    for seed in range(40):
        placement, microbatches, workload, options = random_case(seed)
        shares = [
            chunk_shares(placement, rank, options["cap"] or 1.0) * (seed % 3 > 0)
            for rank in range(placement.num_ranks)
        ]
        policies = [RulePolicy(name, RULES[name], hint) for hint in shares]
        plain = simulate(placement, microbatches, policies, workload, **options)
        fast = simulate(placement, microbatches, policies, workload, compiled=True, **options)
        assert same(plain, fast), seed


def test_a_compiled_follower_repeats_what_a_rule_did() -> None:
    for seed in range(0, 40, 2):
        placement, microbatches, workload, options = random_case(seed)
        policies = [RulePolicy("adaptive", runtime_rules.ready_first)] * placement.num_ranks
        first = simulate(placement, microbatches, policies, workload, **options)
        followers = [Follow(order) for order in first.to_schedule("recorded").orders]
        again = simulate(placement, microbatches, followers, workload, compiled=True, **options)
        assert same(first, again), seed


def test_a_deadlock_under_compiled_code_is_told_like_any_other() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    schedule = make_schedule("gpipe", placement, 2)
    backwards_first = [schedule.orders[1][2:] + schedule.orders[1][:2]]
    policies = [Follow(schedule.orders[0]), Follow(backwards_first[0])]
    times = StageTimes.equal(2, forward_s=1.0, backward_s=2.0)
    with pytest.raises(ScheduleError, match="deadlock: no rank can continue"):
        simulate(placement, 2, policies, times, compiled=True)


def test_a_policy_of_ones_own_runs_where_compiled_code_was_asked_for() -> None:
    class Mine:
        name = "mine"

        def pick(self, state: RankState) -> Action | None:
            return next(iter(state.ready()), None)

    placement = Placement(num_ranks=2, num_chunks=1)
    times = StageTimes.equal(2, forward_s=1.0, backward_s=2.0)
    result = simulate(placement, 3, [Mine(), Mine()], times, compiled=True)
    assert result.num_actions == 12


def test_a_hint_is_simulated_with_loaded_code_and_stays_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loops: dict[Any, Any] = {}
    monkeypatch.setattr(numba_kernels, "_loops", lambda: loops)
    arguments: dict[str, Any] = {"num_slices": 4, "weight_pieces": 2}
    placement = Placement(num_ranks=3, num_chunks=2, kind="v")
    hint_for.cache_clear()
    plain = hint_for(placement, 3, 4.0, **arguments)
    # Loading the compiled code would take longer than simulating these few actions in Python, so it
    # must not be loaded.
    assert not loops
    runs = []
    for rule in (runtime_rules.ready_first, runtime_rules.hinted):
        loop = numba_kernels.compiled_loop(rule)
        loops[rule] = lambda world, loop=loop: runs.append(world) or loop(world)
    hint_for.cache_clear()
    assert hint_for(placement, 3, 4.0, **arguments).orders == plain.orders
    assert len(runs) > 2


def test_code_is_compiled_only_if_that_saves_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loops: dict[Any, Any] = {}
    monkeypatch.setattr(numba_kernels, "_loops", lambda: loops)
    rule = runtime_rules.ready_first
    few, many, most = (number - 1 for number in (LOADED_FROM, COMPILED_FROM, 2 * COMPILED_FROM))
    assert not numba_kernels.saves_time(rule, few)
    assert not loops  # The call must not even import numba.
    stats = SimpleNamespace(cache_path=str(tmp_path))
    inner = SimpleNamespace(__qualname__="run_ready_first_1")
    loops[rule] = SimpleNamespace(signatures=[], stats=stats, py_func=inner)
    assert not numba_kernels.saves_time(rule, many)
    assert numba_kernels.saves_time(rule, most)
    (tmp_path / "simulator.run_ready_first_1-353.py311.nbi").touch()
    # The compiled code is on disk, so it only needs to be loaded.
    assert numba_kernels.saves_time(rule, many)
    assert not numba_kernels.saves_time(rule, few)
    loops[rule].signatures.append("compiled")
    assert numba_kernels.saves_time(rule, few)


def test_compiled_code_is_found_on_the_disk() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    times = StageTimes.equal(2, forward_s=1.0, backward_s=2.0)
    policies = make_policies("dfc", placement, 2)
    simulate(placement, 2, policies, times, compiled=True)
    loop = numba_kernels.compiled_loop(runtime_rules.depth_first)
    assert loop.signatures
    assert numba_kernels.is_cached(loop)


PLAIN = """
from megatron.adaptive.schedule import anneal, numba_kernels, runtime_rules

assert anneal.compile_s() == 0.0
assert not numba_kernels.saves_time(runtime_rules.ready_first, numba_kernels.LOADED_FROM)
assert numba_kernels.saves_time(runtime_rules.ready_first, numba_kernels.COMPILED_FROM)
"""


def test_numba_may_be_told_not_to_compile() -> None:
    """Checks that ``auto`` works with NUMBA_DISABLE_JIT, which users may set for debugging."""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-c", PLAIN]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
