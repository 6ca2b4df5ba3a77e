"""Simulates a step with an event loop of plain functions on integers.

An event is the end of an action, a communication within an action, or the arrival of an input. All
events that happen at the same time are processed before any rank chooses its next action. Times are
integers in picoseconds. If sequences are cut into slices, microbatch indices count slices (see
``rank_kernel``).

``numba_kernels`` compiles these functions, after replacing ``rule`` with the run-time rule to
simulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.adaptive.schedule.rank_kernel import (
    BESIDE,
    CHUNKS,
    DONE,
    FINISHED,
    FROZEN,
    ITEMS,
    LEAD,
    PIECES,
    STARTED,
    TOTAL,
    B,
    F,
    State,
    W,
    arrive,
    finish,
    is_ready,
    item_of,
    lane_count,
    lanes,
    start,
)

DONE_ALL, DEADLOCK, NOT_READY = 0, 1, 2
"""Return values of :func:`run`: the step ended, the ranks deadlocked, or a choice was invalid.

``NOT_READY`` plus a rank means that the policy of this rank chose an action that cannot start.
"""


class World(NamedTuple):
    """Complete state of a simulated step.

    The fields are lists in plain Python and ``int64`` arrays in compiled code.

    A rank can run two actions at the same time, one of which computes while the other communicates.
    A slot holds the values of one running action. The two slots of a rank have the indices ``rank``
    and ``rank + ranks``. Times are in picoseconds. Arrays with several indices are flattened.

    Attributes:
        states: State of each rank: the progress of each chunk, and the inputs that have arrived.
            Module ``rank_kernel`` describes the layout.
        hints: Additional input of each rank's rule, such as an order (see ``runtime_rules``), or
            empty.
        stages: Pipeline stage of each chunk, ``[rank][chunk]``.
        first_ranks: First rank of each stage.
        widths: Number of ranks of each stage, to which microbatches are assigned round-robin (see
            ``unequal_widths``).
        total: Number of microbatches in the step of the whole job, ``[1]``.
        durations: Duration of each action, ``[kind][stage][microbatch]``, kinds F, B, W.
        exchanges: Part of each duration of F and B that is communication within the stage,
            ``[kind][stage][microbatch]``.
        cuts: Number of communications within the stage during each F and B, per stage.
        delays: Latency of the message after each F and B, ``[kind][stage][microbatch]``.
        occupancy: Time for which a message occupies the link between two ranks, ``[from][to]``.
        free: Time when the link between two ranks becomes free, ``[from][to]``.
        heap: Priority queue of future events, which are pairs of a time and a code. The code ``-1 -
            rank`` means that a rank has computed up to a communication or to the end of its action.
            Other codes mean that an input arrives, and are the index in ``durations`` of the action
            that needs the input. The array has room for one event per rank and one per message.
        heap_size: Number of events in ``heap``, ``[1]``.
        turn: Slot of the action that each rank is computing, or -1.
        last: Slot of the action that each rank computed most recently.
        was_filler: 1 for each rank whose most recent action was a W, otherwise 0.
        waking: 1 for each rank with an event since its last choice of an action, otherwise 0.
        wakes: Ranks that must choose an action, in the order of their events.
        num_woken: Number of ranks in ``wakes``, ``[1]``.
        link: Time when each rank's communication within its stages ends.
        running: Code of the action in each slot, or -1.
        works: Duration of the action in each slot.
        exchanged: Part of the duration in ``works`` that is communication.
        counts: Number of communications of the action in each slot.
        steps: Number of communications of the action in each slot that have already started.
        due: End time of the most recently started communication of the action in each slot.
        indices: Index in ``codes`` of the action in each slot.
        codes: Codes of each rank's actions in execution order, written by the simulation.
        starts: Start time of each action in ``codes``, written by the simulation.
        ends: End time of each action in ``codes``, written by the simulation.
    """

    states: list[list[int]]
    hints: list[Sequence[int]]
    stages: list[int]
    first_ranks: list[int]
    widths: list[int]
    total: list[int]
    durations: list[int]
    exchanges: list[int]
    cuts: list[int]
    delays: list[int]
    occupancy: list[int]
    free: list[int]
    heap: list[int]
    heap_size: list[int]
    turn: list[int]
    last: list[int]
    was_filler: list[int]
    waking: list[int]
    wakes: list[int]
    num_woken: list[int]
    link: list[int]
    running: list[int]
    works: list[int]
    exchanged: list[int]
    counts: list[int]
    steps: list[int]
    due: list[int]
    indices: list[int]
    codes: list[list[int]]
    starts: list[list[int]]
    ends: list[list[int]]


def rule(s: State, hint: Sequence[int]) -> int:
    """Raises an error. ``numba_kernels`` replaces this placeholder with the run-time rule."""
    raise NotImplementedError


def heap_push(world: World, time: int, code: int) -> None:
    """Adds event ``code`` at ``time`` to the priority queue, a heap with 4 children per node."""
    heap = world.heap
    node = world.heap_size[0]
    world.heap_size[0] = node + 1
    while node > 0:
        parent = (node - 1) // 4
        if heap[2 * parent] <= time:
            break
        heap[2 * node] = heap[2 * parent]
        heap[2 * node + 1] = heap[2 * parent + 1]
        node = parent
    heap[2 * node] = time
    heap[2 * node + 1] = code


def heap_pop(world: World) -> int:
    """Removes the earliest event from the priority queue and returns its code."""
    heap = world.heap
    earliest = heap[1]
    last = world.heap_size[0] - 1
    world.heap_size[0] = last
    time = heap[2 * last]
    code = heap[2 * last + 1]
    node = 0
    while 4 * node + 1 < last:
        child = 4 * node + 1
        least = heap[2 * child]
        for other in range(child + 1, min(child + 4, last)):
            if heap[2 * other] < least:
                child = other
                least = heap[2 * other]
        if least >= time:
            break
        heap[2 * node] = least
        heap[2 * node + 1] = heap[2 * child + 1]
        node = child
    heap[2 * node] = time
    heap[2 * node + 1] = code
    return earliest


def wake(world: World, rank: int) -> None:
    """Adds ``rank`` to the ranks that choose their next action before simulated time advances."""
    if world.waking[rank] == 0:
        world.waking[rank] = 1
        world.wakes[world.num_woken[0]] = rank
        world.num_woken[0] += 1


def whole_of(world: World, rank: int, stage: int, microbatch: int) -> int:
    """Converts the index of a microbatch on ``rank`` of ``stage`` to its index in the step."""
    return microbatch * world.widths[stage] + rank - world.first_ranks[stage]


def work_of(world: World, rank: int, kind: int, chunk: int, stage: int) -> int:
    """Returns the duration of the next action of ``kind`` in ``chunk``, in picoseconds.

    ``stage`` is the pipeline stage of this chunk on ``rank``.
    """
    s = world.states[rank]
    stages = len(world.first_ranks)
    total = world.total[0]
    pieces = s[PIECES]
    index = lane_count(s, kind, chunk)
    piece = 0
    if kind == W:
        piece = index % pieces
        index //= pieces
    cell = stage * total + whole_of(world, rank, stage, item_of(s, kind, index))
    work = world.durations[kind * stages * total + cell]
    if kind == W:
        return work * (piece + 1) // pieces - work * piece // pieces
    if kind == B and pieces == 0:
        work += world.durations[W * stages * total + cell]
    return work


def compute(world: World, slot: int, now: int) -> None:
    """Starts to compute a running action, up to its next communication or to its end.

    ``slot`` is the index of the action among the running actions (see :class:`World`).

    The current time is ``now``.
    """
    rank = slot % len(world.states)
    step = world.steps[slot]
    count = world.counts[slot]
    duration = world.works[slot] - world.exchanged[slot]
    if step < count:
        duration = duration * (step + 1) // count - duration * step // count
    elif count > 0:
        duration = 0
    world.turn[rank] = slot
    heap_push(world, max(now, world.due[slot]) + duration, -1 - rank)


def communicate(world: World, slot: int, now: int) -> None:
    """Starts the next communication of a running action at the time ``now``.

    ``slot`` is the index of the action among the running actions (see :class:`World`).

    All communications within a rank's stages share one link.
    """
    rank = slot % len(world.states)
    step = world.steps[slot]
    count = world.counts[slot]
    exchange = world.exchanged[slot]
    world.link[rank] = max(world.link[rank], now)
    world.link[rank] += exchange * (step + 1) // count - exchange * step // count
    world.due[slot] = world.link[rank]
    world.steps[slot] = step + 1


def decide(world: World, rank: int, now: int) -> bool:
    """Starts the action that the rule of ``rank`` chooses, or continues a waiting action.

    The current time is ``now``.

    Returns:
        False if the chosen action is not ready.
    """
    s = world.states[rank]
    ranks = len(world.states)
    slot = world.last[rank]
    other = (slot + ranks) % (2 * ranks)
    waits = world.running[other] >= 0
    # Only one weight gradient runs during each communication. Afterwards, the action that waited
    # for the communication continues.
    if waits and (world.running[slot] >= 0 or world.was_filler[rank]):
        compute(world, other, now)
        return True
    picked = rule(s, world.hints[rank])
    if picked < 0:
        if waits:
            compute(world, other, now)
        elif world.running[slot] >= 0:
            compute(world, slot, now)
        return True
    chunks = s[CHUNKS]
    code = picked % lanes(s)
    kind = code // chunks
    chunk = code - kind * chunks
    if not is_ready(s, kind, chunk):
        return False
    if world.running[slot] >= 0:
        slot = other
    stage = world.stages[rank * chunks + chunk]
    work = work_of(world, rank, kind, chunk, stage)
    world.works[slot] = work
    world.exchanged[slot] = 0
    world.counts[slot] = 0
    if s[BESIDE] == 1 and kind != W:
        cell = (kind * len(world.first_ranks) + stage) * world.total[0]
        cell += whole_of(world, rank, stage, item_of(s, kind, lane_count(s, kind, chunk)))
        world.exchanged[slot] = world.exchanges[cell]
        world.counts[slot] = world.cuts[stage]
    world.steps[slot] = 0
    world.due[slot] = 0
    index = s[STARTED]
    world.indices[slot] = index
    world.codes[rank][index] = picked
    world.starts[rank][index] = now
    world.running[slot] = code
    if kind == F and stage > 0:
        acknowledge(world, rank, stage, lane_count(s, F, chunk), now)
    start(s, kind, chunk)
    compute(world, slot, now)
    return True


def is_frozen(world: World, stage: int) -> bool:
    """Returns whether ``stage`` is frozen.

    A frozen stage has no B, because no gradient flows through it.
    """
    return stage // len(world.states) < world.states[world.first_ranks[stage]][FROZEN]


def acknowledge(world: World, rank: int, stage: int, item: int, now: int) -> None:
    """Acknowledges that an F of ``stage`` uses an output of the previous, frozen stage.

    The output belongs to ``item``, and the current time is ``now``. This function does nothing if
    the previous stage is not frozen. It also does nothing for the last outputs, because no later F
    of the frozen stage waits for their acknowledgment.
    """
    target = world.first_ranks[stage - 1]
    s = world.states[target]
    if not is_frozen(world, stage - 1) or item + s[LEAD] >= s[ITEMS]:
        return
    stages = len(world.first_ranks)
    total = world.total[0]
    arrival = now
    if rank != target:
        arrival += world.delays[(B * stages + stage) * total + item]
    heap_push(world, arrival, (B * stages + stage - 1) * total + item)


def send(world: World, rank: int, kind: int, stage: int, microbatch: int, now: int) -> None:
    """Sends the result of an action of ``stage`` to the stage that needs this result.

    ``kind`` is the kind of the action, which ended at the time ``now``. ``microbatch`` is the index
    of the action's microbatch. Each rank numbers its microbatches from 0.
    """
    stages = len(world.first_ranks)
    ranks = len(world.states)
    total = world.total[0]
    to = stage + 1 if kind == F else stage - 1
    if to < 0 or to >= stages or (kind == B and is_frozen(world, to)):
        return
    whole = whole_of(world, rank, stage, microbatch)
    event = (kind * stages + to) * total + whole
    target = world.first_ranks[to] + whole % world.widths[to]
    arrival = now
    if rank != target:
        link = rank * ranks + target
        arrival = max(now, world.free[link]) + world.occupancy[link]
        world.free[link] = arrival
        arrival += world.delays[(kind * stages + stage) * total + whole]
    if arrival == now:
        receive(world, event)
    else:
        heap_push(world, arrival, event)


def receive(world: World, event: int) -> None:
    """Records that the input of ``event`` has arrived, and wakes the rank that needs this input."""
    stages = len(world.first_ranks)
    total = world.total[0]
    lane = event // total
    whole = event - lane * total
    kind = lane // stages
    stage = lane - kind * stages
    width = world.widths[stage]
    rank = world.first_ranks[stage] + whole % width
    arrive(world.states[rank], kind, stage // len(world.states), whole // width)
    wake(world, rank)


def happen(world: World, event: int, now: int) -> None:
    """Processes ``event`` at the time ``now``: an input arrives, or a computation ends."""
    if event >= 0:
        receive(world, event)
        return
    rank = -1 - event
    wake(world, rank)
    s = world.states[rank]
    slot = world.turn[rank]
    world.turn[rank] = -1
    world.last[rank] = slot
    if world.steps[slot] < world.counts[slot]:
        communicate(world, slot, now)
        return
    code = world.running[slot]
    world.running[slot] = -1
    world.ends[rank][world.indices[slot]] = now
    chunks = s[CHUNKS]
    kind = code // chunks
    chunk = code - kind * chunks
    index = lane_count(s, kind + DONE, chunk)
    finish(s, kind, chunk)
    world.was_filler[rank] = int(kind == W)
    if kind != W:
        item = item_of(s, kind, index)
        send(world, rank, kind, world.stages[rank * chunks + chunk], item, now)


def run(world: World) -> int:
    """Simulates a step from the state in ``world`` to its end.

    Returns ``DONE_ALL``, ``DEADLOCK``, or ``NOT_READY`` plus a rank.
    """
    ranks = len(world.states)
    now = 0
    for rank in range(ranks):
        wake(world, rank)
    while True:
        for woken in range(world.num_woken[0]):
            rank = world.wakes[woken]
            world.waking[rank] = 0
            if world.turn[rank] < 0 and not decide(world, rank, now):
                return NOT_READY + rank
        world.num_woken[0] = 0
        if world.heap_size[0] == 0:
            break
        now = world.heap[0]
        while world.heap_size[0] > 0 and world.heap[0] == now:
            happen(world, heap_pop(world), now)
    for rank in range(ranks):
        if world.states[rank][FINISHED] < world.states[rank][TOTAL]:
            return DEADLOCK
    return DONE_ALL
