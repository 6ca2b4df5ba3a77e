"""Limits the activation memory of a rank: caps, and the graded rule that cannot deadlock.

A cap is counted in whole-rank microbatches: the activations of one microbatch over all chunks of a
rank, so that one chunk costs ``1 / num_chunks``. The least cap is 1.

The graded rule: a forward of chunk c may start only if afterwards one microbatch of every later
local chunk still fits.

Why it cannot deadlock. Suppose every rank waits. Take the deepest stage s that holds a microbatch
(its forward ran, its backward did not). If s is the last stage, that backward is ready. Otherwise
the forward of stage s+1 has its input, so it must be the cap that stops it. Its rank holds nothing
at s+1 or deeper, only microbatches of earlier chunks, and when the last of those forwards started,
room was left for one microbatch of every later chunk, that of s+1 included. So it fits. If no
stage holds anything, the first forward fits as soon as the cap is at least 1. A flat
cap (only the microbatch itself must fit) leaves no such room:

::

    2 ranks, 2 chunks of 1/2, cap 1     F0-0 and F0-1 fill rank 0; F1-0, which alone could lead
                                        to a backward, never fits

**Unequal microbatches.** With a size for each, in mean microbatches, a cap counts bytes. A forward
of chunk c and microbatch j then leaves room in every later chunk for the largest microbatch from
that chunk's next one up to j: the one that is stuck above is among them, for it has passed chunk c.
The least cap is the largest microbatch.

**Chunk shares.** One chunk may fill the cap while others starve: the first stages run ahead, as
their backwards are far away. By Little's law, what a stage holds in a steady pipeline is in
proportion to how long a microbatch stays between its forward and its backward there, and that to
the stages that follow. So of the cap C of a rank with V chunks, a chunk at stage s of S may hold

    K = max(1, floor(C V (S - s) / sum of (S - s') over the rank's chunks))

microbatches between the start of their forward and the end of their backward; the deepest chunk has
no such limit. This cannot deadlock either: the forward of stage s+1 above is on a chunk that holds
nothing, so that its share, at least 1, does not stop it.

This module owns these numbers. Who holds how much at a moment is the business of ``RankState``.
"""

from __future__ import annotations

import math

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.rank_kernel import MEMORY_SCALE
from megatron.adaptive.schedule.stage_placement import Placement

# Relative: sums of fractions such as thirds miss their limit by less.
_ROUNDING = 1e-9
# In millionths: half of one for each of a thousand chunks' microbatches.
_ROUNDING_PER_SUM = 500
# Measured, see ``rules``: at 1.25 latency already costs up to 7% against the static schedules,
# at 1.5 nothing up to one stage forward of latency.
_SLACK = 1.5


def with_rounding(cap: float) -> float:
    """``cap`` with the slack that sums of rounded amounts need when compared with it."""
    return cap * (1 + _ROUNDING) + _ROUNDING_PER_SUM / MEMORY_SCALE


def scaled_cap(cap: float, num_chunks: int, largest: float = 1.0) -> int:
    """A rank's cap as ``machine`` counts it, with its slack.

    Args:
        cap: in whole-rank microbatches of mean size.
        num_chunks: of the rank.
        largest: size of the largest microbatch.

    Raises:
        ScheduleError: no order of actions can keep it: it is not a number or below one microbatch
            in every chunk.
    """
    if math.isnan(cap) or with_rounding(cap) < largest:
        raise ScheduleError(
            f"activation cap {cap:g} is below what any order needs: the least cap is {largest:.3g}"
            f" (one microbatch, the largest, in each of {num_chunks} chunks)"
        )
    return round(min(with_rounding(cap), 1e9) * MEMORY_SCALE)


def chunk_shares(placement: Placement, rank: int, cap: float) -> tuple[int, ...]:
    """Returns the most microbatches that each chunk but the deepest may hold; see the module.

    Raises:
        ScheduleError: no order of actions can keep the cap.
    """
    chunks = range(placement.num_chunks)
    after = [placement.num_stages - placement.stage_of(rank, chunk) for chunk in chunks]
    held = scaled_cap(cap, placement.num_chunks) / MEMORY_SCALE * placement.num_chunks
    return tuple(max(1, math.floor(held * stages / sum(after))) for stages in after[:-1])


def default_cap(placement: Placement, num_microbatches: int) -> float:
    """The cap used when nobody gives one, in whole-rank microbatches.

    It is what the best static schedule needs at its hungriest rank, the first: 1F1B with one chunk,
    interleaved 1F1B with several in a loop, ZB-V in a V. On top comes half as much again, so that a
    rank whose backward is late can go on with a forward; rounded up to a whole chunk.

    Never below the least cap (1) nor above ``num_microbatches``, beyond which a cap is idle. One
    rank alone waits for nobody and gets the least cap.

    Args:
        placement: which rank holds which stage.
        num_microbatches: microbatches per step, at least 1.
    """
    ranks, chunks = placement.num_ranks, placement.num_chunks
    if ranks == 1:
        return 1.0
    # Warm-up forwards of rank 0, and the one that the steady phase begins with.
    interleaved = (chunks - 1) * ranks + 2 * (ranks - 1) + 1
    static_in_chunks = ranks * chunks if chunks == 1 or placement.kind == "v" else interleaved
    with_slack = math.ceil(static_in_chunks * _SLACK)
    return max(1.0, min(with_slack, num_microbatches * chunks) / chunks)
