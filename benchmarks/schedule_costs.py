"""Measures the cost of a simulated action, of a decision, and of an action in the executor.

Implements part ``costs`` of ``benchmarks/schedules.py``, in a single process, without computation
or messages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

from harness.report import Row
from harness.sleeping_ranks import IdleStages
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.schedule.action import Action
from megatron.adaptive.schedule.catalog import make_policies
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageProfile, StageTimes

RANKS, MICROBATCHES, PIECES = 8, 32, 4
ROUNDS, CALLS = 15, 100_000
MOST_SIMULATED, MOST_PICK, MOST_EXECUTOR = 40.0, 400.0, 1000.0
"""Maximum costs of a simulated action, a decision and an executed action, in Python calls.

The unit is the duration of a call of an empty Python function.
"""
_PROFILE = StageProfile(
    times=StageTimes.equal(2 * RANKS, forward_s=1.0, backward_s=1.0, weight_s=1.0), action_sigma=0.3
)


class _Timed:
    """Wraps a policy, and measures how long each decision takes."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.picks_s: list[float] = []
        self._policy = policy

    def pick(self, state: RankState) -> Action | None:
        start = time.perf_counter()
        action = self._policy.pick(state)
        self.picks_s.append(time.perf_counter() - start)
        return action


def measure() -> list[Row]:
    """Returns a row for each cost, relative to a call of an empty Python function."""
    call_s = _median(_call_s)
    times_s = {"simulated action": (1 / _simulated_per_s(), MOST_SIMULATED)}
    for name in ("adaptive", "hinted", "zb-v"):
        times_s[f"pick, {name}"] = _median(partial(_picks_s, name)), MOST_PICK
    times_s["executor's own work per action"] = _median(_executor_s), MOST_EXECUTOR
    return [
        Row(
            what=f"{title}, over a Python call",
            value=seconds / call_s,
            goal=most,
            note=f"{1e6 * seconds:.3g} us over {1e6 * call_s:.3g} us",
        )
        for title, (seconds, most) in times_s.items()
    ]


def _call_s() -> float:
    """Returns the duration in seconds of a call of an empty function."""

    def nothing() -> None:
        return None

    start_s = time.perf_counter()
    for _ in range(CALLS):
        nothing()
    return (time.perf_counter() - start_s) / CALLS


def _median(measure_once: Callable[[], float]) -> float:
    measure_once()
    return statistics.median(measure_once() for _ in range(ROUNDS))


def _simulated_per_s() -> float:
    """Returns how many actions the compiled simulator simulates per second."""
    placement = Placement(num_ranks=RANKS, num_chunks=2, kind="v")
    policies = make_policies("adaptive", placement, MICROBATCHES)

    def once() -> float:
        start = time.perf_counter()
        result = simulate(
            placement,
            MICROBATCHES,
            policies,
            _PROFILE,
            seed=1,
            cap=1.5 * RANKS,
            weight_pieces=PIECES,
            compiled=True,
        )
        return result.num_actions / (time.perf_counter() - start)

    return _median(once)


def _picks_s(name: str) -> float:
    """Returns the median duration in seconds of a decision of the rule ``name``."""
    placement = Placement(num_ranks=RANKS, num_chunks=2, kind="v")
    pieces = 1 if name == "zb-v" else PIECES
    policies = [
        _Timed(policy)
        for policy in make_policies(
            name, placement, MICROBATCHES, cap=float(RANKS), weight_pieces=pieces
        )
    ]
    simulate(
        placement, MICROBATCHES, policies, _PROFILE, seed=1, cap=float(RANKS), weight_pieces=pieces
    )
    return statistics.median(pick for policy in policies for pick in policy.picks_s)


def _executor_s() -> float:
    """Returns the duration of a step on one rank in seconds, divided by the number of actions."""
    placement = Placement(num_ranks=1, num_chunks=2)
    executor = Executor(placement=placement, pp_rank=0, transport=None, timeout_s=10.0)
    state = RankState(
        placement=placement, rank=0, num_microbatches=MICROBATCHES, cap=8.0, weight_pieces=PIECES
    )
    policy = make_policies("adaptive", placement, MICROBATCHES)[0]
    start = time.perf_counter()
    executor.run(IdleStages(), policy, state)
    executor.finish_step()
    return (time.perf_counter() - start) / state.num_actions
