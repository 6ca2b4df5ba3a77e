"""ZB-V: no idle time but the ramp with the memory of 1F1B, two chunks per rank in a V.

Two ranks, three microbatches::

  rank 0 | F0-0 F0-1 F0-2 F1-0 B1-0 W1-0 F1-1 B1-1 W1-1 B0-0 W0-0 F1-2 B1-2 W1-2 B0-1 W0-1 B0-2 W0-2
  rank 1 | F0-0 F1-0 F0-1 F1-1 B1-0 W1-0 F0-2 B0-0 W0-0 F1-2 B1-1 W1-1 B0-1 B1-2 B0-2 W0-1 W1-2 W0-2

Rank r of p fills with ``2 * (p - r) - 1`` forwards of chunk 0, alternates forwards of both chunks
r times, and starts on backwards with chunk 1. Then it repeats one round of six: F, B, W of chunk 0
and F, B, W of chunk 1, so that with equal times every input arrives just in time. In the end
backwards go first and the remaining weight gradients fill up. With fewer than ``2 * p - 1``
microbatches the order is that of ``2 * p - 1`` without those that do not exist.

A rank holds at most ``2 * p`` chunk microbatches, the activations of p whole ones, as 1F1B does.
With one chunk's F, B and W each taking 1 and no latency, a step of m microbatches takes
``6 * m + (p - 1) + max(0, 3 * p - 2 * m - 1)``: each rank works ``6 * m`` and the rest is that rank
r cannot start before r. If F equals B and W is between half of it and all of it, the idle time is
``(p - 1) * F``; with other times it is larger.

Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6 (ZB-V); it is V-ZB in arXiv
2405.15362. The order is that of ``torch.distributed.pipelining``, so both can be compared action by
action.
"""

from __future__ import annotations

from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.schedule import Order


def zb_v(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns the orders of ZB-V with two chunks per rank in a V."""
    ranks = placement.num_ranks
    return tuple(_order(rank, ranks, num_microbatches) for rank in range(ranks))


def _order(rank: int, num_ranks: int, num_microbatches: int) -> Order:
    after = num_ranks - rank
    microbatches = max(num_microbatches, 2 * num_ranks - 1)
    rounds = microbatches - (num_ranks + after - 1)
    lanes = [
        *["F0"] * (2 * after - 1),
        *["F1", "F0"] * rank,
        *["F1", "B1", "W1"] * after,
        *["F0", "B0", "W0", "F1", "B1", "W1"] * rounds,
        *["B0", "W0", "F1", "B1", "W1"] * (after - 1),
        *["B0", "B1"] * rank,
        *["B0", "W0"] * after,
        *["W1"] * rank,
        *["W0"] * rank,
    ]
    counts = dict.fromkeys(lanes, 0)
    order = []
    for lane in lanes:
        microbatch = counts[lane]
        counts[lane] = microbatch + 1
        if microbatch < num_microbatches:
            order.append(Action(ActionKind(lane[0]), int(lane[1]), microbatch))
    return tuple(order)
