"""GPipe, breadth-first and evaluation, chunk by chunk and alike on all ranks; and Varuna.

**gpipe**: all forwards, then all backwards. Three ranks, four microbatches::

    rank 0 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3
    rank 1 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3
    rank 2 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3

**breadth-first**: the same order with several chunks in a loop; every microbatch goes through a
chunk before the next chunk's turn, and back from the deepest. Two ranks, two chunks, three
microbatches::

    rank 0 | F0-0 F0-1 F0-2 F1-0 F1-1 F1-2 B1-0 B1-1 B1-2 B0-0 B0-1 B0-2
    rank 1 | F0-0 F0-1 F0-2 F1-0 F1-1 F1-2 B1-0 B1-1 B1-2 B0-0 B0-1 B0-2

A chunk's weights are used in one stretch per direction, so that gathering them and reducing their
gradients is done once a step and hides behind the other chunks. The price is memory: every rank
holds all microbatches. The idle time is that of interleaved 1F1B: without latency a step of m
microbatches, at least as many as ranks, on p ranks with v chunks takes
``(m * v + p - 1) * (t_F + t_B)`` with t_F and t_B the times of one stage.

**forward-only**, for evaluation: groups of as many microbatches as ranks, through all chunks. Two
ranks, two chunks, three microbatches::

    rank 0 | F0-0 F0-1 F1-0 F1-1 F0-2 F1-2
    rank 1 | F0-0 F0-1 F1-0 F1-1 F0-2 F1-2

An input comes from the same position of the list on another rank, or, where a chunk follows the one
before, from an earlier position; so no cycle can arise. Groups keep every rank busy while only one
group of stage inputs waits between chunks.

Deviation from the papers of these three: backwards run in ascending microbatch order, as everywhere
in this package, not in descending.

**varuna**: every rank prefers backwards and uses waiting time for forwards; made for recomputation.
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

Deviations from its paper: recomputation is part of our B, so it begins when the gradient has
arrived, not so early that it ends then; hence no rank waits between the two, and the paper's rule
that no forward may come between them holds by itself. What the paper decides at run time, to take
a forward where the list's backward is late, is left to the policies.

Source: GPipe, arXiv 1811.06965, section 2.3; Breadth-First Pipeline Parallelism, arXiv 2211.05953:
its schedule for a looping placement; Varuna, arXiv 2111.04007, section 3.2.
"""

from __future__ import annotations

from itertools import chain

from megatron.adaptive.schedule import rules
from megatron.adaptive.schedule.action import ActionKind, action_table
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import RulePolicy
from megatron.adaptive.schedule.schedule import Order
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.workload import StageTimes


def gpipe(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns the orders of GPipe, with several chunks of breadth-first."""
    forwards, backwards = (
        action_table(kind, placement.num_chunks, num_microbatches)
        for kind in (ActionKind.F, ActionKind.B)
    )
    return (tuple(chain(*forwards, *reversed(backwards))),) * placement.num_ranks


def forward_only(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns the orders of an evaluation."""
    ranks = placement.num_ranks
    forwards = action_table(ActionKind.F, placement.num_chunks, num_microbatches)
    groups = (
        of_chunk[first : first + ranks]
        for first in range(0, num_microbatches, ranks)
        for of_chunk in forwards
    )
    return (tuple(chain.from_iterable(groups)),) * ranks


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
