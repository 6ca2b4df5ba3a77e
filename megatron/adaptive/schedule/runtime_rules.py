"""Chooses a rank's next action at run time, with plain functions on the rank's state.

``rule(s, hint)`` reads a state (see ``rank_kernel``) and returns the code ``kind * chunks + chunk``
of the action to start now, or -1 to wait. A code contains no microbatch, because a stage runs each
kind in ascending order of microbatches. If actions may overlap (``BESIDE``), a rule is also called
while an action communicates. Kinds with a running action are then not ready. The executor runs
these functions in plain Python, and the simulator compiles them, so they use only numbers, like
``rank_kernel``.

For rules that follow an order, ``hint`` is the rank's order of actions as codes. For ``adaptive``,
``hint`` contains the share of each chunk except the deepest. A share is the number of microbatches
that the chunk may hold (see ``memory_caps``). A share of -1 or a missing entry means no limit. If
sequences are cut into slices, orders and shares count slices.

``adaptive`` chooses among the actions whose input has arrived. It combines the ready-first order of
RRFP, arXiv 2605.18750, with the groups of microbatches of interleaved 1F1B, arXiv 2104.04473,
section 2.2.

No backward pass follows the F of a frozen chunk (see ``rank_kernel``), so such an F, like a W, can
run while the rank would otherwise wait. ``adaptive`` starts such an F only if no other F and no B
can start, because other ranks wait for the results of those actions. The F of a frozen chunk has
priority over W, because the next stage needs the output of that F. The exception is a W that frees
memory for which another F waits.

``hinted`` follows a static order (the hint), which is the best order within the limit on
activations (``catalog.hint_for``). An action runs earlier than in the hint only if the rest of the
hint then still fits within that limit. This condition does not come from a paper. ``hinted`` cannot
deadlock, because the remaining actions can always run in the hint's order, whichever actions have
already run. If microbatches differ in size, the hint does not bound the memory in bytes. Every
forward pass must then also obey the graded rule of ``memory_caps``. If no action of the hint can
start, the rule of ``adaptive`` chooses.

``docs/reference/schedules.md`` explains ``adaptive`` and ``hinted`` step by step.
``docs/results/2026-11-simulated.md`` compares them with alternatives in simulations.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.config.schedule_specs import ScheduleSpec
from megatron.adaptive.schedule.rank_kernel import (
    BESIDE,
    CAP,
    CHUNKS,
    DONE,
    FINISHED,
    FROZEN,
    HEAD,
    IN_FLIGHT,
    ITEMS,
    LAST,
    PIECES,
    RANKS,
    SIZED,
    STARTED,
    TURNED,
    UNIT,
    B,
    F,
    State,
    W,
    end_of,
    first_of,
    fits,
    is_ready,
    item_of,
    lane_count,
    lanes,
    size_of,
    stage_of,
)

LOOKAHEAD = 96
"""Number of actions in the given order (the hint) among which the rule ``hinted`` chooses.

The first of them is the first action that has not started. Actions after these are never started
early. If n actions have started, the first action that has not started is therefore at index ``n -
LOOKAHEAD`` or later, and can be found without searching the whole hint.
"""


def follow(s: State, hint: Sequence[int]) -> int:
    """Returns the code of the next action in the order ``hint`` if it is ready, otherwise -1.

    ``s`` is the state of the rank.

    The limit on activations is ignored.
    """
    position = s[STARTED]
    if position >= len(hint):
        return -1
    chunks = s[CHUNKS]
    code = hint[position] % lanes(s)
    kind = code // chunks
    if s[STARTED] > s[FINISHED] and hint[position - 1] < lanes(s):
        return -1
    if not is_ready(s, kind, code - kind * chunks):
        return -1
    if hint[position] == code or s[BESIDE] == 0:
        return code
    partner = hint[position + 1] // chunks
    return hint[position] if is_ready(s, partner, hint[position + 1] - partner * chunks) else -1


def deepest_ready(s: State, kind: int) -> int:
    """Returns the code of the ready action of ``kind`` on the deepest chunk.

    Returns -1 if no action of this kind is ready.
    """
    chunks = s[CHUNKS]
    for chunk in range(chunks - 1, -1, -1):
        if is_ready(s, kind, chunk):
            return kind * chunks + chunk
    return -1


def within_share(s: State, hint: Sequence[int], chunk: int) -> bool:
    """Returns whether ``chunk`` may hold one more microbatch without exceeding its share.

    The share is an entry of ``hint``. A chunk holds the microbatches whose F has started and whose
    B has not finished. In an evaluation, which has no B, there is no limit. With slices, the share
    counts slices, and a microbatch whose first slice has started may always continue.
    """
    started = lane_count(s, F, chunk)
    if chunk >= len(hint) or hint[chunk] < 0 or s[UNIT] == 0 or started == s[ITEMS]:
        return True
    if first_of(s, started) < started:
        return True
    return end_of(s, started) - lane_count(s, B + DONE, chunk) <= hint[chunk]


def next_forward(s: State, hint: Sequence[int]) -> int:
    """Returns the chunk of the F to start, or -1 if no F is ready and fits into memory.

    Frozen chunks are skipped, because :func:`filler` handles them.

    In a loop, microbatches form groups, each with as many microbatches as there are ranks. The F of
    the earliest group on the shallowest chunk is chosen. In a V, the F that is farthest from the
    end of the step is chosen.
    """
    best = -1
    lowest = 0
    for chunk in range(s[FROZEN], s[CHUNKS]):
        if is_ready(s, F, chunk) and fits(s, chunk) and within_share(s, hint, chunk):
            rating = lane_count(s, F, chunk)
            if s[TURNED] == 1:
                rating += stage_of(s, chunk)
            else:
                rating //= s[RANKS]
            if best < 0 or rating < lowest or (rating == lowest and s[TURNED] == 1):
                best = chunk
                lowest = rating
    return best


def next_backward(s: State) -> int:
    """Returns the code of the B to start, or -1 if no B is ready.

    In a loop, the B on the deepest chunk is chosen. In a V, the B that is farthest from the end of
    the step is chosen.
    """
    deepest = deepest_ready(s, B)
    if deepest < 0 or s[TURNED] == 0:
        return deepest
    best = deepest - B * s[CHUNKS]
    for chunk in range(best - 1, -1, -1):
        way = stage_of(s, chunk) - lane_count(s, B, chunk)
        if is_ready(s, B, chunk) and way > stage_of(s, best) - lane_count(s, B, best):
            best = chunk
    return B * s[CHUNKS] + best


def filler(s: State, weight: int) -> int:
    """Returns the code of the action to start next, if no other F and no B can start.

    The action is the F of a frozen chunk or a W. The result is -1 if the rank must wait.

    Args:
        s: State of the rank, on which no other F and no B can start.
        weight: Code of a W that can start, or -1.
    """
    frozen = -1
    for chunk in range(s[FROZEN]):
        if is_ready(s, F, chunk):
            frozen = chunk
    if frozen < 0:
        return weight
    if weight >= 0:
        for chunk in range(s[FROZEN], s[CHUNKS]):
            if is_ready(s, F, chunk) and not fits(s, chunk):
                return weight
    return frozen


def ready_first(s: State, hint: Sequence[int]) -> int:
    """Implements the ``adaptive`` rule, which alternates F and B, and runs W instead of waiting.

    Returns the code of the action to start in the state ``s``, or -1 to wait. ``hint`` contains the
    share of each chunk.
    """
    forward = next_forward(s, hint)
    backward = next_backward(s)
    if forward >= 0 and (backward < 0 or s[LAST] != F):
        return forward
    return backward if backward >= 0 else filler(s, deepest_ready(s, W))


def depth_first(s: State, hint: Sequence[int]) -> int:
    """Implements the ``dfc`` rule, which prefers B, then F on the deepest possible chunk, then W.

    Returns the code of the action to start in the state ``s``, or -1 to wait. ``hint`` is not used.

    A microbatch passes through as many chunks as possible before the next microbatch starts.
    """
    backward = deepest_ready(s, B)
    if backward >= 0:
        return backward
    best = -1
    for chunk in range(s[CHUNKS]):
        if (
            is_ready(s, F, chunk)
            and fits(s, chunk)
            and (best < 0 or lane_count(s, F, chunk) <= lane_count(s, F, best))
        ):
            best = chunk
    if best >= 0:
        return best
    return deepest_ready(s, W)


def breadth_first(s: State, hint: Sequence[int]) -> int:
    """Implements ``bfc``, which prefers F on the shallowest possible chunk, then B, then W.

    Returns the code of the action to start in the state ``s``, or -1 to wait. ``hint`` is not used.

    A chunk runs all its forward passes before the next chunk begins.
    """
    for chunk in range(s[CHUNKS]):
        if is_ready(s, F, chunk) and fits(s, chunk):
            return chunk
    backward = deepest_ready(s, B)
    if backward >= 0:
        return backward
    return deepest_ready(s, W)


def hinted(s: State, hint: Sequence[int]) -> int:
    """Implements the ``hinted`` rule, which follows an order but may run later actions early.

    Returns the code of the action to start in the state ``s``, or -1 to wait.

    ``hint`` contains ``code + 3 * chunks * index`` for each action. The index is the number of
    earlier occurrences of the same code.
    """
    chunks = s[CHUNKS]
    count = lanes(s)
    first_open = max(0, s[STARTED] - LOOKAHEAD)
    while first_open < len(hint) and hint[first_open] // count < s[HEAD + hint[first_open] % count]:
        first_open += 1
    filling = True
    for chunk in range(chunks):
        filling = filling and lane_count(s, B, chunk) == 0
    sized = s[SIZED] == 1
    largest = 0
    held = s[IN_FLIGHT]
    peak = held
    other = -1
    early = -1
    for position in range(first_open, min(len(hint), first_open + LOOKAHEAD)):
        index = hint[position] // count
        code = hint[position] - index * count
        # Actions with the same code start in order, so the number of started ones is the index of
        # the next one.
        started = s[HEAD + code]
        if index < started:
            continue
        kind = code // chunks
        chunk = code - kind * chunks
        unit = size_of(s, item_of(s, kind, index // s[PIECES] if kind == W else index))
        largest = max(largest, unit)
        if (
            index == started
            and is_ready(s, kind, chunk)
            and (kind != F or not sized or fits(s, chunk))
        ):
            # A running action has not freed its memory yet, so the cap must be checked while an
            # action is running.
            fitting = s[STARTED] == s[FINISHED] or kind == B or held + unit <= s[CAP]
            if kind == W or (position == first_open and fitting):
                return code
            if other < 0 and (kind == B or (kind == F and max(peak, held) + unit <= s[CAP])):
                if filling and kind == F:
                    if early < 0:
                        early = code
                else:
                    other = code
        if kind == F:
            held += unit
            peak = max(peak, held)
        elif s[PIECES] == 0 or (kind == W and (index + 1) % s[PIECES] == 0):
            held -= unit
    if early >= 0 and peak + largest <= s[CAP]:
        return early
    if other < 0 and sized:
        return ready_first(s, hint[:0])
    return other


SCHEDULES = (
    ScheduleSpec(
        name="adaptive",
        position=40,
        function=ready_first,
        kind="rule",
        placements=("loop", "v"),
        prefers_v=True,
        splits_backward="by default",
        overlaps_experts=True,
        allows_unequal_stages=True,
        planned="by default",
        reasons=("turn", "deepest", "filler"),
    ),
    ScheduleSpec(
        name="hinted",
        position=50,
        function=hinted,
        kind="rule",
        placements=("loop", "v"),
        prefers_v=True,
        splits_backward="by default",
        overlaps_experts=True,
        planned="on request",
    ),
    ScheduleSpec(
        name="bfc",
        position=70,
        function=breadth_first,
        kind="rule",
        placements=("loop", "v"),
        splits_backward="on request",
        overlaps_experts=True,
        planned="on request",
        reasons=("broadest", "deepest", "filler"),
    ),
    ScheduleSpec(
        name="dfc",
        position=80,
        function=depth_first,
        kind="rule",
        placements=("loop", "v"),
        splits_backward="on request",
        overlaps_experts=True,
        planned="on request",
        reasons=("deepest", "deepest", "filler"),
    ),
)
