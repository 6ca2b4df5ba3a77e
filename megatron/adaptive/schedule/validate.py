"""Checks that a schedule can run: complete, in order, free of deadlock, within its memory.

An error has one line with rank, position and action, then the part of the schedule around the cell
with the cell in brackets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind, action_table
from megatron.adaptive.schedule.memory import (
    check_activation_units,
    check_cap,
    default_activation_units,
    with_rounding,
)
from megatron.adaptive.schedule.render import render_schedule
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.state import RankState

__all__ = ["validate"]


def validate(
    schedule: Schedule,
    *,
    cap: float | None = None,
    activation_units: Sequence[float] | None = None,
) -> None:
    """Check a schedule, also one from an untrusted source.

    Every rank must list each of its actions exactly once; on each stage forwards and backwards
    ascend in the microbatch and a backward follows its forward; no ranks may wait for each other
    in a circle. A schedule without any backward is one of an evaluation.

    Args:
        schedule: what to check.
        cap: if given, also the most activations a rank may hold.
        activation_units: size of one microbatch per local chunk; default ``1 / num_chunks`` each.

    Raises:
        ScheduleError: the first rule found broken, with the place and a picture of it.
    """
    placement = schedule.placement
    if len(schedule.orders) != placement.num_ranks:
        raise ScheduleError(
            f"schedule {schedule.name} has orders for {len(schedule.orders)} ranks:"
            f" its placement has {placement.num_ranks}, list one order per rank"
        )
    for rank in range(placement.num_ranks):
        _check_order(schedule, rank)
    _check_flow(schedule)
    if cap is not None:
        units = activation_units
        if units is None:
            units = default_activation_units(placement.num_chunks)
        check_activation_units(units, placement.num_chunks)
        check_cap(cap, num_chunks=placement.num_chunks, activation_units=units)
        _check_memory(schedule, cap, units)


def _fail(schedule: Schedule, rank: int, position: int, problem: str) -> NoReturn:
    picture = render_schedule(schedule, mark=(rank, position))
    raise ScheduleError(
        f"schedule {schedule.name}, rank {rank}, position {position}: {problem}\n{picture}"
    )


def _new_state(schedule: Schedule, rank: int) -> RankState:
    return RankState(
        placement=schedule.placement,
        rank=rank,
        num_microbatches=schedule.num_microbatches,
        forward_only=schedule.forward_only,
    )


def _kinds(schedule: Schedule) -> tuple[ActionKind, ...]:
    return (ActionKind.F,) if schedule.forward_only else (ActionKind.F, ActionKind.B)


def _check_order(schedule: Schedule, rank: int) -> None:
    """Check one rank by itself: run its order as if every input were there from the start."""
    placement, num_microbatches = schedule.placement, schedule.num_microbatches
    state = _new_state(schedule, rank)
    for kind in _kinds(schedule):
        edge = placement.previous_of if kind is ActionKind.F else placement.next_of
        for chunk in range(placement.num_chunks):
            if edge(rank, chunk) is not None:
                for microbatch in range(num_microbatches):
                    state.arrive(kind, chunk, microbatch)
    order = schedule.orders[rank]
    for position, action in enumerate(order):
        if not state.is_ready(action):
            _fail(schedule, rank, position, f"{action} cannot be here: {state.why_not(action)}")
        state.start(action)
        state.finish(action)
    if not state.done:
        listed = set(order)
        missing = [
            action
            for kind in _kinds(schedule)
            for of_chunk in action_table(kind, placement.num_chunks, num_microbatches)
            for action in of_chunk
            if action not in listed
        ]
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        _fail(schedule, rank, len(order), f"the order ends, but {missing[0]}{more} missing")


def _check_flow(schedule: Schedule) -> None:
    """Run all ranks together, each action as soon as it can; whoever is left is in a deadlock."""
    placement, orders = schedule.placement, schedule.orders
    states = [_new_state(schedule, rank) for rank in range(placement.num_ranks)]
    waiting = list(range(placement.num_ranks))
    while waiting:
        rank = waiting.pop()
        state = states[rank]
        while not state.done:
            action = orders[rank][state.num_started]
            if not state.is_ready(action):
                break
            state.start(action)
            state.finish(action)
            consumer = placement.enabled_by(rank, action)
            if consumer is not None:
                to_rank, input_of = consumer
                states[to_rank].arrive(input_of.kind, input_of.chunk, input_of.microbatch)
                waiting.append(to_rank)
    stuck = [rank for rank, state in enumerate(states) if not state.done]
    if stuck:
        # The rank that came least far is nearest to the cause.
        rank = min(stuck, key=lambda rank: states[rank].num_started)
        position = states[rank].num_started
        stuck_action = orders[rank][position]
        _fail(
            schedule,
            rank,
            position,
            f"deadlock at {stuck_action}: {states[rank].why_not(stuck_action)},"
            f" and no other rank can go on either",
        )


def _check_memory(schedule: Schedule, cap: float, units: Sequence[float]) -> None:
    if schedule.forward_only:
        return
    for rank, order in enumerate(schedule.orders):
        held: list[int] = [0] * len(units)
        for position, action in enumerate(order):
            held[action.chunk] += _held_change(action)
            total = sum(count * size for count, size in zip(held, units, strict=True))
            if total > with_rounding(cap):
                _fail(
                    schedule,
                    rank,
                    position,
                    f"{action} makes the rank hold {total:g}, above the cap of {cap:g}",
                )


def _held_change(action: Action) -> int:
    return {ActionKind.F: 1, ActionKind.B: -1}.get(action.kind, 0)
