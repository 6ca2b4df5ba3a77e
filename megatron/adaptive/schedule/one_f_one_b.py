"""1F1B: as many warm-up forwards as stages follow, then one forward, one backward.

Four ranks, six microbatches; ``F0-3`` is the forward of chunk 0, microbatch 3::

    rank 0 | F0-0 F0-1 F0-2 F0-3 B0-0 F0-4 B0-1 F0-5 B0-2 B0-3 B0-4 B0-5
    rank 1 | F0-0 F0-1 F0-2 B0-0 F0-3 B0-1 F0-4 B0-2 F0-5 B0-3 B0-4 B0-5
    rank 2 | F0-0 F0-1 B0-0 F0-2 B0-1 F0-3 B0-2 F0-4 B0-3 F0-5 B0-4 B0-5
    rank 3 | F0-0 B0-0 F0-1 B0-1 F0-2 B0-2 F0-3 B0-3 F0-4 B0-4 F0-5 B0-5

Rank r holds at most ``num_ranks - r`` microbatches. Without latency a step of m microbatches on p
equal stages takes ``(m + p - 1) * (t_F + t_B)``.

Source: PipeDream-Flush, arXiv 2006.09503, section 2.2.
"""

from __future__ import annotations

from megatron.adaptive.schedule.action import ActionKind, action_table
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.schedule import (
    Order,
    Schedule,
    check_num_microbatches,
    check_one_chunk,
)

__all__ = ["make", "order_after"]


def make(placement: Placement, num_microbatches: int) -> Schedule:
    """Make the 1F1B schedule of a pipeline with one chunk per rank.

    Raises:
        ScheduleError: several chunks per rank, or no microbatch.
    """
    check_num_microbatches(num_microbatches)
    check_one_chunk("1f1b", placement, instead="interleaved or adaptive for several")
    return Schedule(
        name="1f1b",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=tuple(
            order_after(placement.num_ranks - 1 - rank, num_microbatches)
            for rank in range(placement.num_ranks)
        ),
    )


def order_after(warmup: int, num_microbatches: int) -> Order:
    """The order of a rank that does so many forwards, or all, before the first pair."""
    forwards = action_table(ActionKind.F, 1, num_microbatches)[0]
    backwards = action_table(ActionKind.B, 1, num_microbatches)[0]
    warmup = min(warmup, num_microbatches)
    order = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[num_microbatches - warmup :]
    return tuple(order)
