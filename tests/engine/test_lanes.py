"""Tests that two actions of a rank can overlap, and that an error in one of them stops both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.schedule import runtime_rules
from megatron.adaptive.schedule.action import Action
from megatron.adaptive.schedule.policy import Follow, Policy, RulePolicy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageTimes

from ..schedule.conftest import actions
from .loopback import TickingClock, Writing

ALONE = Placement(num_ranks=1, num_chunks=1)
ADAPTIVE = RulePolicy("adaptive", runtime_rules.ready_first)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Exchanging(Writing):
    """Simulates stages that exchange data twice in each forward and backward pass."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(self.parts)
        self.fails = fails
        self.log: list[str] = []

    def parts(self, action: Action) -> None:
        for part in "abc" if action.kind != "W" else "a":
            self.log.append(f"{action}{part}")
            if self.log[-1] == self.fails:
                raise RuntimeError(f"{self.fails} fails")
            if action.kind != "W" and part != "c":
                rows = torch.full((2, 3), float(len(self.log)))
                answer = torch.empty_like(rows)
                dist.all_to_all_single(answer, rows)
                assert torch.equal(answer, rows)
                # Another action may run only while tensors with several dimensions are exchanged.
                # This tensor has one dimension, so no other action may run here.
                dist.all_to_all_single(answer[0], rows[0])


def run(
    policy: Policy, fails: str = "", clock: CpuClock | None = None, **options: Any
) -> tuple[Exchanging, Executor]:
    stages = Exchanging(fails)
    executor = Executor(placement=ALONE, pp_rank=0, transport=None, timeout_s=5.0, clock=clock)
    options = {"num_microbatches": 2, "beside": True, **options}
    before = dist.all_to_all_single
    try:
        executor.run(stages, policy, RankState(placement=ALONE, rank=0, **options))
    finally:
        assert dist.all_to_all_single is before
        assert "lane" not in [thread.name for thread in threading.enumerate()]
    return stages, executor


def test_a_pair_takes_turns_at_each_exchange() -> None:
    policy = Follow(actions("F0-0 F0-1+ B0-0 W0-0 B0-1 W0-1"))
    stages, executor = run(policy, weight_pieces=1)
    assert " ".join(stages.log) == (
        "F0-0a F0-0b F0-0c F0-1a B0-0a F0-1b B0-0b F0-1c B0-0c W0-0a B0-1a B0-1b B0-1c W0-1a"
    )
    begun = [str(action) for action, _ in executor.finish_step().actions]
    assert begun == ["F0-0", "F0-1+", "B0-0", "W0-0", "B0-1", "W0-1"]
    assert [code % 3 for code in executor.last_codes] == [0, 0, 1, 2, 1, 2]


def test_the_time_of_the_other_lane_is_that_of_the_device() -> None:
    policy = Follow(actions("F0-0 F0-1+ B0-0 W0-0 B0-1 W0-1"))
    _, executor = run(policy, clock=TickingClock(), weight_pieces=1)
    done = executor.finish_step()
    # Each F and B has three parts, and each W has one part. The time between two parts does not
    # count, because another action runs then.
    assert [nanoseconds for _, nanoseconds in done.actions] == [3e9, 3e9, 3e9, 1e9, 3e9, 1e9]


def test_a_rule_fills_exchanges_with_the_other_kind_and_with_weight_gradients() -> None:
    stages, executor = run(ADAPTIVE, weight_pieces=2, num_microbatches=3)
    assert " ".join(stages.log) == (
        # F0-1 begins only during the first exchange of B0-0, because no other action could overlap
        # with F0-0.
        "F0-0a F0-0b F0-0c B0-0a F0-1a B0-0b F0-1b B0-0c W0-0a F0-1c B0-1a F0-2a B0-1b F0-2b "
        "B0-1c W0-0.1a F0-2c B0-2a W0-1a B0-2b W0-1.1a B0-2c W0-2a W0-2.1a"
    )
    times = StageTimes.equal(
        1, forward_s=3.0, backward_s=3.0, weight_s=2.0, exchange_s=0.1, exchanges=2
    )
    simulated = simulate(ALONE, 3, [ADAPTIVE], times, weight_pieces=2, beside=True)
    assert executor.last_codes == tuple(simulated.codes[0])
    done = executor.finish_step()
    assert sum(ns for _, ns in done.actions) <= done.span_s * 1e9


def test_without_leave_actions_run_one_after_the_other() -> None:
    stages, _ = run(Follow(actions("F0-0 F0-1+ B0-0 B0-1")), beside=False)
    assert " ".join(stages.log).startswith("F0-0a F0-0b F0-0c F0-1a F0-1b F0-1c B0-0a")


@pytest.mark.parametrize("fails", ["F0-1b", "B0-0b", "B0-0c", "F0-0a", "B0-1a"])
def test_an_error_in_either_lane_ends_the_step(fails: str) -> None:
    with pytest.raises(RuntimeError, match=f"{fails} fails"):
        run(Follow(actions("F0-0 F0-1+ B0-0 B0-1")), fails)
