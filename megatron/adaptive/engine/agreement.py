"""One decision for all ranks that meet inside forwards and backwards.

Such a decision group holds the tensor- and context-parallel ranks of a stage and, with experts, its
replicas that trade tokens (see ``build.decision_group``). Two of them on different actions would
add up numbers of different microbatches, or trade their tokens, without any error. So the first
rank of the group decides and publishes, the others read and do the same. Nobody waits for a
collective.

Each member has inputs of its own: those of replicas come from replicas of the stage before. What is
one group on a stage is one on every other, so that a group as a whole is one rank of a pipeline
whose inputs arrive when the last member has them: a slow member delays its group, and nothing can
deadlock that could not with one rank.

The leader decides on what is there for all: its state learns that an input has arrived once it has
arrived on every member. Followers report theirs, from the thread that received it, whatever their
executor is doing::

    follower   receives input ─ report ──┐                        ┌── next ─ run
                                         v                        │
    leader       receives input ─> completion queue ─ pick ─ publish ─ run

A leader that looked at its own inputs only could pick an action that a follower has no input for,
and all of them would wait in the action's first collective while others were ready.

An input from another stage on the same rank needs no report: members hand it over within the same
decision. A static order needs no agreement: all ranks know it, and nothing is reported. Nor does a
pipeline of one rank: without inputs, all members pick alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron.adaptive.engine.decision_channel import Describe, Reader, Writer, make_channels
from megatron.adaptive.errors import AdaptiveError, DeadlineError, PeerLostError, ScheduleError
from megatron.adaptive.schedule.action import KINDS, NUMBER, Action, ActionKind
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.transport.interface import Arrival, Completions, Item, Label, Notice

# Word of a follower that cannot go on; no label has this number.
_LOST = (1 << 63) - 1
# Word of a leader that nothing starts beside what communicates; no action has this kind.
_NOTHING = 3 << 30
_FOR_EVER_S = 1e8
_CLOSE_S = 30.0
# The thread that reports a loss may be the one that ends this process.
_REPORT_S = 1.0


class Agreement:
    """Says what this rank does next; here, for a group of one rank, whose policy decides.

    All methods are for the executor's thread.
    """

    @property
    def decides(self) -> bool:
        """Whether actions of this step are picked here, from this rank's own state."""
        return True

    def begin(self, step: int, *, is_static: bool) -> None:
        """Start a step, the same on all members.

        Args:
            step: its number, ascending.
            is_static: the policy follows an order that all members know.
        """

    def is_everywhere(self, item: Item) -> bool:
        """Take note of what arrived in this step, here or on another member.

        Returns:
            Whether the state may take that input now.

        Raises:
            DeadlineError: the leader took no report within the time limit.
            PeerLostError: a member of the group is gone.
        """
        return True

    def next_action(
        self, policy: Policy, state: RankState, timeout_s: float, *, may_pass: bool = False
    ) -> Action | None:
        """Return the next action of this rank.

        A leader (or a rank alone) gets ``None`` when nothing can start and must wait for an
        arrival. A follower blocks until the leader has decided; the input of the action it gets is
        in its completion queue, but the state may not have taken it.

        Args:
            policy: picks the action, where this rank does.
            state: this rank's own.
            timeout_s: limit of the wait for a decision.
            may_pass: an action under way communicates, and goes on where nothing starts beside it:
                that is a decision as well, on which all members get ``None``.

        Raises:
            DeadlineError: the leader did not decide within ``timeout_s``.
            PeerLostError: a member of the group is gone.
        """
        return policy.pick(state)

    def missing(self) -> str:
        """Inputs that only some members have, with the others' names; empty where there is none."""
        return ""

    def close(self) -> None:
        """Free what the group shares; every member must do so."""


class Leader(Agreement):
    """The first rank of a group, which decides.

    A thread per follower turns its reports into notices in the completion queue.

    Args:
        decisions: where decisions are published.
        reports: by follower's global rank, where its reports come from.
        completions: the queue that the executor waits in.
        describe: names a rank in errors.
    """

    def __init__(
        self,
        decisions: Writer,
        reports: Mapping[int, Reader],
        completions: Completions,
        describe: Describe,
    ) -> None:
        self._decisions = decisions
        self._reports = reports
        self._completions = completions
        self._describe = describe
        self._is_static = False
        # Who has an input, as a set of bits: the leader's is 1.
        self._bits = {rank: 2 << number for number, rank in enumerate(reports)}
        self._everyone = (2 << len(reports)) - 1
        self._seen: dict[Action, int] = {}
        self._threads = {
            rank: threading.Thread(
                target=self._collect, args=(rank,), name=f"reports-of-{rank}", daemon=True
            )
            for rank in reports
        }
        for thread in self._threads.values():
            thread.start()

    def begin(self, step: int, *, is_static: bool) -> None:
        self._is_static = is_static
        self._seen.clear()

    def is_everywhere(self, item: Item) -> bool:
        if self._is_static:
            return True
        action = item.label.action
        bit = 1 if isinstance(item, Arrival) else self._bits[item.peer]
        seen = self._seen.get(action, 0) | bit
        if seen != self._everyone:
            self._seen[action] = seen
            return False
        self._seen.pop(action, None)
        return True

    def next_action(
        self, policy: Policy, state: RankState, timeout_s: float, *, may_pass: bool = False
    ) -> Action | None:
        action = policy.pick(state)
        if (may_pass or action is not None) and not self._is_static:
            word = _NOTHING if action is None else encode(action, action.piece)
            self._decisions.publish(word, timeout_s)
        return action

    def missing(self) -> str:
        lacking: dict[str, list[str]] = {}
        for action, seen in self._seen.items():
            if not seen & 1:
                lacking.setdefault("here", []).append(str(action))
            for rank, bit in self._bits.items():
                if not seen & bit:
                    lacking.setdefault(f"on {self._describe(rank)}", []).append(str(action))
        return ", ".join(
            f"not {place} yet: the input of {' '.join(actions)}"
            for place, actions in lacking.items()
        )

    def close(self) -> None:
        """Implements :class:`Agreement`. Followers still read what was published before.

        Raises:
            DeadlineError: a follower did not close within 30 s.
        """
        self._decisions.close()
        end = time.monotonic() + _CLOSE_S
        for rank, thread in self._threads.items():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self._reports[rank].give_up()
                raise DeadlineError(
                    f"{self._describe(rank)}, of the same decision group, did not close "
                    f"within {_CLOSE_S:g} s; did it stop elsewhere?"
                )

    def _collect(self, rank: int) -> None:
        """Body of a thread: pass on one follower's reports until it closes."""
        reader = self._reports[rank]
        try:
            while (word := reader.next(_FOR_EVER_S)) is not None:
                if word == _LOST:
                    raise PeerLostError(
                        f"{self._describe(rank)}, of the same decision group, lost its "
                        "channel to another stage"
                    )
                kind, chunk, microbatch, step = decode(word)
                label = Label(step, Action(kind, chunk, microbatch))
                self._completions.put(Notice(label, rank))
            reader.close()
        except Exception as error:
            self._completions.put(error)


class Follower(Agreement):
    """A rank that does what the leader of its group decides, and reports its inputs.

    Args:
        decisions: where decisions come from.
        reports: where its reports go.
        completions: where its inputs arrive; the follower listens there.
        timeout_s: limit of a report that waits for room.
    """

    def __init__(
        self, decisions: Reader, reports: Writer, completions: Completions, timeout_s: float
    ) -> None:
        self._decisions = decisions
        self._reports = reports
        self._completions = completions
        self._timeout_s = timeout_s
        # Of receiving threads and the executor's: what is reported, and that it is so only once.
        self._lock = threading.Lock()
        self._step = -1
        self._is_static = True
        self._reported: set[Action] = set()
        self._has_ended = False  # nothing is reported any more
        self._is_closed = False
        completions.listen(self._hear)

    @property
    def decides(self) -> bool:
        return self._is_static

    def begin(self, step: int, *, is_static: bool) -> None:
        with self._lock:
            self._step = step
            self._is_static = is_static
            self._reported.clear()

    def is_everywhere(self, item: Item) -> bool:
        if not self._is_static:
            self._report(item.label)
        return True

    def next_action(
        self, policy: Policy, state: RankState, timeout_s: float, *, may_pass: bool = False
    ) -> Action | None:
        if self._is_static:
            return policy.pick(state)
        word = self._decisions.next(timeout_s)
        if word is None:
            raise PeerLostError(
                "the first rank of the decision group has ended, while this one waits for "
                "its next decision; the ranks ran different numbers of steps"
            )
        return None if word == _NOTHING else Action(*decode(word))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if not self._has_ended:
                self._reports.close()
            self._has_ended = True
        self._decisions.close()

    def _hear(self, item: Item | Exception) -> None:
        """Report what was put into the completion queue; runs in the thread that put it."""
        try:
            if isinstance(item, Exception):
                self._report_loss()
            else:
                self._report(item.label)
                return
        except AdaptiveError as error:
            self._completions.put(error)
        if not self._is_closed:
            self._decisions.give_up()  # wakes the executor, which finds the error in its queue

    def _report(self, label: Label) -> None:
        with self._lock:
            # An arrival of a later step is reported by the executor, once it is there.
            skip = self._has_ended or self._is_static or label.step != self._step
            if skip or label.action in self._reported:
                return
            self._reported.add(label.action)
            try:
                self._reports.publish(encode(label.action, label.step), self._timeout_s)
            except AdaptiveError:
                self._has_ended = True
                raise

    def _report_loss(self) -> None:
        """Reports to the leader that this rank cannot go on, if that is quickly done."""
        if not self._lock.acquire(timeout=_REPORT_S):
            return
        try:
            if not self._has_ended:
                self._has_ended = True
                self._reports.publish(_LOST, _REPORT_S)
        finally:
            self._lock.release()


def connect(
    group: dist.ProcessGroup,
    members: Sequence[int],
    rank: int,
    completions: Completions,
    timeout_s: float,
    describe: Describe,
    module: Any = None,
) -> Leader | Follower:
    """Make a member's side of the agreement; the first member leads. Collective over ``members``.

    Args:
        group: see :func:`~megatron.adaptive.engine.decision_channel.make_channels`.
        members: global ranks of the group, ascending.
        rank: this one.
        completions: where this rank's inputs arrive.
        timeout_s: limit of a report.
        describe: names a rank in errors.
        module: the extension, where all members are on one node.
    """
    writer, readers = make_channels(group, members, rank, describe, module)
    if rank == members[0]:
        return Leader(writer, readers, completions, describe)
    (decisions,) = readers.values()
    return Follower(decisions, writer, completions, timeout_s)


def encode(action: Action, rest: int) -> int:
    """Return an action and the piece or step that belongs to it as a number of 63 bits.

    Raises:
        ScheduleError: there are more chunks, microbatches, pieces or steps than it can say.
    """
    chunk, microbatch = action.chunk, action.microbatch
    if chunk >> 10 or microbatch >> 20 or rest >> 31:
        raise ScheduleError(
            f"{action} cannot be agreed on by a decision group: use at most 1024 chunks and "
            "1048576 microbatches, and fewer than 2^31 steps and pieces"
        )
    return rest << 32 | NUMBER[action.kind] << 30 | chunk << 20 | microbatch


def decode(word: int) -> tuple[ActionKind, int, int, int]:
    """Return kind, chunk, microbatch and the rest of what :func:`encode` took."""
    return KINDS[word >> 30 & 3], word >> 20 & 0x3FF, word & 0xFFFFF, word >> 32
