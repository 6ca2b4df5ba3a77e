"""GPipe, breadth-first and evaluation: chunk by chunk, the same order on all ranks.

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

Deviation from the papers: backwards run in ascending microbatch order, as everywhere in this
package, not in descending.

Source: GPipe, arXiv 1811.06965, section 2.3; Breadth-First Pipeline Parallelism, arXiv 2211.05953:
its schedule for a looping placement.
"""

from __future__ import annotations

from itertools import chain

from megatron.adaptive.schedule.action import ActionKind, action_table
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.schedule import Order


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
