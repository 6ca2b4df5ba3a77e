"""Chooses the next action for the run-time policies, in plain functions over one rank's state.

``rule(s, hint)`` reads a state (see ``rank_kernel``) and returns the code ``kind * chunks + chunk``
of the action to start now, or -1 to wait. A code needs no microbatch, because a stage runs each
kind in ascending order. If actions may overlap (``BESIDE``), a rule is also asked while an action
communicates; actions that are running are not ready then. The executor runs these functions as they
are and the simulator compiles them, so they use numbers only, like ``rank_kernel``.

For rules that follow an order, ``hint`` is the order of the rank as codes. For ``adaptive``, it
lists the shares of the rank's chunks except the deepest (see ``memory_caps``); -1 or a missing
entry stands for no limit.

``adaptive`` decides from the inputs that have arrived: ready-first order as in RRFP, arXiv
2605.18750, with the grouping of forwards of interleaved 1F1B, arXiv 2104.04473, section 2.2.

``hinted`` follows a static order, the best that the cap allows (``catalog.hint_for``). It leaves
the order only if that costs no memory; this condition is not from a paper. It cannot deadlock:
whatever it has overtaken, the rest of the hint can still run in its order. If microbatches differ
in size, the hint says nothing about bytes. Then every forward must also fit by the graded rule, and
if the hint offers no action, the rule of ``adaptive`` decides.

``docs/schedules.md`` explains both rules step by step, with alternatives that were simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.schedule.rank_kernel import (
    BESIDE,
    CAP,
    CHUNKS,
    DONE,
    FINISHED,
    HEAD,
    IN_FLIGHT,
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
    fits,
    is_ready,
    lane_count,
    lanes,
    size_of,
    stage_of,
)

LOOKAHEAD = 96
"""Number of actions of its hint that ``hinted`` considers, including those already overtaken.

No later action is started early. So the first open action is at most this far behind the number of
started actions, and is found without a search through the whole hint.
"""


def follow(s: State, hint: Sequence[int]) -> int:
    """Returns the code of the hint's next action if it is ready, regardless of the cap; else -1."""
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
    """Returns the code of the deepest chunk's ready action of a kind, -1 if none is ready."""
    chunks = s[CHUNKS]
    for chunk in range(chunks - 1, -1, -1):
        if is_ready(s, kind, chunk):
            return kind * chunks + chunk
    return -1


def within_share(s: State, hint: Sequence[int], chunk: int) -> bool:
    """Returns whether a chunk may hold one more microbatch by its share.

    It holds the microbatches whose forward started and whose backward has not finished. In an
    evaluation, which has no backwards, there is no limit.
    """
    if chunk >= len(hint) or hint[chunk] < 0 or s[UNIT] == 0:
        return True
    return lane_count(s, F, chunk) - lane_count(s, B + DONE, chunk) < hint[chunk]


def next_forward(s: State, hint: Sequence[int]) -> int:
    """Returns the chunk of the forward to start, -1 if none is ready and fits.

    In a loop, microbatches form groups of as many as there are ranks; the forward of the lowest
    group on the shallowest chunk is chosen. In a V, the forward with the longest way to the end of
    the step is chosen.
    """
    best = -1
    lowest = 0
    for chunk in range(s[CHUNKS]):
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
    """Returns the code of the backward to start, -1 if none is ready.

    In a loop it is the deepest one, in a V the one with the longest way to the end of the step.
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


def ready_first(s: State, hint: Sequence[int]) -> int:
    """Applies the rule of ``adaptive``: forward and backward in turn, W if neither is ready."""
    forward = next_forward(s, hint)
    backward = next_backward(s)
    if forward >= 0 and (backward < 0 or s[LAST] != F):
        return forward
    return backward if backward >= 0 else deepest_ready(s, W)


def depth_first(s: State, hint: Sequence[int]) -> int:
    """Applies the rule of ``dfc``: backwards first, then the forward on the deepest chunk possible.

    A microbatch goes as deep as it can before the next one starts.
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
    """Applies the rule of ``bfc``: forwards first, a chunk runs them all before the next chunk."""
    for chunk in range(s[CHUNKS]):
        if is_ready(s, F, chunk) and fits(s, chunk):
            return chunk
    backward = deepest_ready(s, B)
    if backward >= 0:
        return backward
    return deepest_ready(s, W)


def hinted(s: State, hint: Sequence[int]) -> int:
    """Applies the rule of ``hinted``.

    ``hint`` lists ``code + 3 * chunks * index``; the index counts earlier occurrences of the code.
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
        started = s[HEAD + code]  # a code is also the offset of its count
        if index < started:
            continue
        kind = code // chunks
        chunk = code - kind * chunks
        unit = size_of(s, index // s[PIECES] if kind == W else index)
        largest = max(largest, unit)
        if (
            index == started
            and is_ready(s, kind, chunk)
            and (kind != F or not sized or fits(s, chunk))
        ):
            # Memory that a running action will free is not free yet.
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
