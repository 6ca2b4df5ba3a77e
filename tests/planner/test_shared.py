"""Ranks that share cores, against times worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.adaptive.planner.shared import shared_times, slowdown
from megatron.adaptive.planner.timing import step_times, steps_of


def _seconds(schedule: str, ranks: int, microbatches: int, cores: int, message_s: float) -> float:
    steps = steps_of(schedule, ranks, 1, microbatches)
    durations = np.array([[1.0] * ranks, [1.5] * ranks, [0.5] * ranks])
    return shared_times(
        steps,
        durations,
        np.full((2, ranks), message_s),
        processes=[1] * ranks,
        nodes=[0] * ranks,
        cores=[cores],
    ).seconds


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("message_s", [0.0, 0.3])
def test_enough_cores_change_nothing(schedule: str, message_s: float) -> None:
    steps = steps_of(schedule, 4, 1, 6)
    durations = np.array([[1.0] * 4, [1.5] * 4, [0.5] * 4])
    alone = step_times(steps, durations, np.full((2, 4), message_s), np.zeros((2, 4))).seconds
    assert _seconds(schedule, 4, 6, 4, message_s) == pytest.approx(alone)
    assert _seconds(schedule, 4, 6, 0, message_s) == pytest.approx(alone)


def test_one_core_does_all_work_in_turn() -> None:
    assert _seconds("1f1b", 3, 4, 1, 0.0) == pytest.approx(3 * 4 * 3.0)


def test_two_cores_for_three_ranks() -> None:
    # One microbatch: never two at once. Two microbatches on two ranks with one core: F0, then F1
    # beside F0 of rank 1 at half speed; all work is 12 s and something is always running.
    assert _seconds("1f1b", 3, 1, 2, 0.0) == pytest.approx(9.0)
    assert _seconds("1f1b", 2, 2, 1, 0.0) == pytest.approx(12.0)


def test_processes_of_a_rank_count() -> None:
    steps = steps_of("1f1b", 1, 1, 2)
    durations = np.array([[1.0], [2.0], [0.0]])
    none = np.zeros((2, 1))
    found = shared_times(steps, durations, none, processes=[4], nodes=[0], cores=[2])
    assert found.seconds == pytest.approx(12.0)


def test_slowdown_of_what_all_do_at_once() -> None:
    assert slowdown([1, 1, 2], [0, 0, 1], [2, 1]) == 2.0
    assert slowdown([1, 1], [0, 1], [1, 1]) == 1.0
    assert slowdown([4, 4], [0, 0], [0]) == 1.0
