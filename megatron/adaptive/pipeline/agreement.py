"""One decision per tensor- and context-parallel group.

Ranks of such a group meet in collectives inside every layer: two of them on different actions would
add up numbers of different microbatches without any error. So the first rank of the group decides
and publishes, the others read and do the same. Nobody waits for a collective.

::

    leader    pick ─ publish ─ run     pick ─ publish ─ run
                        │                       │
    follower          next ─ input? ─ run     next ─ input? ─ run

The leader looks at its own inputs only. A follower's copy comes from a rank that follows the same
order, so it is there or on its way, and waiting for it cannot deadlock.

A static order needs no agreement: all ranks know it.
"""

from __future__ import annotations

import datetime
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.adaptive.errors import DeadlineError, PeerLostError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.policy import Follow, Policy
from megatron.adaptive.schedule.state import RankState

_KINDS = tuple(ActionKind)


class Agreement(Protocol):
    """Says what this rank does next."""

    def next_action(self, policy: Policy, state: RankState, timeout_s: float) -> Action | None:
        """Return the next action of this rank.

        A leader (or a rank alone) gets ``None`` when nothing can start and must wait for an
        arrival. A follower blocks until the leader has decided; the action it gets may still lack
        its input.

        Raises:
            DeadlineError: the leader did not decide within ``timeout_s``.
            PeerLostError: a member of the group is gone.
        """

    def close(self) -> None:
        """Free what the group shares."""


class Alone:
    """A group of one rank: the policy decides."""

    def next_action(self, policy: Policy, state: RankState, timeout_s: float) -> Action | None:
        """See :class:`Agreement`."""
        return policy.pick(state)

    def close(self) -> None:
        """See :class:`Agreement`."""


class Board(Protocol):
    """Where a leader publishes numbers and followers read them, each in the same order."""

    def publish(self, value: int, timeout_s: float) -> None:
        """Leader only: append a value."""

    def next(self, timeout_s: float) -> int:
        """Followers only: the next value, waited for."""

    def close(self) -> None:
        """Leader and followers: let go of it."""


class Led:
    """A group whose first rank decides.

    Args:
        board: where decisions are published.
        is_leader: whether this rank decides.
    """

    def __init__(self, board: Board, *, is_leader: bool) -> None:
        self._board = board
        self._is_leader = is_leader

    def next_action(self, policy: Policy, state: RankState, timeout_s: float) -> Action | None:
        """See :class:`Agreement`."""
        if isinstance(policy, Follow):
            return policy.pick(state)
        if not self._is_leader:
            return _decode(self._board.next(timeout_s))
        action = policy.pick(state)
        if action is not None:
            self._board.publish(_encode(action), timeout_s)
        return action

    def close(self) -> None:
        """See :class:`Agreement`."""
        self._board.close()


class SharedMemoryBoard:
    """A board in shared memory, for a group on one node; needs the C++ extension.

    Args:
        log: the extension's writer on the leader, its reader on a follower.
        is_leader: whether ``log`` is the writer.
        describe: names the group's leader in errors.
    """

    def __init__(self, log: Any, *, is_leader: bool, describe: str) -> None:
        self._log = log
        self._is_leader = is_leader
        self._describe = describe

    def publish(self, value: int, timeout_s: float) -> None:
        """See :class:`Board`."""
        self._log.publish(value, timeout_s)

    def next(self, timeout_s: float) -> int:
        """See :class:`Board`."""
        try:
            return int(self._log.next(timeout_s))
        except DeadlineError as error:
            raise DeadlineError(f"no decision of {self._describe}: {error}") from error

    def close(self) -> None:
        """See :class:`Board`. Followers still read what was published before."""
        if self._is_leader:
            self._log.close()


class MessageBoard:
    """A board of small gloo messages, for groups across nodes or without the extension.

    Args:
        group: a gloo group of the members, used by nothing else; rank 0 in it leads.
    """

    _SLOTS = 8

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._count = 0
        self._sent: list[list[tuple[Any, torch.Tensor]]] = []

    def publish(self, value: int, timeout_s: float) -> None:
        """See :class:`Board`."""
        message = torch.tensor([value], dtype=torch.int64)
        tag = self._tag()
        self._sent.append(
            [
                (self._group.send([message], member, tag), message)
                for member in range(1, self._group.size())
            ]
        )
        if len(self._sent) == self._SLOTS:
            self._wait_for_oldest(timeout_s)

    def next(self, timeout_s: float) -> int:
        """See :class:`Board`."""
        message = torch.empty(1, dtype=torch.int64)
        try:
            work = self._group.recv([message], 0, self._tag())
            work.wait(datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PeerLostError(
                f"no decision of the first rank of the tensor-parallel group within {timeout_s:g} "
                f"s: {str(error).splitlines()[0]}"
            ) from error
        return int(message)

    def close(self) -> None:
        """See :class:`Board`."""
        while self._sent:
            self._wait_for_oldest(30.0)

    def _tag(self) -> int:
        self._count += 1
        return self._count % self._SLOTS

    def _wait_for_oldest(self, timeout_s: float) -> None:
        for work, _ in self._sent.pop(0):
            try:
                work.wait(datetime.timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise PeerLostError(
                    "a member of the tensor-parallel group did not take a decision within "
                    f"{timeout_s:g} s: {str(error).splitlines()[0]}"
                ) from error


def _encode(action: Action) -> int:
    return _KINDS.index(action.kind) << 56 | action.chunk << 32 | action.microbatch


def _decode(value: int) -> Action:
    return Action(_KINDS[value >> 56], value >> 32 & 0xFFFFFF, value & 0xFFFFFFFF)
