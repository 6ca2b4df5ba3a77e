"""GPipe: all forwards, then all backwards.

Three ranks, four microbatches::

    rank 0 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3
    rank 1 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3
    rank 2 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3

With several chunks a rank finishes the forwards of one before it starts the next, and goes back
from the deepest::

    rank 0 | F0-0 F0-1 F1-0 F1-1 B1-0 B1-1 B0-0 B0-1
    rank 1 | F0-0 F0-1 F1-0 F1-1 B1-0 B1-1 B0-0 B0-1

Every rank holds all microbatches. Deviation from the paper: backwards run in ascending microbatch
order, as everywhere in this package, not in descending.

Source: GPipe, arXiv 1811.06965, section 2.3.
"""

from __future__ import annotations

from megatron.adaptive.schedule.action import Action, ActionKind, action_table
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.schedule import Schedule, check_num_microbatches

__all__ = ["make"]


def make(placement: Placement, num_microbatches: int) -> Schedule:
    """Make the GPipe schedule, any number of chunks.

    Raises:
        ScheduleError: no microbatch.
    """
    check_num_microbatches(num_microbatches)
    order: list[Action] = []
    for forwards in action_table(ActionKind.F, placement.num_chunks, num_microbatches):
        order += forwards
    for backwards in reversed(action_table(ActionKind.B, placement.num_chunks, num_microbatches)):
        order += backwards
    return Schedule(
        name="gpipe",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=(tuple(order),) * placement.num_ranks,
    )
