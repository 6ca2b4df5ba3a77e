"""Records a rank's waits and messages in a traced step, and why it chose each action."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.policy import Policy, reasons_of
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.trace.trace_format import KINDS, REASONS, SpanRow
from megatron.adaptive.transport.interface import Arrival, Item, Notice

_TRACE_NUMBER = {kind: KINDS.index(kind.value) for kind in ActionKind}
_WAIT, _SEND, _RECEIVE = (KINDS.index(kind) for kind in ("wait", "send", "receive"))
_REASON = {word: number for number, word in enumerate(REASONS)}
_INPUT, _MEMORY, _ORDER, _GROUP = (_REASON[word] for word in ("input", "memory", "order", "group"))
_SEEN = _REASON["seen"]
_FOUND = _REASON["found"]

SHORT_NS = 20_000
"""Minimum duration in nanoseconds of a traced wait for the leader's decision."""


class ActionInput(NamedTuple):
    """Input tensor of an action, with its sender and the time when it arrived.

    Attributes:
        tensor: Input tensor, or ``None`` if the action needs no input from another stage.
        nbytes: Size of the tensor in bytes, or 0 if another stage on this rank computed it.
        peer: Global rank of the sender, or -1 if another stage on this rank computed the tensor.
        arrived_ns: Time when the input arrived, in nanoseconds on the host's monotonic clock. If
            the transport does not report this time, the value is the time when the executor first
            saw the input. The value is 0 if the step is not traced.
        is_exact: Whether ``arrived_ns`` is the actual time of the arrival.
    """

    tensor: torch.Tensor | None = None
    nbytes: int = 0
    peer: int = -1
    arrived_ns: int = 0
    is_exact: bool = True


class AwaitedInput(NamedTuple):
    """Message from another rank without which an action cannot start.

    Attributes:
        waiting: Action that cannot start.
        sender: Global rank that must send the message.
        action: Action that uses the message as its input. It differs from ``waiting`` if the rank
            waits until another stage has acknowledged an output.
        chunk: Chunk of ``sender`` that computes the message.
        item: Index of the microbatch on ``sender``, or of the slice if sequences are cut into
            slices.
    """

    waiting: Action
    sender: int
    action: Action
    chunk: int
    item: int


class LaunchedAction(NamedTuple):
    """Action that has run on the CPU, or was launched on a device.

    Attributes:
        action: Action that was run or launched.
        start: Time mark of the device before the action. On a GPU, this is an event.
        end: Time mark of the device after the action. On a GPU, this is an event.
        nbytes: Number of bytes that the action received from and sent to other ranks.
        held_bytes: Size in bytes of the activations that the rank held during the action.
        queue_depth: Number of arrived inputs that no action had used yet when this action began.
        computed: Time mark of the device before the result was sent to another rank, or ``None`` if
            nothing was sent.
    """

    action: Action
    start: Any
    end: Any
    nbytes: int
    held_bytes: int
    queue_depth: int
    computed: Any = None


class StepLog:
    """Records the waits, the messages and the reasons for choosing actions in one traced step.

    All times are from the host's monotonic clock (:meth:`now_ns`). On a device, the start of an
    action is the time at which it is launched.

    Args:
        policy: Policy that chooses the actions.
        num_chunks: Number of model chunks on the rank.
    """

    def __init__(self, policy: Policy, num_chunks: int) -> None:
        self._policy = policy
        self._num_chunks = num_chunks
        self._rows: list[SpanRow] = []
        # Start of the current wait, or 0 if the rank is not waiting.
        self._since_ns = 0
        self._until_ns = 0
        self._cause = _INPUT
        self._waker = -1
        self._by_group = False  # Whether a notice from another group member ended the wait.

    def now_ns(self) -> int:
        """Returns the current time on the host's monotonic clock, in nanoseconds."""
        return time.monotonic_ns()

    def arrival(self, item: Arrival, *, is_awaited: bool) -> tuple[int, bool]:
        """Returns the arrival time of ``item`` in nanoseconds, and whether it is exact.

        If the transport does not report the arrival time, the result is the current time, which is
        exact only if the executor was waiting for the input (``is_awaited``).
        """
        reported_ns = item.arrived_ns
        return reported_ns or time.monotonic_ns(), is_awaited or reported_ns is not None

    def wait_begins(self, now_ns: int, state: RankState) -> None:
        """Records that the rank begins to wait at ``now_ns``, because no action can start.

        ``state`` shows the cause: missing inputs, the order of actions, or the limit on memory.

        Does nothing if the rank is already waiting.
        """
        if self._since_ns:
            return
        self._since_ns = now_ns
        self._cause = _INPUT
        ready = state.ready()
        if ready:
            fits = any(state.fits(action) for action in ready)
            self._cause = _ORDER if fits else _MEMORY

    def wait_ends(self, item: Item) -> None:
        """Records that ``item`` has arrived, which may allow an action to start."""
        self._until_ns = self.now_ns()
        self._waker = item.peer
        self._by_group = isinstance(item, Notice)

    def decision(self, asked_ns: int, state: RankState) -> None:
        """Records that the leader's decision, which was requested at ``asked_ns``, has arrived."""
        now_ns = self.now_ns()
        if now_ns - asked_ns < SHORT_NS:
            return
        self.wait_begins(asked_ns, state)
        if self._cause == _ORDER:
            # An action was ready on this rank, so only the group caused the wait.
            self._cause = _GROUP
        self._until_ns = now_ns
        self._waker = -1
        self._by_group = True

    def wait_cause(self) -> str:
        """Returns why the rank is waiting, or an empty string if the rank is not waiting."""
        return REASONS[self._cause] if self._since_ns else ""

    def begins(self, action: Action, action_input: ActionInput) -> None:
        """Records that ``action`` starts, which ends the wait for its input, if there was one.

        ``action_input`` describes the input.
        """
        now_ns = self.now_ns()
        peer = action_input.peer
        arrived_ns = action_input.arrived_ns
        kind = _TRACE_NUMBER[action.kind]
        chunk = action.chunk
        microbatch = action.microbatch
        if self._since_ns:
            cause = self._cause
            waker = peer
            if self._by_group and peer >= 0 and arrived_ns <= self._since_ns:
                # The input had arrived on this rank, but not on all members of the group.
                cause = _GROUP
            if peer < 0 or cause == _GROUP:
                waker = self._waker
            self._rows.append(
                SpanRow(
                    kind=_WAIT,
                    chunk=chunk,
                    microbatch=microbatch,
                    piece=action.piece,
                    start_ns=self._since_ns,
                    end_ns=self._until_ns,
                    peer=waker,
                    of=kind,
                    reason=cause,
                )
            )
            self._since_ns = 0
        if peer >= 0:
            reason = _SEEN if action_input.is_exact else _FOUND
            self._rows.append(
                SpanRow(
                    kind=_RECEIVE,
                    chunk=chunk,
                    microbatch=microbatch,
                    start_ns=arrived_ns,
                    end_ns=now_ns,
                    bytes=action_input.nbytes,
                    peer=peer,
                    of=kind,
                    reason=reason,
                )
            )

    def sent(self, action: Action, peer: int, nbytes: int, start_ns: int) -> None:
        """Records that the transport has accepted a message of ``nbytes`` bytes to rank ``peer``.

        ``action`` is the action that uses the message as its input, and ``start_ns`` is the time
        when the send began.
        """
        end_ns = self.now_ns()
        self._rows.append(
            SpanRow(
                kind=_SEND,
                chunk=action.chunk,
                microbatch=action.microbatch,
                start_ns=start_ns,
                end_ns=end_ns,
                bytes=nbytes,
                peer=peer,
                of=_TRACE_NUMBER[action.kind],
            )
        )

    def rows(
        self,
        launched: Sequence[LaunchedAction],
        times: Sequence[tuple[int, int]],
        codes: Sequence[int],
    ) -> list[SpanRow]:
        """Returns the waits, messages and actions of the step as rows for the trace.

        Args:
            launched: Records of the step's actions, in the order in which they started.
            times: Start and end of each action, in nanoseconds.
            codes: Code ``kind * num_chunks + chunk`` of each of these actions, in the same order.
        """
        reasons = reasons_of(self._policy, codes, self._num_chunks)
        for entry, (start_ns, end_ns), reason in zip(launched, times, reasons, strict=True):
            action = entry.action
            self._rows.append(
                SpanRow(
                    kind=_TRACE_NUMBER[action.kind],
                    chunk=action.chunk,
                    microbatch=action.microbatch,
                    piece=action.piece,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    bytes=entry.nbytes,
                    in_flight_bytes=entry.held_bytes,
                    queue_depth=entry.queue_depth,
                    reason=_REASON[reason],
                )
            )
        return self._rows
