"""Limits the activation memory of a rank by caps and a graded rule that cannot deadlock.

A cap is counted in whole-rank microbatches: the activations of one microbatch over all chunks of a
rank, so that one chunk costs ``1 / num_chunks``. The least cap is 1.

The graded rule: a forward of chunk c may start only if afterwards one microbatch of every later
local chunk still fits.

Why it cannot deadlock. Suppose every rank waits. Take the deepest stage s that holds a microbatch
(its forward ran, its backward did not). If s is the last stage, that backward is ready. Otherwise
the forward of stage s+1 has its input, so only the cap can stop it. Its rank holds nothing at s+1
or deeper, only microbatches of earlier chunks. When the last of those forwards started, it left
room for one microbatch of every later chunk, including that of s+1. So the forward fits. If no
stage holds anything, the first forward fits because the cap is at least 1. A flat cap, under which
only the microbatch itself must fit, leaves no such room:

::

    2 ranks, 2 chunks of 1/2, cap 1     F0-0 and F0-1 fill rank 0; F1-0, the only way to a
                                        backward, never fits

**Unequal microbatches.** If each microbatch has a size, in mean microbatches, a cap counts bytes. A
forward of chunk c and microbatch j then leaves room in every later chunk for the largest microbatch
from that chunk's next one up to j. The microbatch that is stuck in the proof above is among them,
because it has passed chunk c. The least cap is the largest microbatch.

**Chunk shares.** One chunk may fill the cap while others starve: the first stages run ahead because
their backwards are far away. By Little's law, the number of microbatches that a stage holds in a
steady pipeline is proportional to the time between forward and backward there, and thus to the
number of stages that follow. So under the cap C of a rank with V chunks, a chunk at stage s of S
may hold

    K = max(1, floor(C V (S - s) / sum of (S - s') over the rank's chunks))

microbatches between the start of their forward and the end of their backward; the deepest chunk has
no such limit. This cannot deadlock either: in the proof above, the chunk of stage s+1 holds
nothing, so its share, at least 1, does not stop the forward.

This module owns these limits. ``RankState`` counts the memory that a rank holds at any moment.
"""

from __future__ import annotations

import math

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.rank_kernel import MEMORY_SCALE
from megatron.adaptive.schedule.stage_placement import Placement

# Relative tolerance: sums of fractions such as thirds differ from their limit by less.
_ROUNDING = 1e-9
# Tolerance in millionths of a microbatch: rounding half a millionth, 1,000 times.
_ROUNDING_PER_SUM = 500
# Measured, see ``runtime_rules``: with 1.25, latency costs up to 7% against the static schedules;
# with 1.5, a latency of up to one stage forward costs nothing.
_SLACK = 1.5


def with_rounding(cap: float) -> float:
    """Returns ``cap`` plus a tolerance for comparing it with a sum of rounded amounts."""
    return cap * (1 + _ROUNDING) + _ROUNDING_PER_SUM / MEMORY_SCALE


def scaled_cap(cap: float, num_chunks: int, largest: float = 1.0) -> int:
    """Returns the cap of a rank in the unit of ``rank_kernel``, with the tolerance for rounding.

    Args:
        cap: Activation cap in whole-rank microbatches of mean size.
        num_chunks: Number of chunks of the rank.
        largest: Size of the largest microbatch, in mean microbatches.

    Raises:
        ScheduleError: The cap is not a number, or below one microbatch in every chunk: no order of
            actions stays within it.
    """
    if math.isnan(cap) or with_rounding(cap) < largest:
        raise ScheduleError(
            f"activation cap {cap:g} is below what any order needs: the least cap is {largest:.3g}"
            f" (one microbatch, the largest, in each of {num_chunks} chunks)"
        )
    return round(min(with_rounding(cap), 1e9) * MEMORY_SCALE)


def chunk_shares(placement: Placement, rank: int, cap: float) -> tuple[int, ...]:
    """Returns the most microbatches that each chunk except the deepest may hold (see the module).

    Raises:
        ScheduleError: No order of actions stays within the cap.
    """
    chunks = range(placement.num_chunks)
    after = [placement.num_stages - placement.stage_of(rank, chunk) for chunk in chunks]
    held = scaled_cap(cap, placement.num_chunks) / MEMORY_SCALE * placement.num_chunks
    return tuple(max(1, math.floor(held * stages / sum(after))) for stages in after[:-1])


def default_cap(placement: Placement, num_microbatches: int) -> float:
    """Returns the cap of a run that sets none, in whole-rank microbatches.

    It is 1.5 times the need of the best static schedule on its first rank, rounded up to a whole
    chunk: 1F1B with one chunk, interleaved 1F1B with several in a loop, ZB-V in a V. The extra half
    lets a rank continue with a forward if its backward is late.

    The result is at least the least cap (1) and at most ``num_microbatches``, above which a cap has
    no effect. A pipeline of one rank never waits and gets the least cap.

    Args:
        placement: Placement of the stages on ranks.
        num_microbatches: Number of microbatches per step, at least 1.
    """
    ranks, chunks = placement.num_ranks, placement.num_chunks
    if ranks == 1:
        return 1.0
    # The warm-up forwards of rank 0, plus the first forward of the steady phase.
    interleaved = (chunks - 1) * ranks + 2 * (ranks - 1) + 1
    static_in_chunks = ranks * chunks if chunks == 1 or placement.kind == "v" else interleaved
    with_slack = math.ceil(static_in_chunks * _SLACK)
    return max(1.0, min(with_slack, num_microbatches * chunks) / chunks)
