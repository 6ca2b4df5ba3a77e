"""Tracks a rank's progress in a step: inputs, started and finished actions, and memory.

``RankState.numbers`` is the list of integers that the functions of ``rank_kernel`` use. Those
functions determine which actions may start; this module adds names, checks and messages. The
docstring of ``rank_kernel`` describes all entries. Its example is rank 1 of 2 in a loop of 2
chunks; F0-0, F0-1 and F1-0 have finished, and B1-0 is running::

    numbers                                  method or property
    IN_FLIGHT      1500000                   in_flight: 1.5 microbatches in all chunks
    STARTED        4                         num_started
    FINISHED       3                         num_finished
    TOTAL          18                        num_actions
    started F      2 1         per chunk     next_action: F0-2, F1-1
    started B      0 1         per chunk     next_action: B0-0, B1-1
    started W      0 0         per chunk     next_action: W0-0, W1-0
    inputs of F    111 100     per chunk     arrive; lacking: F1-1
    inputs of B    000 100     per chunk     arrive

If sequences are cut into slices, ``Action.microbatch`` and the ``microbatch`` arguments count
slices across all microbatches.

The state does not choose actions (policies do), send tensors or measure times. The executor and the
simulator report events to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import rank_kernel
from megatron.adaptive.schedule.action import (
    KINDS,
    NUMBER,
    Action,
    ActionKind,
    SliceCounts,
    action_table,
    item_count,
    mean_slices,
    mirrored,
    place_of,
)
from megatron.adaptive.schedule.memory_caps import lead_of, scaled_cap
from megatron.adaptive.schedule.rank_kernel import HEAD, MEMORY_SCALE, lane_count
from megatron.adaptive.schedule.schedule import check_num_microbatches, check_num_slices
from megatron.adaptive.schedule.stage_placement import Placement, check_frozen_stages


class RankState:
    """Tracks the state of one rank during one step.

    Each step needs a new object.

    The class is not thread-safe: All calls must come from the thread that runs the executor's loop
    or the simulator. No call blocks, and each call takes O(chunks) time.

    Args:
        placement: Assignment of pipeline stages to ranks.
        rank: Pipeline rank, from 0.
        num_microbatches: Number of microbatches per step, at least 1.
        cap: Maximum activation memory that ``fits`` allows, or ``None`` for no limit. The unit is
            the activation memory of one microbatch in all chunks of the rank.
        sizes: Activation memory of each microbatch relative to the mean, or ``None`` if all
            microbatches are equal. With slices, these are the sizes of slices relative to the mean
            slice.
        forward_only: Whether the step is an evaluation, which has no backward passes and keeps no
            activations.
        weight_pieces: Number of W actions into which a microbatch's weight gradients are split, or
            0 if the backward pass computes weight gradients.
        beside: Whether an action may start while an action of another kind communicates.
        num_slices: Number of slices into which each microbatch is cut along the sequence, or 1 for
            whole microbatches.
        frozen_stages: Number of leading pipeline stages through which no gradient flows. They have
            no backward passes, and run at most ``cap`` microbatches ahead of the next stage.

    Attributes:
        num_items: Total number of slices of all microbatches.
        frozen_chunks: Number of chunks of this rank that are frozen stages. These chunks come
            first.

    Raises:
        ScheduleError: An argument is out of range, or the cap is too small for any order of
            actions.
    """

    def __init__(
        self,
        *,
        placement: Placement,
        rank: int,
        num_microbatches: int,
        cap: float | None = None,
        sizes: Sequence[float] | None = None,
        forward_only: bool = False,
        weight_pieces: int = 0,
        beside: bool = False,
        num_slices: SliceCounts = 1,
        frozen_stages: int = 0,
    ) -> None:
        check_num_microbatches(num_microbatches)
        check_frozen_stages(frozen_stages, placement)
        check_num_slices(num_slices, num_microbatches)
        num_items = item_count(num_microbatches, num_slices)
        if sizes is not None and (len(sizes) != num_items or not min(sizes) >= 0):
            subject = _count_of(num_microbatches, num_slices)
            raise ScheduleError(
                f"sizes must contain a non-negative number for each of {subject}, got {len(sizes)}"
            )
        _check_pieces(weight_pieces)
        chunks = placement.num_chunks
        stages = [placement.stage_of(rank, chunk) for chunk in range(chunks)]
        sizes = () if sizes is None or forward_only or len(set(sizes)) == 1 else sizes
        if not sizes and not isinstance(num_slices, int):
            sizes = (float(not forward_only),) * num_items
        largest = max(1.0, *whole_sizes(sizes, num_slices)) if sizes else 1.0
        most = rank_kernel.NO_CAP if cap is None else scaled_cap(cap, chunks, largest)
        self.placement = placement
        self.rank = rank
        self.num_microbatches = num_microbatches
        self.num_slices = num_slices
        self.num_items = num_items
        self.forward_only = forward_only
        self.weight_pieces = 0 if forward_only else weight_pieces
        self.cap = cap
        self._frozen_stages = 0 if forward_only else frozen_stages
        self.frozen_chunks = sum(stage < self._frozen_stages for stage in stages)
        last = placement.num_stages - 1
        # Whether the input comes from another stage, for each kind and chunk.
        self._takes = (
            *(stage > 0 for stage in stages),
            *(stage < last and not forward_only for stage in stages),
            *(False for _ in stages),
        )
        self.numbers = self._first_numbers(stages, sizes)
        self.numbers[rank_kernel.BESIDE] = int(beside and not forward_only)
        self.numbers[rank_kernel.CAP] = rank_kernel.NO_CAP if forward_only else most
        self.numbers[rank_kernel.LEAD] = lead_of(cap, num_items, num_slices)
        self._actions = (
            *action_table(ActionKind.F, chunks, num_microbatches, 1, num_slices),
            *action_table(ActionKind.B, chunks, num_microbatches, 1, num_slices),
            *action_table(
                ActionKind.W, chunks, num_microbatches, max(1, weight_pieces), num_slices
            ),
        )

    def _first_numbers(self, stages: Sequence[int], sizes: Sequence[float]) -> list[int]:
        """Returns the initial list ``numbers`` of a step. BESIDE, CAP and LEAD are not set yet.

        Args:
            stages: Stage of each chunk.
            sizes: Relative size of each microbatch or slice, or empty if all sizes are equal.
        """
        chunks = len(stages)
        num_items = self.num_items
        forward_only = self.forward_only
        s = [0] * (HEAD + chunks * (rank_kernel.FLAGS + 2 * num_items))
        s[rank_kernel.LAST] = -1
        s[rank_kernel.CHUNKS] = chunks
        s[rank_kernel.ITEMS] = num_items
        s[rank_kernel.SLICES] = self.num_slices if isinstance(self.num_slices, int) else 0
        s[rank_kernel.PIECES] = self.weight_pieces
        s[rank_kernel.RANKS] = self.placement.num_ranks
        s[rank_kernel.TURNED] = int(self.placement.kind == "v")
        s[rank_kernel.RANK] = self.rank
        # Only chunks that run backward passes keep activations.
        trained = chunks - self.frozen_chunks
        backward = 0 if forward_only else trained * (1 + self.weight_pieces)
        s[rank_kernel.TOTAL] = num_items * (chunks + backward)
        s[rank_kernel.FROZEN] = self.frozen_chunks
        for chunk in range(self.frozen_chunks):
            s[HEAD + rank_kernel.B * chunks + chunk] = num_items
            s[HEAD + rank_kernel.W * chunks + chunk] = num_items * self.weight_pieces
        mean = mean_slices(self.num_slices)
        s[rank_kernel.UNIT] = 0 if forward_only else _scaled(1.0, max(1, trained), mean)
        ends_here = not forward_only and self.placement.num_stages - 1 in stages
        s[rank_kernel.LAST_CHUNK] = chunks - 1 if ends_here else -1
        # The inputs of the first stage are the data, which never arrive as messages.
        if stages[0] == 0:
            flags = HEAD + rank_kernel.FLAGS * chunks
            s[flags : flags + num_items] = [1] * num_items
        if sizes:
            s[rank_kernel.SIZED] = 1
            s += [_scaled(size, max(1, trained), mean) for size in sizes]
        if not isinstance(self.num_slices, int):
            positions = [place_of(item, self.num_slices) for item in range(num_items)]
            s += [item - position.part for item, position in enumerate(positions)]
            s += [item - position.part + position.slices for item, position in enumerate(positions)]
        return s

    @property
    def num_actions(self) -> int:
        """Returns the number of actions of this rank in the step."""
        return self.numbers[rank_kernel.TOTAL]

    @property
    def num_started(self) -> int:
        """Returns the number of actions started so far, including finished actions."""
        return self.numbers[rank_kernel.STARTED]

    @property
    def num_finished(self) -> int:
        """Returns the number of actions finished so far."""
        return self.numbers[rank_kernel.FINISHED]

    @property
    def done(self) -> bool:
        """Returns whether all actions of the step have finished."""
        return self.numbers[rank_kernel.FINISHED] == self.numbers[rank_kernel.TOTAL]

    @property
    def beside(self) -> bool:
        """Returns whether an action may start while an action of another kind communicates."""
        return self.numbers[rank_kernel.BESIDE] == 1

    @property
    def in_flight(self) -> float:
        """Returns the activation memory that the rank currently holds, in the unit of ``cap``."""
        return self.numbers[rank_kernel.IN_FLIGHT] / MEMORY_SCALE

    @property
    def peak_in_flight(self) -> float:
        """Returns the maximum activation memory that the rank has held, in the unit of ``cap``."""
        return self.numbers[rank_kernel.PEAK] / MEMORY_SCALE

    def is_ready(self, action: Action) -> bool:
        """Returns whether ``action`` is next on its stage and its input has arrived.

        Memory is not checked (see ``fits``). An action that does not exist is never ready.
        """
        s = self.numbers
        number = NUMBER[action.kind]
        chunk = action.chunk
        return (
            0 <= chunk < s[rank_kernel.CHUNKS]
            and s[HEAD + number * s[rank_kernel.CHUNKS] + chunk] == self._index(action)
            and rank_kernel.is_ready(s, number, chunk)
        )

    def is_possible(self, action: Action) -> bool:
        """Returns whether ``action`` will become ready even if this rank starts no other action.

        Returns False if the action is not the next action of its kind and chunk, does not exist, or
        must follow an action that has not started.
        """
        kind = action.kind
        chunk = action.chunk
        microbatch = action.microbatch
        if not (self._has(kind, chunk) and 0 <= microbatch < self.num_items):
            return False
        number = NUMBER[kind]
        if lane_count(self.numbers, number, chunk) != self._index(action):
            return False
        started = lane_count(self.numbers, number - 1, chunk) if number else self.num_items
        return self._needed(action) <= started

    def ready(self) -> tuple[Action, ...]:
        """Returns all actions that can start now, at most one per kind and chunk.

        The actions are sorted by chunk, and within a chunk in the order F, B, W. Memory is not
        checked.
        """
        s = self.numbers
        return tuple(
            self.next_action(kind, chunk)
            for chunk in range(self.placement.num_chunks)
            for kind in (rank_kernel.F, rank_kernel.B, rank_kernel.W)
            if rank_kernel.is_ready(s, kind, chunk)
        )

    def next_action(self, kind: int, chunk: int) -> Action:
        """Returns the next action of ``chunk`` with the kind ``kind``, which is an integer."""
        chunks = self.placement.num_chunks
        return self._actions[kind * chunks + chunk][lane_count(self.numbers, kind, chunk)]

    def fits(self, action: Action) -> bool:
        """Returns whether the memory limit allows ``action`` to start (see ``memory_caps``).

        To prevent deadlocks, a forward pass must leave enough memory for one microbatch in every
        later chunk of this rank. Other actions free memory and always fit.
        """
        return action.kind is not ActionKind.F or rank_kernel.fits(self.numbers, action.chunk)

    def acknowledged(self, action: Action) -> tuple[int, int] | None:
        """Returns the rank and chunk of the frozen stage that gets an acknowledgment of ``action``.

        Returns ``None`` if ``action`` is not an F directly after a frozen stage. The result is also
        ``None`` for the last outputs of the frozen stage, because that stage runs no later F that
        would wait for an acknowledgment.
        """
        if action.kind is not ActionKind.F or not self._frozen_stages:
            return None
        stage = self.placement.stage_of(self.rank, action.chunk)
        is_awaited = action.microbatch + self.numbers[rank_kernel.LEAD] < self.num_items
        if not (0 < stage <= self._frozen_stages and is_awaited):
            return None
        return self.placement.locate(stage - 1)

    def is_acknowledgment(self, action: Action) -> bool:
        """Returns whether the message for ``action`` only acknowledges an output of this rank."""
        return action.kind is ActionKind.B and action.chunk < self.frozen_chunks

    def untaken(self, action: Action) -> Action | None:
        """Returns the F whose output must be acknowledged before the F ``action`` may start.

        The next stage sends the acknowledgment. Returns ``None`` unless ``action`` is the next F of
        a frozen chunk, and the chunk is as far ahead of the next stage as the cap allows.
        """
        chunk = action.chunk
        if action.kind is not ActionKind.F or chunk >= self.frozen_chunks:
            return None
        taken = lane_count(self.numbers, rank_kernel.B + rank_kernel.DONE, chunk)
        is_ahead = action.microbatch - taken >= self.numbers[rank_kernel.LEAD]
        return Action(ActionKind.F, chunk, taken) if is_ahead else None

    def sends_gradient(self, chunk: int) -> bool:
        """Returns whether the B of ``chunk`` sends a gradient to the previous stage."""
        if not self._frozen_stages:
            return True
        return self.placement.stage_of(self.rank, chunk) > self._frozen_stages

    def arrive(self, kind: ActionKind, chunk: int, microbatch: int) -> None:
        """Records that the input of an action has arrived.

        The action is the F or B (``kind``) of ``chunk`` for ``microbatch``.

        Inputs may arrive in any order, and earlier than they are needed. A frozen chunk runs no B.
        For such a chunk, an arrival with the kind B means that the next stage has acknowledged an
        output of the chunk.

        Do not call this for forward passes of the first stage, whose input is the data, or for
        backward passes of the last stage, which start from the loss. If the neighbouring stage is
        on the same rank, the caller must also report that stage's result as an arrival.

        Raises:
            ScheduleError: The action has no input from another stage, or its input has already
                arrived.
        """
        s = self.numbers
        number = NUMBER[kind]
        chunks = self.placement.num_chunks
        if not (0 <= chunk < chunks and self._takes[number * chunks + chunk]):
            problem = "was reported, but this action takes no input from another stage"
        elif not 0 <= microbatch < self.num_items:
            problem = f"arrived, but the step has {self._count()}"
        elif s[
            HEAD
            + rank_kernel.FLAGS * chunks
            + (number * chunks + chunk) * self.num_items
            + microbatch
        ]:
            problem = "arrived twice"
        else:
            rank_kernel.arrive(s, number, chunk, microbatch)
            return
        name = self._name(Action(kind, chunk, microbatch))
        raise ScheduleError(f"rank {self.rank}: input of {name} {problem}")

    def start(self, action: Action) -> bool:
        """Records that ``action`` starts, if it is ready.

        The start of a forward pass allocates its memory.

        The cap is not enforced here, because policies check it with ``fits``.

        Returns:
            True if the action was ready and has started. If False, :meth:`why_not` returns the
            reason.
        """
        ready = self.is_ready(action)
        if ready:
            rank_kernel.start(self.numbers, NUMBER[action.kind], action.chunk)
        return ready

    def finish(self, action: Action) -> None:
        """Records that ``action`` has finished, and frees the memory that it no longer needs.

        Raises:
            ScheduleError: The action is not the oldest running action of its kind and chunk.
        """
        s = self.numbers
        number = NUMBER[action.kind]
        chunk = action.chunk
        if not (
            0 <= chunk < s[rank_kernel.CHUNKS]
            and lane_count(s, number + rank_kernel.DONE, chunk)
            == self._index(action)
            < lane_count(s, number, chunk)
        ):
            raise ScheduleError(
                f"rank {self.rank}: {self._name(action)} finished, but it is not the oldest running"
                f" action of its kind and chunk; {self.describe()}"
            )
        rank_kernel.finish(s, number, chunk)

    def why_not(self, action: Action) -> str:
        """Returns the reason why ``action`` is not ready, for error messages.

        Returns ``it is ready`` if the action is ready.
        """
        s = self.numbers
        number = NUMBER[action.kind]
        chunk = action.chunk
        if not self._has(action.kind):
            return f"this step has no {action.kind}"
        pieces = max(1, self.weight_pieces) if number == rank_kernel.W else 1
        if not (
            self._has(action.kind, chunk)
            and 0 <= action.microbatch < self.num_items
            and 0 <= action.piece < pieces
        ):
            return (
                f"there is no such action with {self.placement.num_chunks} chunks"
                f" and {self._count()}"
            )
        if number and chunk < self.frozen_chunks:
            return "no gradient flows through its stage"
        started = lane_count(s, number, chunk)
        if self._index(action) < started:
            return "it has already started"
        if self._index(action) > started:
            return f"{self._name(self.next_action(number, chunk))} comes before it"
        if number and self._needed(action) > lane_count(s, number - 1 + rank_kernel.DONE, chunk):
            kind = "forward" if number == rank_kernel.B else "backward"
            before = Action(KINDS[number - 1], chunk, self._before(action))
            whose = "its own" if before.microbatch == action.microbatch else "its last slice's"
            return f"{whose} {kind} {self._name(before)} has not finished"
        if s[rank_kernel.BUSY + number]:
            return f"another {action.kind} is running"
        if rank_kernel.is_ready(s, number, chunk):
            return "it is ready"
        if (untaken := self.untaken(action)) is not None:
            stage = self.placement.stage_of(self.rank, chunk) + 1
            return f"stage {stage} has not acknowledged the output of {self._name(untaken)}"
        return f"its input from {self._sender(action)} has not arrived"

    def missing(self) -> str:
        """Returns a description of everything that this rank is waiting for, for timeout errors.

        For each chunk, the text lists the next inputs that have not arrived, with the rank and
        stage that send them. It also lists actions whose input has arrived but which would exceed
        the cap.
        """
        if self.done:
            return "nothing, every action is finished"
        parts = []
        for action, has_input in self._next_actions():
            untaken = self.untaken(action)
            if untaken is not None:
                stage = self.placement.stage_of(self.rank, action.chunk) + 1
                parts.append(f"stage {stage} to acknowledge the output of {self._name(untaken)}")
            elif not has_input:
                parts.append(f"input of {self._name(action)} from {self._sender(action)}")
            elif not self.fits(action):
                name = self._name(action)
                parts.append(f"memory for {name} (holds {self.in_flight:g}, cap {self.cap:g})")
            else:
                parts.append(f"nothing for {self._name(action)}, which is ready")
        if self.num_started > self.num_finished:
            parts.append("the end of a running action")
        return ", ".join(parts) or "nothing (weight gradients are ready)"

    def lacking(self) -> list[Action]:
        """Returns the next F and the next B of each chunk if their input has not arrived."""
        return [action for action, has_input in self._next_actions() if not has_input]

    def _next_actions(self) -> Iterator[tuple[Action, bool]]:
        """Yields the next F and the next B of each chunk, and whether its input has arrived."""
        for chunk in range(self.placement.num_chunks):
            forwards = lane_count(self.numbers, rank_kernel.F + rank_kernel.DONE, chunk)
            whole = forwards
            if forwards < self.num_items:
                whole -= place_of(forwards, self.num_slices).part
            limits = (self.num_items, 0 if self.forward_only else whole)
            for number, limit in enumerate(limits):
                under_way = self.numbers[rank_kernel.BUSY + number]
                if not under_way and lane_count(self.numbers, number, chunk) < limit:
                    is_ready = rank_kernel.is_ready(self.numbers, number, chunk)
                    yield self.next_action(number, chunk), bool(is_ready)

    def describe(self) -> str:
        """Returns a line with the ready actions, the finished actions and the activation memory."""
        ready = " ".join(map(self._name, self.ready())) or "nothing"
        cap = "no cap" if self.cap is None else f"cap {self.cap:g}"
        return (
            f"ready: {ready}; {self.num_finished} of {self.num_actions} actions finished,"
            f" {self.in_flight:g} in flight, {cap}"
        )

    def _has(self, kind: ActionKind, chunk: int = 0) -> bool:
        if not 0 <= chunk < self.placement.num_chunks:
            return False
        if kind is ActionKind.W:
            return self.weight_pieces > 0
        return kind is ActionKind.F or not self.forward_only

    def _index(self, action: Action) -> int:
        """Returns the index of ``action`` among all actions of its kind and chunk."""
        if action.kind is ActionKind.F:
            return action.microbatch
        index = mirrored(action.microbatch, self.num_slices)
        if action.kind is ActionKind.W:
            return index * self.weight_pieces + action.piece
        return index

    def _before(self, action: Action) -> int:
        """Returns the index of the slice or microbatch that must be finished before ``action``.

        A B needs the F of the last slice of its microbatch, and a W needs the B of the same slice.
        """
        if action.kind is ActionKind.W:
            return action.microbatch
        _, part, count = place_of(action.microbatch, self.num_slices)
        return action.microbatch - part + count - 1

    def _needed(self, action: Action) -> int:
        """Returns the number of actions that must finish before ``action``.

        Only actions of the same chunk count: F actions for a B, and B actions for a W.

        The result is 0 for an F.
        """
        if action.kind is ActionKind.F:
            return 0
        last = self._before(action)
        return 1 + (mirrored(last, self.num_slices) if action.kind is ActionKind.W else last)

    def _name(self, action: Action) -> str:
        return action.label(self.num_slices)

    def _count(self) -> str:
        return _count_of(self.num_microbatches, self.num_slices)

    def _sender(self, action: Action) -> str:
        source = self.placement.source_of(action.kind, self.rank, action.chunk)
        if source is None:
            return "its own stage"
        return f"rank {source[0]} (stage {self.placement.stage_of(*source)})"


def _check_pieces(weight_pieces: int) -> None:
    if weight_pieces < 0:
        raise ScheduleError(
            "the number of W actions per weight gradient must not be negative, got"
            f" {weight_pieces}; use 0 if backward passes compute weight gradients"
        )


def _count_of(num_microbatches: int, num_slices: SliceCounts) -> str:
    """Describes the number of microbatches, and of slices if ``num_slices`` is not 1."""
    text = f"{num_microbatches} microbatches"
    if num_slices == 1:
        return text
    if isinstance(num_slices, int):
        return f"{text} of {num_slices} slices"
    return f"{text} of {min(num_slices)} to {max(num_slices)} slices"


def _scaled(size: float, num_chunks: int, num_slices: float) -> int:
    """Converts ``size`` to the integer memory of a microbatch or slice in one of the rank's chunks.

    The result is rounded down if there are slices. Otherwise, the sum of many rounded sizes could
    exceed the minimum cap, which must have room for all slices of the largest microbatch.
    """
    exact = MEMORY_SCALE * size / num_chunks
    return round(exact) if num_slices == 1 else int(exact / num_slices)


def whole_sizes(sizes: Sequence[float], num_slices: SliceCounts) -> list[float]:
    """Returns the size of each microbatch, relative to the mean microbatch.

    Args:
        sizes: Size of each slice relative to the mean slice.
        num_slices: Number of slices of each microbatch.
    """
    mean = mean_slices(num_slices)
    whole = [0.0] * (1 + place_of(len(sizes) - 1, num_slices).microbatch)
    for item, size in enumerate(sizes):
        whole[place_of(item, num_slices).microbatch] += size
    return [size / mean for size in whole]
