"""The policy that follows a good static order and leaves it only where that costs no memory.

A run-time rule needs room to be better than a good list: with the memory of 1F1B and nothing more,
``adaptive`` is slower than ZB-V, which places every action so that the memory just suffices. So
where memory is tight a list is the hint, and the rule is:

1. the first action of the hint that was not done yet, if it is ready;
2. else a weight gradient of the hint that is ready: in pieces it is short, and nobody waits for
   what it delays;
3. else the next forward or backward of the hint that is ready and after which the remaining hint
   still fits the cap: a backward always, a forward if the highest point of what it overtakes, with
   the forward's activations on top, stays below the cap. Before the rank's first backward it is
   the highest point of the whole remaining hint: there are no weight gradients yet to fill a short
   wait, and a forward out of its turn makes all later ranks start later.

Weight gradients come before overtaking because a message that is a little late, as every message
is, must not upset the order: on 8 ranks with 32 microbatches, memory for 8, and messages of a tenth
of an action, ``hinted`` is 0.5% slower than ZB-V this way with pieces of a quarter, 1.7% with whole
weight gradients. Free overtaking before the first backward costs nearly 3% more on 8 ranks with 16
microbatches.

The hint is the best static schedule that the cap allows: ZB-V or V-Half in a V with two chunks,
ZB-H1 or interleaved 1F1B in a loop. Where none fits, it is what ``adaptive`` does under that cap on
equal stages.

It cannot deadlock: whatever was overtaken, doing the remaining hint in its order stays possible.

Source: hints for a ready-first order as in RRFP, arXiv 2605.18750; the condition is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import interleaved, rules, v_half, zb_h1, zb_v
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.adaptive import Adaptive
from megatron.adaptive.schedule.memory import peak_units, with_rounding
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import RulePolicy, codes_of
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.workload import StageTimes

__all__ = ["hint_codes", "hint_for", "make"]


def make(schedule: Schedule, weight_pieces: int) -> tuple[RulePolicy, ...]:
    """Make one policy per rank.

    Args:
        schedule: a valid schedule, the hint.
        weight_pieces: of the run; each W of the hint stands for so many, and for 0 they are left
            out.
    """
    chunks = schedule.placement.num_chunks
    return tuple(
        RulePolicy("hinted", rules.hinted, hint_codes(order, chunks, weight_pieces))
        for order in schedule.orders
    )


def hint_for(placement: Placement, num_microbatches: int, cap: float | None) -> Schedule:
    """The best static schedule for a pipeline whose memory the cap allows.

    Raises:
        ScheduleError: no microbatch, or the cap is below the least cap.
    """
    makers = (zb_v.make, v_half.make, zb_h1.make, interleaved.make)
    for make_static in makers:
        try:
            schedule = make_static(placement, num_microbatches)
        except ScheduleError:
            continue  # another placement, or too few microbatches for it
        if cap is None or max(peak_units(schedule)) <= with_rounding(cap):
            return schedule
    result = simulate(
        placement,
        num_microbatches,
        [Adaptive()] * placement.num_ranks,
        StageTimes.equal(placement.num_stages, forward_s=1.0, backward_s=1.0, weight_s=1.0),
        cap=cap,
        weight_pieces=1,
    )
    return result.to_schedule("adaptive")


def hint_codes(order: Sequence[Action], num_chunks: int, weight_pieces: int) -> tuple[int, ...]:
    """One rank's order as ``rules.hinted`` reads it.

    An order without W, for a run with split backwards, gets each W right after its B.
    """
    splits = any(action.kind is ActionKind.W for action in order)
    actions: list[Action] = []
    for action in order:
        if action.kind is ActionKind.W:
            if action.piece == 0:
                actions += _pieces(action, weight_pieces)
            continue
        actions.append(action)
        if action.kind is ActionKind.B and not splits:
            actions += _pieces(action, weight_pieces)
    codes = codes_of(actions, num_chunks)
    assert codes is not None, "a valid schedule has ascending microbatches"
    counts: dict[int, int] = {}
    packed = []
    for code in codes:
        index = counts.get(code, 0)
        counts[code] = index + 1
        packed.append(code + 3 * num_chunks * index)
    return tuple(packed)


def _pieces(action: Action, weight_pieces: int) -> list[Action]:
    return [
        Action(ActionKind.W, action.chunk, action.microbatch, piece)
        for piece in range(weight_pieces)
    ]
