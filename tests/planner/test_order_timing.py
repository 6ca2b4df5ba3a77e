"""Tests step times of fixed orders, with jitter and with launch overhead that waits may hide."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.adaptive.planner.order_timing import jitter_s, step_times, steps_of
from megatron.adaptive.schedule.catalog import make_policies
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageProfile, StageTimes


def _added(stages: int, microbatches: int, sigma: float) -> float:
    durations = np.array([[1.0] * stages, [2.0] * stages, [0.0] * stages])
    steps = steps_of("1f1b", stages, 1, microbatches)
    return jitter_s(steps, durations, np.zeros((2, stages)), sigma)


def test_longer_pipelines_and_more_jitter_lose_more() -> None:
    assert _added(4, 8, 0.0) == 0.0
    # If there is only one rank, jitter has almost no effect on the mean of 32 steps.
    assert _added(1, 32, 0.1) < 0.01 * 96
    assert _added(2, 16, 0.1) < _added(4, 16, 0.1) < _added(8, 16, 0.1)
    assert _added(4, 16, 0.05) < _added(4, 16, 0.1) < _added(4, 16, 0.2)


def test_as_much_as_the_simulator_finds() -> None:
    placement = Placement(num_ranks=4, num_chunks=1)
    times = StageTimes(forward_s=(1.0,) * 4, backward_s=(2.0,) * 4)
    spread = StageProfile(times=times, action_sigma=0.2)
    policies = make_policies("1f1b", placement, 8)
    steps = [simulate(placement, 8, policies, spread, seed=i).makespan_s for i in range(24)]
    simulated = sum(steps) / len(steps) - 3.0 * (8 + 3)
    assert _added(4, 8, 0.2) == pytest.approx(simulated, rel=0.3)


def test_static_order_hides_launching_in_the_bubble() -> None:
    steps = steps_of("1f1b", 2, 1, 2)
    durations = np.array([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])
    launch = np.array([[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]])
    none = np.zeros((2, 2))
    plain = step_times(steps, durations, none, none).seconds
    hidden = step_times(steps, durations, none, none, launch_s=launch).seconds
    # Launching takes no extra time while a rank waits: rank 1 for F0, and rank 0 for B0 of rank 1.
    assert plain == pytest.approx(9.0)
    assert hidden == pytest.approx(8.0)
