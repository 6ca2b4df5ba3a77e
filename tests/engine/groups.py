"""Simulates random pipelines whose ranks are groups of processes that differ in speed.

Several processes (expert parallel times tensor parallel) form a pipeline rank. They are the members
of its decision group, which must run the same actions in the same order. Each member gets its
inputs at different times. All members synchronize in the exchanges of data within forward and
backward passes.

The state, the policies and both sides of the agreement are the code that the executor uses. Only
channels and clocks are simulated. Run as a program, this module simulates ten thousand pipelines:
``python -m tests.engine.groups [CASES]``.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron.adaptive.engine.agreement import Agreement, Follower, Leader, decode
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.catalog import make_policies, placement_for, splits_backward
from megatron.adaptive.schedule.policy import Follow, Policy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.transport.interface import CompletionQueue, HeldArrival, Label, Notice

RULES = ("adaptive", "adaptive", "adaptive", "dfc", "bfc", "hinted")
FIXED = ("combined-1f1b", "dualpipe-v", "interleaved", "zb-v", "1f1b")
_NOTHING = torch.zeros(0)


class Line:
    """Simulated channel through which the processes of a pipeline rank agree on actions."""

    def __init__(self, deliver: Callable[[int], None] = lambda word: None) -> None:
        self.words: deque[int] = deque()
        self._deliver = deliver

    def publish(self, value: int, timeout_s: float) -> None:
        self._deliver(value)

    def next(self, timeout_s: float) -> int | None:
        return self.words.popleft() if self.words else None

    def give_up(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Case:
    """Random pipeline to simulate.

    Attributes:
        placement: Assignment of pipeline stages to ranks.
        size: Number of members in the group of each pipeline rank.
        name: Name of the schedule or policy.
        microbatches: Number of microbatches in the step.
        pieces: Number of W actions per weight gradient, or 0 if backward passes are not split.
        cap: Limit on the activations that a rank holds, or ``None`` if the schedule has a fixed
            order.
        beside: Whether an action may start while another action of the same rank communicates.
        exchanges: Number of exchanges in each forward and backward pass.
        slow: Factor by which actions of the last member of each group take longer.
    """

    placement: Placement
    size: int
    name: str
    microbatches: int
    pieces: int
    cap: float | None
    beside: bool
    exchanges: int
    slow: float


def random_case(rng: random.Random) -> Case:
    """Returns a random pipeline. The numbers are drawn with ``rng``."""
    ranks = rng.randint(2, 5)
    if rng.random() < 0.8:
        name = rng.choice(RULES)
        placement = Placement(
            num_ranks=ranks, num_chunks=rng.choice([1, 2, 2, 3]), kind=rng.choice(["loop", "v"])
        )
        microbatches, cap = rng.randint(1, 6), rng.choice([1.0, rng.uniform(1, 3), 10.0])
        pieces = rng.choice([0, 1, 3])
    else:
        name = rng.choice(FIXED)
        placement = placement_for(name, ranks, 1 if name == "1f1b" else 2)
        microbatches, cap, pieces = 2 * ranks, None, int(splits_backward(name))
    return Case(
        placement=placement,
        size=rng.choice([1, 2, 2, 4]) * rng.choice([1, 1, 2]),
        name=name,
        microbatches=microbatches,
        pieces=pieces,
        cap=cap,
        beside=rng.random() < 0.6,
        exchanges=rng.choice([0, 1, 2, 4]),
        slow=rng.choice([1.0, 1.3, 5.0]),
    )


@dataclass
class Meeting:
    """Exchange between the members of a group. It ends after all members have begun it."""

    actions: set[str] = field(default_factory=set)
    count: int = 0
    over: float | None = None
    waiting: list[Member] = field(default_factory=list)


@dataclass
class Member:
    """Simulated process that is a member of the group of a pipeline rank."""

    rank: int
    state: RankState
    policy: Policy
    agreement: Agreement
    completions: CompletionQueue
    decisions: Line
    pace: float
    resume: Callable[[], None] = lambda: None
    is_waiting: bool = False
    met: int = 0  # Number of exchanges that the member has begun.
    last_word: float = 0.0
    taken: list[str] = field(default_factory=list)

    @property
    def has_word(self) -> bool:
        """Whether the member can choose its next action without waiting for the group's leader."""
        return self.agreement.decides or bool(self.decisions.words)


Steps = Generator[float | None, None, Any]
"""Generator that runs a member. It yields delays, or ``None`` to wait for another event."""


class World:
    """Simulates one step of a random pipeline with events in simulated time."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        self.case, self.rng, self.now = case, rng, 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.meetings: dict[tuple[int, int], Meeting] = {}
        self.errors: list[str] = []
        policies = make_policies(
            case.name, case.placement, case.microbatches, cap=case.cap, weight_pieces=case.pieces
        )
        ranks = range(case.placement.num_ranks * case.size)
        self.members = [self._member(rank, policies[rank // case.size]) for rank in ranks]
        for member in self.members:
            member.agreement.begin(0, is_static=isinstance(member.policy, Follow))
            steps = self._steps(member)
            self._at(rng.random(), partial(self._resume, member, steps))
            member.resume = partial(self._resume, member, steps)

    def run(self) -> str:
        """Simulates the step. Returns a description of the failure, or an empty string."""
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()
        size = self.case.size
        self.errors += [
            f"rank {member.rank} used a different order than its leader"
            for member in self.members
            if member.state.done and member.taken != self.members[member.rank // size * size].taken
        ]
        if self.errors:
            return f"disagreement: {self.errors[0]} in {self.case}"
        stuck = [member.rank for member in self.members if not member.state.done]
        return f"deadlock: ranks {stuck} in {self.case}" if stuck else ""

    def _member(self, rank: int, policy: Policy) -> Member:
        case = self.case
        pp_rank, tp_rank = divmod(rank, case.size)
        first, last = pp_rank * case.size, (pp_rank + 1) * case.size
        queue, decisions, agreement = CompletionQueue(), Line(), Agreement()
        if tp_rank:
            reports = Line(lambda word: self._report(first, rank, word))
            agreement = Follower(decisions, reports, queue, 1.0)
        elif case.size > 1:
            published = Line(lambda word: self._publish(range(first + 1, last), word))
            agreement = Leader(
                published, {peer: Line() for peer in range(first + 1, last)}, queue, str
            )
        state = RankState(
            placement=case.placement,
            rank=pp_rank,
            num_microbatches=case.microbatches,
            cap=case.cap,
            weight_pieces=case.pieces,
            beside=case.beside,
        )
        pace = case.slow if tp_rank == case.size - 1 else 1.0
        return Member(rank, state, policy, agreement, queue, decisions, pace)

    # The following methods simulate the channels between members.

    def _at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.numbers), event))

    def _delay(self) -> float:
        return self.rng.choice([0.0, 0.05, 3.0]) * self.rng.random()

    def _report(self, leader: int, rank: int, word: int) -> None:
        kind, chunk, microbatch, step = decode(word)
        notice = Notice(Label(step, Action(kind, chunk, microbatch)), rank)
        self._at(self._delay(), partial(self._arrive, leader, notice))

    def _publish(self, followers: range, word: int) -> None:
        for member in (self.members[rank] for rank in followers):
            # A later message to a member must not overtake an earlier one.
            member.last_word = max(member.last_word, self.now + self._delay())
            event = partial(self._hear, member, word)
            heapq.heappush(self.events, (member.last_word, next(self.numbers), event))

    def _hear(self, member: Member, word: int) -> None:
        member.decisions.words.append(word)
        self._wake(member)

    def _arrive(self, rank: int, item: HeldArrival | Notice) -> None:
        self.members[rank].completions.put(item)
        self._wake(self.members[rank])

    # The following methods simulate the members of the groups.

    def _resume(self, member: Member, steps: Steps) -> None:
        delay = next(steps, -1.0)
        if delay is None:
            member.is_waiting = True
        elif delay >= 0:
            self._at(delay, partial(self._resume, member, steps))

    def _wake(self, member: Member) -> None:
        if member.is_waiting:
            member.is_waiting = False
            self._at(0.0, member.resume)

    def _steps(self, member: Member) -> Steps:
        """Runs the actions of ``member`` like the executor, in two lanes that take turns.

        A lane runs one action at a time. While its action communicates, the other lane may run.
        """
        state, beside = member.state, self.case.beside
        here: tuple[Action, int, Meeting | None] | None = None
        other: tuple[Action, int, Meeting | None] | None = None
        while not state.done:
            if here is None:
                action = yield from self._decide(member, may_pass=other is not None)
                if action is None:
                    here, other = other, None
                    continue
                while not state.start(action):
                    assert not member.agreement.decides, str(action)
                    assert state.is_possible(action), str(action)
                    yield None
                    self._drain(member)
                member.taken.append(str(action))
                here = action, 0, None
            action, step, meeting = here
            if meeting is not None:
                while meeting.over is None:
                    meeting.waiting.append(member)
                    yield None
                yield max(0.0, meeting.over - self.now)
            yield self.rng.random() * member.pace
            if action.kind is not ActionKind.W and step < self.case.exchanges:
                here = action, step + 1, self._meet(member, f"{action} for the {step}.")
                if beside:
                    here, other = other, here
                continue
            state.finish(action)
            self._send(member, action)
            here = None
            if action.kind is ActionKind.W:
                here, other = other, None

    def _decide(self, member: Member, *, may_pass: bool) -> Steps:
        while True:
            self._drain(member)
            if member.has_word:
                action = member.agreement.next_action(
                    member.policy, member.state, 1.0, may_pass=may_pass
                )
                if action is not None or may_pass:
                    return action
            yield None

    def _drain(self, member: Member) -> None:
        while (item := member.completions.poll()) is not None:
            if member.agreement.is_everywhere(item):
                action = item.label.action
                member.state.arrive(action.kind, action.chunk, action.microbatch)

    def _meet(self, member: Member, action: str) -> Meeting:
        """Begins the next exchange of ``member``. All members must pass the same ``action``."""
        meeting = self.meetings.setdefault((member.rank // self.case.size, member.met), Meeting())
        member.met += 1
        meeting.actions.add(action)
        meeting.count += 1
        if len(meeting.actions) > 1:
            self.errors.append(f"{sorted(meeting.actions)} time meet")
        if meeting.count == self.case.size:
            meeting.over = self.now + self.rng.random()
            for other in meeting.waiting:
                self._wake(other)
        return meeting

    def _send(self, member: Member, action: Action) -> None:
        size, state = self.case.size, member.state
        target = self.case.placement.target_of(action.kind, state.rank, action.chunk)
        if target is None:
            return
        to, chunk = target
        if to == state.rank:
            state.arrive(action.kind, chunk, action.microbatch)
            return
        label = Label(0, Action(action.kind, chunk, action.microbatch))
        message = HeldArrival(label, member.rank, 0, lambda: _NOTHING)
        self._at(self._delay(), partial(self._arrive, to * size + member.rank % size, message))


def failures(cases: int, seed: int = 1) -> list[str]:
    """Simulates ``cases`` random pipelines. Returns a description of each pipeline that failed."""
    failed = []
    for number in range(cases):
        rng = random.Random(f"{seed}-{number}")
        if wrong := World(random_case(rng), rng).run():
            failed.append(f"case {number}: {wrong}")
    return failed


if __name__ == "__main__":
    wrong = failures(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
    print("\n".join(wrong[:10]), f"{len(wrong)} went wrong", sep="\n")
    sys.exit(bool(wrong))
