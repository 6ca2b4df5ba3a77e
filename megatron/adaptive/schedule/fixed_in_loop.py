"""Fixed orders in a loop: GPipe and what goes chunk by chunk, 1F1B and what alternates, Varuna.

**1f1b**: as many warm-up forwards as stages follow. Four ranks, six microbatches; ``F0-3`` is the
forward of chunk 0, microbatch 3::

    rank 0 | F0-0 F0-1 F0-2 F0-3 B0-0 F0-4 B0-1 F0-5 B0-2 B0-3 B0-4 B0-5
    rank 1 | F0-0 F0-1 F0-2 B0-0 F0-3 B0-1 F0-4 B0-2 F0-5 B0-3 B0-4 B0-5
    rank 2 | F0-0 F0-1 B0-0 F0-2 B0-1 F0-3 B0-2 F0-4 B0-3 F0-5 B0-4 B0-5
    rank 3 | F0-0 B0-0 F0-1 B0-1 F0-2 B0-2 F0-3 B0-3 F0-4 B0-4 F0-5 B0-5

Rank r holds at most ``num_ranks - r`` microbatches. Without latency a step of m microbatches on p
equal stages takes ``(m + p - 1) * (t_F + t_B)``.

**interleaved**: groups of microbatches go through all chunks of a rank in turn. Two ranks, two
chunks, four microbatches::

    rank 0 | F0-0 F0-1 F1-0 F1-1 F0-2 B1-0 F0-3 B1-1 F1-2 B0-0 F1-3 B0-1 B1-2 B1-3 B0-2 B0-3
    rank 1 | F0-0 F0-1 F1-0 B1-0 F1-1 B1-1 F0-2 B0-0 F0-3 B0-1 F1-2 B1-2 F1-3 B1-3 B0-2 B0-3

Forwards run group by group: all microbatches of a group in chunk 0, then in chunk 1 and so on;
backwards likewise from the deepest chunk. Rank r warms up with
``2 * (num_ranks - 1 - r) + (num_chunks - 1) * group_size`` forwards, then alternates. This is the
order of megatron-core, so both can be compared action by action. Without latency the idle time of
a rank is ``(num_ranks - 1) * (t_F + t_B)`` with t_F and t_B the times of one stage, that is 1F1B's
divided by num_chunks.

**zb-h1**: 1F1B with split backwards, whose weight gradients fill the end of the step. Four ranks,
six microbatches::

  rank 0 | F0-0 F0-1 F0-2 F0-3 B0-0 W0-0 F0-4 B0-1 W0-1 F0-5 B0-2 W0-2 B0-3 W0-3 B0-4 W0-4 B0-5 W0-5
  rank 1 | F0-0 F0-1 F0-2 B0-0 F0-3 B0-1 W0-0 F0-4 B0-2 W0-1 F0-5 B0-3 W0-2 B0-4 W0-3 B0-5 W0-4 W0-5
  rank 2 | F0-0 F0-1 B0-0 F0-2 B0-1 F0-3 B0-2 W0-0 F0-4 B0-3 W0-1 F0-5 B0-4 W0-2 B0-5 W0-3 W0-4 W0-5
  rank 3 | F0-0 B0-0 F0-1 B0-1 F0-2 B0-2 F0-3 B0-3 W0-0 F0-4 B0-4 W0-1 F0-5 B0-5 W0-2 W0-3 W0-4 W0-5

Rank r's weight gradients lag its backwards by r microbatches. A gradient thus goes back through all
ranks without a W in its way, and every rank holds, from the start of a forward to the end of its W,
at most ``num_ranks`` microbatches: what 1F1B's first rank does. Without latency a step of m
microbatches, at least as many as ranks, on p equal stages takes
``m * (F + B + W) + (p - 1) * (F + B - min(F, B, W))``. The paper states ``F + B - W``, the same
where W is the shortest of the three.

**interleaved-zb**: the two together. Forwards and backwards go through the chunks in groups as in
interleaved 1F1B, after only ``num_ranks - 1 - r + (num_chunks - 1) * group_size`` warm-up forwards:
without weight gradients in its way a gradient is back in half the time. Those lag r behind, so that
no rank holds more than ZB-H1 does. Two ranks, two chunks, three microbatches in one group::

  rank 0 | F0-0 F0-1 F0-2 F1-0 F1-1 B1-0 W1-0 F1-2 B1-1 W1-1 B1-2 W1-2 B0-0 W0-0 B0-1 W0-1 B0-2 W0-2
  rank 1 | F0-0 F0-1 F0-2 F1-0 B1-0 F1-1 B1-1 W1-0 F1-2 B1-2 W1-1 B0-0 W1-2 B0-1 W0-0 B0-2 W0-1 W0-2

**combined-1f1b**: interleaved 1F1B with one more warm-up forward, whose steady phase runs each
forward together with the backward after it, which is of another microbatch: one computes while the
other's experts communicate. ``F0-3+`` is such a forward::

    rank 0 | F0-0 F0-1 F1-0 F1-1 F0-2 F0-3+ B1-0 F1-2+ B1-1 F1-3+ B0-0 B0-1 B1-2 B1-3 B0-2 B0-3
    rank 1 | F0-0 F0-1 F1-0 F1-1+ B1-0 F0-2+ B1-1 F0-3+ B0-0 F1-2+ B0-1 F1-3+ B1-2 B1-3 B0-2 B0-3

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

Source: 1F1B: PipeDream-Flush, arXiv 2006.09503, section 2.2. Interleaved: Megatron-LM, arXiv
2104.04473, section 2.2; group sizes other than the number of ranks as in megatron-core. Combined:
megatron-core's ``overlap_moe_expert_parallel_comm``. ZB-H1: Zero
Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1 and table 2; this order, and the one with
several stages per rank, are those of ``torch.distributed.pipelining``.
GPipe, arXiv 1811.06965, section 2.3; Breadth-First Pipeline Parallelism, arXiv 2211.05953:
its schedule for a looping placement; Varuna, arXiv 2111.04007, section 3.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import runtime_rules
from megatron.adaptive.schedule.action import Action, ActionKind, action_table
from megatron.adaptive.schedule.policy import RulePolicy
from megatron.adaptive.schedule.schedule import Order
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageTimes


def one_f_one_b(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns the orders of 1F1B with one chunk per rank."""
    return tuple(order_after(warmup, num_microbatches) for warmup in _stages_after(placement))


def order_after(warmup: int, num_microbatches: int) -> Order:
    """The order of a rank that does so many forwards, or all, before the first pair."""
    forwards, backwards = (
        action_table(kind, 1, num_microbatches)[0] for kind in (ActionKind.F, ActionKind.B)
    )
    return _in_turn(forwards, backwards, warmup)


def zb_h1(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns the orders of ZB-H1 with one chunk per rank."""
    return _with_lagging_weights(one_f_one_b(placement, num_microbatches))


def interleaved_zb(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns the orders of interleaved 1F1B with split backwards, two or more chunks in a loop.

    Groups hold as many microbatches as ranks, or a little more where these do not divide.

    Raises:
        ScheduleError: the microbatches do not divide into equal groups.
    """
    ranks, chunks = placement.num_ranks, placement.num_chunks
    groups = max(1, num_microbatches // ranks)
    if num_microbatches % groups:
        raise ScheduleError(
            f"schedule interleaved-zb got {num_microbatches} microbatches for {ranks} ranks: they"
            f" must divide into {groups} equal groups, use a multiple of {ranks} or schedule"
            " adaptive"
        )
    size = num_microbatches // groups
    forwards, backwards = _in_groups(chunks, num_microbatches, size)
    return _with_lagging_weights(
        _in_turn(forwards, backwards, after + (chunks - 1) * size)
        for after in _stages_after(placement)
    )


def _with_lagging_weights(plain: Iterable[Order]) -> tuple[Order, ...]:
    """Adds weight gradients in the order of the backwards, those of rank r so many behind."""
    orders = []
    for lag, of_rank in enumerate(plain):
        order: list[Action] = []
        left: deque[Action] = deque()
        for action in of_rank:
            order.append(action)
            if action.kind is ActionKind.B:
                left.append(replace(action, kind=ActionKind.W))
                if len(left) > lag:
                    order.append(left.popleft())
        orders.append((*order, *left))
    return tuple(orders)


def interleaved(
    placement: Placement,
    num_microbatches: int,
    *,
    group_size: int | None = None,
    pairs: bool = False,
) -> tuple[Order, ...]:
    """Returns the orders of interleaved 1F1B.

    Args:
        placement: loop, at least two chunks per rank.
        num_microbatches: a multiple of ``group_size``, or with a remainder of at least the number
            of ranks, which then forms the last, smaller group.
        group_size: microbatches that pass through a chunk before the next chunk's turn, from the
            number of ranks (the default) to ``num_microbatches``.
        pairs: run each forward of the steady phase together with the backward after it.

    Raises:
        ScheduleError: one of these conditions is broken.
    """
    ranks, chunks = placement.num_ranks, placement.num_chunks
    size = ranks if group_size is None else group_size
    if not ranks <= size <= num_microbatches:
        raise ScheduleError(
            f"schedule interleaved got groups of {size} microbatches: a group must hold at"
            f" least {ranks} (the ranks) and at most {num_microbatches} (the microbatches),"
            " raise the global batch size"
        )
    remainder = num_microbatches % size
    if 0 < remainder < ranks:
        raise ScheduleError(
            f"schedule interleaved got {num_microbatches} microbatches in groups of {size}:"
            f" the remainder {remainder} is below {ranks} (the ranks), use a multiple of"
            f" {size} or schedule adaptive"
        )
    forwards, backwards = _in_groups(chunks, num_microbatches, size)
    return tuple(
        _in_turn(forwards, backwards, 2 * after + (chunks - 1) * size, pairs=pairs)
        for after in _stages_after(placement)
    )


def combined_1f1b(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns the orders of interleaved 1F1B in which forwards and backwards begin in pairs."""
    return interleaved(placement, num_microbatches, pairs=True)


def _in_groups(chunks: int, num_microbatches: int, size: int) -> tuple[list[Action], list[Action]]:
    """Returns forwards and backwards of all chunks, one group of microbatches after the other."""
    forwards, backwards = (
        [
            action
            for first in range(0, num_microbatches, size)
            for of_chunk in table
            for action in of_chunk[first : first + size]
        ]
        for table in (
            action_table(ActionKind.F, chunks, num_microbatches),
            action_table(ActionKind.B, chunks, num_microbatches)[::-1],
        )
    )
    return forwards, backwards


def _stages_after(placement: Placement) -> range:
    """For each rank, how many follow it."""
    return range(placement.num_ranks - 1, -1, -1)


def _in_turn(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int, *, pairs: bool = False
) -> Order:
    warmup = min(warmup + pairs, len(forwards))
    order = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [replace(forward, paired=True) if pairs else forward, backward]
    return (*order, *backwards[len(forwards) - warmup :])


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
    policies = [RulePolicy("varuna", runtime_rules.depth_first)] * ranks
    return simulate(placement, num_microbatches, policies, times).to_schedule("varuna").orders
