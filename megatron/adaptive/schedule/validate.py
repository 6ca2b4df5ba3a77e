"""Checks static schedules for missing actions, incorrect order and deadlocks.

This module also computes the memory that a schedule needs, and draws schedules as text.

The first line of an error message contains the rank, the position and the action. Below this line,
the message contains a drawing of the schedule around the action, which is in brackets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import rank_kernel
from megatron.adaptive.schedule.action import NUMBER, ActionKind
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.schedule import Order, Schedule

_CONTEXT = 6
"""Number of actions that a drawing shows on each side of the action in brackets."""
_ELLIPSIS = "..."


def validate(schedule: Schedule) -> None:
    """Checks that ``schedule``, which may come from an untrusted source, can run.

    - Every rank lists each of its actions exactly once.
    - On each stage, each kind runs in ascending order of microbatches. The B of a microbatch
      follows its F, and its W follows its B. With slices, F actions run in ascending order of
      slices, B and W actions in descending order, and the first B of a microbatch follows its last
      F.
    - The ranks do not deadlock.
    - Either no rank lists a W, or every microbatch has a W on every stage, and all weight gradients
      are split into the same number of W actions.
    - Two actions that start together are an F and a B, in either order. The second action does not
      need the first, directly or through other ranks.

    A schedule without B actions is valid, because evaluations have no backward passes.

    Raises:
        ScheduleError: A condition is not met. The message contains the position and a drawing of
            the schedule around it.
    """
    placement = schedule.placement
    if len(schedule.orders) != placement.num_ranks:
        raise ScheduleError(
            f"schedule {schedule.name} must have an order for each of the {placement.num_ranks} "
            f"ranks, got {len(schedule.orders)}"
        )
    for rank in range(placement.num_ranks):
        _check_order(schedule, rank)
    _check_flow(schedule)


def peak_units(schedule: Schedule) -> tuple[float, ...]:
    """Returns the peak activation memory of each rank under the valid ``schedule``.

    A microbatch's activations are held from the start of its F to the end of its last W, or of its
    B if there is no W. In an evaluation, nothing is held.

    Returns:
        Peak on each rank. The unit is the activation memory of one microbatch in all chunks of the
        rank.
    """
    peaks = []
    for rank, order in enumerate(schedule.orders):
        state = _new_state(schedule, rank)
        for _, actions in _together(order):
            for action in actions:
                rank_kernel.start(state.numbers, NUMBER[action.kind], action.chunk)
            for action in actions:
                rank_kernel.finish(state.numbers, NUMBER[action.kind], action.chunk)
        peaks.append(state.peak_in_flight)
    return tuple(peaks)


def render_schedule(schedule: Schedule, *, mark: tuple[int, int] | None = None) -> str:
    """Draws a schedule as text, with one row per rank and one column per action.

    ::

        rank 0 | F0-0 F0-1 B0-0 W0-0 B0-1 W0-1
        rank 1 | F0-0 B0-0 F0-1 B0-1 W0-0 W0-1

    If a weight gradient is split into several W actions, all except the first have an index: ``W0-0
    W0-0.1 W0-0.2``. With slices, the index of the slice follows the index of the microbatch:
    ``F0-3.5``, ``W0-3.5.1``.

    Args:
        schedule: Schedule to draw. It may be invalid.
        mark: Rank and position of an action to put in brackets. Only the columns around this action
            are drawn. The position after a rank's last action denotes a missing action.

    Returns:
        Text with one line per rank, without a trailing newline.
    """
    columns = max((len(order) for order in schedule.orders), default=0)
    first = 0
    last = columns
    if mark is not None:
        first = max(0, mark[1] - _CONTEXT)
        last = max(mark[1] + 1, min(columns, mark[1] + _CONTEXT))
    rows = []
    for rank, order in enumerate(schedule.orders):
        cells = [action.label(schedule.num_slices) for action in order[first:last]]
        if mark is not None and mark[0] == rank:
            column = mark[1] - first
            cells += ["missing"] * (column + 1 - len(cells))
            cells[column] = f"[{cells[column]}]"
        if first > 0:
            cells.insert(0, _ELLIPSIS)
        if len(order) > last:
            cells.append(_ELLIPSIS)
        rows.append(cells)
    width = max((len(cell) for cells in rows for cell in cells), default=0)
    digits = len(str(max(len(rows) - 1, 0)))
    return "\n".join(
        f"rank {rank:>{digits}} | {' '.join(cell.ljust(width) for cell in cells)}".rstrip()
        for rank, cells in enumerate(rows)
    )


def _together(order: Order) -> Iterator[tuple[int, Order]]:
    """Yields each group of actions in ``order`` that start together, as (position, group)."""
    position = 0
    while position < len(order):
        count = 1 + order[position].paired
        yield position, order[position : position + count]
        position += count


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
        num_slices=schedule.num_slices,
        forward_only=schedule.forward_only,
        weight_pieces=schedule.weight_pieces,
    )


def _check_order(schedule: Schedule, rank: int) -> None:
    """Checks the order of the actions of ``rank``, assuming that every input has arrived."""
    placement = schedule.placement
    state = _new_state(schedule, rank)
    kinds = (ActionKind.F,) if schedule.forward_only else (ActionKind.F, ActionKind.B)
    for kind in kinds:
        for chunk in range(placement.num_chunks):
            if placement.source_of(kind, rank, chunk) is not None:
                for item in range(state.num_items):
                    state.arrive(kind, chunk, item)
    order = schedule.orders[rank]
    for position, actions in _together(order):
        kinds_together = {action.kind for action in actions}
        for index, action in enumerate(actions, position):
            name = action.label(schedule.num_slices)
            if not state.is_ready(action):
                _fail(schedule, rank, index, f"{name} cannot be here: {state.why_not(action)}")
            if action.paired and kinds_together != {ActionKind.F, ActionKind.B}:
                problem = (
                    f"{name} and the next action form a pair, which must consist of an F and a B"
                )
                _fail(schedule, rank, index, problem)
            state.start(action)
        for action in actions:
            state.finish(action)
    if not state.done:
        left = " and ".join(action.label(schedule.num_slices) for action in state.ready())
        _fail(schedule, rank, len(order), f"the order ends before {left}: list each action once")


def _check_flow(schedule: Schedule) -> None:
    """Checks that ``schedule`` cannot deadlock, by starting each action as soon as it can start."""
    placement = schedule.placement
    orders = schedule.orders
    states = [_new_state(schedule, rank) for rank in range(placement.num_ranks)]
    waiting = list(range(placement.num_ranks))
    while waiting:
        rank = waiting.pop()
        state = states[rank]
        while not state.done:
            actions = _next(orders[rank], state)
            if not all(map(state.is_ready, actions)):
                break
            for action in actions:
                state.start(action)
            for action in actions:
                state.finish(action)
                target = placement.target_of(action.kind, rank, action.chunk)
                if target is not None:
                    states[target[0]].arrive(action.kind, target[1], action.microbatch)
                    waiting.append(target[0])
    stuck = [rank for rank, state in enumerate(states) if not state.done]
    if stuck:
        # Report the rank with the fewest started actions, which is closest to the cause of the
        # deadlock.
        rank = min(stuck, key=lambda rank: states[rank].num_started)
        state = states[rank]
        action = next(due for due in _next(orders[rank], state) if not state.is_ready(due))
        _fail(
            schedule,
            rank,
            state.num_started,
            f"deadlock: {action.label(schedule.num_slices)} never starts: {state.why_not(action)}",
        )


def _next(order: Order, state: RankState) -> Order:
    position = state.num_started
    return order[position : position + 1 + order[position].paired]
