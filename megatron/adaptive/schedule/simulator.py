"""The event loop of the simulator, as plain functions over numbers; compiled by ``compiled``.

An event is the end of an action, a communication within one, or the arrival of an action's input.
All that happens at one moment is known before anyone decides. Times are whole picoseconds.

``rule`` stands for the policy: whoever runs this module puts the real one in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.adaptive.schedule.rank_kernel import (
    BESIDE,
    CHUNKS,
    DONE,
    FINISHED,
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
    lane_count,
    lanes,
    start,
)

DONE_ALL, DEADLOCK, NOT_READY = 0, 1, 2
"""Results of ``run``; ``NOT_READY`` plus the rank whose policy picked what cannot start."""


class World(NamedTuple):
    """Everything about one simulated step; lists for plain Python, ``int64`` arrays compiled.

    Attributes:
        states: per rank, its numbers (see ``machine``).
        hints: per rank, its order as codes, or empty.
        stages: ``[rank * chunks + chunk]``, the stage.
        where: per stage, its first rank.
        widths: per stage, its ranks, which take microbatches in turn (see ``unequal``).
        total: number of microbatches of the whole step, which are those below.
        durations: ``[kind][stage][microbatch]``, flat, kinds F, B, W.
        exchanges: the part of each F and B that is communication within a stage, likewise.
        cuts: per stage, the pieces that this part of an F or B comes in; 0 for none.
        delays: latency of each action's message, ``[F or B][stage][microbatch]``, flat.
        occupancy: ``[from * ranks + to]``, how long a message keeps its link busy.
        free: ``[from * ranks + to]``, when the link is free again.
        heap, heap_size: the events, each a time and a code: that a rank has computed up to an end
            or to a communication is ``-1 - rank``, an arrival the index of its action in
            ``durations``. Room for one per rank and one per message.
        turn: per rank the place that computes, -1 for none. A rank has two, its number and that
            plus ``ranks``: an action may run in one while that in the other communicates.
        last: per rank, the place that computed last.
        was_filler: per rank, 1 if its last action was a weight gradient.
        waking: per rank, 1 if something happened to it and it has not decided since.
        wakes, num_woken: these ranks, in the order in which it happened, and their number.
        link: per rank, when communication within its stages is over.
        running: per place, the code that runs, -1 for none.
        works, exchanged, counts, steps, due, at: per place, the action's picoseconds, those of them
            that are communication, number of communications, how many were started, when the last
            of them is over, and the action's index in ``codes``.
        codes, starts, ends: out, per rank, its actions in the order they ran.
    """

    states: list[list[int]]
    hints: list[Sequence[int]]
    stages: list[int]
    where: list[int]
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
    at: list[int]
    codes: list[list[int]]
    starts: list[list[int]]
    ends: list[list[int]]


def rule(s: State, hint: Sequence[int]) -> int:
    """Stands for the policy's choice."""
    raise NotImplementedError


def heap_push(world: World, time: int, code: int) -> None:
    """Add an event to the heap, whose nodes have four children each, side by side."""
    heap, at = world.heap, world.heap_size[0]
    world.heap_size[0] = at + 1
    while at > 0:
        parent = (at - 1) // 4
        if heap[2 * parent] <= time:
            break
        heap[2 * at] = heap[2 * parent]
        heap[2 * at + 1] = heap[2 * parent + 1]
        at = parent
    heap[2 * at] = time
    heap[2 * at + 1] = code


def heap_pop(world: World) -> int:
    """Take the earliest event out of the heap and return its code."""
    heap, earliest = world.heap, world.heap[1]
    last = world.heap_size[0] - 1
    world.heap_size[0] = last
    time, code = heap[2 * last], heap[2 * last + 1]
    at = 0
    while 4 * at + 1 < last:
        child = 4 * at + 1
        least = heap[2 * child]
        for other in range(child + 1, min(child + 4, last)):
            if heap[2 * other] < least:
                child = other
                least = heap[2 * other]
        if least >= time:
            break
        heap[2 * at] = least
        heap[2 * at + 1] = heap[2 * child + 1]
        at = child
    heap[2 * at] = time
    heap[2 * at + 1] = code
    return earliest


def wake(world: World, rank: int) -> None:
    """Let a rank decide before time goes on."""
    if world.waking[rank] == 0:
        world.waking[rank] = 1
        world.wakes[world.num_woken[0]] = rank
        world.num_woken[0] += 1


def whole_of(world: World, rank: int, stage: int, microbatch: int) -> int:
    """A rank's microbatch as the whole step counts it."""
    return microbatch * world.widths[stage] + rank - world.where[stage]


def work_of(world: World, rank: int, kind: int, chunk: int, stage: int) -> int:
    """Picoseconds of the chunk's next action of that kind."""
    s = world.states[rank]
    stages, total, pieces = len(world.where), world.total[0], s[PIECES]
    index = lane_count(s, kind, chunk)
    piece = 0
    if kind == W:
        piece = index % pieces
        index //= pieces
    at = stage * total + whole_of(world, rank, stage, index)
    work = world.durations[kind * stages * total + at]
    if kind == W:
        return work * (piece + 1) // pieces - work * piece // pieces
    if kind == B and pieces == 0:
        work += world.durations[W * stages * total + at]
    return work


def go_on(world: World, place: int, now: int) -> None:
    """Let an action compute up to its next communication or its end."""
    rank = place % len(world.states)
    step, count = world.steps[place], world.counts[place]
    compute = world.works[place] - world.exchanged[place]
    if step < count:
        compute = compute * (step + 1) // count - compute * step // count
    elif count > 0:
        compute = 0
    world.turn[rank] = place
    heap_push(world, max(now, world.due[place]) + compute, -1 - rank)


def communicate(world: World, place: int, now: int) -> None:
    """Start an action's next communication; those of a rank share one link."""
    rank = place % len(world.states)
    step, count, exchange = world.steps[place], world.counts[place], world.exchanged[place]
    world.link[rank] = max(world.link[rank], now)
    world.link[rank] += exchange * (step + 1) // count - exchange * step // count
    world.due[place] = world.link[rank]
    world.steps[place] = step + 1


def decide(world: World, rank: int, now: int) -> bool:
    """Say who computes next, a new action if the policy picks one; False if that is not ready."""
    s, ranks = world.states[rank], len(world.states)
    place = world.last[rank]
    other = (place + ranks) % (2 * ranks)
    waits = world.running[other] >= 0
    # A weight gradient fills one communication, then the turn goes back.
    if waits and (world.running[place] >= 0 or world.was_filler[rank]):
        go_on(world, other, now)
        return True
    word = rule(s, world.hints[rank])
    if word < 0:
        if waits:
            go_on(world, other, now)
        elif world.running[place] >= 0:
            go_on(world, place, now)
        return True
    chunks = s[CHUNKS]
    code = word % lanes(s)
    kind = code // chunks
    chunk = code - kind * chunks
    if not is_ready(s, kind, chunk):
        return False
    if world.running[place] >= 0:
        place = other
    stage = world.stages[rank * chunks + chunk]
    work = work_of(world, rank, kind, chunk, stage)
    world.works[place] = work
    world.exchanged[place] = 0
    world.counts[place] = 0
    if s[BESIDE] == 1 and kind != W:
        at = (kind * len(world.where) + stage) * world.total[0]
        at += whole_of(world, rank, stage, lane_count(s, kind, chunk))
        world.exchanged[place] = world.exchanges[at]
        world.counts[place] = world.cuts[stage]
    world.steps[place] = 0
    world.due[place] = 0
    at = s[STARTED]
    world.at[place] = at
    world.codes[rank][at] = word
    world.starts[rank][at] = now
    world.running[place] = code
    start(s, kind, chunk)
    go_on(world, place, now)
    return True


def send(world: World, rank: int, kind: int, stage: int, microbatch: int, now: int) -> None:
    """Hand the result of a forward or backward on to the stage that needs it."""
    stages, ranks, total = len(world.where), len(world.states), world.total[0]
    to = stage + 1 if kind == F else stage - 1
    if to < 0 or to >= stages:
        return
    whole = whole_of(world, rank, stage, microbatch)
    event = (kind * stages + to) * total + whole
    target = world.where[to] + whole % world.widths[to]
    at = now
    if rank != target:
        link = rank * ranks + target
        at = max(now, world.free[link]) + world.occupancy[link]
        world.free[link] = at
        at += world.delays[(kind * stages + stage) * total + whole]
    if at == now:
        receive(world, event)
    else:
        heap_push(world, at, event)


def receive(world: World, event: int) -> None:
    """Take note of an arrival."""
    stages, total = len(world.where), world.total[0]
    lane = event // total
    whole = event - lane * total
    kind = lane // stages
    stage = lane - kind * stages
    width = world.widths[stage]
    rank = world.where[stage] + whole % width
    arrive(world.states[rank], kind, stage // len(world.states), whole // width)
    wake(world, rank)


def happen(world: World, event: int, now: int) -> None:
    """Take note of an event."""
    if event >= 0:
        receive(world, event)
        return
    rank = -1 - event
    wake(world, rank)
    s = world.states[rank]
    place = world.turn[rank]
    world.turn[rank] = -1
    world.last[rank] = place
    if world.steps[place] < world.counts[place]:
        communicate(world, place, now)
        return
    code = world.running[place]
    world.running[place] = -1
    world.ends[rank][world.at[place]] = now
    chunks = s[CHUNKS]
    kind = code // chunks
    chunk = code - kind * chunks
    microbatch = lane_count(s, kind + DONE, chunk)
    finish(s, kind, chunk)
    world.was_filler[rank] = int(kind == W)
    if kind != W:
        send(world, rank, kind, world.stages[rank * chunks + chunk], microbatch, now)


def run(world: World) -> int:
    """Run a step to its end; returns ``DONE_ALL``, ``DEADLOCK`` or ``NOT_READY`` plus a rank."""
    ranks = len(world.states)
    now = 0
    for rank in range(ranks):
        wake(world, rank)
    while True:
        for at in range(world.num_woken[0]):
            rank = world.wakes[at]
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
