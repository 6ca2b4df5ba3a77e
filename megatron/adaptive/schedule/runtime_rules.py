"""The choices of the run-time policies, as plain functions over one rank's numbers.

``rule(s, hint)`` looks at a state (see ``machine``) and returns what to start now as a code,
``kind * chunks + chunk``, or -1 to wait. Where actions may start
beside others, a rule is also asked while one communicates; what is under way is not ready then. The
microbatch needs no saying: a stage takes each kind in
ascending order. Like ``machine``, these run as they are in the executor and compiled in the
simulator, so they use numbers only.

``hint`` is the rank's own order as codes for the rules that follow one. For ``adaptive`` it holds
the shares of the rank's chunks (see ``memory``), the deepest left out; empty or -1 for none.

``adaptive`` decides from what has arrived: ready-first order as in RRFP, arXiv 2605.18750, with the
grouping of forwards of interleaved 1F1B, arXiv 2104.04473, section 2.2. ``hinted`` follows a static
order, the best that the cap allows (``registry.hint_for``), and leaves it only where that costs no
memory; the condition is ours. It cannot deadlock: whatever was overtaken, doing the remaining hint
in its order stays possible. Where microbatches differ in size the hint says nothing about bytes:
then every forward must also fit by the graded rule, and where the hint leads to nothing the rule
of ``adaptive`` decides. ``docs/schedules.md`` has both rules step by step, why each step is as it
is, and what others were simulated.
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
"""Number of actions of its hint that ``hinted`` considers, those overtaken included.

Nothing beyond is ever overtaken, so the first action not done is at most so many behind the number
of actions started, and is found without going through the whole hint.
"""


def follow(s: State, hint: Sequence[int]) -> int:
    """The hint's next action if it is ready, whatever the cap."""
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
    """Code of the ready action of that kind on the deepest chunk, -1 if none is ready."""
    chunks = s[CHUNKS]
    for chunk in range(chunks - 1, -1, -1):
        if is_ready(s, kind, chunk):
            return kind * chunks + chunk
    return -1


def within_share(s: State, hint: Sequence[int], chunk: int) -> bool:
    """True if the chunk's forwards started minus its backwards finished are below its share.

    An evaluation has no backwards and holds nothing.
    """
    if chunk >= len(hint) or hint[chunk] < 0 or s[UNIT] == 0:
        return True
    return lane_count(s, F, chunk) - lane_count(s, B + DONE, chunk) < hint[chunk]


def next_forward(s: State, hint: Sequence[int]) -> int:
    """Chunk of the forward to take, -1 if none is ready and fits.

    In a loop, of the lowest group of as many microbatches as there are ranks, the shallowest. In a
    V the one with the longest way to the end of the step.
    """
    best = -1
    lowest = 0
    for chunk in range(s[CHUNKS]):
        if is_ready(s, F, chunk) and fits(s, chunk) and within_share(s, hint, chunk):
            place = lane_count(s, F, chunk)
            if s[TURNED] == 1:
                place += stage_of(s, chunk)
            else:
                place //= s[RANKS]
            if best < 0 or place < lowest or (place == lowest and s[TURNED] == 1):
                best = chunk
                lowest = place
    return best


def next_backward(s: State) -> int:
    """Code of the backward to take, -1 if none is ready.

    In a loop the deepest, in a V the one with the longest way to the end of the step.
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
    """The rule of ``adaptive``."""
    forward = next_forward(s, hint)
    backward = next_backward(s)
    if forward >= 0 and (backward < 0 or s[LAST] != F):
        return forward
    return backward if backward >= 0 else deepest_ready(s, W)


def depth_first(s: State, hint: Sequence[int]) -> int:
    """Backward first; a microbatch goes as deep as it can before the next one starts."""
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
    """Forward first; a chunk takes every microbatch before the next chunk starts."""
    for chunk in range(s[CHUNKS]):
        if is_ready(s, F, chunk) and fits(s, chunk):
            return chunk
    backward = deepest_ready(s, B)
    if backward >= 0:
        return backward
    return deepest_ready(s, W)


def hinted(s: State, hint: Sequence[int]) -> int:
    """The rule of ``hinted``.

    ``hint`` lists ``code + 3 * chunks * index``, where index counts the code's occurrences.
    """
    chunks = s[CHUNKS]
    count = lanes(s)
    head = max(0, s[STARTED] - LOOKAHEAD)
    while head < len(hint) and hint[head] // count < s[HEAD + hint[head] % count]:
        head += 1
    filling = True
    for chunk in range(chunks):
        filling = filling and lane_count(s, B, chunk) == 0
    sized = s[SIZED] == 1
    largest = 0
    held = s[IN_FLIGHT]
    peak = held
    other = -1
    early = -1
    for at in range(head, min(len(hint), head + LOOKAHEAD)):
        index = hint[at] // count
        code = hint[at] - index * count
        started = s[HEAD + code]  # a code is also the place of its count
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
            # Memory that an action under way will free is not free yet.
            fitting = s[STARTED] == s[FINISHED] or kind == B or held + unit <= s[CAP]
            if kind == W or (at == head and fitting):
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
