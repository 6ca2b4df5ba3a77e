"""Creates static schedules for stages in a loop: GPipe, 1F1B, variants of both, and Varuna.

**1f1b**: A rank runs one warm-up forward pass for each later stage, then alternates forward and
backward passes. The example has four ranks and six microbatches; ``F0-3`` is the forward pass of
microbatch 3 in chunk 0::

    rank 0 | F0-0 F0-1 F0-2 F0-3 B0-0 F0-4 B0-1 F0-5 B0-2 B0-3 B0-4 B0-5
    rank 1 | F0-0 F0-1 F0-2 B0-0 F0-3 B0-1 F0-4 B0-2 F0-5 B0-3 B0-4 B0-5
    rank 2 | F0-0 F0-1 B0-0 F0-2 B0-1 F0-3 B0-2 F0-4 B0-3 F0-5 B0-4 B0-5
    rank 3 | F0-0 B0-0 F0-1 B0-1 F0-2 B0-2 F0-3 B0-3 F0-4 B0-4 F0-5 B0-5

Rank r holds the activations of at most ``num_ranks - r`` microbatches. Without message latency, a
step of m microbatches on p equal stages takes ``(m + p - 1) * (t_F + t_B)``.

**seq-1f1b**: 1F1B over slices of sequences. Forward passes run the slices of all microbatches in
ascending order, and backward passes run the slices of each microbatch in descending order. There
are ``num_slices - 1`` additional warm-up forward passes, because the forward passes of all slices
of a microbatch must precede the microbatch's first backward pass. The example has two ranks and two
microbatches of three slices; ``F0-1.2`` is the last slice of microbatch 1::

    rank 0 | F0-0.0 F0-0.1 F0-0.2 F0-1.0 B0-0.2 F0-1.1 B0-0.1 F0-1.2 B0-0.0 B0-1.2 B0-1.1 B0-1.0
    rank 1 | F0-0.0 F0-0.1 F0-0.2 B0-0.2 F0-1.0 B0-0.1 F0-1.1 B0-0.0 F0-1.2 B0-1.2 B0-1.1 B0-1.0

Rank r holds the activations of at most ``num_ranks - r + num_slices - 1`` slices.

**interleaved**: Each group of microbatches passes through the chunks of a rank one after another.
The example has two ranks, two chunks and four microbatches::

    rank 0 | F0-0 F0-1 F1-0 F1-1 F0-2 B1-0 F0-3 B1-1 F1-2 B0-0 F1-3 B0-1 B1-2 B1-3 B0-2 B0-3
    rank 1 | F0-0 F0-1 F1-0 B1-0 F1-1 B1-1 F0-2 B0-0 F0-3 B0-1 F1-2 B1-2 F1-3 B1-3 B0-2 B0-3

Forward passes run group by group: all microbatches of a group in chunk 0, then in chunk 1 and so
on. Backward passes also run group by group, from the deepest chunk to chunk 0. Rank r runs ``2 *
(num_ranks - 1 - r) + (num_chunks - 1) * group_size`` warm-up forward passes, then alternates. This
is the order of megatron-core, so both can be compared action by action. Without latency, the idle
time of a rank is ``(num_ranks - 1) * (t_F + t_B)``, where t_F and t_B are the times of one stage.
This is the idle time of 1F1B divided by num_chunks.

**zb-h1**: 1F1B with weight gradients as separate actions (W), which fill the idle time at the end
of the step. The example has four ranks and six microbatches::

  rank 0 | F0-0 F0-1 F0-2 F0-3 B0-0 W0-0 F0-4 B0-1 W0-1 F0-5 B0-2 W0-2 B0-3 W0-3 B0-4 W0-4 B0-5 W0-5
  rank 1 | F0-0 F0-1 F0-2 B0-0 F0-3 B0-1 W0-0 F0-4 B0-2 W0-1 F0-5 B0-3 W0-2 B0-4 W0-3 B0-5 W0-4 W0-5
  rank 2 | F0-0 F0-1 B0-0 F0-2 B0-1 F0-3 B0-2 W0-0 F0-4 B0-3 W0-1 F0-5 B0-4 W0-2 B0-5 W0-3 W0-4 W0-5
  rank 3 | F0-0 B0-0 F0-1 B0-1 F0-2 B0-2 F0-3 B0-3 W0-0 F0-4 B0-4 W0-1 F0-5 B0-5 W0-2 W0-3 W0-4 W0-5

On rank r, the W of a microbatch runs r backward passes later than its B, so no W delays a gradient
on its way back through the ranks. Each rank holds at most ``num_ranks`` microbatches between the
start of F and the end of W, as many as the first rank under 1F1B. Without latency, a step of m
microbatches on p equal stages, with m at least p, takes ``m * (F + B + W) + (p - 1) * (F + B -
min(F, B, W))``. The paper states ``F + B - W``, which is the same if W is the shortest of the
three.

**interleaved-zb**: Interleaved 1F1B with separate weight gradients, as in ZB-H1. Forward and
backward passes go through the chunks in groups as in interleaved 1F1B, but after only ``num_ranks -
1 - r + (num_chunks - 1) * group_size`` warm-up forward passes. This is enough because no W delays a
gradient on its way back through the ranks, so the gradient returns in half the time. On rank r,
each W runs r backward passes after its B, so that no rank holds more memory than under ZB-H1. The
example has two ranks, two chunks and one group of three microbatches::

  rank 0 | F0-0 F0-1 F0-2 F1-0 F1-1 B1-0 W1-0 F1-2 B1-1 W1-1 B1-2 W1-2 B0-0 W0-0 B0-1 W0-1 B0-2 W0-2
  rank 1 | F0-0 F0-1 F0-2 F1-0 B1-0 F1-1 B1-1 W1-0 F1-2 B1-2 W1-1 B0-0 W1-2 B0-1 W0-0 B0-2 W0-1 W0-2

**combined-1f1b**: Interleaved 1F1B with one more warm-up forward pass. In its steady phase, each
forward pass starts together with the next backward pass, which belongs to another microbatch. While
the experts of one pass communicate, the other pass computes. ``F0-3+`` is such a forward pass::

    rank 0 | F0-0 F0-1 F1-0 F1-1 F0-2 F0-3+ B1-0 F1-2+ B1-1 F1-3+ B0-0 B0-1 B1-2 B1-3 B0-2 B0-3
    rank 1 | F0-0 F0-1 F1-0 F1-1+ B1-0 F0-2+ B1-1 F0-3+ B0-0 F1-2+ B0-1 F1-3+ B1-2 B1-3 B0-2 B0-3

**gpipe**: All forward passes, followed by all backward passes. The example has three ranks and four
microbatches::

    rank 0 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3
    rank 1 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3
    rank 2 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3

**breadth-first**: GPipe with several chunks in a loop. All microbatches pass through one chunk
before the next chunk begins; backward passes begin with the deepest chunk. The example has two
ranks, two chunks and three microbatches::

    rank 0 | F0-0 F0-1 F0-2 F1-0 F1-1 F1-2 B1-0 B1-1 B1-2 B0-0 B0-1 B0-2
    rank 1 | F0-0 F0-1 F0-2 F1-0 F1-1 F1-2 B1-0 B1-1 B1-2 B0-0 B0-1 B0-2

All forward passes of a chunk are adjacent, and so are all its backward passes. The chunk's weights
are therefore gathered, and their gradients reduced, once per step, while other chunks compute. The
drawback is memory: every rank holds all microbatches. The idle time is the same as that of
interleaved 1F1B. Without latency, a step of m microbatches on p ranks with v chunks, with m at
least p, takes ``(m * v + p - 1) * (t_F + t_B)``, where t_F and t_B are the times of one stage.

**forward-only**: For evaluation, microbatches pass through all chunks in groups. A group has as
many microbatches as there are ranks. The example has two ranks, two chunks and three microbatches::

    rank 0 | F0-0 F0-1 F1-0 F1-1 F0-2 F1-2
    rank 1 | F0-0 F0-1 F1-0 F1-1 F0-2 F1-2

All ranks have the same list of actions. An action's input comes from the same position of another
rank's list or, between two chunks, from an earlier position, so there is no deadlock. The groups
keep every rank busy, and at most one group of stage inputs must be stored between chunks.

The papers on GPipe and breadth-first run backward passes in descending order of microbatches. This
package always runs them in ascending order.

**varuna**: Every rank prefers backward passes, and runs forward passes when it would otherwise
wait. It is designed for training with activation recomputation. The example has three ranks and six
microbatches::

    rank 0 | F0-0 F0-1 F0-2 F0-3 F0-4 F0-5 B0-0 B0-1 B0-2 B0-3 B0-4 B0-5
    rank 1 | F0-0 F0-1 F0-2 F0-3 B0-0 B0-1 B0-2 B0-3 F0-4 F0-5 B0-4 B0-5
    rank 2 | F0-0 B0-0 F0-1 B0-1 F0-2 B0-2 F0-3 B0-3 F0-4 B0-4 F0-5 B0-5

The order is the result of simulating ``runtime_rules.depth_first`` with one chunk. In the
simulation, a forward pass and a recomputation take time 1 each, and the backward pass takes 2. The
last stage does not recompute, because each of its backward passes directly follows the forward
pass. At any time, a rank follows these rules:

1. If the gradient for the next backward pass has arrived, run that backward pass.
2. Otherwise, if the input of the next forward pass has arrived, run that forward pass, regardless
   of memory.
3. Otherwise, wait.

Forward passes that 1F1B would delay therefore fill the waits. A rank holds at most 4 microbatches
for each later stage, and the last rank holds 1. With recomputation, a rank holds only the stage's
input of each microbatch. To limit memory, use ``adaptive``.

Deviations from the paper: Here, recomputation is part of B, so it starts when the gradient has
arrived. In the paper, the recomputation ends when the gradient arrives. In this package, therefore,
no rank waits between a recomputation and its backward pass, and the paper's rule that no forward
pass may run between them is not needed. In the paper, a rank also runs a forward pass if the
backward pass in its list is late. Here, only run-time rules do that.

Source: 1F1B is from PipeDream-Flush, arXiv 2006.09503, section 2.2. Seq-1F1B is from arXiv
2406.03488 (the order for one stage per rank). Interleaved is from Megatron-LM, arXiv 2104.04473,
section 2.2; group sizes other than the number of ranks are as in megatron-core. Combined is
``overlap_moe_expert_parallel_comm`` of megatron-core. ZB-H1 is from Zero Bubble Pipeline
Parallelism, arXiv 2401.10241, section 2.1 and table 2; this order, and the order with several
stages per rank, are the same as in ``torch.distributed.pipelining``. GPipe is from arXiv
1811.06965, section 2.3. Breadth-First Pipeline Parallelism is from arXiv 2211.05953 (the schedule
for a looping placement). Varuna is from arXiv 2111.04007, section 3.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from megatron.adaptive.config.schedule_specs import ScheduleSpec
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import runtime_rules
from megatron.adaptive.schedule.action import (
    Action,
    ActionKind,
    SliceCounts,
    action_table,
    item_count,
)
from megatron.adaptive.schedule.schedule import Order
from megatron.adaptive.schedule.stage_placement import Placement


def one_f_one_b(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns each rank's actions under the 1F1B schedule, which requires one chunk per rank.

    ``placement`` assigns stages to ranks. A step has ``num_microbatches`` microbatches.
    """
    return tuple(order_after(warmup, num_microbatches) for warmup in _stages_after(placement))


def seq_1f1b(placement: Placement, num_microbatches: int, num_slices: int = 1) -> tuple[Order, ...]:
    """Returns each rank's actions under the Seq1F1B schedule, which requires one chunk per rank.

    ``placement`` assigns stages to ranks. A step has ``num_microbatches`` microbatches, which are
    cut into ``num_slices`` slices each.

    With a single slice per microbatch, the result equals that of 1F1B.
    """
    return tuple(
        order_after(warmup + num_slices - 1, num_microbatches, num_slices)
        for warmup in _stages_after(placement)
    )


def order_after(warmup: int, num_microbatches: int, num_slices: int = 1) -> Order:
    """Returns the actions of a rank that alternates F and B after ``warmup`` forward passes.

    A step has ``num_microbatches`` microbatches of ``num_slices`` slices.
    """
    forwards, backwards = (
        action_table(kind, 1, num_microbatches, 1, num_slices)[0]
        for kind in (ActionKind.F, ActionKind.B)
    )
    return _in_turn(forwards, backwards, warmup)


def zb_h1(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns each rank's actions under the ZB-H1 schedule, which requires one chunk per rank.

    ``placement`` assigns stages to ranks. A step has ``num_microbatches`` microbatches.
    """
    return _with_lagging_weights(one_f_one_b(placement, num_microbatches))


def interleaved_zb(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns each rank's actions under interleaved 1F1B with separate weight gradients (W).

    The placement must be a loop with at least two chunks per rank.

    Microbatches run in as many equal groups as possible. A group must contain at least as many
    microbatches as there are ranks.

    Raises:
        ScheduleError: The microbatches cannot be divided into equal groups.
    """
    ranks, chunks = placement.num_ranks, placement.num_chunks
    groups = max(1, num_microbatches // ranks)
    if num_microbatches % groups:
        raise ScheduleError(
            f"the interleaved-zb schedule requires {groups} equal groups of microbatches for "
            f"{ranks} ranks, got {num_microbatches} microbatches; use a multiple of {ranks} or "
            "schedule adaptive"
        )
    size = num_microbatches // groups
    forwards, backwards = _in_groups(chunks, num_microbatches, size)
    return _with_lagging_weights(
        _in_turn(forwards, backwards, after + (chunks - 1) * size)
        for after in _stages_after(placement)
    )


def _with_lagging_weights(plain: Iterable[Order]) -> tuple[Order, ...]:
    """Adds a weight-gradient action (W) for each backward action (B) to the actions of all ranks.

    ``plain`` contains the actions of each rank. On rank r, the W of a microbatch runs r backward
    passes after its B.
    """
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
    """Returns each rank's actions under the ``interleaved`` schedule (interleaved 1F1B).

    Args:
        placement: Assignment of stages to ranks. It must be a loop with at least two chunks per
            rank.
        num_microbatches: Number of microbatches, which must be a multiple of ``group_size``. A
            remainder of at least the number of ranks is allowed, and forms a smaller last group.
        group_size: Number of microbatches that pass through a chunk before the next chunk begins,
            from the number of ranks (the default) to ``num_microbatches``.
        pairs: Whether each forward pass of the steady phase runs together with the next backward
            pass.

    Raises:
        ScheduleError: The number of microbatches or the group size violates these conditions.
    """
    ranks, chunks = placement.num_ranks, placement.num_chunks
    size = ranks if group_size is None else group_size
    if not ranks <= size <= num_microbatches:
        raise ScheduleError(
            f"the interleaved schedule requires groups of at least {ranks} microbatches (the "
            f"number of ranks) and at most {num_microbatches} (all microbatches), got groups of "
            f"{size} microbatches; raise the global batch size"
        )
    remainder = num_microbatches % size
    if 0 < remainder < ranks:
        raise ScheduleError(
            f"the interleaved schedule cannot divide {num_microbatches} microbatches into groups "
            f"of {size}, because the remainder {remainder} is less than {ranks} (the number of "
            f"ranks); use a multiple of {size} or schedule adaptive"
        )
    forwards, backwards = _in_groups(chunks, num_microbatches, size)
    return tuple(
        _in_turn(forwards, backwards, 2 * after + (chunks - 1) * size, pairs=pairs)
        for after in _stages_after(placement)
    )


def combined_1f1b(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns each rank's actions under interleaved 1F1B in which each F starts together with a B.

    ``placement`` assigns stages to ranks. A step has ``num_microbatches`` microbatches.
    """
    return interleaved(placement, num_microbatches, pairs=True)


def _in_groups(chunks: int, num_microbatches: int, size: int) -> tuple[list[Action], list[Action]]:
    """Returns the F actions and the B actions of a rank, in groups of ``size`` microbatches.

    The rank has ``chunks`` chunks, and a step has ``num_microbatches`` microbatches.
    """
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
    """Returns the number of ranks that follow each rank of ``placement``."""
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
    """Returns each rank's actions under GPipe, or under breadth-first if ranks have several chunks.

    ``placement`` assigns stages to ranks. A step has ``num_microbatches`` microbatches.
    """
    forwards, backwards = (
        action_table(kind, placement.num_chunks, num_microbatches)
        for kind in (ActionKind.F, ActionKind.B)
    )
    return (tuple(chain(*forwards, *reversed(backwards))),) * placement.num_ranks


def forward_only(
    placement: Placement, num_microbatches: int, num_slices: SliceCounts = 1
) -> tuple[Order, ...]:
    """Returns each rank's actions in an evaluation, which has only forward passes.

    The ``num_microbatches`` microbatches run in groups. A group has as many microbatches as
    ``placement`` has ranks. If microbatches are cut into ``num_slices`` slices, the groups consist
    of slices.
    """
    ranks = placement.num_ranks
    num_items = item_count(num_microbatches, num_slices)
    forwards = action_table(ActionKind.F, placement.num_chunks, num_items)
    groups = (
        of_chunk[first : first + ranks]
        for first in range(0, num_items, ranks)
        for of_chunk in forwards
    )
    return (tuple(chain.from_iterable(groups)),) * ranks


def varuna(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns each rank's actions under the Varuna schedule, which requires one chunk per rank.

    ``placement`` assigns stages to ranks. A step has ``num_microbatches`` microbatches.
    """
    # Import these modules only here, because they import numpy and modules of ``config``, which
    # imports this module.
    from megatron.adaptive.schedule.policy import RulePolicy
    from megatron.adaptive.schedule.simulate import simulate
    from megatron.adaptive.schedule.workload import StageTimes

    ranks = placement.num_ranks
    times = StageTimes(
        forward_s=(1.0,) * ranks,
        backward_s=(2.0,) * ranks,
        recompute_s=(1.0,) * (ranks - 1) + (0.0,),
    )
    policies = [RulePolicy("varuna", runtime_rules.depth_first)] * ranks
    return simulate(placement, num_microbatches, policies, times).to_schedule("varuna").orders


SCHEDULES = (
    ScheduleSpec(
        name="1f1b",
        position=10,
        function=one_f_one_b,
        chunks="one",
        allows_unequal_stages=True,
        is_auto_candidate=True,
        planned="by default",
        torch_name="1F1B",
    ),
    ScheduleSpec(name="seq-1f1b", position=20, function=seq_1f1b, chunks="one", orders_slices=True),
    ScheduleSpec(
        name="zb-h1",
        position=30,
        function=zb_h1,
        chunks="one",
        splits_backward="always",
        is_hint=True,
        is_auto_candidate=True,
        planned="by default",
    ),
    ScheduleSpec(
        name="gpipe",
        position=60,
        function=gpipe,
        placements=("loop", "v"),
        keeps_all=True,
        allows_unequal_stages=True,
        planned="on request",
        torch_name="GPipe",
    ),
    ScheduleSpec(
        name="interleaved",
        position=90,
        function=interleaved,
        chunks="several",
        groups_microbatches=True,
        takes_group_size=True,
        is_hint=True,
        is_auto_candidate=True,
        planned="by default",
        torch_name="Interleaved1F1B",
    ),
    ScheduleSpec(
        name="interleaved-zb",
        position=100,
        function=interleaved_zb,
        chunks="several",
        splits_backward="always",
        is_hint=True,
        is_auto_candidate=True,
    ),
    ScheduleSpec(
        name="combined-1f1b",
        position=140,
        function=combined_1f1b,
        chunks="several",
        overlaps_experts=True,
        groups_microbatches=True,
        planned="on request",
    ),
    ScheduleSpec(
        name="breadth-first",
        position=150,
        function=gpipe,
        chunks="several",
        keeps_all=True,
        planned="on request",
        torch_name="LoopedBFS",
    ),
    ScheduleSpec(
        name="varuna", position=160, function=varuna, chunks="one", keeps_all=True, recomputes=True
    ),
    ScheduleSpec(
        name="forward-only",
        position=170,
        function=forward_only,
        placements=("loop", "v"),
        orders_slices=True,
        is_selectable=False,
    ),
)
