"""Makes all ranks that communicate inside forwards and backwards run the same actions.

Such a decision group consists of the tensor- and context-parallel ranks of a stage. With experts it
also contains the replicas of the stage that exchange tokens (see
``executor_setup.decision_group``). Two of them on different actions would add up numbers of
different microbatches, or exchange their tokens, without any error. So the first rank of the group
decides and publishes its decision, and the others read it and do the same. Nobody waits for a
collective.

Each member receives its own inputs; those of replicas come from replicas of the stage before. The
members of a group on one stage correspond to a group on every other stage. So a group acts like one
rank of a pipeline, whose inputs arrive when the last member has them. A slow member delays its
group, and no deadlock is possible that one rank could not have.

The leader decides from the inputs that all members have: it marks an input in its state once the
input has arrived on every member. Followers report their inputs from the thread that received them,
whatever their executor is doing::

    follower   receives input ─ report ──┐                        ┌── next ─ run
                                         v                        │
    leader       receives input ─> completion queue ─ pick ─ publish ─ run

If a leader looked at its own inputs only, it could pick an action whose input a follower lacks. All
members would then wait in the first collective of this action, though others were ready.

An input from another stage on the same rank needs no report, because all members hand it over in
the same action. A static order needs no agreement and no reports, because all ranks know it. A
pipeline of one rank needs none either: without inputs, all members pick the same actions.
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

# Message of a follower that cannot continue; no label has this number.
_LOST = (1 << 63) - 1
# Message of a leader that nothing starts during a communication; no action has this kind.
_NOTHING = 3 << 30
_FOR_EVER_S = 1e8
_CLOSE_S = 30.0
# This limit is short because the thread that reports a loss may be the one that ends the process.
_REPORT_S = 1.0


class Agreement:
    """Chooses the next action of this rank; this base class serves a group of one rank.

    Its policy decides. Only the executor's thread calls the methods.
    """

    @property
    def decides(self) -> bool:
        """Returns whether this rank picks the actions of this step, from its own state."""
        return True

    def begin(self, step: int, *, is_static: bool) -> None:
        """Starts a step, the same one on all members.

        Args:
            step: Number of the step, ascending.
            is_static: True if the policy follows an order that all members know.
        """

    def is_everywhere(self, item: Item) -> bool:
        """Records an input that arrived in this step, here or on another member.

        Returns:
            True if all members have this input, so that the state may mark it as arrived.

        Raises:
            DeadlineError: The leader did not accept a report within the time limit.
            PeerLostError: A member of the group is gone.
        """
        return True

    def next_action(
        self, policy: Policy, state: RankState, timeout_s: float, *, may_pass: bool = False
    ) -> Action | None:
        """Returns the next action of this rank.

        A leader, or a rank alone, gets ``None`` if nothing can start; it must then wait for an
        arrival. A follower blocks until the leader has decided. The input of its action is already
        in its completion queue, but may not be marked in its state yet.

        Args:
            policy: Policy that picks the action if this rank decides.
            state: State of this rank.
            timeout_s: Time limit in seconds for a decision of the leader.
            may_pass: True if another action communicates now and can continue instead. Then "no
                action" is a decision as well, and all members get ``None``.

        Raises:
            DeadlineError: The leader did not decide within ``timeout_s``.
            PeerLostError: A member of the group is gone.
        """
        return policy.pick(state)

    def missing(self) -> str:
        """Describes inputs that only some members have, and names the others.

        Empty if there are none.
        """
        return ""

    def close(self) -> None:
        """Frees the channels of the group; every member must call it."""


class Leader(Agreement):
    """Decides for a group, as its first rank.

    One thread per follower turns the reports of the follower into notices in the completion queue.

    Args:
        decisions: Channel for the decisions.
        reports: Channel of the reports of each follower, by its global rank.
        completions: Queue that the executor waits for.
        describe: Function that returns how error messages name a rank.
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
        # Each member has a bit for the set of members that have an input; the leader has bit 1.
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
            message = _NOTHING if action is None else encode(action, action.piece)
            self._decisions.publish(message, timeout_s)
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
            f"not {where} yet: the input of {' '.join(actions)}"
            for where, actions in lacking.items()
        )

    def close(self) -> None:
        """Implements :class:`Agreement`. Followers still read earlier decisions.

        Raises:
            DeadlineError: A follower did not close within 30 s.
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
        """Runs in a thread: passes on the reports of one follower until it closes its channel."""
        reader = self._reports[rank]
        try:
            while (message := reader.next(_FOR_EVER_S)) is not None:
                if message == _LOST:
                    raise PeerLostError(
                        f"{self._describe(rank)}, of the same decision group, lost its "
                        "channel to another stage"
                    )
                kind, chunk, microbatch, step = decode(message)
                label = Label(step, Action(kind, chunk, microbatch))
                self._completions.put(Notice(label, rank))
            reader.close()
        except Exception as error:
            self._completions.put(error)


class Follower(Agreement):
    """Follows the decisions of the leader of its group, and reports its inputs to it.

    Args:
        decisions: Channel of the decisions.
        reports: Channel for the reports.
        completions: Queue of arriving inputs, which the follower listens to.
        timeout_s: Time limit in seconds for a report that waits for room.
    """

    def __init__(
        self, decisions: Reader, reports: Writer, completions: Completions, timeout_s: float
    ) -> None:
        self._decisions = decisions
        self._reports = reports
        self._completions = completions
        self._timeout_s = timeout_s
        # Receiving threads and the executor's thread report inputs; each input is reported once.
        self._lock = threading.Lock()
        self._step = -1
        self._is_static = True
        self._reported: set[Action] = set()
        self._has_ended = False  # no more reports
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
        message = self._decisions.next(timeout_s)
        if message is None:
            raise PeerLostError(
                "the first rank of the decision group has ended, while this one waits for "
                "its next decision; the ranks ran different numbers of steps"
            )
        return None if message == _NOTHING else Action(*decode(message))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if not self._has_ended:
                self._reports.close()
            self._has_ended = True
        self._decisions.close()

    def _hear(self, item: Item | Exception) -> None:
        """Reports an item of the completion queue; runs in the thread that put it there."""
        try:
            if isinstance(item, Exception):
                self._report_loss()
            else:
                self._report(item.label)
                return
        except AdaptiveError as error:
            self._completions.put(error)
        if not self._is_closed:
            # Wakes the executor, which then reads the error from its queue.
            self._decisions.give_up()

    def _report(self, label: Label) -> None:
        with self._lock:
            # The executor reports an arrival of a later step once that step begins.
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
        """Reports to the leader that this rank cannot continue, unless that takes more than 1 s."""
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
    """Returns this rank's side of the agreement; the first member leads.

    Collective over ``members``.

    Args:
        group: Process group (see
            :func:`~megatron.adaptive.engine.decision_channel.make_channels`).
        members: Global ranks of the group, ascending.
        rank: Global rank of this process.
        completions: Queue of this rank's inputs.
        timeout_s: Time limit of a report, in seconds.
        describe: Function that returns how error messages name a rank.
        module: C++ extension if all members are on one node, else ``None``.
    """
    writer, readers = make_channels(group, members, rank, describe, module)
    if rank == members[0]:
        return Leader(writer, readers, completions, describe)
    (decisions,) = readers.values()
    return Follower(decisions, writer, completions, timeout_s)


def encode(action: Action, extra: int) -> int:
    """Returns an action, with its piece or its step, as a number of 63 bits.

    Raises:
        ScheduleError: A chunk, microbatch, piece or step is too large for the number.
    """
    chunk = action.chunk
    microbatch = action.microbatch
    if chunk >> 10 or microbatch >> 20 or extra >> 31:
        raise ScheduleError(
            f"{action} cannot be agreed on by a decision group: use at most 1024 chunks and "
            "1048576 microbatches, and fewer than 2^31 steps and pieces"
        )
    return extra << 32 | NUMBER[action.kind] << 30 | chunk << 20 | microbatch


def decode(number: int) -> tuple[ActionKind, int, int, int]:
    """Returns kind, chunk, microbatch, and piece or step of a number made by :func:`encode`."""
    return KINDS[number >> 30 & 3], number >> 20 & 0x3FF, number & 0xFFFFF, number >> 32
