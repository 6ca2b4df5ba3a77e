"""Times a fixed order of work exactly: a longest path, computed in one pass.

A static schedule says which action a rank does next, so a step's length is the longest path through
its actions and messages. It never falls when a duration grows, which a rule that chooses at run
time cannot promise; that is why the search stands on it. Rules are timed by the simulator.

The order of the pass depends on the schedule alone and is kept. An action starts when its rank is
free and its input is there; a message leaves when the action ends and the one before it has left
the link, keeps the link busy for its occupancy and arrives after the latency. Launching an action
needs no input: that part of it is hidden where the rank would wait anyway.

Jitter adds to such a time: actions that take longer by chance hold up those that wait for them. A
rank alone loses nothing on average. In a pipeline every hand-over waits for the later of two, so
that the mean step is longer than the step of the means.
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
    """A schedule's actions in an order in which each follows what it waits for.

    Attributes:
        placement: which rank holds which stage.
        num_microbatches: of the step.
        rows: ``[actions, 4] int64``: kind (F, B, W), stage, microbatch, rank.
        split: whether weight gradients are actions of their own.
    """

    placement: Placement
    num_microbatches: int
    rows: Any
    split: bool

    def table(self, seconds: Any) -> Any:
        """Returns a copy of a ``[3, stages]`` table; B takes what W does where B is not split."""
        copy = np.array(seconds, dtype=np.float64)
        if not self.split:
            copy[_B] += copy[_W]
            copy[_W] = 0.0
        return copy


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleTimes:
    """Ends and work of the ranks of a step.

    Attributes:
        end_s: ``[ranks]``, end of each rank's last action.
        busy_s: ``[ranks]``, its work.
    """

    end_s: Any
    busy_s: Any

    @property
    def seconds(self) -> float:
        """Seconds until the last action of all."""
        return float(self.end_s.max())


@lru_cache(maxsize=256)
def steps_of(schedule: str, pp: int, chunks: int, num_microbatches: int) -> Steps:
    """Puts a static schedule's actions in order.

    Raises:
        ScheduleError: no static schedule of that name, or it refuses the numbers.
    """
    placement = catalog.placement_for(schedule, pp, chunks)
    made = catalog.make_schedule(schedule, placement, num_microbatches)
    stages = placement.num_stages
    done: set[tuple[int, int, int]] = set()
    at = [0] * pp
    rows: list[tuple[int, int, int, int]] = []
    found = -1
    while found < len(rows):
        found = len(rows)
        for rank in range(pp):
            for action in made.orders[rank][at[rank] :]:
                kind, stage = _KINDS[action.kind], placement.stage_of(rank, action.chunk)
                if not done.issuperset(_inputs(kind, stage, action.microbatch, stages)):
                    break
                done.add((kind, stage, action.microbatch))
                rows.append((kind, stage, action.microbatch, rank))
                at[rank] += 1
    return Steps(
        placement=placement,
        num_microbatches=num_microbatches,
        rows=np.array(rows, dtype=np.int64),
        split=bool(made.weight_pieces),
    )


def _inputs(kind: int, stage: int, microbatch: int, stages: int) -> list[tuple[int, int, int]]:
    """Returns the actions whose results one takes."""
    own = [(kind - 1, stage, microbatch)] if kind else []
    near = stage - 1 if kind == _F else stage + 1
    return [*own, (kind, near, microbatch)] if kind < _W and 0 <= near < stages else own


def step_times(
    steps: Steps,
    durations_s: Any,
    latency_s: Any,
    occupancy_s: Any,
    *,
    launch_s: Any = None,
    factors: Any = 1.0,
) -> ScheduleTimes:
    """Times one step.

    Args:
        steps: of the schedule.
        durations_s: ``[3, stages] float64``: forward, backward by inputs, by weights; the last two
            add up where the schedule does not split them.
        latency_s: ``[2, stages]``: of the message after each stage's forward (to the next stage)
            and backward (to the one before); 0 where none is sent.
        occupancy_s: ``[2, stages]``: how long that message keeps its link busy.
        launch_s: ``[3, stages]``, the part of ``durations_s`` in which the CPU launches the work,
            which needs no input and goes on while the rank waits. None for none.
        factors: how many times as long each action takes, in the order of ``steps``.
    """
    kind, stage = steps.rows[:, 0], steps.rows[:, 1]
    seconds = steps.table(durations_s)[kind, stage] * factors
    launch = np.zeros_like(seconds) if launch_s is None else steps.table(launch_s)[kind, stage]
    stages = steps.placement.num_stages
    end, busy = np.zeros((2, steps.placement.num_ranks))
    run = _compiled_steps() if len(seconds) > _MANY_ROWS or "numba" in sys.modules else _run_steps
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
"""From here on the machine code is worth its import of half a second, once for a process."""


@lru_cache
def _compiled_steps() -> Any:
    """Returns ``_run_steps`` as machine code."""
    from numba import njit

    return njit(_run_steps, cache=True)


DRAWS = 32
"""Steps that are drawn at once; the mean of what they take longer is within a tenth or so."""


def jitter_s(steps: Steps, durations_s: Any, message_s: Any, sigma: float) -> float:
    """Returns the seconds by which a step is longer on average, at least 0.

    Every action has a factor of its own, lognormal with mean 1. Draws depend on the place of the
    action in the order alone, so that plans with the same order get the same.

    Args:
        steps: of the schedule.
        durations_s: ``[3, stages]``: forward, backward by inputs, by weights.
        message_s: ``[2, stages]``: of the message after each stage's forward and backward.
        sigma: spread of the logarithm of the factors.
    """
    if sigma <= 0:
        return 0.0
    rng = np.random.default_rng(0)
    factors = np.exp(sigma * rng.standard_normal((len(steps.rows), DRAWS)) - sigma**2 / 2)
    none = np.zeros_like(message_s)
    drawn = [step_times(steps, durations_s, message_s, none, factors=one) for one in factors.T]
    quiet = step_times(steps, durations_s, message_s, none)
    return max(0.0, float(np.mean([one.seconds for one in drawn])) - quiet.seconds)
