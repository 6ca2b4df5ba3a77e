"""Varuna: every rank prefers backwards and uses waiting time for forwards; made for recomputation.

Three ranks, six microbatches::

    rank 0 | F0-0 F0-1 F0-2 F0-3 F0-4 F0-5 B0-0 B0-1 B0-2 B0-3 B0-4 B0-5
    rank 1 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3 F0-4 F0-5 B0-4 B0-5
    rank 2 | F0-0 B0-0 F0-1 B0-1 F0-2 B0-2 F0-3 B0-3 F0-4 B0-4 F0-5 B0-5

The order is what comes out of a small simulation of these rules, with a forward of 1, a backward of
2 and before it a recomputation of 1, except on the last stage, whose backward follows its forward
at once:

1. a backward whose gradient is here goes before a forward;
2. else the next forward goes, if its input is here, however many are held already;
3. else the rank waits.

So forwards that 1F1B would hold back fill the waits. A rank holds at most 4 microbatches for each
stage that follows its own, the last rank 1; with recomputation that is only the stage's input of
each. Under a cap on memory use ``adaptive``.

Deviations from the paper: recomputation is part of our B, so it begins when the gradient has
arrived, not so early that it ends then; hence no rank waits between the two, and the paper's rule
that no forward may come between them holds by itself. What the paper decides at run time, to take
a forward where the list's backward is late, is left to the policies.

Source: Varuna, arXiv 2111.04007, section 3.2.
"""

from __future__ import annotations

from megatron.adaptive.schedule.action import Action, ActionKind, action_table
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.schedule import (
    Order,
    Schedule,
    check_num_microbatches,
    check_one_chunk,
)

__all__ = ["make"]

_FORWARD, _BACKWARD, _RECOMPUTE = 1, 2, 1


def make(placement: Placement, num_microbatches: int) -> Schedule:
    """Make Varuna's schedule of a pipeline with one chunk per rank.

    Raises:
        ScheduleError: several chunks per rank, or no microbatch.
    """
    check_num_microbatches(num_microbatches)
    check_one_chunk("varuna", placement, instead="interleaved or adaptive for several")
    return Schedule(
        name="varuna",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=_simulate(placement.num_ranks, num_microbatches),
    )


def _simulate(num_ranks: int, num_microbatches: int) -> tuple[Order, ...]:
    """Let time pass in steps of 1; whoever is free applies the rules."""
    forwards = action_table(ActionKind.F, 1, num_microbatches)[0]
    backwards = action_table(ActionKind.B, 1, num_microbatches)[0]
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    # When inputs and gradients arrive; a rank's next one is behind those it has used.
    inputs: list[list[int]] = [[0] * num_microbatches, *([] for _ in range(num_ranks - 1))]
    gradients: list[list[int]] = [[] for _ in range(num_ranks)]
    done = [[0, 0] for _ in range(num_ranks)]
    free_at = [0] * num_ranks
    last = num_ranks - 1
    now = 0
    while done[0][1] < num_microbatches:
        for rank in range(num_ranks):
            forward, backward = done[rank]
            if free_at[rank] > now:
                continue
            if _is_here(gradients[rank], backward, now):
                free_at[rank] = now + _BACKWARD + (0 if rank == last else _RECOMPUTE)
                orders[rank].append(backwards[backward])
                done[rank][1] += 1
                if rank > 0:
                    gradients[rank - 1].append(free_at[rank])
            elif _is_here(inputs[rank], forward, now):
                free_at[rank] = now + _FORWARD
                orders[rank].append(forwards[forward])
                done[rank][0] += 1
                (gradients[rank] if rank == last else inputs[rank + 1]).append(free_at[rank])
        now += 1
    return tuple(tuple(order) for order in orders)


def _is_here(arrivals: list[int], index: int, now: int) -> bool:
    return index < len(arrivals) and arrivals[index] <= now
