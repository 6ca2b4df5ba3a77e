"""Limits the activation memory of a rank to a cap, by rules that cannot cause a deadlock.

The unit of a cap is the activations of one microbatch in all chunks of a rank, so a microbatch in
one chunk takes ``1 / num_chunks``. The minimum cap is 1.

The main rule (graded rule): A forward pass of chunk c may only start if one microbatch in every
later chunk of the same rank still fits afterwards.

This rule cannot deadlock. Proof: Suppose every rank waits. Take the deepest stage s that has run
the forward pass of a microbatch, but not yet its backward pass. If s is the last stage, that
backward pass is ready. Otherwise the forward pass of stage s+1 has its input, so only the cap can
block it. The rank of stage s+1 holds nothing at s+1 or deeper, only microbatches in earlier chunks.
When the last forward pass of those chunks started, it left enough memory for one microbatch in
every later chunk, including the chunk at s+1. So the forward pass of s+1 fits. If no stage holds
anything, the first forward pass fits because the cap is at least 1. A flat cap, which only requires
that the microbatch itself fits, does not keep this memory free:

::

    2 ranks, 2 chunks of 1/2, cap 1     F0-0 and F0-1 fill rank 0; F1-0, which precedes every B,
    never fits

**Unequal microbatches.** If microbatches differ in size, sizes are relative to the mean microbatch,
so that a cap limits bytes. A forward pass of chunk c and microbatch j must leave memory for one
microbatch in every later chunk: the largest microbatch from that chunk's next microbatch up to j.
The blocked microbatch in the proof above is among these, because it has passed chunk c. The minimum
cap is the size of the largest microbatch.

**Slices.** Microbatches may be cut into slices (see ``rank_kernel``), and the number of slices may
differ between microbatches. With slices, no backward pass of a microbatch starts before all of its
slices have run forward, so only the first slice of a microbatch is checked. It starts if the cap
has room for the held slices, the remaining slices of microbatches that have begun on the rank's
chunks, and all slices of this microbatch. The cap must also have room for one whole microbatch in
every later chunk: the largest microbatch up to this microbatch that has not begun in that chunk.
Later slices always start. The minimum cap is the size of the largest microbatch.

The proof with slices: Suppose every rank waits. Take the deepest stage s that holds slices, and the
first microbatch m whose backward passes are not complete there. m has begun on all stages up to s.
If a slice of m has not run on some of these stages, the first such stage has its input. It does not
wait, because later slices always start. So all slices of m have run on s. If s is the last stage, a
backward pass is ready. Otherwise the first slice of m has its input on stage s+1, whose rank holds
only slices in earlier chunks. Consider the most recent start of a microbatch's first slice in those
chunks. It left enough memory for the remaining slices of all microbatches that had begun, and for a
microbatch at least as large as m in every later chunk. Slices that started since then used memory
that was reserved for them. So the first slice of m fits.

**Chunk shares.** One chunk may use all of the memory that the cap allows while other chunks get
nothing, because the first stages run ahead and their backward passes come much later. By Little's
law, the number of microbatches that a stage holds in a steady pipeline is proportional to the time
between its forward and backward pass. That time is proportional to the number of stages that
follow. Each chunk except the deepest therefore has a share: the number of microbatches that it may
hold between the start of their forward pass and the end of their backward pass. If a rank has V
chunks and the cap C, the share of its chunk at stage s of S is

    K = max(1, floor(C V (S - s) / sum of (S - s') over the rank's chunks))

Shares cannot deadlock either: in the proof above, the chunk of stage s+1 holds nothing, and its
share is at least 1.

**Frozen stages.** No gradient flows through the first stages if, for example, they are an encoder
whose parameters are not trained. Their forward passes keep no activations, so the cap does not
count them, and a whole microbatch of a rank consists of its other chunks. Only their outputs use
memory, while they wait until the next stage takes them. A frozen stage may have C waiting outputs,
and always at least 2, so that the next stage does not have to wait for a message. This cannot
deadlock: If a frozen stage must wait, the next stage already has an output to take. If the next
stage is also frozen, it may be waiting for the stage after it. The proof above shows that the first
stage that is not frozen can take its input.

This module computes these limits. ``RankState`` counts the memory that a rank holds at run time.
"""

from __future__ import annotations

import math

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import SliceCounts, mean_slices, most_slices_of
from megatron.adaptive.schedule.rank_kernel import MEMORY_SCALE
from megatron.adaptive.schedule.stage_placement import Placement

# Relative tolerance in comparisons with the cap. It exceeds the rounding error of sums of fractions
# such as 1/3.
_ROUNDING = 1e-9
# Absolute tolerance in comparisons with the cap, in millionths of a microbatch. It is the maximum
# error of a sum of 1,000 sizes, each of which is rounded by up to half a millionth.
_ROUNDING_PER_SUM = 500
# Ratio of the default cap to the memory that a static schedule needs. In measurements (see
# ``runtime_rules``) with a ratio of 1.25, message latency made a step up to 7% longer than with
# static schedules. With 1.5, a latency of up to one forward pass of a stage cost nothing.
_SLACK = 1.5
# A frozen stage may always be at least this many outputs ahead of the next stage. With fewer, the
# next stage would wait for each message.
_LEAST_LEAD = 2


def with_rounding(cap: float) -> float:
    """Adds a tolerance to ``cap``, for comparisons with sums of rounded sizes."""
    return cap * (1 + _ROUNDING) + _ROUNDING_PER_SUM / MEMORY_SCALE


def scaled_cap(cap: float, num_chunks: int, largest: float = 1.0) -> int:
    """Converts a limit on activations (cap) to the integer unit of ``rank_kernel``.

    The result includes the tolerance for rounding errors.

    Args:
        cap: Limit on activations, in microbatches of mean size in all chunks of the rank.
        num_chunks: Number of model chunks on the rank.
        largest: Size of the largest microbatch, relative to the mean size.

    Raises:
        ScheduleError: The cap is not a number, or is smaller than ``largest``. Every order of
            actions needs memory for the largest microbatch in all chunks.
    """
    if math.isnan(cap) or with_rounding(cap) < largest:
        raise ScheduleError(
            f"activation cap must be at least {largest:.3g} (the largest microbatch in each "
            f"of {num_chunks} chunks), got {cap:g}"
        )
    return round(min(with_rounding(cap), 1e9) * MEMORY_SCALE)


def chunk_shares(
    placement: Placement, rank: int, cap: float, num_slices: SliceCounts = 1, frozen_stages: int = 0
) -> tuple[int, ...]:
    """Returns the number of microbatches that each chunk may hold, called the chunk's share.

    The result omits the deepest chunk, because this chunk has no share (see the module's
    docstring).

    Args:
        placement: Assignment of pipeline stages to ranks.
        rank: Pipeline rank.
        cap: Limit on activations. The unit is the activation memory of one microbatch in all chunks
            of the rank.
        num_slices: Number of slices of each microbatch. If there are several, shares count slices.
        frozen_stages: Number of leading stages through which no gradient flows. Their chunks have
            no share, which is represented by -1.

    Raises:
        ScheduleError: No order of actions stays within the cap.
    """
    stages = [placement.stage_of(rank, chunk) for chunk in range(placement.num_chunks)]
    after = [placement.num_stages - stage for stage in stages if stage >= frozen_stages]
    frozen = (-1,) * (len(stages) - len(after))
    whole = scaled_cap(cap, len(stages)) / MEMORY_SCALE * len(after)
    held = whole * mean_slices(num_slices)
    least = most_slices_of(num_slices)
    shares = (max(least, math.floor(held * count / sum(after))) for count in after[:-1])
    return (*frozen, *shares)


def lead_of(cap: float | None, num_items: int, num_slices: SliceCounts = 1) -> int:
    """Returns the number of microbatches or slices by which a frozen stage may lead the next one.

    Args:
        cap: Limit on activations, or ``None`` for no limit. The unit is the activation memory of
            one microbatch in all chunks of the rank.
        num_items: Total number of slices of all microbatches in the step.
        num_slices: Number of slices of each microbatch.
    """
    if cap is None:
        return num_items
    return max(_LEAST_LEAD, math.ceil(min(cap * mean_slices(num_slices), num_items)))


def default_cap(placement: Placement, num_microbatches: int, num_slices: float = 1) -> float:
    """Returns the default limit (cap) on the activations that a rank holds.

    The unit is the activation memory of one microbatch in all chunks of the rank.

    The default is 1.5 times the result of :func:`static_cap`, rounded up to a whole chunk. The
    additional memory lets a rank run another forward pass while the input of its next backward pass
    is late.

    The result is between 1 (the minimum cap) and ``num_microbatches``, above which a cap has no
    effect. In a pipeline with one rank, which never waits, it is the minimum.

    Args:
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step, at least 1.
        num_slices: Number of slices of each microbatch. If a static order holds k whole
            microbatches, the same order with slices holds k slices, plus the other slices of the
            microbatch whose backward pass is next. With slices, the result is at least half of the
            memory that the order needs with whole microbatches.
    """
    chunks = placement.num_chunks
    if placement.num_ranks == 1:
        return 1.0
    static_in_chunks = round(static_cap(placement) * chunks)
    with_slack = math.ceil(static_in_chunks * _SLACK)
    if num_slices > 1:
        in_items = static_in_chunks + (num_slices - 1) * chunks
        with_slack = math.ceil(max(in_items * _SLACK / num_slices, static_in_chunks / 2))
    return max(1.0, min(with_slack, num_microbatches * chunks) / chunks)


def static_cap(placement: Placement) -> float:
    """Returns the peak activation memory on the first rank under the best static schedule.

    The unit is the activation memory of one microbatch in all chunks of the rank. The best static
    schedule is 1F1B for one chunk per rank, interleaved 1F1B for several chunks in a loop, and ZB-V
    for chunks in a V.
    """
    ranks, chunks = placement.num_ranks, placement.num_chunks
    if chunks == 1 or placement.kind == "v":
        return float(ranks)
    # Under interleaved 1F1B, rank 0 holds the activations of its warm-up forward passes and of the
    # first forward pass of the steady phase.
    return ((chunks - 1) * ranks + 2 * (ranks - 1) + 1) / chunks
