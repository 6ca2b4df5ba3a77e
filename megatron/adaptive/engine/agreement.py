"""Makes all ranks of a decision group run the same actions.

A decision group consists of the ranks that communicate with each other during forward and backward
passes: the tensor- and context-parallel ranks of a stage. With experts, it also contains the
replicas of the stage that exchange tokens (see ``executor_setup.decision_group``). If two of these
ranks ran different actions, they would silently sum values or exchange tokens of different
microbatches. To prevent this, the first rank of the group (the leader) chooses each action and
publishes its choice. The other ranks (followers) read the choice and run the same action. No
collective operation is needed for this.

Each member of a group receives its inputs separately; a replica receives them from a replica of the
previous stage. An input counts as arrived once every member has received it. A group therefore acts
like a single rank of a pipeline, and a slow member delays the whole group. Groups can only deadlock
where a pipeline of single ranks could also deadlock.

The leader chooses among the actions whose input has arrived on all members. Followers report their
inputs to the leader from the thread that received them, even while their executor is running an
action::

    follower   receives input ─ report ──┐                        ┌── next ─ run
                                         v                        │
    leader       receives input ─> completion queue ─ pick ─ publish ─ run

If a leader considered only its own inputs, it could choose an action whose input has not arrived on
a follower. All members would then wait in the first collective operation of this action, although
other actions were ready.

An input from another stage on the same rank is not reported, because all members run the action
that produces this input. Under a static order, no reports and no decisions are sent, because all
ranks know the order. A pipeline with one rank also needs neither, because no inputs arrive from
other ranks.
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

# A follower sends this number to report that it cannot continue. No input is encoded as this
# number.
_LOST = (1 << 63) - 1
# The leader sends this number to announce that no new action starts while the current action
# communicates. No action is encoded as this number, because kinds are numbered from 0 to 2.
_NOTHING = 3 << 30
_FOR_EVER_S = 1e8
_CLOSE_S = 30.0
# Time limit in seconds for reporting that this rank cannot continue. It is short, because the
# reporting thread may be the thread that must stop the process.
_REPORT_S = 1.0


class Agreement:
    """Chooses this rank's next action.

    This base class serves a rank without a decision group: it always runs the action that the
    policy picks. Subclasses make all ranks of a group run the same action. The methods must only be
    called from the executor's thread.
    """

    @property
    def decides(self) -> bool:
        """Returns whether this rank chooses the actions of the current step itself."""
        return True

    def begin(self, step: int, *, is_static: bool) -> None:
        """Starts a step. All members of the group must call this method with the same arguments.

        Args:
            step: Index of the step, higher than in all earlier calls.
            is_static: Whether the policy follows a static order, which is known to all members.
        """

    def is_everywhere(self, item: Item) -> bool:
        """Records that ``item``, an input of this step, has arrived on a member of the group.

        Returns:
            True if the input has now arrived on all members, so that the caller may mark it as
            arrived in the rank's state.

        Raises:
            DeadlineError: The leader did not accept a report within the timeout.
            PeerLostError: A rank of the group has exited.
        """
        return True

    def next_action(
        self, policy: Policy, state: RankState, timeout_s: float, *, may_pass: bool = False
    ) -> Action | None:
        """Returns the next action of this rank.

        On a leader or a rank without a group, the result is ``None`` if no action can start; the
        rank must then wait for an input. On a follower, this method blocks until the leader has
        chosen. The input of the chosen action is then in the follower's completion queue, even if
        it is not marked as arrived in ``state`` yet.

        Args:
            policy: Policy that chooses the action. Followers ignore it, except under a static
                order.
            state: Current state of this rank in the step, which the policy reads.
            timeout_s: Maximum time to wait for the leader's decision, in seconds.
            may_pass: Whether the rank may continue an action that is communicating instead of
                starting a new one. If so, the leader may decide that no new action starts, and all
                members get ``None``.

        Raises:
            DeadlineError: The leader did not choose within ``timeout_s``.
            PeerLostError: A rank of the group has exited.
        """
        return policy.pick(state)

    def missing(self) -> str:
        """Returns the inputs not yet received by all members, as text for error messages.

        The text also names the members on which each input is missing. It is empty if no input is
        missing.
        """
        return ""

    def close(self) -> None:
        """Closes the channels of the group. All members must call this method."""


class Leader(Agreement):
    """Runs on the first rank of a decision group, and decides which actions the group executes.

    One thread per follower reads this follower's reports, and adds a notice for each report to the
    completion queue.

    Args:
        decisions: Channel to which this rank writes its decisions.
        reports: Channels from which this rank reads the followers' reports, keyed by the follower's
            global rank.
        completions: Queue of arrived inputs and notices, on which the executor waits.
        describe: Function that maps a global rank to its name in error messages.
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
        # Each set of members is stored as a bit mask, with one bit per member. The leader's bit is
        # 1.
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
                lacking.setdefault("on this rank", []).append(str(action))
            for rank, bit in self._bits.items():
                if not seen & bit:
                    lacking.setdefault(f"on {self._describe(rank)}", []).append(str(action))
        return ", ".join(
            f"the input of {' '.join(actions)} has not arrived {where}"
            for where, actions in lacking.items()
        )

    def close(self) -> None:
        """Closes the decision channel, and waits until the followers have closed their channels.

        Followers can still read the decisions that were published earlier.

        Raises:
            DeadlineError: A follower did not close its channel within 30 s.
        """
        self._decisions.close()
        end = time.monotonic() + _CLOSE_S
        for rank, thread in self._threads.items():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self._reports[rank].give_up()
                raise DeadlineError(
                    f"{self._describe(rank)}, of the same decision group, did not close its "
                    f"channel within {_CLOSE_S:g} s; it may have failed or be stuck in another "
                    "part of the program"
                )

    def _collect(self, rank: int) -> None:
        """Adds a notice to the completion queue for each report of the follower with rank ``rank``.

        This method runs in a thread until the follower closes its channel.
        """
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
    """Runs the actions that the group's leader chooses, and reports arrived inputs to the leader.

    Args:
        decisions: Channel from which this rank reads the leader's decisions.
        reports: Channel to which this rank writes its reports.
        completions: Queue of arrived inputs. The queue notifies the follower of each added input.
        timeout_s: Maximum time in seconds that a report waits for free space in the channel.
    """

    def __init__(
        self, decisions: Reader, reports: Writer, completions: Completions, timeout_s: float
    ) -> None:
        self._decisions = decisions
        self._reports = reports
        self._completions = completions
        self._timeout_s = timeout_s
        # This lock guards the set of reported inputs. Receiving threads and the executor's thread
        # report inputs, and each input must be reported only once.
        self._lock = threading.Lock()
        self._step = -1
        self._is_static = True
        self._reported: set[Action] = set()
        self._has_ended = False  # True when no more reports can be sent.
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
                "the first rank of the decision group has exited while this rank waits for the "
                "next decision; the ranks ran different numbers of steps"
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
        """Reports that the input ``item`` has been added to the completion queue."""
        try:
            if isinstance(item, Exception):
                self._report_loss()
            else:
                self._report(item.label)
                return
        except AdaptiveError as error:
            self._completions.put(error)
        if not self._is_closed:
            # Wake the executor, which may be waiting for a decision. The executor then gets the
            # error from the completion queue.
            self._decisions.give_up()

    def _report(self, label: Label) -> None:
        with self._lock:
            # Skip an input of a later step. The executor reports the input when that step begins.
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
        """Reports to the leader that this rank cannot continue. Gives up after 1 s."""
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
    """Connects this rank to its decision group and returns the leader or follower object.

    The first rank in ``members`` becomes the leader. All ranks in ``members`` must call this
    function.

    Args:
        group: Gloo process group of the members, which must not be used for anything else.
        members: Global ranks of the group's members, in ascending order.
        rank: Global rank of this process.
        completions: Queue of this rank's arrived inputs.
        timeout_s: Maximum time in seconds for sending a report.
        describe: Function that maps a global rank to its name in error messages.
        module: C++ extension that provides the shared memory if all members are on one node,
            otherwise ``None``.
    """
    writer, readers = make_channels(group, members, rank, describe, module)
    if rank == members[0]:
        return Leader(writer, readers, completions, describe)
    (decisions,) = readers.values()
    return Follower(decisions, writer, completions, timeout_s)


def encode(action: Action, extra: int) -> int:
    """Encodes ``action`` and ``extra`` in 63 bits. The inverse function is :func:`decode`.

    In a decision, ``extra`` is the index of the action's piece. In a report, ``extra`` is the index
    of the step.

    Raises:
        ScheduleError: The chunk, microbatch, piece or step is too large to be encoded.
    """
    chunk = action.chunk
    microbatch = action.microbatch
    if chunk >> 10 or microbatch >> 20 or extra >> 31:
        raise ScheduleError(
            f"{action} cannot be encoded for a decision group; use at most 1024 chunks and "
            "1048576 microbatches, and fewer than 2^31 steps and pieces"
        )
    return extra << 32 | NUMBER[action.kind] << 30 | chunk << 20 | microbatch


def decode(number: int) -> tuple[ActionKind, int, int, int]:
    """Decodes ``number``, a result of :func:`encode`, into (kind, chunk, microbatch, extra)."""
    return KINDS[number >> 30 & 3], number >> 20 & 0x3FF, number & 0xFFFFF, number >> 32
