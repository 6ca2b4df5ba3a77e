"""What a traced step tells besides the times of its actions: waits, messages, reasons.

The executor makes one per step that is traced and none otherwise, so an untraced step pays a test
for ``None``. Rows are those of ``trace.event``. All times are the host's: on a device the start of
the action that takes a message is the moment it is launched.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.reasons import reasons_of
from megatron.adaptive.schedule.state import RankState
from megatron.adaptive.trace.event import KINDS, REASONS, Row
from megatron.adaptive.transport.interface import Item, Notice

__all__ = ["StepLog"]

_NUMBER = {kind: KINDS.index(kind.value) for kind in ActionKind}
_WAIT, _SEND, _RECEIVE = (KINDS.index(kind) for kind in ("wait", "send", "receive"))
_REASON = {word: number for number, word in enumerate(REASONS)}
_INPUT, _MEMORY, _ORDER, _GROUP = (_REASON[word] for word in ("input", "memory", "order", "group"))
_SEEN, _FOUND = _REASON["seen"], _REASON["found"]

SHORT_NS = 20_000
"""A follower gets every decision from its leader; from here on that is a wait."""


class StepLog:
    """Gathers the rows of one step of one rank.

    Args:
        policy: what picks the actions.
        num_chunks: chunks of the rank.
    """

    __slots__ = (
        "_by_group",
        "_cause",
        "_num_chunks",
        "_policy",
        "_rows",
        "_since_ns",
        "_until_ns",
        "_waker",
    )

    def __init__(self, policy: Policy, num_chunks: int) -> None:
        self._policy = policy
        self._num_chunks = num_chunks
        self._rows: list[Row] = []
        self._since_ns = 0  # of the present wait, 0 if there is none
        self._until_ns = 0
        self._cause = _INPUT
        self._waker = -1
        self._by_group = False  # a member's word ended it

    def wait_begins(self, now_ns: int, state: RankState) -> None:
        """Nothing can start; a wait that nothing came of goes on."""
        if self._since_ns:
            return
        self._since_ns = now_ns
        self._cause = _INPUT
        ready = state.ready()
        if ready:
            fits = any(state.fits(action) for action in ready)
            self._cause = _ORDER if fits else _MEMORY

    def wait_ends(self, now_ns: int, item: Item) -> None:
        """Something arrived, which may let an action start."""
        self._until_ns = now_ns
        self._waker = item.peer
        self._by_group = isinstance(item, Notice)

    def decision(self, asked_ns: int, now_ns: int, state: RankState) -> None:
        """The leader's decision came."""
        if now_ns - asked_ns < SHORT_NS:
            return
        self.wait_begins(asked_ns, state)
        if self._cause == _ORDER:
            self._cause = _GROUP  # this rank could have gone on
        self._until_ns = now_ns
        self._waker = -1
        self._by_group = True

    def present_cause(self) -> str:
        """The cause of the wait that goes on, empty if none does."""
        return REASONS[self._cause] if self._since_ns else ""

    def begins(
        self, action: Action, now_ns: int, peer: int, nbytes: int, arrived_ns: int, is_exact: bool
    ) -> None:
        """An action starts.

        Args:
            action: the action.
            now_ns: now.
            peer: global rank that its input came from, -1 if it came from none.
            nbytes: size of the input.
            arrived_ns: when it arrived, or was found to be there.
            is_exact: which of the two.
        """
        kind, chunk, microbatch = _NUMBER[action.kind], action.chunk, action.microbatch
        if self._since_ns:
            times, cause, waker = (self._since_ns, self._until_ns), self._cause, peer
            if self._by_group and peer >= 0 and arrived_ns <= self._since_ns:
                cause = _GROUP  # the input had been here, but not on all members
            if peer < 0 or cause == _GROUP:
                waker = self._waker
            self._rows.append(
                (_WAIT, chunk, microbatch, action.piece, *times, 0, 0, 0, waker, kind, cause)
            )
            self._since_ns = 0
        if peer >= 0:
            reason = _SEEN if is_exact else _FOUND
            self._rows.append(
                (
                    *(_RECEIVE, chunk, microbatch, 0, arrived_ns, now_ns),
                    *(nbytes, 0, 0, peer, kind, reason),
                )
            )

    def sent(self, of: Action, peer: int, nbytes: int, start_ns: int, end_ns: int) -> None:
        """The transport took a message, the input of ``of`` on ``peer``."""
        kind = _NUMBER[of.kind]
        self._rows.append(
            (_SEND, of.chunk, of.microbatch, 0, start_ns, end_ns, nbytes, 0, 0, peer, kind, 0)
        )

    def rows(
        self,
        done: Sequence[tuple[Action, int, int, int, int, int]],
        codes: Sequence[int],
    ) -> list[Row]:
        """Everything that was noted and every action.

        Args:
            done: per action its start and end, bytes moved, memory held and inputs waiting.
            codes: the actions as ``reasons_of`` takes them.
        """
        words = reasons_of(self._policy, codes, self._num_chunks)
        for (action, start_ns, end_ns, nbytes, held, depth), word in zip(done, words, strict=True):
            self._rows.append(
                (
                    *(_NUMBER[action.kind], action.chunk, action.microbatch, action.piece),
                    *(start_ns, end_ns, nbytes, held, depth, -1, -1, _REASON[word]),
                )
            )
        return self._rows
