"""Runs one step of one pipeline rank in the order that its policy picks.

A static schedule and a run-time rule go through the same loop::

    policy picks ─> run the action on its chunk ─> hand the result to the channel
         ^                                                    │
         └── arrivals of other ranks <── completion queue <───┘

A device runs behind the process that launches work on it. A run-time rule is therefore asked late,
when all but the last few launched actions are done: it then knows what has arrived meanwhile.

The executor owns the state of the step, the tensors between stages and the clock; it knows neither
megatron-core nor any process group. What a chunk computes is a :class:`Stages` object, how ranks of
one decision group keep together is an ``Agreement``.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from megatron.adaptive.accelerator import CpuClock, CudaClock
from megatron.adaptive.engine.agreement import Agreement
from megatron.adaptive.engine.lanes import Lanes
from megatron.adaptive.errors import DeadlineError, ScheduleError, TransportError
from megatron.adaptive.schedule.action import NUMBER, Action, ActionKind
from megatron.adaptive.schedule.policy import Follow, Policy, actions_of, reasons_of
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.trace_format import KINDS, REASONS, SpanRow
from megatron.adaptive.transport.interface import Arrival, Item, Label, Notice, Transport

_LAUNCH_AHEAD = 1
"""Least actions that a run-time rule may have unfinished on the device when it is asked for the
next one; 0 would leave the device idle while it decides."""
_AHEAD_NS = 300_000
"""Work that the device has left when the rule is asked, in short actions: a thread that sleeps for
a device wakes tens of microseconds later, and has to decide and to launch before the work ends."""
_MOST_AHEAD = 8


class ActionInput(NamedTuple):
    """The tensor that an action takes, and where it came from.

    Attributes:
        tensor: the tensor, ``None`` where the action takes none.
        nbytes: its size, 0 where it did not leave the rank.
        peer: global rank of its sender, -1 for this one.
        arrived_ns: when it arrived, or was found to be there; 0 in a step that is not traced.
        is_exact: whether it is the former.
    """

    tensor: torch.Tensor | None = None
    nbytes: int = 0
    peer: int = -1
    arrived_ns: int = 0
    is_exact: bool = True


class LaunchedAction(NamedTuple):
    """An action that was run, or launched on a device.

    Attributes:
        action: the action.
        start, end: marks of the clock.
        nbytes: bytes received and sent.
        held_bytes: activations of the rank while it ran.
        queue_depth: inputs of other actions that were there.
    """

    action: Action
    start: Any
    end: Any
    nbytes: int
    held_bytes: int
    queue_depth: int


_NO_INPUT = ActionInput()
_OBSERVED = contextlib.nullcontext()
# The same objects each time: to make one takes longer than to find it.
_input_of = functools.lru_cache(maxsize=1 << 16)(Action)


class Stages(Protocol):
    """The chunks of one rank during one step."""

    def forward(self, chunk: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Run the forward of a chunk.

        Args:
            chunk: local chunk.
            microbatch: microbatch; ascending per chunk.
            received: output of the stage before, ``None`` on the first stage.

        Returns:
            The tensor for the next stage (the loss on the last).
        """

    def release(self, chunk: int, microbatch: int) -> None:
        """The output of that forward is with the transport: its memory may go."""

    def activation_bytes(self, chunk: int, microbatch: int) -> int:
        """Bytes that a microbatch's forward of the chunk keeps for its backward."""

    def retained_bytes(self, chunk: int, microbatch: int) -> int:
        """Bytes of them that a split backward leaves for the weight gradient."""

    def backward(
        self, chunk: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run the backward of a chunk: the whole one, or by inputs only if backwards are split.

        Args:
            chunk: local chunk.
            microbatch: microbatch; ascending per chunk.
            gradient: gradient of the chunk's output, ``None`` on the last stage.

        Returns:
            The gradient for the stage before, ``None`` on the first stage.
        """

    def weights(self, chunk: int, microbatch: int, piece: int, pieces: int) -> None:
        """Compute a part of the weight gradients that a split backward left.

        Args:
            chunk: local chunk.
            microbatch: microbatch; ascending per chunk.
            piece: which part, ascending from 0.
            pieces: number of parts.
        """


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Times of one rank in one step.

    Attributes:
        busy_s: seconds within actions.
        span_s: seconds from its first action's start to its last one's end.
        actions: what ran, in order, with its nanoseconds.
    """

    busy_s: float
    span_s: float
    actions: tuple[tuple[Action, int], ...] = ()


class Executor:
    """Runs the steps of one pipeline rank.

    Args:
        placement: where stages live.
        pp_rank: this rank's position in the pipeline.
        route: global rank and microbatch there, of a position in the pipeline and a microbatch
            here; the same two where left out.
        transport: channels to the other ranks, ``None`` for a pipeline of one rank.
        agreement: keeps the ranks of a decision group on one order; a rank alone where left
            out.
        clock: takes the times of the trace; the host's where left out.
        recorder: where spans go, ``None`` for no trace.
        timeout_s: limit of every wait for an input.
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
        self._away_ns: Mapping[Action, int] = {}
        self._log: StepLog | None = None

    @property
    def last_codes(self) -> tuple[int, ...]:
        """The actions of the last step in the order they were started, as ``codes_of`` says them.

        Microbatches and pieces ascend within a chunk, so that codes say everything.
        """
        return tuple(self._codes)

    def snapshot(self) -> dict[str, Any]:
        """Returns what this rank does in its step, for another thread; costs the step nothing.

        Returns:
            Fields of ``trace.status_files.Now``, none between two steps.
        """
        codes, launched = tuple(self._codes), tuple(self._launched)
        if not self._is_running:
            return {}
        finished = len(launched)
        if launched and not self._clock.is_passed(launched[-1].end):
            finished -= 1  # the device is at it
        kinds, chunks = tuple(ActionKind), self._num_chunks
        fields: dict[str, Any] = {"doing": "wait", "held_bytes": self._held_bytes}
        if len(codes) > finished:
            number, chunk = divmod(codes[-1], chunks)
            fields |= {"doing": kinds[number].value, "chunk": chunk}
            if kinds[number] is not ActionKind.W:  # that one comes in pieces
                fields["microbatch"] = codes.count(codes[-1]) - 1
        else:
            fields["cause"] = "" if self._log is None else self._log.wait_cause()
        done = [code // chunks for code in codes[:finished]]
        return {**fields, "done": [done.count(number) for number in range(len(kinds))]}

    def evidence(self) -> dict[str, Any]:
        """Returns more of the same for who looks why a job stands still, see ``trace.hang_watch``.

        Returns:
            ``snapshot()``, and ``step``; ``finished``, actions by kind and chunk; ``needs``, the
            messages that would let this rank go on, each as global rank of the sender and kind,
            chunk and microbatch of its action. Between two steps nothing but the next step.
        """
        fields, state, policy = self.snapshot(), self._state, self._policy
        if not fields or state is None:
            return {"step": self._step + 1}
        codes, chunks, kinds = tuple(self._codes), self._num_chunks, tuple(ActionKind)
        names = [f"{kind.value}{chunk}" for kind in kinds for chunk in range(chunks)]
        finished = {name: codes.count(code) for code, name in enumerate(names) if code in codes}
        if fields["doing"] != "wait" and codes and names[codes[-1]] in finished:
            finished[names[codes[-1]]] -= 1
        next_one = policy.order[len(codes) :][:1] if isinstance(policy, Follow) else None
        needs = [
            [(at := self._route(source[0], action.microbatch))[0], action.kind, source[1], at[1]]
            for action in state.lacking()
            if next_one is None or action in next_one
            if action not in self._inputs  # it lacks on another member of the decision group
            if (source := self._placement.source_of(action.kind, self._pp_rank, action.chunk))
            and source[0] != self._pp_rank
        ]
        return {**fields, "step": self._step, "finished": finished, "needs": needs}

    def run(self, stages: Stages, policy: Policy, state: RankState) -> None:
        """Run one step: every action of ``state`` once, in the order ``policy`` picks.

        Args:
            stages: the rank's chunks.
            policy: picks the order; ranks of one decision group must pass equal ones.
            state: a fresh state of this rank.

        Raises:
            DeadlineError: an input did not arrive within the time limit.
            PeerLostError: a neighbour is gone.
            ScheduleError: the policy picked an action that is not ready.
        """
        self._step += 1
        self._inputs.clear()
        self._launched.clear()
        self._codes.clear()
        self._away_ns = {}
        self._held_bytes = 0
        self._state, self._policy = state, policy
        self._is_running = True
        recorder = self._recorder
        is_traced = recorder is not None and recorder.is_recording and not state.forward_only
        self._log = StepLog(policy, self._num_chunks) if is_traced else None
        is_static = isinstance(policy, Follow)
        self._agreement.begin(self._step, is_static=is_static)
        self._asks_late = state.beside or not is_static
        self._decides = self._agreement.decides
        early, self._early = self._early, []
        for item in early:
            self._accept(item, state)
        if state.beside:
            self._run_in_lanes(stages, policy, state)
            self._is_running = False
            return
        while not state.done:
            action = self._decide(policy, state)
            if action is None:
                self._await_arrival(state)
            else:
                self._perform(action, stages, state)
        self._is_running = False

    def _run_in_lanes(self, stages: Stages, policy: Policy, state: RankState) -> None:
        """Run a step whose actions may start beside others that communicate."""
        lanes = Lanes(
            functools.partial(self._decide, policy, state),
            lambda action: self._perform(action, stages, state),
            functools.partial(self._await_arrival, state),
        )
        lanes.run(lambda: state.done)
        self._away_ns = lanes.away_ns
        # Reasons and records list actions as they began.
        begun = actions_of(self._codes, self._num_chunks, state.weight_pieces)
        places = {action: place for place, action in enumerate(begun)}
        self._launched.sort(key=lambda one: places[one.action])

    def _decide(self, policy: Policy, state: RankState, may_pass: bool = False) -> Action | None:
        """Starts the next action; ``None`` where there is none, or one under way goes on."""
        launched = self._launched
        if self._asks_late and not may_pass and len(launched) > (ahead := self._ahead()):
            self._clock.wait(launched[-1 - ahead].end)  # the device catches up
        self._drain(state)
        action = self._next_action(policy, state, may_pass=may_pass)
        while action is not None and not state.start(action):
            self._await_input_of(action, policy, state)
        return action

    def _ahead(self) -> int:
        """Returns how many launched actions may be unfinished when the policy is asked again.

        These are as many as fill ``_AHEAD_NS``, by their times in the last step.
        """
        ahead, left_ns = _LAUNCH_AHEAD, _AHEAD_NS
        for launched in self._launched[: -1 - _MOST_AHEAD : -1]:
            action = launched.action
            left_ns -= self._mean_ns.get((action.kind, action.chunk), _AHEAD_NS)
            if left_ns <= 0:
                break
            ahead += 1
        return ahead

    def _await_input_of(self, action: Action, policy: Policy, state: RankState) -> None:
        """Wait for an arrival, before an action that was decided on but is not ready here."""
        if self._decides or not state.is_possible(action):
            raise ScheduleError(
                f"policy {policy.name} picked {action} on rank {self._pp_rank} of the "
                f"pipeline, which cannot start: {state.why_not(action)}; "
                f"{state.describe()}"
            )
        self._await_arrival(state)  # the leader knows that it has arrived

    def finish_step(self) -> RankTimes:
        """Hand the spans of the last step to the recorder. Blocks until the device has finished it.

        Returns:
            How long the rank worked and how long the step took it.
        """
        resolve = self._clock.resolve_ns
        if self._launched:
            self._clock.wait(self._launched[-1].end)
        times = [(resolve(one.start), resolve(one.end)) for one in self._launched]
        durations = [end - start for start, end in times]
        if self._away_ns:
            away = [self._away_ns.get(one.action, 0) for one in self._launched]
            durations = [max(0, whole - part) for whole, part in zip(durations, away, strict=True)]
        actions = tuple(zip((one.action for one in self._launched), durations, strict=True))
        self._mean_ns = _mean_by_chunk(actions)
        log, self._log = self._log, None
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
            self._drain(state)  # a channel that failed says more than the group's silence
            if isinstance(error, DeadlineError):
                raise DeadlineError(
                    f"{error}; rank {self._pp_rank} of the pipeline, in step {self._step}, itself "
                    f"waits for {state.missing()}"
                ) from error
            raise
        if log is not None:
            log.decision(asked_ns, state)
        return action

    def _perform(self, action: Action, stages: Stages, state: RankState) -> None:
        given = self._inputs.pop(action, _NO_INPUT)
        if self._log is not None:
            self._log.begins(action, given)
        received, nbytes = given.tensor, given.nbytes
        depth = len(self._inputs)
        start = self._clock.mark()
        kind, chunk, microbatch = action.kind, action.chunk, action.microbatch
        self._codes.append(NUMBER[kind] * self._num_chunks + chunk)
        held = self._held_bytes
        if kind is ActionKind.F:
            output = stages.forward(chunk, microbatch, received)
            if not state.forward_only:
                self._held_bytes += stages.activation_bytes(chunk, microbatch)
                held = self._held_bytes
            state.finish(action)
            nbytes += self._hand(action, output, state)
            stages.release(chunk, microbatch)
        elif kind is ActionKind.B:
            gradient = stages.backward(chunk, microbatch, received)
            self._held_bytes -= stages.activation_bytes(chunk, microbatch)
            if state.weight_pieces:
                self._held_bytes += stages.retained_bytes(chunk, microbatch)
            state.finish(action)
            nbytes += self._hand(action, gradient, state)
        else:
            stages.weights(chunk, microbatch, action.piece, state.weight_pieces)
            if action.piece == state.weight_pieces - 1:
                self._held_bytes -= stages.retained_bytes(chunk, microbatch)
            state.finish(action)
        self._launched.append(
            LaunchedAction(action, start, self._clock.mark(), nbytes, held, depth)
        )

    def _hand(self, of: Action, tensor: torch.Tensor | None, state: RankState) -> int:
        """Gives the result of ``of`` to the stage that takes it; returns bytes that leave here."""
        kind = of.kind
        target = self._targets[kind][of.chunk]
        if target is None:
            return 0  # the loss, whose backward starts from here, or the first stage's backward
        if tensor is None:
            raise ScheduleError(
                f"{of} on rank {self._pp_rank} of the pipeline gave no gradient for the stage "
                "before it; does its input require one?"
            )
        rank, chunk = target
        if rank == self._pp_rank:
            self._inputs[_input_of(kind, chunk, of.microbatch)] = ActionInput(tensor.detach())
            state.arrive(kind, chunk, of.microbatch)
            return 0
        assert self._transport is not None
        peer, microbatch = self._route(rank, of.microbatch)
        action = _input_of(kind, chunk, microbatch)
        log, nbytes = self._log, tensor.nbytes
        start_ns = 0 if log is None else log.now_ns()
        self._transport.send(peer, Label(self._step, action), tensor)
        if log is not None:
            log.sent(action, peer, nbytes, start_ns)
        return nbytes

    def _drain(self, state: RankState) -> None:
        if self._transport is None:
            return
        while (item := self._transport.completions.poll()) is not None:
            self._accept(item, state)

    def _await_arrival(self, state: RankState) -> None:
        if self._transport is None:
            raise ScheduleError(
                f"no action can start and no other rank could change that: {state.describe()}"
            )
        start_ns = time.monotonic_ns()
        if self._log is not None:
            self._log.wait_begins(start_ns, state)
        item = self._transport.completions.wait(start_ns / 1e9 + self._timeout_s)
        if item is None:
            elsewhere = self._agreement.missing()
            raise DeadlineError(
                f"rank {self._pp_rank} of the pipeline waited {self._timeout_s:g} s in step "
                f"{self._step} for {state.missing()}{elsewhere and f' ({elsewhere})'}; look at "
                "those ranks, or raise --pipeline-timeout-s"
            )
        if self._log is not None:
            self._log.wait_ends(item)
        self._accept(item, state, is_awaited=True)

    def _accept(self, item: Item, state: RankState, *, is_awaited: bool = False) -> None:
        step, action = item.label.step, item.label.action
        if step > self._step:
            # Evaluation has no barrier between steps: the first stage may be steps ahead.
            self._early.append(item)
            return
        if isinstance(item, Arrival):
            if step != self._step:
                raise TransportError(
                    f"rank {item.peer} sent {action} of step {step} to rank {self._pp_rank} of the "
                    f"pipeline, which is in step {self._step}; the ranks ran different numbers of "
                    "steps"
                )
            arrived_ns, is_exact = 0, True
            if self._log is not None:
                arrived_ns, is_exact = self._log.arrival(item, is_awaited=is_awaited)
            self._inputs[action] = ActionInput(
                item.take(), item.nbytes, item.peer, arrived_ns, is_exact
            )
        elif step != self._step:
            return  # word about a step that ended: nobody waits for it
        if self._agreement.is_everywhere(item):
            state.arrive(action.kind, action.chunk, action.microbatch)


def _mean_by_chunk(actions: Iterable[tuple[Action, int]]) -> dict[tuple[ActionKind, int], int]:
    """Returns the mean time of each kind of action of each chunk, in nanoseconds."""
    times: dict[tuple[ActionKind, int], list[int]] = {}
    for action, duration_ns in actions:
        times.setdefault((action.kind, action.chunk), []).append(duration_ns)
    return {key: sum(each) // len(each) for key, each in times.items()}


_TRACE_NUMBER = {kind: KINDS.index(kind.value) for kind in ActionKind}
_WAIT, _SEND, _RECEIVE = (KINDS.index(kind) for kind in ("wait", "send", "receive"))
_REASON = {word: number for number, word in enumerate(REASONS)}
_INPUT, _MEMORY, _ORDER, _GROUP = (_REASON[word] for word in ("input", "memory", "order", "group"))
_SEEN, _FOUND = _REASON["seen"], _REASON["found"]

SHORT_NS = 20_000
"""A follower gets every decision from its leader; from here on that is a wait."""


class StepLog:
    """Notes waits, messages and reasons of one step that is traced.

    All times are the host's, of :meth:`now_ns`: on a device the start of the action that takes a
    message is the moment it is launched.

    Args:
        policy: picks the actions.
        num_chunks: chunks of the rank.
    """

    def __init__(self, policy: Policy, num_chunks: int) -> None:
        self._policy = policy
        self._num_chunks = num_chunks
        self._rows: list[SpanRow] = []
        self._since_ns = 0  # of the present wait, 0 if there is none
        self._until_ns = 0
        self._cause = _INPUT
        self._waker = -1
        self._by_group = False  # a member's word ended it

    def now_ns(self) -> int:
        """Returns this moment."""
        return time.monotonic_ns()

    def arrival(self, item: Arrival, *, is_awaited: bool) -> tuple[int, bool]:
        """Returns when an input arrived, or was found, and whether it is the former.

        Not every transport gives that time; what was waited for arrives as it is taken.
        """
        given_ns = item.arrived_ns
        return given_ns or time.monotonic_ns(), is_awaited or given_ns is not None

    def wait_begins(self, now_ns: int, state: RankState) -> None:
        """Notes that nothing can start; a wait that nothing came of goes on."""
        if self._since_ns:
            return
        self._since_ns = now_ns
        self._cause = _INPUT
        ready = state.ready()
        if ready:
            fits = any(state.fits(action) for action in ready)
            self._cause = _ORDER if fits else _MEMORY

    def wait_ends(self, item: Item) -> None:
        """Notes an arrival, which may let an action start."""
        self._until_ns = self.now_ns()
        self._waker = item.peer
        self._by_group = isinstance(item, Notice)

    def decision(self, asked_ns: int, state: RankState) -> None:
        """Notes that the leader's decision came."""
        now_ns = self.now_ns()
        if now_ns - asked_ns < SHORT_NS:
            return
        self.wait_begins(asked_ns, state)
        if self._cause == _ORDER:
            self._cause = _GROUP  # this rank could have gone on
        self._until_ns = now_ns
        self._waker = -1
        self._by_group = True

    def wait_cause(self) -> str:
        """Returns the cause of the wait that goes on, empty if none does or it is not known."""
        return REASONS[self._cause] if self._since_ns else ""

    def begins(self, action: Action, given: ActionInput) -> None:
        """Notes the start of an action with its input."""
        now_ns, peer, arrived_ns = self.now_ns(), given.peer, given.arrived_ns
        kind, chunk, microbatch = _TRACE_NUMBER[action.kind], action.chunk, action.microbatch
        if self._since_ns:
            cause = self._cause
            waker = peer
            if self._by_group and peer >= 0 and arrived_ns <= self._since_ns:
                cause = _GROUP  # the input had been here, but not on all members
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
            reason = _SEEN if given.is_exact else _FOUND
            self._rows.append(
                SpanRow(
                    kind=_RECEIVE,
                    chunk=chunk,
                    microbatch=microbatch,
                    start_ns=arrived_ns,
                    end_ns=now_ns,
                    bytes=given.nbytes,
                    peer=peer,
                    of=kind,
                    reason=reason,
                )
            )

    def sent(self, of: Action, peer: int, nbytes: int, start_ns: int) -> None:
        """Notes that the transport took a message, the input of ``of`` on ``peer``."""
        end_ns = self.now_ns()
        self._rows.append(
            SpanRow(
                kind=_SEND,
                chunk=of.chunk,
                microbatch=of.microbatch,
                start_ns=start_ns,
                end_ns=end_ns,
                bytes=nbytes,
                peer=peer,
                of=_TRACE_NUMBER[of.kind],
            )
        )

    def rows(
        self,
        launched: Sequence[LaunchedAction],
        times: Sequence[tuple[int, int]],
        codes: Sequence[int],
    ) -> list[SpanRow]:
        """Returns all that was noted, and every action, as rows of ``trace.trace_format``.

        Args:
            launched: the actions.
            times: start and end of each, in nanoseconds.
            codes: the actions as ``reasons_of`` takes them.
        """
        reasons = reasons_of(self._policy, codes, self._num_chunks)
        for launch, (start_ns, end_ns), reason in zip(launched, times, reasons, strict=True):
            action = launch.action
            self._rows.append(
                SpanRow(
                    kind=_TRACE_NUMBER[action.kind],
                    chunk=action.chunk,
                    microbatch=action.microbatch,
                    piece=action.piece,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    bytes=launch.nbytes,
                    in_flight_bytes=launch.held_bytes,
                    queue_depth=launch.queue_depth,
                    reason=_REASON[reason],
                )
            )
        return self._rows


class ActivationMeter:
    """Measures what one forward of each chunk keeps for its backward.

    Counts the distinct storages that autograd saves during the first forward of a chunk, without
    those of parameters. Later forwards run unobserved.
    """

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def bytes_of(self, chunk: int) -> int:
        """Bytes of one microbatch of the chunk, 0 before its first forward."""
        return self._bytes.get(chunk, 0)

    def measure(
        self, chunk: int, held: Iterable[torch.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Observes a forward of ``chunk`` unless one was observed before.

        Args:
            chunk: local chunk.
            held: tensors that are there anyway, such as parameters; they do not count.
        """
        return _OBSERVED if chunk in self._bytes else self._observe(chunk, held)

    @contextlib.contextmanager
    def _observe(self, chunk: int, held: Iterable[torch.Tensor]) -> Iterator[None]:
        own = {tensor.untyped_storage().data_ptr() for tensor in held}
        seen: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        self._bytes[chunk] = sum(seen.values())
