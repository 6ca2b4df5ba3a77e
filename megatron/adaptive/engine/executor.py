"""Runs the steps of one pipeline rank, in the order of actions that a policy chooses.

Static schedules and run-time scheduling rules use the same loop::

    policy picks ─> run the action on its chunk ─> send the result to the channel
         ^                                                    │
         └── arrivals of other ranks <── completion queue <───┘

The device executes work some time after the process has launched it. A run-time rule should choose
as late as possible, because more inputs have arrived by then. It therefore chooses only when all
but the last few launched actions have finished.

The executor owns the state of the step, the tensors passed between stages, and the clock. It does
not use megatron-core or process groups: a :class:`Stages` object computes the chunks, and an
``Agreement`` makes the ranks of a decision group run the same actions.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.adaptive.accelerator import CpuClock, CudaClock
from megatron.adaptive.engine.agreement import Agreement
from megatron.adaptive.engine.lanes import Lanes
from megatron.adaptive.engine.step_log import ActionInput, AwaitedInput, LaunchedAction, StepLog
from megatron.adaptive.errors import DeadlineError, PeerLostError, ScheduleError, TransportError
from megatron.adaptive.schedule.action import (
    NUMBER,
    Action,
    ActionKind,
    item_label,
    mirrored,
    place_of,
    with_slices,
)
from megatron.adaptive.schedule.policy import Follow, Policy, actions_of
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.transport.interface import Arrival, Item, Label, Transport, closed_peers

_LAUNCH_AHEAD = 1
"""Minimum number of launched but unfinished actions when a run-time rule chooses an action.

With 0, the device would be idle while the rule chooses.
"""
_AHEAD_NS = 300_000
"""Minimum remaining work of the device, in nanoseconds, when a rule chooses the next action.

With less remaining work, the device would become idle if this thread woke up a few tens of
microseconds late.
"""
_MOST_AHEAD = 8
"""Maximum number of unfinished actions allowed in addition to ``_LAUNCH_AHEAD``."""
_CHECK_S = 1.0
"""Interval in seconds at which a waiting rank checks whether other ranks have closed channels."""


_NO_INPUT = ActionInput()
_OBSERVED = contextlib.nullcontext()
# Looking up a cached ``Action`` is faster than creating a new one.
_input_of = functools.lru_cache(maxsize=1 << 16)(Action)


class Stages(Protocol):
    """Computes the forward and backward passes of a rank's model chunks in one step."""

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Runs the forward pass of a chunk on one microbatch.

        Args:
            chunk: Index of the chunk on this rank, from 0.
            microbatch: Index of the microbatch. Each chunk runs its microbatches in ascending
                order.
            received: Output of the previous stage, or ``None`` on the first stage.

        Returns:
            Tensor for the next stage, or the loss on the last stage.
        """

    def release(self, chunk: int, microbatch: int) -> None:
        """Releases the output of ``chunk`` for ``microbatch`` after it has been sent."""

    def activation_bytes(self, chunk: int, microbatch: int) -> int:
        """Returns the size in bytes of the activations of ``microbatch`` that ``chunk`` keeps."""

    def retained_bytes(self, chunk: int, microbatch: int) -> int:
        """Returns the size in bytes of the tensors that a microbatch keeps for weight gradients."""

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Runs the backward pass of a chunk on one microbatch, and returns the input gradient.

        Weight gradients are also computed, unless they are separate actions (W).

        Args:
            chunk: Index of the chunk on this rank, from 0.
            microbatch: Index of the microbatch. Each chunk runs its microbatches in ascending
                order.
            gradient: Gradient of the chunk's output, or ``None`` on the last stage, where the
                output is the loss.

        Returns:
            Gradient for the previous stage, or ``None`` on the first stage.
        """

    def after_backward(self, chunk: int, microbatch: int) -> None:
        """Runs the remaining work of a backward pass after its input gradient has been sent.

        This work is part of the action (B), but the previous stage does not have to wait for it.
        """

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Computes one part of the weight gradients that the backward pass (B) has deferred.

        Args:
            chunk: Index of the chunk on this rank, from 0.
            microbatch: Index of the microbatch. Each chunk runs its microbatches in ascending
                order.
            piece: Index of the part to compute. The parts of a microbatch are computed in ascending
                order from 0.
            pieces: Number of parts into which the microbatch's weight gradients are split.
        """


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Measured times of one rank in one step.

    Attributes:
        busy_s: Total computing time of all actions in seconds, without the time for sending
            results.
        span_s: Time in seconds from the start of the first action to the end of the last one.
        actions: Actions in execution order, each with its computing time in nanoseconds.
    """

    busy_s: float
    span_s: float
    actions: tuple[tuple[Action, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Progress:
    """Progress of a rank in a step. Codes have the same meaning as in :attr:`Executor.last_codes`.

    Attributes:
        started: Number of actions that have started.
        finished: Number of actions that the device has finished, keyed by code.
        present: Code of the action that the rank is running, or ``None`` if the rank is waiting.
        is_behind: Whether some of the launched actions are still unfinished on the device.
    """

    started: int
    finished: Counter[int]
    present: int | None
    is_behind: bool


class Executor:
    """Runs the steps of one pipeline rank, by executing the actions that a policy chooses.

    Args:
        placement: Assignment of pipeline stages to ranks.
        pp_rank: Pipeline rank of this process.
        transport: Channels for sending tensors to and receiving tensors from other ranks, or
            ``None`` in a pipeline with one rank.
        timeout_s: Maximum time in seconds to wait for an input.
        agreement: Object that makes all ranks of a decision group run the same actions, or ``None``
            for a rank without a group.
        clock: Clock that times actions on the device, or ``None`` for the clock of the host.
        recorder: Recorder that stores traced spans, or ``None`` if tracing is off.
        route: Function that takes a pipeline rank and a microbatch's index on this rank. It returns
            the global rank at that pipeline rank, and the same microbatch's index on that rank.
            ``None`` means that microbatches have the same index on all ranks, and that pipeline
            ranks equal global ranks.
    """

    def __init__(
        self,
        *,
        placement: Placement,
        pp_rank: int,
        transport: Transport | None,
        timeout_s: float,
        agreement: Agreement | None = None,
        clock: CpuClock | CudaClock | None = None,
        recorder: Recorder | None = None,
        route: Callable[[int, int], tuple[int, int]] | None = None,
    ) -> None:
        self._pp_rank = pp_rank
        self._num_chunks = placement.num_chunks
        self._targets = {
            kind: [placement.target_of(kind, pp_rank, n) for n in range(placement.num_chunks)]
            for kind in ActionKind
        }
        self._route = route or (lambda position, microbatch: (position, microbatch))
        self._transport = transport
        self._agreement = agreement or Agreement()
        self._clock: Any = clock or CpuClock()
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._step = -1
        self._is_running = False
        self._decides = True
        self._asks_late = True
        self._placement = placement
        self._state: RankState | None = None
        self._policy: Policy | None = None
        self._early: list[Item] = []
        self._codes: list[int] = []
        self._inputs: dict[Action, ActionInput] = {}
        self._held_bytes = 0
        self._launched: list[LaunchedAction] = []
        self._mean_ns: dict[tuple[ActionKind, int], int] = {}
        self._away: Mapping[Action, Sequence[tuple[Any, Any]]] = {}
        self._log: StepLog | None = None

    def record_to(self, recorder: Recorder | None) -> None:
        """Stores the spans of later actions in ``recorder``. ``None`` stops tracing."""
        self._recorder = recorder

    @property
    def last_codes(self) -> tuple[int, ...]:
        """Returns the codes of the last step's actions, in the order in which the actions started.

        A code is the number of the action's kind times the number of chunks, plus the index of the
        chunk (see ``codes_of``). It does not contain the microbatch or the piece, because these are
        in ascending order within each kind and chunk.
        """
        return tuple(self._codes)

    def snapshot(self) -> dict[str, Any]:
        """Returns the current activity of this rank for status displays.

        This method can be called from any thread, and does not delay the step. If the device has
        not finished some of the launched actions, the result describes the oldest of them, even if
        the program is already waiting for an input.

        Returns:
            Fields of ``trace.status_files.Now``, or an empty dictionary between two steps.
        """
        progress = self._progress()
        return self._activity(progress) if self._is_running else {}

    def _activity(self, progress: _Progress) -> dict[str, Any]:
        """Returns the fields of ``trace.status_files.Now`` that describe ``progress``."""
        kinds = tuple(ActionKind)
        chunks = self._num_chunks
        fields: dict[str, Any] = {"doing": "wait", "held_bytes": self._held_bytes}
        code = progress.present
        if code is not None:
            number, chunk = divmod(code, chunks)
            fields |= {"doing": kinds[number].value, "chunk": chunk}
            # The number of finished W actions is not the index of a microbatch, because a
            # microbatch may have several W actions.
            if kinds[number] is not ActionKind.W:
                fields |= self._item_of(kinds[number], progress.finished[code])
        else:
            fields["cause"] = "" if self._log is None else self._log.wait_cause()
        done = [0] * len(kinds)
        for code, count in progress.finished.items():
            done[code // chunks] += count
        return {**fields, "done": done}

    def _progress(self) -> _Progress:
        """Returns the rank's progress in the current step. Can be called from any thread."""
        codes = tuple(self._codes)
        launched = tuple(self._launched)
        unfinished = [self._code_of(entry.action) for entry in self._unfinished(launched)]
        finished = Counter(self._code_of(entry.action) for entry in launched)
        running = Counter(codes)
        running.subtract(finished)
        finished.subtract(unfinished)
        # The device runs actions in launch order. An action that is still being launched is
        # therefore the current one only if the device has finished all launched actions.
        being_launched = (code for code, count in running.items() if count > 0)
        present = unfinished[0] if unfinished else next(being_launched, None)
        return _Progress(len(codes), finished, present, bool(unfinished))

    def _unfinished(self, launched: Sequence[LaunchedAction]) -> list[LaunchedAction]:
        """Returns the actions in ``launched`` that the device has not finished, oldest first."""
        is_passed = self._clock.is_passed
        if self._away:
            # Actions are listed in the order of their starts, but may end in another order.
            return [entry for entry in launched if not is_passed(entry.end)]
        first = len(launched)
        while first and not is_passed(launched[first - 1].end):
            first -= 1
        return list(launched[first:])

    def _code_of(self, action: Action) -> int:
        """Returns the code of ``action``, as in :attr:`last_codes`."""
        return NUMBER[action.kind] * self._num_chunks + action.chunk

    def _item_of(self, kind: ActionKind, turn: int) -> dict[str, int]:
        """Returns the microbatch of an action, and its slice if sequences are cut into slices.

        ``turn`` is the index of the action among the actions of the same kind and chunk.
        """
        slices = 1 if self._state is None else self._state.num_slices
        if slices == 1:
            return {"microbatch": turn}
        item = turn if kind is ActionKind.F else mirrored(turn, slices)
        position = place_of(item, slices)
        return {"microbatch": position.microbatch, "slice": position.part}

    def evidence(self) -> dict[str, Any]:
        """Returns the state of the executor for a report about a hang (see ``trace.hang_watch``).

        Returns:
            All fields of :meth:`snapshot`, and three more. ``step`` is the index of the step.
            ``finished`` is the number of finished actions, keyed by kind and chunk. ``needs`` lists
            the messages for which this rank waits. Each entry has the global rank of the sender,
            then the kind and chunk of the action that produces the message. The entry also has the
            index of this action among the sender's actions of this kind and chunk, and the
            microbatch as text. Between two steps, the fields are ``step`` and ``finished`` of the
            previous step as long as the device has not finished that step. After that, the only
            field is ``step``, the index of the next step.
        """
        progress = self._progress()
        step = self._step
        state = self._state
        policy = self._policy
        chunks = self._num_chunks
        names = [f"{kind.value}{chunk}" for kind in ActionKind for chunk in range(chunks)]
        finished = {names[code]: count for code, count in progress.finished.items()}
        if not self._is_running or state is None:
            behind = {"step": step, "finished": finished}
            return behind if progress.is_behind else {"step": step + 1}
        fields = self._activity(progress)
        due = policy.order[progress.started :][:1] if isinstance(policy, Follow) else None
        slices = state.num_slices
        needs: list[list[Any]] = []
        for need in self._needs(state):
            if due is not None and need.waiting not in due:
                continue
            kind = need.action.kind
            turn = need.item if kind is ActionKind.F else mirrored(need.item, slices)
            needs.append([need.sender, kind, need.chunk, turn, item_label(need.item, slices)])
        return {**fields, "step": step, "finished": finished, "needs": needs}

    def _needs(self, state: RankState) -> Iterator[AwaitedInput]:
        """Yields the messages from other ranks that the rank's next actions wait for."""
        for waiting in state.lacking():
            action = waiting
            untaken = state.untaken(action)
            if untaken is not None:
                # This rank waits until the next stage acknowledges an output of this rank.
                source = self._placement.target_of(action.kind, self._pp_rank, action.chunk)
                action = untaken
            elif action in self._inputs:
                continue  # The input has arrived on this rank, but not on all members of the group.
            else:
                source = self._placement.source_of(action.kind, self._pp_rank, action.chunk)
            if source is None or source[0] == self._pp_rank:
                continue
            sender, item = self._route(source[0], action.microbatch)
            yield AwaitedInput(waiting, sender, action, source[1], item)

    def run(self, stages: Stages, policy: Policy, state: RankState) -> None:
        """Runs every action of a step exactly once, in the order that ``policy`` chooses.

        Args:
            stages: Object that computes the model chunks of the rank.
            policy: Policy that chooses the actions. All ranks of a decision group must use the same
                policy.
            state: State of this rank at the start of the step, as returned by ``Orders.state``.

        Raises:
            DeadlineError: An input did not arrive within the timeout.
            PeerLostError: A rank that exchanges messages with this rank has exited.
            ScheduleError: The policy chose an action that is not ready.
        """
        self._step += 1
        self._inputs.clear()
        self._launched.clear()
        self._codes.clear()
        self._away = {}
        self._held_bytes = 0
        self._state = state
        self._policy = policy
        self._is_running = True
        recorder = self._recorder
        is_traced = recorder is not None and recorder.is_recording and not state.forward_only
        self._log = StepLog(policy, self._num_chunks) if is_traced else None
        is_static = isinstance(policy, Follow)
        self._agreement.begin(self._step, is_static=is_static)
        self._asks_late = state.beside or not is_static
        self._decides = self._agreement.decides
        early = self._early
        self._early = []
        for item in early:
            self._accept(item, state)
        try:
            self._run_actions(stages, policy, state)
        except TransportError as error:
            if state.num_slices != 1 and error.args:
                text = with_slices(str(error.args[0]), self._step, state.num_slices)
                error.args = (text, *error.args[1:])
            raise
        self._is_running = False

    def _run_actions(self, stages: Stages, policy: Policy, state: RankState) -> None:
        """Runs the actions that the policy chooses, until all actions of the step have finished.

        See :meth:`run` for the arguments.
        """
        if state.beside:
            self._run_in_lanes(stages, policy, state)
            return
        while not state.done:
            action = self._decide(policy, state)
            if action is None:
                self._await_arrival(state)
            else:
                self._perform(action, stages, state)

    def _run_in_lanes(self, stages: Stages, policy: Policy, state: RankState) -> None:
        """Runs a step in which an action can compute while another action communicates.

        See :meth:`run` for the arguments.
        """
        lanes = Lanes(
            functools.partial(self._decide, policy, state),
            lambda action: self._perform(action, stages, state),
            functools.partial(self._await_arrival, state),
            self._clock.mark,
        )
        lanes.run(lambda: state.done)
        self._away = lanes.away
        # Actions may finish in a different order than they started. Reasons and trace records are
        # in the order in which the actions started, so sort the actions by that order.
        started = actions_of(self._codes, self._num_chunks, state.weight_pieces, state.num_slices)
        index_of = {action: index for index, action in enumerate(started)}
        self._launched.sort(key=lambda launched: index_of[launched.action])

    def _decide(self, policy: Policy, state: RankState, may_pass: bool = False) -> Action | None:
        """Chooses the next action with ``policy``, marks the action as started and returns it.

        Returns ``None`` if no action can start, or if ``may_pass`` is true and the action that was
        communicating continues.
        """
        launched = self._launched
        if self._asks_late and not may_pass and len(launched) > (ahead := self._ahead()):
            # Wait until at most `ahead` launched actions are unfinished.
            self._clock.wait(launched[-1 - ahead].end)
        self._drain(state)
        action = self._next_action(policy, state, may_pass=may_pass)
        while action is not None and not state.start(action):
            self._await_input_of(action, policy, state)
        return action

    def _ahead(self) -> int:
        """Returns how many launched actions may be unfinished when a rule chooses the next one.

        Together, these actions should take about ``_AHEAD_NS``, estimated from the previous step.
        """
        ahead = _LAUNCH_AHEAD
        left_ns = _AHEAD_NS
        for launched in self._launched[: -1 - _MOST_AHEAD : -1]:
            action = launched.action
            left_ns -= self._mean_ns.get((action.kind, action.chunk), _AHEAD_NS)
            if left_ns <= 0:
                break
            ahead += 1
        return ahead

    def _await_input_of(self, action: Action, policy: Policy, state: RankState) -> None:
        """Waits until another input arrives, because ``action`` cannot start yet.

        The leader has chosen ``action``, so its input has arrived and only has to be taken from the
        queue. If the action can never start in ``state``, this method raises an error with the name
        of ``policy``.
        """
        if self._decides or not state.is_possible(action):
            raise ScheduleError(
                f"policy {policy.name} picked {action.label(state.num_slices)}, which cannot start "
                f"on rank {self._pp_rank} of the pipeline: {state.why_not(action)}; "
                f"{state.describe()}"
            )
        # The leader chooses an action only after its input has arrived on all members, so the input
        # is in this rank's completion queue.
        self._await_arrival(state)

    def finish_step(self) -> RankTimes:
        """Measures the times of the last step's actions, and adds them to the trace.

        Blocks until the device has finished the step.

        Returns:
            Times of this rank in the step.
        """
        resolve = self._clock.resolve_ns
        if self._launched:
            self._clock.wait(self._launched[-1].end)
        if self._away:
            # An action may end after one that started later, so wait for all of them.
            for launched in self._launched:
                self._clock.wait(launched.end)
        times = []
        durations = []
        for launched in self._launched:
            start_ns = resolve(launched.start)
            computed = launched.computed
            computed_ns = None if computed is None else resolve(computed)
            end_ns = resolve(launched.end)
            times.append((start_ns, end_ns))
            away = self._away.get(launched.action, ())
            away_ns = sum(resolve(until) - resolve(since) for since, until in away)
            whole_ns = (end_ns if computed_ns is None else computed_ns) - start_ns
            durations.append(max(0, whole_ns - away_ns))
        launched_actions = (launched.action for launched in self._launched)
        actions = tuple(zip(launched_actions, durations, strict=True))
        self._mean_ns = _mean_by_chunk(actions)
        log = self._log
        self._log = None
        if self._recorder is not None and log is not None:
            self._recorder.extend(log.rows(self._launched, times, self._codes))
        self._launched.clear()
        return RankTimes(
            busy_s=sum(durations) / 1e9,
            span_s=(times[-1][1] - times[0][0]) / 1e9 if times else 0.0,
            actions=actions,
        )

    def _next_action(
        self, policy: Policy, state: RankState, *, may_pass: bool = False
    ) -> Action | None:
        log = None if self._decides or may_pass else self._log
        asked_ns = 0 if log is None else log.now_ns()
        try:
            action = self._agreement.next_action(policy, state, self._timeout_s, may_pass=may_pass)
        except TransportError as error:
            # If a channel has failed, raise its error, which is more informative than a timeout.
            self._drain(state)
            if isinstance(error, DeadlineError):
                raise DeadlineError(
                    f"{error}; in step {self._step}, rank {self._pp_rank} of the pipeline was also "
                    f"waiting for {state.missing()}"
                ) from error
            raise
        if log is not None:
            log.decision(asked_ns, state)
        return action

    def _perform(self, action: Action, stages: Stages, state: RankState) -> None:
        action_input = self._inputs.pop(action, _NO_INPUT)
        if self._log is not None:
            self._log.begins(action, action_input)
        received = action_input.tensor
        nbytes = action_input.nbytes
        computed = None
        depth = len(self._inputs)
        start = self._clock.mark()
        kind = action.kind
        chunk = action.chunk
        microbatch = action.microbatch
        self._codes.append(self._code_of(action))
        held = self._held_bytes
        if kind is ActionKind.F:
            self._acknowledge(action, received, state)
            output = stages.forward(chunk, microbatch, received)
            if not state.forward_only:
                self._held_bytes += stages.activation_bytes(chunk, microbatch)
                held = self._held_bytes
            state.finish(action)
            sent_bytes, computed = self._hand(action, output, state)
            nbytes += sent_bytes
            stages.release(chunk, microbatch)
        elif kind is ActionKind.B:
            gradient = stages.backward(chunk, microbatch, received)
            self._held_bytes -= stages.activation_bytes(chunk, microbatch)
            if state.weight_pieces:
                self._held_bytes += stages.retained_bytes(chunk, microbatch)
            state.finish(action)
            sent_bytes, computed = self._hand(action, gradient, state)
            nbytes += sent_bytes
            stages.after_backward(chunk, microbatch)
        else:
            stages.weights(chunk, microbatch, action.piece, state.weight_pieces)
            if action.piece == state.weight_pieces - 1:
                self._held_bytes -= stages.retained_bytes(chunk, microbatch)
            state.finish(action)
        self._launched.append(
            LaunchedAction(action, start, self._clock.mark(), nbytes, held, depth, computed)
        )

    def _acknowledge(self, action: Action, received: torch.Tensor | None, state: RankState) -> None:
        """Confirms to the previous stage, if it is frozen, that its output has arrived.

        ``received`` is this output, which is the input of ``action``. A frozen stage waits for this
        message, because it gets no gradient that would show that its output has arrived.
        """
        target = state.acknowledged(action)
        if target is None or received is None:
            return
        rank, chunk = target
        if rank == self._pp_rank:
            state.arrive(ActionKind.B, chunk, action.microbatch)
            return
        peer, microbatch = self._route(rank, action.microbatch)
        label = Label(self._step, _input_of(ActionKind.B, chunk, microbatch), state.num_slices)
        self._send(peer, label, received.new_zeros(1, dtype=torch.uint8))

    def _send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """Sends ``tensor`` with ``label`` to global rank ``peer``."""
        assert self._transport is not None
        try:
            self._transport.send(peer, label, tensor)
        except TransportError as error:
            if not closed_peers(self._transport, [peer]):
                raise
            raise self._closed(f"cannot send {label.name} to rank {peer}", [peer]) from error

    def _closed(self, problem: str, peers: Sequence[int]) -> PeerLostError:
        """Returns the error to raise if ``peers`` have closed their channels during the step.

        ``problem`` is a clause that says what this rank cannot do.
        """
        return PeerLostError(
            f"rank {self._pp_rank} of the pipeline {problem} in step {self._step}, but "
            f"{' and '.join(f'rank {peer}' for peer in peers)} closed the channel, after fewer "
            "steps or because of an error; run the same number of steps on all ranks"
        )

    def _hand(
        self, action: Action, tensor: torch.Tensor | None, state: RankState
    ) -> tuple[int, Any]:
        """Passes ``tensor``, the result of ``action``, to the stage that needs it as an input.

        Returns:
            Number of bytes sent to another rank, and the device's time mark before the send, or
            ``(0, None)`` if nothing was sent.
        """
        kind = action.kind
        target = self._targets[kind][action.chunk]
        # No stage needs these three results: the loss, the input gradient of the first stage, and
        # an input gradient for a frozen stage.
        if target is None or (kind is ActionKind.B and not state.sends_gradient(action.chunk)):
            return 0, None
        if tensor is None:
            raise ScheduleError(
                f"{action.label(state.num_slices)} on rank {self._pp_rank} of the pipeline "
                "returned no gradient for the previous stage; check that its input requires a "
                "gradient"
            )
        rank, chunk = target
        if rank == self._pp_rank:
            self._inputs[_input_of(kind, chunk, action.microbatch)] = ActionInput(tensor.detach())
            state.arrive(kind, chunk, action.microbatch)
            return 0, None
        peer, microbatch = self._route(rank, action.microbatch)
        receiving = _input_of(kind, chunk, microbatch)
        log = self._log
        nbytes = tensor.nbytes
        computed = self._clock.mark()
        start_ns = 0 if log is None else log.now_ns()
        self._send(peer, Label(self._step, receiving, state.num_slices), tensor)
        if log is not None:
            log.sent(receiving, peer, nbytes, start_ns)
        return nbytes, computed

    def _drain(self, state: RankState) -> None:
        if self._transport is None:
            return
        while (item := self._transport.completions.poll()) is not None:
            self._accept(item, state)

    def _await_arrival(self, state: RankState) -> None:
        if self._transport is None:
            raise ScheduleError(
                f"no action can start, and no other rank can send an input: {state.describe()}"
            )
        start_ns = time.monotonic_ns()
        if self._log is not None:
            self._log.wait_begins(start_ns, state)
        item = self._next_item(self._transport, state, start_ns / 1e9 + self._timeout_s)
        if item is None:
            elsewhere = self._agreement.missing()
            raise DeadlineError(
                f"rank {self._pp_rank} of the pipeline waited {self._timeout_s:g} s in step "
                f"{self._step} for {state.missing()}{elsewhere and f' ({elsewhere})'}; check "
                "those ranks, or raise --pipeline-timeout-s"
            )
        if self._log is not None:
            self._log.wait_ends(item)
        self._accept(item, state, is_awaited=True)

    def _next_item(self, transport: Transport, state: RankState, deadline_s: float) -> Item | None:
        """Waits for a message until the time ``deadline_s``. Returns ``None`` if none arrives.

        Raises:
            PeerLostError: A rank that must still send an input of this step has closed its channel.
        """
        closed: list[int] = []
        while True:
            until_s = min(deadline_s, time.monotonic() + _CHECK_S)
            item = transport.completions.wait(until_s)
            if item is not None or until_s == deadline_s:
                return item
            # After a channel has been closed, wait once more before raising an error, because a
            # message that was sent earlier may not be in the queue yet.
            if closed:
                raise self._closed(f"waits for {state.missing()}", closed)
            closed = closed_peers(transport, [need.sender for need in self._needs(state)])

    def _accept(self, item: Item, state: RankState, *, is_awaited: bool = False) -> None:
        step = item.label.step
        action = item.label.action
        if step > self._step:
            # Keep an input of a later step. The sender may be several steps ahead, because there is
            # no barrier between the steps of an evaluation.
            self._early.append(item)
            return
        if isinstance(item, Arrival):
            if step != self._step:
                raise TransportError(
                    f"rank {item.peer} sent {action.label(state.num_slices)} of step {step} to "
                    f"rank {self._pp_rank} of the pipeline, which is in step {self._step}; the "
                    "ranks ran different numbers of steps"
                )
            arrived_ns = 0
            is_exact = True
            if self._log is not None:
                arrived_ns, is_exact = self._log.arrival(item, is_awaited=is_awaited)
            tensor = item.take()
            if not state.is_acknowledgment(action):
                self._inputs[action] = ActionInput(
                    tensor, item.nbytes, item.peer, arrived_ns, is_exact
                )
        elif step != self._step:
            return  # Notices of earlier steps are no longer needed.
        if self._agreement.is_everywhere(item):
            state.arrive(action.kind, action.chunk, action.microbatch)


def _mean_by_chunk(actions: Iterable[tuple[Action, int]]) -> dict[tuple[ActionKind, int], int]:
    """Returns the mean duration of ``actions`` in nanoseconds, keyed by (kind, chunk)."""
    times: dict[tuple[ActionKind, int], list[int]] = {}
    for action, duration_ns in actions:
        times.setdefault((action.kind, action.chunk), []).append(duration_ns)
    return {key: sum(each) // len(each) for key, each in times.items()}


class ActivationMeter:
    """Measures the size of the activations that each chunk keeps for the backward pass.

    This is the total size of the distinct storages that autograd saves in a chunk's first forward
    pass, except those of parameters. Later forward passes are not measured.
    """

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def bytes_of(self, chunk: int) -> int:
        """Returns the activation size of ``chunk`` in bytes per microbatch, or 0 if unknown."""
        return self._bytes.get(chunk, 0)

    def measure(
        self, chunk: int, held: Iterable[torch.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that measures the first forward pass of ``chunk``.

        Args:
            chunk: Index of the chunk on this rank, or another integer that identifies the
                measurement, such as the number of a slice in a chunk.
            held: Tensors that are not counted, such as parameters. The iterable is read after the
                forward pass.
        """
        return _OBSERVED if chunk in self._bytes else self._observe(chunk, held)

    @contextlib.contextmanager
    def _observe(self, chunk: int, held: Iterable[torch.Tensor]) -> Iterator[None]:
        seen: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        for tensor in held:
            seen.pop(tensor.untyped_storage().data_ptr(), None)
        self._bytes[chunk] = sum(seen.values())
