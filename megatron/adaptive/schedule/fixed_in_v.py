"""ZB-V, DualPipeV and V-Half: fixed orders of two chunks per rank in a V.

**zb-v**: no idle time but the ramp with the memory of 1F1B. Two ranks, three microbatches::

  rank 0 | F0-0 F0-1 F0-2 F1-0 B1-0 W1-0 F1-1 B1-1 W1-1 B0-0 W0-0 F1-2 B1-2 W1-2 B0-1 W0-1 B0-2 W0-2
  rank 1 | F0-0 F1-0 F0-1 F1-1 B1-0 W1-0 F0-2 B0-0 W0-0 F1-2 B1-1 W1-1 B0-1 B1-2 B0-2 W0-1 W1-2 W0-2

Rank r of p fills with ``2 * (p - r) - 1`` forwards of chunk 0, alternates forwards of both chunks
r times, and starts on backwards with chunk 1. Then it repeats one round of six: F, B, W of chunk 0
and F, B, W of chunk 1, so that with equal times every input arrives just in time. In the end
backwards go first and the remaining weight gradients fill up. With fewer than ``2 * p - 1``
microbatches the order is that of ``2 * p - 1`` without those that do not exist.

A rank holds at most ``2 * p`` chunk microbatches, the activations of p whole ones, as 1F1B does.
With one chunk's F, B and W each taking 1 and no latency, a step of m microbatches takes
``6 * m + (p - 1) + max(0, 3 * p - 2 * m - 1)``: each rank works ``6 * m`` and the rest is that rank
r cannot start before r. If F equals B and W is between half of it and all of it, the idle time is
``(p - 1) * F``; with other times it is larger.

**dualpipe-v**: forwards and backwards in pairs. Two ranks, four microbatches; ``F0-3+`` runs
together with the backward after it, the one computing while the other's experts communicate::

  rank 0 | F0-0 F0-1 F0-2 F1-0 B1-0 W1-0 F1-1 F0-3+ B1-1 W1-1 F1-2+ B0-0 W0-0 B1-2 W1-2 F1-3+ \
B0-1 W0-1 B1-3 W1-3 B0-2 W0-2 B0-3 W0-3
  rank 1 | F0-0 F1-0 F0-1 F1-1 F0-2 B1-0 W1-0 F1-2+ B0-0 W0-0 F0-3+ B1-1 W1-1 F1-3+ B0-1 W0-1 \
B1-2 W1-2 B0-2 W0-2 B1-3 B0-3 W1-3 W0-3

Rank r of p fills with ``2 * (p - r - 1)`` forwards of chunk 0, alternates forwards of both chunks
r + 1 times, and takes ``p - r - 1`` rounds of B, W and F of chunk 1. The steady phase alternates
two pairs: a forward of chunk 0 with a backward of chunk 1, and the reverse. Then backwards are
alone, and the later half of them leave their W for the end, so that gradients go back fast.

A backward of the steady phase is whole in the source; here its W follows right after its pair, for
weight gradients communicate nothing.

**v-half**: half of 1F1B's memory for about half of its idle time. Three ranks, three microbatches::

  rank 0 | F0-0 F0-1 F0-2 F1-0 B1-0 W1-0 F1-1 B1-1 W1-1 B0-0 W0-0 F1-2 B1-2 B0-1 W1-2 W0-1 B0-2 W0-2
  rank 1 | F0-0 F0-1 F1-0 F1-1 B1-0 W1-0 F0-2 B0-0 B1-1 W0-0 W1-1 F1-2 B0-1 B1-2 W0-1 W1-2 B0-2 W0-2
  rank 2 | F0-0 F1-0 F0-1 F1-1 B1-0 B0-0 W1-0 F0-2 W0-0 F1-2 B1-1 B0-1 W1-1 W0-1 B1-2 B0-2 W1-2 W0-2

How it is made. Time is cut into slots; one F, B or W of a chunk takes one.

1. The building block: in which slot each stage takes F and B of microbatch 0. Two ranks lie 2 slots
   apart on the way of F0 and B1, 1 slot on the way of F1 and B0, so that what a rank holds of chunk
   0 and of chunk 1 adds up to the same on all ranks. Microbatch i does the same ``6 * i`` slots
   later, and no two actions of a rank meet.
2. Squeeze and reorder: before and after the steady part, actions move to the earliest free slot
   after their input in which they do not make the rank hold more than the steady part does.
3. Weight gradients take the free slots, first in, first out.

A rank of p holds at most ``2 * ((p + 2) // 2)`` chunk microbatches, the activations of
``(p + 2) // 2`` whole ones. With F, B and W of one chunk each taking 1 and no latency, a step of m
microbatches, at least as many as ranks, takes ``6 * m + max(p - 1, 6 * ceil(p / 2) - 7)``; 1F1B
takes ``6 * (m + p - 1)``.

Deviations from the paper: one pass over the slots, with weight gradients in the free ones
throughout, where the authors' program makes two; the idle time is below the ``3 * p`` that they
state. One rank alone has ZB-V's order.

Source: ZB-V: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6; it is V-ZB in arXiv
2405.15362. The order is that of ``torch.distributed.pipelining``, so both can be compared action by
action. DualPipeV: a form of DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) with each rank
in one place, as its authors published it at https://github.com/deepseek-ai/DualPipe.
V-Half: Pipeline Parallelism with Controllable Memory, arXiv 2405.15362: V-shaped building blocks,
V-Half with its offsets; how a schedule is built from a block (repeating, squeezing, reordering).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.schedule import Order
from megatron.adaptive.schedule.stage_placement import Placement


def zb_v(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns the orders of ZB-V."""
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
    """Returns the orders of DualPipeV.

    Raises:
        ScheduleError: fewer microbatches than stages.
    """
    ranks = placement.num_ranks
    if num_microbatches < 2 * ranks:
        raise ScheduleError(
            f"schedule dualpipe-v got {num_microbatches} microbatches: it needs at least"
            f" {2 * ranks}, two per rank; raise the global batch size or use zb-v"
        )
    orders = []
    for rank in range(ranks):
        after = ranks - 1 - rank
        # Lanes: + begins a pair, a small b leaves its W for later, W is the oldest that was left.
        steady = ["F0+", "B1", "F1+", "B0"] * (num_microbatches - 2 * ranks + rank + 1)
        if after == 0:
            steady[0] = "F0"  # of the microbatch whose backward would be its partner on this rank
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
    """Gives each lane's kind and chunk its next microbatch; leaves out those that do not exist."""
    counts: Counter[str] = Counter()
    order = []
    for lane in lanes:
        kind, chunk, microbatch = ActionKind(lane[0]), int(lane[1]), counts[lane[:2]]
        counts[lane[:2]] += 1
        if microbatch < num_microbatches:
            order.append(Action(kind, chunk, microbatch, paired=lane.endswith("+")))
    return tuple(order)


_PERIOD = 6

_Row = dict[int, Action]
"""The actions of one rank by slot."""


def v_half(placement: Placement, num_microbatches: int) -> tuple[Order, ...]:
    """Returns the orders of V-Half with two chunks per rank in a V."""
    if placement.num_ranks == 1:
        return zb_v(placement, num_microbatches)
    # The steady part repeats, so that a few of its periods stand for all.
    few = min(num_microbatches, placement.num_ranks + 5)
    begin = _steady_begin(placement.num_ranks) + _PERIOD
    return tuple(_stretch(row, begin, num_microbatches - few) for row in squeezed(placement, few))


def squeezed(placement: Placement, num_microbatches: int) -> list[_Row]:
    """Place every action of a step in its slot, weight gradients included."""
    ranks = placement.num_ranks
    begin, end = _steady_begin(ranks), _PERIOD * (num_microbatches - 1) + 1
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
    """The slot in which rank 0 takes its first backward of chunk 0."""
    return _block(num_ranks, 0)[3][0]


def _block(num_ranks: int, rank: int) -> tuple[tuple[int, ActionKind, int], ...]:
    """Slot, kind and chunk of what a rank does for microbatch 0, weight gradients left out."""
    # With an even number of ranks the slots of B would be those of F.
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
    """Move an action to the first free slot in which memory suffices; returns where it is now."""
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
    """The most chunk microbatches held if each weight gradient takes the first free slot."""
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
    """Put each weight gradient in the first free slot after its backward; slots ascend."""
    full: _Row = {}
    waiting: deque[Action] = deque()
    slot, last = 0, max(row)
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
    """List a rank's actions with the period from ``begin`` on repeated so many more times."""
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
