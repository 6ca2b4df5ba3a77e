"""The rules that hold for every order of work, as plain functions over one rank's numbers.

A rank's state is one flat sequence of whole numbers, ``s``: a few single values (``s[CAP]``), then
blocks of counts per chunk, then flags of inputs that have arrived. Plain Python runs these
functions on lists, the executor's way (see ``state``); the simulator compiles the very same
functions and runs them on arrays (see ``compiled``). So they use numbers only: no objects, no
exceptions, no calls but to each other.

Memory is counted in millionths of the caller's unit, so that fractions add up exactly.

The rules: an action needs its input; each stage takes its forwards, its backwards and its weight
gradients in ascending microbatch order; a backward follows its own forward, a weight gradient its
own backward. A rank runs one action at a time; where actions may start beside others, one of each
kind.
"""

from __future__ import annotations

F, B, W = 0, 1, 2
"""Kinds of action as numbers; ``ActionKind`` lists them in the same order."""

MEMORY_SCALE = 1_000_000
NO_CAP = 1 << 62

# Single values.
LAST = 0  # kind of the last F or B started, -1 before the first; W does not count
IN_FLIGHT = 1
PEAK = 2
CAP = 3
CHUNKS = 4
MICROBATCHES = 5
PIECES = 6  # parts of each weight gradient, 0 if backwards are whole
RANKS = 7
RANK = 8
STARTED = 9
FINISHED = 10
TOTAL = 11
UNIT = 12  # activations of one microbatch of a chunk, 0 in an evaluation
LAST_CHUNK = 13  # holds the last stage, whose forward enables its own backward; -1 for none
BESIDE = 14  # 1 where an action may start while another communicates
BUSY = 15  # and two more: 1 where a forward, a backward, a weight gradient is under way
SIZED = 18  # 1 where microbatches differ in size; then their sizes follow the flags
TURNED = 19  # 1 in a V, where every second chunk runs from the last rank to the first
HEAD = 20

# Blocks of one count of actions per chunk; a count is also the next index.
DONE = 3  # from a kind's block of started actions to that of finished ones
FLAGS = 6

State = list[int]
"""A rank's numbers; compiled code has an ``int64`` array in its place."""


def lanes(s: State) -> int:
    """Counts the codes ``kind * chunks + chunk``; a forward's code plus this begins a pair."""
    return 3 * s[CHUNKS]


def lane_count(s: State, kind: int, chunk: int) -> int:
    """Counts the actions of a kind that a chunk has started: the index of the next one.

    Weight gradients count their pieces.
    """
    return s[HEAD + kind * s[CHUNKS] + chunk]


def is_ready(s: State, kind: int, chunk: int) -> bool:
    """True if the chunk's next action of that kind may start, memory aside."""
    chunks, microbatches = s[CHUNKS], s[MICROBATCHES]
    index = s[HEAD + kind * chunks + chunk]
    if s[BUSY + kind] == 1:
        return False
    if kind == W:
        return index < s[HEAD + (B + DONE) * chunks + chunk] * s[PIECES]
    if index >= microbatches:
        return False
    if kind == B and index >= s[HEAD + (F + DONE) * chunks + chunk]:
        return False
    return s[HEAD + FLAGS * chunks + (kind * chunks + chunk) * microbatches + index] == 1


def stage_of(s: State, chunk: int) -> int:
    """Stage of a chunk, as :meth:`Placement.stage_of`."""
    rank = s[RANKS] - 1 - s[RANK] if s[TURNED] == 1 and chunk % 2 == 1 else s[RANK]
    return chunk * s[RANKS] + rank


def size_of(s: State, microbatch: int) -> int:
    """Activations of a microbatch of a chunk."""
    if s[SIZED] == 0:
        return s[UNIT]
    return s[HEAD + (FLAGS + 2 * s[MICROBATCHES]) * s[CHUNKS] + microbatch]


def fits(s: State, chunk: int) -> bool:
    """True if the graded memory rule lets the chunk's next forward start (see ``memory``).

    What must be free is its own microbatch and one of every later chunk: the largest of those that
    are not there yet.
    """
    if s[SIZED] == 0:
        return s[IN_FLIGHT] + (s[CHUNKS] - chunk) * s[UNIT] <= s[CAP]
    index = lane_count(s, F, chunk)
    needed = s[IN_FLIGHT] + size_of(s, index)
    for later in range(chunk + 1, s[CHUNKS]):
        largest = 0
        for microbatch in range(lane_count(s, F, later), index + 1):
            largest = max(largest, size_of(s, microbatch))
        needed += largest
    return needed <= s[CAP]


def arrive(s: State, kind: int, chunk: int, microbatch: int) -> None:
    """Note that the input of a forward or backward is here."""
    chunks = s[CHUNKS]
    s[HEAD + FLAGS * chunks + (kind * chunks + chunk) * s[MICROBATCHES] + microbatch] = 1


def start(s: State, kind: int, chunk: int) -> None:
    """Note that the chunk's next action of that kind starts; a forward takes its memory now."""
    at = HEAD + kind * s[CHUNKS] + chunk
    index = s[at]
    s[at] = index + 1
    s[STARTED] += 1
    s[BUSY + kind] = 1
    if kind != W:
        s[LAST] = kind
    if kind == F:
        s[IN_FLIGHT] += s[UNIT] if s[SIZED] == 0 else size_of(s, index)
        s[PEAK] = max(s[PEAK], s[IN_FLIGHT])


def finish(s: State, kind: int, chunk: int) -> None:
    """Note that the chunk's oldest running action of that kind ended; memory it frees is free now.

    A whole backward frees its microbatch; a split one leaves that to the last piece of its weight
    gradient.
    """
    at = HEAD + (kind + DONE) * s[CHUNKS] + chunk
    index = s[at]
    s[at] = index + 1
    s[FINISHED] += 1
    s[BUSY + kind] = 0
    if kind == F:
        if chunk == s[LAST_CHUNK]:
            arrive(s, B, chunk, index)
    elif kind == B:
        if s[PIECES] == 0:
            s[IN_FLIGHT] -= size_of(s, index)
    elif (index + 1) % s[PIECES] == 0:
        s[IN_FLIGHT] -= size_of(s, index // s[PIECES])
