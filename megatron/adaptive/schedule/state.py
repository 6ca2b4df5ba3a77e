"""What one rank knows during a step: inputs that are here, actions started and finished, memory.

Owns the rules that hold for every order: an action needs its input, each stage takes its forwards
and its backwards in ascending microbatch order, a backward follows its own forward. It also knows
the graded memory rule (see ``memory``), which a policy may ask for by ``fits``. It decides nothing
(a policy does), sends nothing and measures nothing: executor and simulator report to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind, action_table
from megatron.adaptive.schedule.memory import (
    check_activation_units,
    check_cap,
    default_activation_units,
    with_rounding,
)
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.schedule import check_num_microbatches

__all__ = ["RankState"]


class _Lane:
    """Progress of one kind of action on one local chunk; counts are also next microbatches."""

    __slots__ = ("actions", "arrived", "finished", "started")

    def __init__(self, actions: tuple[Action, ...], *, always_arrived: bool) -> None:
        self.actions = actions
        # One entry more than microbatches, never set: "all started" then reads as "not arrived".
        self.arrived = bytearray(len(actions) + 1)
        if always_arrived:
            self.arrived[:-1] = b"\x01" * len(actions)
        self.started = 0
        self.finished = 0


class RankState:
    """Mutable state of one rank within one step; a new step needs a new one.

    Not thread-safe: its owner (the executor's loop or the simulator) makes every call. All calls
    return at once and cost O(chunks).

    Args:
        placement: the pipeline's stages over its ranks.
        rank: this rank's position in the pipeline.
        num_microbatches: microbatches per step, at least 1.
        activation_units: size of one microbatch's activations per local chunk; default
            ``1 / num_chunks`` each, so that one whole-rank microbatch is 1.
        cap: most activations that ``fits`` grants, in the unit of ``activation_units``; None for
            no limit.
        forward_only: evaluation; there are no backwards and no activations are held.

    Raises:
        ScheduleError: an argument is out of range, or the cap is below the least cap.
    """

    __slots__ = (
        "_backward",
        "_cap",
        "_capped",
        "_chunks",
        "_forward",
        "_in_flight",
        "_last_kind",
        "_num_actions",
        "_num_finished",
        "_num_started",
        "_peak",
        "_room",
        "_units",
        "forward_only",
        "num_microbatches",
        "placement",
        "rank",
    )

    def __init__(
        self,
        *,
        placement: Placement,
        rank: int,
        num_microbatches: int,
        activation_units: Sequence[float] | None = None,
        cap: float | None = None,
        forward_only: bool = False,
    ) -> None:
        check_num_microbatches(num_microbatches)
        num_chunks = placement.num_chunks
        first_stages = [placement.stage_of(rank, chunk) == 0 for chunk in range(num_chunks)]
        if activation_units is None:
            activation_units = default_activation_units(num_chunks)
        check_activation_units(activation_units, num_chunks)
        if cap is not None:
            check_cap(cap, num_chunks=num_chunks, activation_units=activation_units)
        self.placement = placement
        self.rank = rank
        self.num_microbatches = num_microbatches
        self.forward_only = forward_only
        self._chunks = range(num_chunks)
        self._forward = [
            _Lane(actions, always_arrived=first)
            for actions, first in zip(
                action_table(ActionKind.F, num_chunks, num_microbatches), first_stages, strict=True
            )
        ]
        self._backward = [
            _Lane(actions, always_arrived=False)
            for actions in action_table(ActionKind.B, num_chunks, num_microbatches)
        ]
        self._units = tuple(activation_units)
        # What must be free for a forward of each chunk: itself and one of every later chunk.
        self._room = tuple(sum(self._units[chunk:]) for chunk in self._chunks)
        self._cap = cap
        self._capped = with_rounding(cap) if cap is not None and not forward_only else None
        self._in_flight = 0.0
        self._peak = 0.0
        self._num_actions = num_microbatches * num_chunks * (1 if forward_only else 2)
        self._num_started = 0
        self._num_finished = 0
        self._last_kind: ActionKind | None = None

    # What is known

    @property
    def num_actions(self) -> int:
        """Actions of this rank in the whole step."""
        return self._num_actions

    @property
    def num_started(self) -> int:
        """Actions started so far, finished ones included."""
        return self._num_started

    @property
    def num_finished(self) -> int:
        """Actions finished so far."""
        return self._num_finished

    @property
    def last_kind(self) -> ActionKind | None:
        """The kind of the action started last, None before the first."""
        return self._last_kind

    @property
    def done(self) -> bool:
        """True once every action of the step is finished."""
        return self._num_finished == self._num_actions

    @property
    def cap(self) -> float | None:
        """The cap given, None for no limit."""
        return self._cap

    @property
    def in_flight(self) -> float:
        """Activations held: forwards started whose backward has not finished."""
        return self._in_flight

    @property
    def peak_in_flight(self) -> float:
        """The most activations held so far."""
        return self._peak

    def next_microbatch(self, kind: ActionKind, chunk: int) -> int:
        """The microbatch that chunk's next action of that kind works on; all started: their number.

        Raises:
            ScheduleError: W, which this state does not have, or no such chunk.
        """
        return self._lane(kind, chunk).started

    def is_ready(self, action: Action) -> bool:
        """True if the action may start now: its input is here and it is next on its stage.

        Memory is not considered; see ``fits``. An action that does not exist is never ready.
        """
        chunk = action.chunk
        if not 0 <= chunk < len(self._chunks):
            return False
        if action.kind is ActionKind.F:
            lane = self._forward[chunk]
        elif action.kind is ActionKind.B:
            lane = self._backward[chunk]
            if lane.started >= self._forward[chunk].finished:
                return False
        else:
            return False
        return action.microbatch == lane.started and lane.arrived[lane.started] == 1

    def is_possible(self, action: Action) -> bool:
        """True if the action is next on its stage and only has to wait, however long, to be ready.

        False for one that was started, that another must precede, or that does not exist.
        """
        kind, chunk = action.kind, action.chunk
        if not 0 <= chunk < len(self._chunks) or action.microbatch >= self.num_microbatches:
            return False
        if kind is ActionKind.F:
            return action.microbatch == self._forward[chunk].started
        return (
            kind is ActionKind.B
            and not self.forward_only
            and action.microbatch == self._backward[chunk].started
            and action.microbatch < self._forward[chunk].started
        )

    def ready(self) -> tuple[Action, ...]:
        """Every action that may start now: at most one F and one B per chunk.

        Chunks ascend, and F comes before B within a chunk. Memory is not considered.
        """
        found = []
        for chunk in self._chunks:
            forward = self._forward[chunk]
            if forward.arrived[forward.started]:
                found.append(forward.actions[forward.started])
            backward = self._backward[chunk]
            if backward.arrived[backward.started] and backward.started < forward.finished:
                found.append(backward.actions[backward.started])
        return tuple(found)

    def fits(self, action: Action) -> bool:
        """True if the graded memory rule lets the action start: its cap cannot deadlock.

        A forward fits if, once it has started, one microbatch of every later local chunk still
        does. Anything else only frees memory and always fits.
        """
        if self._capped is None or action.kind is not ActionKind.F:
            return True
        return self._in_flight + self._room[action.chunk] <= self._capped

    # What happens

    def arrive(self, kind: ActionKind, chunk: int, microbatch: int) -> None:
        """Note that the input of an action is here; inputs may come early and in any order.

        Not to be called for the first stage's forwards, whose input is the data, nor for the last
        stage's backwards, which start from their own forward's loss. If the neighbouring stage is
        on the same rank, the caller reports the hand-over here too.

        Raises:
            ScheduleError: no such action takes an input, or this one arrived before.
        """
        lane = self._lane(kind, chunk)
        if self._source(kind, chunk) is None or (self.forward_only and kind is not ActionKind.F):
            raise ScheduleError(
                f"rank {self.rank}: {kind}{chunk}-{microbatch} takes no input from another stage,"
                " yet one was reported"
            )
        if not 0 <= microbatch < self.num_microbatches:
            raise ScheduleError(
                f"rank {self.rank}: input of {kind}{chunk}-{microbatch} arrived, but the step has"
                f" {self.num_microbatches} microbatches"
            )
        if lane.arrived[microbatch]:
            raise ScheduleError(
                f"rank {self.rank}: input of {kind}{chunk}-{microbatch} arrived twice"
            )
        lane.arrived[microbatch] = 1

    def start(self, action: Action) -> None:
        """Note that the action starts; a forward takes its memory now.

        The cap is not enforced here: it is a policy's choice to ask ``fits``.

        Raises:
            ScheduleError: the action is not ready.
        """
        if not self.is_ready(action):
            raise ScheduleError(
                f"rank {self.rank}: {action} cannot start: {self.why_not(action)};"
                f" {self.describe()}"
            )
        if action.kind is ActionKind.F:
            self._forward[action.chunk].started += 1
            self._measure()
            self._peak = max(self._peak, self._in_flight)
        else:
            self._backward[action.chunk].started += 1
        self._last_kind = action.kind
        self._num_started += 1

    def finish(self, action: Action) -> None:
        """Note that a started action ended; a backward frees its memory now.

        Raises:
            ScheduleError: the action is not the oldest running one of its kind and chunk.
        """
        lane = self._lane(action.kind, action.chunk)
        if action.microbatch != lane.finished or lane.finished >= lane.started:
            raise ScheduleError(
                f"rank {self.rank}: {action} finished, but it is not the oldest running action of"
                f" its kind and chunk; {self.describe()}"
            )
        lane.finished += 1
        self._num_finished += 1
        if action.kind is ActionKind.B:
            self._measure()
        elif not self.forward_only and self._source(ActionKind.B, action.chunk) is None:
            self._backward[action.chunk].arrived[action.microbatch] = 1

    # What to tell people

    def why_not(self, action: Action) -> str:
        """The reason why an action is not ready, for error messages; ``it is ready`` if it is."""
        kind, chunk, microbatch = action.kind, action.chunk, action.microbatch
        if kind is ActionKind.W or (self.forward_only and kind is ActionKind.B):
            return f"this step has no {kind}"
        if chunk not in self._chunks or not 0 <= microbatch < self.num_microbatches:
            return (
                f"there is no such action with {len(self._chunks)} chunks"
                f" and {self.num_microbatches} microbatches"
            )
        lane = self._lane(kind, chunk)
        if microbatch < lane.started:
            return "it was started before"
        if microbatch > lane.started:
            return f"{lane.actions[lane.started]} comes before it"
        forward = self._forward[chunk]
        if kind is ActionKind.B and microbatch >= forward.finished:
            return f"its own forward {forward.actions[microbatch]} has not finished"
        here = lane.arrived[microbatch]
        return "it is ready" if here else f"its input from {self._sender(kind, chunk)} is not here"

    def missing(self) -> str:
        """What keeps this rank from going on, for messages about a time limit.

        Names, per chunk, the next inputs that are not here with the rank and stage that send them,
        and actions whose input is here but which the cap holds back.
        """
        if self.done:
            return "nothing, every action is finished"
        parts = []
        for chunk in self._chunks:
            forward, backward = self._forward[chunk], self._backward[chunk]
            for lane, limit in (
                (forward, self.num_microbatches),
                (backward, forward.finished),
            ):
                if lane.started >= limit:
                    continue
                action = lane.actions[lane.started]
                if not lane.arrived[lane.started]:
                    parts.append(f"input of {action} from {self._sender(action.kind, chunk)}")
                elif not self.fits(action):
                    parts.append(
                        f"memory for {action} (holds {self._in_flight:g}, cap {self._cap:g})"
                    )
                else:
                    parts.append(f"nothing for {action}, which is ready")
        if self._num_started > self._num_finished:
            parts.append("the end of a running action")
        return ", ".join(parts)

    def describe(self) -> str:
        """One line of state: what is ready, counts, memory."""
        ready = " ".join(str(action) for action in self.ready()) or "nothing"
        cap = "no cap" if self._cap is None else f"cap {self._cap:g}"
        return (
            f"ready: {ready}; {self._num_finished} of {self._num_actions} actions finished,"
            f" {self._in_flight:g} in flight, {cap}"
        )

    def _lane(self, kind: ActionKind, chunk: int) -> _Lane:
        if kind is ActionKind.W or not 0 <= chunk < len(self._chunks):
            raise ScheduleError(
                f"rank {self.rank}: {kind} of chunk {chunk} does not exist: the rank has"
                f" {len(self._chunks)} chunks and does F and whole B"
            )
        return (self._forward if kind is ActionKind.F else self._backward)[chunk]

    def _source(self, kind: ActionKind, chunk: int) -> tuple[int, int] | None:
        if kind is ActionKind.F:
            return self.placement.previous_of(self.rank, chunk)
        return self.placement.next_of(self.rank, chunk)

    def _sender(self, kind: ActionKind, chunk: int) -> str:
        source = self._source(kind, chunk)
        if source is None:
            return "its own stage"
        return f"rank {source[0]} (stage {self.placement.stage_of(*source)})"

    def _measure(self) -> None:
        # Counted afresh each time: adding and taking away fractions would drift.
        if self.forward_only:
            return
        total = 0.0
        for forward, backward, units in zip(
            self._forward, self._backward, self._units, strict=True
        ):
            total += (forward.started - backward.finished) * units
        self._in_flight = total
