"""The choices of the run-time policies, as plain functions over one rank's numbers.

``rule(s, hint)`` looks at a state (see ``machine``) and returns what to start now as a code,
``kind * chunks + chunk``, or -1 to wait. The microbatch needs no saying: a stage takes each kind in
ascending order. Like ``machine``, these run as they are in the executor and compiled in the
simulator, so they use numbers only.

``hint`` is the rank's own order as codes for the rules that follow one, else empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.schedule.machine import (
    CAP,
    CHUNKS,
    GROUP,
    HEAD,
    IN_FLIGHT,
    KEPT,
    LAST,
    PIECES,
    STARTED,
    UNITS,
    B,
    F,
    State,
    W,
    fits,
    is_ready,
    lane_count,
)

__all__ = ["breadth_first", "depth_first", "follow", "hinted", "ready_first"]

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
    code = hint[position]
    kind = code // s[CHUNKS]
    return code if is_ready(s, kind, code - kind * s[CHUNKS]) else -1


def deepest_ready(s: State, kind: int) -> int:
    """Code of the ready action of that kind on the deepest chunk, -1 if none is ready."""
    chunks = s[CHUNKS]
    for chunk in range(chunks - 1, -1, -1):
        if is_ready(s, kind, chunk):
            return kind * chunks + chunk
    return -1


def grouped_forward(s: State) -> int:
    """Code of the forward to take: lowest group of microbatches first, then the shallowest chunk.

    A group is as many microbatches as the pipeline has ranks in a loop, and one in a V. -1 if none
    is ready and fits.
    """
    best = -1
    best_group = 0
    for chunk in range(s[CHUNKS]):
        if is_ready(s, F, chunk) and fits(s, chunk):
            group = lane_count(s, F, chunk) // s[GROUP]
            if best < 0 or group < best_group:
                best = chunk
                best_group = group
    return best


def ready_first(s: State, hint: Sequence[int]) -> int:
    """The rule of ``adaptive``; see there for what it does and why."""
    forward = grouped_forward(s)
    backward = deepest_ready(s, B)
    if forward >= 0 and backward >= 0:
        return backward if s[LAST] == F else forward
    if forward >= 0:
        return forward
    if backward >= 0:
        return backward
    return deepest_ready(s, W) if s[PIECES] > 0 else -1


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
    return deepest_ready(s, W) if s[PIECES] > 0 else -1


def breadth_first(s: State, hint: Sequence[int]) -> int:
    """Forward first; a chunk takes every microbatch before the next chunk starts."""
    for chunk in range(s[CHUNKS]):
        if is_ready(s, F, chunk) and fits(s, chunk):
            return chunk
    backward = deepest_ready(s, B)
    if backward >= 0:
        return backward
    return deepest_ready(s, W) if s[PIECES] > 0 else -1


def hinted(s: State, hint: Sequence[int]) -> int:
    """The rule of the policy ``hinted``; see there for what it does and why.

    ``hint`` lists ``code + 3 * chunks * index``, where index counts the code's occurrences.
    """
    chunks = s[CHUNKS]
    lanes = 3 * chunks
    head = max(0, s[STARTED] - LOOKAHEAD)
    while head < len(hint) and hint[head] // lanes < s[HEAD + hint[head] % lanes]:
        head += 1
    filling = True
    for chunk in range(chunks):
        filling = filling and lane_count(s, B, chunk) == 0
    held = s[IN_FLIGHT]
    peak = held
    other = -1
    early = -1
    early_units = 0
    for at in range(head, min(len(hint), head + LOOKAHEAD)):
        index = hint[at] // lanes
        code = hint[at] - index * lanes
        started = s[HEAD + code]  # a code is also the place of its count
        if index < started:
            continue
        kind = code // chunks
        chunk = code - kind * chunks
        units = s[HEAD + UNITS * chunks + chunk]
        if index == started and is_ready(s, kind, chunk):
            if at == head:
                return code
            if kind == W:
                return code
            if other < 0 and (kind == B or (kind == F and max(peak, held) + units <= s[CAP])):
                if filling and kind == F:
                    if early < 0:
                        early = code
                        early_units = units
                else:
                    other = code
        if kind == F:
            held += units
            peak = max(peak, held)
        elif kind == B:
            held -= units
            if s[PIECES] > 0:
                held += s[HEAD + KEPT * chunks + chunk]
        elif (index + 1) % s[PIECES] == 0:
            held -= s[HEAD + KEPT * chunks + chunk]
    if early >= 0 and peak + early_units <= s[CAP]:
        return early
    return other
