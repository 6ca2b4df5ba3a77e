"""ZB-H1: 1F1B with split backwards, whose weight gradients fill the end of the step.

Four ranks, six microbatches::

  rank 0 | F0-0 F0-1 F0-2 F0-3 B0-0 W0-0 F0-4 B0-1 W0-1 F0-5 B0-2 W0-2 B0-3 W0-3 B0-4 W0-4 B0-5 W0-5
  rank 1 | F0-0 F0-1 F0-2 B0-0 F0-3 B0-1 W0-0 F0-4 B0-2 W0-1 F0-5 B0-3 W0-2 B0-4 W0-3 B0-5 W0-4 W0-5
  rank 2 | F0-0 F0-1 B0-0 F0-2 B0-1 F0-3 B0-2 W0-0 F0-4 B0-3 W0-1 F0-5 B0-4 W0-2 B0-5 W0-3 W0-4 W0-5
  rank 3 | F0-0 B0-0 F0-1 B0-1 F0-2 B0-2 F0-3 B0-3 W0-0 F0-4 B0-4 W0-1 F0-5 B0-5 W0-2 W0-3 W0-4 W0-5

Forwards and backwards are in 1F1B's order; rank r's weight gradients lag its backwards by r
microbatches. A gradient thus goes back through all ranks without a W in its way, and every rank
holds, from the start of a forward to the end of its W, at most ``num_ranks`` microbatches: what
1F1B's first rank does.

Without latency a step of m microbatches, at least as many as ranks, on p equal stages takes
``m * (F + B + W) + (p - 1) * (F + B - min(F, B, W))``. The paper states ``F + B - W``, the same
where W is the shortest of the three.

Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1 (ZB-H1) and table 2. The
order is that of ``torch.distributed.pipelining`` with one stage per rank.
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


def make(placement: Placement, num_microbatches: int) -> Schedule:
    """Make the ZB-H1 schedule of a pipeline with one chunk per rank; backwards are split.

    Raises:
        ScheduleError: several chunks per rank, or no microbatch.
    """
    check_num_microbatches(num_microbatches)
    check_one_chunk("zb-h1", placement, instead="zb-v or v-half for two")
    return Schedule(
        name="zb-h1",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=tuple(
            _order(rank, placement.num_ranks - 1 - rank, num_microbatches)
            for rank in range(placement.num_ranks)
        ),
    )


def _order(lag: int, stages_after: int, num_microbatches: int) -> Order:
    forwards, backwards, weights = (
        action_table(kind, 1, num_microbatches)[0]
        for kind in (ActionKind.F, ActionKind.B, ActionKind.W)
    )
    order: list[Action] = list(forwards[:stages_after])
    for microbatch, backward in enumerate(backwards):
        order += forwards[microbatch + stages_after : microbatch + stages_after + 1]
        order.append(backward)
        if microbatch >= lag:
            order.append(weights[microbatch - lag])
    order += weights[max(0, num_microbatches - lag) :]
    return tuple(order)
