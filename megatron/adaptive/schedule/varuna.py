"""Varuna: every rank prefers backwards and uses waiting time for forwards; made for recomputation.

Three ranks, six microbatches::

    rank 0 | F0-0 F0-1 F0-2 F0-3 F0-4 F0-5 B0-0 B0-1 B0-2 B0-3 B0-4 B0-5
    rank 1 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3 F0-4 F0-5 B0-4 B0-5
    rank 2 | F0-0 B0-0 F0-1 B0-1 F0-2 B0-2 F0-3 B0-3 F0-4 B0-4 F0-5 B0-5

The order is what comes out of a simulation of these rules, ``rules.depth_first`` with one chunk,
with a forward of 1, a backward of 2 and before it a recomputation of 1, except on the last stage,
whose backward follows its forward at once:

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

from megatron.adaptive.schedule import rules
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import RulePolicy
from megatron.adaptive.schedule.schedule import Order
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.workload import StageTimes


def varuna(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns the orders of Varuna with one chunk per rank."""
    ranks = placement.num_ranks
    times = StageTimes(
        forward_s=(1.0,) * ranks,
        backward_s=(2.0,) * ranks,
        recompute_s=(1.0,) * (ranks - 1) + (0.0,),
    )
    policies = [RulePolicy("varuna", rules.depth_first)] * ranks
    return simulate(placement, num_microbatches, policies, times).to_schedule("varuna").orders
