"""Forward only, for evaluation: groups of as many microbatches as ranks, through all chunks.

Two ranks, two chunks, three microbatches::

    rank 0 | F0-0 F0-1 F1-0 F1-1 F0-2 F1-2
    rank 1 | F0-0 F0-1 F1-0 F1-1 F0-2 F1-2

All ranks have the same order. An input comes from the same position of the list on another rank,
or, where a chunk follows the one before, from an earlier position; so no cycle can arise. Groups
keep every rank busy while only one group of stage inputs waits between chunks.
"""

from __future__ import annotations

from megatron.adaptive.schedule.action import Action, ActionKind, action_table
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.schedule import Schedule, check_num_microbatches

__all__ = ["make"]


def make(placement: Placement, num_microbatches: int) -> Schedule:
    """Make the evaluation schedule, any number of chunks and microbatches.

    Raises:
        ScheduleError: no microbatch.
    """
    check_num_microbatches(num_microbatches)
    forwards = action_table(ActionKind.F, placement.num_chunks, num_microbatches)
    order: list[Action] = []
    for first in range(0, num_microbatches, placement.num_ranks):
        for of_chunk in forwards:
            order += of_chunk[first : first + placement.num_ranks]
    return Schedule(
        name="forward-only",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=(tuple(order),) * placement.num_ranks,
    )
