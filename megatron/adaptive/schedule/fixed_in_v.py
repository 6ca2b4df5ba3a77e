"""Creates the static schedules ZB-V, DualPipeV and V-Half, with two chunks per rank in a V.

**zb-v**: A rank is only idle while the pipeline fills, and uses the memory of 1F1B. The example has
two ranks and three microbatches::

  rank 0 | F0-0 F0-1 F0-2 F1-0 B1-0 W1-0 F1-1 B1-1 W1-1 B0-0 W0-0 F1-2 B1-2 W1-2 B0-1 W0-1 B0-2 W0-2
  rank 1 | F0-0 F1-0 F0-1 F1-1 B1-0 W1-0 F0-2 B0-0 W0-0 F1-2 B1-1 W1-1 B0-1 B1-2 B0-2 W0-1 W1-2 W0-2

Rank r of p runs ``2 * (p - r) - 1`` warm-up forward passes of chunk 0, alternates forward passes of
both chunks r times, and starts the backward passes of chunk 1. Then it repeats a round of six
actions: F, B, W of chunk 0 and F, B, W of chunk 1. With equal times, every input then arrives just
in time. At the end it runs backward passes first, then the remaining weight gradients. With fewer
than ``2 * p - 1`` microbatches, the order is that of ``2 * p - 1`` microbatches without the actions
of the missing microbatches.

A rank holds at most ``2 * p`` microbatches, each in one chunk. This takes the memory of p
microbatches in both chunks, as in 1F1B. If F, B and W of one chunk take time 1 each, without
latency, a step of m microbatches takes ``6 * m + (p - 1) + max(0, 3 * p - 2 * m - 1)``. Each rank
works for ``6 * m``, and is idle because rank r cannot start before time r. If F and B take the same
time, and W takes between half and all of that time, the idle time is ``(p - 1) * F``. With other
times it is larger.

**dualpipe-v**: Forward and backward passes run in pairs. The example has two ranks and four
microbatches. ``F0-3+`` runs together with the B after it, so that one action computes while the
experts of the other action communicate::

  rank 0 | F0-0 F0-1 F0-2 F1-0 B1-0 W1-0 F1-1 F0-3+ B1-1 W1-1 F1-2+ B0-0 W0-0 B1-2 W1-2 F1-3+ \
B0-1 W0-1 B1-3 W1-3 B0-2 W0-2 B0-3 W0-3
  rank 1 | F0-0 F1-0 F0-1 F1-1 F0-2 B1-0 W1-0 F1-2+ B0-0 W0-0 F0-3+ B1-1 W1-1 F1-3+ B0-1 W0-1 \
B1-2 W1-2 B0-2 W0-2 B1-3 B0-3 W1-3 W0-3

Rank r of p runs ``2 * (p - r - 1)`` warm-up forward passes of chunk 0, and alternates forward
passes of both chunks r + 1 times. Then it runs ``p - r - 1`` rounds of B, W and F of chunk 1. The
steady phase alternates two pairs: F of chunk 0 with B of chunk 1, and F of chunk 1 with B of chunk
0. The B actions without a corresponding F come last. For the later half of these, the W actions run
at the end of the step, so that gradients reach earlier stages sooner.

In the source, a backward pass of the steady phase includes its weight gradients. Here, W is a
separate action after the pair, because weight gradients need no communication.

**v-half**: Uses half of the memory of 1F1B and has about half of its idle time. The example has
three ranks and three microbatches::

  rank 0 | F0-0 F0-1 F0-2 F1-0 B1-0 W1-0 F1-1 B1-1 W1-1 B0-0 W0-0 F1-2 B1-2 B0-1 W1-2 W0-1 B0-2 W0-2
  rank 1 | F0-0 F0-1 F1-0 F1-1 B1-0 W1-0 F0-2 B0-0 B1-1 W0-0 W1-1 F1-2 B0-1 B1-2 W0-1 W1-2 B0-2 W0-2
  rank 2 | F0-0 F1-0 F0-1 F1-1 B1-0 B0-0 W1-0 F0-2 W0-0 F1-2 B1-1 B0-1 W1-1 W0-1 B1-2 B0-2 W1-2 W0-2

The order is constructed as follows. Time is divided into slots, and one F, B or W of a chunk takes
one slot.

1. The building block defines the slots of F and B of microbatch 0 on each stage. From one rank to
   the next, F0 and B1 are 2 slots apart, and F1 and B0 are 1 slot apart, so that the activations of
   chunk 0 and chunk 1 add up to the same amount on all ranks. The actions of microbatch i are ``6 *
   i`` slots after those of microbatch 0. No two actions of a rank get the same slot.
2. Squeeze and reorder: Before and after the steady state, each action moves to an earlier slot. It
   moves to the first free slot in which its input has arrived and the rank does not hold more
   microbatches than in the steady state.
3. Weight gradients fill the free slots in FIFO order.

Each of p ranks holds at most ``2 * ((p + 2) // 2)`` microbatches, each in one chunk. This takes the
memory of ``(p + 2) // 2`` microbatches in both chunks. If F, B and W of one chunk take time 1 each,
without latency, a step of m microbatches, with m at least p, takes ``6 * m + max(p - 1, 6 * ceil(p
/ 2) - 7)``; 1F1B takes ``6 * (m + p - 1)``.

Deviations from the paper: This construction makes one pass over the slots, in which weight
gradients take any free slot, while the authors' program makes two passes. The idle time is below
the ``3 * p`` slots that the paper states. A pipeline with one rank uses the order of ZB-V.

Source: ZB-V is from Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6, and is called
V-ZB in arXiv 2405.15362. The order is the same as in ``torch.distributed.pipelining``, so both can
be compared action by action. DualPipeV is a form of DualPipe (DeepSeek-V3, arXiv 2412.19437,
section 3.2.1) that keeps each stage on one rank only, published by its authors at
https://github.com/deepseek-ai/DualPipe. V-Half is from Pipeline Parallelism with Controllable
Memory, arXiv 2405.15362: V-shaped building blocks, V-Half with its offsets, and the construction of
a schedule from a block (repeat, squeeze, reorder).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from megatron.adaptive.config.schedule_specs import ScheduleSpec
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.schedule import Order
from megatron.adaptive.schedule.stage_placement import Placement


def zb_v(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns each rank's actions under the ZB-V schedule.

    ``placement`` assigns stages to ranks in a V. A step has ``num_microbatches`` microbatches.
    """
    ranks = placement.num_ranks
    microbatches = max(num_microbatches, 2 * ranks - 1)
    orders = []
    for rank in range(ranks):
        after = ranks - rank
        lanes = [
            *["F0"] * (2 * after - 1),
            *["F1", "F0"] * rank,
            *["F1", "B1", "W1"] * after,
            *["F0", "B0", "W0", "F1", "B1", "W1"] * (microbatches - (ranks + after - 1)),
            *["B0", "W0", "F1", "B1", "W1"] * (after - 1),
            *["B0", "B1"] * rank,
            *["B0", "W0"] * after,
            *["W1"] * rank,
            *["W0"] * rank,
        ]
        orders.append(_listed(lanes, num_microbatches))
    return tuple(orders)


def dualpipe_v(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns each rank's actions under the DualPipeV schedule.

    ``placement`` assigns stages to ranks in a V. A step has ``num_microbatches`` microbatches.

    Raises:
        ScheduleError: There are fewer microbatches than stages.
    """
    ranks = placement.num_ranks
    if num_microbatches < 2 * ranks:
        raise ScheduleError(
            f"schedule dualpipe-v requires at least {2 * ranks} microbatches (two per rank), got "
            f"{num_microbatches}; raise the global batch size or use zb-v"
        )
    orders = []
    for rank in range(ranks):
        after = ranks - 1 - rank
        # A plus sign marks the first action of a pair. A lower-case b is a B that is not followed
        # by its W, and a W without a chunk stands for the oldest W that has not run yet.
        steady = ["F0+", "B1", "F1+", "B0"] * (num_microbatches - 2 * ranks + rank + 1)
        if after == 0:
            # This F is not paired, because the next B belongs to the same microbatch.
            steady[0] = "F0"
        alone = ["B1", "B0"] * (rank + 1)
        lanes: list[str] = []
        left: deque[str] = deque()
        for lane in (
            *["F0"] * (2 * after),
            *["F0", "F1"] * (rank + 1),
            *["b1", "W", "F1"] * after,
            *steady,
            *["B1", "F1+", "B0"] * after,
            *alone[: rank + 1],
            *map(str.lower, alone[rank + 1 :]),
            *["W", "b0"] * after,
            *["W"] * (rank + 1),
        ):
            lanes.append(left.popleft() if lane == "W" else lane.upper())
            if lane[0] in "Bb":
                (lanes if lane[0] == "B" else left).append(f"W{lane[1]}")
        orders.append(_listed(lanes, num_microbatches))
    return tuple(orders)


def _listed(lanes: Iterable[str], num_microbatches: int) -> Order:
    """Converts the labels ``lanes``, such as ``F0`` (F of chunk 0), into actions.

    The first occurrence of a label stands for microbatch 0, the second for microbatch 1, and so on.
    After ``num_microbatches`` occurrences, further ones are skipped.
    """
    counts: Counter[str] = Counter()
    order = []
    for lane in lanes:
        kind = ActionKind(lane[0])
        chunk = int(lane[1])
        microbatch = counts[lane[:2]]
        counts[lane[:2]] += 1
        if microbatch < num_microbatches:
            order.append(Action(kind, chunk, microbatch, paired=lane.endswith("+")))
    return tuple(order)


_PERIOD = 6
"""Number of time slots between an action and the same action of the next microbatch."""

_Row = dict[int, Action]
"""Actions of one rank, keyed by time slot."""


def v_half(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns each rank's actions under V-Half, which has two chunks per rank in a V.

    ``placement`` assigns stages to ranks. A step has ``num_microbatches`` microbatches.
    """
    if placement.num_ranks == 1:
        return zb_v(placement, num_microbatches)
    # The steady state is periodic, so the order is constructed for a few microbatches only. Its
    # steady state is then repeated for the other microbatches.
    few = min(num_microbatches, placement.num_ranks + 5)
    begin = _steady_begin(placement.num_ranks) + _PERIOD
    return tuple(_stretch(row, begin, num_microbatches - few) for row in squeezed(placement, few))


def squeezed(placement: Placement, num_microbatches: int) -> list[_Row]:
    """Returns each rank's actions under V-Half, including weight gradients, keyed by time slot.

    ``placement`` assigns stages to ranks. A step has ``num_microbatches`` microbatches.
    """
    ranks = placement.num_ranks
    begin = _steady_begin(ranks)
    end = _PERIOD * (num_microbatches - 1) + 1
    cap = 2 * ((ranks + 2) // 2)
    rows = _repeated_block(ranks, num_microbatches)
    slot_of = {
        (action.kind, placement.stage_of(rank, action.chunk), action.microbatch): slot
        for rank, row in enumerate(rows)
        for slot, action in row.items()
    }
    actions = [
        (slot, rank, action) for rank, row in enumerate(rows) for slot, action in row.items()
    ]
    for slot, rank, action in sorted(actions, key=lambda item: item[:2]):
        if begin <= slot < end:
            continue
        stage = placement.stage_of(rank, action.chunk)
        kind, microbatch = action.kind, action.microbatch
        before = [(kind, stage, microbatch - 1)]
        if kind is ActionKind.F:
            before.append((kind, stage - 1, microbatch))
        else:
            before += [(kind, stage + 1, microbatch), (ActionKind.F, stage, microbatch)]
        earliest = 1 + max((slot_of[key] for key in before if key in slot_of), default=-1)
        slot_of[kind, stage, microbatch] = _move(rows[rank], slot, earliest, cap)
    return [_with_weights(row) for row in rows]


def _steady_begin(num_ranks: int) -> int:
    """Returns the first time slot of the steady state, in which rank 0 runs B of chunk 0."""
    return _block(num_ranks, 0)[3][0]


def _block(num_ranks: int, rank: int) -> tuple[tuple[int, ActionKind, int], ...]:
    """Returns the time slot, kind and chunk of each F and B of microbatch 0 on ``rank``."""
    # Without this gap, a B and an F would get the same slot if the number of ranks is even.
    gap = 3 if num_ranks % 2 == 0 else 0
    return (
        (2 * rank, ActionKind.F, 0),
        (3 * num_ranks - 2 - rank, ActionKind.F, 1),
        (3 * num_ranks - 1 + gap + 2 * rank, ActionKind.B, 1),
        (6 * num_ranks - 2 + gap - rank, ActionKind.B, 0),
    )


def _repeated_block(num_ranks: int, num_microbatches: int) -> list[_Row]:
    return [
        {
            slot + _PERIOD * microbatch: Action(kind, chunk, microbatch)
            for slot, kind, chunk in _block(num_ranks, rank)
            for microbatch in range(num_microbatches)
        }
        for rank in range(num_ranks)
    ]


def _move(row: _Row, slot: int, earliest: int, cap: int) -> int:
    """Moves the action in ``slot`` to an earlier free slot if possible, and returns its new slot.

    ``row`` contains the rank's actions, keyed by time slot.

    The new slot is the first free slot, from ``earliest`` on, in which the rank holds at most
    ``cap`` microbatches, counted per chunk.
    """
    action = row.pop(slot)
    for target in range(earliest, slot):
        if target not in row:
            row[target] = action
            if _peak(row) <= cap:
                return target
            del row[target]
    row[slot] = action
    return slot


def _peak(row: _Row) -> int:
    """Returns the maximum number of microbatches that a rank with the actions ``row`` holds.

    A microbatch counts once per chunk. Weight gradients are assumed to run in the first time slots
    in which the rank would otherwise be idle.
    """
    held = peak = waiting = 0
    for slot in range(max(row) + 1):
        action = row.get(slot)
        if action is None:
            if waiting:
                waiting -= 1
                held -= 1
        elif action.kind is ActionKind.F:
            held += 1
            peak = max(peak, held)
        else:
            waiting += 1
    return peak


def _with_weights(row: _Row) -> _Row:
    """Returns the actions in ``row`` with weight gradients added in free time slots.

    The weight gradients run after their backward passes, in the same order.
    """
    full: _Row = {}
    waiting: deque[Action] = deque()
    slot = 0
    last = max(row)
    while slot <= last or waiting:
        action = row.get(slot)
        if action is not None:
            full[slot] = action
            if action.kind is ActionKind.B:
                waiting.append(Action(ActionKind.W, action.chunk, action.microbatch))
        elif waiting:
            full[slot] = waiting.popleft()
        slot += 1
    return full


def _stretch(row: _Row, begin: int, repeats: int) -> Order:
    """Returns a rank's actions in execution order, with the period of its steady state repeated.

    Args:
        row: Actions of the rank, keyed by time slot, in ascending order of slots.
        begin: First time slot of the period.
        repeats: Number of additional periods.
    """
    order: list[Action] = []
    period: list[Action] = []
    rest: list[Action] = []
    for slot, action in row.items():
        (order if slot < begin else period if slot < begin + _PERIOD else rest).append(action)
    for more in range(repeats + 1):
        order += _later(period, more)
    return tuple(order + _later(rest, repeats))


def _later(actions: list[Action], microbatches: int) -> list[Action]:
    return [Action(a.kind, a.chunk, a.microbatch + microbatches) for a in actions]


SCHEDULES = (
    ScheduleSpec(
        name="zb-v",
        position=110,
        function=zb_v,
        chunks="two",
        placements=("v",),
        splits_backward="always",
        is_hint=True,
        is_auto_candidate=True,
        planned="by default",
        torch_name="ZBVZeroBubble",
    ),
    ScheduleSpec(
        name="v-half",
        position=120,
        function=v_half,
        chunks="two",
        placements=("v",),
        splits_backward="always",
        is_hint=True,
        is_auto_candidate=True,
        planned="by default",
    ),
    ScheduleSpec(
        name="dualpipe-v",
        position=130,
        function=dualpipe_v,
        chunks="two",
        placements=("v",),
        splits_backward="always",
        overlaps_experts=True,
        microbatches_per_rank=2,
        is_hint=True,
        is_auto_candidate=True,
        planned="on request",
        torch_name="DualPipeV",
    ),
)
