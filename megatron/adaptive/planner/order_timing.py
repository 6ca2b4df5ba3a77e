"""Computes the duration of a step with a fixed order of actions, in a single pass over the actions.

A static schedule fixes the order of the actions on every rank. An action starts when its rank is
free and its input has arrived. The step time is therefore the length of the critical path, which is
the longest path through actions and messages. In this example, 1F1B runs on 2 ranks with 2
microbatches. A forward pass takes 1 s and a backward pass 2 s. Messages take no time::

    second    0    1    2    3    4    5    6    7    8    9
    rank 0    | F0 | F1 |         | B0      |    | B1      |
    rank 1         | F0 | B0      | F1 | B1      |

``F1`` on rank 1 starts at 4 s. Its input arrives at 2 s, but the rank is busy until 4 s. The
actions are sorted topologically, so that each action comes after all actions on which it depends
(:func:`steps_of`). A single pass over them is therefore enough. The order depends only on the
schedule, so it is cached.

A message is sent when its action has ended and the previous message has left the link. The message
then keeps the link busy for a while (occupancy), and arrives after an additional latency. Launching
the kernels of an action requires no input, so a rank launches kernels while it waits for the input.

A step never gets shorter if the duration of an action increases. The search relies on this
property. Schedules that choose the next action at run time do not have this property, so they are
simulated instead.

:func:`jitter_s` estimates the effect of random variation of durations. The variation does not
change the average time of a single rank. But in a pipeline, each action waits until its rank is
free and its input has arrived, which is the later of two random events. Therefore, the mean step
time is longer than the step time with mean durations.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from megatron.adaptive.schedule import catalog
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.stage_placement import Placement

_F, _B, _W = range(3)
_KINDS = {ActionKind.F: _F, ActionKind.B: _B, ActionKind.W: _W}


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """Actions of a schedule in topological order: every action comes after its dependencies.

    Attributes:
        placement: Assignment of stages to ranks.
        num_microbatches: Number of microbatches per step.
        rows: Kind (0 for F, 1 for B, 2 for W), stage, microbatch and rank of each action, as an
            array ``[actions, 4] int64``.
        split: Whether weight gradients are computed by separate actions (W).
    """

    placement: Placement
    num_microbatches: int
    rows: Any
    split: bool

    def table(self, seconds: Any) -> Any:
        """Returns a copy of ``seconds`` with times for the kinds of actions in this schedule.

        ``seconds`` contains the times of forward passes (F), input gradients (B) and weight
        gradients (W), with shape ``[3, stages]``.

        If the schedule has no separate W actions, the times of W are added to the times of B.
        """
        copy = np.array(seconds, dtype=np.float64)
        if not self.split:
            copy[_B] += copy[_W]
            copy[_W] = 0.0
        return copy


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleTimes:
    """End time and busy time of each rank in a step.

    Attributes:
        end_s: Time in seconds from the start of the step to the end of each rank's last action,
            ``[ranks]``.
        busy_s: Total duration of the actions on each rank in seconds, ``[ranks]``.
    """

    end_s: Any
    busy_s: Any

    @property
    def seconds(self) -> float:
        """Time in seconds from the start of the step to the end of the last action on any rank."""
        return float(self.end_s.max())


@lru_cache(maxsize=256)
def steps_of(schedule: str, pp: int, chunks: int, num_microbatches: int) -> Steps:
    """Returns the actions of the static schedule ``schedule`` in topological order.

    Args:
        schedule: Name of the schedule.
        pp: Number of pipeline ranks.
        chunks: Number of stages per rank.
        num_microbatches: Number of microbatches per step.

    Raises:
        ScheduleError: No static schedule has this name, or the schedule does not support these
            sizes.
    """
    placement = catalog.placement_for(schedule, pp, chunks)
    static = catalog.make_schedule(schedule, placement, num_microbatches)
    stages = placement.num_stages
    done: set[tuple[int, int, int]] = set()
    next_action = [0] * pp
    rows: list[tuple[int, int, int, int]] = []
    num_before = -1
    while num_before < len(rows):
        num_before = len(rows)
        for rank in range(pp):
            for action in static.orders[rank][next_action[rank] :]:
                kind = _KINDS[action.kind]
                stage = placement.stage_of(rank, action.chunk)
                if not done.issuperset(_inputs(kind, stage, action.microbatch, stages)):
                    break
                done.add((kind, stage, action.microbatch))
                rows.append((kind, stage, action.microbatch, rank))
                next_action[rank] += 1
    return Steps(
        placement=placement,
        num_microbatches=num_microbatches,
        rows=np.array(rows, dtype=np.int64),
        split=bool(static.weight_pieces),
    )


def _inputs(kind: int, stage: int, microbatch: int, stages: int) -> list[tuple[int, int, int]]:
    """Returns the actions on which an action depends, as tuples (kind, stage, microbatch)."""
    same_stage = [(kind - 1, stage, microbatch)] if kind else []
    sender = stage - 1 if kind == _F else stage + 1
    if kind < _W and 0 <= sender < stages:
        return [*same_stage, (kind, sender, microbatch)]
    return same_stage


def step_times(
    steps: Steps,
    durations_s: Any,
    latency_s: Any,
    occupancy_s: Any,
    *,
    launch_s: Any = None,
    factors: Any = 1.0,
) -> ScheduleTimes:
    """Computes when each rank ends a step, and how long it is busy.

    Args:
        steps: Actions of the schedule in topological order, from :func:`steps_of`.
        durations_s: Times of forward pass, input gradients and weight gradients in seconds, ``[3,
            stages] float64``. If the schedule has no separate W actions, the weight gradients are
            computed together with the input gradients.
        latency_s: Latency in seconds of the messages that a stage sends after its forward and
            backward passes, ``[2, stages]``, or 0 if it sends no message. Forward messages go to
            the next stage, and backward messages go to the previous stage.
        occupancy_s: Time in seconds during which each of these messages keeps its link busy, ``[2,
            stages]``.
        launch_s: Part of ``durations_s`` that the CPU spends launching kernels, in seconds, ``[3,
            stages]``, or ``None`` if launches take no time. A rank can launch kernels while it
            waits for the input.
        factors: Factor for the duration of each action, in the order of ``steps``, ``[actions]``. A
            single number applies to all actions.
    """
    kind, stage = steps.rows[:, 0], steps.rows[:, 1]
    seconds = steps.table(durations_s)[kind, stage] * factors
    launch = np.zeros_like(seconds) if launch_s is None else steps.table(launch_s)[kind, stage]
    stages = steps.placement.num_stages
    end, busy = np.zeros((2, steps.placement.num_ranks))
    is_compiled = len(seconds) > _MANY_ROWS or "numba" in sys.modules
    run = _compiled_steps() if is_compiled else _run_steps
    run(
        steps.rows,
        seconds,
        launch,
        np.asarray(latency_s, dtype=np.float64),
        np.asarray(occupancy_s, dtype=np.float64),
        np.zeros((2, stages, steps.num_microbatches)),
        np.zeros((2, stages)),
        end,
        busy,
    )
    return ScheduleTimes(end_s=end, busy_s=busy)


def _run_steps(
    rows: Any,
    seconds: Any,
    launch: Any,
    latency: Any,
    occupancy: Any,
    arrival: Any,
    free: Any,
    end: Any,
    busy: Any,
) -> None:
    """Computes the times of all actions, and writes the results to the last four arrays.

    ``arrival`` contains the arrival time of each input, indexed by kind, stage and microbatch.
    ``free`` contains the time at which the link after each stage becomes free, indexed by kind and
    stage. ``end`` and ``busy`` contain the end time and the busy time of each rank.
    """
    stages = latency.shape[1]
    for i in range(rows.shape[0]):
        kind, stage, microbatch, rank = rows[i]
        start = end[rank] + launch[i]
        if kind < 2:
            start = max(start, arrival[kind, stage, microbatch])
        finish = start + seconds[i] - launch[i]
        end[rank] = finish
        busy[rank] += seconds[i]
        if kind == 2:
            continue
        target = stage + 1 if kind == 0 else stage - 1
        if 0 <= target < stages:
            leave = max(finish, free[kind, stage]) + occupancy[kind, stage]
            free[kind, stage] = leave
            arrival[kind, target, microbatch] = leave + latency[kind, stage]


_MANY_ROWS = 500
"""Number of actions above which compiled code saves time, although importing numba takes half a
second per process."""


@lru_cache
def _compiled_steps() -> Any:
    """Returns ``_run_steps`` compiled with numba."""
    from numba import njit

    return njit(_run_steps, cache=True)


DRAWS = 32
"""Number of steps that are simulated to compute the mean delay due to jitter. This number makes the
mean accurate to about 10 %."""


def jitter_s(steps: Steps, durations_s: Any, message_s: Any, sigma: float) -> float:
    """Returns the mean number of seconds by which random variation of durations lengthens a step.

    The function simulates ``DRAWS`` steps, in which each action's duration is multiplied by a
    lognormal random factor with mean 1. The factor depends only on the action's position in the
    order. Plans with the same order of actions therefore get the same factors, and their times can
    be compared. The result is never negative.

    Args:
        steps: Actions of the schedule in topological order, from :func:`steps_of`.
        durations_s: Times of forward pass, input gradients and weight gradients, in seconds,
            ``[3, stages]``.
        message_s: Times of the messages after forward and backward passes, in seconds,
            ``[2, stages]``.
        sigma: Standard deviation of the logarithm of the factors, or 0 for no variation.
    """
    if sigma <= 0:
        return 0.0
    rng = np.random.default_rng(0)
    factors = np.exp(sigma * rng.standard_normal((len(steps.rows), DRAWS)) - sigma**2 / 2)
    no_occupancy = np.zeros_like(message_s)
    drawn = [
        step_times(steps, durations_s, message_s, no_occupancy, factors=step_factors)
        for step_factors in factors.T
    ]
    quiet = step_times(steps, durations_s, message_s, no_occupancy)
    return max(0.0, float(np.mean([times.seconds for times in drawn])) - quiet.seconds)
