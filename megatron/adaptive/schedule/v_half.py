"""V-Half: half of 1F1B's memory for about half of its idle time, two chunks per rank in a V.

Three ranks, three microbatches::

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

Source: Pipeline Parallelism with Controllable Memory, arXiv 2405.15362: V-shaped building blocks,
V-Half with its offsets; how a schedule is built from a block (repeating, squeezing, reordering).
"""

from __future__ import annotations

from collections import deque

from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.schedule import Order
from megatron.adaptive.schedule.zb_v import zb_v

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
