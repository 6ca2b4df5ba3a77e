"""Assigns microbatches to the replicas of stages that have unequal numbers of them.

The search gives stages of unequal widths microbatches of unequal sizes, so that each stage has the
same number of them. The trainer has microbatches of one size, and each is the work of one replica
of a stage (``schedule.widths``)::

    3 GPUs, 8 samples         searched                     run
    stage 0, 2 replicas       4 microbatches of 1 each     4 of the 8 microbatches of 1 each
    stage 1, 1 replica        4 microbatches of 2          8 microbatches of 1
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from megatron.adaptive.planner.communication import boundary_s
from megatron.adaptive.planner.plan import Plan, StagePlace
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.timing import ScheduleTimes
from megatron.adaptive.schedule import unequal
from megatron.adaptive.schedule.widths import Widths
from megatron.adaptive.schedule.workload import PS_PER_S

__all__ = ["as_run", "dealt_times", "dealt_widths", "even_share", "held_of", "hop_s"]


def as_run(plan: Plan) -> Plan:
    """Returns the plan with one size of microbatches if the trainer can run it so."""
    plain = all(one.tp == 1 for place in plan.places for one in place.replicas)
    if plan.uniform or not plain or plan.chunks > 1 or plan.distributed_optimizer:
        return plan
    size = math.gcd(*(place.micro_batch for place in plan.places))
    places = tuple(replace(place, micro_batch=size) for place in plan.places)
    return replace(plan, micro_batch=size, places=places)


def dealt_widths(plan: Plan) -> Widths | None:
    """Returns the replicas of each stage, where microbatches are dealt out to them."""
    if plan.uniform or any(place.micro_batch != plan.micro_batch for place in plan.places):
        return None
    return Widths(tuple(len(place.replicas) for place in plan.places))


def _num_microbatches(plan: Plan) -> int:
    return plan.global_batch // plan.micro_batch


def held_of(plan: Plan, widths: Widths) -> tuple[float, ...]:
    """Returns the microbatches that a replica of each stage holds at the worst moment."""
    held = []
    for stage in range(widths.num_stages):
        own = widths.own_microbatches(stage, _num_microbatches(plan))
        most = {"1f1b": widths.warmup(stage) + 1.0, "gpipe": float(own)}.get(plan.schedule)
        held.append(unequal.default_cap(widths, stage, own) if most is None else min(most, own))
    return tuple(held)


def hop_s(
    sender: StagePlace,
    receiver: StagePlace,
    inputs: PlanInputs,
    bytes_per_sample: float,
) -> tuple[float, float]:
    """Times one message between a replica of one stage and one of the next.

    Returns:
        Latency, and seconds that the link is busy, of the slowest pair.
    """
    both = [
        boundary_s(
            replace(sender, replicas=(one,)),
            replace(receiver, replicas=(other,)),
            inputs,
            bytes_per_sample,
        )
        for one in sender.replicas
        for other in receiver.replicas
    ]
    return max(both, key=sum)


def dealt_times(plan: Plan, widths: Widths, durations_s: Any, message_s: Any) -> ScheduleTimes:
    """Times one step by simulation.

    Args:
        plan: with microbatches of one size.
        widths: of its stages.
        durations_s: ``[3, stages]``: forward, backward by inputs, by weights.
        message_s: ``[2, stages]`` of the message after a forward and after a backward.

    Raises:
        ScheduleError: the schedule does not know such stages.
    """
    step = unequal.simulate(
        plan.schedule,
        widths,
        _num_microbatches(plan),
        forward_s=durations_s[0].tolist(),
        backward_s=durations_s[1:].sum(axis=0).tolist(),
        message_s=message_s.max(axis=0)[:-1].tolist(),
    )
    of_stage = [list(widths.ranks_of(stage)) for stage in range(widths.num_stages)]
    ends, busy = np.array([ends[-1] for ends in step.ends_ps]) / PS_PER_S, np.array(step.busy_s)
    return ScheduleTimes(
        end_s=np.array([ends[ranks].max() for ranks in of_stage]),
        busy_s=np.array([busy[ranks].mean() for ranks in of_stage]),
    )


def even_share(plan: Plan, widths: Widths, durations_s: Any) -> tuple[int, Any]:
    """Returns microbatches and durations of about the same work with one rank for each stage."""
    return _num_microbatches(plan), durations_s / np.array(widths.sizes, dtype=np.float64)
