"""Determines which actions of a rank may start, with plain functions on an array of integers.

Every order of actions obeys these rules: An action needs its input. Each stage runs its F, its B
and its W actions in ascending order of microbatches. The B of a microbatch follows its F, and its W
follows its B. A rank runs one action at a time, or one of each kind if actions may overlap
(``BESIDE``).

If sequences are cut into n slices, each action processes one slice. An *item* is a slice of a
microbatch, with the index ``microbatch * n + slice``; without slices, an item is a microbatch. If
microbatches have different numbers of slices, items are counted across all microbatches. The F
actions of a stage run the items in ascending order, because a slice needs the keys and values of
earlier slices. The B and W actions run the microbatches in ascending order, but the slices of each
microbatch in descending order, because a slice needs the gradients of later slices. So the first B
of a microbatch follows the F of its last slice::

    F    0 1 2   3 4 5        2 microbatches of 3 slices each
    B    2 1 0   5 4 3

The state of a rank is a flat sequence of integers, ``s``. The executor runs these functions in
plain Python on lists (see ``rank_state``). The simulator compiles the same functions with numba and
runs them on arrays (see ``numba_kernels``). Therefore they use only numbers: no objects, no
exceptions, and no calls except to each other.

The table lists the entries of ``s``, called slots. The example is rank 1 of 2 in a loop with 2
chunks per rank, which has stages 1 and 3. The step has 3 microbatches, separate weight gradients
(W) and a limit on activations (cap) of 2. F0-0, F0-1 and F1-0 have finished, B1-0 is running, and
the input of F0-2 has arrived::

    slot             example   content
     0 LAST                1   kind of the last F or B that started, -1 before the first
     1 IN_FLIGHT     1500000   activation memory held, in millionths of a microbatch in
                               all chunks of the rank
     2 PEAK          1500000   maximum of IN_FLIGHT so far
     3 CAP           2000500   limit on IN_FLIGHT, with a tolerance for rounding
     4 CHUNKS              2   number of chunks of the rank
     5 ITEMS               3   number of microbatches of the step, times SLICES
     6 PIECES              1   number of W actions per weight gradient, 0 if B computes it
     7 RANKS               2   number of ranks of the pipeline
     8 RANK                1   position of this rank in the pipeline
     9 STARTED             4   number of actions started
    10 FINISHED            3   number of actions finished
    11 TOTAL              18   number of actions of the step
    12 UNIT           500000   memory of one item in one chunk, 0 in an evaluation
    13 LAST_CHUNK          1   chunk with the last stage, where the end of F makes B ready;
                               -1 if another rank has the last stage
    14 BESIDE              0   1 if an action may start while another one communicates
    15 BUSY                0   1 if an F is running
    16                     1   1 if a B is running
    17                     0   1 if a W is running
    18 SIZED               0   1 if items differ in size
    19 TURNED              0   1 in a V, where odd chunks run from the last rank to the first
    20 SLICES              1   number of slices of each microbatch, 0 if it differs
    21 PROMISED            0   memory that the later slices of microbatches will take, on the
                               chunks on which their first slices have started
    22 FROZEN              0   number of frozen chunks, which come first (see below)
    23 LEAD                2   most items by which a frozen chunk may lead the next stage
    24 HEAD              2 1   number of F started, per chunk
    26                   0 1   number of B started, per chunk
    28                   0 0   number of W started, per chunk
    30                   2 1   number of F finished, per chunk
    32                   0 0   number of B finished, per chunk
    34                   0 0   number of W finished, per chunk
    36           1 1 1 1 0 0   1 if the input of F has arrived, per chunk and item
    42           0 0 0 1 0 0   1 if the input of B has arrived, per chunk and item
    48                     -   memory of each item in one chunk; only if SIZED is 1
    51                     -   first item of each item's microbatch, followed by the end
                               (last item plus 1) of each; only if SLICES is 0, which
                               implies that SIZED is 1

The number of actions of a kind that a chunk has started is also the index of its next action.
Memory is counted in integers, because sums of fractions would not be exact.

The first stages of a pipeline may be *frozen*, which means that no gradient flows through them, as
in an encoder whose parameters are not trained. A frozen chunk has only F actions, which keep no
activations. Its B and W actions count as started from the beginning, so they never become ready.
The output of a frozen chunk waits in the memory of the next stage until the F of that stage takes
it. The next stage acknowledges each output that it takes, and the number of finished B actions
counts these acknowledgments. An F is not ready while ``LEAD`` earlier outputs have not been
acknowledged.
"""

from __future__ import annotations

F, B, W = 0, 1, 2
"""Kinds of action as integers, in the same order as in ``ActionKind``."""

MEMORY_SCALE = 1_000_000
"""Number of memory units in the activations of one microbatch in all chunks of a rank."""
NO_CAP = 1 << 62
"""Value of ``CAP`` if there is no limit."""

# Each of the following constants is the index of a slot that contains a single number (see the
# table above).
LAST = 0
IN_FLIGHT = 1
PEAK = 2
CAP = 3
CHUNKS = 4
ITEMS = 5
PIECES = 6
RANKS = 7
RANK = 8
STARTED = 9
FINISHED = 10
TOTAL = 11
UNIT = 12
LAST_CHUNK = 13
BESIDE = 14
BUSY = 15
SIZED = 18
TURNED = 19
SLICES = 20
PROMISED = 21
FROZEN = 22
LEAD = 23
HEAD = 24

# The following offsets from HEAD are in blocks of one number per chunk. The counts of finished
# actions start DONE blocks after the counts of started actions.
DONE = 3
FLAGS = 6  # The flags of arrived inputs start FLAGS blocks after HEAD.

State = list[int]
"""State of one rank as integers: a list in plain Python, an ``int64`` array in compiled code."""


def lanes(s: State) -> int:
    """Returns the number of distinct codes ``kind * chunks + chunk`` on the rank of ``s``.

    Adding this number to the code of an action marks that the action starts together with the next
    one in the list.
    """
    return 3 * s[CHUNKS]


def lane_count(s: State, kind: int, chunk: int) -> int:
    """Returns the number of actions of ``kind`` that ``chunk`` has started.

    This is also the index of the chunk's next action of this kind.

    If a weight gradient is split into several W actions, each of them is counted.
    """
    return s[HEAD + kind * s[CHUNKS] + chunk]


def first_of(s: State, item: int) -> int:
    """Returns the index of the first slice in the microbatch that contains slice ``item``."""
    slices = s[SLICES]
    if slices > 0:
        return item - item % slices
    return s[HEAD + (FLAGS + 2 * s[ITEMS]) * s[CHUNKS] + s[ITEMS] + item]


def end_of(s: State, item: int) -> int:
    """Returns one more than the index of the last slice in the microbatch of slice ``item``."""
    slices = s[SLICES]
    if slices > 0:
        return item - item % slices + slices
    return s[HEAD + (FLAGS + 2 * s[ITEMS]) * s[CHUNKS] + 2 * s[ITEMS] + item]


def item_of(s: State, kind: int, index: int) -> int:
    """Returns the index of the slice or microbatch (item) that an action processes.

    ``kind`` is the kind of the action, and ``index`` is its index among the chunk's actions of this
    kind. For W, the index counts whole weight gradients instead of their parts.
    """
    if kind == F or s[SLICES] == 1:
        return index
    return first_of(s, index) + end_of(s, index) - 1 - index


def is_ready(s: State, kind: int, chunk: int) -> bool:
    """Returns whether the next action of ``kind`` in ``chunk`` can start, ignoring memory."""
    chunks = s[CHUNKS]
    items = s[ITEMS]
    index = s[HEAD + kind * chunks + chunk]
    if s[BUSY + kind] == 1:
        return False
    if kind == W:
        return index < s[HEAD + (B + DONE) * chunks + chunk] * s[PIECES]
    if index >= items:
        return False
    if kind == F and chunk < s[FROZEN]:
        if index - s[HEAD + (B + DONE) * chunks + chunk] >= s[LEAD]:
            return False
    elif kind == B:
        # A backward pass (B) needs the forward passes (F) of all slices of its microbatch.
        if end_of(s, index) > s[HEAD + (F + DONE) * chunks + chunk]:
            return False
        if s[SLICES] != 1:
            index = item_of(s, B, index)
    return s[HEAD + FLAGS * chunks + (kind * chunks + chunk) * items + index] == 1


def stage_of(s: State, chunk: int) -> int:
    """Returns the pipeline stage of ``chunk`` on the rank with the state ``s``."""
    rank = s[RANKS] - 1 - s[RANK] if s[TURNED] == 1 and chunk % 2 == 1 else s[RANK]
    return chunk * s[RANKS] + rank


def size_of(s: State, item: int) -> int:
    """Returns the activation memory of ``item`` in one chunk, in the unit of ``IN_FLIGHT``."""
    if s[SIZED] == 0:
        return s[UNIT]
    return s[HEAD + (FLAGS + 2 * s[ITEMS]) * s[CHUNKS] + item]


def size_from(s: State, item: int) -> int:
    """Returns the memory of slice ``item`` and of later slices of its microbatch, in one chunk."""
    end = end_of(s, item)
    if s[SIZED] == 0:
        return (end - item) * s[UNIT]
    total = 0
    for number in range(item, end):
        total += size_of(s, number)
    return total


def fits(s: State, chunk: int) -> bool:
    """Returns whether memory allows the next forward pass of ``chunk`` to start.

    After the start, the cap must still have room for one microbatch in every later chunk: the
    largest microbatch that has not started in that chunk. This prevents deadlocks (see
    ``memory_caps``). With slices, only the first slice of a microbatch is checked, because its
    start reserves memory for the later slices.
    """
    if chunk < s[FROZEN]:
        return True
    if s[SIZED] == 0 and s[SLICES] == 1:
        return s[IN_FLIGHT] + (s[CHUNKS] - chunk) * s[UNIT] <= s[CAP]
    first = lane_count(s, F, chunk)
    if first_of(s, first) < first:
        return True
    needed = s[IN_FLIGHT] + s[PROMISED] + size_from(s, first)
    for later in range(chunk + 1, s[CHUNKS]):
        largest = 0
        item = lane_count(s, F, later)
        if item <= first and first_of(s, item) < item:
            item = end_of(s, item)
        while item <= first:
            largest = max(largest, size_from(s, item))
            if s[SIZED] == 0:
                break
            item = end_of(s, item)
        needed += largest
    return needed <= s[CAP]


def arrive(s: State, kind: int, chunk: int, item: int) -> None:
    """Records that the input of an action on ``item`` in ``chunk`` has arrived.

    ``kind`` is the kind of the action, F or B.

    For the B of a frozen chunk, the arrival means that the next stage has acknowledged the chunk's
    output.
    """
    chunks = s[CHUNKS]
    if kind == B and chunk < s[FROZEN]:
        s[HEAD + (B + DONE) * chunks + chunk] += 1
        return
    s[HEAD + FLAGS * chunks + (kind * chunks + chunk) * s[ITEMS] + item] = 1


def start(s: State, kind: int, chunk: int) -> None:
    """Records that the next action of ``kind`` in ``chunk`` starts.

    The start of an F allocates the memory of its activations, unless the chunk is frozen.
    """
    slot = HEAD + kind * s[CHUNKS] + chunk
    index = s[slot]
    s[slot] = index + 1
    s[STARTED] += 1
    s[BUSY + kind] = 1
    if chunk < s[FROZEN]:
        return
    if kind != W:
        s[LAST] = kind
    if kind == F:
        size = size_of(s, index)
        s[IN_FLIGHT] += size
        s[PEAK] = max(s[PEAK], s[IN_FLIGHT])
        if s[SLICES] != 1:
            if first_of(s, index) == index:
                s[PROMISED] += size_from(s, index)
            s[PROMISED] -= size


def finish(s: State, kind: int, chunk: int) -> None:
    """Records the end of the oldest running action of ``kind`` in ``chunk``, and frees its memory.

    The activations of a microbatch or slice are freed by its last W, or by its B if there are no W
    actions.
    """
    slot = HEAD + (kind + DONE) * s[CHUNKS] + chunk
    index = s[slot]
    s[slot] = index + 1
    s[FINISHED] += 1
    s[BUSY + kind] = 0
    if kind == F:
        if chunk == s[LAST_CHUNK]:
            arrive(s, B, chunk, index)
    elif kind == B:
        if s[PIECES] == 0:
            s[IN_FLIGHT] -= size_of(s, item_of(s, B, index))
    elif (index + 1) % s[PIECES] == 0:
        s[IN_FLIGHT] -= size_of(s, item_of(s, W, index // s[PIECES]))
