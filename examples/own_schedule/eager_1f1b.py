"""Defines a fixed schedule: 1F1B with a longer warm-up, so that messages have time to arrive.

Each rank starts with twice as many forward passes as in 1F1B. Then it alternates between forward
and backward passes. The table shows three ranks and five microbatches (F3 is the forward pass of
microbatch 3):

    rank 0   F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
    rank 1   F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
    rank 2   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

Source: Zhuang et al., "On Optimizing the Communication of Model Parallelism" (arXiv 2211.05322),
section 4, "eager-1F1B".
"""

from __future__ import annotations

from megatron.adaptive.schedule import Action, ActionKind, Placement, fixed_order


@fixed_order(chunks="one")
def eager_1f1b(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Returns a list of actions for each rank, in the order in which the rank runs them."""
    forwards = [Action(ActionKind.F, 0, number) for number in range(num_microbatches)]
    backwards = [Action(ActionKind.B, 0, number) for number in range(num_microbatches)]
    orders = []
    for rank in range(placement.num_ranks):
        ranks_after = placement.num_ranks - 1 - rank
        warmup = min(2 * ranks_after, num_microbatches)
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [forward, backward]
        order += backwards[num_microbatches - warmup :]
        orders.append(order)
    return orders
