"""Orders of work where stages have unequal widths, and the simulation of a step with them.

The rules of one rank are the usual ones, over its own microbatches (see ``widths``). What differs
is how far a replica must be ahead: 1F1B does as many warm-up forwards as it takes that the ranks of
the next stage together can do theirs and one more each; ``docs/schedules.md`` has a picture.

It cannot deadlock: all forwards that a backward of microbatch m waits for come, at every earlier
stage, after backwards of microbatches below m only.

Nor can a rule under a cap: of the microbatches that are not finished the lowest is the next one
wherever it has to go, and every rank that has not had it holds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron.adaptive.config.schedule import UNEQUAL_SCHEDULES
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import machine
from megatron.adaptive.schedule.one_f_one_b import order_after
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow, Policy
from megatron.adaptive.schedule.registry import make_policies
from megatron.adaptive.schedule.simulate import SimResult, run_states
from megatron.adaptive.schedule.state import RankState
from megatron.adaptive.schedule.widths import Widths
from megatron.adaptive.schedule.workload import Link, StageTimes, draw

SCHEDULES = UNEQUAL_SCHEDULES
"""Schedules that stages of unequal widths can follow."""

_SLACK = 1.5  # as for equal stages, see ``memory``


def placement_of(widths: Widths) -> Placement:
    """The stages without their replicas."""
    return Placement(num_ranks=widths.num_stages, num_chunks=1)


def make_policy(name: str, widths: Widths, stage: int, num_microbatches: int) -> Policy:
    """Make the policy of a stage's replicas.

    Args:
        name: one of :data:`SCHEDULES`, or ``forward-only``.
        widths: of all stages.
        stage: whose policy it is.
        num_microbatches: of each replica of this stage.

    Raises:
        ScheduleError: the schedule does not know such stages.
    """
    if name not in (*SCHEDULES, "forward-only"):
        raise ScheduleError(
            f"schedule {name} for stages of widths {widths}: choose one of {', '.join(SCHEDULES)}"
        )
    if name == "1f1b":
        return Follow(order_after(widths.warmup(stage), num_microbatches), name)
    return make_policies(name, placement_of(widths), num_microbatches)[stage]


def default_cap(widths: Widths, stage: int, num_microbatches: int) -> float:
    """The most microbatches that a replica keeps if nobody gives a cap.

    As for equal stages: what 1F1B needs at its hungriest stage, and half as much again.

    Args:
        widths: of all stages.
        stage: whose cap it is.
        num_microbatches: of each replica of this stage.
    """
    needed = max(widths.warmup(one) + 1 for one in range(stage, widths.num_stages))
    return max(1.0, float(min(math.ceil(needed * _SLACK), num_microbatches)))


def simulate(
    name: str,
    widths: Widths,
    num_microbatches: int,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    message_s: Sequence[float] = (),
    cap: float | None = None,
) -> SimResult:
    """Run a step with the policies and states that a run has, and check that it ends.

    Backwards are whole. Messages take their time on the way and hold up nobody.

    Args:
        name: one of :data:`SCHEDULES`.
        widths: of the stages.
        num_microbatches: of the step, over the whole job.
        forward_s: of one microbatch at each stage.
        backward_s: likewise, weight gradients included.
        message_s: from each stage to the next and back; none where empty.
        cap: microbatches that a rank keeps, for a rule; the default where ``None``.

    Returns:
        One entry per rank where ``SimResult`` has one per rank.

    Raises:
        ScheduleError: the microbatches do not divide, or no rank can go on.
    """
    states, policies = [], []
    for rank in range(widths.num_ranks):
        stage, _ = widths.place_of(rank)
        own = widths.own_microbatches(stage, num_microbatches)
        policies.append(make_policy(name, widths, stage, own))
        state = RankState(
            placement=placement_of(widths),
            rank=stage,
            num_microbatches=own,
            cap=default_cap(widths, stage, own) if cap is None else cap,
        )
        state.numbers[machine.RANK] = rank
        states.append(state)
    links = {}
    for stage, latency_s in enumerate(message_s):
        links[stage, stage + 1] = links[stage + 1, stage] = Link(latency_s=latency_s)
    times = StageTimes(forward_s=tuple(forward_s), backward_s=tuple(backward_s))
    workload = replace(
        draw(placement_of(widths), num_microbatches, times, links=links),
        occupancy_ps=np.zeros((widths.num_ranks, widths.num_ranks), dtype=np.int64),
    )
    return run_states(states, policies, workload, widths=widths.sizes)
