"""The rules that hold for every order of work, as plain functions over one rank's numbers.

A rank's state is one flat sequence of whole numbers, ``s``: a few single values (``s[CAP]``), then
blocks with a value per chunk, then flags of inputs that have arrived. Plain Python runs these
functions on lists, the executor's way (see ``state``); the simulator compiles the very same
functions and runs them on arrays (see ``compiled``). So they use numbers only: no objects, no
exceptions, no calls but to each other.

Memory is counted in millionths of the caller's unit, so that fractions add up exactly.

The rules: an action needs its input; each stage takes its forwards, its backwards and its weight
gradients in ascending microbatch order; a backward follows its own forward, a weight gradient its
own backward. A rank may run one action at a time.
"""

from __future__ import annotations

__all__ = [
    "B",
    "F",
    "MEMORY_SCALE",
    "NO_CAP",
    "State",
    "W",
    "arrive",
    "finish",
    "fits",
    "initialize",
    "is_ready",
    "lane_count",
    "start",
    "state_size",
]

F, B, W = 0, 1, 2
"""Kinds of action as numbers; ``ActionKind`` lists them in the same order."""

MEMORY_SCALE = 1_000_000
NO_CAP = 1 << 62

# Single values.
LAST = 0  # kind of the last F or B started, -1 before the first; W does not count
LAST_STARTED = 1  # kind of the last action started, -1 before the first
IN_FLIGHT = 2
PEAK = 3
CAP = 4
CHUNKS = 5
MICROBATCHES = 6
PIECES = 7  # parts of each weight gradient, 0 if backwards are whole
GROUP = 8  # microbatches that a chunk should take in a row, see ``rules``
RANK = 9
STARTED = 10
FINISHED = 11
TOTAL = 12
FORWARD_ONLY = 13
HEAD = 14

# Blocks of one value per chunk. The first six count actions; a count is also the next index.
DONE = 3  # from a kind's block of started actions to that of finished ones
UNITS = 6  # activations of one microbatch
KEPT = 7  # what its backward leaves for the weight gradient
ROOM = 8  # what must be free for a forward: its own and one microbatch of every later chunk
IS_LAST = 9  # the pipeline's last stage: a forward enables its own backward
FLAGS = 10

State = list[int]
"""A rank's numbers; compiled code has an ``int64`` array in its place."""


def state_size(num_chunks: int, num_microbatches: int) -> int:
    """Length of a rank's state."""
    return HEAD + num_chunks * (FLAGS + 2 * num_microbatches)


def initialize(s: State, rank: int, group: int, first: State, last: State) -> None:
    """Fill in what follows from the values that the caller has set.

    Set before: ``CAP``, ``CHUNKS``, ``MICROBATCHES``, ``PIECES``, ``FORWARD_ONLY`` and the blocks
    ``UNITS`` and ``KEPT``; everything else is 0.

    Args:
        s: the state.
        rank: this rank's position in the pipeline.
        group: how many microbatches a chunk should take in a row.
        first: per chunk, 1 if it is the pipeline's first stage, whose forwards need no input.
        last: per chunk, 1 if it is the last stage.
    """
    chunks, microbatches = s[CHUNKS], s[MICROBATCHES]
    s[LAST] = -1
    s[LAST_STARTED] = -1
    s[RANK] = rank
    s[GROUP] = group
    kinds = 1 if s[FORWARD_ONLY] else 2 + s[PIECES]
    s[TOTAL] = chunks * microbatches * kinds
    room = 0
    for chunk in range(chunks - 1, -1, -1):
        room += s[HEAD + UNITS * chunks + chunk]
        s[HEAD + ROOM * chunks + chunk] = room
        s[HEAD + IS_LAST * chunks + chunk] = last[chunk]
        if first[chunk]:
            flags = HEAD + FLAGS * chunks + chunk * microbatches
            for microbatch in range(microbatches):
                s[flags + microbatch] = 1


def lane_count(s: State, kind: int, chunk: int) -> int:
    """Counts the actions of a kind that a chunk has started: the index of the next one.

    Weight gradients count their pieces.
    """
    return s[HEAD + kind * s[CHUNKS] + chunk]


def is_ready(s: State, kind: int, chunk: int) -> bool:
    """True if the chunk's next action of that kind may start, memory aside."""
    chunks, microbatches = s[CHUNKS], s[MICROBATCHES]
    index = s[HEAD + kind * chunks + chunk]
    if kind == W:
        return index < s[HEAD + (B + DONE) * chunks + chunk] * s[PIECES]
    if index >= microbatches:
        return False
    if kind == B and index >= s[HEAD + (F + DONE) * chunks + chunk]:
        return False
    return s[HEAD + FLAGS * chunks + (kind * chunks + chunk) * microbatches + index] == 1


def fits(s: State, chunk: int) -> bool:
    """True if the graded memory rule lets the chunk's next forward start (see ``memory``)."""
    return s[IN_FLIGHT] + s[HEAD + ROOM * s[CHUNKS] + chunk] <= s[CAP]


def arrive(s: State, kind: int, chunk: int, microbatch: int) -> None:
    """Note that the input of a forward or backward is here."""
    chunks = s[CHUNKS]
    s[HEAD + FLAGS * chunks + (kind * chunks + chunk) * s[MICROBATCHES] + microbatch] = 1


def start(s: State, kind: int, chunk: int) -> None:
    """Note that the chunk's next action of that kind starts; a forward takes its memory now."""
    chunks = s[CHUNKS]
    s[HEAD + kind * chunks + chunk] += 1
    s[STARTED] += 1
    s[LAST_STARTED] = kind
    if kind != W:
        s[LAST] = kind
    if kind == F and not s[FORWARD_ONLY]:
        s[IN_FLIGHT] += s[HEAD + UNITS * chunks + chunk]
        s[PEAK] = max(s[PEAK], s[IN_FLIGHT])


def finish(s: State, kind: int, chunk: int) -> None:
    """Note that the chunk's oldest running action of that kind ended; memory it frees is free now.

    A whole backward frees everything, a split one all but what its weight gradient needs, the last
    piece of a weight gradient the rest.
    """
    chunks = s[CHUNKS]
    at = HEAD + (kind + DONE) * chunks + chunk
    index = s[at]
    s[at] = index + 1
    s[FINISHED] += 1
    if kind == F:
        if s[HEAD + IS_LAST * chunks + chunk] and not s[FORWARD_ONLY]:
            arrive(s, B, chunk, index)
    elif kind == B:
        s[IN_FLIGHT] -= s[HEAD + UNITS * chunks + chunk]
        if s[PIECES] > 0:
            s[IN_FLIGHT] += s[HEAD + KEPT * chunks + chunk]
    elif (index + 1) % s[PIECES] == 0:
        s[IN_FLIGHT] -= s[HEAD + KEPT * chunks + chunk]
